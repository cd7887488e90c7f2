"""The rows of a ledger file: where they begin, where they end, which of them are whole.

What may live here: the layout of `<run>.loss.json` and scans of it. Nothing here writes.

Layout. A JSON array in every moment between two writes: the line `[`, one object a line, separated
by `,` and a line break, the line `]`. An empty ledger is `[\n]\n`. An object holds no raw line
break, so entry number k (from 1) stands on line k + 1, and counting lines counts entries.

Invariants:
- A row counts as whole only if it parses as an entry; its neighbours' state does not matter to it.
- A scan from the tail reads as many bytes as it needs, never the whole file by habit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from supervisor.contract import Entry, parse_entry
from supervisor.durable import StrPath, read_range

OPENING: Final = b"["
SEPARATOR: Final = b",\n"
CLOSING: Final = b"\n]\n"
BLOCK_BYTES: Final = 1024 * 1024
_WINDOW_BYTES: Final = 128 * 1024
_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(rb"[ \t\r\n]*")


class LedgerDamaged(Exception):
    """The file is not a ledger, or is damaged beyond a torn tail. Nothing was touched."""


@dataclass(frozen=True, slots=True)
class Row:
    """A whole entry and the offset after its last byte."""

    entry: Entry
    end: int


def is_ours(descriptor: int) -> bool:
    """Whether a file begins as a ledger does, or as what a torn creation leaves."""
    head = read_range(descriptor, 0, 3).rstrip(b"\0")
    return any(begin.startswith(head) for begin in (b"[\n{", b"[\n]"))


def without_nuls(descriptor: int, start: int, stop: int) -> int:
    """The offset after the last byte of [start, stop) that is not NUL; `start` if all are."""
    while stop > start:
        base = max(start, stop - BLOCK_BYTES)
        kept = len(read_range(descriptor, base, stop).rstrip(b"\0"))
        if kept:
            return base + kept
        stop = base
    return start


def whole_rows(path: StrPath, data: bytes, position: int, base: int = 0) -> list[Row]:
    """The rows, separated by commas, from `position` up to the first that is no whole entry.

    `base` is the file offset of `data[0]`. Standard json, not orjson, because it says where a
    value ends and knows the NaN that other programs write.
    """
    text = data.decode("latin-1")  # one character a byte; JSON's structure is ASCII
    rows: list[Row] = []
    while True:
        try:
            _, end = _DECODER.raw_decode(text, position)
            value = json.loads(data[position:end])
            entry = parse_entry(value, f"{path} at offset {base + position}")
        except (ValueError, RecursionError):  # ContractError included
            return rows
        rows.append(Row(entry, base + end))
        position = skip_space(data, end)
        if data[position : position + 1] != b",":
            return rows
        position = skip_space(data, position + 1)


def parse_line(line: bytes) -> Any:
    """The JSON value of one row; standard json where orjson refuses, for the NaN of others. Raises
    ValueError or RecursionError."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line)


def skip_space(data: bytes, position: int) -> int:
    """The offset of the next byte that is not white space."""
    match = _SPACE.match(data, position)
    assert match is not None
    return match.end()


def window(path: StrPath, descriptor: int, limit: int) -> tuple[int, list[Row]]:
    """Where the rows of a stretch that ends at `limit` begin, and the whole ones among them.

    The stretch is _WINDOW_BYTES long, or as much longer as it takes to find one whole row.
    """
    size = _WINDOW_BYTES
    while True:
        base = max(0, limit - size)
        data = read_range(descriptor, base, limit)
        start = data.find(b"\n") + 1
        rows = whole_rows(path, data, start, base) if start else []
        if rows or base == 0:
            return base + start, rows
        size *= 8


def hash_range(hasher: hashlib._Hash, descriptor: int, start: int, stop: int) -> None:
    """Feeds the bytes [start, stop) of a file to a hasher."""
    for offset in range(start, stop, BLOCK_BYTES):
        hasher.update(read_range(descriptor, offset, min(offset + BLOCK_BYTES, stop)))


def rows_backward(path: StrPath, descriptor: int, limit: int) -> Iterator[Row]:
    """The rows of our format before `limit`, newest first; what is torn before it is passed by."""
    start, rows = window(path, descriptor, limit)
    while rows:
        yield from reversed(rows)
        limit = start - len(SEPARATOR)
        if limit <= len(OPENING):
            return
        start, rows = window(path, descriptor, limit)
        if not rows or rows[-1].end != limit:
            raise LedgerDamaged(f"{path}: what ends at offset {limit} is not a whole entry")
