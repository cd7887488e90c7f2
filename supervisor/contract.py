"""The vocabulary that the supervisor and every trainer share.

What may live here: names, versions, exit codes, and the shapes of everything that crosses a
process boundary (messages, receipts, ledger entries, manifests). Nothing here touches a file, a
clock, a socket or a random source; orjson and hashlib are the only tools.

Invariants:
- A number survives a round trip exactly. Non-finite floats travel as "nan", "inf" and "-inf",
  because JSON has no word for them and orjson would write null without a warning.
- What a peer sends is parsed into a checked value or refused with ContractError; nothing later
  re-checks it.
- The order of a checkpoint is the number in its name, never the text of its name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final

import orjson

from supervisor.foreign import (
    INT32_MAX as INT32_MAX,
    ContractError as ContractError,
    Json as Json,
    array,
    count,
    identifier,
    integer,
    names,
    number,
    object_,
    parse_object as parse_object,
    positive,
    shown,
    text,
    texts,
)

CONTRACT_VERSION: Final = 1
# A trainer outlives its supervisor, and so an upgrade of it: every version from here on is spoken.
CONTRACT_VERSION_OLDEST: Final = 1
MANIFEST_FORMAT: Final = 1

MESSAGE_BYTES_MAX: Final = 256 * 1024
RECEIPT_BYTES_MAX: Final = 1024 * 1024
MANIFEST_BYTES_MAX: Final = 256 * 1024 * 1024
CHUNK_BYTES: Final = 4 * 1024 * 1024
HEADER_BYTES: Final = 8
DIMENSIONS_MAX: Final = 16
EXIT_MESSAGE_CHARACTERS: Final = 4096


class ExitCode(IntEnum):
    """What an exit status means, for the supervisor (0, 1, 2, 70, 124, 130) and the trainer."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DATA = 65
    OURS = 70
    CHECKPOINT = 74
    AGAIN = 75
    CONFIGURATION = 78
    NON_FINITE = 80
    DEADLINE = 124
    FORCED = 130


# Where runs are told by name, and where a run without run.directory begins.
RUNS_VARIABLE: Final = "SUPERVISOR_RUNS"


def runs_directory(environment: Mapping[str, str]) -> str:
    return environment.get(RUNS_VARIABLE) or "runs"


# --- environment of a supervised trainer ---

ENV_RUN_DIRECTORY: Final = "SUPERVISOR_RUN_DIRECTORY"
ENV_ATTEMPT: Final = "SUPERVISOR_ATTEMPT"
ENV_NONCE: Final = "SUPERVISOR_NONCE"
ENV_EPOCH: Final = "SUPERVISOR_EPOCH"
ENV_RESUME_STEP: Final = "SUPERVISOR_RESUME_STEP"
ENV_SETTINGS: Final = "SUPERVISOR_SETTINGS"
ENV_UNTIL_STEP: Final = "SUPERVISOR_UNTIL_STEP"
ENV_LOCK_FD: Final = "SUPERVISOR_TRAINER_LOCK_FD"

# --- names in a run directory ---

RUN_FILE: Final = "run.toml"
JOURNAL_FILE: Final = "journal.jsonl"
TRAINING_FILE: Final = "training.json"
STATUS_FILE: Final = "status.json"
LOCK_FILE: Final = "lock"
TRAINER_LOCK_FILE: Final = "trainer.lock"
SUPERVISOR_LOG_FILE: Final = "supervisor.log"
DIGESTS_FILE: Final = "digests.json"  # in each archive
POLICIES: Final = "policies"
CHECKPOINTS: Final = "checkpoints"
SUPERSEDED: Final = "superseded"
QUARANTINE: Final = "quarantine"
ARCHIVE: Final = "archive"
RECEIPTS: Final = "receipts"
LOGS: Final = "logs"
SOCKETS: Final = "sockets"
TRAINER_SOCKET: Final = "trainer"
OPERATOR_SOCKET: Final = "operator"
TEMPORARY_PREFIX: Final = ".tmp-"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECKPOINT_NAME = re.compile(r"step_(\d{6,10})")
_ATTEMPT_NAME = re.compile(r"attempt-(\d{4,10})")


