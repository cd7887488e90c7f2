"""The proof of a ledger: one pass over its bytes, every promise of the journal checked on the way.

What may live here: reading a ledger strictly and saying what is wrong, and where. `ledger` repairs
and forgives a torn tail; this forgives nothing and changes nothing.

Invariants:
- Every byte is looked at once: it belongs to the opening, a row, a separator or the closing.
- A binding covers the file from its first byte, so the first that does not hold names the stretch
  between it and the last that does. What lies behind that stretch rests on changed bytes and is
  not proven by later bindings either.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from supervisor.contract import ContractError, Json, parse_entry
from supervisor.ledger import GROUP_BYTES_MAX
from supervisor.rows import BLOCK_BYTES, CLOSING, OPENING

PROBLEMS_MAX: Final = 20
_FIRST_LINE: Final = OPENING + b"\n"
_LAST_LINE: Final = CLOSING[1:]

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One damage: `file` relative to the run directory, `place` in it, `what` is wrong there."""

    file: str
    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.place}: {self.what}"


@dataclass(frozen=True, slots=True)
class Binding:
    """What journal record `seq` says of the first `entries` entries."""

    entries: int
    sha256: str
    seq: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a history may begin and have gaps. `first_step` is the least first step; entries up
    to number `imported` come from another program, which may have left steps out."""

    first_step: int = 1
    imported: int = 0


@dataclass(slots=True)
class LedgerProof:
    """`entries` rows are whole, the first `bound` of them proven by a binding that holds."""

    entries: int = 0
    bound: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def open_cold(path: Path) -> BinaryIO:
    """A file opened for reading from the device, as far as the kernel gives its cache back."""
    file = path.open("rb", buffering=BLOCK_BYTES)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def bindings_of(records: Iterable[Json]) -> list[Binding]:
    """Every journal record that binds the ledger, whatever else it says."""
    return [
        Binding(record["ledger_entries"], record["ledger_sha256"], record["seq"])
        for record in records
        if record.get("ledger_entries") and record.get("ledger_sha256")
    ]


def prove_ledger(
    path: Path, bindings: Iterable[Binding], begin: Begin, *, writing: bool, advance: Advance
) -> LedgerProof:
    """Reads a ledger whole. `writing`: somebody appends to it at this moment, so that what stands
    behind the last binding may be half-written and is not judged.

    Raises FileNotFoundError where there is no ledger, OSError where it cannot be read.
    """
    reading = _Reading(path.name, bindings, begin)
    with open_cold(path) as file:
        line = file.readline(GROUP_BYTES_MAX)
        while line:
            following = file.readline(GROUP_BYTES_MAX)
            reading.take(line, last=not following)
            advance(len(line))
            line = following
    return reading.conclude(writing)


class _Reading:
    def __init__(self, name: str, bindings: Iterable[Binding], begin: Begin) -> None:
        self.name = name
        self.begin = begin
        self.proof = LedgerProof()
        self._bindings: dict[int, list[Binding]] = defaultdict(list)
        for binding in bindings:
            self._bindings[binding.entries].append(binding)
        self._bound_end = max(self._bindings, default=0)
        self._hasher = hashlib.sha256()
        self._unhashed = b""
        self._offset = 0
        self._line = 0
        self._needs_comma = ""  # the place of a row without one
        self._proven_end = 0  # offset after the last entry that a binding proves
        self._broken: list[Binding] = []
        self._found: list[tuple[int, Problem]] = []  # with the number of the entry it is at
        self._segments: list[_Segment] = []
        self._imported_step = 0

    # --- one line ---

    def take(self, line: bytes, last: bool) -> None:
        self._line += 1
        start, self._offset = self._offset, self._offset + len(line)
        place = f"line {self._line}, bytes {start} to {self._offset}"
        if self._line == 1 and line == _FIRST_LINE:
            self._unhashed = line
        elif last and line == _LAST_LINE:
            self._close(place)
        elif self._line == 1:
            self._say(place, f"begins with {line[:20]!r}, expected the line '['")
            self._unhashed = line
        elif last:
            self._take_unclosed(line, place, start)
        else:
            self._take_row(line, place, start)

    def _close(self, place: str) -> None:
        if self.proof.entries and not self._needs_comma:
            self._say(place, "a comma stands before the closing bracket")

    def _take_unclosed(self, line: bytes, place: str, start: int) -> None:
        """The last line where it is not the closing: a row that was cut off, or a broken one."""
        if line.startswith(b"{"):
            self._take_row(line, place, start)
        self._say(place, f"ends with {line[-20:]!r}, expected the line ']'")

    def _take_row(self, line: bytes, place: str, start: int) -> None:
        if self._needs_comma:
            self._say(self._needs_comma, "no comma behind this row")
        row = line.removesuffix(b"\n")
        content = row.removesuffix(b",")
        self.proof.entries += 1
        number = self.proof.entries
        place = f"entry {number}, {place}"
        self._needs_comma = "" if content != row else place
        self._hasher.update(self._unhashed)
        self._hasher.update(content)
        self._unhashed = line[len(content) :]
        self._parse(content, place, number)
        if number in self._bindings:
            self._check_bindings(number, start + len(content))

    def _parse(self, content: bytes, place: str, number: int) -> None:
        try:
            value = orjson.loads(content)
            if not isinstance(value, dict):
                raise ContractError(f"expected an object, got {content[:20]!r}")
            step = parse_entry(value, "the row").step
        except (orjson.JSONDecodeError, ContractError) as error:
            nuls = "NUL bytes, as a power loss leaves them; " if b"\0" in content else ""
            self._say(place, f"{nuls}no whole entry ({error})")
            return
        self._follow(step, number)

    def _say(self, place: str, what: str) -> None:
        self._found.append((self.proof.entries, Problem(self.name, place, what)))

    # --- bindings ---

    def _check_bindings(self, number: int, end: int) -> None:
        found = self._hasher.hexdigest()
        wrong = [one for one in self._bindings.pop(number) if one.sha256 != found]
        if not wrong:
            if not self._broken:
                self.proof.bound, self._proven_end = number, end
            return
        if not self._broken:
            self._say_changed(wrong[0], end, found)
        self._broken += wrong

    def _say_changed(self, binding: Binding, end: int, found: str) -> None:
        first = self.proof.bound + 1
        self._say(
            f"entries {first} to {binding.entries}, lines {first + 1} to {binding.entries + 1},"
            f" bytes {self._proven_end} to {end}",
            f"a byte has changed since it was recorded: the first {binding.entries} entries have"
            f" SHA-256 {found}, journal record {binding.seq} says {binding.sha256}",
        )

    # --- the canonical history ---

    def _follow(self, step: int, number: int) -> None:
        """Keeps the canonical history so far as stretches without a gap."""
        segments = self._segments
        while segments and segments[-1].first >= step:
            segments.pop()
        if segments:
            segments[-1].last = min(segments[-1].last, step - 1)
        if segments and segments[-1].last == step - 1:
            segments[-1].last = step
        else:
            segments.append(_Segment(step, step))
        if number <= self.begin.imported:
            self._imported_step = step

    def _gaps(self) -> Iterator[Problem]:
        before = self.begin.first_step - 1
        exempt = self.begin.imported > 0
        for segment in self._segments:
            if segment.first != before + 1 and not exempt:
                yield Problem(
                    self.name,
                    f"steps {before + 1} to {segment.first - 1}",
                    "missing from the canonical history",
                )
            before = segment.last
            exempt = before <= self._imported_step

    # --- the verdict ---

    def conclude(self, writing: bool) -> LedgerProof:
        proof = self.proof
        if self._line < 2:
            self._say("the end", "holds no ledger: expected at least the lines '[' and ']'")
        rows_are_whole = not self._found
        self._say_short()
        found = [p for number, p in self._found if not writing or number <= self._bound_end]
        if rows_are_whole:
            found += self._gaps()
        proof.problems = found[:PROBLEMS_MAX]
        if len(found) > PROBLEMS_MAX:
            more = f"{len(found) - PROBLEMS_MAX} more problems like these"
            proof.problems.append(Problem(self.name, "further on", more))
        if len(self._broken) > 1:
            proof.notes.append(f"{self.name}: {len(self._broken)} bindings do not hold")
        if proof.entries > self._bound_end:
            proof.notes.append(
                f"{self.name}: entries {self._bound_end + 1} to {proof.entries} are not bound yet"
                " (the next checkpoint or the end of this life binds them)"
            )
        return proof

    def _say_short(self) -> None:
        missing = [number for number in self._bindings if number > self.proof.entries]
        if not missing:
            return
        seq = max(one.seq for one in self._bindings[max(missing)])
        self._found.append(
            (
                0,
                Problem(
                    self.name,
                    f"behind entry {self.proof.entries}",
                    f"holds {self.proof.entries} entries, journal record {seq} recorded"
                    f" {max(missing)}: the end of the history is gone",
                ),
            )
        )


@dataclass(slots=True)
class _Segment:
    """Consecutive steps of the canonical history."""

    first: int
    last: int
