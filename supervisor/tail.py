"""Reading the end of a log that somebody else writes, bytes of any kind.

What may live here: last lines, following, and making untrusted text harmless for a terminal.

Invariants:
- Whatever a log holds (no line end for megabytes, bytes that are no text, holes where its middle
  was given back), the work is bounded by what is shown and not by what is there.
- What is shown cannot drive a terminal. A carriage return ends a line, as progress bars mean it.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 64 * 1024
LINE_CHARACTERS: Final = 4096
WINDOW_BYTES: Final = 1024 * 1024
FOLLOW_INTERVAL_SECONDS: Final = 0.2


def printable(text: str, keep: str = "") -> str:
    """Control characters shown as signs instead of obeyed; those in `keep` pass."""
    return "".join(
        c if c.isprintable() or c in keep else "\u23ce" if c == "\n" else "\ufffd" for c in text
    )


class _Text:
    """Bytes to harmless text, piece by piece: a piece may end inside a character."""

    def __init__(self) -> None:
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(characters, translate=True)

    def of(self, data: bytes, final: bool = False) -> str:
        # NULs are what is read of a hole, in a file that was copied without it.
        return printable(self._decoder.decode(data, final).replace("\0", ""), keep="\n\t")


# --- holes ---


def pieces(descriptor: int) -> list[tuple[int, int]]:
    """[start, stop) of all that is no hole. Moves the descriptor's position."""
    length = os.fstat(descriptor).st_size
    found: list[tuple[int, int]] = []
    position = 0
    while position < length:
        start = _next_data(descriptor, position, length)
        if start >= length:
            break
        position = os.lseek(descriptor, start, os.SEEK_HOLE)
        found.append((start, min(position, length)))
    return found


def _next_data(descriptor: int, position: int, length: int) -> int:
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return length  # a hole up to the end


def _gap(size_bytes: int) -> bytes:
    return f"[{size_bytes:,} bytes are not kept here: logs.size_bytes]".encode()


# --- the end ---


def last_lines(path: Path, count: int, end: int | None = None) -> list[str]:
    """The last `count` lines before offset `end` (or all there is); a line that has no end yet
    counts. A very long line is shown without its middle."""
    if count <= 0:
        return []
    with path.open("rb") as file:
        data = _last_bytes(file.fileno(), count, end)
    text = _Text().of(data, final=True)
    return [_short(line) for line in text.splitlines(keepends=True)[-count:]]


def _last_bytes(descriptor: int, count: int, end: int | None) -> bytes:
    """Read from the end backward, until there are lines enough or it is too much."""
    parts: list[bytes] = []
    lines = size_bytes = 0
    behind: int | None = None
    for first, last in reversed(pieces(descriptor)):
        position = last if end is None else min(last, end)
        if position <= first:
            continue
        if behind is not None and behind > last:
            parts.append(b"\n" + _gap(behind - last) + b"\n")
            lines += 2
        behind = first
        while position > first:
            if lines > count or size_bytes > max(WINDOW_BYTES, count * LINE_CHARACTERS):
                return b"".join(reversed(parts))
            start = max(first, position - BLOCK_BYTES)
            parts.append(os.pread(descriptor, position - start, start))
            lines += parts[-1].count(b"\n")
            size_bytes += position - start
            position = start
    return b"".join(reversed(parts))


def _short(line: str) -> str:
    if len(line) <= LINE_CHARACTERS:
        return line
    half = LINE_CHARACTERS // 2
    return f"{line[:half]} [{len(line) - 2 * half:,} characters left out] {line[-half:]}"


# --- following ---


class _Followed:
    """One file that is being read while it grows."""

    def __init__(self, path: Path, start: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._position = start
        self._text = _Text()

    def read(self) -> str | None:
        """What comes next, or None where there is nothing more for now."""
        length = os.fstat(self._descriptor).st_size
        if self._position >= length:
            return None
        start = _next_data(self._descriptor, self._position, length)
        hole = _gap(start - self._position) + b"\n" if start > self._position else b""
        data = os.pread(self._descriptor, BLOCK_BYTES, start)
        self._position = start + len(data)
        return self._text.of(hole + data)

    def is_still(self, path: Path) -> bool:
        """Whether the path leads to this file, and nobody has emptied it."""
        try:
            there = os.stat(path)
        except FileNotFoundError:
            return True  # nothing has taken its place yet
        here = os.fstat(self._descriptor)
        same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        return same and here.st_size >= self._position

    def close(self) -> None:
        os.close(self._descriptor)


def follow(
    path: Path, start: int, newest: Callable[[], Path] | None = None
) -> Generator[str, None, None]:
    """What the file has from offset `start` on, until the caller stops asking. `newest` says which
    file to go on with once this one has no more; it may be a new one of the same name."""
    followed = _Followed(path, start)
    ended = True
    try:
        while True:
            text = followed.read()
            if text is None:
                wanted = path if newest is None else newest()
                if followed.is_still(wanted):
                    time.sleep(FOLLOW_INTERVAL_SECONDS)
                    continue
                # Its writer may have added its last words before its successor was there.
                text = followed.read()
                if text is None:
                    replacing = _Followed(wanted, 0)
                    followed.close()
                    followed = replacing
                    text = "" if ended else "\n"
            if text:
                ended = text.endswith("\n")
                yield text
    finally:
        followed.close()
