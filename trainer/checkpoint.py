"""One training state as two files: `step_NNNNNN.bin` and its manifest `step_NNNNNN.json`.

What may live here: writing and publishing a checkpoint, finding, proving and loading one, and
setting a bad one aside. What the state consists of is `recipe`; when it is saved is `loop`.

Invariants:
- The name of the `.bin` is the commit. Both files are whole and synced, and so are the receipts,
  before that name exists; a manifest alone is a leftover of a kill and never a checkpoint.
- A committed name is never written again. Equal content is kept, other content is a conflict.
- There is one publisher at a time: it holds a lock on the directory from first byte to last link.
- A number that was not finite is never published, a byte that was not proven is never trained on.
- No copy: the `.bin` is written from, and read into, the buffers that the model lives in. These go
  to disk as they lie in memory, so the machine has to be little-endian.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path
from typing import Final

import torch

from supervisor import contract
from supervisor.contract import CHUNK_BYTES, ContractError, Json, Manifest
from trainer.flat import Flat, Regions, StateError

BINARY: Final = ".bin"
MANIFEST: Final = ".json"
_REASON: Final = ".reason.json"

# SHA-256 on one core is about as slow as a disk; two keep ahead of it.
_DIGEST_THREADS: Final = 2

# What a read returns when the medium has lost the bytes. Any other error (permissions, memory)
# says nothing about the checkpoint and is raised as it is.
_LOST: Final = frozenset(
    (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ, errno.ENOENT)
)


class CheckpointDamaged(Exception):
    """The files of one checkpoint are not what its manifest says."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"checkpoint {step} is damaged: {reason}")
        self.step = step
        self.reason = reason


class CheckpointConflict(Exception):
    """Somebody else publishes in this directory: this trainer has been fenced off."""


class CheckpointNotWritten(OSError):
    """The disk did not take a checkpoint. Those before it are as they were."""


class NonFiniteState(ArithmeticError):
    """A weight or a moment is not finite, so the state is not worth keeping."""


class StateMismatch(ValueError):
    """A sound checkpoint of something else than what these settings describe."""


# --- finding --------------------------------------------------------------------------------------


