"""The lifecycle by example: what a phase makes of an event, and what the journal adds up to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

import orjson
import pytest
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor import events as ev
from supervisor.causes import judge
from supervisor.contract import ContractError, ExitCode, ExitLine
from supervisor.machine import EVENTS, TABLE, _impossible, decide
from supervisor.patience import LATE_SECONDS, Limits, Patience
from supervisor.state import (
    CAUSES,
    PHASES,
    REPLIES_KEPT,
    TERMINAL,
    Durable,
    Epoch,
    Impossible,
    Rules,
    State,
    apply,
    fold,
)

RULES: Final = Rules(
    delay_seconds=1.0,
    maximum_delay_seconds=300.0,
    deaths=3,
    grace_seconds=60.0,
    signal_after_seconds=2.0,
    limits=Limits(start_seconds=600.0),
    hasten_seconds=5.0,
)
TARGET_STEP: Final = 1000
CREATED: Final = ev.RunCreated("0f3a", "lesson", TARGET_STEP, "d1")
PID: Final = 4242
LOOK_SECONDS: Final = LATE_SECONDS / 2
OPENING: Final = (ev.Sweep(), ev.Regenerate())
BEFORE_SPAWN: Final = ("merging", "selecting", "clearing")


class Case:
    """One life of a supervisor under the test's hand: its state, its clock, all its effects.

    After every event the journal so far is folded again: replay is live.
    """

    def __init__(self, *records: ev.Record, rules: Rules = RULES, life: str = "one") -> None:
        self.rules = rules
        self.life = life
        self.now = 100.0
        self.journal = [CREATED, *records]
        self.state = State(durable=fold(self.journal))
        self.effects: list[ev.Effect] = []

    def feed(self, kind: Callable[..., Any], *arguments: Any, **more: Any) -> list[ev.Effect]:
        """One event, now; returns the effects of its decision."""
        event: ev.Event = kind(self.now, *arguments, **more)
        self.state, self.effects = decide(self.rules, self.state, event)
        self.journal += self.records
        assert fold(self.journal) == self.state.durable
        return self.effects

    @property
    def records(self) -> list[ev.Record]:
        return [effect.record for effect in self.effects if isinstance(effect, ev.Append)]

    @property
    def acts(self) -> list[ev.Effect]:
        """The effects that are not records, nor what every opening begins with."""
        other = (ev.Append, ev.Sweep, ev.Regenerate)
        return [effect for effect in self.effects if not isinstance(effect, other)]

    @property
    def place(self) -> tuple[str, str]:
        return self.state.phase, self.state.stage

    def deadline(self) -> float | None:
        return self.state.deadline

    def reopened(self, life: str = "two") -> Case:
        """The next life, after this one was killed with everything on the disk."""
        return Case(*self.journal[1:], rules=self.rules, life=life)

    # --- events ---

    def open(self, wish: str | None = "run", *holders: ev.Holder, **more: Any) -> list[ev.Effect]:
        request = more.pop("request", "")
        more.setdefault("stepped", True)
        return self.feed(ev.Opened, self.life, holders, wish, request, **more)

    def select(self, step: int | None, **more: Any) -> list[ev.Effect]:
        there = self.state.durable.on_disk | ({step} if step is not None else set())
        present = more.pop("present", tuple(sorted(there)))
        return self.feed(ev.Selected, step, present, "bd", "sha", 1, "cadence", **more)

    def clear(self, *superseded: int) -> list[ev.Effect]:
        """Nothing stands above the base any more, if a base was decided on."""
        found = [effect.base_step for effect in self.effects if isinstance(effect, ev.Clear)]
        return self.feed(ev.Cleared, found[0], superseded) if found else []

    def hear(self, verb: str, **content: Any) -> list[ev.Effect]:
        return self.feed(ev.Heard, verb, content)

    def saved(self, step: int, *requests: str, reason: str = "cadence") -> list[ev.Effect]:
        return self.hear("saved", step=step, digest="bd", reason=reason, requests=list(requests))

    def ask(self, verb: str, id: str = "r1", at: str = "now") -> list[ev.Effect]:
        return self.feed(ev.Asked, id, verb, at)

    def signal(self, verb: str, id: str = "signal-int-1") -> list[ev.Effect]:
        return self.feed(ev.Asked, id, verb, "now", False)

    def tick(self, seconds: float = 0.0) -> list[ev.Effect]:
        self.now += seconds
        return self.feed(ev.Ticked)

    def wait(self, seconds: float) -> list[ev.Effect]:
        """Time passes and the loop looks as often as it was asked to; what it did at the end."""
        end, effects = self.now + seconds, []
        while self.now < end:
            self.now = min(end, self.state.deadline or end)
            effects = self.feed(ev.Ticked)
        return effects

    def reap(
        self,
        code: int | None = None,
        signal: int | None = None,
        line: ExitLine | None = None,
        **more: Any,
    ) -> list[ev.Effect]:
        step = more.pop("step", self.state.history_step)
        holders = more.pop("holders", ())
        return self.feed(ev.Reaped, code, signal, line, step, 0, holders, **more)

    def die(self, code: int | None = None, signal: int | None = None, **more: Any) -> Any:
        self.feed(ev.Died)
        return self.reap(code, signal, **more)

    # --- ways to a place ---

    def to_selecting(self, history: int = 0) -> Case:
        if self.state.phase == "idle":
            self.open()
        self.feed(ev.Merged, history)
        return self

    def to_spawning(self, base: int | None = None, history: int | None = None) -> Case:
        self.to_selecting((base or 0) if history is None else history)
        self.select(base)
        self.clear()
        return self

    def to_clearing(self) -> Case:
        self.to_selecting()
        self.select(None)
        return self

    def to_loading(self, base: int | None = None, history: int | None = None) -> Case:
        self.to_spawning(base, history)
        self.feed(ev.Spawned, PID, 77, "boot")
        return self

    def to_running(self, base: int | None = None, history: int | None = None) -> Case:
        self.to_loading(base, history)
        self.hear("hello", step=base or 0, pid=PID)
        return self

    def to_stopping(self) -> Case:
        self.to_running()
        self.ask("stop", "s1")
        return self

    def to_backoff(self) -> Case:
        self.to_running()
        self.die(signal=9)
        return self


def ours(pid: int = PID, leader: bool = True) -> ev.Holder:
    return ev.Holder(pid, True, leader, "trainer")


def opened_case() -> Case:
    case = Case()
    case.open()
    return case


def reaping_case() -> Case:
    case = Case().to_running()
    case.feed(ev.Died)
    return case


def stopping_reaping_case() -> Case:
    case = Case().to_stopping()
    case.feed(ev.Died)
    return case


PLACES: Final[dict[str, Callable[[], Case]]] = {
    "merging": opened_case,
    "selecting": lambda: Case().to_selecting(),
    "clearing": lambda: Case().to_clearing(),
    "spawning": lambda: Case().to_spawning(),
    "loading": lambda: Case().to_loading(),
    "running": lambda: Case().to_running(),
    "stopping": lambda: Case().to_stopping(),
    "stopping, reaping": stopping_reaping_case,
    "reaping": reaping_case,
    "backoff": lambda: Case().to_backoff(),
}
each_place = pytest.mark.parametrize("place", PLACES)


def finish(case: Case) -> Case:
    """Lets whatever is under way come to its end, as the shell would."""
    if case.place == ("starting", "merging"):
        case.feed(ev.Merged, 0)
    if case.place == ("starting", "selecting"):
        case.select(None)
    if case.place == ("starting", "clearing"):
        case.feed(ev.Cleared, 0, ())
    if case.place == ("starting", "spawning"):
        case.feed(ev.Spawned, PID, 77, "boot")
    if case.state.phase == "stopping" and case.state.stage != "reaping":
        case.feed(ev.Died)
    if case.state.stage == "reaping":
        case.reap(0)
    return case


# --- the table ---


@pytest.mark.fault(
    "SV-30", phase="any", does="has a decision for every phase and event, or ends this life aloud"
)
@pytest.mark.fault("SV-33", phase="any", does="has no phase that knows no event out of it")
def test_the_table_holds_every_phase_and_event() -> None:
    assert set(TABLE) == {(phase, event) for phase in PHASES for event in EVENTS}
    assert set(EVENTS) == set(ev.Event.__args__)


SAMPLE_EVENTS: Final[dict[type, tuple[Any, ...]]] = {
    ev.Opened: ("one", (), "run", ""),
    ev.Ticked: (),
    ev.Asked: ("r9", "stop"),
    ev.Heard: ("phase", {"phase": "step"}),
    ev.Recorded: (1, 0),
    ev.Noticed: (4,),
    ev.Spawned: (PID, 1, "boot"),
    ev.SpawnFailed: ("no memory",),
    ev.Died: (),
    ev.Reaped: (0, None, None, 1, 0, ()),
    ev.Merged: (1,),
    ev.Selected: (None, ()),
    ev.Cleared: (4, ()),
    ev.Archived: (4, "pivot-0001-step_000004"),
    ev.Verified: (4, "", "sha", "bd", 1, "cadence"),
    ev.Unverified: (4,),
    ev.Removed: ((),),
    ev.Full: ("no room",),
    ev.Broken: ("gap",),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_cell_that_cannot_happen_ends_the_life_and_names_itself(event: type, phase: str) -> None:
    state = State(phase=phase)
    happening = event(1.0, *SAMPLE_EVENTS[event])
    if TABLE[phase, event] is _impossible:
        with pytest.raises(Impossible, match=rf"{event.__name__} in phase {phase}"):
            decide(RULES, state, happening)
    elif phase in TERMINAL:
        after, effects = decide(RULES, state, happening)
        assert after.phase == phase
        assert not any(isinstance(effect, ev.Spawn | ev.Exit) for effect in effects)


def test_only_a_new_life_is_opened_and_it_is_opened_first() -> None:
    handled = {event for event in EVENTS if TABLE["idle", event] is not _impossible}
    assert handled == {ev.Opened}
    assert all(TABLE[phase, ev.Opened] is _impossible for phase in PHASES if phase != "idle")


# --- records ---

SPAWNED: Final = ev.AttemptSpawned(1, 5, 77, "boot")
REPLIED: Final = ev.Replied("r1", "checkpoint", "done", "", {"step": 100})
ENDED: Final = ev.AttemptEnded(1, "crash", 1, None, 90, True, 7, "it broke")
SECOND: Final = ev.AttemptStarted(2, "cd34", 50, 1, 60)
FIRST: Final = Epoch(1, 0, 1, "", "", "d1")
INTENDED: Final = ev.PivotIntended("p1", "boundary", None, 1, "[policy]", "[run]", "d2", "polish")
SWITCHED: Final = ev.PolicySwitched(
    "p1", 2, 1, 50, "[policy]", "[run]", "d2", "pivot-0001", "polish"
)

# Each record, and what it changes in a state that has seen `BEFORE`.
BEFORE: Final = (
    CREATED,
    ev.AttemptStarted(1, "ab12", 0, 1),
    ev.CheckpointCommitted(50, 1, "cadence", [], "bd"),
    ev.CheckpointVerified(50, "sha"),
    ev.Alarmed("ledger", "full"),
)
CHANGES: Final[list[tuple[ev.Record, dict[str, Any]]]] = [
    (
        ev.RunCreated("0f3b", "other", 7, "d", "[run]", "[policy]"),
        {
            "run_id": "0f3b",
            "run": "other",
            "target_step": 7,
            "epochs": (Epoch(1, 0, 1, "[run]", "[policy]", "d"),),
        },
    ),
    (
        ev.RunForked("runs/old", [["0e11", 40]], 40, 3, 40, "sha"),
        {"lineage": (("0e11", 40),), "attempt": 3},
    ),
    (ev.RunImported("andrea", 100, [50, 100]), {"imported": True}),
    (ev.CheckpointPinned(50, "a fork begins here"), {"pins": frozenset({50})}),
    (ev.FileStored("run.toml", "sha"), {"stored": (("run.toml", "sha"),)}),
    (ev.SupervisorStarted("word", 1, "host", "0.1"), {}),
    (ev.SupervisorEnded("stopped", "as asked"), {}),
    (ev.Wished("stop", "r1"), {"wish": "stop"}),
    (
        ev.SettingsChanged({"training.steps": [1000, 2000]}, 2000, "[run]"),
        {"target_step": 2000, "epochs": (replace(FIRST, settings="[run]"),)},
    ),
    (INTENDED, {"pivot": INTENDED}),
    (ev.PivotAborted("p1", "no space"), {"pivot": None}),
    (
        SWITCHED,
        {
            "pivot": None,
            "epoch": 2,
            "epochs": (FIRST, Epoch(2, 50, 1, "[run]", "[policy]", "d2", "pivot-0001", "p1")),
            "pins": frozenset({50}),
            "best_checkpoint": 50,
        },
    ),
    (SECOND, {"attempt": 2, "open": SECOND, "begun": SECOND}),
    (SPAWNED, {"spawned": SPAWNED}),
    (ev.AttemptAdopted(1, 5), {}),
    (ENDED, {"open": None, "last_exit": ENDED, "deaths": 1, "restarts": 1, "verified_steps": 7}),
    (
        ev.CheckpointCommitted(100, 1, "operator", ["r1"], "bd"),
        {"best_checkpoint": 100, "on_disk": frozenset({50, 100})},
    ),
    (ev.CheckpointCommitted(40, 1, "cadence", [], "bd"), {"on_disk": frozenset({40, 50})}),
    (ev.CheckpointVerified(100, "sha"), {"verified": frozenset({50, 100})}),
    (
        ev.CheckpointSetAside(50, "two died"),
        {"on_disk": frozenset(), "verified": frozenset(), "set_aside": frozenset({50})},
    ),
    (
        ev.CheckpointQuarantined(50, "chunk 0 differs", "quarantine/50"),
        {"on_disk": frozenset(), "verified": frozenset()},
    ),
    (ev.CheckpointsSuperseded(0, [50, 60]), {"on_disk": frozenset(), "verified": frozenset()}),
    (ev.CheckpointsRemoved([50]), {"on_disk": frozenset(), "verified": frozenset()}),
    (ev.LeftoversRemoved(["superseded/step_000050.bin"], 80), {}),
    (
        ev.Evaluated(100, 2.5, {}),
        {"evaluated_step": 100, "evaluation": ev.Evaluated(100, 2.5, {})},
    ),
    (
        ev.ReplayDiverged(60, 1, ["loss"], {"loss": 1.0}, {"loss": 2.0}, "code"),
        {"diverged_steps": 1, "first_diverged_step": 60},
    ),
    (ev.FileRepaired("lesson.loss.json", 17, "{}"), {}),
    (ev.Alarmed("ledger", "still full"), {"alarms": (("ledger", "still full"),)}),
    (ev.Alarmed("spike", "s"), {"alarms": (("ledger", "full"), ("spike", "s"))}),
    (ev.AlarmCleared("ledger"), {"alarms": ()}),
    (REPLIED, {"replies": (REPLIED,)}),
    (ev.RunFinished(1000), {"outcome": "finished", "reason": "reached step 1000"}),
    (ev.RunFailed("no luck"), {"outcome": "failed", "reason": "no luck"}),
]


def test_there_is_an_example_of_every_record() -> None:
    assert {type(record) for record, _ in CHANGES} == set(ev.Record.__args__)


@pytest.mark.parametrize(("record", "changes"), CHANGES, ids=lambda value: type(value).__name__)
def test_a_record_changes_this_and_nothing_else(record: ev.Record, changes: dict[str, Any]) -> None:
    before = fold(BEFORE)
    assert apply(before, record) == replace(before, **changes)


@pytest.mark.parametrize(
    "record", [record for record, _ in CHANGES], ids=lambda r: type(r).__name__
)
def test_a_record_survives_the_journal(record: ev.Record) -> None:
    line = orjson.loads(orjson.dumps(ev.record_to_json(record)))
    assert ev.record_from_json({"seq": 1, "time": 2.0, "check": "x", **line}) == record


def test_a_record_of_a_newer_version_is_left_out_and_a_broken_one_is_named() -> None:
    assert ev.record_from_json({"record": "policy_melted", "seq": 3}) is None
    with pytest.raises(ContractError, match=r"attempt_spawned 3: no pid"):
        ev.record_from_json(
            {"record": "attempt_spawned", "seq": 3, "attempt": 1, "start_ticks": 1, "boot_id": "b"}
        )


@pytest.mark.fault(
    "SV-39", phase="idle", does="lets the operator's start forgive all deaths and the verdict"
)
def test_a_start_forgives_and_a_stop_does_not() -> None:
    spent = fold([CREATED, *[ENDED] * 3, ev.RunFailed("no luck")])
    assert (spent.deaths, spent.outcome) == (3, "failed")
    stopped = apply(spent, ev.Wished("stop", "r1"))
    assert (stopped.wish, stopped.deaths, stopped.outcome) == ("stop", 3, "failed")
    again = apply(stopped, ev.Wished("run", ""))
    assert (again.wish, again.deaths, again.outcome, again.reason) == ("run", 0, "", "")
    assert again.restarts == 3, "the count of restarts is never reset"


@pytest.mark.fault(
    "SV-42", phase="saving", does="refills the budget with each checkpoint further than any before"
)
def test_only_a_step_beyond_the_best_checkpoint_is_progress() -> None:
    dead = fold([*BEFORE, ENDED])
    assert dead.deaths == 1
    assert apply(dead, ev.CheckpointCommitted(50, 2, "cadence", [], "bd")).deaths == 1
    assert apply(dead, ev.CheckpointCommitted(51, 2, "operator", [], "bd")).deaths == 0


def test_a_held_out_loss_belongs_to_the_branch_that_it_was_measured_on() -> None:
    def switched(base_step: int) -> ev.PolicySwitched:
        return ev.PolicySwitched("p1", 2, 1, base_step, "", "[run]", "d2", "archive", "")

    first, again, older = (ev.Evaluated(*of, {}) for of in ((100, 2.5), (100, 2.4), (90, 2.6)))
    measured = fold([CREATED, first])
    assert apply(measured, older) == measured, "what is executed again after a crash"
    assert apply(measured, again).evaluation == again
    kept, left = (apply(measured, switched(step)) for step in (100, 99))
    assert (kept.evaluation, kept.evaluated_step) == (first, 100)
    assert (left.evaluation, left.evaluated_step) == (None, 99)


def test_settings_on_record_have_a_name_and_none_have_none() -> None:
    """An import has none before its first life: what was checked then is held to nothing."""
    imported = fold([CREATED])
    known = apply(imported, ev.PolicySwitched("p1", 2, 1, 0, "", "[run]", "d2", "a", ""))
    assert imported.settings_digest == ""
    assert known.settings_digest == hashlib.sha256(b"[run]").hexdigest()


def test_a_failure_stands_when_its_last_checkpoint_goes() -> None:
    """That belongs to a run that had finished, which then has not."""
    last = ev.CheckpointCommitted(TARGET_STEP, 1, "final", [], "bd")
    gone = ev.CheckpointQuarantined(TARGET_STEP, "bad", "q")
    finished, failed = (
        fold([CREATED, last, end, gone])
        for end in (ev.RunFinished(TARGET_STEP), ev.RunFailed("no luck"))
    )
    assert (finished.outcome, failed.outcome) == ("", "failed")


def test_a_checkpoint_that_was_lost_and_saved_again_is_no_progress() -> None:
    """Else a run whose disk spoils each checkpoint would die and come back for ever."""
    lost = fold([*BEFORE, ev.CheckpointQuarantined(50, "bad", "q"), ENDED])
    assert apply(lost, ev.CheckpointCommitted(50, 2, "cadence", [], "bd")).deaths == 1


@pytest.mark.parametrize("cause", CAUSES)
def test_restarts_are_the_ends_that_nobody_asked_for(cause: str) -> None:
    ended = apply(Durable(), replace(ENDED, cause=cause, counted=False))
    planned = ("finished", "stopped", "configuration", "data", "non-finite")
    assert ended.restarts == (cause not in planned)
    assert ended.deaths == 0


def test_the_replies_that_are_kept_are_the_last() -> None:
    durable = fold(replace(REPLIED, id=f"r{n}") for n in range(REPLIES_KEPT + 5))
    assert len(durable.replies) == REPLIES_KEPT
    assert durable.replies[-1].id == f"r{REPLIES_KEPT + 4}"


def test_the_first_diverged_step_is_the_lowest() -> None:
    record = ev.ReplayDiverged(60, 1, ["loss"], {}, {}, "code")
    durable = fold([record, replace(record, step=40), replace(record, step=50)])
    assert (durable.diverged_steps, durable.first_diverged_step) == (3, 40)


# --- start ---


def test_first_start() -> None:
    case = Case()
    assert case.open() == [ev.Append(ev.Wished("run", "")), *OPENING, ev.Merge()]
    assert case.place == ("starting", "merging")
    assert case.feed(ev.Merged, 0) == [ev.Select(ceiling=0)]
    assert case.place == ("starting", "selecting")
    assert case.select(None) == [ev.Clear(0)]
    assert case.place == ("starting", "clearing")
    started, spawn = case.clear()
    nonce = hashlib.sha256(b"0f3a:one:1").hexdigest()[:16]
    assert started == ev.Append(ev.AttemptStarted(1, nonce, 0, 1))
    assert spawn == ev.Spawn(1, nonce, 0, 1)
    assert case.place == ("starting", "spawning")
    assert case.feed(ev.Spawned, PID, 77, "boot") == [
        ev.Append(ev.AttemptSpawned(1, PID, 77, "boot"))
    ]
    assert case.place == ("starting", "loading")
    assert case.deadline() == case.now + LOOK_SECONDS
    assert case.hear("phase", phase="load") == []
    assert case.state.trainer_phase == "load"
    assert case.hear("hello", step=0, pid=PID) == []
    assert case.place == ("running", "")
    assert case.deadline() == case.now + LOOK_SECONDS


def test_a_resume_starts_from_the_selected_checkpoint() -> None:
    case = Case().to_selecting(history=120)
    assert case.select(100, rejected=((115, "chunk 3 differs", "q/115"),)) == [
        ev.Append(ev.CheckpointQuarantined(115, "chunk 3 differs", "q/115")),
        ev.Append(ev.Alarmed("checkpoint_quarantined", "step 115: chunk 3 differs")),
        ev.Append(ev.CheckpointCommitted(100, 1, "cadence", [], "bd")),
        ev.Append(ev.CheckpointVerified(100, "sha")),
        ev.Clear(100),
    ]
    assert case.clear(110) == [
        ev.Append(ev.CheckpointsSuperseded(100, [110])),
        ev.Append(case.state.durable.open),  # type: ignore[arg-type]
        ev.Spawn(1, case.state.durable.open.nonce, 100, 1),  # type: ignore[union-attr]
    ]
    assert case.state.step == 100
    assert case.state.history_step == 120


def test_what_is_on_record_already_is_not_recorded_again() -> None:
    committed = ev.CheckpointCommitted(100, 1, "cadence", [], "bd")
    case = Case(committed, ev.CheckpointVerified(100, "sha")).to_selecting(history=120)
    case.select(100)
    assert case.records == []
    case.clear()
    assert [type(record) for record in case.records] == [ev.AttemptStarted]


def test_what_an_earlier_life_set_aside_without_a_record_is_recorded_by_the_next() -> None:
    """Else a step saved again under that number would pass for recorded."""
    case = Case(ev.CheckpointCommitted(110, 1, "cadence", [], "bd")).to_selecting(history=120)
    case.select(100)
    case.clear()
    assert case.records[0] == ev.CheckpointsSuperseded(100, [110])
    assert case.state.durable.on_disk == {100}


def test_the_nonce_differs_between_attempts_and_lives() -> None:
    first, second = Case(life="one").to_spawning(), Case(life="two").to_spawning()
    nonces = {case.state.durable.open.nonce for case in (first, second)}  # type: ignore[union-attr]
    first.feed(ev.SpawnFailed, "no memory")
    first.tick(60)
    first.to_spawning()
    nonces.add(first.state.durable.open.nonce)  # type: ignore[union-attr]
    assert len(nonces) == 3


def test_a_step_in_the_ledger_proves_life_as_well_as_a_hello() -> None:
    case = Case().to_loading()
    case.feed(ev.Recorded, 1, 0)
    assert case.place == ("running", "")
    assert not case.state.linked


def test_a_step_that_is_executed_again_proves_life_as_well() -> None:
    """The history does not grow by it, and a trainer that knows only signals says nothing: until it
    has caught up nobody would pass a request on to it."""
    case = Case().to_loading(base=100, history=120)
    assert case.ask("checkpoint") == []
    assert case.feed(ev.Ticked, 100) == []
    assert case.place == ("starting", "loading")
    assert case.feed(ev.Ticked, 101) == [ev.Signal("USR1")]
    assert case.place == ("running", "")
    assert (case.state.step, case.state.history_step) == (101, 120)
    case.feed(ev.Ticked, 107)
    case.feed(ev.Ticked, 106)
    assert case.state.step == 107
    case.feed(ev.Ticked, 121)
    assert case.state.step == 107, "a new one is told of once it is on record"
    case.feed(ev.Recorded, 121, 20)
    assert case.state.step == 121


def test_no_hello_in_time_is_killed_and_counted() -> None:
    case = Case().to_loading()
    assert case.wait(RULES.limits.start_seconds - 1) == []
    assert case.wait(1) == [ev.Examine()]
    where = "no hello within 600 s; where it stood is in logs/attempt-0001.log"
    assert case.wait(5) == [ev.Append(ev.Alarmed("hang", where)), ev.Signal("TERM")]
    assert case.place == ("stopping", "")
    assert case.wait(RULES.grace_seconds) == [ev.Kill()]
    assert case.deadline() == case.now + RULES.kill_seconds
    case.die(signal=9)
    ended = case.state.durable.last_exit
    assert ended is not None
    assert (ended.cause, ended.counted) == ("hang", True)
    assert ended.message == where
    assert case.place == ("backoff", "")


@pytest.mark.parametrize("stage", [*BEFORE_SPAWN, "spawning"])
def test_a_late_frame_of_the_attempt_before_starts_nothing(stage: str) -> None:
    """A hello that was still under way when its trainer died, and when that death was complete,
    must not pass for the hello of the next attempt."""
    case = PLACES[stage]()
    before = case.state
    assert case.hear("hello", step=5, pid=PID) == []
    assert case.saved(5) == []
    assert case.state == before


def test_hello_after_a_new_connection_does_not_set_the_step_back() -> None:
    case = Case().to_running()
    case.hear("step", step=9, loss=1.0)
    case.hear("hello", step=0, pid=PID)
    assert case.state.step == 9


def test_a_start_is_no_stop_to_be_answered() -> None:
    case = Case()
    case.open("run", request="r9")
    assert case.state.stop_ids == ()
    case.feed(ev.Merged, 0)
    case.ask("stop", "s1")
    case.select(None)
    assert [(reply.id, reply.outcome) for reply in case.state.durable.replies] == [("s1", "done")]


# --- finished ---


@pytest.mark.fault(
    "FC-88", phase="starting", does="deduces the end from a proven checkpoint, and starts nothing"
)
def test_finished_is_deduced_from_a_checkpoint_at_the_target_without_a_spawn() -> None:
    case = Case().to_selecting(history=TARGET_STEP)
    case.select(TARGET_STEP)
    assert case.acts == [ev.Retain(TARGET_STEP), ev.Exit(0, "reached step 1000")]
    assert case.records[-2:] == [
        ev.RunFinished(TARGET_STEP),
        ev.SupervisorEnded("finished", "reached step 1000"),
    ]
    assert case.state.durable.outcome == "finished"


def test_the_end_of_training_takes_the_same_way() -> None:
    case = Case().to_running()
    case.saved(TARGET_STEP)
    assert case.die(0, line=ExitLine("finished", TARGET_STEP, 0, [], ""), step=TARGET_STEP) == [
        ev.Append(ev.AttemptEnded(1, "finished", 0, None, TARGET_STEP, False, 0, "")),
        ev.Merge(),
    ]
    case.feed(ev.Merged, TARGET_STEP)
    case.select(TARGET_STEP)
    assert case.state.phase == "finished"


@pytest.mark.fault(
    "FC-88", phase="idle", does="leaves a finished run finished, without another attempt"
)
def test_fc88_a_finished_run_is_not_started_again() -> None:
    """A training that was over began again at step 0 under its restart rule
    (TuragaLab/DECODE #110)."""
    case = Case(
        ev.CheckpointCommitted(TARGET_STEP, 1, "cadence", [], "bd"), ev.RunFinished(TARGET_STEP)
    )
    case.to_selecting(history=TARGET_STEP)
    case.select(TARGET_STEP)
    assert case.state.phase == "finished"
    assert case.state.durable.attempt == 0


FINISHED: Final = (
    CREATED,
    ev.CheckpointCommitted(TARGET_STEP - 100, 1, "cadence", [], "bd"),
    ev.CheckpointCommitted(TARGET_STEP, 1, "final", [], "bd"),
    ev.RunFinished(TARGET_STEP),
)


@pytest.mark.parametrize(
    ("lost", "still"),
    [
        (ev.CheckpointQuarantined(TARGET_STEP, "chunk 0 differs", "q"), False),
        (ev.CheckpointsRemoved([TARGET_STEP]), False),
        (ev.CheckpointsRemoved([TARGET_STEP - 100]), True),
        (ev.CheckpointQuarantined(TARGET_STEP + 100, "of nobody", "q"), True),
    ],
)
def test_a_run_has_finished_as_long_as_its_last_checkpoint_is_there(
    lost: ev.Record, still: bool
) -> None:
    found = fold([*FINISHED, lost])
    assert (found.outcome, found.reason) == (
        ("finished", f"reached step {TARGET_STEP}") if still else ("", "")
    )


def test_a_stop_in_the_moment_that_the_last_checkpoint_is_found_damaged_is_no_finish() -> None:
    """The next start executes the last steps again, so nobody may be told that all is done."""
    case = Case(*FINISHED[1:])
    case.open(None)
    case.to_selecting(history=TARGET_STEP)
    case.signal("stop")
    case.select(TARGET_STEP - 100, rejected=((TARGET_STEP, "chunk 0 differs", "q"),))
    assert case.state.phase == "stopped"


def test_a_larger_target_makes_a_finished_run_go_on() -> None:
    case = Case(
        ev.RunFinished(TARGET_STEP), ev.SettingsChanged({"training.steps": [1000, 2000]}, 2000)
    )
    case.to_spawning(base=TARGET_STEP)
    assert case.place == ("starting", "spawning")


@pytest.mark.fault(
    "SV-37", phase="backoff", does="charges an end without a checkpoint at the target like a death"
)
def test_a_trainer_that_finishes_short_of_the_target_is_not_started_for_ever() -> None:
    """It ends with 0, at once, and has saved nothing: a start without delay, again and again."""
    case = Case()
    case.open()
    for attempt in range(1, RULES.deaths + 1):
        case.to_running()
        case.die(0)
        assert case.place == ("starting", "merging")
        assert case.state.durable.deaths == attempt
    case.feed(ev.Merged, 0)
    case.select(None)
    assert case.state.phase == "failed"
    assert case.state.why == "3 deaths without a new checkpoint, the last one by finished"


def test_a_last_checkpoint_that_no_message_told_of_still_counts() -> None:
    """The end is charged, because nothing shows yet that it reached the target; the selection
    finds the checkpoint, and that is progress."""
    case = Case(rules=replace(RULES, deaths=1)).to_running()
    case.die(0, step=TARGET_STEP)
    case.feed(ev.Merged, TARGET_STEP)
    case.select(TARGET_STEP)
    assert case.state.phase == "finished"


# --- nothing left to resume from ---


def test_no_valid_checkpoint_left_is_failed_and_says_what_to_do() -> None:
    case = Case(ev.CheckpointCommitted(100, 1, "cadence", [], "bd")).to_selecting(history=120)
    case.select(None, rejected=((100, "chunk 0 differs", "quarantine/step_000100"),))
    assert case.state.phase == "failed"
    assert case.acts == [ev.Exit(1, case.state.why)]
    assert "step 100 was saved" in case.state.why
    assert "--from-scratch" in case.state.why
    assert "quarantine/" in case.state.why


def test_from_scratch_is_the_operators_word() -> None:
    case = Case(ev.CheckpointCommitted(100, 1, "cadence", [], "bd"))
    case.open(from_scratch=True)
    case.feed(ev.Merged, 120)
    case.select(None)
    case.clear(100)
    assert case.acts[-1] == ev.Spawn(1, case.state.durable.open.nonce, 0, 1)  # type: ignore[union-attr]
    assert case.records[0] == ev.CheckpointsSuperseded(0, [100])


def test_who_asks_it_to_stop_meanwhile_has_stopped_it() -> None:
    case = Case(ev.CheckpointCommitted(100, 1, "cadence", [], "bd")).to_selecting(history=120)
    case.ask("stop", "s1")
    case.select(None, rejected=((100, "chunk 0 differs", "quarantine/step_000100"),))
    assert (case.state.phase, case.state.durable.outcome) == ("stopped", "")


def test_what_is_merged_is_where_the_run_stands() -> None:
    assert Case().to_selecting(history=120).state.step == 120


def test_who_says_hello_has_loaded_also_where_it_is_to_stop() -> None:
    case = Case().to_loading()
    case.ask("stop", "s1")
    case.hear("hello", step=0, pid=PID)
    assert case.state.ready


def test_a_step_ends_the_phase_before_it() -> None:
    case = Case().to_running()
    case.hear("phase", phase="save", step=0)
    assert case.state.trainer_phase == "save"
    case.hear("step", step=1, loss=1.0)
    assert case.state.trainer_phase == "step"


def test_what_is_recorded_before_a_trainer_loads_starts_none() -> None:
    case = Case().to_selecting()
    case.feed(ev.Recorded, 7, 0)
    assert case.place == ("starting", "selecting")


# --- death and budget ---


def jitter(run_id: str, attempt: int) -> float:
    word = hashlib.sha256(f"{run_id}:{attempt}".encode()).digest()
    return 0.75 + 0.25 * word[0] / 255


@pytest.mark.fault("SV-38", phase="backoff", does="waits before the first retry too, with jitter")
@pytest.mark.fault("SV-38", phase="backoff", does="waits before the first retry, with jitter")
def test_a_crash_is_reaped_recorded_and_waited_out() -> None:
    case = Case().to_running()
    assert case.feed(ev.Died) == [ev.Reap()]
    assert case.place == ("backoff", "reaping")
    assert case.deadline() is None
    assert case.reap(signal=9, step=12) == [
        ev.Append(ev.AttemptEnded(1, "signal", None, 9, 12, True, 0, ""))
    ]
    assert case.place == ("backoff", "")
    assert case.state.trainer_pid is None
    wait = RULES.delay_seconds * jitter("0f3a", 1)
    assert case.deadline() == case.now + wait
    assert case.tick(wait / 2) == []
    assert case.tick(wait / 2 + 0.001) == [ev.Merge()]
    assert case.place == ("starting", "merging")


def test_a_checkpoint_that_was_announced_before_a_death_counts_after_it() -> None:
    # The receipts are read to their end first, so the news may come later than the death.
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    case.feed(ev.Died)
    assert case.hear("step", step=9, loss=1.0) == []
    committed = ev.CheckpointCommitted(8, 1, "operator", ["c1"], "bd")
    assert case.saved(8, "c1", reason="operator")[0] == ev.Append(committed)
    assert case.place == ("backoff", "reaping")
    assert [effect.outcome for effect in case.acts if isinstance(effect, ev.Reply)] == ["done"]
    case.reap(signal=9, step=8)
    assert case.saved(9) == []  # the selection looks at what is there by itself


@pytest.mark.fault(
    "SV-37", phase="backoff", does="doubles the delay with every death, up to a maximum"
)
def test_the_delay_doubles_up_to_its_maximum() -> None:
    case = Case(rules=replace(RULES, deaths=100, maximum_delay_seconds=20.0))
    case.open()
    waits = []
    for attempt in range(1, 8):
        case.to_running()
        case.die(1)
        waits.append(((case.deadline() or 0.0) - case.now) / jitter("0f3a", attempt))
        case.tick(60)
    assert waits == pytest.approx([1, 2, 4, 8, 16, 20, 20])


@pytest.mark.fault(
    "SV-38", phase="backoff", does="never waits less than three quarters of the delay"
)
@given(st.text(max_size=8), st.integers(1, 10**6), st.integers(0, 10**4))
@cases(100)
def test_the_jitter_shortens_by_at_most_a_quarter_and_is_the_same_in_a_replay(
    run_id: str, attempt: int, deaths: int
) -> None:
    durable = Durable(
        run_id=run_id, attempt=attempt, deaths=deaths, open=ev.AttemptStarted(attempt, "n", 0, 1)
    )
    rules = replace(RULES, deaths=10**9)
    state = State(durable=durable, phase="backoff", stage="reaping")
    event = ev.Reaped(0.0, 1, None, None, 0, 0, ())
    after, _ = decide(rules, state, event)
    full = min(2.0 ** min(deaths, 30), rules.maximum_delay_seconds)
    assert after.deadline is not None
    assert 0.75 * full <= after.deadline <= full
    assert after.deadline == decide(rules, state, event)[0].deadline


@pytest.mark.fault(
    "SV-37", phase="running", does="counts every unplanned death, also after steps were made"
)
@pytest.mark.fault(
    "FC-90", phase="running", does="resets the count for a new checkpoint, never for a new process"
)
def test_fc90_a_trainer_that_dies_again_and_again_is_given_up() -> None:
    """The give-up counter was reset because each respawn itself succeeded
    (bobmatnyc/trusty-tools #3631): only a new checkpoint may reset it."""
    case = Case()
    case.open()
    for _ in range(RULES.deaths - 1):
        case.to_running()
        case.feed(ev.Recorded, 3, 0)
        case.die(1)
        assert case.place == ("backoff", "")
        case.tick(60)
    case.to_running()
    case.die(1, message="CUDA error")
    assert case.state.phase == "failed"
    assert case.state.why == (
        "3 deaths without a new checkpoint, the last one by crash: CUDA error"
    )
    assert case.records[1:] == [
        ev.RunFailed(case.state.why),
        ev.SupervisorEnded("failed", case.state.why),
    ]
    assert case.acts == [ev.Exit(1, case.state.why)]


@pytest.mark.fault(
    "SV-42", phase="running", does="goes on for ever as long as checkpoints get further"
)
def test_a_new_checkpoint_refills_the_budget() -> None:
    case = Case()
    case.open()
    for step in range(1, 4 * RULES.deaths):
        case.to_running(base=step - 1 or None)
        case.saved(step)
        case.die(1)
        assert case.state.durable.deaths == 1
        assert case.place == ("backoff", "")
        case.tick(60)


@pytest.mark.fault(
    "FC-91", phase="any", does="never resets the numbers of attempts and of restarts"
)
def test_fc91_a_restart_count_never_goes_back() -> None:
    """A loop of re-creation hid how often it had restarted (defilantech/LLMKube #1856)."""
    case = Case()
    case.open()
    for count in range(1, 4):
        case.to_running(base=count - 1 or None)
        case.saved(count)
        case.die(1)
        assert case.state.durable.restarts == count
        case.tick(60)
    assert case.reopened().state.durable.restarts == 3
    assert case.reopened().state.durable.attempt == 3


@pytest.mark.fault(
    "SV-37", phase="starting", does="keeps the count over a death of the supervisor itself"
)
@pytest.mark.fault(
    "SV-39", phase="starting", does="gives an operator who starts it by hand an attempt"
)
def test_a_spent_budget_stays_spent_when_the_verdict_was_lost() -> None:
    """The supervisor was killed after the last death and before it could say failed. A service
    manager that starts it again does not get another attempt; the operator does."""
    case = Case(*[replace(ENDED, attempt=n, cause="signal", message="") for n in (1, 2, 3)])
    again = case.reopened()
    again.open(None)
    again.feed(ev.Merged, 0)
    again.select(None)
    assert again.state.phase == "failed"
    assert "3 deaths" in again.state.durable.reason
    by_hand = case.reopened()
    by_hand.to_spawning()
    assert by_hand.place == ("starting", "spawning")


@pytest.mark.fault(
    "SV-40",
    phase="loading",
    does="fails at once for what no retry can mend, with the trainer's words",
)
@pytest.mark.parametrize(
    ("code", "cause", "word"),
    [
        (ExitCode.DATA, "data", "does not match the run"),
        (ExitCode.CONFIGURATION, "configuration", "refused its configuration"),
        (ExitCode.NON_FINITE, "non-finite", "not finite"),
    ],
)
def test_some_exit_codes_fail_at_once(code: int, cause: str, word: str) -> None:
    case = Case().to_running()
    case.die(int(code), message="window 7 of arm books")
    ended = case.state.durable.last_exit
    assert ended is not None
    assert (ended.cause, ended.code, ended.counted) == (cause, code, False)
    assert case.state.phase == "failed"
    assert word in case.state.why
    assert case.state.why.endswith(": window 7 of arm books")


@pytest.mark.fault("FC-89", phase="backoff", does="tries again without charging the budget")
@pytest.mark.fault("SV-37", phase="backoff", does="waits longer each time, charged or not")
@pytest.mark.parametrize("code", [int(ExitCode.AGAIN), int(ExitCode.OK)], ids=["again", "stopped"])
def test_fc89_an_end_that_is_not_charged_waits_longer_each_time(code: int) -> None:
    """Preemptions ate the budget of failures (skypilot-org/skypilot PR 4169); not counting them
    must not mean a restart loop without any bound (Supervisor #487). The same holds for a trainer
    that leaves as if it had been told to stop."""
    line = None if code else STOPPED_LINE
    case = Case()
    case.open()
    waits = []
    for attempt in range(1, 4 * RULES.deaths):
        case.to_running()
        case.die(code, line=line)
        assert case.state.durable.deaths == 0
        assert case.place == ("backoff", "")
        waits.append(((case.deadline() or 0.0) - case.now) / jitter("0f3a", attempt))
        case.tick(RULES.maximum_delay_seconds)
    doubled = [min(2.0**n, RULES.maximum_delay_seconds) for n in range(len(waits))]
    assert waits == pytest.approx(doubled)
    case.to_running()
    case.saved(1)
    case.die(code, line=line)
    after_progress = ((case.deadline() or 0.0) - case.now) / jitter("0f3a", 4 * RULES.deaths)
    assert after_progress == pytest.approx(RULES.delay_seconds)


def test_a_checkpoint_that_could_not_be_written_is_counted_and_tried_again() -> None:
    case = Case().to_running()
    case.die(int(ExitCode.CHECKPOINT))
    assert case.state.durable.deaths == 1
    assert case.place == ("backoff", "")


def test_a_spawn_that_fails_is_a_death() -> None:
    case = Case().to_spawning(base=100)
    case.feed(ev.SpawnFailed, "trainer.lock is still held")
    assert case.records == [
        ev.AttemptEnded(1, "spawn", None, None, 100, True, 0, "trainer.lock is still held")
    ]
    assert case.place == ("backoff", "")
    assert case.state.durable.open is None


STOPPED_LINE: Final = ExitLine("stopped", 5, 0, [], "")
FINISHED_LINE: Final = ExitLine("finished", 5, 0, [], "")
DATA_LINE: Final = ExitLine("data", 5, 65, [], "digest")


@pytest.mark.fault(
    "SV-75", phase="adoption", does="calls an exit unknown, unless the trainer has written its own"
)
@pytest.mark.parametrize(
    ("code", "signal", "line", "asked", "by_us", "cause"),
    [
        (None, 9, None, False, False, "signal"),
        (None, 9, FINISHED_LINE, True, False, "signal"),
        (None, 9, None, True, True, "killed"),
        (None, None, None, False, False, "unknown"),
        (None, None, FINISHED_LINE, False, False, "finished"),
        (None, None, STOPPED_LINE, False, False, "stopped"),
        (None, None, DATA_LINE, False, False, "data"),
        (0, None, None, False, False, "finished"),
        (0, None, None, True, False, "stopped"),
        (0, None, FINISHED_LINE, True, False, "finished"),
        (0, None, STOPPED_LINE, False, False, "stopped"),
        (0, None, DATA_LINE, False, False, "finished"),
        (1, None, FINISHED_LINE, False, False, "crash"),
        (65, None, None, False, False, "data"),
        (74, None, None, False, False, "checkpoint"),
        (75, None, None, False, False, "again"),
        (78, None, None, False, False, "configuration"),
        (80, None, None, False, False, "non-finite"),
        (2, None, None, False, True, "crash"),
        (None, None, None, False, True, "killed"),
        (143, None, None, True, False, "crash"),
    ],
)
def test_the_cause_of_death(
    code: int | None,
    signal: int | None,
    line: ExitLine | None,
    asked: bool,
    by_us: bool,
    cause: str,
) -> None:
    assert judge(ev.Reaped(0.0, code, signal, line, 5, 0, ()), asked, by_us) == cause


def test_the_message_of_a_death_is_the_most_telling_one() -> None:
    line = ExitLine("error", 3, 1, [], "from the exit line")
    case = Case().to_running()
    case.die(1, line=line, message="the last line printed")
    assert case.state.durable.last_exit.message == "from the exit line"  # type: ignore[union-attr]
    case = Case().to_running()
    case.die(1, message="the last line printed")
    assert case.state.durable.last_exit.message == "the last line printed"  # type: ignore[union-attr]


def test_what_an_attempt_verified_is_added_once() -> None:
    case = Case().to_running()
    case.feed(ev.Recorded, 10, 4)
    assert case.state.attempt_verified == 4
    case.feed(ev.Died)
    case.feed(ev.Reaped, 1, None, None, 10, 6, ())
    assert case.state.durable.verified_steps == 6
    assert case.state.attempt_verified == 0


@pytest.mark.parametrize("place", ["to_loading", "to_running", "to_stopping", "to_backoff"])
def test_steps_are_history_wherever_they_become_durable(place: str) -> None:
    """Receipts are read late at times: of a trainer that is being ended, or is dead."""
    case: Case = getattr(Case(), place)()
    case.feed(ev.Recorded, 10, 4)
    state = case.state
    assert (state.history_step, state.step, state.attempt_verified) == (10, 10, 4)


@pytest.mark.parametrize("phase", TERMINAL)
def test_what_becomes_durable_after_the_end_changes_nothing(phase: str) -> None:
    before = replace(Case().to_running().state, phase=phase, stage="", deadline=None)
    assert decide(Rules(), before, ev.Recorded(1.0, 10, 4)) == (before, [])


@pytest.mark.parametrize("place", ["to_loading", "to_stopping"])
def test_broken_receipts_end_an_attempt_that_begins_or_ends(place: str) -> None:
    case: Case = getattr(Case(), place)()
    intent = case.state.intent
    assert case.feed(ev.Broken, "step 9, expected 7") == [
        ev.Append(ev.Alarmed("contract_broken", "step 9, expected 7")),
        ev.Kill(),
    ]
    assert case.state.phase == "stopping"
    assert case.state.escalation == "killed"
    assert case.state.intent == (intent or "kill"), "a stop stays a stop"


def test_broken_receipts_end_the_attempt_with_an_alarm() -> None:
    case = Case().to_running()
    assert case.feed(ev.Broken, "step 9, expected 7") == [
        ev.Append(ev.Alarmed("contract_broken", "step 9, expected 7")),
        ev.Kill(),
    ]
    assert case.place == ("stopping", "")
    case.die(signal=9)
    ended = case.state.durable.last_exit
    assert ended is not None
    assert (ended.cause, ended.counted, ended.message) == ("killed", True, "step 9, expected 7")
    assert case.state.why == ""


# --- stop ---


@pytest.mark.fault(
    "SV-26", phase="stopping", does="counts the grace from the sending, not from the answer"
)
def test_stop_goes_by_message_then_by_term_then_by_kill() -> None:
    case = Case().to_running()
    began = case.now
    assert case.ask("stop", "s1") == [
        ev.Append(ev.Wished("stop", "s1")),
        ev.Send("stop", {"id": "stop-1", "at": "now"}),
    ]
    assert case.place == ("stopping", "")
    assert case.deadline() == began + RULES.signal_after_seconds
    assert case.tick(RULES.signal_after_seconds) == [ev.Signal("TERM")]
    assert case.deadline() == began + RULES.grace_seconds
    assert case.tick(RULES.grace_seconds - RULES.signal_after_seconds - 1) == []
    assert case.tick(1) == [ev.Kill()]
    assert case.deadline() == case.now + RULES.kill_seconds
    case.die(signal=9)
    assert case.records == [
        ev.AttemptEnded(1, "killed", None, 9, 0, False, 0, ""),
        ev.SupervisorEnded("stopped", "stopped; ended by killed"),
        case.state.durable.replies[-1],
    ]
    result = {"phase": "stopped", "step": None, "reason": "stopped; ended by killed"}
    assert case.acts == [ev.Reply("s1", "done", "", result), ev.Exit(0, "stopped; ended by killed")]


@pytest.mark.fault(
    "SV-28", phase="stopping", does="gives a trainer that has seen the stop no more than the grace"
)
def test_a_stop_that_was_seen_is_not_signalled() -> None:
    case = Case().to_stopping()
    case.hear("seen", id="stop-1")
    assert case.tick(RULES.signal_after_seconds) == []
    assert case.deadline() == case.state.force_at
    case.saved(7, "stop-1", reason="operator")
    case.die(0, line=STOPPED_LINE)
    assert case.state.phase == "stopped"
    assert case.acts[0] == ev.Reply(
        "s1", "done", "", {"phase": "stopped", "step": 7, "reason": "stopped as asked"}
    )


def test_only_the_stop_itself_counts_as_seen() -> None:
    """The word that a checkpoint request was seen may cross with a stop that gets lost."""
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    case.ask("stop", "s1")
    case.hear("seen", id="c1")
    assert case.tick(RULES.signal_after_seconds) == [ev.Signal("TERM")]


def test_without_a_link_a_stop_is_a_signal_at_once() -> None:
    case = Case().to_loading()
    case.ask("stop", "s1")
    assert case.acts == [ev.Signal("TERM")]
    assert case.deadline() == case.now + RULES.grace_seconds
    assert case.hear("hello", step=0, pid=PID) == [ev.Send("stop", {"id": "stop-1", "at": "now"})]
    assert case.state.phase == "stopping"


def test_a_grace_shorter_than_the_wait_for_a_word_is_kept() -> None:
    case = Case(rules=replace(RULES, grace_seconds=1.0)).to_stopping()
    assert case.tick(1.0) == [ev.Kill()]


@pytest.mark.fault(
    "SV-18", phase="any", does="obeys a stop in every stage of a start, and wherever else it is"
)
@pytest.mark.fault(
    "SV-31", phase="any", does="starts nothing after a stop, wherever the stop met it"
)
@each_place
@pytest.mark.parametrize("operator", [True, False], ids=["operator", "signal"])
def test_stop_anywhere_ends_stopped_with_one_reply(place: str, operator: bool) -> None:
    case = PLACES[place]()
    replies = []
    if operator:
        case.ask("stop", "s2")
        assert case.records[0] == ev.Wished("stop", "s2")
    else:
        case.signal("stop")
        assert case.state.durable.wish == ("stop" if "stopping" in place else "run")
    replies += [effect for effect in case.effects if isinstance(effect, ev.Reply)]
    spawned = case.place == ("starting", "spawning")
    if case.state.phase != "stopped":
        finish(case)
        replies += [effect for effect in case.effects if isinstance(effect, ev.Reply)]
    assert case.state.phase == "stopped"
    assert isinstance(case.effects[-1], ev.Exit)
    assert case.effects[-1].code == 0
    expected = (["s1"] if "stopping" in place else []) + (["s2"] if operator else [])
    assert sorted(reply.id for reply in replies) == expected
    assert case.state.durable.attempt == (0 if place in BEFORE_SPAWN else 1)
    assert spawned == (place == "spawning")


def test_a_stop_while_receipts_are_merged_does_not_wait_for_a_selection() -> None:
    """A selection reads a whole checkpoint from the device."""
    case = PLACES["merging"]()
    case.ask("stop", "s1")
    case.feed(ev.Merged, 0)
    assert [type(effect) for effect in case.acts] == [ev.Reply, ev.Exit]


@pytest.mark.fault("SV-19", phase="stopping", does="keeps a stop, whatever else is asked of it")
@each_place
def test_no_other_request_undoes_a_stop(place: str) -> None:
    case = PLACES[place]()
    case.ask("stop", "s2")
    if case.state.phase == "stopped":
        return
    for number, verb in enumerate(("restart", "checkpoint", "stop", "hasten", "restart")):
        case.ask(verb, f"x{number}")
        assert case.state.intent == "stop"
        assert case.state.durable.wish == "stop"
        assert not any(isinstance(effect, ev.Merge | ev.Spawn) for effect in case.effects)
    finish(case)
    assert case.state.phase == "stopped"
    outcomes = {reply.id: reply.outcome for reply in case.state.durable.replies}
    assert outcomes["s2"] == outcomes["x2"] == "done"
    assert outcomes["x0"] in ("busy", "refused")
    assert outcomes["x1"] in ("busy", "refused")


@pytest.mark.fault("FC-73", phase="stopping", does="takes further SIGTERMs for the same wish")
def test_fc73_a_second_and_a_third_term_harden_nothing() -> None:
    """A second SIGTERM turned a graceful stop into a hard one (cockroachdb/cockroach #48070)."""
    case = Case().to_running()
    case.signal("stop", "signal-term")
    before = case.state
    for _ in range(2):
        case.now += 0.5
        assert case.signal("stop", "signal-term") == []
        assert case.state == before


@pytest.mark.fault(
    "SV-31", phase="adoption", does="goes on with a stop that its predecessor had on record"
)
def test_a_wish_outlives_the_supervisor() -> None:
    case = Case().to_stopping()
    again = case.reopened()
    again.open(None, ours())
    assert again.acts == [ev.Adopt(PID), ev.Signal("TERM")]
    again.die()
    assert again.state.phase == "stopped"
    idle = again.reopened("three")
    idle.open(None)
    assert idle.acts == [ev.Exit(0, "stopped as asked")]
    assert idle.state.durable.attempt == 1


def test_a_stop_leaves_a_finished_run_finished() -> None:
    case = Case()
    case.to_selecting(TARGET_STEP)
    case.select(TARGET_STEP)
    assert case.state.phase == "finished"
    again = case.reopened()
    again.open("stop", request="s1")
    assert (again.state.phase, again.state.durable.wish) == ("finished", "stop")
    assert again.acts[-1] == ev.Exit(0, f"reached step {TARGET_STEP}")
    (reply,) = [effect for effect in again.acts if isinstance(effect, ev.Reply)]
    assert (reply.outcome, reply.result["phase"]) == ("done", "finished")


def test_a_stop_without_a_supervisor_is_answered_by_the_life_that_it_starts() -> None:
    case = Case().to_running().reopened()
    case.open("stop", ours(), request="s7")
    assert case.acts == [ev.Adopt(PID), ev.Signal("TERM")]
    case.die(0, line=STOPPED_LINE)
    assert [effect.id for effect in case.acts if isinstance(effect, ev.Reply)] == ["s7"]


def test_a_stop_that_was_answered_before_the_crash_is_not_answered_anew() -> None:
    case = Case(ev.Replied("s7", "stop", "done", "", {"step": 3}))
    case.open("stop", request="s7")
    assert case.state.phase == "stopped"
    assert not any(isinstance(record, ev.Replied) for record in case.records)


def test_a_stop_that_meets_the_end_of_training_is_still_stopped() -> None:
    case = Case().to_stopping()
    case.saved(TARGET_STEP)
    case.die(0, line=ExitLine("finished", TARGET_STEP, 0, [], ""))
    assert case.state.phase == "stopped"
    assert case.state.why == "stopped as asked"


def test_a_stop_answers_with_the_newest_checkpoint_that_is_there() -> None:
    case = Case().to_running()
    case.saved(10)
    case.saved(20)
    case.feed(ev.Verified, 20, "chunk 0 differs", moved_to="quarantine/step_000020")
    case.ask("stop", "s1")
    case.die(0, line=STOPPED_LINE)
    reply = next(effect for effect in case.acts if isinstance(effect, ev.Reply))
    assert reply.result["step"] == 10


# --- less patience ---


def test_the_second_and_the_third_interrupt() -> None:
    case = Case().to_running()
    case.signal("stop", "signal-int-1")
    case.now += 1
    assert case.signal("hasten", "signal-int-2") == [ev.Signal("TERM")]
    assert case.deadline() == case.now + RULES.hasten_seconds
    case.now += 1
    assert case.signal("kill", "signal-int-3") == [ev.Kill()]
    case.die(signal=9)
    assert case.state.phase == "stopped"
    assert case.acts == [ev.Exit(130, "stopped; ended by killed")]
    assert case.state.durable.wish == "run", "an interrupt ends this life, not the run"
    assert not case.state.durable.last_exit.counted  # type: ignore[union-attr]


def test_a_hastened_stop_is_killed_sooner_and_never_later() -> None:
    case = Case().to_stopping()
    case.tick(RULES.signal_after_seconds)
    force_at = case.state.force_at
    case.now = force_at - 3
    assert case.signal("hasten") == []
    assert case.deadline() == case.state.force_at == force_at
    assert case.tick(3) == [ev.Kill()]


def test_an_interrupt_without_a_stop_before_it_is_a_stop() -> None:
    case = Case().to_running()
    case.signal("hasten")
    assert case.state.phase == "stopping"
    assert case.acts == [ev.Send("stop", {"id": "stop-1", "at": "now"})]


@pytest.mark.fault("SV-20", phase="any", does="takes a kill in every phase, also while it stops")
@each_place
def test_kill_anywhere_ends_forced(place: str) -> None:
    case = PLACES[place]()
    case.signal("kill")
    killed = ev.Kill() in case.effects
    if case.state.phase != "stopped":
        if case.place == ("starting", "spawning"):
            assert case.feed(ev.Spawned, PID, 77, "boot")[-1] == ev.Kill()
            killed = True
        finish(case)
    assert case.state.phase == "stopped"
    assert case.effects[-1].code == ExitCode.FORCED  # type: ignore[union-attr]
    living = place in ("spawning", "loading", "running", "stopping", "stopping, reaping")
    assert killed == living


def test_a_kill_after_the_death_does_not_take_the_blame() -> None:
    """It ends what the dead trainer left behind; what killed the trainer was something else."""
    case = stopping_reaping_case()
    assert case.signal("kill") == [ev.Kill()]
    case.reap(signal=11)
    assert case.state.durable.last_exit.cause == "signal"  # type: ignore[union-attr]


# --- restart ---


def test_restart_stops_and_starts_and_is_answered_by_the_new_attempt() -> None:
    case = Case().to_running()
    assert case.ask("restart") == [ev.Send("stop", {"id": "stop-1", "at": "now"})]
    assert case.state.durable.wish == "run"
    case.saved(7, "stop-1", reason="operator")
    assert case.die(0, line=STOPPED_LINE, step=7)[-1] == ev.Merge()
    case.to_running(base=7)
    assert case.effects == [
        ev.Append(ev.Replied("r1", "restart", "done", "", {"attempt": 2})),
        ev.Reply("r1", "done", "", {"attempt": 2}),
    ]
    assert case.state.restart_ids == ()
    assert case.state.durable.deaths == 0


def test_a_restart_that_had_to_be_killed_is_not_counted() -> None:
    case = Case().to_running()
    case.ask("restart")
    case.tick(RULES.grace_seconds)
    case.die(signal=9)
    assert case.state.durable.deaths == 0
    assert case.place == ("starting", "merging")


def test_a_new_attempt_inherits_neither_the_link_nor_the_kill_of_the_one_before() -> None:
    case = Case().to_running()
    case.ask("restart")
    case.tick(RULES.grace_seconds)
    case.feed(ev.Died)
    case.hear("farewell", why="stopped", step=0)
    case.reap(signal=9)
    case.to_loading()
    assert not case.state.linked
    case.die(signal=9)
    assert case.state.durable.last_exit.cause == "signal"  # type: ignore[union-attr]


@pytest.mark.parametrize("place", [*BEFORE_SPAWN, "spawning", "loading"])
def test_a_restart_of_what_is_starting_is_answered_when_it_runs(place: str) -> None:
    case = PLACES[place]()
    assert case.ask("restart") == []
    finish(case)
    case.hear("hello", step=0, pid=PID)
    assert case.acts == [ev.Reply("r1", "done", "", {"attempt": 1})]


def test_a_restart_ends_the_wait() -> None:
    case = Case().to_backoff()
    assert case.ask("restart") == [ev.Merge()]
    assert case.deadline() is None


@pytest.mark.fault(
    "SV-39", phase="loading", does="gives the operator's restart its attempt, whatever was spent"
)
def test_a_restart_gets_its_attempt_even_if_the_budget_is_spent_meanwhile() -> None:
    case = Case(rules=replace(RULES, deaths=1)).to_loading()
    case.ask("restart")
    case.die(1)
    case.to_running()
    assert case.acts == [ev.Reply("r1", "done", "", {"attempt": 2})]


@pytest.mark.fault(
    "SV-31", phase="stopping", does="lets a stop win over a restart that is under way"
)
def test_a_stop_overtakes_a_restart() -> None:
    case = Case().to_running()
    case.ask("restart", "r1")
    case.ask("stop", "s1")
    case.die(0, line=STOPPED_LINE)
    assert case.state.phase == "stopped"
    outcomes = {effect.id: effect.outcome for effect in case.acts if isinstance(effect, ev.Reply)}
    assert outcomes == {"s1": "done", "r1": "refused"}


def test_a_restart_during_a_stop_is_told_so() -> None:
    case = Case().to_stopping()
    case.ask("restart", "r1")
    assert case.acts == [ev.Reply("r1", "busy", "a stop is under way", {})]


# --- checkpoints on request ---


@pytest.mark.fault(
    "SV-22", phase="running", does="gives each request an id, and answers it with a step"
)
def test_a_checkpoint_is_asked_for_seen_and_answered() -> None:
    case = Case().to_running()
    assert case.ask("checkpoint", "c1") == [ev.Send("checkpoint", {"id": "c1", "at": "now"})]
    assert case.deadline() == case.now + RULES.signal_after_seconds
    assert case.hear("seen", id="c1") == []
    assert case.deadline() == case.state.patience.looked + LOOK_SECONDS
    assert case.saved(7, "c1", reason="operator") == [
        ev.Append(ev.CheckpointCommitted(7, 1, "operator", ["c1"], "bd")),
        ev.Verify(7),
        ev.Append(ev.Replied("c1", "checkpoint", "done", "", {"step": 7})),
        ev.Reply("c1", "done", "", {"step": 7}),
    ]
    assert case.state.checkpoints == ()


def test_a_checkpoint_at_the_next_boundary_waits_for_the_one_that_names_it() -> None:
    case = Case().to_running()
    assert case.ask("checkpoint", "c1", at="boundary") == [
        ev.Send("checkpoint", {"id": "c1", "at": "boundary"})
    ]
    case.hear("seen", id="c1")
    case.saved(7, "c2", reason="operator")
    assert len(case.state.checkpoints) == 1
    case.saved(100, "c1")
    assert case.acts == [ev.Verify(100), ev.Reply("c1", "done", "", {"step": 100})]


@pytest.mark.fault(
    "SV-22", phase="running", does="tries the signal when nobody has seen the message"
)
def test_an_unseen_request_falls_back_to_the_signal_and_is_answered_without_its_name() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    assert case.tick(RULES.signal_after_seconds) == [ev.Signal("USR1")]
    assert case.deadline() == case.now + RULES.signal_after_seconds, "and again, if need be"
    case.saved(7, reason="sigusr1")
    assert case.acts[-1] == ev.Reply("c1", "done", "", {"step": 7})
    assert case.deadline() == case.state.patience.looked + LOOK_SECONDS


def test_a_checkpoint_that_nobody_asked_for_answers_nobody() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    case.saved(100)
    assert [request.id for request in case.state.checkpoints] == ["c1"]


def test_a_request_to_a_trainer_without_a_link_is_a_signal() -> None:
    case = Case().to_loading()
    case.feed(ev.Recorded, 1, 0)
    assert case.ask("checkpoint", "c1") == [ev.Signal("USR1")]


@pytest.mark.parametrize("place", [*BEFORE_SPAWN, "spawning", "loading"])
def test_a_request_waits_for_the_trainer_that_is_starting(place: str) -> None:
    case = PLACES[place]()
    assert case.ask("checkpoint", "c1") == []
    case.ask("checkpoint", "c2", at="boundary")
    finish(case)
    assert case.hear("hello", step=0, pid=PID) == [
        ev.Send("checkpoint", {"id": "c1", "at": "now"}),
        ev.Send("checkpoint", {"id": "c2", "at": "boundary"}),
    ]


def test_a_trainer_that_connects_anew_is_asked_again() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    assert case.hear("hello", step=0, pid=PID) == [ev.Send("checkpoint", {"id": "c1", "at": "now"})]


def test_a_request_during_a_stop_goes_to_the_trainer_too() -> None:
    case = Case().to_stopping()
    assert case.ask("checkpoint", "c1") == [ev.Send("checkpoint", {"id": "c1", "at": "now"})]
    case.saved(7, "c1", "stop-1", reason="operator")
    assert case.acts[-1] == ev.Reply("c1", "done", "", {"step": 7})


@pytest.mark.fault(
    "SV-22", phase="running", does="refuses with the cause what a dead trainer can no longer save"
)
def test_a_request_is_refused_when_the_trainer_dies() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    case.die(signal=9)
    assert case.effects[1:] == [
        ev.Append(
            ev.Replied(
                "c1", "checkpoint", "refused", "the trainer ended (signal) before it could save", {}
            )
        ),
        ev.Reply("c1", "refused", "the trainer ended (signal) before it could save"),
    ]


@pytest.mark.parametrize("place", ["reaping", "stopping, reaping", "backoff"])
def test_without_a_trainer_a_request_is_told_what_is_newest(place: str) -> None:
    case = PLACES[place]()
    case.ask("checkpoint", "c1")
    (reply,) = case.acts
    assert isinstance(reply, ev.Reply)
    assert reply.outcome == "busy"
    assert (
        reply.why
        == f"no trainer is running ({case.state.phase}); the newest checkpoint is step None"
    )


def test_late_news_of_a_checkpoint_from_before_the_request_does_not_answer_it() -> None:
    case = Case().to_running()
    case.hear("step", step=8, loss=1.0)
    case.ask("checkpoint", "c1")
    case.saved(6, reason="sigusr1")
    assert case.acts == [ev.Verify(6)]
    case.saved(8, reason="sigusr1")
    assert ev.Reply("c1", "done", "", {"step": 8}) in case.acts


def test_a_signal_asks_for_a_checkpoint_and_gets_no_reply() -> None:
    case = Case().to_running()
    case.signal("checkpoint", "signal-usr1-1")
    assert case.acts == [ev.Send("checkpoint", {"id": "signal-usr1-1", "at": "now"})]
    case.saved(7, "signal-usr1-1", reason="operator")
    assert case.acts == [ev.Verify(7)]
    case = Case().to_backoff()
    assert case.signal("checkpoint", "signal-usr1-2") == []


@pytest.mark.fault(
    "SV-65", phase="running", does="carries one id out once, however often it is asked for"
)
@pytest.mark.parametrize("verb", ["checkpoint", "stop", "restart"])
def test_one_id_is_carried_out_once_while_it_waits(verb: str) -> None:
    case = Case().to_running()
    case.ask(verb, "r1")
    before = case.state
    assert case.ask(verb, "r1") == []
    assert case.state == before


@pytest.mark.fault(
    "SV-65", phase="adoption", does="gives one id the answer on record, also in its next life"
)
def test_one_id_gets_one_answer_also_from_the_next_life() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    case.saved(7, "c1", reason="operator")
    answer = case.acts[-1]
    assert case.ask("checkpoint", "c1") == [answer]
    again = case.reopened()
    again.open("run", ours())
    assert again.ask("checkpoint", "c1") == [answer]
    stop = again.ask("stop", "c1")
    assert stop == [ev.Reply("c1", "refused", "this id is that of a checkpoint that was answered")]
    assert again.state.phase == "running", "and no answer for what was not done"
    again.ask("stop", "s1")
    again.die(0, line=STOPPED_LINE)
    assert again.state.phase == "stopped"
    assert again.ask("checkpoint", "c1") == [answer]


@pytest.mark.parametrize("phase", TERMINAL)
def test_at_the_very_end_everybody_is_told_so(phase: str) -> None:
    state = State(phase=phase)
    asked = ev.Asked(1.0, "r1", "checkpoint")
    expected = ev.Reply("r1", "busy", f"the supervisor is ending ({phase})")
    assert decide(RULES, state, asked) == (state, [expected])
    assert decide(RULES, state, replace(asked, operator=False)) == (state, [])


def test_a_request_is_seen_when_the_trainer_names_it() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "r1")
    case.ask("checkpoint", "r2")
    case.hear("seen", id="r2")
    assert [(one.id, one.seen) for one in case.state.checkpoints] == [("r1", False), ("r2", True)]


