"""What becomes of the files that attempts print into.

What may live here: bounding a log that somebody else appends to, and choosing which old ones go.
The functions on files run in the worker thread; `AttemptLogs` is the loop's hand on them.

Invariants:
- The child writes its own file; no byte of its output passes through us, and none that it still
  writes can be lost or moved. A log that is too large loses its middle: the blocks there are given
  back (a hole), sizes and offsets stay, and an appending writer notices nothing.
- Kept of each log: its beginning, the first traceback, its end.
- Nothing here stops a run. What cannot be done is an alarm, which goes when it can be done again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import events as ev
from supervisor.contract import Json
from supervisor.durable import punch_hole, read_range
from supervisor.rundir import RunDirectory, attempt_logs
from supervisor.tail import pieces
from supervisor.worker import Job, Outcome

DETACHED_OUTPUT: Final = "supervisor.out"  # what a detached supervisor prints
FAILURES_KEPT: Final = 10
TRACEBACK: Final = b"Traceback (most recent call last)"
ALARM: Final = "logs"
_BLOCK_BYTES: Final = 4096
_READ_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LogRules:
    """`size_bytes` bounds each log, `keep` how many attempts have one."""

    size_bytes: int
    keep: int


@dataclass(frozen=True, slots=True)
class Condition:
    """A log as it was found. `dropped_bytes`: of its middle, in all."""

    inode: int
    dropped_bytes: int


# --- one file -------------------------------------------------------------------------------------


def bound(path: Path, size_bytes: int) -> Condition:
    """Gives back the middle of a log that occupies more than `size_bytes`. Kept are a quarter of
    that size from its beginning, half from its end.

    Raises OSError: EOPNOTSUPP where the file system cannot do it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(descriptor)
        if about.st_blocks * 512 > size_bytes:
            for start, stop in _middle(descriptor, about.st_size, size_bytes):
                punch_hole(descriptor, start, stop - start)
        kept = pieces(descriptor)
        length = kept[-1][1] if kept else 0
        return Condition(about.st_ino, length - sum(stop - start for start, stop in kept))
    finally:
        os.close(descriptor)