def steps(directory: Path) -> list[int]:
    """Steps of the committed checkpoints, ascending: regular files under exactly our names."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            stem, ending = os.path.splitext(entry.name)
            step = contract.parse_checkpoint_stem(stem)
            if step is not None and ending == BINARY and entry.is_file(follow_symlinks=False):
                found.append(step)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Selection:
    """`chosen` None: there is no valid checkpoint. `rejected`: (step, reason), newest first."""

    chosen: Manifest | None
    rejected: tuple[tuple[int, str], ...]


def select(directory: Path, run_id: str | None) -> Selection:
    """The newest checkpoint of the run that is proven, byte for byte. Moves nothing."""
    rejected: list[tuple[int, str]] = []
    for step in reversed(steps(directory)):
        try:
            return Selection(verify(directory, step, run_id), tuple(rejected))
        except CheckpointDamaged as damage:
            rejected.append((step, damage.reason))
    return Selection(None, tuple(rejected))


def remove_leftovers(directory: Path) -> None:
    """Removes what killed publishers left. Only for who knows that no other one lives."""
    for name in os.listdir(directory):
        if name.startswith(contract.TEMPORARY_PREFIX):
            (directory / name).unlink()


def set_aside(run_directory: Path, step: int, reason: str, time: float) -> str:
    """Moves both members to quarantine/ beside the reason, so that the name is free again.

    Returns the new place of the `.bin`, relative to the run directory. `time` is UTC seconds.
    """
    source, target = run_directory / contract.CHECKPOINTS, run_directory / contract.QUARANTINE
    target.mkdir(mode=0o700, exist_ok=True)
    stem = contract.checkpoint_stem(step)
    present = [ending for ending in (BINARY, MANIFEST) if (source / (stem + ending)).exists()]
    new_stem = _free_stem(target, stem)
    body: Json = {
        "step": step,
        "reason": reason,
        "time": time,
        "names": [stem + ending for ending in present],
        "moved_to": f"{contract.QUARANTINE}/{new_stem}{BINARY}",
    }
    # The reason first: a kill half-way leaves a reason too many, never one too few.
    _write(target / (new_stem + _REASON), contract.canonical(body) + b"\n")
    for ending in present:
        os.rename(source / (stem + ending), target / (new_stem + ending))
    for directory in (target, source):
        _sync_directory(directory)
    return f"{contract.QUARANTINE}/{new_stem}{BINARY}"


def _free_stem(target: Path, stem: str) -> str:
    """`stem`, or the first of stem.2, stem.3, ... that has no file yet."""
    names = itertools.chain([stem], (f"{stem}.{number}" for number in itertools.count(2)))
    endings = (BINARY, MANIFEST, _REASON)
    return next(n for n in names if not any((target / (n + end)).exists() for end in endings))


# --- publishing -----------------------------------------------------------------------------------


def publish(
    directory: Path, draft: Manifest, flat: Flat, *, nonce: str, sync: Callable[[], None]
) -> Manifest:
    """Commits the state in `flat` as the checkpoint that `draft` describes; returns its manifest.

    `draft` is complete but for `chunks` and `binary_digest`. `sync` makes the receipts durable; it
    is called before anything becomes visible. A checkpoint of this step that is there already and
    has the same bytes is kept, and its manifest returned.

    Raises NonFiniteState, CheckpointConflict, or CheckpointNotWritten; then no file has changed.
    """
    _check_finite(flat, draft.step)
    flat.download()
    if sys.byteorder != "little":
        raise RuntimeError("a checkpoint is little-endian; this machine is not")
    struct.pack_into("<ii", flat.image, 0, draft.step, draft.parameters)
    try:
        with _only_publisher(directory) as lock:
            if (directory / (contract.checkpoint_stem(draft.step) + BINARY)).exists():
                return _keep_equal(directory, draft, flat.image)
            return _commit(directory, lock, draft, flat.image, nonce, sync)
    except OSError as error:
        raise CheckpointNotWritten(
            error.errno,
            f"checkpoint {draft.step} could not be written to {directory}: {error}; free space or"
            " repair the disk, earlier checkpoints are untouched",
        ) from error


def _check_finite(flat: Flat, step: int) -> None:
    # A sum shows NaN and infinity at a fortieth of the cost of isfinite().all().
    regions = Regions(flat.weights, flat.first_moments, flat.second_moments)
    sums = {name: region.sum().item() for name, region in regions._asdict().items()}
    bad = [name for name, total in sums.items() if not math.isfinite(total)]
    if bad:
        raise NonFiniteState(
            f"step {step}: {', '.join(bad)} hold a value that is not finite; nothing was published."
            " Resume from the checkpoint before"
        )


@contextlib.contextmanager
def _only_publisher(directory: Path) -> Iterator[int]:
    """The open directory, locked. A second publisher is refused, it does not wait."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointConflict(
                f"{directory}: another process is publishing a checkpoint; only one trainer may"
                " write to a run"
            ) from error
        yield descriptor
    finally:
        os.close(descriptor)


def _keep_equal(directory: Path, draft: Manifest, image: memoryview) -> Manifest:
    path = directory / (contract.checkpoint_stem(draft.step) + BINARY)
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        ours = contract.chunks_digest(pool.map(_sha256, _chunks_of(image)))
    try:
        published = read_manifest(directory, draft.step)
    except CheckpointDamaged as damage:
        raise CheckpointConflict(f"{path} exists, but {damage.reason}") from damage
    if published.binary_digest != ours:
        raise CheckpointConflict(
            f"{path} exists with digest {published.binary_digest} (attempt {published.attempt});"
            f" attempt {draft.attempt} holds {ours} for the same step. A published checkpoint is"
            " never replaced"
        )
    return published


def _commit(
    directory: Path,
    lock: int,
    draft: Manifest,
    image: memoryview,
    nonce: str,
    sync: Callable[[], None],
) -> Manifest:
    binary, manifest = (
        directory / (contract.checkpoint_stem(draft.step) + ending) for ending in (BINARY, MANIFEST)
    )
    temporaries = [
        directory / contract.temporary_name(draft.attempt, nonce, path.name)
        for path in (binary, manifest)
    ]
    try:
        chunks = _write_binary(temporaries[0], image)
        complete = replace(draft, chunks=chunks, binary_digest=contract.chunks_digest(chunks))
        _write(temporaries[1], complete.to_bytes())
        sync()
        _link_manifest(temporaries[1], manifest)
        os.fsync(lock)
        os.link(temporaries[0], binary)  # the commit
        os.fsync(lock)
    finally:
        for path in temporaries:
            # A leftover is ignored by its name and removed later; the error on its way matters.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return complete


def _link_manifest(temporary: Path, final: Path) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # No `.bin` stands beside it, so its publisher was killed between the two links and nothing
        # was committed under this name. Whatever it says, ours is what belongs here.
        os.rename(temporary, final)


