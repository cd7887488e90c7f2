"""Reading one checkpoint back and proving it: every byte, from the device, against its manifest.

What may live here: reading and comparing. Nothing here writes, moves or removes anything, and
nothing here knows about other checkpoints (`supervisor.checkpoints` does).

Invariants:
- A checkpoint is what its manifest says as a whole, or it is Damaged; there is no "mostly".
- Damaged is a statement about bytes. A failure that says nothing about them (no permission, no
  memory, no descriptor) is raised as the OSError that it is, and condemns nothing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.contract import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MANIFEST_BYTES_MAX,
    ContractError,
    Manifest,
    check_header,
    checkpoint_size_bytes,
    chunks_digest,
    parse_manifest,
)

Lineage = Sequence[tuple[str, int]]
Tick = Callable[[], None]

# What a read returns when the medium has lost the bytes: that condemns one checkpoint. Any other
# error (permissions, memory, descriptors) says nothing about the bytes and is raised as it is.
_LOST: Final = frozenset(
    (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ, errno.ENOENT)
)


class Damaged(Exception):
    """One checkpoint is not what it claims to be. `reason` names the file and the difference;
    `moved_to` is its new place where somebody has set it aside."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"checkpoint {step} is damaged: {reason}")
        self.step = step
        self.reason = reason
        self.moved_to = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A committed checkpoint as the directory shows it; `manifest` None: there is no such file."""

    step: int
    binary: Path
    manifest: Path | None


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that was read back whole. `sha256` is the plain digest of the `.bin`;
    `manifest` is None for a bare file, whose only claim is its own header."""

    step: int
    path: Path
    sha256: str
    binary_digest: str
    size_bytes: int
    parameters: int
    manifest: Manifest | None


def no_tick() -> None:
    """The tick of a caller that never wants to stop half-way."""


def verify(
    found: Found,
    run_id: str,
    lineage: Lineage = (),
    *,
    cold: bool = True,
    bare_allowed: bool = False,
    tick: Tick = no_tick,
) -> Verified:
    """Reads a checkpoint whole and proves that it is what its manifest says.

    `cold` reads from the device and not from the page cache, which would only prove that the
    kernel remembers what it was given. `lineage` lists the ancestors whose checkpoints count too,
    as (run id, last step). `bare_allowed` accepts a file without a manifest on the word of its
    own header. `tick` runs before each chunk; whatever it raises ends the reading.

    Raises Damaged; OSError where the failure says nothing about the checkpoint.
    """
    try:
        if found.manifest is not None:
            manifest = read_manifest(found.manifest, cold)
            _check_origin(manifest, found.step, run_id, lineage, found.manifest.name)
        elif bare_allowed:
            manifest = None
        else:
            raise ContractError(f"{found.binary.name}: no manifest beside it")
        return _read_back(found, manifest, cold, tick)
    except ContractError as error:
        raise Damaged(found.step, str(error)) from error
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise Damaged(found.step, f"cannot be read: {error}") from error


def read_manifest(path: Path, cold: bool) -> Manifest:
    """Raises ContractError where it is none, OSError where it cannot be read."""
    with _opened(path) as (descriptor, size_bytes):
        if size_bytes > MANIFEST_BYTES_MAX:
            raise ContractError(
                f"{path.name}: {size_bytes} bytes, more than the limit of {MANIFEST_BYTES_MAX}"
            )
        raw = b"".join(bytes(chunk) for chunk in _chunks(descriptor, size_bytes, cold, path.name))
    return parse_manifest(raw, path.name)


def _check_origin(manifest: Manifest, step: int, run_id: str, lineage: Lineage, where: str) -> None:
    if manifest.step != step:
        raise ContractError(f"{where}: written for step {manifest.step}")
    if manifest.run_id == run_id:
        return
    if any(manifest.run_id == name and manifest.step <= last for name, last in lineage):
        return
    raise ContractError(
        f"{where}: step {manifest.step} of run {manifest.run_id}, which is neither this run"
        f" ({run_id}) nor a step of an ancestor that it grew from"
    )


def _read_back(found: Found, manifest: Manifest | None, cold: bool, tick: Tick) -> Verified:
    name = found.binary.name
    whole = hashlib.sha256()
    digests: list[str] = []
    with _opened(found.binary) as (descriptor, size_bytes):
        header = os.pread(descriptor, HEADER_BYTES, 0)
        step = int.from_bytes(header[:4], "little", signed=True)
        parameters = int.from_bytes(header[4:], "little", signed=True)
        if manifest is not None:
            parameters = manifest.parameters
        expected_bytes = checkpoint_size_bytes(parameters)
        if size_bytes != expected_bytes:
            raise ContractError(
                f"{name}: {size_bytes} bytes, but {parameters} parameters make {expected_bytes}"
            )
        if manifest is not None:
            check_header(header, manifest, name)
        elif step != found.step:
            raise ContractError(f"{name}: its header says step {step}")
        for number, chunk in enumerate(_chunks(descriptor, size_bytes, cold, name)):
            tick()
            digests.append(hashlib.sha256(chunk).hexdigest())
            if manifest is not None and digests[number] != manifest.chunks[number]:
                start, stop = number * CHUNK_BYTES, number * CHUNK_BYTES + len(chunk)
                raise ContractError(
                    f"{name}: chunk {number} of {len(manifest.chunks)}, bytes {start} to {stop}"
                    f" ({regions(start, stop, parameters)}), differs from its manifest"
                )
            whole.update(chunk)
    return Verified(
        step=found.step,
        path=found.binary,
        sha256=whole.hexdigest(),
        binary_digest=chunks_digest(digests),
        size_bytes=size_bytes,
        parameters=parameters,
        manifest=manifest,
    )


def regions(start: int, stop: int, parameters: int) -> str:
    """Which parts of a `.bin` the bytes from `start` to before `stop` belong to."""
    bounds = (0, *(HEADER_BYTES + 4 * parameters * count for count in range(4)))
    parts = zip(("header", "weights", "m", "v"), itertools.pairwise(bounds), strict=True)
    return ", ".join(name for name, (low, high) in parts if start < high and stop > low)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the size in bytes of a regular file."""
    # NONBLOCK: a fifo that took the file's place must not hold us inside open.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ContractError(f"{path.name}: not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _chunks(descriptor: int, size_bytes: int, cold: bool, name: str) -> Iterator[memoryview]:
    """The file in CHUNK_BYTES pieces, each valid until the next is asked for."""
    # An anonymous map starts on a page, as O_DIRECT demands of its buffers.
    buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if cold and not _bypass_cache(descriptor):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset in range(0, size_bytes, CHUNK_BYTES):
        wanted = min(CHUNK_BYTES, size_bytes - offset)
        filled = 0
        while filled < wanted:
            try:
                got = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            except OSError as error:
                if error.errno != errno.EINVAL or not _use_cache(descriptor):
                    raise
                continue
            if got == 0:
                raise ContractError(f"{name}: ends at byte {offset + filled} of {size_bytes}")
            filled += got
        yield buffer[:wanted]


def _bypass_cache(descriptor: int) -> bool:
    """Turns O_DIRECT on; False where the file system has no such thing."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _use_cache(descriptor: int) -> bool:
    """Turns O_DIRECT off and drops what the cache holds; False where it was off already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
