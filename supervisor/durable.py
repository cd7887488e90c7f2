"""Bytes that survive a kill, a power loss and a full disk.

What may live here: the few sequences of system calls that make a file durable, and `AppendFile`,
the growing file that the ledger and the journal are made of. Nothing here knows what the bytes
mean.

Invariants:
- A file is replaced whole or not at all: the old content stays until the new one is on the device.
- No byte of content is ever rewritten with another value. An append overwrites only the closing
  (the bytes that end the file after its content), and a failed append puts the closing back.
- Content counts as durable only when a sync said so. The kernel reports a lost write once and may
  then forget the data, so a second sync that succeeds proves nothing: after a failed one
  everything since the last good sync is written again, through a new descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from supervisor.contract import TEMPORARY_PREFIX, Json

RESERVE_BYTES: Final = 4 * 1024 * 1024
PREVIEW_BYTES: Final = 200
_BLOCK_BYTES: Final = 1024 * 1024
_FICLONE: Final = 0x40049409  # linux/fs.h: share the blocks, copy on write
_NO_CLONE: Final = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ETXTBSY)
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2

StrPath = str | os.PathLike[str]
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


# --- single calls ---------------------------------------------------------------------------------


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Writes every byte of `data` at `offset`, however the kernel divides it. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if written == 0:
            raise OSError(errno.EIO, f"wrote none of {len(view)} bytes at offset {offset}")
        view = view[written:]
        offset += written


def size_of(path: Path) -> int:
    """Bytes; 0 where there is no such file. A trainer, a removal or the operator may be faster than
    whoever has just listed a directory."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def read_range(descriptor: int, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a file; fewer only where the file ends before `stop`."""
    parts = []
    while start < stop:
        part = os.pread(descriptor, stop - start, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def fsync_directory(directory: StrPath | int) -> None:
    """Makes the names in a directory durable: what was created, linked or renamed in it."""
    if isinstance(directory, int):
        os.fsync(directory)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path) -> None:
    """A durable copy, which shares its blocks with the source where the file system can do that.
    Raises OSError, with the path of the one that it is about."""
    with source.open("rb") as reading, target.open("xb", buffering=0) as writing:
        try:
            _clone_or_copy(reading, writing.fileno())
            os.fsync(writing.fileno())
        except OSError as error:
            if error.filename is None:
                error.filename = str(target)
            raise


def _clone_or_copy(reading: BinaryIO, descriptor: int) -> None:
    try:
        fcntl.ioctl(descriptor, _FICLONE, reading.fileno())
        return
    except OSError as error:
        if error.errno not in _NO_CLONE:
            raise
    offset = 0
    while True:
        try:
            block = reading.read(_BLOCK_BYTES)
        except OSError as error:
            error.filename = reading.name
            raise
        if not block:
            return
        write_all(descriptor, block, offset)
        offset += len(block)


def replace_file(path: StrPath, data: bytes, mode: int = 0o666) -> None:
    """Gives `path` the content `data`, atomically and durably; `mode` is cut by the umask.

    Raises OSError. Until the rename the old file is untouched, and the temporary is removed where
    that is possible. If only the last step fails, the fsync of the directory, the new content is
    in place but may not survive a power loss.
    """
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}-{path.name}")
    # Not mkstemp: it would publish a file that only its owner can read.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    published = False
    try:
        try:
            write_all(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        published = True
    finally:
        if not published:
            # What matters is the error that is on its way; a leftover carries its prefix.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    fsync_directory(path.parent)


def preallocate(descriptor: int, offset: int, size_bytes: int) -> bool:
    """Reserves disk blocks for [offset, offset + size_bytes) without changing the file's size.

    True when reserved, False where the file system cannot. Raises OSError, ENOSPC above all.
    """
    while True:
        if _fallocate(descriptor, _FALLOC_FL_KEEP_SIZE, offset, size_bytes) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, f"cannot reserve {size_bytes} bytes: {os.strerror(code)}")


def punch_hole(descriptor: int, offset: int, size_bytes: int) -> None:
    """Gives back the blocks of [offset, offset + size_bytes), which reads as NULs from then on. The
    file's size and every other offset stay. Raises OSError, EOPNOTSUPP where there are no holes."""
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    while _fallocate(descriptor, mode, offset, size_bytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, f"cannot give back {size_bytes} bytes: {os.strerror(code)}")


# os.posix_fallocate would not do: it grows the file, and emulates by writing where unsupported.
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", _libc.fallocate)
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int


# --- repair ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repair:
    """What opening a file for writing had to cut off, behind its first `kept_bytes`.

    `sha256` and `preview` (the first bytes, printable) describe the bytes dropped. `set_aside` is
    the file that holds them where more than one broken line would have been lost.
    """

    path: str
    kept_bytes: int
    dropped_bytes: int
    sha256: str
    preview: str
    set_aside: str | None = None

    def to_json(self) -> Json:
        return asdict(self)


