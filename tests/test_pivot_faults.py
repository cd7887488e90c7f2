"""A pivot that is struck at every call which changes a file, a socket or a process.

Whatever the call and whatever strikes (a kill of the supervisor, of the trainer, of both, a full
disk, a broken one), one more `supervisor start` finds the old policy untouched or the new one
complete, a whole history, nothing half-made, and the run goes on to its end.

A sample of the calls is struck here, and all of them in the soak; the real trainer stands in for
the saboteur at a few of them, and must end with the weights of runs that nothing struck. With
FAULT_TABLE=FILE the table of calls, faults and what came of them is written there.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from runs_kit import wait_until
from shim_kit import ROLES, Call, Struck, StruckTrainer, check

KILLS: Final = ("kill it", "kill the other", "kill both")
ERRORS: Final = ("ENOSPC", "EIO")
FAULTS: Final = (*KILLS, *ERRORS)

HELD, AFTER = 6, 10
PER_STRATUM: Final = 4
SEED: Final = 10
AT_ONCE: Final = 2


class Point(NamedTuple):
    call: Call
    fault: str

    def __str__(self) -> str:
        call = self.call
        return f"{self.fault} at call {call.number} of the {call.role}: {call.name} {call.target}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`code` is how the struck supervisor ended; `policy` which policy rules in the end, and
    `base_step` from where; `digest` that of the last checkpoint."""

    policy: str
    code: int
    struck: bool
    base_step: int
    digest: str

    def __str__(self) -> str:
        if not self.struck:
            return "not reached"
        return self.policy if self.code in (0, -9) else f"{self.policy}, exit {self.code}"


# --- one pivot ------------------------------------------------------------------------------------


def pivot_once(
    home: Path, shim: Path, kind: type[Struck], role: str, point: Point | None
) -> tuple[Struck, int, bool]:
    """A run that was struck while it pivoted, its supervisor ended: how, and whether it was."""
    run = kind(home, shim)
    try:
        supervisor = run.hold(HELD)
        content = run.proposal()
        run.arm(
            role,
            point.fault if point is not None else "",
            point.call.number if point is not None else -1,
        )
        with run.asked("p1", **content) as reply:

            def over() -> bool:
                return supervisor.poll() is not None or bool(reply.poll(0))

            # What a trainer says of it goes into its log, unless that is what is struck.
            in_log = point is not None and point.call.target.startswith("logs/")

            def told_too_late() -> bool:
                """The next trainer is past the boundary, and held before the one after."""
                return run.pauses("p1") > (0 if in_log else 1) and run.history_step() >= AFTER

            def refused() -> bool:
                """The disk took no base at this boundary; the pivot waits for the one after."""
                unsaved = [one for one in run.records("alarmed") if one["name"] == "unsaved"]
                return bool(unsaved) and run.history_step() >= AFTER

            def known() -> bool:
                return bool(run.pauses("p1") or (in_log and run.map["struck"]))

            wait_until(lambda: over() or known(), "a trainer that knows")
            run.gate(AFTER)
            wait_until(lambda: over() or told_too_late() or refused(), "a reply, or no supervisor")
        run.heal()
        run.open_gate()
        return run, run.end(supervisor), bool(run.map["struck"])
    except BaseException:
        run.close()
        raise


def strike(home: Path, shim: Path, kind: type[Struck], point: Point) -> Outcome:
    """What came of it, after one more start."""
    home.mkdir(parents=True)
    run, code, struck = pivot_once(home, shim, kind, point.call.role, point)
    with contextlib.closing(run):
        try:
            assert run.finish() == 0, run.output()
            base_step = run.durable.epochs[-1].base_step
            return Outcome(check(run), code, struck, base_step, run.final_digest())
        except AssertionError as error:
            error.add_note(f"{point}, in {run.directory}")
            raise


# --- points ---------------------------------------------------------------------------------------


def record(
    shim: Path, factory: pytest.TempPathFactory, kind: type[Struck]
) -> tuple[dict[str, list[Call]], str]:
    """The calls of each role in a pivot that nothing strikes, and how such a run ends."""
    found, ends = {}, set()
    for role in ROLES:
        run, code, _ = pivot_once(factory.mktemp(f"recorded-{role}"), shim, kind, role, None)
        with contextlib.closing(run):
            assert code == 0
            assert check(run) == "new"
            found[role] = run.calls(role)
            ends.add(run.final_digest())
    (end,) = ends
    return found, end


