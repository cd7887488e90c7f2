"""The commands: what they print, and the exit code that scripts go by."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import click
import pytest
from checkpoint_kit import write_checkpoint
from runs_kit import DEADLINE_SECONDS, Run, kill, wait_until

from supervisor import checkpoints, cli, client, contract, start, view_commands
from supervisor.contract import ExitCode, Json

ROOT = Path(__file__).parent.parent


class Done(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def supervisor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Runs one command in this process, with runs/ in an empty directory."""
    monkeypatch.setenv("SUPERVISOR_RUNS", str(tmp_path / "runs"))

    def command(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["supervisor", *arguments])
        code = cli.main()
        return Done(code, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that crashed once and was then stopped at step 25."""
    with contextlib.closing(Run(tmp_path_factory.mktemp("stopped"))) as made:
        made.faults = "crash3@13#1,wrong@12#2"
        process = made.hold(25)
        assert made.ask("stop").outcome == "done"
        assert made.end(process) == 0
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


# --- status ---------------------------------------------------------------------------------------


def test_status_of_a_stopped_run(stopped: Run, supervisor: Command) -> None:
    done = supervisor("status", str(stopped.directory))
    assert done.code == 3
    assert "run: not running, phase stopped (stopped as asked)" in done.out
    assert "step        25 of 30" in done.out
    assert "checkpoint  step 25, verified" in done.out
    assert "last exit   stopped (code 0)" in done.out
    assert "replay      1 steps executed again and equal, 1 diverged (first: 12)" in done.out
    assert "ALARM       replay_diverged: step 12" in done.out


def test_status_of_a_living_run_and_of_a_dead_one(run: Run, supervisor: Command) -> None:
    process = run.hold(12)
    found = supervisor("status", str(run.directory), "--json")
    assert (found.code, json.loads(found.out)["phase"]) == (0, "running")
    assert supervisor("status", str(run.directory)).out.startswith("run: running, phase running")
    run.kill_supervisor(process)
    dead = supervisor("status", str(run.directory), "--json")
    status = json.loads(dead.out)
    assert dead.code == 1
    assert status["supervisor_pid"] is None
    kill(status["trainer_pid"])
    wait_until(
        lambda: (
            json.loads(supervisor("status", str(run.directory), "--json").out)["trainer_pid"]
            is None
        ),
        "a status that knows of the trainer's death",
    )


def test_status_of_a_run_that_never_came_to_one_is_unknown(
    tmp_path: Path, supervisor: Command
) -> None:
    (tmp_path / "journal.jsonl").touch()
    assert supervisor("status", str(tmp_path)).code == 4


def test_status_names_the_origin_of_each_setting(stopped: Run, supervisor: Command) -> None:
    done = supervisor("status", str(stopped.directory), "--config")
    assert done.code == 0
    assert "training.steps = 30  (file)" in done.out
    found = json.loads(supervisor("status", str(stopped.directory), "--config", "--json").out)
    assert found["settings"]["training.steps"] == {"value": 30, "origin": "file"}
    assert len(found["settings"]) == done.out.count("\n")


def test_a_run_that_does_not_exist_is_told_with_those_that_do(
    tmp_path: Path, supervisor: Command
) -> None:
    for name in ("anna", "berta"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "journal.jsonl").touch()
    done = supervisor("status", "carla")
    assert done.code == 2
    assert "no run 'carla'" in done.err
    assert "anna, berta" in done.err


def test_without_a_run_the_first_start_is_named(supervisor: Command) -> None:
    assert "supervisor start --config FILE" in supervisor("status").err
    assert "supervisor start --config FILE" in supervisor("list").out


# --- the other views ------------------------------------------------------------------------------


def test_list_shows_each_run(
    stopped: Run, supervisor: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERVISOR_RUNS", str(stopped.home))
    done = supervisor("list", "--json")
    (row,) = json.loads(done.out)["runs"]
    assert (row["run"], row["state"], row["step"]) == ("run", "not running", 25)
    assert "run" in supervisor("list").out
    # Without a name it is the run that ran last.
    assert supervisor("status").code == 3


def test_logs_are_those_of_the_attempt(stopped: Run, supervisor: Command) -> None:
    directory = str(stopped.directory)
    assert supervisor("logs", directory, "--attempt", "1").out == "the saboteur crashes\n"
    assert supervisor("logs", directory).out == ""
    assert "attempt 2 begins from step 10" in supervisor("logs", directory, "--supervisor").out
    assert supervisor("logs", directory, "--supervisor", "-n", "1").out.count("\n") == 1
    missing = supervisor("logs", directory, "--attempt", "7")
    assert (missing.code, "there are [1, 2]" in missing.err) == (2, True)


def test_samples_are_shown_and_cannot_drive_the_terminal(
    stopped: Run, supervisor: Command, tmp_path: Path
) -> None:
    done = supervisor("samples", str(stopped.directory), "-n", "2")
    assert done.out.splitlines() == ["step      20 | The step 20", "step      25 | The step 25"]
    rows = json.loads(supervisor("samples", str(stopped.directory), "--json").out)["samples"]
    assert [row["step"] for row in rows] == [10, 20, 25]
    (tmp_path / "journal.jsonl").touch()
    hostile: Json = {"step": 1, "prompt": "\x1b[2J", "text": "\x07\n"}
    (tmp_path / contract.samples_name(tmp_path.name)).write_text(json.dumps([hostile]))
    shown = supervisor("samples", str(tmp_path)).out
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_a_checkpoint_that_goes_while_they_are_listed_is_not_shown(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    (found,) = checkpoints.find(tmp_path)
    assert view_commands._checkpoint_row(found) is not None
    found.binary.unlink()
    assert view_commands._checkpoint_row(found) is None


def test_checkpoints_are_listed_and_shown(stopped: Run, supervisor: Command) -> None:
    directory = str(stopped.directory)
    rows = json.loads(supervisor("checkpoints", "list", directory, "--json").out)["checkpoints"]
    assert [(row["step"], row["reason"], row["attempt"]) for row in rows] == [
        (10, "cadence", 1),
        (20, "cadence", 2),
        (25, "operator", 2),
    ]
    assert supervisor("checkpoints", "list", directory).out.count("\n") == 3
    shown = json.loads(supervisor("checkpoints", "show", "20", directory, "--json").out)
    assert (shown["step"], shown["parameters"], shown["size_bytes"]) == (20, 6, 80)
    assert "[6]" in supervisor("checkpoints", "show", "20", directory).out
    assert json.loads(supervisor("checkpoints", directory, "--json").out)["checkpoints"] == rows
    assert supervisor("checkpoints", directory).out.count("\n") == 3
    missing = supervisor("checkpoints", "show", "21", directory)
    assert (missing.code, "no checkpoint of step 21" in missing.err) == (2, True)


def test_a_damaged_checkpoint_hides_no_other(supervisor: Command, tmp_path: Path) -> None:
    (tmp_path / contract.JOURNAL_FILE).touch()
    directory = tmp_path / contract.CHECKPOINTS
    directory.mkdir()
    for step in (10, 20, 30):
        write_checkpoint(directory, step)
    (directory / "step_000020.json").write_text("{")
    listed = supervisor("checkpoints", str(tmp_path), "--json")
    rows = json.loads(listed.out)["checkpoints"]
    assert listed.code == 0
    assert [row["reason"] for row in rows] == ["cadence", "damaged", "cadence"]
    assert listed.err.startswith("supervisor: step_000020.json: not JSON")
    assert supervisor("checkpoints", "show", "20", str(tmp_path)).code == 2


def test_a_checkpoint_without_a_manifest_is_shown_too(supervisor: Command, tmp_path: Path) -> None:
    (tmp_path / contract.JOURNAL_FILE).touch()
    directory = tmp_path / contract.CHECKPOINTS
    directory.mkdir()
    for step in (10, 20):
        write_checkpoint(directory, step)
    (directory / "step_000020.json").unlink()
    whole, bare = (
        json.loads(supervisor("checkpoints", "show", step, str(tmp_path), "--json").out)
        for step in ("10", "20")
    )
    assert whole.keys() == bare.keys()
    assert (bare["step"], bare["reason"], bare["tensors"]) == (20, "bare", [])
    assert (bare["parameters"], bare["size_bytes"]) == (whole["parameters"], whole["size_bytes"])
    assert "None" not in supervisor("checkpoints", "show", "20", str(tmp_path)).out
    assert " bare      attempt -  " in supervisor("checkpoints", str(tmp_path)).out


def test_a_reader_that_goes_away_gets_no_traceback(stopped: Run) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        stopped.command("logs", str(stopped.directory), "--supervisor"),
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
        env=stopped.variables(),
    )
    os.close(reader)
    os.close(writer)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, errors) == (141, b"")


def test_following_a_log_ends_with_ctrl_c_and_leaves_the_run_alone(run: Run) -> None:
    trainer = run.hold(12)
    follower = subprocess.Popen(
        run.command("logs", str(run.directory), "--supervisor", "-f", "-n", "1000"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=run.variables(),
    )
    with follower:
        assert follower.stdout is not None
        first = follower.stdout.readline()
        assert b"owns" in first
        run.ask("checkpoint", at="now")
        line = b""
        while b"checkpoint at step 12 (operator)" not in line:
            line = follower.stdout.readline()
            assert line
        follower.send_signal(2)
        assert follower.wait(DEADLINE_SECONDS) == 130
    assert run.status()["phase"] == "running"
    run.open_gate()
    assert run.end(trainer) == 0


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.fault(
    "SV-59", phase="idle", does="says that there is no supervisor, instead of waiting for one"
)
@pytest.mark.fault(
    "SV-64", phase="running", does="names the id to ask again with, when a deadline has passed"
)
def test_requests_by_command(run: Run, supervisor: Command) -> None:
    directory = str(run.directory)
    process = run.hold(12)
    made = supervisor("checkpoint", directory, "--json", "--request-id", "mine")
    path = str(run.directory / "checkpoints" / "step_000012.bin")
    assert made.code == 0
    assert json.loads(made.out) == {"schema_version": 1, "id": "mine", "step": 12, "path": path}
    again = supervisor("checkpoint", directory, "--request-id", "mine")
    assert again.out == f"step 12: {path}\n"
    late = supervisor("checkpoint", directory, "--at", "boundary", "--timeout", "0.05")
    assert late.code == 124
    assert "ask again with --request-id" in late.err
    assert supervisor("restart", directory).out == "attempt 2 is running\n"
    stopping = supervisor("stop", directory)
    assert (stopping.code, stopping.out) == (0, "stopped; the newest checkpoint is step 12\n")
    assert run.end(process) == 0
    for verb in ("checkpoint", "restart"):
        nobody = supervisor(verb, directory)
        assert (nobody.code, "no supervisor is running" in nobody.err) == (1, True)


@pytest.mark.fault("SV-64", phase="any", does="tells a refusal as one, with its reason")
def test_a_refusal_is_an_answer(
    run: Run, supervisor: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.directory).mkdir()
    (run.directory / "journal.jsonl").touch()

    def ask(directory: Path, verb: str, **content: object) -> client.Answer:
        return client.Answer("x", "refused", "not today", {})

    monkeypatch.setattr(client, "ask", ask)
    for verb in ("checkpoint", "restart", "stop"):
        done = supervisor(verb, str(run.directory))
        assert (done.code, done.err) == (1, "supervisor: refused: not today\n")


def test_the_place_of_runs_is_the_same_for_all_commands(run: Run, supervisor: Command) -> None:
    """Also where neither file nor flag says where a run lives, and for the trainer alone."""
    del run.settings["run"]["directory"]
    run.write_config()
    assert run.finish() == 0
    assert (run.home / "run" / "journal.jsonl").is_file()
    assert run.supervisor("list").stdout.startswith("run ")
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "generate", "nowhere", "--prompt", "x"],
        env=run.variables(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert str(run.home / "nowhere") in done.stderr
    assert "SUPERVISOR_RUNS" in supervisor("--help").out


# --- start ----------------------------------------------------------------------------------------


def test_five_mistakes_are_told_at_once_and_nothing_is_made(
    tmp_path: Path, supervisor: Command
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(
        f"""
        [run]
        directory = "{tmp_path / "run"}"
        [training]
        steps = -1
        learning_rate = "fast"
        stepps = 3
        [checkpoint]
        keep_last = 1
        [policy]
        kind = "static"
        """
    )
    done = supervisor("start", "--config", str(file))
    assert done.code == 2
    assert done.err.count("\n") == 5
    for key in ("training.steps", "training.learning_rate", "training.stepps"):
        assert f"{file}: {key}" in done.err
    for key in ("checkpoint.keep_last", "policy: expected arms"):
        assert f"{file}: {key}" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


def test_usage_errors_are_usage_errors(supervisor: Command) -> None:
    assert supervisor("dance").code == 2
    assert supervisor("start").code == 2
    assert supervisor("checkpoint", "--at", "noon").code == 2
    assert supervisor("--version").code == 0
    assert "supervisor start --config" in supervisor("--help").out


def commands_of(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*names, name)
        if isinstance(command, click.Group):
            yield from commands_of(command, *names, name)


@pytest.mark.parametrize("names", list(commands_of(cli.cli)), ids=" ".join)
def test_every_command_says_what_its_exit_codes_mean(
    supervisor: Command, names: tuple[str, ...]
) -> None:
    text = " ".join(supervisor(*names, "--help").out.split())
    assert text.count("Exit code: ") == 1
    for words in ("2 usage", "70 our own fault", "141 nobody read the output"):
        assert f", {words}" in text


def test_without_torch_the_extra_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    # A finder in front of all others that knows of no torch, as in an environment without it.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'torch' else real(name, *more)\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "supervisor", "start"),
            *("--config", str(ROOT / "configs" / "quickstart.toml")),
            *("--set", f"run.directory={tmp_path / 'run'}"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'trainer-supervisor[trainer]'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_too_little_space_is_refused_before_anything_is_made(
    tmp_path: Path, supervisor: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-21: too little disk was noticed at the first save, after an epoch (open_lm #154)."""
    real = os.statvfs

    def full(path: str | int) -> os.statvfs_result:
        found = real(path)
        return os.statvfs_result((*found[:4], 1, *found[5:10]))

    monkeypatch.setattr(os, "statvfs", full)
    config = str(ROOT / "configs" / "quickstart.toml")
    done = supervisor("start", "--config", config, "--set", f"run.directory={tmp_path / 'run'}")
    assert done.code == 2
    assert done.err.startswith(f"supervisor: {tmp_path / 'run' / contract.CHECKPOINTS}: ")
    assert done.err.endswith(" or move the run: see checkpoint.keep_last\n")
    assert not (tmp_path / "run").exists()


def test_a_bug_of_ours_has_its_own_exit_code(
    stopped: Run, supervisor: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise AssertionError("this cannot happen")

    monkeypatch.setattr("supervisor.status.observe", broken)
    done = supervisor("status", str(stopped.directory))
    assert done.code == 70
    assert "this cannot happen" in done.err


def test_what_is_printed_goes_into_no_file_of_the_run_where_nobody_gave_a_descriptor(
    run: Run, tmp_path: Path
) -> None:
    """The lock had number 2 then, and the progress in it instead of the owner's name."""

    def without_descriptors(*arguments: str) -> int:
        process = subprocess.Popen(
            run.command(*arguments), env=run.variables(), preexec_fn=lambda: os.closerange(0, 3)
        )
        return process.wait(DEADLINE_SECONDS)

    assert without_descriptors("start", "--config", str(run.config)) == 0
    assert json.loads((run.directory / contract.LOCK_FILE).read_bytes()).keys() == {
        *("pid", "host", "started")
    }
    nowhere = str(tmp_path / "not" / "there")
    assert without_descriptors("history", str(run.directory), "--output", nowhere) == 2
    assert without_descriptors("history", str(run.directory)) == 0


def test_a_detached_start_returns_when_it_answers(run: Run, supervisor: Command) -> None:
    run.gate(12)
    started = run.supervisor("start", "--config", str(run.config), "--detach")
    assert started.returncode == 0
    pid = int(started.stdout.split()[1])
    assert started.stdout.startswith(f"supervisor {pid} owns {run.directory}")
    assert run.wait_for_status(phase="running")["supervisor_pid"] == pid
    second = run.supervisor("start", "--config", str(run.config), "--detach")
    assert second.returncode == 2
    # One line of its own, and none that the first one has printed.
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"supervisor: {run.directory}: already supervised by process {pid}")
    assert f"supervisor logs {run.directory} --supervisor -f" in started.stdout
    assert supervisor("stop", str(run.directory)).code == 0
    wait_until(lambda: supervisor("status", str(run.directory)).code == 3, "its end")


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "signal 9 (Killed)"), (-60, "signal 60"), (120, "exit code 120")]
)
def test_a_detached_start_that_is_killed_says_by_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    ended = SimpleNamespace(poll=lambda: code)
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: ended)
    with pytest.raises(start.Refused, match=re.escape(words)) as refused:
        start.detach(["start"], tmp_path / "run")
    assert refused.value.code == ExitCode.OURS


