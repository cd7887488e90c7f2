"""The lifecycle in seeded worlds: whatever happens, in whatever order, these things hold.

A failure names its seed; `simulate(seed)` plays the same schedule again, event for event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest
from shell import Life
from world import TARGET_STEP, World

from supervisor import events as ev
from supervisor.contract import Json
from supervisor.machine import TABLE, _impossible
from supervisor.state import CAUSES, TERMINAL, Durable, State, apply, fold

pytestmark = pytest.mark.timeout(600)  # thousands of worlds, of processor time alone

SEEDS: Final = 5_000
SOAK_SEEDS: Final = 100_000
FAULT_SECONDS: Final = 120.0
DRAIN_SECONDS: Final = 900.0
EVENTS_MAX: Final = 5_000
AT_ONE_INSTANT_MAX: Final = 100

Cell = tuple[str, str]

# Handled, and yet next to no schedule leads there, or none at all.
UNREACHED: Final[dict[Cell, str]] = {
    ("stuck", "Died"): "what could not be killed has to end in the few seconds before this life is"
    " over",
    ("failed", "Noticed"): "what ended by itself is not looked at any more, and what was killed has"
    " been looked at since; it takes a machine that pauses at the wrong moment",
    ("finished", "Noticed"): "what was noticed is decided on before the selection is asked for",
    **{
        ("finished", event): "the helper works in order: it has verified before it selects; only"
        " what it is asked again, which no world has, comes later"
        for event in ("Verified", "Unverified")
    },
    **{
        (phase, "Recorded"): "only what does not end with its trainer goes on to write receipts,"
        " and that is stuck"
        for phase in ("stopped", "failed", "finished")
    },
}

# Where a life can be while it waits, as (phase, stage).
STAGES: Final = ("merging", "selecting", "archiving", "clearing", "spawning")
WITHOUT_DEADLINE: Final = (
    *(("starting", stage) for stage in STAGES),
    *((phase, "") for phase in TERMINAL),
)
WAITING: Final = (
    *(("starting", stage) for stage in (*STAGES, "loading")),
    *(("running", ""), ("stopping", ""), ("backoff", "")),
    *(("stopping", "reaping"), ("backoff", "reaping")),
)


class Checks:
    """Looks at every decision and at every effect, and remembers what it has seen."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world
        self.cells: Counter[Cell] = Counter()
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.causes: Counter[str] = Counter()
        self.pivots: Counter[str] = Counter()
        self.answers: dict[str, tuple[str, str, Json]] = {}
        self.last: State = State()
        self._instant = (0.0, 0)

    # --- a life ends ---

    def closed(self, life: Life) -> None:
        """Replay is live: what is on the disk and what was on its way there is the state."""
        pending = [*(life.commit.records if life.commit is not None else []), *life.records]
        assert life.state.durable == fold([*self._journalled(), *parsed(pending)])
        self.last = life.state

    # --- a decision ---

    def decided(self, life: Life, before: State, event: ev.Event, effects: list[ev.Effect]) -> None:
        after = life.state
        self.cells[before.phase, type(event).__name__] += 1
        if isinstance(event, ev.Asked):
            self.requests[before.phase, before.stage, event.verb] += 1
        if isinstance(event, ev.Selected):
            assert after.durable.on_disk <= set(self._world.disk.checkpoints), "a ghost"
        self._time_goes_on(event.now)
        records = [effect.record for effect in effects if isinstance(effect, ev.Append)]
        durable = before.durable
        for record in records:
            durable = apply(durable, record)
            if isinstance(record, ev.AttemptEnded):
                self.causes[record.cause] += 1
            if isinstance(record, ev.PolicySwitched):
                self._switches(before, record)
        assert after.durable == durable, "the durable state changes through records only"
        check_spawn(before, after, effects)
        check_replies(before, effects)
        check_stop(before, after)
        check_end(before, after, effects)
        check_waiting(after, event)
        check_pivot(after, event)

    def _switches(self, before: State, switched: ev.PolicySwitched) -> None:
        """The commit of a pivot: once a request, of what is all on the disk, and a live one leaves
        no step behind."""
        pivot, durable = before.durable.pivot, before.durable
        assert pivot is not None
        assert (pivot.request, pivot.parent) == (switched.request, switched.parent)
        assert switched.request not in {epoch.request for epoch in durable.epochs}
        assert switched.epoch == len(durable.epochs) + 1
        assert {switched.archive, f"policy-{switched.epoch}"} <= self._world.disk.pivot_files
        base_step = switched.base_step
        assert base_step in self._world.disk.checkpoints, "the base is gone"
        if pivot.to_step is not None:
            assert base_step == pivot.to_step
            self.pivots["rollback"] += 1
        elif before.alone:
            assert base_step <= before.history_step
            self.pivots["alone"] += 1
        else:
            assert base_step == before.history_step
            self.pivots[f"live, {pivot.at}"] += 1

    def _time_goes_on(self, now: float) -> None:
        instant, count = self._instant
        self._instant = (now, count + 1 if instant == now else 1)
        assert self._instant[1] <= AT_ONE_INSTANT_MAX, "it is busy, and no time passes"
        assert self._world.events <= EVENTS_MAX, "it is busy without end"

    # --- an effect ---

    def performs(self, life: Life, effect: ev.Effect) -> None:
        match effect:
            case ev.Spawn():
                self._performs_spawn(life.state.durable, effect)
            case ev.Reply():
                self._performs_reply(effect)
            case ev.Exit():
                journal = self._world.disk.journal
                assert last_of(journal, "supervisor_ended", "supervisor_started") is not None

    def _performs_spawn(self, durable: Durable, spawn: ev.Spawn) -> None:
        world = self._world
        assert world.trainer is None or not world.trainer.alive, "a second trainer"
        assert world.stray is None, "somebody still holds the lock"
        assert last_of(world.disk.journal, "attempt_started", "attempt_ended") == {
            "record": "attempt_started",
            "attempt": spawn.attempt,
            "nonce": spawn.nonce,
            "resume_step": spawn.resume_step,
            "epoch": spawn.epoch,
            "until_step": spawn.until_step,
        }, "the process comes before its record"
        owner, until_step = durable.owner(spawn.resume_step)
        assert (spawn.epoch, spawn.until_step) == (owner.number, until_step)
        assert world.disk.run_epoch == durable.epoch, "run.toml is that of another epoch"
        base = spawn.resume_step
        assert base <= len(world.disk.synced_owners), "a checkpoint outran the history"
        if base:
            # It may rot between the selection and now; the trainer would find that.
            assert base in world.disk.checkpoints
        assert all(step <= base for step in world.disk.checkpoints), "a name ahead is taken"

    def _performs_reply(self, reply: ev.Reply) -> None:
        if reply.why.startswith("the supervisor is ending"):
            return  # nothing was decided; the same request may be made of the next one
        answer = (reply.outcome, reply.why, reply.result)
        assert self.answers.setdefault(reply.id, answer) == answer, "two answers to one request"
        replied = [line for line in self._world.disk.journal if line["record"] == "replied"]
        assert [line["outcome"] for line in replied if line["id"] == reply.id] == [reply.outcome]
        if reply.outcome == "done" and "step" in reply.result and reply.result["step"]:
            committed = {
                line["step"]
                for line in self._world.disk.journal
                if line["record"] == "checkpoint_committed"
            }
            assert reply.result["step"] in committed

    # --- the end ---

    def drained(self) -> None:
        """Once faults have stopped, the run is where it was wanted, or says why not."""
        world, durable = self._world, self.last.durable
        assert world.life is None, f"still {world.life.state.phase} ({world.life.state.stage})"
        assert self.last.phase in TERMINAL
        assert durable.pivot is None, "a pivot is neither done nor given up"
        known = {f"policy-{epoch.number}" for epoch in durable.epochs}
        known |= {epoch.archive for epoch in durable.epochs if epoch.archive}
        assert world.disk.pivot_files == known, "an archive or a policy without its pivot"
        check_history(durable, world.disk.owners)
        if self.last.phase == "stuck":
            return  # what holds the lock is not ours to end
        assert world.trainer is None or not world.trainer.alive
        assert durable.open is None or self.last.alone
        match self.last.phase:
            case "stopped":
                asked = durable.wish == "stop" or world.operator.signalled_stop
                assert asked or self.last.alone
            case "failed":
                assert durable.outcome == "failed"
                assert durable.reason
            case "finished":
                assert durable.outcome == "finished"
                assert TARGET_STEP in durable.verified or self.last.alone

    @property
    def _world(self) -> World:
        assert self.world is not None
        return self.world

    def _journalled(self) -> list[ev.Record]:
        return parsed(self._world.disk.journal)


