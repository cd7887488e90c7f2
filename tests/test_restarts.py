"""Restarts with real processes: storms, races, and what is left when they are over."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_kit import DEADLINE_SECONDS, PYTHON, Run, kill, wait_for_end, wait_until

from supervisor import client, contract
from supervisor.rundir import lock_holder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


def assert_exact(run: Run, steps: int) -> None:
    assert run.steps() == list(range(1, steps + 1))
    assert all(run.proofs())
    assert run.file_status()["replay"]["diverged_steps"] == 0


def living_trainers(run: Run) -> set[int]:
    """Every process that was started as a trainer of this run, whatever it holds."""
    wanted = f"{contract.ENV_RUN_DIRECTORY}={run.directory}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


# --- many restarts at once ------------------------------------------------------------------------


def restart_again_and_again(run: Run, seed: int, times: int, outcomes: list[str]) -> None:
    """An operator without patience: some deadlines pass before anything can have happened."""
    rng = random.Random(seed)
    for _ in range(times):
        seconds = rng.choice((0.001, 0.05, 0.5, DEADLINE_SECONDS))
        id = client.new_request_id()
        try:
            answer = client.ask(run.directory, "restart", id=id, timeout_seconds=seconds)
            outcomes.append(answer.outcome)
        except client.DeadlinePassed:
            outcomes.append("deadline passed")


def kill_again_and_again(run: Run, times: int) -> None:
    """Something that kills whichever trainer it finds, while others are being started."""
    killed: set[int | None] = {None}

    def another() -> int | None:
        pid: int | None = run.status()["trainer_pid"]
        return pid if pid not in killed else None

    for _ in range(times):
        pid = wait_until(another, "another trainer")
        kill(pid)
        killed.add(pid)


def storm(run: Run, operators: int, times: int, kills: int) -> list[str]:
    outcomes: list[str] = []
    threads = [
        threading.Thread(target=restart_again_and_again, args=(run, seed, times, outcomes))
        for seed in range(operators)
    ]
    threads.append(threading.Thread(target=kill_again_and_again, args=(run, kills)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * DEADLINE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def assert_one_child_after_a_storm(run: Run, operators: int, times: int, kills: int) -> None:
    run.set("restart", deaths=1000, maximum_delay_seconds=0.05)
    supervisor = run.hold(12)
    outcomes = storm(run, operators, times, kills)
    assert len(outcomes) == operators * times
    assert {"done", "deadline passed"} <= set(outcomes) <= {"done", "deadline passed"}
    # Restarts that nobody waits for any more may still be under way; then there is peace.
    last = run.ask("restart")
    assert last.outcome == "done"
    status = run.wait_for_status(phase="running", attempt=last.result["attempt"], step=12)
    assert living_trainers(run) == {status["trainer_pid"]}
    assert status["deaths_without_progress"] <= kills
    run.open_gate()
    assert run.end(supervisor) == 0
    assert living_trainers(run) == set()
    assert_exact(run, 30)
    ends = run.records("attempt_ended")
    assert len(ends) == len(run.records("attempt_started")) == last.result["attempt"]
    assert sum(end["counted"] for end in ends) <= kills


@pytest.mark.fault(
    "SV-32", phase="running", does="ends in one living trainer after any storm of restarts"
)
def test_restarts_at_once_end_in_one_living_trainer(run: Run) -> None:
    """A hundred restarts with timeouts of their own killed the watcher, met a process that was
    gone, and left what had half started behind (dask/distributed #7312, #3955, #6426). Here a few
    operators at once, and somebody who kills."""
    assert_one_child_after_a_storm(run, operators=5, times=4, kills=4)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.fault(
    "SV-32", phase="running", does="ends in one living trainer after 100 restarts and 30 kills"
)
def test_a_hundred_restarts_at_once_end_in_one_living_trainer(run: Run) -> None:
    """As above, with the hundred of the thread (dask/distributed #7312)."""
    assert_one_child_after_a_storm(run, operators=10, times=10, kills=30)


# --- deaths and stops that meet -------------------------------------------------------------------


@pytest.mark.parametrize("by_signal", [False, True])
@pytest.mark.fault("SV-31", phase="stopping", does="starts nothing after a death during a stop")
def test_a_trainer_that_dies_while_it_is_stopped_is_not_revived(run: Run, by_signal: bool) -> None:
    """A restarter saw a dead kernel, and revived what was being shut down
    (jupyter_client PR 607, PR 576)."""
    run.faults = "kill@exit"
    supervisor = run.hold(12)
    if by_signal:
        supervisor.send_signal(signal.SIGTERM)
    else:
        assert run.ask("stop").result["phase"] == "stopped"
    assert run.end(supervisor) == 0
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["signal"], ended["counted"]) == ("signal", 9, False)
    assert (run.file_status()["phase"], run.file_status()["attempt"]) == ("stopped", 1)
    assert living_trainers(run) == set()
    assert run.checkpoints() == [10, 12], "it had saved before it died"


@pytest.mark.fault(
    "SV-33", phase="stopping", does="stops as asked where the trainer is gone already"
)
def test_a_stop_that_finds_nobody_to_signal_is_a_stop(run: Run) -> None:
    """'No such process' at the moment of the kill left an entry that could not be stopped any more
    (supervisord #536, #445). The supervisor is held while both happen. Which it hears of first is
    up to the kernel; if it is the stop, its SIGTERM goes to a process that it has just reaped."""
    run.environment["SABOTEUR_MUTE"] = "yes"
    supervisor = run.hold(12)
    trainer = run.status()["trainer_pid"]
    supervisor.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_held(supervisor.pid), "a supervisor that is held")
    kill(trainer)
    wait_for_end(trainer)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.send_signal(signal.SIGCONT)
    assert run.end(supervisor) == 0
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["signal"]) == ("signal", 9)
    assert run.file_status()["phase"] == "stopped"
    run.open_gate()
    assert run.finish() == 0
    assert_exact(run, 30)


