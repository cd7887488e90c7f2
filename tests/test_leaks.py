"""What a supervisor costs while it lives: as much after a thousand restarts as after ten, and next
to nothing while nothing happens.

Everything is looked at from outside, in /proc, while the trainer is held at a step. CI has fifty
restarts and twenty thousand steps, the long version a thousand and a million.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs_kit import Run, kill, wait_for_end, wait_until
from zmtp import GREETING, Client

from supervisor import contract
from supervisor.contract import Json
from supervisor.recorder import PUMP_BYTES

WARM_RESTARTS = 10
RESTARTS, SOAK_RESTARTS = 50, 1_000
STEPS, SOAK_STEPS = 20_000, 1_000_000
WAKE_UPS_A_SECOND = 4
CALM_SECONDS = 2.0
LOOKED_AT_SECONDS = 3.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


@dataclass(frozen=True)
class Cost:
    """What a process holds; `descriptors` by kind, so that a difference says what leaks."""

    descriptors: tuple[tuple[str, int], ...]
    threads: int
    children: int
    zombies: int
    memory_kilobytes: int

    @property
    def without_memory(self) -> tuple[object, ...]:
        return self.descriptors, self.threads, self.children, self.zombies


def cost_of(pid: int) -> Cost:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    children = states_of_children(pid)
    return Cost(
        descriptors=tuple(sorted(Counter(kinds_of_descriptors(pid)).items())),
        threads=int(status["Threads"]),
        children=len(children),
        zombies=children.count("Z"),
        memory_kilobytes=int(status["VmRSS"].split()[0]),
    )


def kinds_of_descriptors(pid: int) -> Iterator[str]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kind = os.readlink(path).split(":[")[0].rpartition("/")[2]
            yield re.sub(r"-\d+", "", kind)


def states_of_children(pid: int) -> list[str]:
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid:
                states.append(state)
    return states


def settled_cost(pid: int) -> Cost:
    """Once two looks in a row find the same: a helper or a log is opened when it is needed."""
    before = cost_of(pid)

    def settled() -> Cost | None:
        nonlocal before
        now, last = cost_of(pid), before
        before = now
        return now if now.without_memory == last.without_memory else None

    return wait_until(settled, f"a calm moment of {pid}")


def no_more(now: Cost, before: Cost) -> bool:
    """Of no kind more than there was. What one write opens may be gone by now."""
    then = dict(before.descriptors)
    return (
        all(count <= then.get(kind, 0) for kind, count in now.descriptors)
        and now.threads <= before.threads
        and now.children <= before.children
        and now.zombies <= before.zombies
    )


# --- restarts -------------------------------------------------------------------------------------


def restart_often(run: Run, restarts: int, memory_kilobytes: int) -> None:
    """Each attempt makes one checkpoint, so that the budget is full again, and is killed at the
    step after it. The trainer is held after the first few and after the last."""
    run.faults = ",".join(f"kill@{n + 1}#{n}" for n in range(1, restarts + 1))
    run.set("training", steps=restarts + 10)
    run.set("checkpoint", every=1)
    run.set("restart", maximum_delay_seconds=0.01)
    run.gate(WARM_RESTARTS)
    supervisor = run.start()
    run.wait_for_status(phase="running", attempt=WARM_RESTARTS)
    run.wait_for_record("checkpoint_verified", step=WARM_RESTARTS)
    first = settled_cost(supervisor.pid)
    for step in range(WARM_RESTARTS + 1, restarts + 1):
        os.kill(supervisor.pid, signal.SIGHUP)  # its log is opened again at the next line
        run.gate(step)
        wait_until(
            lambda at=step: run.file_status().get("attempt", 0) >= at,  # type: ignore[misc]
            f"attempt {step}",
        )
    run.wait_for_record("checkpoint_verified", step=restarts)
    wait_until(lambda: no_more(cost_of(supervisor.pid), first), f"no more than {first}")
    last = settled_cost(supervisor.pid)
    assert last.zombies == 0
    assert last.memory_kilobytes - first.memory_kilobytes < memory_kilobytes
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.steps() == list(range(1, restarts + 11))
    assert len(run.records("attempt_started")) == restarts + 1


@pytest.mark.fault("SV-53", phase="any", does="holds as many descriptors after each restart")
@pytest.mark.fault("SV-13", phase="any", does="leaves no zombie")
@pytest.mark.fault("SV-78", phase="any", does="takes no more memory with each restart")
def test_fifty_restarts_and_rotations_leave_nothing_behind(run: Run) -> None:
    """Handles leaked with each rotation and reopening of a log (Supervisor #184, #1003); a daemon
    of 32 MB grew to gigabytes (circus #732)."""
    restart_often(run, RESTARTS, 4 * 1024)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.fault("SV-53", phase="any", does="holds as many descriptors after 1000 restarts")
def test_a_thousand_restarts_leave_nothing_behind(run: Run) -> None:
    restart_often(run, SOAK_RESTARTS, 8 * 1024)


# --- receipts -------------------------------------------------------------------------------------


def take_in(run: Run, steps: int, memory_kilobytes: int) -> None:
    run.set("training", steps=steps)
    run.set("checkpoint", every=steps // 4)
    warm = steps // 4
    supervisor = run.hold(1)
    # On a busy machine it falls behind and takes in as much at once as it ever does: here it has
    # done so before it is looked at.
    os.kill(supervisor.pid, signal.SIGSTOP)
    run.gate(warm)
    receipts = run.directory / contract.RECEIPTS / f"{contract.attempt_stem(1)}.jsonl"
    wait_until(lambda: receipts.stat().st_size > 2 * PUMP_BYTES, "more than it takes in at once")
    os.kill(supervisor.pid, signal.SIGCONT)
    run.wait_for_status(step=warm)
    run.wait_for_record("checkpoint_verified", step=warm)
    first = settled_cost(supervisor.pid)
    run.gate(steps - 1)
    wait_until(lambda: run.file_status().get("step") == steps - 1, "the last step", looks=360_000)
    run.wait_for_record("checkpoint_verified", step=3 * warm)
    wait_until(lambda: no_more(cost_of(supervisor.pid), first), f"no more than {first}")
    last = settled_cost(supervisor.pid)
    assert last.memory_kilobytes - first.memory_kilobytes < memory_kilobytes
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.steps() == list(range(1, steps + 1))


@pytest.mark.fault("SV-78", phase="running", does="takes no more memory with each step")
def test_twenty_thousand_steps_leave_nothing_behind(run: Run) -> None:
    """A daemon of 32 MB grew to gigabytes (circus #732)."""
    take_in(run, STEPS, 4 * 1024)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.fault("SV-78", phase="running", does="takes no more memory over 1,000,000 steps")
def test_a_million_steps_leave_nothing_behind(run: Run) -> None:
    take_in(run, SOAK_STEPS, 8 * 1024)


# --- nothing happens ------------------------------------------------------------------------------


def assert_idle(run: Run) -> None:
    """By the supervisor's own count, over some seconds of its own clock, once what was asked last
    is over. Nobody asks meanwhile: that would wake it."""
    first = status_after(run, run.file_status(), CALM_SECONDS)
    last = status_after(run, first, LOOKED_AT_SECONDS)
    woken = last["control"]["wake_ups"] - first["control"]["wake_ups"]
    assert woken <= WAKE_UPS_A_SECOND * (last["time"] - first["time"]) + 1


def status_after(run: Run, before: Json, seconds: float) -> Json:
    def later() -> Json | None:
        now = run.file_status()
        return now if now["time"] - before["time"] >= seconds else None

    return wait_until(later, "a later status")


@pytest.mark.fault("SV-55", phase="idle", does="wakes up a few times a second, whatever closed")
def test_an_idle_supervisor_hardly_wakes_up_whatever_has_closed(run: Run) -> None:
    """A daemon took all of a processor after a descriptor that had closed stayed in its poller
    (Supervisor #807)."""
    supervisor = run.hold(12)
    run.wait_for_record("checkpoint_verified", step=10)
    assert_idle(run)
    end_helper(run, supervisor.pid)
    for said in (b"", GREETING[:20], GREETING):
        with Client(run.directory) as one:
            one.socket.sendall(said)
    with Client(run.directory) as one:
        one.greet().send(contract.encode_message("checkpoint", id="c", at="boundary"))
    (run.directory / contract.SUPERVISOR_LOG_FILE).unlink()
    os.kill(supervisor.pid, signal.SIGHUP)
    assert run.ask("restart").outcome == "done"
    end_helper(run, supervisor.pid)
    assert_idle(run)


def end_helper(run: Run, supervisor: int) -> None:
    """Kills the process that verifies checkpoints; the next request starts another."""
    trainer = run.file_status()["trainer_pid"]
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for pid in map(int, children):
        if pid != trainer:
            kill(pid)
            wait_for_end(pid)


@pytest.mark.fault("SV-37", phase="backoff", does="waits between tries that are not charged, too")
@pytest.mark.fault("FC-89", phase="backoff", does="charges nothing for exit status 75")
def test_a_trainer_that_asks_to_be_tried_again_does_not_spin(run: Run) -> None:
    """Restarts were unlimited and immediate (Supervisor #487)."""
    run.set("trainer", command=["/bin/sh", "-c", "exit 75"])
    run.set("restart", delay_seconds=0.02, maximum_delay_seconds=1000.0, deaths=1)
    supervisor = run.start()
    attempts = 7
    wait_until(lambda: len(run.records("attempt_ended")) >= attempts, "some attempts")
    ended = run.records("attempt_ended")
    started = run.records("attempt_started")
    waits = [
        later["time"] - before["time"] for before, later in zip(ended, started[1:], strict=False)
    ]
    # A wait cannot be shorter than asked for, however loaded the machine is.
    for number, wait in enumerate(waits):
        assert wait >= 0.75 * 0.02 * 2**number - 0.01
    assert {(one["cause"], one["counted"]) for one in ended} == {("again", False)}
    assert run.ask("stop").result["phase"] == "stopped"
    assert run.end(supervisor) == 0
    assert run.file_status()["deaths_without_progress"] == 0


@pytest.mark.fault("SV-38", phase="backoff", does="waits before the first retry, too")
def test_the_first_retry_waits_too(run: Run) -> None:
    """A retry without delay spent the whole budget in microseconds (erlang/otp PR 1287)."""
    run.faults = "kill@12#1"
    run.set("restart", delay_seconds=0.4)
    assert run.finish() == 0
    (ended, _), (_, again) = run.records("attempt_ended"), run.records("attempt_started")
    assert again["time"] - ended["time"] >= 0.75 * 0.4 - 0.01