def _middle(descriptor: int, length: int, size_bytes: int) -> list[tuple[int, int]]:
    """What to give back: all from behind the last hole (or the beginning that is kept) to the end
    that is kept, less the blocks with the first traceback where that is not kept already."""
    *earlier, last = pieces(descriptor) or [(0, 0)]
    start = max(_down(size_bytes // 4), last[0])
    stop = _down(length - size_bytes // 2)
    if start >= stop:
        return []
    kept = [*earlier, (last[0], start)]
    if any(_find(descriptor, *piece) is not None for piece in kept):
        return [(start, stop)]
    found = _find(descriptor, max(0, start - len(TRACEBACK)), stop)
    if found is None:
        return [(start, stop)]
    island = max(start, _down(found))
    shore = min(stop, island + _down(min(64 * 1024, size_bytes // 16)))
    return [(a, b) for a, b in ((start, island), (shore, stop)) if a < b]


def _down(offset: int) -> int:
    return offset // _BLOCK_BYTES * _BLOCK_BYTES


def _find(descriptor: int, start: int, stop: int) -> int | None:
    """Where the first traceback begins."""
    while start < stop:
        data = read_range(descriptor, start, min(stop, start + _READ_BYTES))
        at = data.find(TRACEBACK)
        if at >= 0:
            return start + at
        start += max(1, len(data) - len(TRACEBACK) + 1)
    return None


# --- many files -----------------------------------------------------------------------------------


def surplus(there: Collection[int], failed: Collection[int], keep: int) -> set[int]:
    """Which attempts' logs may go. Kept are the newest `keep`; the first, which shows how the run
    began; and the newest few that ended badly, which many planned restarts must not push out."""
    by_number = sorted(there)
    kept = {
        *by_number[:1],
        *by_number[-keep:],
        *sorted(number for number in failed if number in there)[-FAILURES_KEPT:],
    }
    return set(there) - kept


def sweep(directory: Path, failed: Collection[int], rules: LogRules) -> None:
    """Removes what may go and bounds what stays. Raises OSError."""
    logs = attempt_logs(directory)
    for attempt in surplus(logs, failed, rules.keep):
        logs[attempt].unlink(missing_ok=True)
    for path in (*logs.values(), directory / DETACHED_OUTPUT):
        if path.is_file():
            bound(path, rules.size_bytes)


# --- the loop's hand ------------------------------------------------------------------------------


class AttemptLogs:
    """`submit` gives a job to the worker and its outcome to a callback; `alarm` takes a name and a
    detail (empty: all is well)."""

    def __init__(
        self,
        directory: RunDirectory,
        rules: LogRules,
        records: Iterable[ev.Record],
        *,
        submit: Callable[[Job, Callable[[Outcome], None]], None],
        alarm: Callable[[str, str], None],
    ) -> None:
        self._directory = directory
        self.rules = rules
        self._submit = submit
        self._alarm = alarm
        self._busy = False
        self._untidy = True  # old logs were not looked at since an attempt ended
        self._attempt: int | None = None  # the one that prints
        self._failed: tuple[int, ...] = ()
        self._inode: int | None = None
        self._unlogged = ""  # why the attempt prints into nothing, if it does
        self._unlogged_attempts = self._dropped_bytes = 0
        for record in records:
            self.remember(record)

    def remember(self, record: ev.Record) -> None:
        """Which attempt prints, and which ones ended badly."""
        match record:
            case ev.AttemptStarted():
                self._inode, self._unlogged, self._dropped_bytes = None, "", 0
            case ev.AttemptSpawned():
                self._attempt = record.attempt
            case ev.AttemptEnded():
                self._attempt, self._untidy = None, True
                if record.cause not in ("finished", "stopped"):
                    self._failed = (*self._failed, record.attempt)[-FAILURES_KEPT:]

    def spawned(self, unlogged: str) -> None:
        """The newest attempt's process exists; what it prints goes nowhere, where that says why."""
        self._unlogged = unlogged
        self._unlogged_attempts += int(bool(unlogged))

    def counts(self) -> Json:
        return {"dropped_bytes": self._dropped_bytes, "unlogged_attempts": self._unlogged_attempts}

    def look(self) -> None:
        """Has the worker look after the log that is being written, and after an end after all."""
        attempt, failed, rules = self._attempt, self._failed, self.rules
        if self._busy or (attempt is None and not self._untidy):
            return
        log = self._directory.log(attempt) if attempt is not None else None
        untidy, self._untidy = self._untidy, False

        def work() -> Condition | None:
            if untidy:
                sweep(self._directory.logs, failed, rules)
            return bound(log, rules.size_bytes) if log is not None else None

        def done(outcome: Outcome) -> None:
            self._busy = False
            self._untidy = self._untidy or (untidy and outcome.error is not None)
            if attempt == self._attempt:  # else another one has begun since
                self._alarm(ALARM, self._unlogged or self._judge(outcome, log))

        self._busy = True
        self._submit(work, done)

    def _judge(self, outcome: Outcome, log: Path | None) -> str:
        """What is wrong with the logs, in words without numbers that change: each new text of an
        alarm is a record."""
        error, condition = outcome.error, outcome.result
        if isinstance(error, FileNotFoundError) and log is not None:
            return _GONE.format(log=log)
        if error is not None and error.errno == errno.EOPNOTSUPP:
            return _NO_HOLES
        if error is not None:
            return f"{error.filename or log}: {os.strerror(error.errno or errno.EIO)}"
        if condition is None:
            return ""
        self._dropped_bytes = condition.dropped_bytes
        self._inode = self._inode or condition.inode
        return "" if condition.inode == self._inode else _GONE.format(log=log)


_GONE: Final = (
    "{log} is not the file that the trainer writes: it was deleted or moved away, and what is"
    " printed is lost until the next attempt (`supervisor restart` begins one)"
)
_NO_HOLES: Final = (
    "logs/ holds more than logs.size_bytes allows: this file system cannot give back the middle of"
    " a file, so the log of an attempt grows until it ends"
)
