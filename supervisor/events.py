"""The words that the lifecycle machine hears, speaks and remembers.

What may live here: frozen data. Events are what happened, in the past tense; effects are what the
shell must do, in the imperative; records are what the journal keeps, in the past tense.

Invariants:
- Time is data: every event carries `now`, monotonic seconds, and nothing here reads a clock.
- A record's fields are JSON values; `record_to_json` and `record_from_json` are inverse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisor.contract import ExitLine, Json
from supervisor.records import (
    RECORDS as RECORDS,
    AlarmCleared as AlarmCleared,
    Alarmed as Alarmed,
    AttemptAdopted as AttemptAdopted,
    AttemptEnded as AttemptEnded,
    AttemptSpawned as AttemptSpawned,
    AttemptStarted as AttemptStarted,
    CheckpointCommitted as CheckpointCommitted,
    CheckpointPinned as CheckpointPinned,
    CheckpointQuarantined as CheckpointQuarantined,
    CheckpointSetAside as CheckpointSetAside,
    CheckpointsRemoved as CheckpointsRemoved,
    CheckpointsSuperseded as CheckpointsSuperseded,
    CheckpointVerified as CheckpointVerified,
    Evaluated as Evaluated,
    FileRepaired as FileRepaired,
    FileStored as FileStored,
    LeftoversRemoved as LeftoversRemoved,
    PivotAborted as PivotAborted,
    PivotIntended as PivotIntended,
    PolicySwitched as PolicySwitched,
    Record as Record,
    ReplayDiverged as ReplayDiverged,
    Replied as Replied,
    RunCreated as RunCreated,
    RunFailed as RunFailed,
    RunFinished as RunFinished,
    RunForked as RunForked,
    RunImported as RunImported,
    SettingsChanged as SettingsChanged,
    SupervisorEnded as SupervisorEnded,
    SupervisorStarted as SupervisorStarted,
    Wished as Wished,
    record_from_json as record_from_json,
    record_to_json as record_to_json,
)

# --- events ---


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds trainer.lock. `ours`: it carries the nonce of the open attempt, or
    is its main process on record. `dying`: SIGKILL was sent to it, and it is still there."""

    pid: int
    ours: bool
    leader: bool
    command: str
    dying: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """The run directory is ours and the journal folded. `wish` None obeys what is on record.

    `life` is this supervisor's random word. `from_scratch` allows step 0 although checkpoints
    were on record and none is left. `stepped`: the history has steps of the open attempt.
    """

    now: float
    life: str
    holders: tuple[Holder, ...]
    wish: str | None
    request: str
    from_scratch: bool = False
    pivot: Json | None = None
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class Ticked:
    """The loop has woken up. `read_step` is the last step that was read of the receipts, durable
    or not; `blind`: the disk takes no history, so nobody can see what the trainer does."""

    now: float
    read_step: int = 0
    blind: bool = False


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
class Evidence:
    """What was seen of a death besides its status, in words; empty where nothing was. `certain`:
    the kernel counted this among the attempt's own dead, not among the machine's."""

    out_of_memory: str = ""
    certain: bool = False
    device_lost: str = ""


@dataclass(frozen=True, slots=True)
class Reaped:
    """The death is complete, or will not be: `holders` still live after the bounded wait, or
    `held` says who still has memory of a device.

    `code` and `signal` are None where nobody could see the status (an adopted trainer). `step` is
    the last of the history, `reached_step` the last that this attempt came to, 0 if none; `loaded`
    says that it had loaded what it was to resume from.
    """

    now: float
    code: int | None
    signal: int | None
    exit_line: ExitLine | None
    step: int
    verified_steps: int
    holders: tuple[int, ...]
    message: str = ""
    evidence: Evidence = Evidence()
    held: str = ""
    reached_step: int = 0
    loaded: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """Every receipt there is has been merged and synced; the history ends at `step`. `attempt` is
    the highest that has left receipts: a trainer that worked alone numbers its lives itself."""

    now: float
    step: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Selected:
    """What a resume may start from; `step` None: nothing. `present`: every checkpoint that was
    there, whatever was asked for; `rejected`: (step, reason, moved to)."""

    now: float
    step: int | None
    present: tuple[int, ...]
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
class Unverified:
    """The helper could not read a checkpoint back, however often it was asked. That says nothing of
    the checkpoint."""

    now: float
    step: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Checkpoints that no rule keeps are gone; so are files that were left over (`names`)."""

    now: float
    steps: tuple[int, ...]
    names: tuple[str, ...] = ()
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Full:
    """There is no room for the next checkpoint, and nothing is left that could be removed."""

    now: float
    why: str


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
    | Unverified
    | Removed
    | Full
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
class Examine:
    """The trainer makes no progress: put the stacks of its threads into its log."""


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
    | Examine
    | Kill
    | Reap
    | Verify
    | Retain
    | Reply
    | Exit
)