def test_a_detached_start_that_is_refused_says_why_in_its_own_words(run: Run) -> None:
    """One that lost the race for the lock repeated what the winner had printed."""
    printed = "run: starting, step 0/30\nsupervisor: run: already supervised by process 7\n"
    assert start.own_words(printed) == "run: already supervised by process 7"
    assert run.finish() == 0
    refused = run.supervisor(
        "start", "--config", str(run.config), "--detach", "--set", "training.seed=5"
    )
    assert refused.returncode == 2
    assert "supervisor: supervisor:" not in refused.stderr
    assert "supervisor:   training.seed: recorded 0, requested 5" in refused.stderr


def test_the_log_of_a_trainer_that_printed_nothing_says_where_its_progress_is(
    stopped: Run, supervisor: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "silent"
    shutil.copytree(stopped.directory, copy, ignore=shutil.ignore_patterns("sockets"))
    newest = max((copy / contract.LOGS).glob("attempt-*.log"))
    newest.write_text("")
    assert supervisor("logs", str(copy)) == (0, "", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = supervisor("logs", str(copy))
    assert (shown.code, shown.out) == (0, "")
    assert f"printed nothing so far; its progress: supervisor status {copy}" in shown.err


def test_a_detached_start_of_a_finished_run_says_so(run: Run) -> None:
    assert run.finish() == 0
    again = run.supervisor("start", "--config", str(run.config), "--detach")
    assert again.returncode == 0
    assert "run: finished at step 30 of 30" in again.stdout or "owns" in again.stdout
    output = run.directory / "logs" / "supervisor.out"
    wait_until(lambda: "run: finished at step 30 of 30" in output.read_text(), "its last words")
    assert run.file_status()["attempt"] == 1


def test_a_damaged_journal_is_a_failure_and_stays_as_it_is(run: Run) -> None:
    assert run.finish() == 0
    path = run.directory / contract.JOURNAL_FILE
    damaged = path.read_bytes().replace(b"run_created", b"run_kreated")
    path.write_bytes(damaged)
    assert run.finish() == 1
    assert "line 2" in run.output()
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("line", ["[]", "7", '{"record": "run_created"}', "no"])
def test_a_journal_that_is_none_is_told_and_no_fault_of_ours(
    supervisor: Command, tmp_path: Path, line: str
) -> None:
    (tmp_path / contract.JOURNAL_FILE).write_text(f"{line}\n")
    verified = supervisor("verify", str(tmp_path))
    assert (verified.code, "journal.jsonl" in verified.out) == (1, True)
    assert supervisor("history", str(tmp_path)).code == 1
    assert supervisor("samples", str(tmp_path)) == (0, "", "")
