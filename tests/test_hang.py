"""Trainers that hang, as real processes: found, examined, ended, and the run goes on.

How long a silence may be is shown in test_patience.py, what follows from it in test_machine.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_kit import Run, kill, wait_until

from benchmarks import hangs
from supervisor import standing
from supervisor.attendant import Attendant
from supervisor.log import Log
from supervisor.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(
        tmp_path,
        hang={
            "start_seconds": 20.0,
            "step_seconds": 1.0,
            "save_seconds": 1.0,
            "evidence_seconds": 0.3,
        },
        stop={"grace_seconds": 0.5, "signal_after_seconds": 0.1},
    )
    yield one
    one.close()


def log_of(run: Run, attempt: int = 1) -> str:
    return (run.directory / "logs" / f"attempt-{attempt:04d}.log").read_text()


def hung(run: Run) -> list[str]:
    """The messages of all deaths by a hang."""
    return [end["message"] for end in run.records("attempt_ended") if end["cause"] == "hang"]


@pytest.mark.fault("FC-82", phase="running", does="ends it at its step's deadline, and resumes")
@pytest.mark.fault("FC-84", phase="running", does="counts new steps, not signs of life")
@pytest.mark.fault("FC-83", phase="running", does="a read that never returns is no progress")
@pytest.mark.fault("SV-45", phase="running", does="a thread that lives hides no hang")
@pytest.mark.fault("SV-26", phase="running", does="takes the stacks in C; SIGKILL ends its grace")
@pytest.mark.parametrize("kind", ["spin", "native", "seeming", "block", "frozen"])
def test_fc82_a_trainer_that_makes_no_step_is_ended_and_resumed(run: Run, kind: str) -> None:
    """Tasks stood for a quarter of an hour and all of them were called running (marin-community/
    marin #7344); a storage stall idled a trainer for four days (PrimeIntellect-ai/prime-rl PR
    2142); a thread kept the heartbeat fresh while the work was stuck (tomcounsell/ai #1226)."""
    run.faults = f"{kind}@15#1"
    assert run.finish() == 0
    (message,) = hung(run)
    assert re.match(r"no progress for \d+ s after step 14, in phase step; where it stood", message)
    run.assert_exact(30)
    assert [record["resume_step"] for record in run.records("attempt_started")] == [0, 10]
    assert f"--- no progress: the threads of process {pids(run)[0]}" in log_of(run)


def pids(run: Run) -> list[int]:
    return [record["pid"] for record in run.records("attempt_spawned")]


@pytest.mark.fault("SV-46", phase="running", does="stacks first, then SIGTERM, then SIGKILL")
@pytest.mark.parametrize(
    ("kind", "function"), [("spin", "spin"), ("native", "hang_in_native_code")]
)
def test_the_evidence_names_the_line_that_hangs(run: Run, kind: str, function: str) -> None:
    """A detector that only ended things lost the reason, and its own graceful path hung too
    (TensorRT-LLM PR #15612)."""
    run.faults = f"{kind}@15#1"
    assert run.finish() == 0
    log = log_of(run)
    assert re.search(rf'File ".*saboteur\.py", line \d+ in {function}\n', log)
    assert "in run" in log
    assert re.search(rf"{pids(run)[0]} \S+: state [RS]", log)


@pytest.mark.fault("FC-85", phase="saving", does="a save has its own deadline, and is ended at it")
def test_fc85_a_save_that_never_ends_is_a_hang_of_the_save(run: Run) -> None:
    """A long save passed for a hang (flagos-ai/FlagScale PR 1267); one without an end is one."""
    run.faults = "stalled@20#1"
    assert run.finish() == 0
    (message,) = hung(run)
    assert "after step 20, in phase save" in message
    run.assert_exact(30)


@pytest.mark.fault("SV-44", phase="loading", does="start-up has a deadline of its own")
@pytest.mark.fault("FC-86", phase="loading", does="load, first steps and steady steps differ")
def test_fc86_a_slow_first_step_is_not_measured_by_the_later_ones(run: Run) -> None:
    """A first step that compiles tripped a deadline made for steady steps (marin-community/marin
    PRs 7950 and 8006, pytorch/torchtitan PR 149); a liveness check ran before the start was over
    (k8s #27114, monit #787)."""
    run.set("hang", step_seconds=0.05, evidence_seconds=0.05)
    supervisor = run.hold(4)  # the steps of the warm-up are not over
    written = run.file_status()["time"]
    wait_until(lambda: run.file_status()["time"] > written + 1, "a silence of twenty deadlines")
    assert "--- no progress" not in log_of(run)
    run.gate(5)  # they are over now
    wait_until(lambda: hung(run), "the end of the same silence")
    run.open_gate()
    run.kill_supervisor(supervisor)


def test_a_hung_trainer_that_nobody_can_hear_is_found_by_its_receipts(run: Run) -> None:
    run.environment["SABOTEUR_MUTE"] = "1"
    run.faults = "block@15#1"
    assert run.finish() == 0
    assert len(hung(run)) == 1
    run.assert_exact(30)


def test_a_trainer_that_was_adopted_hanging_is_ended(run: Run) -> None:
    run.faults = "block@15#1"
    supervisor = run.start()
    run.wait_for_status(phase="running")
    wait_until(lambda: "the saboteur hangs" in log_of(run), "the hang")
    kill(supervisor.pid)
    supervisor.wait(30)
    assert run.finish() == 0
    assert len(hung(run)) == 1
    run.assert_exact(30)


@pytest.mark.fault("SV-46", phase="running", does="a trainer that wakes up in time goes on")
def test_progress_while_the_evidence_is_taken_calls_it_off(run: Run) -> None:
    run.set("hang", evidence_seconds=30.0)
    supervisor = run.hold(15)
    wait_until(lambda: "--- no progress" in log_of(run), "the evidence")
    run.open_gate()
    assert run.end(supervisor) == 0
    assert hung(run) == []
    assert run.records("alarmed") == []
    assert len(run.records("attempt_started")) == 1


def test_the_alarm_is_cleared_by_the_next_new_checkpoint(run: Run) -> None:
    run.faults = "block@15#1"
    assert run.finish() == 0
    assert [record["name"] for record in run.records("alarmed")] == ["hang"]
    assert [record["name"] for record in run.records("alarm_cleared")] == ["hang"]
    assert run.file_status()["alarms"] == []


def test_a_hang_at_the_same_step_twice_takes_the_checkpoint_before(run: Run) -> None:
    run.faults = "block@28#1,block@28#2"
    assert run.finish() == 0
    assert [r["step"] for r in run.records("checkpoint_set_aside")] == [20]
    assert [record["resume_step"] for record in run.records("attempt_started")] == [0, 20, 10]
    run.assert_exact(30)


@pytest.mark.fault("SV-41", phase="loading", does="two that die of it set a checkpoint aside")
def test_a_checkpoint_that_kills_whoever_loads_it_is_set_aside(run: Run) -> None:
    """Loops of restarts on the newest checkpoint, which was damaged in a way that no digest knows
    (llnl/scr #174, speculators PR #739, allennlp #2129)."""
    run.faults = "crash3@25#1,crash3@hello#2,crash3@hello#3"
    assert run.finish() == 0
    (aside,) = run.records("checkpoint_set_aside")
    assert (aside["step"], aside["reason"]) == (
        20,
        "2 trainers that loaded it died before a new step",
    )
    assert [r["resume_step"] for r in run.records("attempt_started")] == [0, 20, 20, 10]
    assert [record["name"] for record in run.records("alarmed")] == ["checkpoint_set_aside"]
    assert run.directory.joinpath("superseded").is_dir()
    run.assert_exact(30)


def test_when_no_older_checkpoint_is_left_the_run_fails_and_an_operator_may_go_on(run: Run) -> None:
    run.faults = "crash3@15#1,crash3@hello#2,crash3@hello#3"
    assert run.finish() == 1
    assert "no valid checkpoint is left" in run.file_status()["reason"]
    assert run.finish() == 0  # he has mended what was wrong: the checkpoint is tried again
    assert run.records("attempt_started")[-1]["resume_step"] == 10
    run.assert_exact(30)


# --- what is read of a process ---


def test_the_kernel_says_where_each_thread_stands() -> None:
    words = standing.of(os.getpid())
    assert words.startswith(f"--- no progress: the threads of process {os.getpid()}")
    assert re.search(rf"^{os.getpid()} .*: state R", words, re.MULTILINE)


def test_a_process_that_has_gone_has_no_threads() -> None:
    assert standing.of(2**22 + 1).splitlines()[1:] == ["gone"]


def is_idle(examiner: standing.Examiner) -> bool:
    examiner.tend()
    return examiner._process is None


def test_a_debugger_is_used_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert standing.debugger(7) is None
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "stacks of $5"\n')
    program.chmod(0o755)
    log = tmp_path / "attempt.log"
    examiner = standing.Examiner()
    examiner.begin(7, log)
    wait_until(lambda: is_idle(examiner), "the end of the debugger")
    assert log.read_text() == "stacks of 7\n"


def test_a_debugger_that_takes_too_long_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gdb"
    program.write_text("#!/bin/sh\nwhile :; do read x < /dev/tty; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(standing, "DEBUGGER_SECONDS", 0.0)
    examiner = standing.Examiner()
    examiner.begin(os.getpid(), tmp_path / "log")
    process = examiner._process
    assert process is not None
    wait_until(lambda: is_idle(examiner), "its end")
    assert process.returncode == -signal.SIGKILL
    examiner.close()


# It stops the process, as a debugger does that reads many symbols, and never comes to an end.
HOLDS = f"""#!{sys.executable} -S
import ctypes, signal, sys
ctypes.CDLL(None).ptrace(16, int(sys.argv[-1]), 0, 0)
print("the debugger holds it", flush=True)
signal.pause()
"""


def holding_debugger(home: Path) -> str:
    """A PATH on which it is found first."""
    program = home / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text(HOLDS)
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


def test_a_debugger_that_still_holds_the_trainer_keeps_no_hang_from_its_end(run: Run) -> None:
    """Whoever is traced is not seen dead by its parent before the tracer has let go: the run was
    stuck on a hang that it could have resumed from."""
    run.environment["PATH"] = holding_debugger(run.home)
    run.set("hang", evidence_seconds=2.0)
    run.set("stop", kill_seconds=6.0)
    run.faults = "block@15#1"
    assert run.finish() == 0
    assert len(hung(run)) == 1
    assert "the debugger holds it" in log_of(run)
    run.assert_exact(30)


def test_a_debugger_is_looked_after_without_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", holding_debugger(tmp_path))
    monkeypatch.setattr(standing, "DEBUGGER_SECONDS", 0.0)
    directory = RunDirectory(tmp_path / "run", "run")
    directory.create()
    log = Log(directory.supervisor_log)
    attending = Attendant(directory, log)
    attending._examiner.begin(2**22 + 1, directory.log(1))
    process = attending._examiner._process
    assert process is not None

    def has_ended() -> bool:
        attending.tend(0.0)
        return process.returncode is not None

    wait_until(has_ended, "the end of its time")
    assert process.returncode == -signal.SIGKILL
    attending.close()
    log.close()


# --- the measurement ------------------------------------------------------------------------------


def test_the_time_to_find_a_hang_is_measured_on_a_real_one(tmp_path: Path) -> None:
    found = hangs.measure(tmp_path, hangs.Kind("a read", "block@15#1"))
    assert 0.0 < found.detected_seconds < found.ended_seconds < found.resumed_seconds
    assert found.ratio == found.detected_seconds / hangs.STEP_SECONDS


def test_a_hang_that_is_none_fails_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no hang: it ended before that, by crash"):
        hangs.measure(tmp_path, hangs.Kind("no hang", "crash3@15#1"))