def parsed(lines: Iterable[Json]) -> list[ev.Record]:
    records = [ev.record_from_json(line) for line in lines]
    assert None not in records
    return [record for record in records if record is not None]


def last_of(journal: list[Json], *kinds: str) -> Json | None:
    """The newest line of these kinds, where it is one of the first kind."""
    found = next((line for line in reversed(journal) if line["record"] in kinds), None)
    return found if found is not None and found["record"] == kinds[0] else None


def check_history(durable: Durable, owners: Sequence[tuple[int, int]]) -> None:
    """Every step belongs to the epoch that rules it, up to the base of one that has none yet."""
    epoch = durable.epochs[-1]
    ends = len(owners)
    if owners and owners[-1][1] < epoch.number:
        ends = min(ends, epoch.base_step)
    for step in range(1, ends + 1):
        assert owners[step - 1][1] == durable.owner(step - 1)[0].number, f"step {step}"


# --- what holds of every decision ---


def check_spawn(before: State, after: State, effects: list[ev.Effect]) -> None:
    for number, effect in enumerate(effects):
        if isinstance(effect, ev.Spawn):
            started = ev.AttemptStarted(
                effect.attempt, effect.nonce, effect.resume_step, effect.epoch, effect.until_step
            )
            assert effects[number - 1] == ev.Append(started)
            assert before.durable.wish == "run"
            assert before.intent != "stop"
            assert not before.alone, "a life for one pivot trains nothing"
            assert effect.attempt == before.durable.attempt + 1
            assert effect.resume_step <= after.history_step
            assert max(after.durable.on_disk, default=0) <= effect.resume_step