# --- what the trainer saved, as the helper finds it ---


def test_a_base_that_is_found_damaged_while_its_surroundings_are_cleared_is_chosen_anew() -> None:
    case = Case().to_selecting(history=120)
    case.select(120)
    assert case.place == ("starting", "clearing")
    case.feed(ev.Verified, 120, "chunk 3 differs", moved_to="quarantine/120")
    case.feed(ev.Cleared, 120, ())
    assert case.acts == [ev.Merge()]
    case.feed(ev.Merged, 120)
    assert case.acts == [ev.Select(ceiling=120)]


# --- a disk that is full or broken ---


def unsaved(case: Case, step: int, *requests: str, why: str = "[Errno 28] full") -> Any:
    return case.hear("unsaved", step=step, why=why, errno=28, requests=list(requests))


def test_a_refused_save_is_an_alarm_and_an_answer_and_no_death() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "r1")
    case.ask("checkpoint", "r2", at="boundary")
    unsaved(case, 100, "r1", "signal-usr1-1")
    why = "step 100 could not be saved: [Errno 28] full"
    assert case.records == [
        ev.Alarmed("unsaved", why),
        ev.Replied("r1", "checkpoint", "refused", why, {}),
    ]
    assert [request.id for request in case.state.checkpoints] == ["r2"]
    assert case.state.phase == "running"
    unsaved(case, 200)
    assert case.records == [], "said once"
    case.saved(300, "r2")
    assert ev.AlarmCleared("unsaved") in case.records
    assert case.state.durable.alarms == ()
    case.saved(400)
    assert ev.AlarmCleared("unsaved") not in case.records


