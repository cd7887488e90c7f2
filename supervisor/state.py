"""What the lifecycle knows: its rules, the durable facts, the state, one decision in the making.

What may live here: data and `apply`, the only way the durable part changes. No clock, file, socket,
process or random source.

Invariants:
- Every record applied live is also journalled, and start-up folds the same `apply` over the
  journal: the code that runs live is the code that recovers.
- `deadline` is the one moment at which the shell must wake us; there are no timers to cancel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from supervisor import events as ev
from supervisor.contract import ExitCode, Json, digest
from supervisor.patience import Limits, Patience

PHASES: Final = (
    "idle",
    "starting",
    "running",
    "stopping",
    "backoff",
    "stopped",
    "failed",
    "finished",
    "stuck",
)
TERMINAL: Final = ("stopped", "failed", "finished", "stuck")

# Ends that nobody asked for. `again` is one, but it is not charged to the budget.
UNPLANNED: Final = (
    *("signal", "killed", "hang", "crash", "out-of-memory", "device-lost", "unknown"),
    *("checkpoint", "spawn", "again"),
)
PERMANENT: Final = {
    "configuration": "the trainer refused its configuration",
    "data": "the data, the tokenizer or the checkpoint does not match the run",
    "non-finite": "the loss or a gradient is not finite; the checkpoints are from before it",
}
CAUSES: Final = ("finished", "stopped", *PERMANENT, *UNPLANNED)
CAUSE_OF_CODE: Final = {
    int(ExitCode.DATA): "data",
    int(ExitCode.CONFIGURATION): "configuration",
    int(ExitCode.CHECKPOINT): "checkpoint",
    int(ExitCode.NON_FINITE): "non-finite",
    int(ExitCode.AGAIN): "again",
}
AT_ONCE: Final = ("finished",)  # ends after which the next attempt need not wait
PLANNED: Final = ("stop", "restart", "pivot", "full")  # intents under which an end is our doing
REPLIES_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that decisions depend on; all times in seconds."""

    delay_seconds: float = 1.0
    maximum_delay_seconds: float = 300.0
    deaths: int = 5
    grace_seconds: float = 120.0
    signal_after_seconds: float = 2.0
    kill_seconds: float = 30.0
    hasten_seconds: float = 5.0
    limits: Limits = field(default_factory=Limits)
    stop_when_full: bool = False


@dataclass(frozen=True, slots=True)
class Epoch:
    """One policy's reign: from base_step + 1 on, unless a later epoch took over. `settings` are
    the effective settings as TOML; `request` is the pivot's."""

    number: int
    base_step: int
    parent: int
    settings: str
    policy: str = ""
    policy_digest: str = ""
    archive: str = ""
    request: str = ""


@dataclass(frozen=True, slots=True)
class Durable:
    """What the journal adds up to."""

    run_id: str = ""
    run: str = ""
    wish: str = "run"
    target_step: int = 0
    epoch: int = 1
    epochs: tuple[Epoch, ...] = (Epoch(1, 0, 1, ""),)
    pivot: ev.PivotIntended | None = None
    attempt: int = 0
    begun: ev.AttemptStarted | None = None  # the newest attempt, ended or not
    open: ev.AttemptStarted | None = None
    spawned: ev.AttemptSpawned | None = None  # the main process of `open`, once that is on record
    deaths: int = 0
    restarts: int = 0
    best_checkpoint: int | None = None
    lineage: tuple[tuple[str, int], ...] = ()
    imported: bool = False
    on_disk: frozenset[int] = frozenset()
    pins: frozenset[int] = frozenset()
    verified: frozenset[int] = frozenset()
    blamed: tuple[tuple[int, int], ...] = ()  # (resumed from, died at) since the last progress
    set_aside: frozenset[int] = frozenset()
    verified_steps: int = 0
    diverged_steps: int = 0
    first_diverged_step: int | None = None
    last_exit: ev.AttemptEnded | None = None
    outcome: str = ""
    reason: str = ""
    stored: tuple[tuple[str, str], ...] = ()  # file -> SHA-256 of what was written last
    alarms: tuple[tuple[str, str], ...] = ()
    replies: tuple[ev.Replied, ...] = ()
    evaluated_step: int = 0
    evaluation: ev.Evaluated | None = None  # the newest of the branch that rules, where known

    def owner(self, step: int) -> tuple[Epoch, int | None]:
        """The epoch that owns the step after `step`, and up to which step (None: without end)."""
        epochs = {epoch.number: epoch for epoch in self.epochs}
        epoch, until = epochs[self.epoch], None
        while epoch.base_step > step:
            until = epoch.base_step if until is None else min(until, epoch.base_step)
            epoch = epochs[epoch.parent]
        return epoch, until

    @property
    def settings_digest(self) -> str:
        """Names the settings on record: what was made of others would undo a change of them. None
        are, and this is empty, before the first life of an import."""
        settings = self.epochs[-1].settings
        return digest(settings.encode()) if settings else ""

    @property
    def kept(self) -> frozenset[int]:
        """The steps whose checkpoints stay whatever retention says: pins, and where a rollback that
        is under way goes back to."""
        to_step = None if self.pivot is None else self.pivot.to_step
        return self.pins if to_step is None else self.pins | {to_step}

    def parent_of(self, to_step: int | None) -> Epoch:
        """The epoch that a pivot would follow: the one that rules or, of a rollback, the one under
        which its step was made."""
        return self.epochs[-1] if to_step is None else self.owner(to_step - 1)[0]


