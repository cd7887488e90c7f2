"""The supervisor's own log: one line a fact, for people.

What may live here: writing lines to supervisor.log. A log that cannot be written costs lines, not
the run: they are counted and the count is written when the disk is back.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


class Log:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.lost_lines = 0

    def write(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        note = f" ({self.lost_lines} lines before this one were lost)" if self.lost_lines else ""
        line = f"{stamp} [{os.getpid()}] {text}{note}\n".encode("utf-8", "replace")
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            if os.write(self._fd, line) < len(line):
                os.write(self._fd, b"\n")  # or the reason why there was not room for all of it
        except OSError:
            self.lost_lines += 1
            return
        self.lost_lines = 0

    def reopen(self) -> None:
        """After somebody has rotated the file."""
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
