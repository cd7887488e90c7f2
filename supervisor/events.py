"""The words that the lifecycle machine hears, speaks and remembers.

What may live here: frozen data. Events are what happened, in the past tense; effects are what the
shell must do, in the imperative; records are what the journal keeps, in the past tense.

Invariants:
- Time is data: every event carries `now`, monotonic seconds, and nothing here reads a clock.
- A record's fields are JSON values; `record_to_json` and `record_from_json` are inverse.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Final

from supervisor.contract import ContractError, ExitLine, Json

# --- records: the journal ---


@dataclass(frozen=True, slots=True)
class RunCreated:
    run_id: str
    run: str
    target_step: int
    policy_digest: str
    settings: str = ""  # the effective settings, as TOML
    policy: str = ""


@dataclass(frozen=True, slots=True)
class RunForked:
    """The run begins with a checkpoint and the canonical history of another. `lineage` lists the
    ancestors as [run id, last step]; `attempt` is the last one of the parent."""

    parent_directory: str
    lineage: list[list[Any]]
    step: int
    attempt: int
    ledger_entries: int
    ledger_sha256: str


@dataclass(frozen=True, slots=True)
class RunImported:
    """The run begins with files of another program; its checkpoints have no manifests."""

    source: str
    ledger_entries: int
    steps: list[int]


@dataclass(frozen=True, slots=True)
class FileStored:
    """A file that is written rarely and must not change by itself: run.toml, a policy."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class SupervisorStarted:
    """One life of the supervisor. `life` is a random word; nonces of attempts derive from it."""

    life: str
    pid: int
    host: str
    version: str


@dataclass(frozen=True, slots=True)
class SupervisorEnded:
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wished:
    """What the operator wants, until he wants something else: `run` or `stop`."""

    wish: str
    request: str


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Operational settings accepted on a `start`: key -> [old, new]."""

    changes: dict[str, list[Any]]
    target_step: int
    settings: str = ""


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """Written and synced before the process exists. `resume_step` 0 is a fresh start."""

    attempt: int
    nonce: str
    resume_step: int
    epoch: int
    until_step: int | None = None  # the base of a later epoch, where this one's steps end


@dataclass(frozen=True, slots=True)
class AttemptSpawned:
    attempt: int
    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class AttemptAdopted:
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """`cause` is one of CAUSES; `step` the last step of the history; `counted` whether the end
    was charged to the restart budget; the two counts are those of this attempt alone."""

    attempt: int
    cause: str
    code: int | None
    signal: int | None
    step: int
    counted: bool
    verified_steps: int
    message: str


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """The journal line also binds it to the ledger: `ledger_entries` and `ledger_sha256`."""

    step: int
    attempt: int
    reason: str
    requests: list[str]
    binary_digest: str


@dataclass(frozen=True, slots=True)
class CheckpointVerified:
    """Read back from the device. `sha256` is the plain digest of the `.bin`."""

    step: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointPinned:
    """Retention never removes it: something else was built on it."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointQuarantined:
    step: int
    reason: str
    moved_to: str


@dataclass(frozen=True, slots=True)
class CheckpointsSuperseded:
    above_step: int
    steps: list[int]


@dataclass(frozen=True, slots=True)
class CheckpointsRemoved:
    steps: list[int]


@dataclass(frozen=True, slots=True)
class PivotIntended:
    """What the operator wants; nothing has changed yet. `policy` is the file as submitted,
    `settings` the effective settings under it. `to_step` is the base of a rollback; `parent` the
    epoch that the new one follows."""

    request: str
    at: str
    to_step: int | None
    parent: int
    policy: str
    settings: str
    policy_digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class PivotAborted:
    request: str
    why: str


@dataclass(frozen=True, slots=True)
class PolicySwitched:
    """The commit of a pivot. Every step from base_step + 1 on belongs to `epoch`."""

    request: str
    epoch: int
    parent: int
    base_step: int
    policy: str
    settings: str
    policy_digest: str
    archive: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    step: int
    loss: float | str
    arms: Json


