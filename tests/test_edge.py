"""The edge of the command line: files that cannot be used, outputs that nobody can write to."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs_kit import DEADLINE_SECONDS, Run

from supervisor import cli, contract

Answer = tuple[int, str, str]
Command = Callable[..., Answer]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path_factory.mktemp("finished"))) as made:
        assert made.finish() == 0
        yield made


@pytest.fixture
def supervisor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Runs one command in this process, with runs/ in an empty directory."""
    monkeypatch.setenv("SUPERVISOR_RUNS", str(tmp_path / "runs"))

    def command(*arguments: str) -> Answer:
        monkeypatch.setattr("sys.argv", ["supervisor", *arguments])
        return (cli.main(), *capsys.readouterr())

    return command


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["start", "--config", "CONFIG", "--set", "run.directory=FILE"],
        ["start", "--config", "CONFIG", "--set", "run.directory=FILE/below"],
        ["start", "--config", "CONFIG", "--set", "run.directory=FILE/below", "--detach"],
        ["fork", "RUN", "--at-step", "10", "FILE/below"],
        ["history", "RUN", "--output", "FILE/below"],
        ["replay", "RUN", "--from", "10", "--scratch", "NOWHERE"],
        ["replay", "RUN", "--from", "10", "--scratch", "FILE"],
        ["import", "FILE"],
    ],
    ids=" ".join,
)
def test_a_place_that_cannot_be_used_is_one_line_with_its_name(
    finished: Run, supervisor: Command, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "file").touch()
    places = {
        "CONFIG": str(finished.config),
        "RUN": str(finished.directory),
        "NOWHERE": str(tmp_path / "nowhere"),
        "FILE": str(tmp_path / "file"),
    }
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    code, out, err = supervisor(*words)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert ".tmp-" not in err
    assert str(tmp_path) in err


def refuse(path: Path) -> object:
    raise PermissionError(13, "Permission denied", str(path))