def check_replies(before: State, effects: list[ev.Effect]) -> None:
    """A reply is on record before it is given, now or from earlier."""
    known = {reply.id: reply for reply in before.durable.replies}
    for effect in effects:
        if isinstance(effect, ev.Append) and isinstance(effect.record, ev.Replied):
            assert effect.record.id not in known, "answered twice"
            known[effect.record.id] = effect.record
        elif isinstance(effect, ev.Reply) and before.phase not in TERMINAL:
            record = known[effect.id]
            assert (record.outcome, record.why, record.result) == (
                effect.outcome,
                effect.why,
                effect.result,
            )


def check_stop(before: State, after: State) -> None:
    """A stop is sticky, and less patience never becomes more."""
    if before.intent == "stop":
        assert after.intent == "stop"
        if before.phase == "stopping":
            assert after.phase in ("stopping", *TERMINAL)
    if before.forced:
        assert after.forced
    if before.phase == after.phase == "stopping":
        assert after.force_at <= before.force_at
        order = ("", "asked", "seen", "signalled", "killed")
        assert order.index(before.escalation) <= order.index(after.escalation)


def check_end(before: State, after: State, effects: list[ev.Effect]) -> None:
    exits = [effect for effect in effects if isinstance(effect, ev.Exit)]
    ends = after.phase in TERMINAL and before.phase not in TERMINAL
    assert len(exits) == ends
    if before.phase in TERMINAL:
        assert after.phase == before.phase
    if ends:
        assert effects[-1] == exits[0]
        assert (after.checkpoints, after.stop_ids, after.restart_ids) == ((), (), ())
        assert (after.pivot_ids, after.durable.pivot) == ((), None)
        assert exits[0].why == after.why
        code = 0 if after.phase in ("stopped", "finished") else 1
        assert exits[0].code == (130 if after.forced else code)


