"""The systemd unit of a run: every key known, every word read back as it was, and it works."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import assume, given, strategies as st
from runs_kit import DEADLINE_SECONDS, Run

from supervisor import cli, contract, unit
from supervisor.unit import Service, Unwritable, choose_environment, quote, quote_line, render

ANALYZE: Final = shutil.which("systemd-analyze")

# What systemd 243 and later know of what a unit of ours may say.
KNOWN: Final = {
    "Unit": {"Description", "RequiresMountsFor", "StartLimitIntervalSec"},
    "Service": {
        *("Type", "NotifyAccess", "User", "WorkingDirectory", "Environment", "ExecStart"),
        "ExecReload",
        *("TimeoutStartSec", "TimeoutStopSec", "WatchdogSec", "KillMode", "KillSignal"),
        *("SendSIGKILL", "SuccessExitStatus", "Restart", "RestartPreventExitStatus"),
        *("RestartSec", "OOMPolicy", "Delegate"),
    },
    "Install": {"WantedBy"},
}


def parse(text: str) -> dict[str, dict[str, list[str]]]:
    """Section -> key -> values, by the rules of systemd.syntax(7). Fails on what it ignores."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in text.splitlines():
        assert not line.endswith("\\"), "a continuation, of which we make none"
        if not line or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            assert header[1] not in found
            section = found[header[1]] = {}
            continue
        key, equals, value = line.partition("=")
        assert equals, line
        section.setdefault(key, []).append(value)
    return found


ESCAPES: Final = {"\\": "\\", '"': '"'}  # the only ones that we make


def words_of(value: str) -> list[str]:
    """Words with quotes and escapes taken off and specifiers read, as systemd does it; written
    from its manual and not from our quoting."""
    words, word, place, quoted = [], None, 0, False
    while place < len(value):
        letter = value[place]
        if letter == "%":
            assert value[place + 1] == "%", "a specifier that is not a percent sign"
            word, place = (word or "") + "%", place + 2
        elif letter == "\\":
            word, place = (word or "") + ESCAPES[value[place + 1]], place + 2
        elif letter == '"':
            word, quoted, place = word or "", not quoted, place + 1
        elif letter == "'" and not quoted:
            raise AssertionError("a single quote outside of double ones")
        elif letter in " \t" and not quoted:
            if word is not None:
                words.append(word)
            word, place = None, place + 1
        else:
            word, place = (word or "") + letter, place + 1
    assert not quoted
    return words if word is None else [*words, word]


def command_of(value: str) -> list[str]:
    """The arguments that systemd would start it with; substitution leaves them as they are."""
    plain = value.removeprefix(":")
    assert plain is not value or "$" not in value, "a dollar sign that would be substituted"
    return words_of(plain)


def service(**changes: object) -> Service:
    values: dict[str, object] = {
        "run": "run",
        "command": [sys.executable, "-m", "supervisor", "start", "--config", "/a/b.toml"],
        "home": "/work",
        "needs": ["/a/b.toml", "/a/run"],
        "environment": {},
        "grace_seconds": 120.0,
        "keep": False,
        "user": "me",
    }
    return Service(**{**values, **changes})  # type: ignore[arg-type]


def check_keys(text: str) -> None:
    """What the parser alone can say of it, where there is no systemd."""
    for section, keys in parse(text).items():
        assert set(keys) <= KNOWN[section], section