def apply(durable: Durable, record: ev.Record) -> Durable:
    """The only way the durable state changes, live and in recovery alike."""
    match record:
        case ev.RunCreated():
            return replace(
                durable,
                run_id=record.run_id,
                run=record.run,
                target_step=record.target_step,
                epochs=(Epoch(1, 0, 1, record.settings, record.policy, record.policy_digest),),
            )
        case ev.RunForked():
            lineage = tuple((str(run_id), int(step)) for run_id, step in record.lineage)
            return replace(durable, lineage=lineage, attempt=record.attempt)
        case ev.RunImported():
            return replace(durable, imported=True)
        case ev.CheckpointPinned():
            return replace(durable, pins=durable.pins | {record.step})
        case ev.Wished(wish="run"):
            # The operator's start always works: it forgives the deaths and forgets the verdict.
            return replace(
                durable,
                wish="run",
                deaths=0,
                blamed=(),
                set_aside=frozenset(),
                outcome="",
                reason="",
            )
        case ev.Wished():
            return replace(durable, wish=record.wish)
        case ev.SettingsChanged():
            *earlier, current = durable.epochs
            current = replace(
                current,
                settings=record.settings,
                policy=record.policy or current.policy,
                policy_digest=record.policy_digest or current.policy_digest,
            )
            return replace(
                durable,
                target_step=record.target_step,
                epochs=(*earlier, current),
                outcome="",
                reason="",
            )
        case ev.PivotIntended():
            return replace(durable, pivot=record)
        case ev.PivotAborted():
            return replace(durable, pivot=None)
        case ev.PolicySwitched():
            left = record.base_step < durable.evaluated_step
            begun = Epoch(
                record.epoch,
                record.base_step,
                record.parent,
                record.settings,
                record.policy,
                record.policy_digest,
                record.archive,
                record.request,
            )
            return replace(
                durable,
                pivot=None,
                evaluated_step=min(durable.evaluated_step, record.base_step),
                evaluation=None if left else durable.evaluation,
                epoch=record.epoch,
                epochs=(*durable.epochs, begun),
                pins=durable.pins | {record.base_step},
                best_checkpoint=record.base_step,
                deaths=0,
                blamed=(),
                set_aside=frozenset(),
                outcome="",
                reason="",
            )
        case ev.AttemptStarted():
            return replace(
                durable,
                attempt=record.attempt,
                begun=record,
                open=record,
                outcome="",
                reason="",
            )
        case ev.AttemptSpawned():
            return replace(durable, spawned=record)
        case ev.AttemptEnded():
            blamed = durable.blamed
            if record.blames and durable.open is not None:
                blamed = (*blamed, (durable.open.resume_step, record.reached_step))
            return replace(
                durable,
                open=None,
                spawned=None,
                last_exit=record,
                deaths=durable.deaths + int(record.counted),
                restarts=durable.restarts + int(record.cause in UNPLANNED),
                verified_steps=durable.verified_steps + record.verified_steps,
                blamed=blamed,
            )
        case ev.CheckpointCommitted():
            best = durable.best_checkpoint
            progress = best is None or record.step > best
            return replace(
                durable,
                best_checkpoint=record.step if progress else best,
                on_disk=durable.on_disk | {record.step},
                deaths=0 if progress else durable.deaths,
                blamed=() if progress else durable.blamed,
                set_aside=durable.set_aside - {record.step},
            )
        case ev.CheckpointVerified():
            return replace(durable, verified=durable.verified | {record.step})
        case ev.CheckpointQuarantined():
            return _without(durable, [record.step])
        case ev.CheckpointSetAside():
            return replace(
                _without(durable, [record.step]),
                blamed=tuple(item for item in durable.blamed if item[0] != record.step),
                set_aside=durable.set_aside | {record.step},
            )
        case ev.CheckpointsSuperseded():
            return replace(
                _without(durable, record.steps),
                set_aside=frozenset(s for s in durable.set_aside if s <= record.above_step),
            )
        case ev.CheckpointsRemoved():
            return _without(durable, record.steps)
        case ev.FileStored():
            others = tuple(item for item in durable.stored if item[0] != record.file)
            return replace(durable, stored=(*others, (record.file, record.sha256)))
        case ev.Evaluated():
            if record.step < durable.evaluated_step:
                return durable
            return replace(durable, evaluated_step=record.step, evaluation=record)
        case ev.ReplayDiverged():
            first = durable.first_diverged_step
            return replace(
                durable,
                diverged_steps=durable.diverged_steps + 1,
                first_diverged_step=record.step if first is None else min(first, record.step),
            )
        case ev.Alarmed():
            others = tuple(alarm for alarm in durable.alarms if alarm[0] != record.name)
            return replace(durable, alarms=(*others, (record.name, record.detail)))
        case ev.AlarmCleared():
            return replace(
                durable,
                alarms=tuple(alarm for alarm in durable.alarms if alarm[0] != record.name),
            )
        case ev.Replied():
            return replace(durable, replies=(*durable.replies, record)[-REPLIES_KEPT:])
        case ev.RunFinished():
            return replace(durable, outcome="finished", reason=f"reached step {record.step}")
        case ev.RunFailed():
            return replace(durable, outcome="failed", reason=record.reason)
        case (
            ev.SupervisorStarted()
            | ev.SupervisorEnded()
            | ev.AttemptAdopted()
            | ev.FileRepaired()
            | ev.LeftoversRemoved()
        ):
            return durable