def ledger_name(run: str) -> str:
    return f"{run}.loss.json"


def samples_name(run: str) -> str:
    return f"{run}.samples.json"


def state_name(run: str) -> str:
    return f"{run}.state.json"


def checkpoint_stem(step: int) -> str:
    """`step_000100`: at least six digits, so a listing looks right; order is always by number."""
    if not 0 <= step <= INT32_MAX:
        raise ContractError(f"step {step} does not fit the checkpoint header (0 to {INT32_MAX})")
    return f"step_{step:06d}"


def parse_checkpoint_stem(stem: str) -> int | None:
    """The step in `step_NNNNNN`, or None where the name is not one that we would write."""
    match = _CHECKPOINT_NAME.fullmatch(stem)
    if match is None:
        return None
    step = int(match.group(1))
    return step if step <= INT32_MAX and checkpoint_stem(step) == stem else None


def attempt_stem(attempt: int) -> str:
    return f"attempt-{attempt:04d}"


def parse_attempt_stem(stem: str) -> int | None:
    match = _ATTEMPT_NAME.fullmatch(stem)
    return int(match.group(1)) if match and attempt_stem(int(match.group(1))) == stem else None


def temporary_name(attempt: int, nonce: str, name: str) -> str:
    """The name a member carries until it is published; leftovers say whose they are."""
    return f"{TEMPORARY_PREFIX}{attempt:04d}-{nonce[:8]}-{name}"


def checkpoint_size_bytes(parameters: int) -> int:
    """Size of a `.bin`: int32 step, int32 n_params, then weights, m and v as float32."""
    if not 0 < parameters <= INT32_MAX:
        raise ContractError(
            f"{parameters} parameters do not fit the checkpoint header (1 to {INT32_MAX})"
        )
    return HEADER_BYTES + 12 * parameters


# --- numbers and JSON ---

_NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_number(value: float | None) -> float | str | None:
    """A JSON value that `decode_number` turns back into the same float."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def decode_number(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ContractError(
            f"{where}: expected a number or 'nan', 'inf', '-inf', got {shown(value)}"
        )
    try:
        return float(value)
    except OverflowError as error:
        raise ContractError(f"{where}: expected a number, got one beyond all floats") from error


def canonical(value: Any) -> bytes:
    """The one serialisation that digests are taken over: sorted keys, no spaces."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- the ledger entry, which is also the receipt of a step ---


@dataclass(frozen=True, slots=True)
class Entry:
    """One completed optimizer update. `step` N means that N updates are in the weights.

    `loss` is the mean over the valid targets of the batch, in nats; `gradient_norm` is taken
    before clipping; `time` is UTC seconds since the epoch; `targets_seen` counts from step 1.
    """

    step: int
    loss: float
    time: float | None = None
    attempt: int | None = None
    epoch: int | None = None
    arm: str | None = None
    targets_seen: int | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_seconds: float | None = None

    def to_json(self) -> Json:
        out: Json = {"step": self.step, "loss": encode_number(self.loss)}
        for name in _OPTIONAL_ENTRY_FIELDS:
            value = getattr(self, name)
            if value is not None:
                out[name] = encode_number(value) if isinstance(value, float) else value
        return out


_OPTIONAL_ENTRY_FIELDS: Final = tuple(f.name for f in fields(Entry))[2:]

# The fields that a re-executed step must repeat to the last bit.
DETERMINISTIC_FIELDS: Final = ("loss", "arm", "targets_seen", "learning_rate", "gradient_norm")