def test_a_trainer_that_waits_to_record_its_beginning_is_not_killed_for_it() -> None:
    case = Case().to_loading()
    case.wait(RULES.limits.start_seconds - 1.0)
    unsaved(case, 0)
    assert case.wait(RULES.limits.start_seconds - 1.0) == []
    assert case.wait(1.0) == [ev.Examine()]


def test_a_full_disk_ends_nothing_unless_the_operator_wants_that() -> None:
    case = Case().to_running()
    assert case.feed(ev.Full, "no room") == []


def full_and_stopping() -> Case:
    case = Case(rules=replace(RULES, stop_when_full=True)).to_running()
    case.feed(ev.Full, "no room")
    assert case.acts == [ev.Send("stop", {"id": "stop-1", "at": "now"})]
    assert case.place == ("stopping", "")
    assert case.feed(ev.Full, "no room") == [], "it stops already"
    return case


@pytest.mark.parametrize("code", [0, int(ExitCode.CHECKPOINT)])
def test_a_full_disk_stops_the_run_cleanly_with_the_wish_as_it_was(code: int) -> None:
    case = full_and_stopping()
    case.die(code)
    reason = "stopped, as checkpoint.when_full says: no room"
    assert ev.RunFailed(reason) in case.records
    assert case.acts == [ev.Exit(int(ExitCode.FAILED), reason)]
    durable = case.state.durable
    assert (durable.wish, durable.deaths, durable.outcome) == ("run", 0, "failed")
    again = case.reopened()
    again.open()
    assert again.state.phase == "starting", "the operator's start works as ever"


