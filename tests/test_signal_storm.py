"""Ten thousand signals, and signals in the middle of a stop.

A storm must kill nobody and lose no request; a stop that is under way is neither hurried nor
called off by anything but its own deadline and the operator's second and third Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from runs_kit import DEADLINE_SECONDS, Run, kill, pidfd, wait_for_end, wait_until

from supervisor import client, contract, events as ev
from supervisor.machine import decide
from supervisor.rundir import lock_holder
from supervisor.state import Pending, Rules, State

SIGNALS: Final = 10_000
BURST: Final = 50


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


def attempt_log(run: Run, attempt: int = 1) -> str:
    path = run.directory / contract.LOGS / f"{contract.attempt_stem(attempt)}.log"
    return path.read_text() if path.exists() else ""


def assert_whole(run: Run, steps: int = 30) -> None:
    assert run.steps() == list(range(1, steps + 1))
    assert all(run.proofs())
    assert run.file_status()["replay"]["diverged_steps"] == 0


# --- the storm ------------------------------------------------------------------------------------


class Storm:
    """SIGUSR1 to a supervisor and all its children, in bursts, until it is told to end."""

    def __init__(self, supervisor: int) -> None:
        self.supervisor = supervisor
        self.sent = {"supervisor": 0, "trainer": 0, "helper": 0}

    def until(self, condition: Callable[[], object], at_least: int = 0) -> None:
        """Goes on until `condition` holds and so many more were sent to supervisor and trainer."""
        before = dict(self.sent)
        while not condition() or any(
            self.sent[who] - before[who] < at_least for who in ("supervisor", "trainer")
        ):
            self.burst()

    def burst(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            self._send(self.supervisor, "supervisor")
            for pid in self._children():
                if name := role_of(pid):
                    self._send(pid, name)

    def _send(self, pid: int, name: str) -> None:
        with pidfd(pid) as descriptor:
            for _ in range(BURST):
                signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
                self.sent[name] += 1

    def _children(self) -> list[int]:
        words = Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children").read_text()
        return [int(word) for word in words.split()]


def role_of(pid: int) -> str:
    """Nobody, before the first instruction of what is started there: until then it is a copy of
    the supervisor, or a shell that has not heard of signals yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if b"supervisor.verifier" in command:
        return "helper"
    heeded = [
        int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1
        for line in status.splitlines()
        if line.startswith(("SigIgn:", "SigCgt:"))
    ]
    return "trainer" if b"saboteur" in command and any(heeded) else ""