def parse_entry(value: Any, where: str) -> Entry:
    """An entry from a ledger row: an object as we write it, or an ANDREA row `[step, loss]`.

    Unknown keys are let through, so that a later version may add fields to its rows.
    """
    if isinstance(value, list):
        if len(value) != 2:
            raise ContractError(f"{where}: a row needs [step, loss], got {len(value)} values")
        step, loss = value
        return Entry(count(step, f"{where} step"), decode_number(loss, f"{where} loss"))
    row = object_(value, where)
    if "step" not in row or "loss" not in row:
        raise ContractError(f"{where}: a row needs step and loss, got {names(row)}")

    def optional(check: Callable[[Any, str], Any], name: str) -> Any:
        found = row.get(name)
        return None if found is None else check(found, f"{where} {name}")

    return Entry(
        step=count(row["step"], f"{where} step"),
        loss=decode_number(row["loss"], f"{where} loss"),
        time=optional(decode_number, "time"),
        attempt=optional(count, "attempt"),
        epoch=optional(count, "epoch"),
        arm=optional(text, "arm"),
        targets_seen=optional(integer, "targets_seen"),
        learning_rate=optional(decode_number, "learning_rate"),
        gradient_norm=optional(decode_number, "gradient_norm"),
        step_seconds=optional(decode_number, "step_seconds"),
    )


def differing_fields(earlier: Entry, later: Entry) -> tuple[str, ...]:
    """The deterministic fields in which two executions of one step differ; NaN equals NaN."""

    def same(a: object, b: object) -> bool:
        return a == b or (a != a and b != b)

    return tuple(
        name
        for name in DETERMINISTIC_FIELDS
        if not same(getattr(earlier, name), getattr(later, name))
    )


# --- the other lines of a receipt file ---


@dataclass(frozen=True, slots=True)
class EnvironmentLine:
    """What the attempt really runs on, read back by the trainer. The first line of its receipts."""

    attempt: int
    environment: Json