def test_a_stop_overtakes_a_full_disk_and_so_does_the_end_of_training() -> None:
    case = full_and_stopping()
    case.ask("stop", "s1")
    case.die(0)
    assert case.place == ("stopped", "")
    case = full_and_stopping()
    case.saved(TARGET_STEP)
    case.die(0, line=ExitLine("finished", TARGET_STEP, 0, [], ""), step=TARGET_STEP)
    assert case.state.phase == "starting", "the checkpoint at the target tells that it is finished"


def test_what_was_removed_is_on_record() -> None:
    case = Case().to_running()
    case.saved(100)
    case.feed(ev.Removed, (100,), ("superseded/step_000200.bin",), 80)
    assert case.records == [
        ev.CheckpointsRemoved([100]),
        ev.LeftoversRemoved(["superseded/step_000200.bin"], 80),
    ]
    assert case.feed(ev.Removed, ()) == []


def test_what_went_without_a_word_is_missed_by_the_next_selection() -> None:
    """The helper, or a whole life, was killed between the removal and its record."""
    committed = [ev.CheckpointCommitted(step, 1, "cadence", [], "bd") for step in (100, 200, 300)]
    case = Case(*committed, ev.CheckpointVerified(100, "sha")).to_selecting(history=300)
    case.select(300, present=(300,))
    assert case.records[0] == ev.CheckpointsRemoved([100, 200])
    assert case.state.durable.on_disk == {300}
    assert case.state.durable.verified == {300}
    assert case.place == ("starting", "clearing")
    case.feed(ev.Cleared, 300, ())
    assert not any(isinstance(record, ev.CheckpointsSuperseded) for record in case.records)