@pytest.mark.fault("FC-67", phase="any", does="makes a checkpoint, and never ends anything")
@pytest.mark.fault("FC-69", phase="running", does="counts in the handler, and does nothing else")
@pytest.mark.fault("FC-70", phase="saving", does="saves at a boundary and not in the handler")
@pytest.mark.fault("SV-29", phase="loading", does="ignores a request that comes before its handler")
def test_fc67_ten_thousand_signals_kill_nobody_and_lose_no_request(run: Run) -> None:
    """A launcher without a handler died of SIGUSR1 (pytorch/pytorch #154849), and so does any
    program that has none yet; a handler that logged ran into itself (submitit #1714), one that
    saved did not come to its end (Lightning PR 21407, #20280, #21406)."""
    run.faults = ",".join(f"chatty@{step}" for step in (2, 5, 9, 13))
    held = run.home / "hold"
    run.environment["SABOTEUR_HOLD"] = str(held)
    run.gate(8)
    supervisor = run.start()
    wait_until(lambda: lock_holder(run.directory / contract.LOCK_FILE), "an owner")
    storm = Storm(supervisor.pid)
    storm.until(lambda: run.history_step() >= 8, at_least=SIGNALS // 4)  # loading, and steps

    # A request among them is one request: it has its answer, a step, and a checkpoint.
    answers: list[client.Answer] = []
    asking = threading.Thread(target=lambda: answers.append(run.ask("checkpoint", at="now")))
    asking.start()
    storm.until(lambda: answers, at_least=SIGNALS // 4)
    asking.join(DEADLINE_SECONDS)
    assert (answers[0].outcome, answers[0].result["step"]) == ("done", 8)

    # And so is the last of all signals: it asks for a checkpoint of where the run is then.
    run.gate(11)
    wait_until(lambda: run.history_step() == 11, "step 11")
    storm.burst()
    run.wait_for_record("checkpoint_committed", step=11)

    held.touch()
    run.gate(14)
    storm.until(lambda: "held: saves step" in attempt_log(run), at_least=SIGNALS // 4)
    supervisor.terminate()
    run.wait_for_record("supervisor_started")
    storm.until(lambda: True, at_least=SIGNALS // 4)  # in the middle of a save, and of a stop
    held.unlink()
    storm.until(lambda: supervisor.poll() is not None)
    assert run.end(supervisor) == 0
    assert min(storm.sent["supervisor"], storm.sent["trainer"]) >= SIGNALS, storm.sent

    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["code"]) == ("stopped", 0)
    committed = [record["step"] for record in run.records("checkpoint_committed")]
    assert committed == sorted(set(committed)), "at most one checkpoint a step"
    assert {8, 10, 11} <= set(committed)
    assert run.records("alarmed") == []
    log = attempt_log(run)
    assert "Traceback" not in log
    for step in (2, 5, 9):
        printed = [line for line in log.splitlines() if line.startswith(f"step {step}, ")]
        assert printed == [f"step {step}, line {line}" for line in range(1000)]
    run.faults = ""
    run.open_gate()
    assert run.finish() == 0
    assert_whole(run)


def ask(state: State, number: int) -> tuple[State, list[ev.Effect]]:
    event = ev.Asked(1.0, f"signal-usr1-{number}", "checkpoint", operator=False)
    return decide(Rules(), state, event)


@pytest.mark.parametrize("linked", [True, False])
def test_signals_that_nobody_has_seen_yet_are_one_request(linked: bool) -> None:
    """However long a step takes, what waits for its end does not grow."""
    state, sent = State(phase="running", linked=linked), 0
    for number in range(SIGNALS):
        state, effects = ask(state, number)
        sent += len(effects)
    assert [request.id for request in state.checkpoints] == ["signal-usr1-0"]
    # A message waits for its reader. A signal does not: the trainer may have taken the one before.
    assert sent == (1 if linked else SIGNALS)


def test_a_signal_after_the_one_that_was_seen_is_another_request() -> None:
    seen = Pending("signal-usr1-1", "now", False, 0.5, seen=True)
    state, effects = ask(State(phase="running", linked=True, checkpoints=(seen,)), 2)
    assert [request.id for request in state.checkpoints] == ["signal-usr1-1", "signal-usr1-2"]
    assert [type(effect) for effect in effects] == [ev.Send]


def test_an_operator_waits_for_an_answer_of_his_own() -> None:
    unseen = Pending("signal-usr1-1", "now", False, 0.5)
    event = ev.Asked(1.0, "c1", "checkpoint")
    state, _ = decide(Rules(), State(phase="running", linked=True, checkpoints=(unseen,)), event)
    assert [request.id for request in state.checkpoints] == ["signal-usr1-1", "c1"]


@pytest.mark.fault("SV-22", phase="running", does="asks by message, and says so when nobody hears")
@pytest.mark.parametrize("mute", [False, True], ids=["linked", "signals only"])
def test_sv22_a_library_that_took_the_signal_hides_no_request(run: Run, mute: bool) -> None:
    """A library took SIGUSR1 for itself, and requests for a checkpoint went nowhere (nccl #704,
    submitit #1709)."""
    run.faults = "hijack@load"
    if mute:
        run.environment["SABOTEUR_MUTE"] = "1"
    run.gate(12)
    supervisor = run.start()
    wait_until(lambda: run.history_step() == 12, "step 12")
    asked = ["checkpoint", str(run.directory), "--request-id", "c1"]
    if not mute:
        found = run.supervisor(*asked)
        assert (found.returncode, run.checkpoints()) == (0, [10, 12])
    else:
        found = run.supervisor(*asked, "--timeout", "0.3")
        assert found.returncode == 124
        assert "--request-id c1" in found.stderr
    supervisor.terminate()
    assert run.end(supervisor) == 0
    (reply,) = [reply for reply in run.records("replied") if reply["id"] == "c1"]
    if mute and reply["outcome"] == "refused":  # its last checkpoint was not found before its end
        assert "the trainer ended (stopped)" in reply["why"]
    else:
        assert (reply["outcome"], reply["result"]) == ("done", {"step": 12})
    assert run.checkpoints() == [10, 12]


# --- in the middle of a stop ----------------------------------------------------------------------


def stopping(run: Run, faults: str = "") -> tuple[subprocess.Popen[str], Path]:
    """A supervisor whose stop waits for a save that takes its time, and what holds that."""
    run.faults = faults
    held = run.home / "hold"
    run.environment["SABOTEUR_HOLD"] = str(held)
    supervisor = run.hold(12)
    held.touch()
    supervisor.terminate()
    wait_until(lambda: "held: saves step 12" in attempt_log(run), "a save under way")
    return supervisor, held


@pytest.mark.fault("FC-73", phase="stopping", does="takes more SIGTERMs for the same one")
@pytest.mark.fault("SV-19", phase="stopping", does="lets nothing call a stop off")
def test_fc73_nothing_hurries_a_stop_and_nothing_calls_it_off(run: Run) -> None:
    """A second SIGTERM made a graceful stop a hard one (cockroachdb/cockroach #48070,
    HyperGAN/HyperGAN PR 341), and SIGHUP cancelled one (Supervisor 3.3.5)."""
    supervisor, held = stopping(run)
    before = run.status()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        supervisor.send_signal(number)
        after = run.status()  # answered by a loop that has seen the signal
        assert (after["phase"], after["trainer_pid"]) == ("stopping", before["trainer_pid"])
    assert run.ask("restart").outcome == "busy"
    assert supervisor.poll() is None
    held.unlink()
    assert run.end(supervisor) == 0
    assert run.checkpoints() == [10, 12]
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["code"]) == ("stopped", 0)
    assert run.file_status()["phase"] == "stopped"
    run.open_gate()
    assert run.finish() == 0
    assert_whole(run)


@pytest.mark.fault("SV-20", phase="stopping", does="can be told to stop waiting")
def test_sv20_a_stop_that_takes_too_long_can_be_forced(run: Run) -> None:
    """What was being stopped could not be killed any more (Supervisor #734, #1073)."""
    supervisor, _ = stopping(run)
    supervisor.send_signal(signal.SIGINT)  # the same stop, asked for a second time
    wait_until(lambda: "stopping:" in run.output(), "the answer to the first Ctrl-C")
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping sooner" in run.output(), "the answer to the second")
    supervisor.send_signal(signal.SIGINT)
    assert run.end(supervisor) == contract.ExitCode.FORCED
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["signal"]) == ("killed", signal.SIGKILL)
    run.environment.clear()
    run.open_gate()
    assert run.finish() == 0
    assert_whole(run)


@pytest.mark.fault("SV-21", phase="stopping", does="stays until the trainer is gone")
def test_sv21_a_supervisor_waits_for_what_its_trainer_does_at_the_end(run: Run) -> None:
    """A wrapper left before its child had cleaned up (tini #78)."""
    run.faults = "linger@gone"
    run.environment["SABOTEUR_HOLD"] = str(run.home / "hold")
    held = run.home / "hold.end"
    held.touch()
    supervisor = run.hold(12)
    trainer: int = run.status()["trainer_pid"]
    supervisor.terminate()
    wait_until(lambda: "held: lingers" in attempt_log(run), "a trainer that cleans up")
    assert run.status()["phase"] == "stopping"
    assert supervisor.poll() is None
    held.unlink()
    assert run.end(supervisor) == 0
    assert not os.path.exists(f"/proc/{trainer}"), "and it was waited for"


def test_a_signal_after_everything_is_over_does_not_spoil_the_exit(run: Run) -> None:
    """Between the last word and the end of the interpreter nobody is left who would handle it."""
    run.set("training", steps=4)
    supervisor = run.start()
    journal = run.directory / contract.JOURNAL_FILE
    wait_until(lambda: journal.exists() and b"supervisor_ended" in journal.read_bytes(), "an end")
    while supervisor.poll() is None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            kill(supervisor.pid, number)
    assert run.end(supervisor) == 0
    assert run.file_status()["phase"] == "finished"
    wait_for_end(supervisor.pid)