@dataclass(frozen=True, slots=True)
class LoadedLine:
    """The attempt has loaded what it resumes from, and begins after `step`."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True)
class AuditLine:
    """The sample audit of one step: `samples` holds objects with `prompt` and `text`."""

    step: int
    time: float
    attempt: int
    epoch: int
    samples: list[Json]
    arm_shares: Json


@dataclass(frozen=True, slots=True)
class EvaluationLine:
    """The held-out evaluation of one step, in nats per target: `arms` by name."""

    step: int
    attempt: int
    loss: float
    arms: Json


@dataclass(frozen=True, slots=True)
class ExitLine:
    """The last line of a receipt file: how this life of the trainer ended, by its own word.

    `why` is one of finished, stopped, configuration, data, checkpoint, non-finite, again, error.
    """

    why: str
    step: int
    code: int
    requests: list[str]
    message: str


Receipt = Entry | EnvironmentLine | LoadedLine | AuditLine | EvaluationLine | ExitLine


def encode_receipt(receipt: Receipt) -> bytes:
    """The line, newline included, that the trainer appends with one write."""
    body: Json
    match receipt:
        case Entry():
            body = receipt.to_json()
        case EnvironmentLine():
            body = {
                "kind": "environment",
                "attempt": receipt.attempt,
                "environment": receipt.environment,
            }
        case LoadedLine():
            body = {"kind": "loaded", "attempt": receipt.attempt, "step": receipt.step}
        case AuditLine():
            body = {
                "kind": "audit",
                "step": receipt.step,
                "time": receipt.time,
                "attempt": receipt.attempt,
                "epoch": receipt.epoch,
                "samples": receipt.samples,
                "arm_shares": receipt.arm_shares,
            }
        case EvaluationLine():
            body = {
                "kind": "evaluation",
                "step": receipt.step,
                "attempt": receipt.attempt,
                "loss": encode_number(receipt.loss),
                "arms": receipt.arms,
            }
        case ExitLine():
            body = {
                "kind": "exit",
                "why": receipt.why,
                "step": receipt.step,
                "code": receipt.code,
                "requests": receipt.requests,
                "message": receipt.message,
            }
    return orjson.dumps(body) + b"\n"


def parse_receipt(line: bytes, where: str) -> Receipt:
    """A receipt out of one line without its newline. Raises ContractError."""
    body = parse_object(line, where, RECEIPT_BYTES_MAX)
    match body.get("kind"):
        case None:
            entry = parse_entry(body, where)
            if entry.arm is not None:
                identifier(entry.arm, f"{where} arm")  # or no ledger could take it
            return entry
        case "environment":
            return EnvironmentLine(
                positive(body.get("attempt"), f"{where} attempt"),
                object_(body.get("environment"), f"{where} environment"),
            )
        case "loaded":
            return LoadedLine(
                positive(body.get("attempt"), f"{where} attempt"),
                count(body.get("step"), f"{where} step"),
            )
        case "audit":
            samples = array(body.get("samples"), f"{where} samples")
            for number, sample in enumerate(samples):
                place = f"{where} samples[{number}]"
                text(object_(sample, place).get("prompt"), f"{place} prompt")
                text(sample.get("text"), f"{place} text")
            return AuditLine(
                step=count(body.get("step"), f"{where} step"),
                time=decode_number(body.get("time"), f"{where} time"),
                attempt=positive(body.get("attempt"), f"{where} attempt"),
                epoch=positive(body.get("epoch"), f"{where} epoch"),
                samples=samples,
                arm_shares=object_(body.get("arm_shares"), f"{where} arm_shares"),
            )
        case "evaluation":
            return EvaluationLine(
                step=count(body.get("step"), f"{where} step"),
                attempt=positive(body.get("attempt"), f"{where} attempt"),
                loss=decode_number(body.get("loss"), f"{where} loss"),
                arms=object_(body.get("arms"), f"{where} arms"),
            )
        case "exit":
            return ExitLine(
                why=text(body.get("why"), f"{where} why"),
                step=count(body.get("step"), f"{where} step"),
                code=integer(body.get("code"), f"{where} code"),
                requests=texts(body.get("requests"), f"{where} requests"),
                message=text(body.get("message"), f"{where} message")[:EXIT_MESSAGE_CHARACTERS],
            )
        case other:
            raise ContractError(f"{where}: unknown kind of receipt {shown(other)}")


# --- the manifest of a checkpoint ---


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor of the flat vector: `offset` and shape in float32 elements."""

    name: str
    shape: tuple[int, ...]
    orientation: str
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "orientation": self.orientation,
            "offset": self.offset,
        }


REASONS: Final = ("cadence", "sigterm", "sigusr1", "operator", "pivot")

# Every component of the training state beside the `.bin`, with its JSON type. All are required: a
# missing component is an error, never a warning. The tests of exactness walk this table.
STATE_COMPONENTS: Final[dict[str, type]] = {
    "configuration": dict,  # the full effective settings
    "policy_digest": str,
    "tokenizer": dict,  # rule, digest
    "arms": dict,  # by arm: corpus_digest, windows, sampler
    "bandit": dict,
    "rng": dict,  # generator name -> base64 of its state
    "updates": int,  # optimizer updates done; equals step
    "targets_seen": int,
    "detectors": dict,
    "environment": dict,
}