def test_a_selection_misses_nothing_above_its_ceiling() -> None:
    case = Case(ev.CheckpointCommitted(100, 1, "cadence", [], "bd")).to_selecting(history=50)
    case.select(None, present=(100,))
    assert case.state.durable.on_disk == {100}


def test_a_saved_checkpoint_is_verified_once_and_then_retention_may_go_on() -> None:
    case = Case().to_running()
    assert ev.Verify(7) in case.saved(7)
    assert ev.Verify(7) not in case.saved(7)
    assert case.feed(ev.Noticed, 7) == []
    assert case.feed(ev.Verified, 7, "", "sha", "bd", 1, "cadence") == [
        ev.Append(ev.CheckpointVerified(7, "sha")),
        ev.Retain(newest_verified=7),
    ]
    assert case.feed(ev.Noticed, 7) == []
    assert case.feed(ev.Removed, (3,)) == [ev.Append(ev.CheckpointsRemoved([3]))]
    assert case.feed(ev.Removed, ()) == []


def test_a_checkpoint_that_no_message_told_of_is_verified_and_recorded() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    assert case.feed(ev.Noticed, 7) == [ev.Verify(7)]
    assert case.feed(ev.Verified, 7, "", "sha", "bd", 1, "operator", ("c1",))[:2] == [
        ev.Append(ev.CheckpointCommitted(7, 1, "operator", ["c1"], "bd")),
        ev.Append(ev.CheckpointVerified(7, "sha")),
    ]
    assert ev.Reply("c1", "done", "", {"step": 7}) in case.effects
    assert case.deadline() == case.state.patience.looked + LOOK_SECONDS


