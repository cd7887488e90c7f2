"""Checkpoints made with plain Python, for every test that needs one on disk.

A pair is published as a trainer does it: both members under temporary names, the manifest linked
first, the `.bin` linked last as the commit, then the temporaries unlinked, also when the disk
refuses. Nothing is synced unless asked for: most tests look at names and bytes, not at power loss.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from supervisor.contract import (
    CHUNK_BYTES,
    Json,
    Manifest,
    Tensor,
    checkpoint_size_bytes,
    checkpoint_stem,
    chunks_digest,
    temporary_name,
)

RUN_ID = "run-a"
NONCE = "0123456789abcdef"


def binary(step: int, parameters: int, seed: int = 0) -> bytes:
    """A `.bin` whose values depend on step and seed: header, weights, m, v."""
    source = random.Random(f"{seed} {step}")
    values = array("f", (source.uniform(-1.0, 1.0) for _ in range(min(parameters, 1000))))
    vector = (values * (parameters // len(values) + 1))[:parameters].tobytes()
    return struct.pack("<ii", step, parameters) + vector * 3


def chunk_digests(data: bytes) -> tuple[str, ...]:
    return tuple(
        hashlib.sha256(data[start : start + CHUNK_BYTES]).hexdigest()
        for start in range(0, len(data), CHUNK_BYTES)
    )


def state(step: int, arms: Sequence[str] = ("prose", "code")) -> Json:
    """The least state that a manifest accepts; all pulls are the first arm's."""

    def arm(cursor: int) -> Json:
        sampler = {"permutation": "AAAAAAEAAAA=", "cursor": cursor, "round": 2, "generator": "AA=="}
        return {"corpus_digest": "0" * 64, "windows": 40, "sampler": sampler}

    return {
        "configuration": {},
        "policy_digest": "1" * 64,
        "tokenizer": {"rule": "bytes", "digest": "2" * 64},
        "arms": {name: arm(0 if number else step % 40) for number, name in enumerate(arms)},
        "bandit": {"kind": "ducb", "arms": {arms[0]: {"pulls": step}}},
        "rng": {"torch": "AA=="},
        "updates": step,
        "targets_seen": 10 * step,
        "detectors": {},
        "environment": {},
    }


def manifest(data: bytes, step: int, parameters: int, **overrides: Any) -> Manifest:
    """The manifest that fits `data`; any field can be overridden, state fields in `state`."""
    chunks = chunk_digests(data)
    fitting = Manifest(
        run_id=RUN_ID,
        lineage=(),
        attempt=1,
        step=step,
        epoch=1,
        reason="cadence",
        requests=(),
        parameters=parameters,
        size_bytes=checkpoint_size_bytes(parameters),
        chunks=chunks,
        binary_digest=chunks_digest(chunks),
        tensors=(Tensor("all", (parameters,), "row", 0),),
        state=state(step),
    )
    return replace(fitting, **overrides)


def publish(
    directory: Path,
    step: int,
    data: bytes,
    manifest_bytes: bytes,
    *,
    attempt: int = 1,
    nonce: str = NONCE,
    stop_before: str | None = None,
    synced: bool = False,
) -> None:
    """Publishes a pair as a trainer does. A name that exists with other content raises
    FileExistsError; with the same content it is kept. `stop_before` dies at that point:
    "json" and "bin" before the write of a temporary, "link json" and "link bin" before a link,
    "unlink" with both members published and both temporaries left. `synced`: the members are."""
    directory.mkdir(parents=True, exist_ok=True)
    members = {".json": manifest_bytes, ".bin": data}
    temporaries = {
        ending: directory / temporary_name(attempt, nonce, checkpoint_stem(step) + ending)
        for ending in members
    }
    try:
        for ending, content in members.items():
            if stop_before == ending[1:]:
                temporaries[ending].write_bytes(content[: len(content) // 2])
                return
            with temporaries[ending].open("wb") as file:
                file.write(content)
                if synced:
                    file.flush()
                    os.fsync(file.fileno())
        for ending, content in members.items():
            if stop_before == f"link {ending[1:]}":
                return
            name = directory / (checkpoint_stem(step) + ending)
            try:
                os.link(temporaries[ending], name)
            except FileExistsError:
                if name.read_bytes() != content:
                    raise
    except OSError:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
        raise
    if stop_before == "unlink":
        return
    for temporary in temporaries.values():
        temporary.unlink()


def write_checkpoint(
    directory: Path,
    step: int,
    parameters: int = 6,
    run_id: str = RUN_ID,
    attempt: int = 1,
    *,
    seed: int = 0,
    nonce: str = NONCE,
    stop_before: str | None = None,
    **overrides: Any,
) -> Manifest:
    """A valid checkpoint in `directory`, which is the run's `checkpoints/`; returns its manifest.

    `overrides` replace fields of the manifest after it was made to fit, so that a test can make it
    lie: `state=...`, `step=...`, `reason=...`, `requests=(...)`, `lineage=((run id, step),)`.
    """
    data = binary(step, parameters, seed)
    made = manifest(data, step, parameters, run_id=run_id, attempt=attempt, **overrides)
    publish(
        directory,
        step,
        data,
        made.to_bytes(),
        attempt=attempt,
        nonce=nonce,
        stop_before=stop_before,
    )
    return made


def flip_bit(path: Path, bit: int) -> None:
    """Changes one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        old = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([old ^ (1 << (bit % 8))]))