# What manifests of earlier versions lack.
STATE_LATER: Final[dict[str, type]] = {
    "retired": dict,  # arm -> digest of the text it had -> sampler, of arms that a pivot left
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a `.bin` trustworthy and exact. Digests are lowercase hexadecimal SHA-256.

    `chunks` are the digests of each CHUNK_BYTES of the `.bin`, `binary_digest` the digest over
    their concatenated raw bytes. `lineage` lists the ancestors as `[run id, last step]`.
    """

    run_id: str
    lineage: tuple[tuple[str, int], ...]
    attempt: int
    step: int
    epoch: int
    reason: str
    requests: tuple[str, ...]
    parameters: int
    size_bytes: int
    chunks: tuple[str, ...]
    binary_digest: str
    tensors: tuple[Tensor, ...]
    state: Json

    def to_bytes(self) -> bytes:
        """The file's exact content; the last thing in it is the digest of all the rest."""
        body: Json = {
            "format": MANIFEST_FORMAT,
            "run_id": self.run_id,
            "lineage": [list(item) for item in self.lineage],
            "attempt": self.attempt,
            "step": self.step,
            "epoch": self.epoch,
            "reason": self.reason,
            "requests": list(self.requests),
            "parameters": self.parameters,
            "size_bytes": self.size_bytes,
            "chunk_bytes": CHUNK_BYTES,
            "chunks": list(self.chunks),
            "binary_digest": self.binary_digest,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "state": self.state,
        }
        body["digest"] = digest(canonical(body))
        return canonical(body) + b"\n"


def chunks_digest(chunks: Iterable[str]) -> str:
    return digest(b"".join(bytes.fromhex(chunk) for chunk in chunks))


_MANIFEST_FIELDS: Final[dict[str, type]] = {
    "format": int,
    "run_id": str,
    "lineage": list,
    "attempt": int,
    "step": int,
    "epoch": int,
    "reason": str,
    "requests": list,
    "parameters": int,
    "size_bytes": int,
    "chunk_bytes": int,
    "chunks": list,
    "binary_digest": str,
    "tensors": list,
    "state": dict,
    "digest": str,
}


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """A manifest whose own content is proven: one changed bit anywhere is a ContractError."""
    body = parse_object(raw, where, MANIFEST_BYTES_MAX)
    _check_fields(body, _MANIFEST_FIELDS, where)
    if body["format"] != MANIFEST_FORMAT:
        raise ContractError(
            f"{where}: format {shown(body['format'])}, this version reads {MANIFEST_FORMAT}"
        )
    content = {key: value for key, value in body.items() if key != "digest"}
    found = digest(canonical(content))
    if found != body["digest"] or canonical(body) + b"\n" != raw:
        raise ContractError(f"{where}: content does not match its digest {shown(body['digest'])}")
    state = body["state"]
    later = {name: kind for name, kind in STATE_LATER.items() if name in state}
    _check_fields(state, STATE_COMPONENTS | later, f"{where} state")
    tensors = tuple(
        _parse_tensor(item, f"{where} tensors[{number}]")
        for number, item in enumerate(body["tensors"])
    )
    manifest = Manifest(
        run_id=identifier(body["run_id"], f"{where} run_id"),
        lineage=tuple(_parse_ancestor(item, where) for item in body["lineage"]),
        attempt=count(body["attempt"], f"{where} attempt"),
        step=count(body["step"], f"{where} step"),
        epoch=count(body["epoch"], f"{where} epoch"),
        reason=body["reason"],
        requests=tuple(texts(body["requests"], f"{where} requests")),
        parameters=count(body["parameters"], f"{where} parameters"),
        size_bytes=body["size_bytes"],
        chunks=tuple(_chunk_digest(item, f"{where} chunks") for item in body["chunks"]),
        binary_digest=body["binary_digest"],
        tensors=tensors,
        state=state,
    )
    _check_consistent(manifest, body["chunk_bytes"], where)
    return manifest


def _check_fields(body: Mapping[str, Any], expected: Mapping[str, type], where: str) -> None:
    missing = [name for name in expected if name not in body]
    unknown = [name for name in body if name not in expected]
    if missing or unknown:
        raise ContractError(f"{where}: missing {missing}, unknown {names(unknown)}")
    for name, kind in expected.items():
        value = body[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ContractError(f"{where} {name}: expected {kind.__name__}, got {shown(value)}")


def _parse_tensor(value: Any, where: str) -> Tensor:
    item = object_(value, where)
    shape = tuple(positive(size, f"{where} shape") for size in array(item.get("shape"), where))
    if len(shape) > DIMENSIONS_MAX:
        raise ContractError(f"{where}: {len(shape)} dimensions, more than {DIMENSIONS_MAX}")
    return Tensor(
        name=text(item.get("name"), f"{where} name"),
        shape=shape,
        orientation=text(item.get("orientation"), f"{where} orientation"),
        offset=integer(item.get("offset"), f"{where} offset"),
    )


def _parse_ancestor(value: Any, where: str) -> tuple[str, int]:
    item = array(value, f"{where} lineage")
    if len(item) != 2:
        raise ContractError(f"{where} lineage: expected [run id, step], got {shown(item)}")
    return identifier(item[0], f"{where} lineage"), count(item[1], f"{where} lineage")


def _chunk_digest(value: Any, where: str) -> str:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise ContractError(f"{where}: expected 64 hexadecimal digits, got {shown(value)}")
    return value


def _check_consistent(manifest: Manifest, chunk_bytes: int, where: str) -> None:
    if chunk_bytes != CHUNK_BYTES:
        raise ContractError(f"{where}: chunk_bytes {chunk_bytes}, expected {CHUNK_BYTES}")
    size = checkpoint_size_bytes(manifest.parameters)
    if manifest.size_bytes != size:
        raise ContractError(
            f"{where}: size_bytes {manifest.size_bytes}, but {manifest.parameters} parameters"
            f" make {size}"
        )
    chunk_count = -(-size // CHUNK_BYTES)
    if len(manifest.chunks) != chunk_count:
        raise ContractError(f"{where}: {len(manifest.chunks)} chunks, expected {chunk_count}")
    if chunks_digest(manifest.chunks) != manifest.binary_digest:
        raise ContractError(f"{where}: binary_digest is not the digest of the chunk list")
    if manifest.reason not in REASONS:
        raise ContractError(f"{where}: reason {shown(manifest.reason)}, expected one of {REASONS}")
    offset = 0
    for tensor in manifest.tensors:
        if tensor.offset != offset:
            raise ContractError(
                f"{where}: tensor {shown(tensor.name)} starts at {tensor.offset}, expected {offset}"
            )
        offset += tensor.size
    if offset != manifest.parameters:
        raise ContractError(
            f"{where}: tensors hold {offset} elements of {manifest.parameters} parameters"
        )
    if manifest.state["updates"] != manifest.step:
        raise ContractError(
            f"{where}: {manifest.state['updates']} updates in a checkpoint of step {manifest.step}"
        )


def check_header(header: bytes, manifest: Manifest, where: str) -> None:
    """The first 8 bytes of a `.bin` against its manifest."""
    step = int.from_bytes(header[:4], "little", signed=True)
    parameters = int.from_bytes(header[4:8], "little", signed=True)
    if (step, parameters) != (manifest.step, manifest.parameters):
        raise ContractError(
            f"{where}: header says step {step} with {parameters} parameters, the manifest step"
            f" {manifest.step} with {manifest.parameters}"
        )


# --- messages ---

AT: Final = ("now", "boundary")

_REQUIRED, _OPTIONAL = True, False
_Check = Callable[[Any, str], Any]
_Schema = dict[str, tuple[_Check, bool]]


def _moment(value: Any, where: str) -> str:
    if value not in AT:
        raise ContractError(f"{where}: expected one of {AT}, got {shown(value)}")
    return str(value)


_LIFE: Final[_Schema] = {"attempt": (count, _REQUIRED), "nonce": (text, _REQUIRED)}

# Trainer to supervisor.
UP: Final[dict[str, _Schema]] = {
    "hello": _LIFE
    | {
        "version": (count, _REQUIRED),
        "pid": (count, _REQUIRED),
        "step": (count, _REQUIRED),
        "parameters": (positive, _REQUIRED),
        "policy_digest": (text, _REQUIRED),
        "capabilities": (texts, _REQUIRED),
    },
    "phase": _LIFE
    | {
        "phase": (identifier, _REQUIRED),
        "step": (count, _OPTIONAL),  # the last one complete when it began
        "deadline_seconds": (number, _OPTIONAL),
    },
    "step": _LIFE | {"step": (count, _REQUIRED), "loss": (decode_number, _REQUIRED)},
    "seen": _LIFE | {"id": (identifier, _REQUIRED)},
    "saved": _LIFE
    | {
        "step": (count, _REQUIRED),
        "digest": (text, _REQUIRED),
        "reason": (identifier, _REQUIRED),
        "requests": (texts, _REQUIRED),
        "seconds": (number, _REQUIRED),
    },
    # A checkpoint or a receipt that the disk refuses. `requests` end with it: they have failed.
    "unsaved": _LIFE
    | {
        "step": (count, _REQUIRED),
        "why": (text, _REQUIRED),
        "errno": (count, _REQUIRED),
        "requests": (texts, _REQUIRED),
    },
    "paused": _LIFE | {"step": (count, _REQUIRED), "id": (identifier, _REQUIRED)},
    "farewell": _LIFE | {"why": (text, _REQUIRED), "step": (count, _REQUIRED)},
}

# Supervisor to trainer.
DOWN: Final[dict[str, _Schema]] = {
    "checkpoint": {"id": (identifier, _REQUIRED), "at": (_moment, _REQUIRED)},
    "stop": {"id": (identifier, _REQUIRED), "at": (_moment, _REQUIRED)},
    "pause": {"id": (identifier, _REQUIRED)},
    "exit": {},
    "resume": {},
    "who": {},
}

# Operator to supervisor; every request has an id.
ASK: Final[dict[str, _Schema]] = {
    "status": {"id": (identifier, _REQUIRED)},
    "checkpoint": {"id": (identifier, _REQUIRED), "at": (_moment, _REQUIRED)},
    "stop": {"id": (identifier, _REQUIRED)},
    "restart": {"id": (identifier, _REQUIRED)},
    "pivot": {
        "id": (identifier, _REQUIRED),
        "at": (_moment, _REQUIRED),
        "epoch": (count, _REQUIRED),
        "against": (text, _OPTIONAL),
        "parent": (count, _REQUIRED),
        "to_step": (count, _OPTIONAL),
        "policy": (text, _REQUIRED),
        "settings": (text, _REQUIRED),
        "policy_digest": (text, _REQUIRED),
        "reason": (text, _REQUIRED),
    },
    "pin": {"id": (identifier, _REQUIRED), "step": (count, _REQUIRED), "why": (text, _REQUIRED)},
}

# Supervisor to operator. `outcome`: done, refused (why), busy (with what), accepted.
ANSWER: Final[dict[str, _Schema]] = {
    "reply": {
        "id": (text, _REQUIRED),
        "outcome": (text, _REQUIRED),
        "why": (text, _OPTIONAL),
        "result": (object_, _REQUIRED),
    },
}

TRAINER_PHASES: Final = ("load", "compile", "step", "save", "sample", "evaluate")


def encode_message(verb: str, **content: Any) -> bytes:
    return orjson.dumps({"version": CONTRACT_VERSION, "verb": verb, **content})


def parse_message(frame: bytes, table: Mapping[str, _Schema], where: str) -> tuple[str, Json]:
    """The verb and the checked fields of one frame. Unknown fields are dropped, so that a newer
    peer may say more; an unknown verb, a missing field or a wrong value is a ContractError."""
    body = parse_object(frame, where, MESSAGE_BYTES_MAX)
    version = body.get("version")
    spoken = isinstance(version, int) and CONTRACT_VERSION_OLDEST <= version <= CONTRACT_VERSION
    if not spoken:
        raise ContractError(
            f"{where}: version {shown(version)}, this side speaks {CONTRACT_VERSION}"
        )
    verb = body.get("verb")
    if not isinstance(verb, str) or verb not in table:
        raise ContractError(f"{where}: unknown verb {shown(verb)}, expected one of {sorted(table)}")
    content: Json = {}
    for name, (check, required) in table[verb].items():
        value = body.get(name)
        if value is not None or required:
            content[name] = check(value, f"{where} {verb}: field {name}")
    return verb, content
