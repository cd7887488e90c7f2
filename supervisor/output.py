"""Standard output and error where what cannot be written costs lines, and not the work.

What may live here: streams that lose what they cannot write, and say later how much that was; and
the descriptors under them.

Nobody may read what a supervisor prints either, and its exit code is that of the run all the same.
The log of an attempt lies on the disk of its run. A print that fails there would raise in the
middle of an update, and once more when the interpreter flushes at its end, which turns a clean exit
into status 120.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

_PRINTED: Final = ((1, "stdout"), (2, "stderr"))


def occupy() -> None:
    """Gives 0, 1 and 2 to /dev/null where whoever started us has closed them. The next file that is
    opened would get such a number, the lock of a run perhaps, and then whatever is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _PRINTED[-1][0]:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in _PRINTED:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


class ForgivingFile(io.RawIOBase):
    """Writes to a descriptor that stays somebody else's."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.lost_bytes = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        """Always takes all of it."""
        content = bytes(data)
        if self.lost_bytes:
            content = f"({self.lost_bytes} bytes before this were lost)\n".encode() + content
        try:
            written = os.write(self._descriptor, content)
        except OSError:
            self.lost_bytes += len(data)
        else:
            self.lost_bytes = len(content) - written
        return len(data)


@contextmanager
def forgiving(*names: str) -> Iterator[None]:
    """The streams `names` of sys ("stdout", "stderr") forgive meanwhile."""
    before = {name: getattr(sys, name) for name in names}
    for name, stream in before.items():
        setattr(sys, name, _forgiving(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            if stream is not None:
                getattr(sys, name).flush()
            setattr(sys, name, stream)


class ForgivingOutput:
    """sys.stdout and sys.stderr forgive from now on, until `restore`."""

    def __init__(self) -> None:
        self._before = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (_forgiving(stream) for stream in self._before)

    def restore(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = self._before


def _forgiving(stream: TextIO) -> TextIO:
    try:
        raw = ForgivingFile(stream.fileno())
    except (AttributeError, io.UnsupportedOperation):
        return stream  # not a file: a test's buffer, or none at all
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True
    )
