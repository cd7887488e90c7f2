"""Exports of a run's history: the canonical view, or every row, in the forms that others read.

What may live here: reading a ledger forward, leaving out, writing out. Nothing is written to the
run.

Invariants:
- The canonical view has one entry a step, in strictly increasing order, so a reader that drops
  steps it has seen before drops nothing of it.
- Memory does not grow with the history, only with the number of times that it was taken back.
- What is exported is one state of the ledger: rows that are appended meanwhile are not in it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from supervisor.contract import Entry, encode_number, parse_entry
from supervisor.rows import BLOCK_BYTES, LedgerDamaged, is_ours

COLUMNS: Final = tuple(one.name for one in fields(Entry))


class History:
    """The rows of a ledger at the moment that this was made. `torn`: a row was being written, or
    its writer died; it is left out."""

    def __init__(self, path: Path) -> None:
        """Reads the ledger once. Raises LedgerDamaged for anything but a torn tail."""
        self.path = path
        self.count = 0
        self.torn = False
        self._rewinds: list[tuple[int, int]] = []
        before = -1
        for value in self._values():
            self.count += 1
            step = self._step_of(value)
            if step <= before:
                self._rewinds.append((self.count, step))
            before = step

    def raw(self) -> Iterator[Entry]:
        """Every row of every attempt, in the order of the file."""
        for number, value in enumerate(islice(self._values(), self.count), start=1):
            yield parse_entry(value, f"{self.path} entry {number}")

    def canonical(self) -> Iterator[Entry]:
        """The rows that count: one is superseded by any later one with the same or a lower step."""
        floors = self._floors()
        position = 0
        for number, entry in enumerate(self.raw(), start=1):
            while position < len(floors) and floors[position][0] <= number:
                position += 1
            if position == len(floors) or entry.step < floors[position][1]:
                yield entry

    def _floors(self) -> list[tuple[int, int]]:
        """(row number, lowest step from that row on), for each row that took the history back."""
        floors: list[tuple[int, int]] = []
        for number, step in reversed(self._rewinds):
            floors.append((number, min(step, floors[-1][1]) if floors else step))
        return floors[::-1]

    def _step_of(self, value: Any) -> int:
        step = value.get("step") if isinstance(value, dict) else None
        if not isinstance(step, int):
            raise LedgerDamaged(f"{self.path}: entry {self.count} has no step")
        return step

    def _values(self) -> Iterator[Any]:
        with self.path.open("rb", buffering=BLOCK_BYTES) as file:
            if not is_ours(file.fileno()):
                raise LedgerDamaged(
                    f"{self.path}: not in our layout; `supervisor import` takes it in"
                )
            file.readline()
            for number, line in enumerate(file, start=1):
                row = line.rstrip(b",\n")
                if row == b"]":
                    return
                try:
                    yield orjson.loads(row)
                except orjson.JSONDecodeError as error:
                    if any(_is_whole(later) for later in file):
                        raise LedgerDamaged(
                            f"{self.path}: entry {number} is damaged; `supervisor verify` says more"
                        ) from error
                    self.torn = True
                    return


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line.rstrip(b",\n")), dict)
    except orjson.JSONDecodeError:
        return False


# --- what is left out -----------------------------------------------------------------------------


def between(entries: Iterable[Entry], first: int | None, last: int | None) -> Iterator[Entry]:
    """The entries whose step is at least `first` and at most `last`; None is no limit."""
    for entry in entries:
        if (first is None or entry.step >= first) and (last is None or entry.step <= last):
            yield entry


def thin(entries: Iterable[Entry], every: int) -> Iterator[Entry]:
    """Of each `every` entries the last, the lowest and the highest loss, in order; and the first
    of all. A spike or a NaN (which counts as highest) is never lost to the eye."""
    remaining = iter(entries)
    first = True
    while bucket := list(islice(remaining, every)):
        places = range(len(bucket))
        lowest = min(places, key=lambda place: _height(bucket[place].loss))
        highest = max(places, key=lambda place: _height(bucket[place].loss))
        kept = {lowest, highest, places[-1]} | ({0} if first else set())
        first = False
        yield from (bucket[place] for place in sorted(kept))


def _height(loss: float) -> tuple[bool, float]:
    return (True, 0.0) if loss != loss else (False, loss)


# --- forms ----------------------------------------------------------------------------------------


def write_json(entries: Iterable[Entry], out: BinaryIO) -> None:
    """An array of objects, one a line, which any reader of a ledger reads back."""
    _write_array((orjson.dumps(entry.to_json()) for entry in entries), out)


def write_andrea(entries: Iterable[Entry], out: BinaryIO) -> None:
    """An array of [step, loss]. Losses that are not finite are the texts "nan", "inf", "-inf"."""
    _write_array((orjson.dumps([one.step, encode_number(one.loss)]) for one in entries), out)


def _write_array(rows: Iterable[bytes], out: BinaryIO) -> None:
    before = b"[\n"
    for row in rows:
        out.write(before + row)
        before = b",\n"
    out.write(b"[\n]\n" if before == b"[\n" else b"\n]\n")


def write_csv(entries: Iterable[Entry], out: BinaryIO) -> None:
    """One header, the same columns for rows of any age; a value that a row lacks is empty."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for entry in entries:
            row = entry.to_json()
            writer.writerow([row.get(name) for name in COLUMNS])
    finally:
        text.detach()  # or it would close a stream that is not its own


FORMATS: Final[dict[str, Callable[[Iterable[Entry], BinaryIO], None]]] = {
    "json": write_json,
    "csv": write_csv,
    "andrea": write_andrea,
}
