"""The trainer's receipt file: lines that reach the disk whole, in order and once.

What may live here: how bytes get into that file. What a line says is `contract`; who waits, and for
how long, while the disk takes nothing is `link`.

Invariants:
- A line is one write(2). Where the disk cuts it, the rest of the same bytes follows before anything
  else does, so that a reader who has seen the first half needs to know nothing of it.
- At least RESERVE_BYTES are allocated ahead where the disk has them, so that a full disk stops the
  receipts last. A reserve that cannot be had ends nothing: what was reserved before still takes
  lines.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Final

from supervisor.durable import RESERVE_BYTES, fsync_directory, preallocate, read_range, write_all

RESERVE_AGAIN_SECONDS: Final = 5.0
_BLOCK_BYTES: Final = 1024 * 1024


class ReceiptFile:
    """Everything raises OSError where the disk refuses; call again, nothing is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._size_bytes = 0
        self._synced_bytes = 0
        self._doubtful = False
        self._named = False  # the directory was synced since the file was opened
        self._unwritten = b""
        self._reserved_end = 0
        self._reserve_at = 0.0

    def add(self, line: bytes) -> None:
        """Puts a line behind those that `flush` has not written yet."""
        self._unwritten += line

    def flush(self) -> None:
        """Writes what was added. A disk that took a part has not failed, it is asked again."""
        self.open()
        while self._unwritten:
            self._reserve()
            written = os.write(self._descriptor, self._unwritten)
            if written == 0:
                raise OSError(errno.EIO, f"{self.path}: no byte of a receipt was written")
            self._size_bytes += written
            self._unwritten = self._unwritten[written:]

    def sync(self) -> None:
        """Makes every line durable, and the name of the file. After a sync that failed the kernel
        may take for written what is lost, so the same bytes are written once more before the next.
        """
        self.flush()
        if not self._named:
            fsync_directory(self.path.parent)
            self._named = True
        if self._doubtful:
            self._write_again()
        self._doubtful = True  # until the sync has said otherwise
        os.fsync(self._descriptor)
        self._doubtful = False
        self._synced_bytes = self._size_bytes

    def open(self) -> None:
        """Opens the file if that was not possible before."""
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
            self._size_bytes = self._synced_bytes = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_again(self) -> None:
        # Not through our own descriptor, which can only append.
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            for start in range(self._synced_bytes, self._size_bytes, _BLOCK_BYTES):
                stop = min(start + _BLOCK_BYTES, self._size_bytes)
                write_all(descriptor, read_range(descriptor, start, stop), start)
        finally:
            os.close(descriptor)

    def _reserve(self) -> None:
        """Asks for as much again before the reserve is used up; a full disk is asked now and then,
        because some file systems take long to say no."""
        end = self._size_bytes + len(self._unwritten)
        if end + RESERVE_BYTES <= self._reserved_end or time.monotonic() < self._reserve_at:
            return
        try:
            preallocate(self._descriptor, self._size_bytes, 2 * RESERVE_BYTES)
        except OSError:
            self._reserve_at = time.monotonic() + RESERVE_AGAIN_SECONDS
        else:
            self._reserved_end = self._size_bytes + 2 * RESERVE_BYTES
