"""What the journal keeps: one frozen record for each kind of rare fact, in the past tense.

What may live here: records and their JSON. A record's fields are JSON values; `record_to_json` and
`record_from_json` are inverse. A field with a default may be missing in an older journal.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from supervisor.contract import ContractError, Json
from supervisor.foreign import shown


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
    """Settings accepted on a `start`: key -> [old, new]. Those of a run that has begun are
    operational; of one without a step they may be any, and then the policy is here, too."""

    changes: dict[str, list[Any]]
    target_step: int
    settings: str = ""
    policy_digest: str = ""
    policy: str = ""


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
    blames: bool = False  # the checkpoint it was resumed from may be the reason
    reached_step: int = 0  # the last step of this attempt, new to the history or not; 0: none


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
class CheckpointSetAside:
    """It verifies, and yet every trainer that resumes from it dies: the one before it is tried."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointsSuperseded:
    above_step: int
    steps: list[int]


@dataclass(frozen=True, slots=True)
class CheckpointsRemoved:
    """They are not in checkpoints/ any more: retention took them, or a selection missed them."""

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
    | CheckpointSetAside
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


class RecordBroken(ContractError):
    """A journal line is whole, and yet not the record that it says it is."""


def record_from_json(line: Json) -> Record | None:
    """The record in a journal line; None for a kind that a newer version may have written.

    Fields that the journal adds (seq, time, check, ledger binding) are not part of the record.
    Raises RecordBroken where a known record lacks a field or has one of another type.
    """
    cls: type[Any] | None = RECORDS.get(str(line.get("record")))
    if cls is None:
        return None
    where = f"journal record {line.get('record')} {line.get('seq')}"
    values = {}
    for name, (kind, required) in _fields_of(str(line["record"])).items():
        if name not in line:
            if required:
                raise RecordBroken(f"{where}: no {name}")
        elif not _fits(line[name], kind):
            raise RecordBroken(f"{where}: {name} is {shown(line[name])}")
        else:
            values[name] = line[name]
    record: Record = cls(**values)
    return record


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of the type that a field declares."""
    if kind is Any:
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if kind is int or kind is float:
        return type(value) in (int, kind)
    return isinstance(value, kind)


@cache
def _fields_of(record: str) -> dict[str, tuple[Any, bool]]:
    """Field -> type, and whether an older journal must have it, too."""
    cls = RECORDS[record]
    kinds = get_type_hints(cls)
    return {f.name: (kinds[f.name], f.default is MISSING) for f in fields(cls)}
