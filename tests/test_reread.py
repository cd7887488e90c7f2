"""SIGHUP: a supervisor reads its settings again, and the trainer works on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pivot_kit import PivotRun
from runs_kit import Run, wait_until

from supervisor import config, contract, events as ev
from supervisor.changes import IDENTITY, OPERATIONAL, class_of
from supervisor.options import Reread
from supervisor.reloading import UNCHANGED, Reloader
from supervisor.reread import is_live, options_of
from supervisor.rundir import RunDirectory
from supervisor.state import Durable, Epoch
from supervisor.worker import Job, Outcome

HUGE = 2**60
DIRECTORY = RunDirectory(Path("run"), "run")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


def recorded(run: Run) -> dict[str, Any]:
    return tomllib.loads((run.directory / contract.RUN_FILE).read_text())


def settings_alarm(run: Run) -> str:
    return str({a["name"]: a["detail"] for a in run.status()["alarms"]}.get("settings", ""))


def let_end(run: Run, supervisor: subprocess.Popen[str]) -> None:
    run.open_gate()
    assert run.end(supervisor) == 0
    done = run.supervisor("verify", str(run.directory))
    assert done.returncode == 0, done.stdout + done.stderr


# --- which settings -------------------------------------------------------------------------------


def test_what_is_taken_is_what_a_start_would_take_and_no_trainer_needs_to_know() -> None:
    keys = [
        f"{section}.{key}" for section, table in config.Settings().tree().items() for key in table
    ]
    live = {key for key in keys if is_live(key)}
    assert {class_of(key) for key in live} == {OPERATIONAL}
    assert {key for key in keys if class_of(key) == OPERATIONAL} - live == {
        *("run.directory", "run.shared", "training.steps"),
    }
    assert class_of("trainer.device") == IDENTITY


# --- a change -------------------------------------------------------------------------------------


def test_a_changed_file_takes_effect_while_the_trainer_works_on(run: Run) -> None:
    run.set("checkpoint", every=10, keep_last=5)
    supervisor = run.hold(5)
    trainer = run.status()["trainer_pid"]
    run.set("checkpoint", keep_last=2)
    run.set("samples", keep=1)
    run.set("logs", size_bytes=2**20, keep=3)
    run.set("alarms", disk_headroom_bytes=HUGE)
    supervisor.send_signal(signal.SIGHUP)
    changed = run.wait_for_record("settings_changed")["changes"]
    assert changed == {
        "checkpoint.keep_last": [5, 2],
        "samples.keep": [config.Settings().samples.keep, 1],
        "logs.size_bytes": [config.Settings().logs.size_bytes, 2**20],
        "logs.keep": [config.Settings().logs.keep, 3],
        "alarms.disk_headroom_bytes": [config.Settings().alarms.disk_headroom_bytes, HUGE],
    }
    wait_until(lambda: recorded(run)["checkpoint"]["keep_last"] == 2, "the new run.toml")
    run.wait_for_record("alarmed", name="disk")
    run.set("alarms", disk_headroom_bytes=1)
    supervisor.send_signal(signal.SIGHUP)
    run.wait_for_record("alarm_cleared", name="disk")
    assert run.status()["trainer_pid"] == trainer
    assert run.status()["attempt"] == 1
    let_end(run, supervisor)
    assert run.checkpoints() == [20, 30]
    assert "settings changed: checkpoint.keep_last from 5 to 2" in run.output()
    samples = json.loads((run.directory / contract.samples_name("run")).read_bytes())
    assert [row["step"] for row in samples] == [30]
    assert run.finish() == 0, "the next start finds nothing new in the same file"
    assert len(run.records("settings_changed")) == 2


def test_a_shorter_deadline_finds_the_trainer_that_hangs_already(run: Run) -> None:
    run.faults = "block@12#1"
    supervisor = run.hold(11)
    run.open_gate()
    run.set("hang", step_seconds=0.5, evidence_seconds=0.1)
    run.set("stop", grace_seconds=1.0, signal_after_seconds=0.1)
    supervisor.send_signal(signal.SIGHUP)
    run.wait_for_record("attempt_ended", cause="hang")
    let_end(run, supervisor)
    run.assert_exact(30)


def test_who_is_to_be_told_is_told_from_now_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's path is relative to where the command was given, as at a start, though the
    supervisor stands in the run directory by now."""
    monkeypatch.chdir(tmp_path)
    run.config = Path("run.toml")
    supervisor = run.hold(5)
    tell = tmp_path / "tell"
    tell.write_text('#!/bin/sh\ncat > "$0.heard"\n')
    tell.chmod(0o700)
    run.set("alarms", notify=["./tell"])
    supervisor.send_signal(signal.SIGHUP)
    run.wait_for_record("settings_changed")
    run.open_gate()
    assert run.end(supervisor) == 0
    assert '"finished"' in Path("tell.heard").read_text()


