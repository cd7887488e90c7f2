"""Where the rows of a ledger stand: an index that is small enough to be kept in memory.

What may live here: making the index, from appended rows or from the bytes of a file, and looking
rows up in it. Nothing here writes.

Invariants:
- A stretch holds rows of one attempt whose steps increase, so it holds a step at most once. It
  never changes: one that grows is replaced.
- Attempts follow each other in the file, and those of one attempt are consecutive: `replay`
  appends nothing else. So where a part of the file begins with the same attempt as the next one,
  and has as many rows as steps lie between the two, no row of it needs to be looked at.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from supervisor.contract import ContractError, Entry, parse_entry
from supervisor.durable import read_range
from supervisor.rows import SEPARATOR, LedgerDamaged, parse_line

STRETCH_BYTES: Final = 256 * 1024
_HEAD_BYTES: Final = 4096


class Stretch(NamedTuple):
    """The rows in the bytes [start, end), of which `before` entries stand in front. `attempt` is 0
    where a row names none."""

    start: int
    end: int
    before: int
    attempt: int
    first: int
    last: int


class Mark(NamedTuple):
    """Offset of the beginning of a line, and how many entries stand in front of it."""

    start: int
    before: int


@dataclass(frozen=True, slots=True)
class Tail:
    """What an attempt is merged into: the first and last step that it appended itself, and the
    canonical entries in front of those, each looked up when it is asked for."""

    earlier: Callable[[int], Entry | None]
    own_first: int | None
    own_last: int | None


class Index:
    """`add` belongs to the thread that appends. The lookups may run in any thread: they hold the
    lock only to see one state of the index."""

    def __init__(self, path: Path, descriptor: int, marks: Sequence[Mark], end: int) -> None:
        """`marks` are in file order, the first at the first row; rows end at offset `end`."""
        self._path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._stretches: list[Stretch] = []
        for stretch in _survey(descriptor, [mark for mark in marks if mark.start < end], end):
            _add(self._stretches, stretch)

    def add(self, rows: Iterable[Stretch]) -> None:
        """Appended rows, each as a stretch of its own."""
        with self._lock:
            for row in rows:
                _add(self._stretches, row)

    def position(self, step: int) -> tuple[int, int] | None:
        """Entry number of the newest row of `step` and the offset after it, or None."""
        for stretch in reversed(self._seen()):
            if stretch.first <= step <= stretch.last:
                found = _find(self._descriptor, stretch, step)
                if found is not None:
                    return found
        return None

    def tail(self, base: int, attempt: int) -> Tail:
        """What `attempt`, resumed from the checkpoint of step `base`, is merged into. Rows of later
        attempts are left out: its own were merged before these, and are read again."""
        stretches = self._seen()
        while stretches and stretches[-1].attempt > attempt:
            stretches.pop()
        own = []
        while stretches and stretches[-1].attempt == attempt and stretches[-1].last > base:
            own.append(stretches.pop())
        if own and own[-1].first <= base:
            own[-1:] = self._beyond(base, own[-1])
        earlier = _Canonical(self._path, self._descriptor, stretches)
        return Tail(earlier, own[-1].first if own else None, own[0].last if own else None)

    def _beyond(self, base: int, stretch: Stretch) -> list[Stretch]:
        """The rows after step `base`, the newest first: what stands before them a fork brought
        along, from an attempt of its parent with the same number."""
        rows = _each(self._descriptor, Mark(stretch.start, stretch.before), stretch.end)
        return [row for row in rows if row.first > base][::-1]

    def _seen(self) -> list[Stretch]:
        with self._lock:
            return self._stretches.copy()


class _Canonical:
    """The canonical rows of some stretches. One stretch at a time is held in memory."""

    def __init__(self, path: Path, descriptor: int, stretches: Iterable[Stretch]) -> None:
        self._path = path
        self._descriptor = descriptor
        self._stretches: list[Stretch] = []  # without those that a later one supersedes wholly
        for stretch in stretches:
            while self._stretches and self._stretches[-1].first >= stretch.first:
                self._stretches.pop()
            self._stretches.append(stretch)
        self._firsts = [stretch.first for stretch in self._stretches]
        self._loaded: Stretch | None = None
        self._entries: dict[int, bytes] = {}

    def __call__(self, step: int) -> Entry | None:
        """The entry of `step`; None where there is none that counts. Raises LedgerDamaged."""
        place = bisect_right(self._firsts, step) - 1
        if place < 0 or step > self._stretches[place].last:
            return None
        self._load(self._stretches[place])
        line = self._entries.get(step)
        return None if line is None else self._parse(line, step)

    def _load(self, stretch: Stretch) -> None:
        if stretch is self._loaded:
            return
        self._entries = {}
        for offset, line in _lines(self._descriptor, stretch.start, stretch.end):
            head = _head(line)
            if head is None:
                raise LedgerDamaged(f"{self._path}: what begins at {offset} is not a whole entry")
            self._entries[head[0]] = line
        self._loaded = stretch

    def _parse(self, line: bytes, step: int) -> Entry:
        try:
            return parse_entry(parse_line(line), f"{self._path} step {step}")
        except ContractError as error:
            raise LedgerDamaged(str(error)) from error


def _add(stretches: list[Stretch], new: Stretch) -> None:
    if stretches:
        old = stretches[-1]
        fits = new.end - old.start <= STRETCH_BYTES
        if fits and old.attempt == new.attempt and old.last < new.first:
            stretches[-1] = Stretch(
                old.start, new.end, old.before, old.attempt, old.first, new.last
            )
            return
    stretches.append(new)


def _survey(descriptor: int, marks: list[Mark], end: int) -> Iterator[Stretch]:
    """The stretches up to `end`, parsing no more than the heads of all parts that need no more."""
    heads = [_head_at(descriptor, mark.start) for mark in marks]
    for (here, head), (there, following) in pairwise(zip(marks, heads, strict=True)):
        rows = there.before - here.before
        if head and following and head == (following[0] - rows, following[1]) and head[1]:
            stop = there.start - len(SEPARATOR)
            yield Stretch(here.start, stop, here.before, head[1], head[0], following[0] - 1)
        else:
            yield from _each(descriptor, here, there.start)
    if marks:
        yield from _each(descriptor, marks[-1], end)


def _each(descriptor: int, mark: Mark, end: int) -> Iterator[Stretch]:
    """Each row as a stretch of its own. What is no row is left to `supervisor verify` to name."""
    for number, (start, line) in enumerate(_lines(descriptor, mark.start, end), mark.before):
        head = _head(line)
        if head is not None:
            step, attempt = head
            yield Stretch(start, start + len(line), number, attempt, step, step)


def _find(descriptor: int, stretch: Stretch, step: int) -> tuple[int, int] | None:
    data = read_range(descriptor, stretch.start - 1, stretch.end)
    before = data.find(b'\n{"step":%d,' % step)
    if before >= 0:
        end = data.find(b"\n", before + 1)
        row = data[before + 1 : end if end >= 0 else len(data)].removesuffix(b",")
        number = stretch.before + data.count(b"\n", 0, before + 1)
        return number, stretch.start + before + len(row)
    # Not written by us: the step is not the first key, or there are spaces.
    for one in _each(descriptor, Mark(stretch.start, stretch.before), stretch.end):
        if one.first == step:
            return one.before + 1, one.end
    return None


def _lines(descriptor: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, less what separates it from the next."""
    for line in read_range(descriptor, start, end).removesuffix(b"\n").split(b"\n"):
        yield start, line.removesuffix(b",")
        start += len(line) + 1


def _head_at(descriptor: int, offset: int) -> tuple[int, int] | None:
    line, whole, _ = read_range(descriptor, offset, offset + _HEAD_BYTES).partition(b"\n")
    return _head(line.removesuffix(b",")) if whole else None


def _head(line: bytes) -> tuple[int, int] | None:
    """Step and attempt of a row, or None where it is none."""
    try:
        value = parse_line(line)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"step": int(step)}:
            attempt = value.get("attempt")
            return step, attempt if isinstance(attempt, int) else 0
        case [int(step), _]:
            return step, 0
    return None