@dataclass(frozen=True, slots=True)
class ReplayDiverged:
    step: int
    attempt: int
    fields: list[str]
    earlier: Json
    later: Json
    likely: str


@dataclass(frozen=True, slots=True)
class FileRepaired:
    file: str
    dropped_bytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class Alarmed:
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class AlarmCleared:
    name: str


@dataclass(frozen=True, slots=True)
class Replied:
    """The answer to a mutating request; the same id gets it again, after a restart too."""

    id: str
    verb: str
    outcome: str
    why: str
    result: Json


@dataclass(frozen=True, slots=True)
class RunFinished:
    step: int


@dataclass(frozen=True, slots=True)
class RunFailed:
    reason: str


Record = (
    RunCreated
    | RunForked
    | RunImported
    | FileStored
    | SupervisorStarted
    | SupervisorEnded
    | Wished
    | SettingsChanged
    | AttemptStarted
    | AttemptSpawned
    | AttemptAdopted
    | AttemptEnded
    | CheckpointCommitted
    | CheckpointVerified
    | CheckpointPinned
    | CheckpointQuarantined
    | CheckpointsSuperseded
    | CheckpointsRemoved
    | PivotIntended
    | PivotAborted
    | PolicySwitched
    | Evaluated
    | ReplayDiverged
    | FileRepaired
    | Alarmed
    | AlarmCleared
    | Replied
    | RunFinished
    | RunFailed
)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


RECORDS: Final[dict[str, type[Record]]] = {_snake(cls.__name__): cls for cls in Record.__args__}
_NAMES: Final = {cls: name for name, cls in RECORDS.items()}


def record_to_json(record: Record) -> Json:
    return {"record": _NAMES[type(record)], **asdict(record)}


def record_from_json(line: Json) -> Record | None:
    """The record in a journal line; None for a kind that a newer version may have written.

    Fields that the journal adds (seq, time, check, ledger binding) are not part of the record.
    Raises ContractError where a known record lacks a field.
    """
    cls = RECORDS.get(line.get("record", ""))
    if cls is None:
        return None
    required = [f.name for f in fields(cls) if f.default is MISSING]
    missing = [name for name in required if name not in line]
    if missing:
        raise ContractError(f"journal record {line.get('record')} {line.get('seq')}: no {missing}")
    return cls(**{f.name: line[f.name] for f in fields(cls) if f.name in line})


# --- events ---


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds trainer.lock. `ours`: it carries the nonce of the open attempt."""

    pid: int
    ours: bool
    leader: bool
    command: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The run directory is ours and the journal folded. `wish` None obeys what is on record.

    `life` is this supervisor's random word. `from_scratch` allows step 0 although checkpoints
    were on record and none is left.
    """

    now: float
    life: str
    holders: tuple[Holder, ...]
    wish: str | None
    request: str
    from_scratch: bool = False
    pivot: Json | None = None


@dataclass(frozen=True, slots=True)
class Ticked:
    now: float