def test_a_relative_path_begins_where_it_is_said_to(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    arm = {"name": "prose", "files": ["text/a.txt", "/b.txt"]}
    file.write_text(
        tomli_w.dumps(
            {"policy": {"arms": [arm]}, "alarms": {"webhook_file": "secret"}},
        )
    )
    found = config.load(file, home=Path("/somewhere/else"))
    assert found.policy.arms[0].files == ("/somewhere/else/text/a.txt", "/b.txt")
    assert found.alarms.webhook_file == "/somewhere/else/secret"
    assert found.run.directory == "/somewhere/else/runs/run"
    assert config.load(file).run.directory == str(Path("runs/run").absolute())


def test_what_the_command_line_said_still_goes_before_the_file(run: Run) -> None:
    supervisor = run.hold(5, "--set", "checkpoint.keep_last=4")
    run.set("checkpoint", keep_last=2)
    run.set("logs", keep=7)
    supervisor.send_signal(signal.SIGHUP)
    changed = run.wait_for_record("settings_changed")["changes"]
    assert list(changed) == ["logs.keep"]
    assert recorded(run)["checkpoint"]["keep_last"] == 4
    let_end(run, supervisor)


def test_a_file_that_says_the_same_changes_nothing(run: Run) -> None:
    supervisor = run.hold(5)
    supervisor.send_signal(signal.SIGHUP)
    log = run.directory / contract.SUPERVISOR_LOG_FILE
    wait_until(lambda: UNCHANGED in log.read_text(), "that it has looked")
    assert run.records("settings_changed", "alarmed") == []
    let_end(run, supervisor)


def test_a_run_that_is_renamed_reads_its_own_file_where_it_is_now(run: Run) -> None:
    assert run.finish() == 0
    run.config = run.directory / contract.RUN_FILE
    run.gate(40)
    supervisor = run.start("--set", "training.steps=60")
    run.wait_for_status(phase="running", step=40)
    run.directory = run.directory.rename(run.home / "moved")
    tables = recorded(run)
    tables["logs"]["keep"] = 9
    (run.directory / contract.RUN_FILE).write_text(tomli_w.dumps(tables))
    supervisor.send_signal(signal.SIGHUP)
    run.wait_for_record("settings_changed", changes={"logs.keep": [50, 9]})
    assert settings_alarm(run) == ""
    let_end(run, supervisor)


# --- what is refused ------------------------------------------------------------------------------


def spoil(run: Run) -> None:
    run.config.write_text("[training\n")


REFUSED: dict[str, tuple[Callable[[Run], object], tuple[str, ...]]] = {
    "no TOML": (spoil, ("run.toml", "line 1")),
    "gone": (lambda run: run.config.unlink(), ("run.toml", "No such file")),
    "unknown key": (lambda run: run.set("hang", step_second=1.0), ("hang.step_second",)),
    "out of range": (lambda run: run.set("stop", grace_seconds=-1), ("stop.grace_seconds", "-1")),
    "identity": (lambda run: run.set("training", seed=7), ("training.seed", "7")),
    "policy": (lambda run: run.set("checkpoint", every=5), ("checkpoint.every", "pivot")),
    "steps": (lambda run: run.set("training", steps=60), ("training.steps", "30", "60", "start")),
    "nobody to tell": (
        lambda run: run.set("alarms", notify=["no-such-program"]),
        ("alarms.notify", "no-such-program", "PATH"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_taken_is_refused_as_a_whole_and_stays_an_alarm(
    run: Run, case: str
) -> None:
    spoiled, words = REFUSED[case]
    supervisor = run.hold(5)
    trainer = run.status()["trainer_pid"]
    before = {section: dict(table) for section, table in run.settings.items()}
    run.set("logs", keep=9)  # good by itself, and not taken with the rest
    spoiled(run)
    supervisor.send_signal(signal.SIGHUP)
    detail = wait_until(lambda: settings_alarm(run), "the alarm")
    assert detail.startswith("the settings stay as they are: ")
    for word in words:
        assert word in detail
    assert run.records("settings_changed") == []
    assert run.status()["trainer_pid"] == trainer
    run.settings = before
    run.write_config()
    supervisor.send_signal(signal.SIGHUP)
    wait_until(lambda: not settings_alarm(run), "its end, with the next look")
    let_end(run, supervisor)


def test_a_start_that_takes_the_settings_ends_the_alarm(run: Run) -> None:
    supervisor = run.hold(5)
    good = run.config.read_text()
    spoil(run)
    supervisor.send_signal(signal.SIGHUP)
    run.wait_for_record("alarmed", name="settings")
    run.kill_supervisor(supervisor)
    run.config.write_text(good)
    supervisor = run.start()
    run.wait_for_record("alarm_cleared", name="settings")
    let_end(run, supervisor)


# --- at a bad moment ------------------------------------------------------------------------------


class Hand:
    """A reloader with nobody around it; the worker answers when the test says so."""

    def __init__(self) -> None:
        self.durable: Durable | None = Durable()
        self.answer = Reread(None, (), "")
        self.jobs: list[tuple[Job, Callable[[Outcome], None]]] = []
        self.taken: list[tuple[ev.Record, ...]] = []
        self.alarms: list[str] = []
        self.judged_by: list[Durable] = []
        self.reloader = Reloader(
            self.reread,
            ruling=lambda: self.durable,
            submit=lambda job, done: self.jobs.append((job, done)),
            take=lambda options, records: self.taken.append(records),
            alarm=lambda name, detail: self.alarms.append(detail),
            say=lambda words: None,
        )

    def reread(self, durable: Durable) -> Reread:
        self.judged_by.append(durable)
        return self.answer

    def turn(self) -> None:
        self.reloader.look()

    def work(self, error: OSError | None = None) -> None:
        job, done = self.jobs.pop()
        done(Outcome(1, None if error else job(), error))


def test_what_was_judged_by_a_record_that_is_none_any_more_is_judged_again(
    run: Run, tmp_path: Path
) -> None:
    hand = Hand()
    options = options_of(config.resolve(config.load(run.config), "id"), DIRECTORY, {}, tmp_path)
    hand.answer = Reread(options, ())
    hand.reloader.ask()
    hand.turn()
    hand.durable = replace(Durable(), epochs=(Epoch(1, 0, 1, ""), Epoch(2, 10, 1, "")))
    hand.work()
    assert (hand.taken, hand.alarms) == ([], [])
    hand.turn()
    hand.work()
    assert hand.judged_by == [Durable(), hand.durable]
    assert hand.taken == [()]
    hand.turn()
    assert hand.jobs == []


def test_once_nothing_may_change_nothing_does() -> None:
    """Neither a look that begins then, nor one that was under way: it would wipe out the end."""
    hand = Hand()
    hand.answer = Reread(None, (), "refused")
    hand.reloader.ask()
    hand.turn()
    hand.durable = None
    hand.work()
    hand.turn()
    assert (hand.jobs, hand.taken, hand.alarms) == ([], [], [])


def test_signals_while_it_looks_are_one_more_look() -> None:
    hand = Hand()
    for _ in range(3):
        hand.reloader.ask()
        hand.turn()
    assert len(hand.jobs) == 1
    hand.work()
    hand.turn()
    assert len(hand.jobs) == 1


def test_a_disk_that_fails_is_an_alarm() -> None:
    hand = Hand()
    hand.reloader.ask()
    hand.turn()
    hand.work(OSError(errno.EIO, "Input/output error", "journal.jsonl"))
    assert hand.alarms == ["[Errno 5] Input/output error: 'journal.jsonl'"]


def test_a_pivot_that_is_under_way_is_waited_for(tmp_path: Path) -> None:
    """What it commits was made of the settings before it, and would undo the change."""
    with contextlib.closing(PivotRun(tmp_path)) as run:
        supervisor = run.hold(150)
        run.set("logs", keep=9)
        with run.asked("p1", **run.proposal()):
            run.wait_for_pauses("p1")
            supervisor.send_signal(signal.SIGHUP)
            run.ask("status")  # a turn of the loop, and another
            run.ask("status")
            assert run.records("settings_changed") == []
            run.gate(230)
            run.wait_for_record("policy_switched")
        run.wait_for_record("settings_changed")
        order = [r["record"] for r in run.records("policy_switched", "settings_changed")]
        assert order == ["policy_switched", "settings_changed"]
        # A file from before the pivot still says what it said, and that is no request.
        assert settings_alarm(run) == ""
        assert {arm["name"] for arm in recorded(run)["policy"]["arms"]} == {"prose", "notes"}
        let_end(run, supervisor)


def test_a_pivot_that_was_checked_before_it_does_not_undo_it(tmp_path: Path) -> None:
    with contextlib.closing(PivotRun(tmp_path)) as run:
        supervisor = run.hold(150)
        checked = run.proposal()
        run.set("logs", keep=9)
        supervisor.send_signal(signal.SIGHUP)
        run.wait_for_record("settings_changed")
        answer = run.ask("pivot", **checked)
        assert (answer.outcome, "settings of the run have changed" in answer.why) == (
            "refused",
            True,
        )
        assert run.pivoted(230) == "done"
        assert recorded(run)["logs"]["keep"] == 9
        let_end(run, supervisor)


def test_between_two_attempts_it_is_taken_as_well(run: Run) -> None:
    run.faults = "crash9@12"
    run.set("restart", delay_seconds=600.0, maximum_delay_seconds=600.0)
    supervisor = run.start()
    run.wait_for_status(phase="backoff")
    run.set("restart", deaths=77)
    supervisor.send_signal(signal.SIGHUP)
    changed = run.wait_for_record("settings_changed")["changes"]
    assert list(changed) == ["restart.deaths"]
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    assert run.end(supervisor) == 0


def test_many_signals_at_once_are_one_look_or_a_few(run: Run) -> None:
    supervisor = run.hold(5)
    run.set("logs", keep=9)
    for _ in range(2000):
        os.kill(supervisor.pid, signal.SIGHUP)
    run.wait_for_record("settings_changed")
    run.ask("checkpoint", at="now")
    assert len(run.records("settings_changed")) == 1
    let_end(run, supervisor)