def is_held(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# A saboteur that disappears into one long call of native code, after its word in the log.
_NATIVE = f"""
import hashlib, sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import saboteur

class Native(saboteur.Saboteur):
    def misbehave(self, when):
        if when == "15":
            print("gone into native code", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

saboteur.Saboteur = Native
sys.exit(saboteur.main())
"""


@pytest.mark.fault("SV-26", phase="stopping", does="kills at the end of the grace who cannot hear")
def test_a_trainer_in_native_code_is_ended_by_the_grace(run: Run) -> None:
    """Python runs no handler while the main thread is in native code (cpython #85300): whoever
    waits for an acknowledgement before the clock starts waits for ever."""
    run.set("trainer", command=[PYTHON, "-c", _NATIVE])
    run.set("stop", grace_seconds=0.5, signal_after_seconds=0.1)
    supervisor = run.start()
    log = run.directory / contract.LOGS / "attempt-0001.log"
    wait_until(lambda: log.exists() and "native" in log.read_text(), "a trainer out of reach")
    answer = run.ask("stop")
    assert (answer.outcome, answer.result["phase"], answer.result["step"]) == (
        "done",
        "stopped",
        10,
    )
    assert run.end(supervisor) == 0
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["step"], ended["counted"]) == ("killed", 14, False)


# --- what never gets going ------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["load", "hello"])
@pytest.mark.fault("SV-37", phase="loading", does="counts the deaths of what has made no step yet")
@pytest.mark.fault("SV-37", phase="running", does="counts a death right after 'running' like any")
@pytest.mark.fault(
    "SV-40", phase="loading", does="gives up after a few tries, with the trainer's own last words"
)
def test_what_never_gets_going_is_given_up_with_its_own_words(run: Run, moment: str) -> None:
    """What died just after it had been called running was restarted at once and without end
    (supervisord #1285, #1189, #487; circus #1155), and what never got going was tried again and
    again while its error was lost in the noise (pytorch #60910)."""
    run.faults = f"crash3@{moment}"
    run.set("restart", deaths=3)
    assert run.finish() == 1
    status = run.file_status()
    assert (status["phase"], status["attempt"], status["step"]) == ("failed", 3, 0)
    told = "3 deaths without a new checkpoint, the last one by crash: the saboteur crashes"
    assert status["reason"] == told
    assert told in run.output()
    ends = run.records("attempt_ended")
    assert [(end["message"], end["counted"]) for end in ends] == [
        ("the saboteur crashes", True)
    ] * 3


@pytest.mark.fault("SV-39", phase="idle", does="says what a start by hand forgives, and trains on")
def test_a_start_by_hand_says_what_it_forgives(run: Run) -> None:
    """Once the limit was met, the operator's own start was refused as well
    (multipath-tools #100)."""
    run.faults = "crash3@5"
    run.set("restart", deaths=2)
    assert run.finish() == 1
    assert run.finish("--as-recorded") == 1
    assert len(run.records("attempt_started")) == 2, "a service manager gets no third attempt"
    run.faults = "crash3@5#3"
    supervisor = run.start()
    run.wait_for_record("attempt_ended", attempt=3)
    assert "the run had failed (2 deaths without a new checkpoint" in run.output()
    assert "it has its budget again" in run.output()
    assert run.end(supervisor) == 0
    assert_exact(run, 30)


