"""What the journal keeps: one frozen record for each kind of rare fact, in the past tense.

What may live here: records and their JSON. A record's fields are JSON values; `record_to_json` and
`record_from_json` are inverse. A field with a default may be missing in an older journal.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Final

from supervisor.contract import ContractError, Json


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
class LeftoversRemoved:
    """Files that the run could do without: of a branch that was left, of a quarantine, of attempts
    that died while they saved. Names are relative to the run directory."""

    names: list[str]
    freed_bytes: int


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
    | LeftoversRemoved
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
