"""One group of writes on its way to the disk: the job that the worker thread does.

What may live here: the order of durability. Ledger first, then the journal that speaks of it,
then the sidecars that can be made again from both.
"""

from __future__ import annotations

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
        """The journal line. A checkpoint is bound to the ledger: entry count and SHA-256 of the
        prefix that ends with its step's entry."""
        line = ev.record_to_json(record)
        if isinstance(record, ev.CheckpointCommitted):
            try:
                count, sha256 = self._ledger.binding(record.step)
            except LookupError:
                # Step 0, or a trainer whose metrics nobody reads: there is no entry to bind to.
                return {**line, "ledger_entries": None, "ledger_sha256": None}
            return {**line, "ledger_entries": count, "ledger_sha256": sha256}
        return line