@pytest.fixture(scope="module")
def recorded(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    return record(shim, tmp_path_factory, Struck)[0]


def faults_of(call: Call) -> Iterator[str]:
    for fault in FAULTS:
        if fault in KILLS[1:] and call.role == "helper":
            continue  # it is the supervisor's own, and ends with it
        if call.can_fail or fault in KILLS:
            yield fault


def every_point(recorded: dict[str, list[Call]]) -> list[Point]:
    return [
        Point(call, fault)
        for calls in recorded.values()
        for call in calls
        for fault in faults_of(call)
    ]


def sample(points: Sequence[Point], per_stratum: int) -> list[Point]:
    """Some of each role and fault, spread over the whole of the pivot."""
    chance = random.Random(SEED)
    strata: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        strata.setdefault((point.call.role, point.fault), []).append(point)
    chosen = []
    for stratum in strata.values():
        size = len(stratum) / per_stratum
        chosen += [
            stratum[int(number * size + chance.random() * size)] for number in range(per_stratum)
        ]
    return chosen


def check_outcomes(outcomes: dict[Point, Outcome]) -> None:
    """Whatever strikes, the supervisor goes on, or was killed: it has no faults of its own."""
    ends = {point: outcome.code for point, outcome in outcomes.items()}
    assert {point: code for point, code in ends.items() if code not in (0, -9)} == {}


def strike_all(
    home: Path, shim: Path, points: Iterable[Point], kind: type[Struck] = Struck
) -> dict[Point, Outcome]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = {
            point: pool.submit(strike, home / f"{number:04d}", shim, kind, point)
            for number, point in enumerate(points)
        }
        outcomes, failed = {}, []
        for point, future in begun.items():
            error = future.exception()
            if error is None:
                outcomes[point] = future.result()
                shutil.rmtree(home / f"{list(begun).index(point):04d}")
            else:
                failed.append(error)
    write_table(outcomes, len(failed))
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} points of {len(begun)}", failed)
    return outcomes


def write_table(outcomes: dict[Point, Outcome], failed: int) -> None:
    """A row for each call, a column for each fault."""
    rows: list[Sequence[str]] = [("role", "call", "", *FAULTS)]
    calls = dict.fromkeys(point.call for point in outcomes)
    for call in calls:
        cells = (str(outcomes.get(Point(call, fault), "")) for fault in FAULTS)
        rows.append((call.role, str(call.number), f"{call.name} {call.target}", *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    text = "\n".join([*lines, f"{len(outcomes)} points, {failed} failed", ""])
    print(text)
    if "FAULT_TABLE" in os.environ:
        Path(os.environ["FAULT_TABLE"]).write_text(text)


def test_a_pivot_makes_the_calls_that_it_must(recorded: dict[str, list[Call]]) -> None:
    """So that a shim which sees nothing does not pass for a product that survives everything."""
    supervisor = [(call.name, call.target) for call in recorded["supervisor"]]
    for expected in (
        ("fdatasync", "journal.jsonl"),
        ("mkdir", "archive/.tmp-*-step_000008"),
        ("rename", "archive/pivot-0001-step_000008"),
        ("rename", "policies/0002.toml"),
        ("rename", "run.toml"),
        ("fork", ""),
        ("send", "socket"),
    ):
        assert expected in supervisor, sorted(set(supervisor))
    trainer = {call.name for call in recorded["trainer"]}
    assert trainer >= {"open", "write", "fsync", "link", "unlink", "send"}


@pytest.mark.timeout(600)
def test_a_pivot_is_done_or_not_done_whatever_strikes_where(
    recorded: dict[str, list[Call]], shim: Path, tmp_path: Path
) -> None:
    outcomes = strike_all(tmp_path, shim, sample(every_point(recorded), PER_STRATUM))
    check_outcomes(outcomes)
    assert {outcome.policy for outcome in outcomes.values()} == {"old", "new"}
    assert sum(outcome.struck for outcome in outcomes.values()) > len(outcomes) * 3 / 4


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_pivot_is_done_or_not_done_at_every_point(
    recorded: dict[str, list[Call]], shim: Path, tmp_path: Path
) -> None:
    check_outcomes(strike_all(tmp_path, shim, every_point(recorded)))


# --- with the real trainer ------------------------------------------------------------------------


def strike_the_real_trainer(
    home: Path, shim: Path, factory: pytest.TempPathFactory, per_stratum: int, every: int = 1
) -> None:
    """However it was struck, it ends with the weights, m and v of a run that was not: under the old
    policy those of one that never pivoted, under the new one the same from the same base."""
    recorded, pivoted = record(shim, factory, StruckTrainer)
    with contextlib.closing(StruckTrainer(factory.mktemp("straight"), shim)) as straight:
        straight.heal()
        assert straight.finish() == 0, straight.output()
        ends = {("old", 0): straight.final_digest(), ("new", HELD + 2): pivoted}
    points = sample(every_point(recorded), per_stratum)[::every]
    outcomes = strike_all(home, shim, points, StruckTrainer)
    assert any(outcome.struck for outcome in outcomes.values())
    for point, outcome in outcomes.items():
        expected = ends.setdefault((outcome.policy, outcome.base_step), outcome.digest)
        assert outcome.digest == expected, point
    assert len(set(ends.values())) == len(ends), "another policy, and no other weights"


@pytest.mark.timeout(600)
def test_the_real_trainer_is_struck_and_ends_with_the_same_weights(
    shim: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    strike_the_real_trainer(tmp_path, shim, tmp_path_factory, 1, every=3)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_real_trainer_is_struck_at_many_more_points(
    shim: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    strike_the_real_trainer(tmp_path, shim, tmp_path_factory, 5)
