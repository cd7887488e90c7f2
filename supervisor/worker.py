"""The one worker thread: it writes and syncs, so that the loop never waits for a disk.

What may live here: running jobs in the order given and saying how each ended.

Invariants:
- Jobs run one after the other, in order. The thread owns no state: a job brings its own.
- A job's failure is an answer like its success; what to do about it is the loop's decision.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Job = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error` is an OSError (or a failure derived from it) that the job ended with, or None."""

    ticket: int
    result: Any
    error: OSError | None


class Worker:
    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[int | None, Job, bool] | None] = queue.SimpleQueue()
        self._outcomes: deque[Outcome | BaseException] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tickets = 0
        self._hint: Job | None = None
        self._hinting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="sync-worker", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable once an outcome is waiting."""
        return self._wake_fd

    def submit(self, job: Job, wakes: bool = True) -> int:
        """Its ticket. Without `wakes` its outcome waits until something else wakes the loop."""
        self._tickets += 1
        self._jobs.put((self._tickets, job, wakes))
        return self._tickets

    def submit_hint(self, job: Job) -> None:
        """A job whose end nobody waits for, success or failure: it wakes nobody up. One that still
        waits for its turn is dropped for a newer: on a slow disk they would become many."""
        with self._hinting:
            waits, self._hint = self._hint is not None, job
        if not waits:
            self._jobs.put((None, self._do_hint, False))

    def outcomes(self) -> list[Outcome]:
        """Every job that has ended since. Re-raises what only a bug can raise."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        found = []
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if isinstance(outcome, BaseException):
                raise outcome
            found.append(outcome)
        return found

    def close(self) -> None:
        """Finishes what was submitted, then ends the thread."""
        self._jobs.put(None)
        self._thread.join()
        os.close(self._wake_fd)

    def _do_hint(self) -> None:
        with self._hinting:
            job, self._hint = self._hint, None
        if job is not None:
            job()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            ticket, job, wakes = item
            try:
                outcome = Outcome(ticket or 0, job(), None)
            except OSError as error:
                outcome = Outcome(ticket or 0, None, error)
            except BaseException as error:
                # Our bug: hand it to the loop, which ends this life with it, and stop working.
                self._outcomes.append(error)
                os.eventfd_write(self._wake_fd, 1)
                return
            if ticket is not None:
                self._outcomes.append(outcome)
                if wakes:
                    os.eventfd_write(self._wake_fd, 1)