def complaints(text: str, place: Path, *options: str) -> str:
    """What systemd itself says against it; nothing, where it is not installed."""
    if ANALYZE is None:
        return ""
    file = place / "run.service"
    file.write_text(text)
    found = subprocess.run(
        [ANALYZE, *options, "verify", str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(place)},
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    # It also speaks of other units of this machine.
    said = [line for line in found.stderr.splitlines() if "run.service" in line]
    return "\n".join(said) if said or found.returncode == 0 else found.stderr


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True], ids=["end", "keep"])
@pytest.mark.parametrize("user", ["root", None], ids=["system", "user"])
def test_systemd_finds_nothing_to_complain_about(
    tmp_path: Path, keep: bool, user: str | None
) -> None:
    odd = tmp_path / "a b%c$d\"e'f\\g"
    odd.mkdir()
    text = render(
        service(
            keep=keep,
            user=user,
            home=str(odd),
            needs=[str(odd)],
            environment={"PATH": f"{odd}:/bin"},
            command=[sys.executable, "-m", "supervisor", "start", "--config", f"{odd}/r.toml"],
        )
    )
    check_keys(text)
    assert complaints(text, tmp_path, *(["--user"] if user is None else [])) == ""


def test_a_key_that_nobody_knows_would_be_found(tmp_path: Path) -> None:
    wrong = render(service(user="root")).replace("Restart=", "Restrat=")
    with pytest.raises(AssertionError, match="Service"):
        check_keys(wrong)
    if ANALYZE is not None:
        assert "Unknown key" in complaints(wrong, tmp_path)


def test_the_default_ends_the_whole_run_and_starts_again_only_what_that_helps() -> None:
    found = parse(render(service(grace_seconds=600.5)))["Service"]
    assert {key: values for key, values in found.items() if len(values) > 1} == {}
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "KillMode": "mixed",
        "KillSignal": "SIGTERM",
        "SendSIGKILL": "yes",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "1 2 130",
        "OOMPolicy": "continue",
        "Delegate": "yes",
        "WorkingDirectory": "/work",
        "User": "me",
    }
    assert {key: found[key][0] for key in expected} == expected
    assert int(found["TimeoutStopSec"][0]) == 601 + unit.STOP_MARGIN_SECONDS
    codes = {int(word) for word in found["RestartPreventExitStatus"][0].split()}
    assert contract.ExitCode.OURS not in codes
    assert codes == {contract.ExitCode.FAILED, contract.ExitCode.USAGE, contract.ExitCode.FORCED}


def test_a_unit_that_keeps_its_trainer_ends_the_supervisor_alone() -> None:
    found = parse(render(service(keep=True)))["Service"]
    assert (found["KillMode"], found["KillSignal"]) == (["process"], ["SIGKILL"])
    # The stop's own kill is no failure, and a kill by anybody else is still answered by a start.
    assert found["SuccessExitStatus"] == ["SIGKILL"]
    assert found["Restart"] == ["always"]
    assert found["RestartPreventExitStatus"] == ["0 1 2 130"]


def test_a_unit_of_the_user_names_none() -> None:
    found = parse(render(service(user=None)))
    assert "User" not in found["Service"]
    assert found["Install"]["WantedBy"] == ["default.target"]
    assert parse(render(service()))["Install"]["WantedBy"] == ["multi-user.target"]


# --- words ----------------------------------------------------------------------------------------

TEXT: Final = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from(" %$\"'\\;@:{}#="), max_size=30
)


@given(st.lists(TEXT.filter(lambda word: "\x7f" not in word), min_size=1, max_size=5))
def test_every_word_comes_out_as_it_went_in(words: list[str]) -> None:
    command = ["/usr/bin/python", *words]
    text = render(service(command=command, environment={"A": words[0]}, needs=words))
    found = parse(text)
    assert command_of(found["Service"]["ExecStart"][0]) == command
    assert words_of(found["Service"]["Environment"][0]) == [f"A={words[0]}"]
    assert words_of(found["Unit"]["RequiresMountsFor"][0]) == words


@given(TEXT)
def test_a_directory_comes_out_as_it_went_in_or_is_refused(name: str) -> None:
    path = f"/{name}"
    assume("\n" not in path)
    if path != path.strip() or path.endswith("\\"):
        with pytest.raises(Unwritable, match="rename"):
            quote_line(path)
    else:
        assert quote_line(path).replace("%%", "%") == path
        assert quote_line(path).count("%") == 2 * path.count("%")