def _without(durable: Durable, steps: Iterable[int]) -> Durable:
    """A run whose last checkpoint goes has not finished any more, whoever finds out."""
    gone = frozenset(steps)
    left = replace(durable, on_disk=durable.on_disk - gone, verified=durable.verified - gone)
    ends = {step for step in durable.on_disk if step >= durable.target_step}
    if durable.outcome == "finished" and ends and ends <= gone:
        left = replace(left, outcome="", reason="")
    return left


def fold(records: Iterable[ev.Record]) -> Durable:
    durable = Durable()
    for record in records:
        durable = apply(durable, record)
    return durable


@dataclass(frozen=True, slots=True)
class Pending:
    """A checkpoint request that no checkpoint has answered yet."""

    id: str
    at: str
    operator: bool
    sent_at: float | None = None
    seen: bool = False
    sent_step: int = 0  # where the trainer was by then, as far as we knew


@dataclass(frozen=True, slots=True)
class State:
    """Durable facts plus what this life of the supervisor knows. `stage` says where inside its
    phase it is; `deadline` is the one moment the shell must wake us for."""

    durable: Durable = field(default_factory=Durable)
    phase: str = "idle"
    stage: str = ""
    deadline: float | None = None
    life: str = ""
    step: int = 0
    history_step: int = 0
    merged_attempt: int = 0  # the highest that receipts were found of
    attempt_verified: int = 0
    trainer_phase: str = ""
    trainer_pid: int | None = None
    linked: bool = False
    intent: str = ""  # why we are stopping: stop, restart, pivot, full, hang, kill
    escalation: str = ""  # asked, signalled, killed
    force_at: float = 0.0
    forced: bool = False
    why: str = ""
    fruitless: int = 0  # ends in a row that waited, charged or not, without a new checkpoint
    fruitless_since: int | None = None  # the best checkpoint when they began
    full: str = ""  # why the disk ends this run, where it does
    from_scratch: bool = False
    checkpoints: tuple[Pending, ...] = ()
    stop_ids: tuple[str, ...] = ()
    restart_ids: tuple[str, ...] = ()
    pivot_ids: tuple[str, ...] = ()
    pivoting: bool = False  # the trainer has left for a pivot; the next selection is its base
    back: bool = False  # that pivot is a rollback
    alone: bool = False  # this life exists for one pivot only; it ends when that is done
    unlinked_until: float | None = None  # a pivot waits so long for a link, then it signals
    verifying: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()  # could not be read back; tried again with the next one
    patience: Patience = field(default_factory=Patience)
    examined_at: float | None = None  # when its silence became suspicious
    ready: bool = False  # this attempt has said hello, or made a step

    def grace_seconds(self, now: float) -> float | None:
        """What a trainer that is being ended still has until it is killed; None where none is."""
        ending = self.phase == "stopping" and self.stage != "reaping"
        return max(0.0, self.force_at - now) if ending else None


class Impossible(AssertionError):
    """An event that cannot happen in this phase happened: our bug, and the end of this life."""


class Turn:
    """One decision in the making: the state so far and the effects so far."""

    def __init__(self, rules: Rules, state: State, now: float) -> None:
        self.rules = rules
        self.state = state
        self.now = now
        self.effects: list[ev.Effect] = []

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def do(self, *effects: ev.Effect) -> None:
        self.effects.extend(effects)

    def append(self, record: ev.Record) -> None:
        self.set(durable=apply(self.state.durable, record))
        self.do(ev.Append(record))

    def answer(self, id: str, verb: str, outcome: str, why: str = "", **result: object) -> None:
        """A reply to a mutating request: journalled first, so the same id gets it again."""
        content: Json = dict(result)
        self.append(ev.Replied(id, verb, outcome, why, content))
        self.do(ev.Reply(id, outcome, why, content))
