"""From receipts to history: what the trainer wrote, taken into the ledger and the sidecars.

What may live here: following receipt files, merging them in the order of the attempts, and
keeping the content of samples.json, state.json and training.json. What an entry means for the
history is decided in `replay`; when things are synced, in the daemon.

Invariants:
- Entries are appended here, in the loop's thread, and count only after the daemon's commit synced
  them. An entry that the disk refused stays first in line and is appended before anything else.
- A receipt file is read to its end before the next one is begun, and removed only after all of
  it is durable elsewhere.
- Reading a file again, after a restart of the supervisor, changes nothing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from supervisor import contract, events as ev
from supervisor.contract import (
    AuditLine,
    ContractError,
    Entry,
    EnvironmentLine,
    EvaluationLine,
    ExitLine,
    Json,
    LoadedLine,
)
from supervisor.durable import size_of
from supervisor.gauge import Gauge as Gauge
from supervisor.ledger import Ledger, LedgerFailure
from supervisor.replay import Merge, Outcome, Taken, likely_class
from supervisor.rundir import RunDirectory, RunError
from supervisor.sidecars import read_samples, read_state, read_training, set_aside

PUMP_BYTES: Final = 256 * 1024
STATE_FIELDS: Final = ("step", "epoch", "policy_digest", "targets_seen", "bandit", "arms")

T = TypeVar("T")


@dataclass(slots=True)
class _File:
    """A receipt file that is being read. `base` None: the first entry tells."""

    attempt: int
    path: Path
    base: int | None
    epoch: int
    descriptor: int = -1
    offset: int = 0
    line: int = 0
    step: int = 0
    entry_epoch: int | None = None  # of the newest entry that says so
    loaded: bool = False
    rest: bytes = b""
    merge: Merge | None = None
    refused: bool = False


class Recorder:
    def __init__(
        self,
        directory: RunDirectory,
        ledger: Ledger,
        samples_keep: int,
        epoch: int = 1,
        base_step: int = 0,
    ) -> None:
        """`epoch` is the one that rules, `base_step` where it begins."""
        self._directory = directory
        self._ledger = ledger
        self.samples_keep = samples_keep
        self._file: _File | None = None
        self._waiting: deque[_File] = deque()
        self._owed: list[Entry] = []
        self._records: list[ev.Record] = []
        self._files: dict[Path, bytes] = {}
        self._unsynced = False
        self.set_aside: list[str] = []  # what was wrong with the sidecars, and where they are now
        self._samples = self._read(read_samples, directory.samples)
        self._training = self._read(read_training, directory.training)
        self._state = self._read(read_state, directory.state)
        self.evaluated_step = 0
        self.last_attempt = 0  # the highest that has left receipts
        self.epoch = epoch
        self._base_step = base_step
        self.gauge = Gauge()
        self.gauge.go_on_from(ledger.path, self.history_step)
        self.exit_line: ExitLine | None = None
        self._refused = ""  # by the ledger
        self._unreadable = ""

    @property
    def trouble(self) -> str:
        """Why receipts do not become history at this moment, or nothing; it is tried again."""
        return self._refused or self._unreadable

    @property
    def attempt(self) -> int | None:
        """The one whose receipts are being read."""
        return None if self._file is None else self._file.attempt

    def _read(self, read: Callable[[Path], T], path: Path) -> T:
        """A sidecar is no history: one that is damaged is kept under another name, and begun anew
        from what is known."""
        try:
            return read(path)
        except RunError as error:
            moved_to = set_aside(path)
            self.set_aside.append(f"{error.__cause__}; it is {moved_to.name} now")
            return read(path)

    @property
    def history_step(self) -> int:
        """The last step of the canonical history, synced or not. What an earlier epoch recorded
        beyond the base of the ruling one is a branch that was left."""
        last = self._ledger.last
        if last is None:
            return 0
        ours = (last.epoch or 1) >= self.epoch
        return last.step if ours else min(last.step, self._base_step)

    @property
    def read_step(self) -> int:
        """The last step that was read of the attempt being followed, new to the history or not."""
        return self._file.step if self._file is not None else 0

    @property
    def loaded(self) -> bool:
        """Whether the attempt being followed has loaded what it resumes from."""
        return self._file is not None and self._file.loaded

    @property
    def verified_steps(self) -> int:
        """Re-executed steps of the attempt being followed that equalled the recorded ones."""
        merge = self._file.merge if self._file is not None else None
        return merge.verified_steps if merge is not None else 0

    @property
    def unsynced(self) -> bool:
        return self._unsynced or bool(self._owed or self._records or self._files)

    @property
    def idle(self) -> bool:
        """Nothing is left to read of the files that `merge_leftovers` named."""
        return not self._waiting and self.at_end()

    @property
    def behind(self) -> bool:
        """There is more to take in at once; not so while the disk refuses what is owed."""
        return not self._owed and not self.idle

    def at_end(self) -> bool:
        """Everything that the current receipt file holds by now has been taken in."""
        file = self._file
        if self._owed:
            return False
        if file is None or file.refused:
            return True
        try:
            return file.offset >= size_of(file.path)
        except OSError as error:
            self._unreadable = str(error)
            return False

    def close(self) -> None:
        self._let_go()

    # --- which file ---

    def follow(self, attempt: int, base: int, epoch: int) -> None:
        """Reads the receipts of this attempt from now on; harmless if it already does."""
        if self._file is not None and self._file.attempt == attempt:
            return
        self._let_go()
        path = self._directory.receipts / f"{contract.attempt_stem(attempt)}.jsonl"
        self._file = _File(attempt, path, base, epoch)
        self.exit_line = None

    def merge_leftovers(self, begun: ev.AttemptStarted | None = None) -> None:
        """Queues every receipt file that is not merged, in the order of the attempts. `begun` is
        the newest attempt on record: all before it were merged when it began; those after it are
        of a trainer that was alone, whose first entry tells where it began."""
        current = self._file.attempt if self._file is not None else None
        for attempt, path in self._directory.receipt_files():
            self.last_attempt = max(self.last_attempt, attempt)
            if attempt == current or (begun is not None and attempt < begun.attempt):
                continue
            if begun is not None and attempt == begun.attempt:
                self._waiting.append(_File(attempt, path, begun.resume_step, begun.epoch))
            else:
                self._waiting.append(_File(attempt, path, None, 1))

    def forget_before(self, attempt: int) -> str:
        """Removes the receipt files of earlier attempts: all of them is durable elsewhere. Returns
        why that was not possible, if it was not: they may stay, and go the next time."""
        assert not self.unsynced
        assert not self._waiting
        self._let_go()
        try:
            for found, path in self._directory.receipt_files():
                if found < attempt:
                    path.unlink()
        except OSError as error:
            return f"old receipts cannot be removed: {error}"
        return ""

    def _let_go(self) -> None:
        if self._file is not None and self._file.descriptor >= 0:
            os.close(self._file.descriptor)
        self._file = None

    # --- reading ---

    def pump(self) -> str:
        """Takes in at most PUMP_BYTES. Returns what is wrong with the receipts, or nothing."""
        self._unreadable = ""
        if not self._settle_owed():
            return ""
        if self._waiting and self.at_end():
            # The next file is compared with what this one has left in the ledger.
            self._let_go()
            self._file = self._waiting.popleft()
        file = self._file
        try:
            if file is None or file.refused or not self._opened(file):
                return ""
            data = os.pread(file.descriptor, PUMP_BYTES, file.offset)
        except OSError as error:  # a disk that fails for a moment
            self._unreadable = str(error)
            return ""
        file.offset += len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        try:
            for line in lines:
                file.line += 1
                self._take(file, line)
            if len(file.rest) > contract.RECEIPT_BYTES_MAX:
                raise ContractError(
                    f"{file.path.name}: line {file.line + 1} does not end within"
                    f" {contract.RECEIPT_BYTES_MAX} bytes"
                )
        except ContractError as error:
            file.refused = True
            return str(error)
        finally:
            self._settle_owed()
        return ""

    def _opened(self, file: _File) -> bool:
        if file.descriptor < 0:
            try:
                file.descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        return True

    def _take(self, file: _File, line: bytes) -> None:
        where = f"{file.path.name} line {file.line}"
        if not line.strip(b"\0"):
            return
        receipt = contract.parse_receipt(line, where)
        match receipt:
            case Entry():
                self._take_entry(file, receipt)
            case AuditLine():
                self._take_audit(receipt)
            case EvaluationLine():
                self._take_evaluation(file, receipt)
            case LoadedLine():
                file.loaded = True
            case EnvironmentLine():
                self._training[contract.attempt_stem(receipt.attempt)] = receipt.environment
                self._files[self._directory.training] = _dump(self._training)
            case ExitLine():
                self.exit_line = receipt

    def _take_entry(self, file: _File, entry: Entry) -> None:
        if file.merge is None:
            base = entry.step - 1 if file.base is None else file.base
            if self._owed:
                raise AssertionError("a merge begins on a settled ledger")
            tail = self._ledger.tail(base, file.attempt)
            file.merge = Merge(
                file.attempt, file.epoch, base, tail.earlier, tail.own_first, tail.own_last
            )
        taken = file.merge.take(entry)
        file.step, file.entry_epoch = entry.step, entry.epoch or file.entry_epoch
        self.gauge.take(taken.entry)
        if taken.fields and taken.earlier is not None and taken.outcome is Outcome.DIVERGED:
            self._records.append(
                ev.ReplayDiverged(
                    entry.step,
                    file.attempt,
                    list(taken.fields),
                    taken.earlier.to_json(),
                    taken.entry.to_json(),
                    self._likely_class(file.attempt, taken),
                )
            )
            self._records.append(
                ev.Alarmed(
                    "replay_diverged",
                    f"step {entry.step} of attempt {file.attempt} differs in"
                    f" {', '.join(taken.fields)} from attempt {taken.earlier.attempt}",
                )
            )
        if taken.append:
            self._owed.append(taken.entry)

    def _likely_class(self, attempt: int, taken: Taken) -> str:
        """Why the step differs, by what each of the two attempts read back when it began."""
        earlier = taken.earlier.attempt if taken.earlier is not None else None
        now = self._training.get(contract.attempt_stem(attempt), {})
        before = self._training.get(contract.attempt_stem(earlier or 0), {})
        return likely_class(before, now, taken.fields)

    def _settle_owed(self) -> bool:
        """Appends what is owed to the ledger. False while the disk refuses it."""
        if not self._owed:
            return True
        try:
            self._ledger.append(self._owed)
        except LedgerFailure as failure:
            self._unsynced = self._unsynced or failure.appended > 0
            del self._owed[: failure.appended]
            self._refused = str(failure)
            return False
        self._owed = []
        self._unsynced = True
        self._refused = ""
        return True

    def _take_audit(self, audit: AuditLine) -> None:
        if audit.epoch < self.epoch:
            return  # receipts read again after a pivot: this audit is in the archive
        rows = [
            sample
            | {
                "step": audit.step,
                "time": audit.time,
                "attempt": audit.attempt,
                "epoch": audit.epoch,
                "arm_shares": audit.arm_shares,
            }
            for sample in audit.samples
        ]
        # A step audited again replaces its audit and everything a left branch audited after it.
        kept = [row for row in self._samples if row["step"] < audit.step]
        self._samples = [*kept, *rows][-self.samples_keep :]
        self._files[self._directory.samples] = _dump(self._samples)

    def _take_evaluation(self, file: _File, line: EvaluationLine) -> None:
        if (file.entry_epoch or file.epoch) < self.epoch:
            return  # receipts read again after a pivot: a branch that was left
        if line.step > self.evaluated_step:
            self.evaluated_step = line.step
            loss = contract.encode_number(line.loss)
            assert loss is not None
            self._records.append(ev.Evaluated(line.step, loss, line.arms))

    def remember_bandit(self, checkpoint: Json) -> None:
        """The bandit as a verified checkpoint holds it: the operator's view in state.json."""
        if checkpoint["epoch"] is not None and checkpoint["epoch"] < self.epoch:
            return  # a pivot's base: its bandit belongs to the policy that was left
        self._show_state({key: checkpoint[key] for key in STATE_FIELDS})

    def begin_epoch(
        self, epoch: int, base_step: int, policy_digest: str, evaluated_step: int
    ) -> None:
        """Samples and state are those of one epoch; what an earlier one left is in its archive.
        Evaluations above `evaluated_step` are not on record yet."""
        self.epoch, self._base_step, self.evaluated_step = epoch, base_step, evaluated_step
        if self.gauge.step > self.history_step:  # a rollback: those were figures of another branch
            self.gauge = Gauge()
            self.gauge.go_on_from(self._ledger.path, self.history_step)
        kept = [row for row in self._samples if row.get("epoch", epoch) >= epoch]
        if len(kept) != len(self._samples):
            self._samples = kept
            self._files[self._directory.samples] = _dump(kept)
        if self._state and self._state.get("epoch") != epoch:
            fresh: Iterable[Any] = (base_step, epoch, policy_digest, None, {}, {})
            self._show_state(dict(zip(STATE_FIELDS, fresh, strict=True)))

    def _show_state(self, state: Json) -> None:
        self._state = state
        self._files[self._directory.state] = _dump(state)

    def store(self, path: Path, content: bytes) -> None:
        """A file that changes rarely, to be written with the next commit."""
        self._files[path] = content

    # --- what the daemon's commit takes along ---

    def take_records(self) -> list[ev.Record]:
        records, self._records = self._records, []
        return records

    def take_unsynced(self) -> tuple[int, int] | None:
        """(last step, verified steps) when the ledger has to be synced, and then no more."""
        if not self._unsynced:
            return None
        self._unsynced = False
        return self.history_step, self.verified_steps

    def take_files(self) -> dict[Path, bytes]:
        files, self._files = self._files, {}
        return files

    def give_back(self, files: Mapping[Path, bytes]) -> None:
        """What a commit could not take yet; newer content of a file wins."""
        self._files = {**files, **self._files}


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"
