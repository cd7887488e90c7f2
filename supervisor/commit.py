"""One group of writes on its way to the disk: the job that the worker thread does.

What may live here: the order of durability. Ledger first, then the journal that speaks of it,
then the sidecars that can be made again from both.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from supervisor import events as ev
from supervisor.contract import Json
from supervisor.durable import replace_file
from supervisor.journal import Journal
from supervisor.ledger import Ledger


class Commit:
    """Run it again after a failure: what was appended is not appended twice.

    `number` orders commits; `recorded` is (last step, verified steps) where the ledger has entries
    to sync, and None where it has not.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        journal: Journal,
        records: list[tuple[ev.Record, float]],
        files: dict[Path, bytes],
        recorded: tuple[int, int] | None,
    ) -> None:
        self.number = number
        self.recorded = recorded
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
            replace_file(path, self._files[path])
            del self._files[path]

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