def test_what_could_not_be_read_back_is_tried_again_with_the_next_checkpoint() -> None:
    case = Case().to_running()
    case.ask("checkpoint", "c1")
    assert case.feed(ev.Noticed, 7) == [ev.Verify(7)]
    assert case.feed(ev.Unverified, 7) == []
    assert case.state.verifying == frozenset()
    assert case.saved(8) == [
        ev.Append(ev.CheckpointCommitted(8, 1, "cadence", [], "bd")),
        ev.Verify(7),
        ev.Verify(8),
    ]
    case.feed(ev.Verified, 7, "", "sha", "bd", 1, "operator", ("c1",))
    assert ev.CheckpointCommitted(7, 1, "operator", ["c1"], "bd") in case.records
    assert ev.Reply("c1", "done", "", {"step": 7}) in case.effects
    case.feed(ev.Unverified, 8)
    assert case.saved(9)[-2:] == [ev.Verify(8), ev.Verify(9)], "and so on, once for each"


def unread() -> Case:
    case = Case().to_running()
    case.saved(7)
    case.feed(ev.Unverified, 7)
    return case


def test_what_could_not_be_read_back_and_is_gone_is_not_asked_for_again() -> None:
    case = unread()
    case.feed(ev.Removed, (7,))
    assert case.saved(8)[-1:] == [ev.Verify(8)]
    assert ev.Verify(7) not in case.effects
    case = unread()
    case.die(signal=9)
    case.wait(RULES.delay_seconds)
    case.to_selecting(history=7).select(None, present=())
    assert case.state.unread == frozenset()


