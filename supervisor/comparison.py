"""Where two checkpoints of one step differ: in which component, tensor and number.

What may live here: the comparison of two manifests and, where their digests differ, of the two
`.bin` files. Nothing is judged here and nothing is written.

Invariant: what decides no bit is not compared. `configuration` was compared by the trainer before
it resumed; `detectors` notes when somebody looked at the model, which a stop or a longer target may
have changed; `environment` is a cause and not an effect.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor import contract
from supervisor.checkpoints import BINARY, MANIFEST
from supervisor.contract import (
    CHUNK_BYTES,
    HEADER_BYTES,
    STATE_COMPONENTS,
    STATE_LATER,
    ContractError,
    Manifest,
    checkpoint_stem,
)
from supervisor.rundir import RunError

COMPARED: Final = tuple(
    name
    for name in (*STATE_COMPONENTS, *STATE_LATER)
    if name not in ("configuration", "detectors", "environment")
)
REGIONS: Final = ("weights", "m", "v")
_SHOWN_CHARACTERS: Final = 60


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that differs: a field of a receipt, a component of the state, a region. `detail`
    is the tensor and the element in it."""

    name: str
    recorded: Any
    now: Any
    detail: str = ""


def compare_checkpoints(
    step: int, recorded_directory: Path, now_directory: Path
) -> tuple[Manifest, list[Part]]:
    """The recorded manifest, and everything in which the two checkpoints of `step` differ.

    Raises FileNotFoundError where one is not there (any more), RunError for a damaged manifest.
    """
    directories = (recorded_directory, now_directory)
    recorded, now = (_manifest(directory, step) for directory in directories)
    parts = differing_parts(recorded, now, *directories)
    if _evaluated(recorded) != _evaluated(now):
        # A stop was asked for and the evaluation left to the next life, which made it before its
        # first step: only in between does the bandit not know of it.
        parts = [part for part in parts if not part.name.startswith("bandit.")]
    return recorded, parts


def _manifest(directory: Path, step: int) -> Manifest:
    path = directory / (checkpoint_stem(step) + MANIFEST)
    try:
        return contract.parse_manifest(path.read_bytes(), str(path))
    except ContractError as error:
        raise RunError(f"{error}; `supervisor verify` says what else is damaged") from error


def _evaluated(manifest: Manifest) -> object:
    return manifest.state["detectors"].get("evaluated_step")


def differing_parts(
    recorded: Manifest, now: Manifest, recorded_directory: Path, now_directory: Path
) -> list[Part]:
    """Every region and component in which two checkpoints of one step differ. The `.bin` files are
    read only where their digests differ. Raises OSError where they cannot be."""
    parts: list[Part] = []
    if recorded.chunks != now.chunks:
        parts += _differing_regions(recorded, now, recorded_directory, now_directory)
    for name in COMPARED:
        if name in STATE_LATER and not (name in recorded.state and name in now.state):
            continue  # one of them is of an earlier version
        parts += _differing_leaves(name, recorded.state[name], now.state[name])
    return parts


def _differing_leaves(name: str, recorded: Any, now: Any) -> Iterator[Part]:
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in sorted(recorded.keys() | now.keys()):
            yield from _differing_leaves(f"{name}.{key}", recorded.get(key), now.get(key))
    elif recorded != now:
        yield Part(name, _short(recorded), _short(now))


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:16]}… ({len(value)} characters, SHA-256 {contract.digest(value.encode())})"
    return value


# --- where two .bin files differ ------------------------------------------------------------------


def _differing_regions(
    recorded: Manifest, now: Manifest, recorded_directory: Path, now_directory: Path
) -> Iterator[Part]:
    """The first number that differs in each of weights, m and v, with the tensor it is in."""
    left = set(REGIONS)
    name = checkpoint_stem(recorded.step) + BINARY
    with (recorded_directory / name).open("rb") as one, (now_directory / name).open("rb") as other:
        pairs = enumerate(zip(recorded.chunks, now.chunks, strict=True))
        for number in (number for number, (a, b) in pairs if a != b):
            start = number * CHUNK_BYTES
            one.seek(start)
            other.seek(start)
            chunks = one.read(CHUNK_BYTES), other.read(CHUNK_BYTES)
            for part in _differing_numbers(recorded, start, *chunks):
                if part.name in left:
                    left.remove(part.name)
                    yield part
    if left == set(REGIONS):
        yield Part("file", recorded.binary_digest, now.binary_digest, "not what its manifest says")


def _differing_numbers(
    manifest: Manifest, start: int, recorded: bytes, now: bytes
) -> Iterator[Part]:
    size = 4 * manifest.parameters
    for number, name in enumerate(REGIONS):
        low = max(0, HEADER_BYTES + number * size - start)
        high = max(0, HEADER_BYTES + (number + 1) * size - start)
        place = _first_difference(recorded[low:high], now[low:high])
        if place is not None:
            element = (start + low + place - HEADER_BYTES - number * size) // 4
            one, other = (
                contract.encode_number(struct.unpack_from("<f", data, low + place)[0])
                for data in (recorded, now)
            )
            yield Part(name, one, other, _tensor_at(manifest, element))


def _first_difference(recorded: bytes, now: bytes) -> int | None:
    """Offset of the first float32 that differs, found by halving."""
    if recorded == now:
        return None
    low, high = 0, len(recorded)
    while high - low > 4:
        middle = low + (high - low) // 8 * 4
        if recorded[low:middle] != now[low:middle]:
            high = middle
        else:
            low = middle
    return low


def _tensor_at(manifest: Manifest, element: int) -> str:
    tensor = next(tensor for tensor in reversed(manifest.tensors) if tensor.offset <= element)
    return f"{tensor.name}[{element - tensor.offset}]"