@dataclass(frozen=True, slots=True)
class Asked:
    """An operator's request, or a signal to the supervisor (`operator` False: nobody waits for a
    reply, and a stop ends this life only)."""

    now: float
    id: str
    verb: str
    at: str = "now"
    operator: bool = True
    step: int = 0
    why: str = ""
    content: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from the living attempt; frames of any earlier life never get here."""

    now: float
    verb: str
    content: Json


@dataclass(frozen=True, slots=True)
class Recorded:
    """Steps of the living attempt are in the ledger and synced, up to `step`."""

    now: float
    step: int
    verified_steps: int


@dataclass(frozen=True, slots=True)
class Noticed:
    """A committed checkpoint that no message announced was found in the run directory."""

    now: float
    step: int


@dataclass(frozen=True, slots=True)
class Spawned:
    now: float
    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    now: float
    why: str


@dataclass(frozen=True, slots=True)
class Died:
    """The main process is gone. Its receipts are not read yet."""

    now: float


@dataclass(frozen=True, slots=True)
class Reaped:
    """The death is complete, or will not be: `holders` still live after the bounded wait.

    `code` and `signal` are None where nobody could see the status (an adopted trainer).
    """

    now: float
    code: int | None
    signal: int | None
    exit_line: ExitLine | None
    step: int
    verified_steps: int
    holders: tuple[int, ...]
    message: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    """Every receipt there is has been merged and synced; the history ends at `step`."""

    now: float
    step: int


@dataclass(frozen=True, slots=True)
class Selected:
    """What a resume may start from; `step` None: nothing. `rejected`: (step, reason, moved to)."""

    now: float
    step: int | None
    binary_digest: str = ""
    sha256: str = ""
    attempt: int = 0
    reason: str = ""
    requests: tuple[str, ...] = ()
    rejected: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing stands above the base any more; `superseded` was moved out of the way."""

    now: float
    base_step: int
    superseded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Archived:
    """What the pivot sets aside is in archive/`name`, durable; or `problem` says why not."""

    now: float
    base_step: int
    name: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verified:
    """The helper has read a checkpoint back. `problem` empty: it is what its manifest says."""

    now: float
    step: int
    problem: str
    sha256: str = ""
    binary_digest: str = ""
    attempt: int = 0
    reason: str = ""
    requests: tuple[str, ...] = ()
    moved_to: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    now: float
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The trainer broke the contract in a way that ends its life (receipts out of order)."""

    now: float
    why: str


Event = (
    Opened
    | Ticked
    | Asked
    | Heard
    | Recorded
    | Noticed
    | Spawned
    | SpawnFailed
    | Died
    | Reaped
    | Merged
    | Selected
    | Cleared
    | Archived
    | Verified
    | Removed
    | Broken
)

# --- effects ---


@dataclass(frozen=True, slots=True)
class Append:
    """Journal this record. Every effect after it in the same decision waits until it is synced."""

    record: Record


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge and sync every receipt there is; answer with Merged."""


@dataclass(frozen=True, slots=True)
class Select:
    """Find the newest valid checkpoint at most at `ceiling`, set aside what is bad; answer with
    Selected."""

    ceiling: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Move every checkpoint above the base out of the way and sweep leftovers; then Cleared."""

    base_step: int


@dataclass(frozen=True, slots=True)
class Archive:
    """Set samples, state, policy and the reason aside, and store the new policy; Archived."""

    epoch: int
    base_step: int
    pivot: PivotIntended


@dataclass(frozen=True, slots=True)
class Regenerate:
    """Bring run.toml and the sidecars to the epoch on record."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Remove what an uncommitted pivot left in archive/ and policies/."""


@dataclass(frozen=True, slots=True)
class Spawn:
    attempt: int
    nonce: str
    resume_step: int
    epoch: int
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over the trainer that is alive, by its proven identity."""

    pid: int


@dataclass(frozen=True, slots=True)
class Send:
    """To the trainer, over the link. Lost messages are the deadline's business."""

    verb: str
    content: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signal:
    """`TERM` or `USR1` to the main process; USR1 only where it has a handler."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to everything that is provably the attempt."""


@dataclass(frozen=True, slots=True)
class Reap:
    """Wait, bounded, until nothing of the attempt lives; read its receipts to the end; Reaped."""


@dataclass(frozen=True, slots=True)
class Verify:
    step: int


@dataclass(frozen=True, slots=True)
class Retain:
    newest_verified: int


@dataclass(frozen=True, slots=True)
class Reply:
    id: str
    outcome: str
    why: str = ""
    result: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exit:
    """End this life of the supervisor with this code once everything before is durable."""

    code: int
    why: str


Effect = (
    Append
    | Merge
    | Select
    | Clear
    | Archive
    | Regenerate
    | Sweep
    | Spawn
    | Adopt
    | Send
    | Signal
    | Kill
    | Reap
    | Verify
    | Retain
    | Reply
    | Exit
)