def test_what_went_between_two_tries_to_read_it_back_was_not_damaged() -> None:
    case = Case().to_running()
    case.saved(7)
    case.feed(ev.Removed, (7,))
    assert case.feed(ev.Verified, 7, "step_000007.bin: no such file") == []
    case.saved(8)
    case.feed(ev.Verified, 8, "step_000008.bin: no such file")
    assert ev.CheckpointQuarantined(8, "step_000008.bin: no such file", "") in case.records


@each_place
def test_a_spoiled_checkpoint_is_quarantined_with_an_alarm(place: str) -> None:
    case = PLACES[place]()
    assert case.feed(ev.Verified, 7, "chunk 2 differs", moved_to="quarantine/step_000007") == [
        ev.Append(ev.CheckpointQuarantined(7, "chunk 2 differs", "quarantine/step_000007")),
        ev.Append(ev.Alarmed("checkpoint_quarantined", "step 7: chunk 2 differs")),
    ]


def test_a_pause_that_nobody_wants_is_ended() -> None:
    """It was the last word of a supervisor that has died since."""
    case = Case().to_running()
    assert case.hear("paused", step=7, id="p1") == [ev.Send("resume")]
    assert case.hear("farewell", why="stopped", step=7) == []
    assert case.state.trainer_phase == "exit"