def test_substitution_is_off_exactly_where_a_dollar_sign_is() -> None:
    def line(*words: str) -> str:
        return parse(render(service(command=["/py", *words])))["Service"]["ExecStart"][0]

    assert line("--config", "/a/b") == "/py --config /a/b"
    assert line("--config", "/a/${b} c") == ':/py --config "/a/${b} c"'
    assert line("100%", "") == '/py 100%% ""'


@pytest.mark.parametrize("word", ["a\nb", "a\x00b", "a\x1b[1mb", "a\x7fb", "a\udcffb"], ids=ascii)
def test_what_no_unit_can_hold_is_refused(word: str) -> None:
    with pytest.raises(Unwritable):
        quote(word)
    with pytest.raises(Unwritable):
        quote_line(f"/{word}")


# --- the environment ------------------------------------------------------------------------------


def test_what_decides_paths_devices_and_bits_is_written_down_and_no_secret() -> None:
    environment = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "OMP_NUM_THREADS": "8",
        "SUPERVISOR_TRAINING__STEPS": "9",
        "SUPERVISOR_RUN_DIRECTORY": "/another/run",
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "HOME": "/nonexistent",
        "TERM": "xterm",
        "HF_TOKEN": "hf_x",
        "SUPERVISOR_ALARMS__WEBHOOK_TOKEN": "t",
        "TORCH_LOGS": "a\nb",
        "WANTED": "w",
        "MY_API_KEY": "k",
    }
    chosen, left_out = choose_environment(environment, ["WANTED", "MY_API_KEY"])
    assert set(chosen) == {
        *("PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SUPERVISOR_TRAINING__STEPS"),
        "WANTED",
    }
    assert left_out == ["MY_API_KEY", "SUPERVISOR_ALARMS__WEBHOOK_TOKEN", "TORCH_LOGS"]
    assert chosen["WANTED"] == "w"


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    home = tmp_path / 'odd $HOME 100% "q"'
    home.mkdir()
    with contextlib.closing(Run(home)) as made:
        yield made


def unit_of(run: Run, *arguments: str) -> dict[str, dict[str, list[str]]]:
    found = run.supervisor("unit", *arguments)
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    return parse(found.stdout)