def test_a_run_that_may_not_be_read_is_one_line(
    finished: Run, supervisor: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.status.read_status", refuse)
    code, out, err = supervisor("status", str(finished.directory))
    assert (code, out) == (2, "")
    assert err.startswith(f"supervisor: {finished.directory}: Permission denied; ")
    assert err.count("\n") == 1


def test_a_run_without_its_settings_is_one_line(supervisor: Command, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    for words in (["status", "--config"], ["fork", "new", "--at-step", "1"]):
        code, _, err = supervisor(words[0], str(tmp_path), *words[1:])
        assert code == 2
        assert err.startswith(f"supervisor: {tmp_path / 'run.toml'}: ")


def test_an_error_of_a_file_without_its_name_is_ours(
    finished: Run, supervisor: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless(path: Path) -> object:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("supervisor.status.read_status", nameless)
    code, _, err = supervisor("status", str(finished.directory))
    assert (code, "Traceback" in err) == (70, True)


def test_the_list_leaves_out_what_cannot_be_read(
    supervisor: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("anna", "berta", "carla"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "journal.jsonl").touch()
    (tmp_path / "runs" / "berta" / "status.json").mkdir()
    real = Path.is_file

    def is_file(path: Path) -> bool:
        return bool(refuse(path)) if path.parent.name == "carla" else real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    code, out, err = supervisor("list")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["anna"])
    assert [line.split(":")[1] for line in err.splitlines()] == [" left out"] * 2
    assert "Permission denied" in err


@pytest.mark.parametrize(
    "words",
    [
        "policy check FILE --pulls 0",
        "policy check FILE --pulls -1",
        "stop --timeout -1",
        "pivot --policy FILE --timeout nan",
        "samples -n -1",
        "logs --attempt 0",
        "checkpoints show -- -1",
        "policy show --epoch 0",
        "rollback --to-step -1",
        "replay --from -1",
        "replay --from 0 --to -1",
        "fork new --at-step -1",
        "fork new --at-step 0",
    ],
)
def test_a_number_that_means_nothing_is_a_usage_error(supervisor: Command, words: str) -> None:
    code, _, err = supervisor(*words.split())
    assert (code, "Invalid value for" in err) == (2, True), err


def test_what_is_said_of_going_on_can_be_done(tmp_path: Path) -> None:
    """Also by whoever gave settings as flags, which no file has."""
    with contextlib.closing(Run(tmp_path)) as run:
        assert run.finish("--set", "checkpoint.every=7") == 0
        (line,) = [line for line in run.output().splitlines() if line.startswith("to train on: ")]
        words = line.removeprefix("to train on: supervisor ").split()
        assert words == [
            *("start", "--config", str(run.directory / "run.toml")),
            *("--set", "training.steps=60"),
        ]
        assert run.supervisor(*words).returncode == 0
        assert run.file_status()["step"] == 60
        refused = run.supervisor(*words[:-1], "training.steps=59")
        assert refused.returncode == 2
        assert "recorded 60, requested 59; it may only grow" in refused.stderr


def test_what_is_said_of_a_run_can_be_done_wherever_it_lies_and_whoever_stopped_it(
    tmp_path: Path,
) -> None:
    """A start as recorded, of a run that is to stay stopped, goes on by another command."""

    def said(text: str, words: str) -> list[str]:
        (line,) = [line for line in text.splitlines() if line.startswith(words)]
        return [one.removeprefix("supervisor ") for one in line.removeprefix(words).split("; ")]

    def does(words: str) -> int:
        return run.supervisor(*shlex.split(words)).returncode

    home = tmp_path / "a place"
    home.mkdir()
    with contextlib.closing(Run(home)) as run:
        process = run.hold(12)
        assert run.ask("stop").outcome == "done"
        assert run.end(process) == 0
        run.open_gate()
        assert run.finish("--as-recorded") == 0
        (go_on,) = said(run.output(), "to go on: ")
        assert does(go_on) == 0
        assert run.file_status()["step"] == 30
        assert run.finish() == 0
        status, samples, _ = said(run.output(), "to see more: ")
        assert (does(status), does(samples)) == (3, 0)
        branch = run.supervisor("fork", str(run.directory), "branch", "--at-step", "20")
        run.gate(25)
        (train_on,) = said(branch.stdout, "to train on: ")
        started = run.supervisor(*shlex.split(train_on), "--detach")
        assert started.returncode == 0
        _, logs = said(started.stdout, "to watch it: ")
        assert does(logs.removesuffix(" -f")) == 0
        assert does("stop branch") == 0


@pytest.mark.parametrize("words", ["policy check FILE", "policy diff FILE", "pivot --policy FILE"])
def test_a_full_disk_is_no_mistake_in_a_policy(
    finished: Run, supervisor: Command, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("supervisor.pivot.propose", full)
    told = supervisor(*words.split(), str(finished.directory))
    assert told == (74, "", "supervisor: No space left on device\n")


@pytest.mark.parametrize("detached", [[], ["--detach"]], ids=["", "detached"])
def test_a_directory_of_somebody_else_is_no_new_run(
    finished: Run, supervisor: Command, tmp_path: Path, detached: list[str]
) -> None:
    (tmp_path / "step_000010.bin").touch()
    place = ["--set", f"run.directory={tmp_path}"]
    code, _, err = supervisor("start", "--config", str(finished.config), *place, *detached)
    assert code == 2
    assert f"supervisor import {tmp_path}" in err
    assert [path.name for path in tmp_path.iterdir()] == ["step_000010.bin"]


@pytest.mark.parametrize(
    ("module", "words"),
    [("import_run", "import FOLDER"), ("fork", "fork RUN new --at-step 10")],
    ids=["import", "fork"],
)
def test_what_is_terminated_half_way_leaves_nothing(
    finished: Run, tmp_path: Path, module: str, words: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        f"from supervisor import {module}\n"
        f"{module}.fsync_directory = lambda place: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(finished.directory / contract.CHECKPOINTS / "step_000010.bin", folder)
    places = {"FOLDER": str(folder), "RUN": str(finished.directory)}
    done = finished.supervisor(
        *(places.get(word, word) for word in words.split()),
        SUPERVISOR_RUNS=str(tmp_path / "runs"),
        PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert list((tmp_path / "runs").iterdir()) == []


# --- outputs --------------------------------------------------------------------------------------


def run_into(run: Run, *words: str, out: str, err: str = "") -> tuple[int, bytes]:
    """The exit code and stderr of a command that writes to a full device or a closed pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    ends = {"closed": writer, "full": full, "": subprocess.PIPE}
    with subprocess.Popen(
        run.command(*words),
        stdin=subprocess.DEVNULL,
        stdout=ends[out],
        stderr=ends[err],
        env=run.variables(),
    ) as process:
        os.close(writer)
        os.close(full)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, errors or b""


@pytest.mark.parametrize(
    "words",
    [["list"], ["status", "run"], ["status", "run", "--config"], ["history", "run"], ["--help"]],
    ids=" ".join,
)
def test_a_command_that_prints_ends_quietly_when_nobody_reads(
    finished: Run, words: list[str]
) -> None:
    assert run_into(finished, *words, out="closed") == (141, b"")


@pytest.mark.parametrize("words", [["list"], ["status", "run"], ["history", "run"]], ids=" ".join)
def test_a_full_device_is_one_line(finished: Run, words: list[str]) -> None:
    code, errors = run_into(finished, *words, out="full")
    assert (code, errors) == (74, b"supervisor: No space left on device\n")


def test_the_exit_code_of_a_run_is_that_of_the_run_whoever_reads(tmp_path: Path) -> None:
    for out in ("closed", "full"):
        home = tmp_path / out
        home.mkdir()
        with contextlib.closing(Run(home)) as run:
            words = ["start", "--config", str(run.config)]
            code, errors = run_into(run, *words, out=out)
            assert code == 0, errors
            assert b"Traceback" not in errors
            assert run_into(run, *words, out=out, err=out)[0] == 0
            assert run_into(run, "start", "--config", "nowhere.toml", out=out, err=out)[0] == 2
