"""Reading the end of a log that somebody else writes, bytes of any kind.

What may live here: last lines, following, and making untrusted text harmless for a terminal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 64 * 1024
FOLLOW_INTERVAL_SECONDS: Final = 0.2


def printable(text: str, keep: str = "") -> str:
    """Control characters shown as signs instead of obeyed; those in `keep` pass."""
    return "".join(
        c if c.isprintable() or c in keep else "\u23ce" if c == "\n" else "\ufffd" for c in text
    )


def _decode(data: bytes) -> str:
    return printable(data.decode("utf-8", "replace"), keep="\n\t")


def last_lines(path: Path, count: int, end: int | None = None) -> list[str]:
    """The last `count` lines before offset `end` (or all there is), read from there backward; a
    line that has no end yet counts."""
    if count <= 0:
        return []
    with path.open("rb") as file:
        position = os.fstat(file.fileno()).st_size if end is None else end
        data = b""
        while position > 0 and data.count(b"\n") <= count:
            start = max(0, position - BLOCK_BYTES)
            file.seek(start)
            data = file.read(position - start) + data
            position = start
    return [_decode(line) for line in data.splitlines(keepends=True)[-count:]]


def follow(path: Path, start: int) -> Generator[str, None, None]:
    """What the file has from offset `start` on, until the caller stops asking."""
    with path.open("rb") as file:
        file.seek(start)
        while True:
            data = file.read(BLOCK_BYTES)
            if data:
                yield _decode(data)
            else:
                time.sleep(FOLLOW_INTERVAL_SECONDS)