def start_as_systemd_does(
    found: dict[str, dict[str, list[str]]], manager: str
) -> subprocess.Popen[bytes]:
    """In the directory and with the variables of the unit, and no other that Python would heed."""
    assignments = [words_of(value) for value in found["Service"]["Environment"]]
    variables = dict(word.partition("=")[::2] for (word,) in assignments)
    kept = {k: v for k, v in os.environ.items() if k in ("HOME", "TESTS_STARTED_BY")}
    return subprocess.Popen(
        command_of(found["Service"]["ExecStart"][0]),
        cwd=found["Service"]["WorkingDirectory"][0].replace("%%", "%"),
        env={**kept, **variables, "NOTIFY_SOCKET": manager},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_the_unit_starts_the_run_and_obeys_a_recorded_stop(run: Run, tmp_path: Path) -> None:
    run.gate(12)
    gate = {"SABOTEUR_GATE": str(run.gate_file)}
    os.environ |= gate
    try:
        found = unit_of(run, "--config", str(run.config), "--user", "--env", "SABOTEUR_GATE")
    finally:
        del os.environ["SABOTEUR_GATE"]
    notified = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(DEADLINE_SECONDS)
        manager.bind(notified)
        with start_as_systemd_does(found, notified) as service:
            assert manager.recv(4096).startswith(b"READY=1\n")
            run.wait_for_status(phase="running", step=12)
            service.send_signal(signal.SIGTERM)
            assert service.wait(DEADLINE_SECONDS) == 0
        assert run.checkpoints() == [10, 12]
        # A stop of the unit is not the operator's wish: at the next boot the run goes on.
        with start_as_systemd_does(found, notified) as service:
            run.wait_for_status(phase="running", step=12)
            assert run.ask("stop").outcome == "done"
            assert service.wait(DEADLINE_SECONDS) == 0
        with start_as_systemd_does(found, notified) as service:
            assert service.wait(DEADLINE_SECONDS) == 0
    assert run.file_status()["wish"] == "stop"
    assert len(run.records("attempt_started")) == 2
    # The operator's start is one.
    run.open_gate()
    assert run.finish() == 0
    with start_as_systemd_does(found, notified) as service:
        assert service.wait(DEADLINE_SECONDS) == 0
    assert run.file_status()["phase"] == "finished"
    assert len(run.records("attempt_started")) == 3


def test_a_run_is_named_by_its_directory_and_found_where_it_was_moved_to(run: Run) -> None:
    run.set("training", steps=4)
    assert run.finish() == 0
    file = run.directory / contract.RUN_FILE
    command = command_of(unit_of(run, str(run.directory))["Service"]["ExecStart"][0])
    assert command[-2:] == ["--config", str(file)]
    moved = run.home / "moved ü"
    run.directory.rename(moved)
    command = command_of(unit_of(run, str(moved))["Service"]["ExecStart"][0])
    assert command[-2:] == ["--config", str(moved / contract.RUN_FILE)]
    assert subprocess.run(command, env=run.variables(), check=False).returncode == 0
    assert not run.directory.exists()


def test_a_file_is_written_whole_and_says_what_to_do(run: Run) -> None:
    place = run.home / "run.service"
    found = run.supervisor("unit", "--config", str(run.config), "--output", str(place))
    assert found.returncode == 0, found.stderr
    assert parse(place.read_text())["Service"]["Type"] == ["notify"]
    assert "systemctl daemon-reload; systemctl enable --now run" in found.stdout
    assert place.stat().st_mode & 0o777 & ~0o644 == 0
    assert [path.name for path in run.home.glob("*run.service*")] == ["run.service"]
    assert not run.directory.exists(), "nothing of the run is touched"


def test_settings_of_the_command_line_are_in_the_unit(run: Run) -> None:
    change = "stop.grace_seconds=7"
    found = unit_of(run, "--config", str(run.config), "--set", change, "--on-stop", "end")
    assert command_of(found["Service"]["ExecStart"][0])[-2:] == ["--set", change]
    assert found["Service"]["TimeoutStopSec"] == [str(7 + unit.STOP_MARGIN_SECONDS)]


def test_a_secret_is_named_and_left_out(run: Run) -> None:
    run.environment["MY_TOKEN"] = "abc123"
    found = run.supervisor("unit", "--config", str(run.config), "--env", "MY_TOKEN")
    assert found.returncode == 0
    assert "abc123" not in found.stdout + found.stderr
    assert "MY_TOKEN is not in the unit" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["some-run", "--config", "x.toml"], "not both"),
        (["--config", "missing.toml"], "missing.toml"),
        (["no-such-run"], "no-such-run"),
        (["--output", "unit.txt"], ".service"),
        (["--env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["supervisor", "unit", *arguments])
    assert cli.main() == 2
    told = capsys.readouterr()
    assert words in told.err
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[trainer]\ncommand = ["true"]\n')
    place = str(tmp_path / "no" / "such" / "x.service")
    words = ["unit", "--config", str(config), "--output", place]
    monkeypatch.setattr("sys.argv", ["supervisor", *words])
    assert cli.main() == 2
    assert f"{place}: No such file or directory" in capsys.readouterr().err
    full = tmp_path / "full.service"
    full.symlink_to("/dev/full")
    monkeypatch.setattr("sys.argv", ["supervisor", *words[:-1], str(full)])
    assert cli.main() == 74
    assert capsys.readouterr().err == f"supervisor: {full}: No space left on device\n"
