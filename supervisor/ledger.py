"""The ledger: the append-only history of a run, one entry for each recorded step.

What may live here: the one writer of `<run>.loss.json`, and its readers. The layout of the file is
in `rows`; what to append is decided in `replay`; how bytes reach the device is in `durable`.

Invariants:
- The bytes up to the end of an entry never change once it is written; what a later append
  overwrites is only the closing `\\n]\\n`. So any earlier state, less its closing, is a prefix of
  any later one, which is what `binding` records and `ledger_proof` checks.
- Repair keeps the longest prefix of whole entries. It never drops a whole entry that stands before
  the damage, and sets aside what it drops where that could be more than one broken line.
- Readers take no lock and change nothing. A torn tail (a writer in mid-append, a power loss) is
  reported by them and never hides the entries before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import orjson

from supervisor.contract import ContractError, Entry, parse_entry
from supervisor.durable import (
    AppendFile,
    Repair,
    StrPath,
    describe_tail,
    fsync_directory,
    mend,
    read_range,
    replace_file,
)
from supervisor.rows import (
    CLOSING,
    OPENING,
    SEPARATOR,
    LedgerDamaged,
    hash_range,
    is_ours,
    rows_backward,
    skip_space,
    whole_rows,
    window,
    without_nuls,
)
from supervisor.stretches import STRETCH_BYTES, Index, Mark, Stretch, Tail

GROUP_BYTES_MAX: Final = 64 * 1024
TORN_BYTES_MAX: Final = 4 * 1024 * 1024


class LedgerFailure(OSError):
    """The disk refused. `appended` counts the entries of the failed call that are in the file."""

    def __init__(self, cause: OSError, message: str, appended: int = 0) -> None:
        super().__init__(cause.errno, message)
        self.appended = appended


# --- the writer -----------------------------------------------------------------------------------


class Ledger:
    """The one writer of a ledger file.

    `append` belongs to the thread that owns the ledger, and so do `count`, `last`, `end` and
    `tail`, which speak of what was appended, synced or not. `sync` and `binding` may run in one
    worker thread at the same time: what they need of an append they see whole or not at all, and
    `append` waits for none of their reads.
    """

    def __init__(
        self,
        path: Path,
        file: AppendFile,
        reader: int,
        survey: _Survey,
        repaired: Repair | None,
    ) -> None:
        """For `open`."""
        self.path = path
        self.count = survey.count
        self.last = survey.last
        self.repaired = repaired
        self._file = file
        self._reader = reader
        self._index = Index(path, reader, survey.marks, survey.end)
        self._hasher = hashlib.sha256()
        self._hashed_bytes = 0

    @classmethod
    def open(cls, path: StrPath) -> Self:
        """Opens a ledger for writing, creating or repairing it; what it holds is durable then.

        Old entries are scanned for torn bytes and counted but not parsed. Raises LedgerDamaged for
        a file that no interrupted append explains, OSError where the disk refuses.
        """
        path = Path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            survey = _survey(path, descriptor)
            repaired = _repair(path, descriptor, survey.end)
            os.fsync(descriptor)  # a killed writer may have left entries in the cache only
            fsync_directory(path.parent)
            reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
            undo.pop_all()
        return cls(path, AppendFile(descriptor, survey.end, CLOSING), reader, survey, repaired)

    @property
    def end(self) -> int:
        """Offset after the newest entry, where the closing begins."""
        return self._file.end

    @property
    def reserve_problem(self) -> OSError | None:
        """Why disk space ahead of the end could not be reserved, for an alarm; else None."""
        return self._file.reserve_problem

    def append(self, entries: Sequence[Entry]) -> None:
        """Adds entries in order, one write for each group of at most GROUP_BYTES_MAX.

        They are in the file then and survive a kill of this process, but are durable only after
        `sync`. Raises LedgerFailure, whose `appended` says how many of them the file did take, and
        ContractError, before anything is written, for an entry too large for one group.
        """
        lines = [orjson.dumps(entry.to_json()) for entry in entries]
        for entry, line in zip(entries, lines, strict=True):
            if len(line) > GROUP_BYTES_MAX - 16:
                raise ContractError(
                    f"{self.path}: the entry of step {entry.step} takes {len(line)} bytes, more"
                    f" than one write of {GROUP_BYTES_MAX} can hold"
                )
        done = 0
        while done < len(lines):
            stop = _group_stop(lines, done)
            self._append_group(entries[done:stop], lines[done:stop], done)
            done = stop

    def _append_group(self, entries: Sequence[Entry], lines: list[bytes], done: int) -> None:
        separator = SEPARATOR if self.count else b"\n"
        start = self._file.end + len(separator)
        try:
            self._file.append(separator + SEPARATOR.join(lines))
        except OSError as error:
            raise LedgerFailure(
                error,
                f"{self.path}: entry of step {entries[0].step} not written: {error}. History up to"
                f" entry {self.count} is intact; free disk space or check the device",
                appended=done,
            ) from error
        rows = []
        for number, (entry, line) in enumerate(zip(entries, lines, strict=True), self.count):
            stop = start + len(line)
            rows.append(Stretch(start, stop, number, entry.attempt or 0, entry.step, entry.step))
            start = stop + len(SEPARATOR)
        self._index.add(rows)
        self.count += len(rows)
        self.last = entries[-1]

    def sync(self) -> None:
        """Makes every appended entry durable. After a failed sync what it should have covered is
        written again through a new descriptor; LedgerFailure when that fails too. The entries stay
        in memory, and the next `sync` tries again."""
        try:
            self._file.sync()
        except OSError as error:
            raise LedgerFailure(
                error,
                f"{self.path}: {self._file.unsynced_bytes} bytes of history are not durable, also"
                f" after a second try: {error}. Check the device; receipts still hold them",
            ) from error

    def binding(self, step: int) -> tuple[int, str]:
        """Entry count and SHA-256 of the prefix that ends with the newest entry of `step`.

        Bindings asked for in ascending order hash every byte of the file once altogether. Raises
        LookupError where the ledger has no such entry.
        """
        found = self._index.position(step)
        if found is None:
            raise LookupError(f"{self.path}: no entry of step {step}")
        count, end = found
        hasher, done = self._hasher, self._hashed_bytes
        if end < done:
            hasher, done = hashlib.sha256(), 0
        hash_range(hasher, self._reader, done, end)
        if end >= self._hashed_bytes:
            self._hashed_bytes = end
        return count, hasher.hexdigest()

    def tail(self, base: int, attempt: int) -> Tail:
        """What `attempt`, resumed from the checkpoint of step `base`, is merged into."""
        return self._index.tail(base, attempt)

    def close(self) -> None:
        """Closes without a sync."""
        self._file.close()
        os.close(self._reader)


def _group_stop(lines: list[bytes], start: int) -> int:
    """Where the group that begins with `lines[start]` ends, so that it fits into one write."""
    size = len(CLOSING)
    for stop in range(start, len(lines)):
        size += len(SEPARATOR) + len(lines[stop])
        if size > GROUP_BYTES_MAX:
            return stop
    return len(lines)


# --- repair ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Survey:
    """What a file holds: `count` whole entries that end at `end`, the last of them, and marks."""

    count: int
    end: int
    last: Entry | None
    marks: list[Mark]


def _survey(path: Path, descriptor: int) -> _Survey:
    """Raises LedgerDamaged."""
    if not is_ours(descriptor):
        raise LedgerDamaged(
            f"{path}: begins with {read_range(descriptor, 0, 3)!r}, expected the line '[' and then"
            " one entry a line; a history of another program needs `supervisor import`"
        )
    size = limit = os.fstat(descriptor).st_size
    lines = 0
    marks = []
    for start in range(0, size, STRETCH_BYTES):
        block = read_range(descriptor, start, start + STRETCH_BYTES)
        hole = block.find(b"\0")
        stop = hole if hole >= 0 else len(block)
        first = block.find(b"\n", 0, stop)
        if first >= 0:
            marks.append(Mark(start + first + 1, lines))
        lines += block.count(b"\n", 0, stop)
        if hole >= 0:
            limit = start + hole
            break
    start, rows = window(path, descriptor, limit)
    if not rows:
        return _Survey(0, len(OPENING), None, [])
    end = rows[-1].end
    stretch = read_range(descriptor, start, limit)
    if stretch.count(b"\n", 0, end - start) != len(rows) - 1:
        raise LedgerDamaged(f"{path}: entries from offset {start} on do not stand one on a line")
    return _Survey(lines - stretch.count(b"\n", end - start), end, rows[-1].entry, marks)


def _repair(path: Path, descriptor: int, end: int) -> Repair | None:
    """Ends the file after `end`, the last whole entry. None where it was whole, or is new."""
    size = os.fstat(descriptor).st_size
    if read_range(descriptor, 0, 1) != OPENING:
        end = 0
    closing = CLOSING if end else OPENING + CLOSING
    found = read_range(descriptor, end, end + len(closing))
    whole = next(n for n in range(len(closing), -1, -1) if found.startswith(closing[:n]))
    start = end + whole  # what is dropped begins here
    if found == closing and start == size:
        return None
    meaningful = without_nuls(descriptor, start, size)
    if meaningful - start > TORN_BYTES_MAX:
        raise LedgerDamaged(
            f"{path}: {meaningful - start} bytes from offset {start} on are not whole entries, more"
            f" than an interrupted append leaves (at most {TORN_BYTES_MAX}). Nothing was changed;"
            " restore the file from a copy, or move it away and rebuild it from receipts"
        )
    repair = describe_tail(path, descriptor, start, size)
    dropped = read_range(descriptor, start, meaningful)
    if b"\n" in dropped.strip(b",\n]"):  # more than the one line that a torn append leaves
        aside = path.with_name(f"{path.name}.dropped-{start}-{repair.sha256[:8]}")
        replace_file(aside, dropped)
        repair = replace(repair, set_aside=str(aside))
    mend(descriptor, end, closing)
    return repair if size else None


# --- readers --------------------------------------------------------------------------------------


def read_entries(path: StrPath) -> tuple[list[Entry], str | None]:
    """All whole entries in file order, and what is torn behind them, or None.

    Reads any JSON array of our entries or of ANDREA's rows `[step, loss]`, however formatted.
    Raises ContractError for an array that holds anything else.
    """
    data = Path(path).read_bytes()
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError:
        return _read_torn(path, data)
    if not isinstance(values, list):
        raise ContractError(f"{path}: expected a JSON array, got {type(values).__name__}")
    where = f"{path} entry "
    return [parse_entry(value, f"{where}{k}") for k, value in enumerate(values, start=1)], None


def _read_torn(path: StrPath, data: bytes) -> tuple[list[Entry], str | None]:
    start = skip_space(data, 0)
    if data[start : start + 1] not in (OPENING, b"", b"\0"):
        raise ContractError(f"{path}: begins with {data[start:][:20]!r}, expected a JSON array")
    end = min(start + 1, len(data))
    rows = whole_rows(path, data, skip_space(data, end))
    if rows:
        end = rows[-1].end
    entries = [row.entry for row in rows]
    if data[end:].strip() == b"]":  # not torn: a NaN of another program, which orjson refuses
        return entries, None
    return entries, (
        f"{path}: torn after entry {len(rows)}: the {len(data) - end} bytes from offset {end} on"
        " are no whole entry"
    )


def iterate_backward(path: StrPath) -> Iterator[Entry]:
    """Whole entries, newest first, read from the tail in blocks; a torn tail is passed by.

    Raises LedgerDamaged where something other than the tail is no whole entry. A file in another
    layout than ours is read whole.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if is_ours(descriptor):
            limit = without_nuls(descriptor, 0, os.fstat(descriptor).st_size)
            yield from (row.entry for row in rows_backward(path, descriptor, limit))
            return
    finally:
        os.close(descriptor)
    yield from reversed(read_entries(path)[0])


def canonical(entries: Iterable[Entry]) -> list[Entry]:
    """The history that counts: an entry for step S supersedes every earlier one with step >= S.

    The result has strictly increasing steps.
    """
    kept: list[Entry] = []
    for entry in entries:
        while kept and kept[-1].step >= entry.step:
            kept.pop()
        kept.append(entry)
    return kept