def test_a_start_by_hand_forgives_a_budget_that_is_half_spent(run: Run) -> None:
    run.faults = "crash3@5#1,crash3@5#2"
    run.set("restart", delay_seconds=300.0, deaths=5)
    supervisor = run.start()
    run.wait_for_record("attempt_ended", attempt=1)
    supervisor.send_signal(signal.SIGTERM)
    assert run.end(supervisor) == 0
    supervisor = run.start()
    run.wait_for_record("attempt_ended", attempt=2)
    assert "deaths without a new checkpoint, 1, are forgiven" in run.output()
    assert run.status()["deaths_without_progress"] == 1
    supervisor.send_signal(signal.SIGTERM)
    assert run.end(supervisor) == 0


# --- what the trainer has not seen yet ------------------------------------------------------------


@pytest.mark.fault("SV-24", phase="running", does="shows a request as not yet seen by the trainer")
def test_a_request_that_nobody_has_seen_is_shown_as_such(run: Run) -> None:
    """A trainer that looks at its requests between two steps only, and is long about a step, seems
    to ignore them (goodfire-ai/spd #677, #741); one in native code cannot even take the signal
    (cpython #85300)."""
    run.set("trainer", command=[PYTHON, "-c", _NATIVE])
    run.set("stop", grace_seconds=0.2, signal_after_seconds=0.1)
    supervisor = run.start()
    log = run.directory / contract.LOGS / "attempt-0001.log"
    wait_until(lambda: log.exists() and "native" in log.read_text(), "a trainer out of reach")
    with pytest.raises(client.DeadlinePassed):
        client.ask(run.directory, "checkpoint", id="c1", timeout_seconds=0.05, at="boundary")
    assert run.status()["requests"] == [{"id": "c1", "at": "boundary", "seen": False}]
    shown = wait_until(lambda: line_of(run, "waiting"), "the request in the status")
    assert shown == "waiting     checkpoint c1 at boundary, not yet seen by the trainer"
    assert run.ask("stop").outcome == "done"
    assert run.end(supervisor) == 0
    assert run.file_status()["requests"] == []
    (refused,) = run.records("replied")[:1]
    assert (refused["id"], refused["outcome"]) == ("c1", "refused")


def test_a_request_that_was_seen_is_shown_as_such(run: Run) -> None:
    supervisor = run.hold(12)
    with pytest.raises(client.DeadlinePassed):
        client.ask(run.directory, "checkpoint", id="c1", timeout_seconds=0.05, at="boundary")
    seen = {"id": "c1", "at": "boundary", "seen": True}
    run.wait_for_status(requests=[seen])
    shown = wait_until(lambda: line_of(run, "waiting.*, seen"), "the request in the status")
    assert shown == "waiting     checkpoint c1 at boundary, seen by the trainer"
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.file_status()["requests"] == []


def line_of(run: Run, pattern: str) -> str | None:
    """The line of the status for a person that begins like this."""
    shown = run.supervisor("status", str(run.directory)).stdout
    found = re.search(rf"^ *({pattern}.*)$", shown, re.MULTILINE)
    return found.group(1) if found else None


# --- what another life has left -------------------------------------------------------------------


@pytest.mark.fault(
    "SV-69", phase="starting", does="starts over whatever stands in the files of a dead owner"
)
def test_what_a_dead_owner_left_in_its_files_bars_no_start(run: Run) -> None:
    """A pid file that was stale after a reboot, or garbled, barred the start or named a stranger
    (aiida-core #2459, PR 4858; circus #866; monit #151, #563)."""
    supervisor = run.hold(12)
    trainer = run.status()["trainer_pid"]
    run.kill_supervisor(supervisor)
    kill(trainer)
    wait_for_end(trainer)
    stranger = subprocess.Popen([PYTHON, "-c", "import signal; signal.pause()"])
    for name, content in (
        (contract.LOCK_FILE, b'{"pid": %d, "host": "here", "sta' % stranger.pid),
        (contract.TRAINER_LOCK_FILE, b"%d\n" % stranger.pid),
        (contract.STATUS_FILE, b"\0" * 100),
    ):
        (run.directory / name).write_bytes(content)
    assert lock_holder(run.directory / contract.LOCK_FILE) is None
    run.open_gate()
    assert run.finish() == 0
    assert stranger.poll() is None, "nobody touched it"
    stranger.kill()
    stranger.wait()
    assert_exact(run, 30)


@pytest.mark.fault("FC-88", phase="idle", does="ends with 0 for a service manager that tries again")
def test_fc88_who_starts_a_finished_run_again_trains_nothing(run: Run) -> None:
    """A training that was over was started again from its beginning by whatever restarts what has
    ended (TuragaLab/DECODE #110)."""
    assert run.finish() == 0
    before = run.ledger_path.read_bytes()
    for word in ((), ("--as-recorded",)):
        assert run.finish(*word) == 0
        assert run.file_status()["phase"] == "finished"
        assert "budget" not in run.output(), "it did not fail, and has nothing to be forgiven"
    assert run.supervisor("restart", str(run.directory)).returncode == 1
    assert len(run.records("attempt_started")) == 1
    assert run.ledger_path.read_bytes() == before