def check_waiting(after: State, event: ev.Event) -> None:
    """Wherever it waits for something that may never come, it has set itself a deadline."""
    if after.deadline is not None and isinstance(event, ev.Ticked):
        assert after.deadline > event.now, "the next wake-up would be at once, and for nothing"
    match after.phase, after.stage:
        case ("backoff", "") | ("starting", "loading") | ("running", ""):
            assert after.deadline is not None
        case ("stopping", ""):
            assert after.deadline is not None
        case ("stopping" | "backoff", "reaping"):
            pass  # the shell's part is bounded; a hastened stop still has a deadline
        case _:
            assert after.deadline is None
            assert (after.phase, after.stage) in WITHOUT_DEADLINE


def check_pivot(after: State, event: ev.Event) -> None:
    """An intent that nobody waits for is none: it is of this life, and given up with it."""
    pivot = after.durable.pivot
    if isinstance(event, ev.Opened):
        assert pivot is None or (event.pivot is not None and pivot.request == event.request)
    if pivot is not None:
        assert pivot.request in after.pivot_ids
    assert not after.pivoting or pivot is not None
    assert not after.alone or after.phase != "running"


# --- the runs ---


@dataclass(slots=True)
class Tally:
    """What many worlds have reached."""

    cells: Counter[Cell] = field(default_factory=Counter)
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    pivots: Counter[str] = field(default_factory=Counter)


def simulate(seed: int) -> Checks:
    checks = Checks()
    checks.world = World(seed, checks)
    checks.world.run(FAULT_SECONDS, DRAIN_SECONDS)
    checks.drained()
    return checks


def simulate_all(seeds: Iterable[int]) -> Tally:
    tally = Tally()
    for seed in seeds:
        try:
            checks = simulate(seed)
        except Exception as error:
            error.add_note(f"in the world of seed {seed}: simulate({seed})")
            raise
        tally.cells += checks.cells
        tally.requests += checks.requests
        tally.causes += checks.causes
        tally.pivots += checks.pivots
        tally.ends[checks.last.phase] += 1
    return tally


HANDLED: Final = {
    (phase, event.__name__) for (phase, event), handler in TABLE.items() if handler != _impossible
}


@pytest.fixture(scope="module")
def tally() -> Tally:
    return simulate_all(range(SEEDS))


@pytest.mark.fault(
    "SV-30", phase="any", does="holds its promises under 5,000 random orders of events and faults"
)
def test_every_cell_that_can_be_reached_is_and_no_other(tally: Tally) -> None:
    assert set(tally.cells) <= HANDLED
    assert HANDLED - set(tally.cells) <= set(UNREACHED)


@pytest.mark.fault(
    "SV-30", phase="any", does="is asked for everything in every phase and stage of those orders"
)
def test_requests_come_in_every_phase_and_stage(tally: Tally) -> None:
    places = {(phase, stage) for phase, stage, _ in tally.requests}
    assert places == {*WAITING, *((phase, "") for phase in TERMINAL)}
    missing = {
        (*place, verb)
        for place in places
        for verb in ("checkpoint", "stop", "restart", "pivot")
        if (*place, verb) not in tally.requests
    }
    assert missing == set()


def test_every_cause_of_death_and_every_end_occurs(tally: Tally) -> None:
    assert set(tally.causes) == set(CAUSES)
    assert set(tally.ends) == set(TERMINAL)


def test_every_way_to_pivot_is_gone(tally: Tally) -> None:
    assert set(tally.pivots) == {"live, boundary", "live, now", "rollback", "alone"}


def test_a_world_is_its_seed() -> None:
    first, second = simulate(7), simulate(7)
    assert first.world is not None
    assert second.world is not None
    assert first.world.disk.journal == second.world.disk.journal
    assert first.cells == second.cells


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_more_worlds_end_well() -> None:
    simulate_all(range(SEEDS, SEEDS + SOAK_SEEDS))
