"""The supervisor's own log: one line a fact, for people.

What may live here: writing lines to supervisor.log, and its rotation. A log that cannot be written
costs lines, not the run: they are counted, and the count is written when the disk is back.

Invariants: one older log is kept, as supervisor.log.1; a log that was deleted or moved away is
begun anew. What waits for a disk is done by the worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisor.worker import Job, Outcome

SIZE_BYTES: Final = 64 * 1024 * 1024


class Log:
    """`size_bytes`: what it may reach before it is rotated. `lost_lines` is a total."""

    def __init__(self, path: Path, size_bytes: int = SIZE_BYTES) -> None:
        self._path = path
        self.size_bytes = size_bytes
        self._fd = -1
        self._torn = False
        self._untold = 0
        self._busy = False
        self._trouble = ""
        self.lost_lines = 0

    def write(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        note = f" ({self._untold} lines before this one were lost)" if self._untold else ""
        line = f"{stamp} [{os.getpid()}] {text}{note}\n".encode("utf-8", "replace")
        if self._torn:
            line = b"\n" + line
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            written = os.write(self._fd, line)
        except OSError:
            written = 0
        if written < len(line):
            self._torn = self._torn or written > 0
            self._untold += 1
            self.lost_lines += 1
            return
        self._torn, self._untold = False, 0

    def look(self, submit: Callable[[Job, Callable[[Outcome], None]], None]) -> None:
        """Has the worker see whether a new file is to be begun."""
        if self._busy or self._fd < 0:
            return
        path, size_bytes, inode = self._path, self.size_bytes, os.fstat(self._fd).st_ino

        def done(outcome: Outcome) -> None:
            self._busy = False
            trouble = str(outcome.error or "")
            if trouble and trouble != self._trouble:
                self.write(f"this log cannot be rotated: {trouble}")
            self._trouble = trouble
            if outcome.result:
                self.reopen()

        self._busy = True
        submit(lambda: _rotate(path, inode, size_bytes), done)

    def reopen(self) -> None:
        """After somebody has moved the file away."""
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _rotate(path: Path, inode: int, size_bytes: int) -> bool:
    """Moves a log that is too large aside. True: the path no longer leads to the file `inode`."""
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return True
    if about.st_ino == inode and about.st_size > size_bytes:
        path.replace(path.with_name(f"{path.name}.1"))
        return True
    return about.st_ino != inode