def _write_binary(path: Path, image: memoryview) -> tuple[str, ...]:
    """Writes and syncs the file; the digests of its chunks, taken beside the writing."""
    chunks = _chunks_of(image)
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool, _created(path) as descriptor:
        digests = pool.map(_sha256, chunks)
        for chunk in chunks:
            _write_all(descriptor, chunk)
        os.fsync(descriptor)
        return tuple(digests)


def _write(path: Path, content: bytes) -> None:
    with _created(path) as descriptor:
        _write_all(descriptor, memoryview(content))
        os.fsync(descriptor)


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """A new file whose mode is the umask's business, not ours."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _chunks_of(image: memoryview) -> list[memoryview]:
    return [image[start : start + CHUNK_BYTES] for start in range(0, len(image), CHUNK_BYTES)]


def _sha256(chunk: memoryview) -> str:
    return hashlib.sha256(chunk).hexdigest()


# --- reading --------------------------------------------------------------------------------------


def read_manifest(directory: Path, step: int) -> Manifest:
    """The manifest of one step, proven by its own digest. Raises CheckpointDamaged."""
    path = directory / (contract.checkpoint_stem(step) + MANIFEST)
    with _damage(step):
        manifest = contract.parse_manifest(path.read_bytes(), path.name)
        if manifest.step != step:
            raise ContractError(f"{path.name}: written for step {manifest.step}")
        return manifest


def verify(directory: Path, step: int, run_id: str | None = None) -> Manifest:
    """Reads both files whole; the manifest that they fit. Raises CheckpointDamaged.

    With `run_id` a checkpoint of another run is refused in the same way.
    """
    manifest = read_manifest(directory, step)
    if run_id not in (None, manifest.run_id):
        raise CheckpointDamaged(step, f"it belongs to run {manifest.run_id}, this is {run_id}")
    scratch = memoryview(bytearray(min(CHUNK_BYTES, manifest.size_bytes)))
    _read_proven(directory, manifest, lambda start, stop: scratch[: stop - start])
    return manifest


def load(directory: Path, manifest: Manifest, flat: Flat) -> None:
    """Weights and moments of the checkpoint into `flat`, each chunk proven as it arrives.

    Tensors are bound by name, so a file that orders them otherwise loads right. Raises
    StateMismatch, with both shapes, before anything is read; CheckpointDamaged, and then the
    buffers hold nothing of use.
    """
    try:
        flat.check_table(manifest.tensors)
    except StateError as error:
        raise StateMismatch(f"checkpoint {manifest.step}: {error}") from error
    if manifest.tensors == flat.tensors:
        _read_proven(directory, manifest, lambda start, stop: flat.image[start:stop])
        flat.upload()
    else:
        _load_reordered(directory, manifest, flat)


def _load_reordered(directory: Path, manifest: Manifest, flat: Flat) -> None:
    """The one case that needs a second copy; no trainer of ours writes such a file."""
    content = bytearray(manifest.size_bytes)
    view = memoryview(content)
    _read_proven(directory, manifest, lambda start, stop: view[start:stop])
    regions = torch.frombuffer(content, dtype=torch.float32, offset=contract.HEADER_BYTES).chunk(3)
    flat.load(manifest.tensors, Regions(*regions))


def _read_proven(
    directory: Path, manifest: Manifest, place: Callable[[int, int], memoryview]
) -> None:
    """Reads the `.bin` in chunks into `place(start, stop)` and proves each against the manifest."""
    name = contract.checkpoint_stem(manifest.step) + BINARY
    with _damage(manifest.step), open(directory / name, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest.size_bytes:
            raise ContractError(f"{name}: {size} bytes, its manifest says {manifest.size_bytes}")
        for number, expected in enumerate(manifest.chunks):
            start, stop = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, size)
            chunk = place(start, stop)
            _fill(file, chunk, name)
            found = _sha256(chunk)
            if found != expected:
                raise ContractError(
                    f"{name}: bytes {start} to {stop} have digest {found}, its manifest says"
                    f" {expected}"
                )
            if number == 0:
                contract.check_header(bytes(chunk[: contract.HEADER_BYTES]), manifest, name)


def _fill(file: RawIOBase, chunk: memoryview, name: str) -> None:
    while chunk:
        count = file.readinto(chunk)
        if not count:
            raise ContractError(f"{name}: ends {len(chunk)} bytes early")
        chunk = chunk[count:]


@contextlib.contextmanager
def _damage(step: int) -> Iterator[None]:
    """Foreign bytes that break the contract, or that the disk has lost, damage one checkpoint."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise CheckpointDamaged(step, str(error)) from error
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise CheckpointDamaged(step, f"cannot be read: {error}") from error