def describe_tail(
    path: StrPath, descriptor: int, kept_bytes: int, size_bytes: int, set_aside: str | None = None
) -> Repair:
    """The repair that will drop [kept_bytes, size_bytes) of an open file; reads it in blocks."""
    hasher = hashlib.sha256()
    for start in range(kept_bytes, size_bytes, _BLOCK_BYTES):
        hasher.update(read_range(descriptor, start, min(start + _BLOCK_BYTES, size_bytes)))
    head = read_range(descriptor, kept_bytes, min(kept_bytes + PREVIEW_BYTES, size_bytes))
    return Repair(
        path=os.fspath(path),
        kept_bytes=kept_bytes,
        dropped_bytes=size_bytes - kept_bytes,
        sha256=hasher.hexdigest(),
        preview=repr(head)[2:-1],
        set_aside=set_aside,
    )


# --- the growing file -----------------------------------------------------------------------------


class AppendFile:
    """A file that only grows: `end` bytes of content, then `closing`.

    `append` belongs to the thread that owns the file. `sync` may run in another one at the same
    time: it holds no lock that `append` needs while it waits for the device.

    `reserve_problem` is why the blocks ahead of the end could not be reserved, or None; it is for
    an alarm, since appends go on as long as the disk takes them.
    """

    def __init__(self, descriptor: int, end: int, closing: bytes) -> None:
        """Takes over an open descriptor of a file whose content was synced up to `end`."""
        self.end = end
        self.reserve_problem: OSError | None = None
        self._descriptor = descriptor
        self._closing = closing
        self._state = threading.Lock()  # guards what follows; held only for writes to the cache
        self._disk = threading.Lock()  # one sync at a time
        self._unsynced: list[bytes] = []
        self._synced_end = end
        self._torn = False  # the closing is not in place
        self._doubtful = False  # a sync failed: the next one has to write again
        self._reserved_end = 0
        self._reserve()

    @property
    def synced_end(self) -> int:
        """Content before this offset is on the device."""
        return self._synced_end

    @property
    def unsynced_bytes(self) -> int:
        return self.end - self._synced_end

    def append(self, data: bytes) -> None:
        """Adds `data` with one pwrite that starts on the closing and ends with it again.

        Raises OSError, and then nothing was added: the closing is back in place, or will be
        before anything else is written.
        """
        with self._state:
            self._close_off()
            try:
                self._write_once(data + self._closing)
            except OSError:
                self._torn = True
                self._close_off()
                raise
            self.end += len(data)
            self._unsynced.append(data)

    def sync(self) -> None:
        """Makes everything appended so far durable.

        A first failure is answered by writing again. Raises OSError when that fails too; the data
        stays in memory and the next sync writes it again.
        """
        with self._disk:
            with self._state:
                self._close_off()
                end, count = self.end, len(self._unsynced)
            if self._doubtful:
                self._write_again()
            else:
                try:
                    os.fdatasync(self._descriptor)
                except OSError:
                    self._write_again()
                else:
                    with self._state:
                        del self._unsynced[:count]
                        self._synced_end = end
            self._reserve()

    def close(self) -> None:
        """Closes without a sync; what was not synced is as durable as the page cache."""
        os.close(self._descriptor)

    def _write_once(self, blob: bytes) -> None:
        """One pwrite. A short one is undone at once and tried again, which gives the reason."""
        written = os.pwrite(self._descriptor, blob, self.end)
        if written == len(blob):
            return
        self._torn = True
        self._close_off()
        written = os.pwrite(self._descriptor, blob, self.end)
        if written != len(blob):
            raise OSError(errno.ENOSPC, f"only {written} of {len(blob)} bytes could be written")

    def _close_off(self) -> None:
        """Puts the closing back behind the last whole content, if a failed write overran it."""
        if not self._torn:
            return
        write_all(self._descriptor, self._closing, self.end)
        self._reserved_end = 0  # the truncation gives reserved blocks back
        os.ftruncate(self._descriptor, self.end + len(self._closing))
        self._torn = False

    def _write_again(self) -> None:
        """Brings everything since the last good sync to the device through a new descriptor."""
        self._doubtful = True
        # Through /proc, because the run directory may have been renamed since.
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with self._state:
                end, count = self.end, len(self._unsynced)
                data = b"".join((*self._unsynced, self._closing))
                write_all(descriptor, data, self._synced_end)
            os.fdatasync(descriptor)  # what is appended meanwhile is the next sync's
            with self._state:
                self._descriptor, descriptor = descriptor, self._descriptor
                del self._unsynced[:count]
                self._synced_end = end
        finally:
            os.close(descriptor)  # the old one, or the new one where it failed too
        self._doubtful = False

    def _reserve(self) -> None:
        """Keeps at least RESERVE_BYTES allocated ahead, so that a full disk stops us last."""
        if self.end + len(self._closing) + RESERVE_BYTES <= self._reserved_end:
            return
        start, size = self.end, 2 * RESERVE_BYTES
        try:
            preallocate(self._descriptor, start, size)
        except OSError as error:
            self.reserve_problem = error
        else:
            self.reserve_problem = None
            self._reserved_end = start + size


def mend(descriptor: int, end: int, closing: bytes) -> None:
    """Ends a damaged file after its first `end` bytes, durably, with `closing` behind them."""
    write_all(descriptor, closing, end)
    os.ftruncate(descriptor, end + len(closing))
    os.fsync(descriptor)
