"""SIGTERM to the supervisor at any moment of its life, and the operator's stop without one.

The moment is a call that changes a file, a socket or a process, of the supervisor or of its
trainer, drawn by its number from the taking of the lock to the end. Whatever it hits, this life
ends on record and with exit code 0, nothing of the run is left running, the wish is what it was,
and the next start brings the run to the end that it would have had.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import checkpoint_kit
import pytest
from runs_kit import DEADLINE_SECONDS, Run, kill, wait_for_end, wait_until
from saboteur import PARAMETERS, loss_of
from shim_kit import ARMED, ARMED_AT_LOCK, STEPS, Struck, check

from supervisor import child, contract, journal, verify
from supervisor.rundir import RunDirectory, lock_holder

HELD: Final = 6
AFTER: Final = 10
SEED: Final = 5
AT_ONCE: Final = 2

# --- where a stop strikes -------------------------------------------------------------------------


class Stratum(NamedTuple):
    """A stretch of a life, as the calls of one role. `draws` is its part of twenty."""

    name: str
    role: str
    draws: int


STRATA: Final = (
    Stratum("whole life", "supervisor", 5),
    Stratum("whole life", "trainer", 4),
    Stratum("backoff", "supervisor", 3),
    Stratum("adoption", "supervisor", 3),
    Stratum("pivot", "supervisor", 3),
    Stratum("pivot", "trainer", 2),
)


class Strike(NamedTuple):
    """What came of one. `phase`: where the supervisor was when it heard of the stop."""

    stratum: Stratum
    number: int
    struck: bool
    phase: str

    def __str__(self) -> str:
        where = f"call {self.number} of the {self.stratum.role}"
        return f"{self.stratum.name}, {where}: {self.phase if self.struck else 'not reached'}"


def live_once(home: Path, shim: Path, stratum: Stratum, number: int) -> Struck:
    """A run of which one supervisor's life, now over, was struck at call `number`; -1: at none.
    The caller closes it."""
    home.mkdir(parents=True)
    run = Struck(home, shim)
    # Less to write, and the same calls each time.
    run.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        match stratum.name:
            case "whole life":
                run.arm(stratum.role, "stop", number, ARMED_AT_LOCK)
                supervisor = run.start()
            case "backoff":
                run.faults = "crash1@load#1,crash1@load#2,crash1@load#3"
                run.set("restart", delay_seconds=0.2)
                run.arm(stratum.role, "stop", number, ARMED_AT_LOCK)
                supervisor = run.start()
            case "adoption":
                run.kill_supervisor(run.hold(HELD))
                run.arm(stratum.role, "stop", number, ARMED_AT_LOCK)
                supervisor = run.start()
                wait_until(
                    lambda: supervisor.poll() is not None or run.records("attempt_adopted"),
                    "an adoption, or an end",
                )
            case _:
                supervisor = pivot_once(run, stratum.role, number)
        run.open_gate()
        code = run.end(supervisor)
        assert code == 0, (code, run.output())
    except BaseException:
        run.close()
        raise
    return run


def pivot_once(run: Struck, role: str, number: int) -> subprocess.Popen[str]:
    """The supervisor of a run whose pivot is over, or which is over itself."""
    supervisor = run.hold(HELD)
    content = run.proposal()
    run.arm(role, "stop", number, ARMED)
    with run.asked("p1", **content) as reply:

        def over() -> bool:
            return supervisor.poll() is not None or bool(reply.poll(0))

        wait_until(lambda: over() or run.pauses("p1"), "a trainer that knows")
        run.gate(AFTER)
        wait_until(over, "a reply, or no supervisor")
    return supervisor


# --- what must hold -------------------------------------------------------------------------------


def check_stopped(run: Struck) -> None:
    """The life that was struck has ended on record, and nothing of it is left."""
    records = run.records()
    started = [n for n, record in enumerate(records) if record["record"] == "supervisor_started"]
    life = records[started[-1] :]
    ended = [record for record in life if record["record"] == "supervisor_ended"]
    assert len(ended) == 1, life
    assert ended[0]["phase"] in ("stopped", "finished"), ended
    assert ended[0]["reason"], ended
    assert run.durable.wish == "run", "a signal is no wish"
    assert run.durable.open is None, "the attempt has its end on record"
    assert lock_holder(run.directory / contract.LOCK_FILE) is None
    assert child.holders(run.directory / contract.TRAINER_LOCK_FILE, "") == ()
    status = run.file_status()
    assert (status["phase"], status["wish"]) == (ended[0]["phase"], "run")
    check_proven(run)


def check_proven(run: Struck) -> None:
    report = verify.verify(RunDirectory(run.directory, run.name))
    assert report.problems == []


def check_finished(run: Struck) -> None:
    """It is the run that nobody ever stopped."""
    check(run)
    assert [entry.loss for entry in run.entries()] == [loss_of(n + 1) for n in range(STEPS)]
    last = run.directory / contract.CHECKPOINTS / f"{contract.checkpoint_stem(STEPS)}.bin"
    assert last.read_bytes() == checkpoint_kit.binary(STEPS, PARAMETERS)
    check_proven(run)


def phase_of(run: Struck) -> str:
    """Where the last life was when its end began, by its own log."""
    before = "starting"
    log = (run.directory / contract.SUPERVISOR_LOG_FILE).read_text().splitlines()
    for line in log:
        words = line.split(" ")
        if len(words) > 4 and words[3] == "->":
            if words[4] in ("stopping", "stopped"):
                before = words[2]
            elif words[2] == "idle":
                before = "starting"
    return before


def strike(home: Path, shim: Path, stratum: Stratum, number: int) -> Strike:
    try:
        with contextlib.closing(live_once(home, shim, stratum, number)) as run:
            struck, phase = bool(run.map["struck"]), phase_of(run)
            check_stopped(run)
            run.heal()
            run.faults = ""
            assert run.finish("--as-recorded") == 0, run.output()
            check_finished(run)
    except AssertionError as error:
        error.add_note(f"{stratum}, call {number}, in {home}")
        raise
    shutil.rmtree(home)
    return Strike(stratum, number, struck, phase)


def count_calls(home: Path, shim: Path, stratum: Stratum) -> int:
    """How many calls there are to strike at."""
    with contextlib.closing(live_once(home, shim, stratum, -1)) as run:
        return len(run.calls(stratum.role))


def strike_everywhere(home: Path, shim: Path, times: int) -> list[Strike]:
    """`times` is by how much more than twenty."""
    chance = random.Random(SEED)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        counted = {
            stratum: pool.submit(count_calls, home / f"counted-{number}", shim, stratum)
            for number, stratum in enumerate(STRATA)
        }
        begun = []
        for stratum, count in counted.items():
            parts = stratum.draws * times
            for part in range(parts):
                # One from each of equal parts, so that no stretch of a life is left out.
                number = int((part + chance.random()) * count.result() / parts)
                place = home / f"{len(begun):04d}"
                begun.append(pool.submit(strike, place, shim, stratum, number))
        failed = [error for future in begun if (error := future.exception()) is not None]
        if failed:
            raise BaseExceptionGroup(f"{len(failed)} strikes of {len(begun)}", failed)
        return [future.result() for future in begun]


def assert_spread(strikes: list[Strike]) -> None:
    print("\n".join(map(str, strikes)))
    told = Counter(strike.phase for strike in strikes if strike.struck)
    assert set(told) >= {"starting", "running"}, told
    assert sum(strike.struck for strike in strikes) >= len(strikes) * 3 / 4


@pytest.mark.fault("SV-5", phase="any", does="passes a stop on, and ends when the trainer has")
@pytest.mark.fault("SV-18", phase="starting", does="honours a stop at every moment of a start")
@pytest.mark.fault("FC-74", phase="any", does="ends every stop in a checkpoint or a reason")
@pytest.mark.timeout(600)
def test_a_stop_at_any_moment_is_a_clean_one(shim: Path, tmp_path: Path) -> None:
    """SIGTERM to a launcher was not passed on (foreman #628, honcho PR 32), or was ignored while
    it started, until an init script lost patience and its children were orphans (circus #935), or
    was passed by and nothing was saved (Lightning #20542, #6626)."""
    assert_spread(strike_everywhere(tmp_path, shim, 1))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_stop_at_two_hundred_moments_is_a_clean_one(shim: Path, tmp_path: Path) -> None:
    strikes = strike_everywhere(tmp_path, shim, 10)
    assert_spread(strikes)
    phases = {strike.phase for strike in strikes if strike.struck}
    assert phases >= {"starting", "running", "backoff", "stopping"}, phases
