"""The proof of one checkpoint: against its manifest, and against what the journal says of it.

What may live here: what the journal promises of checkpoints/, the verdict on one of them, and the
places in it that are damaged. The reading itself is in `readback`; nothing here writes or moves.

Invariants: a checkpoint is condemned only where its bytes are known to be wrong; one that cannot
be read is a problem and stays where it is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from supervisor import contract, events as ev, readback
from supervisor.checkpoint_requests import summary
from supervisor.checkpoints import MANIFEST
from supervisor.contract import CHECKPOINTS, CHUNK_BYTES, HEADER_BYTES, ContractError, Json
from supervisor.durable import size_of
from supervisor.ledger_proof import Advance, Problem, open_cold
from supervisor.readback import Damaged, Found, Lineage, Verified

WHOLE: Final = "the whole file"


@dataclass(frozen=True, slots=True)
class Promise:
    """A checkpoint that the journal says is there; an empty digest is not on record."""

    binary_digest: str
    sha256: str = ""


def promises(records: Iterable[ev.Record]) -> dict[int, Promise]:
    """By step, what the records promise of checkpoints/. A later record of a step replaces an
    earlier one: a step that was left behind may be reached again."""
    promised: dict[int, Promise] = {}
    for record in records:
        match record:
            case ev.CheckpointCommitted():
                promised[record.step] = Promise(record.binary_digest)
            case ev.CheckpointVerified():
                digest = promised[record.step].binary_digest if record.step in promised else ""
                promised[record.step] = Promise(digest, record.sha256)
            case ev.CheckpointQuarantined():
                promised.pop(record.step, None)
            case ev.CheckpointsSuperseded() | ev.CheckpointsRemoved():
                for step in record.steps:
                    promised.pop(step, None)
            case _:
                pass
    return promised


@dataclass(frozen=True, slots=True)
class Verdict:
    """`condemned`: why the checkpoint should be set aside, or nothing. `summary`: what it says of
    itself (`checkpoint_requests.summary`), where it is what its manifest says."""

    found: Found
    problems: tuple[Problem, ...] = ()
    condemned: str = ""
    summary: Json | None = None


def prove_checkpoint(
    found: Found,
    promise: Promise | None,
    run_id: str,
    lineage: Lineage,
    *,
    bare_allowed: bool,
    advance: Advance,
) -> Verdict:
    """Reads a checkpoint from the device. `promise` None: the journal does not know it yet."""
    name = f"{CHECKPOINTS}/{found.binary.name}"
    tick = _counted(found, advance)
    try:
        verified = readback.verify(found, run_id, lineage, bare_allowed=bare_allowed, tick=tick)
    except Damaged as damage:
        return Verdict(found, tuple(_locate(found, damage)), damage.reason)
    except OSError as error:
        return Verdict(found, (Problem(name, WHOLE, f"cannot be read: {error}"),))
    broken = _broken_promise(verified, promise) if promise is not None else ""
    if broken:
        return Verdict(found, (Problem(name, WHOLE, broken),), broken)
    return Verdict(found, summary=summary(verified))


def _counted(found: Found, advance: Advance) -> Callable[[], None]:
    """A tick that tells how many bytes of the `.bin` each chunk has."""
    left = size_of(found.binary)

    def tick() -> None:
        nonlocal left
        size_bytes = min(CHUNK_BYTES, left)
        left -= size_bytes
        advance(size_bytes)

    return tick


def _broken_promise(verified: Verified, promise: Promise) -> str:
    for what, now, then in (
        ("digest over its chunks", verified.binary_digest, promise.binary_digest),
        ("SHA-256", verified.sha256, promise.sha256),
    ):
        if then and now != then:
            return f"its {what} is {now}, the journal recorded {then}"
    return ""


# --- where it is damaged --------------------------------------------------------------------------


def _locate(found: Found, damage: Damaged) -> Iterator[Problem]:
    """Every damage in a checkpoint that is known to have one."""
    binary = f"{CHECKPOINTS}/{found.binary.name}"
    if found.manifest is None:
        yield _of_bare(found, damage)
        return
    manifest = f"{CHECKPOINTS}/{found.manifest.name}"
    if damage.reason.startswith(found.manifest.name):
        size = size_of(found.manifest)
        reason = damage.reason.removeprefix(f"{found.manifest.name}: ")
        yield Problem(manifest, f"bytes 0 to {size}", reason)
        return
    try:
        places = list(_damaged_places(found))
    except (OSError, ContractError):
        places = []  # it has changed since; the reason says what was wrong before
    for place in places:
        yield Problem(binary, place, "differs from its manifest")
    if not places:
        yield Problem(binary, WHOLE, damage.reason.removeprefix(f"{found.binary.name}: "))


def _of_bare(found: Found, damage: Damaged) -> Problem:
    missing = f"{found.binary.name}: no manifest beside it"
    if damage.reason == missing:
        manifest = found.binary.with_suffix(MANIFEST).name
        return Problem(f"{CHECKPOINTS}/{manifest}", WHOLE, "missing")
    reason = damage.reason.removeprefix(f"{found.binary.name}: ")
    return Problem(f"{CHECKPOINTS}/{found.binary.name}", f"bytes 0 to {HEADER_BYTES}", reason)


def _damaged_places(found: Found) -> Iterator[str]:
    """Where a `.bin` differs from its manifest: its length, its header, each of its chunks."""
    assert found.manifest is not None
    manifest = contract.parse_manifest(found.manifest.read_bytes(), found.manifest.name)
    size = size_of(found.binary)
    if size != manifest.size_bytes:
        low, high = sorted((size, manifest.size_bytes))
        word = "missing" if size < manifest.size_bytes else "too many"
        yield f"bytes {low} to {high} are {word}"
    if not size:
        return
    total = len(manifest.chunks)
    with open_cold(found.binary) as file:
        for number, expected in enumerate(manifest.chunks):
            start = number * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, manifest.size_bytes)
            parts = readback.regions(start, stop, manifest.parameters)
            place = f"chunk {number} of {total}, bytes {start} to {stop} ({parts})"
            try:
                data = os.pread(file.fileno(), stop - start, start)
            except OSError as error:
                yield f"{place}, which cannot be read ({error.strerror})"
                continue
            if hashlib.sha256(data).hexdigest() == expected:
                continue
            header = data[:HEADER_BYTES] if number == 0 else b""
            wrong = _differing_bytes(header, manifest)
            yield f"{place}, header bytes {wrong}" if wrong else place


def _differing_bytes(header: bytes, manifest: contract.Manifest) -> str:
    expected = manifest.step.to_bytes(4, "little") + manifest.parameters.to_bytes(4, "little")
    wrong = [str(n) for n, (a, b) in enumerate(zip(header, expected, strict=False)) if a != b]
    return ", ".join(wrong)