# --- taking over ---


@pytest.mark.fault(
    "SV-3", phase="adoption", does="takes a trainer over that outlived its supervisor"
)
def test_a_trainer_that_outlived_the_supervisor_is_adopted() -> None:
    case = Case().to_running(base=100).reopened()
    assert case.open("run", ours()) == [
        ev.Append(ev.Wished("run", "")),
        *OPENING,
        ev.Append(ev.AttemptAdopted(1, PID)),
        ev.Adopt(PID),
    ]
    assert case.place == ("running", "")
    assert (case.state.trainer_pid, case.state.step) == (PID, 100)
    case.hear("step", step=130, loss=1.0)
    assert case.state.linked
    assert case.state.step == 130


@pytest.mark.parametrize(("stepped", "step"), [(True, 140), (False, 100)])
def test_an_adopted_trainer_is_where_its_own_steps_say(stepped: bool, step: int) -> None:
    """The history may be ahead of one that has not executed its first step again."""
    case = Case().to_running(base=100, history=140).reopened()
    case.state = replace(case.state, history_step=140)
    case.open("run", ours(), stepped=stepped)
    assert case.state.step == step


def test_an_attempt_counts_on_from_lives_that_nobody_recorded() -> None:
    case = Case()
    case.open()
    case.feed(ev.Merged, 60, 5)
    case.select(60)
    case.clear()
    begun = case.state.durable.begun
    assert begun is not None
    assert (begun.attempt, begun.resume_step) == (6, 60)


def test_an_adopted_trainer_without_a_step_may_still_be_loading() -> None:
    case = Case().to_loading().reopened()
    case.open("run", ours(), stepped=False)
    assert case.acts == [ev.Adopt(PID)]
    assert case.state.step == 0
    assert case.place == ("starting", "loading")
    assert case.wait(RULES.limits.start_seconds) == [ev.Examine()]
    case.wait(RULES.limits.evidence_seconds + RULES.grace_seconds)
    assert case.acts == [ev.Kill()]
    case.die(signal=9)
    ended = case.state.durable.last_exit
    assert ended is not None
    assert ended.cause == "hang"
    assert ended.message.startswith("no hello within 600 s")


@pytest.mark.parametrize("sign", ["hello", "step"])
def test_an_adopted_trainer_that_shows_life_has_loaded(sign: str) -> None:
    case = Case().to_loading().reopened()
    case.open("run", ours(), stepped=False)
    if sign == "hello":
        case.hear("hello", step=7)
    else:
        case.feed(ev.Recorded, 7, 0)
    assert case.place == ("running", "")
    assert case.state.step == 7


def test_an_adopted_trainer_that_was_killed_before_gets_no_second_chance() -> None:
    """It waits in the kernel: it will not train on, but it may still go."""
    dying = replace(ours(), dying=True)
    case = Case().to_running().reopened()
    case.open("run", dying)
    assert case.acts == [ev.Adopt(PID), ev.Kill()]
    assert case.place == ("stopping", "")
    gone = replace_state(case)
    gone.die(signal=9)
    assert gone.state.durable.last_exit.cause == "killed"  # type: ignore[union-attr]
    assert gone.place == ("backoff", "")
    case.tick(RULES.kill_seconds)
    assert case.state.phase == "stuck"
    stopping = Case().to_running().reopened()
    stopping.open("stop", dying)
    assert stopping.state.intent == "stop"
    stopping.die(signal=9)
    assert stopping.state.phase == "stopped"


def replace_state(case: Case) -> Case:
    """Another way that this case may go on from here."""
    other = Case(*case.journal[1:], rules=case.rules, life=case.life)
    other.state, other.now = case.state, case.now
    return other


@pytest.mark.fault("SV-20", phase="stopping", does="takes a kill in every state, and counts once")
def test_a_kill_that_has_no_effect_ends_in_stuck() -> None:
    """Who waits for a process in the kernel waits for ever (pytorch PR 185414, moby #22802)."""
    case = Case().to_stopping()
    case.ask("restart", "r9")
    case.signal("kill", "signal-int-3")
    began = case.now
    assert case.deadline() == began + RULES.kill_seconds
    case.tick(RULES.kill_seconds - 1)
    assert case.signal("kill", "signal-int-4") == [ev.Kill()]
    assert case.deadline() == began + RULES.kill_seconds, "asking again does not begin anew"
    case.tick(1)
    assert case.state.phase == "stuck"
    assert f"process {PID} does not end, 30 s after SIGKILL" in case.state.why
    assert case.state.durable.open is not None, "it has not ended"
    assert [type(act) for act in case.acts] == [ev.Reply, ev.Exit]
    assert case.feed(ev.Died) == []


def test_memory_that_is_held_is_stuck_and_on_record() -> None:
    case = Case().to_running()
    case.feed(ev.Died)
    held = "process 41 still holds 5.0 GiB of GPU 0"
    case.feed(ev.Reaped, None, 9, None, 5, 0, (), held=held)
    assert case.state.phase == "stuck"
    assert case.state.why == f"the memory of the dead attempt is not released: {held}"
    assert case.state.durable.open is None
    assert case.state.durable.last_exit.cause == "signal"  # type: ignore[union-attr]


@pytest.mark.parametrize("cause", ["out-of-memory", "device-lost"])
def test_a_death_with_evidence_counts_like_any_other(cause: str) -> None:
    seen = ev.Evidence("the kernel ended 1 process", device_lost="GPU is lost")
    case = Case().to_running()
    case.feed(ev.Died)
    number = 9 if cause == "out-of-memory" else 11
    case.feed(ev.Reaped, None, number, None, 5, 0, (), "last words", seen)
    ended = case.state.durable.last_exit
    assert ended is not None
    assert (ended.cause, ended.counted) == (cause, True)
    assert ended.message in ("the kernel ended 1 process; last words", "GPU is lost; last words")
    assert case.state.durable.restarts == 1
    assert case.place == ("backoff", "")


@pytest.mark.fault(
    "SV-32", phase="adoption", does="adopts what its predecessor started and could not record"
)
def test_what_was_spawned_and_never_recorded_is_adopted_too() -> None:
    case = Case().to_spawning().reopened()
    case.open("run", ours())
    assert case.acts == [ev.Adopt(PID)]


@pytest.mark.fault(
    "SV-75", phase="adoption", does="counts an unknown exit as a death, and never as a success"
)
def test_a_trainer_that_died_with_the_supervisor_is_reaped_first() -> None:
    case = Case().to_running().reopened()
    case.open(None)
    assert case.effects == [*OPENING, ev.Reap()]
    assert case.place == ("backoff", "reaping")
    case.reap(step=5)
    assert case.records == [ev.AttemptEnded(1, "unknown", None, None, 5, True, 0, "")]
    assert case.place == ("backoff", "")


@pytest.mark.fault("SV-33", phase="adoption", does="takes 'it has gone' for a death like any other")
def test_an_adoption_that_comes_too_late_is_a_death() -> None:
    case = Case().to_running().reopened()
    case.open(None, ours())
    case.die(line=FINISHED_LINE)
    assert case.state.durable.last_exit.cause == "finished"  # type: ignore[union-attr]


@pytest.mark.parametrize("open_attempt", [True, False])
def test_a_stranger_on_the_lock_is_stuck_and_named(open_attempt: bool) -> None:
    case = Case().to_running().reopened() if open_attempt else Case()
    stranger = ev.Holder(7, False, True, "vi lock")
    holders = (ours(), stranger) if open_attempt else (stranger,)
    case.open("run", *holders)
    assert case.state.phase == "stuck"
    assert case.state.why == (
        "trainer.lock is held by process 7 (vi lock), which is not provably ours"
    )
    assert case.acts == [ev.Exit(1, case.state.why)]
    assert (case.state.durable.open is not None) == open_attempt


def test_a_worker_that_outlived_its_trainer_is_reaped_and_not_a_stranger() -> None:
    """It carries our nonce, so the reaping may end it; only what then remains is stuck."""
    case = Case().to_running().reopened()
    case.open("run", ours(leader=False))
    assert case.acts == [ev.Reap()]


@pytest.mark.fault(
    "SV-35",
    phase="stopping",
    does="says which process does not end, is stuck, and starts no second",
)
def test_what_holds_the_lock_after_the_death_is_stuck() -> None:
    case = Case().to_running()
    case.ask("restart", "r1")
    case.die(signal=9, holders=(51, 52))
    assert case.state.phase == "stuck"
    assert case.state.why == "processes 51, 52 of the dead attempt do not end"
    assert case.state.durable.open is None
    assert [type(effect) for effect in case.acts] == [ev.Reply, ev.Exit]
    assert case.acts[0].outcome == "refused"  # type: ignore[union-attr]
    assert case.acts[-1].code == 1  # type: ignore[union-attr]


def test_a_stop_that_ends_stuck_is_not_done() -> None:
    case = Case().to_running()
    case.ask("stop", "s1")
    case.die(signal=9, holders=(51,))
    (reply,) = [reply for reply in case.state.durable.replies if reply.id == "s1"]
    assert (reply.outcome, reply.result["phase"]) == ("refused", "stuck")
    assert reply.why == "stuck: processes 51 of the dead attempt do not end"


# --- what holds of every decision ---


def test_deadlines_are_not_met_early_and_cost_one_wake_up() -> None:
    for place, make in PLACES.items():
        case = make()
        deadline = case.deadline()
        if deadline is None:
            assert place not in ("loading", "stopping", "backoff")
            assert case.tick(10**6) == []
            continue
        case.now = deadline - 0.001
        assert case.tick() == []
        # To look at a living trainer puts off the next look, and nothing else.
        watched = case.state.phase == "running" or case.state.stage == "loading"
        assert case.deadline() == (case.now + LOOK_SECONDS if watched else deadline)
        case.now = deadline
        case.tick()
        later = case.deadline()
        assert later is None or later > case.now


def test_the_state_holds_nothing_that_a_caller_could_change() -> None:
    for kind in (State, Durable, Patience):
        for field in fields(kind):
            value = getattr(kind(), field.name)
            assert value is None or isinstance(
                value, str | int | float | tuple | frozenset | Durable | Patience
            )
