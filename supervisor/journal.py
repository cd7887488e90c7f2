"""The journal: rare facts about a run, each one line of `journal.jsonl`.

What may live here: the format of a line, the one writer, the reader. What a record means is the
machine's business.

Format. `{"seq":n,"time":t,"record":"name",...,"check":"<16 hex digits>"}` and a line break. `seq`
counts from 1. `check` is the start of the SHA-256 over the check of the line before (empty for the
first) and this line's bytes without its own check; so a flipped bit, a removed, swapped or
inserted line is found at that line.

Invariants:
- A line that was written is never written again with another content.
- Only a torn tail is repaired: an incomplete last line, or NULs behind the last good line. Damage
  before that raises JournalDamaged, and nothing is touched: a journal with a hole would have the
  run forget a pivot.
- A record that was whole before the damage is never dropped.
- What `append` returns is what any later reader will get, to the type of each value.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from supervisor.contract import Json
from supervisor.durable import (
    AppendFile,
    Repair,
    StrPath,
    describe_tail,
    fsync_directory,
    mend,
    read_range,
)

RESERVED_FIELDS: Final = frozenset({"seq", "time", "check"})
_CHECK_DIGITS: Final = 16
_CHECK: Final = re.compile(rb',"check":"([0-9a-f]{16})"\}')
_CHECK_BYTES: Final = len(b',"check":""}') + _CHECK_DIGITS


class JournalFailure(OSError):
    """The disk refused. What was appended before stays; what failed is not in the journal."""

    def __init__(self, cause: OSError, message: str) -> None:
        super().__init__(cause.errno, message)


class JournalDamaged(Exception):
    """A line before the tail is not what was written. Nothing was touched."""

    def __init__(self, path: StrPath, line: int, why: str) -> None:
        super().__init__(
            f"{os.fspath(path)}: line {line}: {why}. Nothing was changed; restore the file from a"
            " copy: the lines before this one are intact"
        )
        self.line = line


# --- the line, pure -------------------------------------------------------------------------------


def encode_line(record: Json, seq: int, time: float, check_before: str) -> tuple[bytes, str]:
    """The line with its line break, and its check, which the next line builds on.

    Raises ValueError for what does not survive JSON (a non-finite number, a reserved field) and
    TypeError for a value that is no JSON.
    """
    if "record" not in record or RESERVED_FIELDS & record.keys():
        raise ValueError(
            f"a journal record needs 'record' and none of {sorted(RESERVED_FIELDS)}, got"
            f" {sorted(record)}"
        )
    content = {"seq": seq, "time": time, "record": record["record"]} | record
    # Not orjson, which writes NaN as null without a word.
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    body = text.encode()
    check = _check(check_before, body)
    return body[:-1] + f',"check":"{check}"}}\n'.encode(), check


def decode_line(line: bytes, seq: int, check_before: str) -> tuple[Json, str]:
    """The record in a line (without its line break) that must be number `seq`, and its check.

    The record has `seq`, `time` and `record` first, as written. Raises ValueError that says what
    is wrong.
    """
    match = _CHECK.fullmatch(line, max(0, len(line) - _CHECK_BYTES))
    if match is None:
        raise ValueError("it does not end with a check")
    body = line[: match.start()] + b"}"
    check = match.group(1).decode()
    expected = _check(check_before, body)
    if check != expected:
        raise ValueError(f"its check is {check}, its content and the line before make {expected}")
    try:
        record = json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(record, dict) or record.get("seq") != seq:
        raise ValueError(f"expected the record with seq {seq}")
    return record, check


def _check(check_before: str, body: bytes) -> str:
    return hashlib.sha256(check_before.encode() + body).hexdigest()[:_CHECK_DIGITS]


@dataclass(frozen=True, slots=True)
class _Scan:
    """The good part of a file: its records, the check to go on from, the bytes it takes. `closed`
    is False where the last record lacks its line break."""

    records: list[Json]
    check: str
    end: int
    closed: bool


def _scan(path: StrPath, data: bytes) -> _Scan:
    """Raises JournalDamaged unless all that is wrong is a torn tail."""
    records: list[Json] = []
    check, start = "", 0
    torn_from = data.rfind(b"\n", 0, len(data.rstrip(b"\0"))) + 1
    while start < torn_from:
        stop = data.index(b"\n", start)
        try:
            record, check = decode_line(data[start:stop], len(records) + 1, check)
        except ValueError as error:
            raise JournalDamaged(path, len(records) + 1, str(error)) from error
        records.append(record)
        start = stop + 1
    # A last line that is whole up to its line break is a record like any other.
    for stop in _ends_of_record(data, start, check):
        with contextlib.suppress(ValueError):
            record, check = decode_line(data[start:stop], len(records) + 1, check)
            return _Scan([*records, record], check, stop, closed=False)
    return _Scan(records, check, start, closed=True)


def _ends_of_record(data: bytes, start: int, check_before: str) -> Iterator[int]:
    """Where a record that begins at `start` and lacks its line break may end: behind each check
    that is right. Every byte is hashed once, however many checks are in what was torn."""
    hasher = hashlib.sha256(check_before.encode())
    hashed = start
    for match in _CHECK.finditer(data, start):
        hasher.update(data[hashed : match.start()])
        hashed = match.start()
        whole = hasher.copy()
        whole.update(b"}")
        if whole.hexdigest()[:_CHECK_DIGITS].encode() == match.group(1):
            yield match.end()


# --- the file -------------------------------------------------------------------------------------


class Journal:
    """The one writer of a journal file. `sync` may run in another thread than `append`."""

    def __init__(
        self, path: Path, file: AppendFile, seq: int, check: str, repaired: Repair | None
    ) -> None:
        """For `open`; `seq` and `check` are those of the last record."""
        self.path = path
        self.seq = seq
        self.repaired = repaired
        self._check = check
        self._file = file

    @classmethod
    def open(cls, path: StrPath) -> tuple[Self, list[Json]]:
        """Opens a journal for writing, creating it or repairing its torn tail, with its records.

        Raises JournalDamaged for damage before the tail, OSError where the disk refuses.
        """
        path = Path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            size = os.fstat(descriptor).st_size
            scan = _scan(path, read_range(descriptor, 0, size))
            closing = b"" if scan.closed else b"\n"
            repaired = None
            if size != scan.end or closing:
                repaired = describe_tail(path, descriptor, scan.end, size)
                mend(descriptor, scan.end, closing)
            os.fsync(descriptor)  # a killed writer may have left records in the cache only
            fsync_directory(path.parent)
            undo.pop_all()
        file = AppendFile(descriptor, scan.end + len(closing), b"")
        return cls(path, file, len(scan.records), scan.check, repaired), scan.records

    @property
    def reserve_problem(self) -> OSError | None:
        """Why disk space ahead of the end could not be reserved, for an alarm; else None."""
        return self._file.reserve_problem

    def append(self, records: Iterable[Json], time: float) -> list[Json]:
        """Adds records with one write and returns them as a later reader will get them.

        `time` is UTC seconds since the epoch. They are durable only after `sync`; a kill before
        may keep the first few of them. Raises JournalFailure, and then none of them was added.
        """
        seq, check = self.seq, self._check
        lines: list[bytes] = []
        for record in records:
            seq += 1
            line, check = encode_line(record, seq, time, check)
            lines.append(line)
        if not lines:
            return []
        try:
            self._file.append(b"".join(lines))
        except OSError as error:
            raise JournalFailure(
                error,
                f"{self.path}: {len(lines)} records from seq {self.seq + 1} on not written:"
                f" {error}. What stands before is intact; free disk space or check the device",
            ) from error
        self.seq, self._check = seq, check
        return [_reread(line) for line in lines]

    def sync(self) -> None:
        """Makes every appended record durable, after a failed sync by writing them again.

        Raises JournalFailure when that fails too; the next `sync` tries again.
        """
        try:
            self._file.sync()
        except OSError as error:
            raise JournalFailure(
                error,
                f"{self.path}: {self._file.unsynced_bytes} bytes of records are not durable, also"
                f" after a second try: {error}. Check the device",
            ) from error

    def close(self) -> None:
        """Closes without a sync."""
        self._file.close()


def _reread(line: bytes) -> Json:
    record: dict[str, Any] = json.loads(line)
    del record["check"]
    return record


def read(path: StrPath) -> tuple[list[Json], str | None]:
    """All records, and what is torn behind them, or None. Takes no lock and changes nothing.

    Raises JournalDamaged for damage before the tail.
    """
    data = Path(path).read_bytes()
    scan = _scan(path, data)
    if scan.closed and scan.end == len(data):
        return scan.records, None
    return scan.records, (
        f"{os.fspath(path)}: torn after record {len(scan.records)}: the {len(data) - scan.end}"
        f" bytes from offset {scan.end} on are no whole line"
    )
