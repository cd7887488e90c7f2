"""What must be on the disk before anybody may see it: groups of writes, and what waits for them.

What may live here: the order of durability (ledger first, then the journal that speaks of it, then
the sidecars that can be made again from both), and the queue of effects behind it.

Invariants:
- One commit is under way at a time; what comes meanwhile makes the next one.
- An effect that follows an Append in one decision is handed out only when that record is durable,
  and effects are handed out in the order in which they were decided.
- Ledger and journal have room of their own, the sidecars have not. One that a full disk refuses is
  late, and nothing waits for it: it holds nothing that its supervisor does not know.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from supervisor import events as ev
from supervisor.contract import Json
from supervisor.durable import replace_file
from supervisor.journal import Journal
from supervisor.ledger import Ledger
from supervisor.recorder import Recorder
from supervisor.worker import Worker

RETRY_SECONDS: Final = 1.0
UNWRITABLE_SECONDS: Final = 5.0


class Unwritable(Exception):
    """The run directory takes nothing, and nobody is at work whose steps would have to wait."""

    def __init__(self, text: str, error: OSError) -> None:
        super().__init__(text)
        self.errno = error.errno


@contextlib.contextmanager
def writable(place: Path) -> Iterator[None]:
    """What the disk refuses in here, it refuses before anything has begun."""
    try:
        yield
    except OSError as error:
        name = os.path.abspath(error.filename or place)
        raise Unwritable(f"{name} cannot be written: {error.strerror}", error) from error


class Commit:
    """Run it again after a failure: what was appended is not appended twice.

    `number` orders commits; `recorded` is (last step, verified steps) where the ledger has entries
    to sync, and None where it has not. Of the `files` those in `hints` may fail: they are in
    `late` then, and `problem` says why.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        journal: Journal,
        records: list[tuple[ev.Record, float]],
        files: dict[Path, bytes],
        recorded: tuple[int, int] | None,
        hints: Collection[Path] = (),
    ) -> None:
        self.number = number
        self.recorded = recorded
        self.late: dict[Path, bytes] = {}
        self.problem = ""
        self.tried = frozenset(files)
        self._hints = hints
        self._ledger = ledger
        self._journal = journal
        self._records = records
        self._last_step = ledger.last.step if ledger.last is not None else None
        self._files = files

    def __call__(self) -> None:
        """Raises OSError where the disk refuses; what is left to do stays in here."""
        if self.recorded is not None:
            self._ledger.sync()
        while self._records:
            record, when = self._records[0]
            self._journal.append([self._line(record)], when)
            del self._records[0]
        self._journal.sync()
        for path in list(self._files):
            self._replace(path, self._files[path])
            del self._files[path]

    def _replace(self, path: Path, content: bytes) -> None:
        try:
            replace_file(path, content)
        except OSError as error:
            if path not in self._hints:
                words = f"{os.path.abspath(path)} cannot be written: {error.strerror}"
                raise OSError(error.errno, words) from error
            self.late[path] = content
            self.problem = f"{path} is out of date: {error}"

    def _line(self, record: ev.Record) -> Json:
        """The journal line. A checkpoint, and the end of a life, is bound to the ledger: entry
        count and SHA-256 of the prefix that ends with its step's entry."""
        line = ev.record_to_json(record)
        if isinstance(record, ev.CheckpointCommitted):
            return self._bound(line, record.step)
        if isinstance(record, ev.AttemptEnded | ev.SupervisorEnded):
            return self._bound(line, self._last_step)
        return line

    def _bound(self, line: Json, step: int | None) -> Json:
        count, sha256 = None, None
        if step is not None:
            # No entry to bind to: step 0, or a trainer whose metrics nobody reads.
            with contextlib.suppress(LookupError):
                count, sha256 = self._ledger.binding(step)
        return {**line, "ledger_entries": count, "ledger_sha256": sha256}


