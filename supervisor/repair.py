"""`supervisor verify --repair`: bad checkpoints are moved to quarantine, and nothing else is done.

What may live here: what may be done to a run about damages that `verify` found. Lost bytes cannot
be made again; what can be done is to keep a resume from trusting them.

Invariants:
- The run is ours while we work on it: its lock is held, and no trainer lives.
- A move is journalled before the next one, so that nobody misses the checkpoint later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from supervisor import checkpoints, events as ev, journal
from supervisor.ledger_proof import Advance
from supervisor.rundir import RunDirectory, RunError, lock_holder, take_lock, take_trainer_lock
from supervisor.verify import Condemned, Report, examine, no_progress


def repair(directory: RunDirectory, advance: Advance = no_progress) -> Report:
    """Verifies, and moves every checkpoint that is known to be bad to quarantine/.

    Raises LockHeld, with its owner, where the run is supervised; RunError where its trainer lives
    or its journal is too damaged to take the record of the move.
    """
    with _owned(directory):
        report, condemned = examine(directory, advance, living=False)
        if condemned:
            report.moved = _set_aside(directory, condemned)
    return report


@contextmanager
def _owned(directory: RunDirectory) -> Iterator[None]:
    lock = take_lock(directory)
    try:
        trainer_lock = take_trainer_lock(directory)
        if trainer_lock is None:
            raise RunError(
                f"{directory.path}: its trainer lives (process"
                f" {lock_holder(directory.trainer_lock)}); stop the run before repairing it"
            )
        os.close(trainer_lock)
        yield
    finally:
        os.close(lock)


def _set_aside(directory: RunDirectory, condemned: Sequence[Condemned]) -> list[str]:
    """Moves checkpoints to quarantine/; their new places. Raises RunError before the first move."""
    try:
        writer, _ = journal.Journal.open(directory.journal)
    except journal.JournalDamaged as damage:
        raise RunError(f"{damage}; no checkpoint was moved") from damage
    try:
        now = time.time()
        moved = []
        for found, reason in condemned:
            moved_to = checkpoints.quarantine(directory.path, found, reason, time=now)
            record = ev.CheckpointQuarantined(found.step, reason, moved_to)
            writer.append([ev.record_to_json(record)], now)
            writer.sync()
            moved.append(moved_to)
        return moved
    finally:
        writer.close()