class Pipeline:
    """Records on their way to the journal, and the effects that wait for them.

    `trouble` says what does not become durable, or nothing. `late` are the files among `hints` that
    the disk has refused so far.
    """

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        worker: Worker,
        recorder: Recorder,
        hints: Collection[Path],
    ) -> None:
        self.trouble = ""
        self.failure: OSError | None = None  # of the commit that is tried again
        self.failing_since = 0.0
        self.late: dict[Path, bytes] = {}
        self._hints = hints
        self._again_at: float | None = None  # when the commit that failed is run again
        self._late_at = 0.0  # when what is late is tried again
        self._ledger = ledger
        self._journal = journal
        self._worker = worker
        self._recorder = recorder
        self._records: list[tuple[ev.Record, float]] = []
        self._held: deque[tuple[int, ev.Effect]] = deque()
        self._batch = 1  # the commit that is being filled; everything below is durable
        self._commit: Commit | None = None
        self._ticket = 0

    @property
    def retry_at(self) -> float | None:
        """When `start` has something to try again."""
        if self._commit is not None:
            return self._again_at
        return self._late_at if self.late else None

    @property
    def idle(self) -> bool:
        """Nothing is under way and nothing that was read waits to be."""
        return self._commit is None and not self._recorder.unsynced

    @property
    def empty(self) -> bool:
        return self.idle and not self._records

    def check(self, now: float, worked_with: bool, over: bool) -> None:
        """Raises Unwritable where it is no use to try again. No trainer lives now; `worked_with`:
        one did in this life. `over`: this life ends as soon as that is on record."""
        error = self.failure
        if error is None or (worked_with and not over):
            return
        patience = 0.0 if over and not worked_with else UNWRITABLE_SECONDS
        if now - self.failing_since >= patience:
            words = f"{error.strerror or error}; no trainer lives, so this ends here"
            raise Unwritable(words, error)

    def try_late(self, now: float) -> None:
        """At once: there may be no later."""
        self._late_at = now
        self.start(now)

    def take_late(self) -> dict[Path, bytes]:
        late, self.late = self.late, {}
        return late

    def remember(self, record: ev.Record) -> None:
        self._records.append((record, time.time()))

    def queue(self, effects: Iterable[ev.Effect]) -> list[ev.Record]:
        """Takes the effects of one decision; returns the records among them."""
        records = []
        barrier = self._held[-1][0] if self._held else 0
        for effect in effects:
            if isinstance(effect, ev.Append):
                self.remember(effect.record)
                records.append(effect.record)
                barrier = self._batch
            else:
                self._held.append((barrier, effect))
        return records

    def ready(self) -> Iterator[ev.Effect]:
        """The effects whose records are durable, in order; each is handed out once."""
        while self._held:
            done = self._commit.number if self._commit is not None else self._batch
            if self._held[0][0] >= done:
                return
            yield self._held.popleft()[1]

    def start(self, now: float) -> None:
        """Begins the next commit if there is anything for one, or tries a failed one again."""
        if self._commit is not None:
            if self._again_at is not None and now >= self._again_at:
                self._again_at = None
                self._ticket = self._worker.submit(self._commit)
            return
        recorded = self._recorder.take_unsynced()
        files = self._recorder.take_files()
        if now >= self._late_at:
            files = {**self.late, **files}
        if not (self._records or files or recorded):
            return
        self._commit = Commit(
            self._batch, self._ledger, self._journal, self._records, files, recorded, self._hints
        )
        self._records = []
        self._batch += 1
        self._ticket = self._worker.submit(self._commit)

    def ended(self, ticket: int, error: OSError | None, now: float) -> tuple[int, int] | None:
        """What a worker's outcome means here: (last step, verified steps) that have become
        durable with it, or nothing."""
        commit = self._commit
        if commit is None or ticket != self._ticket:
            return None
        if error is not None:
            # Nothing is lost: receipts hold the steps and the commit its records. It is tried
            # again until the disk takes it; meanwhile no effect that depends on it happens.
            self.trouble = f"history is not durable: {error}"
            self.failing_since = self.failing_since if self.failure is not None else now
            self.failure = error
            self._again_at = now + RETRY_SECONDS
            return None
        self._commit, self.failure = None, None
        # What this commit wrote is late no more; what it did not touch still is.
        self.late = {**{p: c for p, c in self.late.items() if p not in commit.tried}, **commit.late}
        self.trouble = commit.problem or (self.trouble if self.late else "")
        if commit.late:
            self._late_at = now + RETRY_SECONDS
        return commit.recorded
