"""`supervisor verify`: everything that a run promised, read back from the device and compared.

What may live here: reading a whole run directory and saying what in it is damaged, and where. The
pass over the ledger is in `ledger_proof`, the verdict on one checkpoint in `checkpoint_proof`.

Invariants:
- Verifying takes no lock and changes nothing, so that it may run beside a living run.
- What cannot be read is not proven, and so it is a problem; whether it may be moved is another
  question: only a checkpoint whose bytes are known to be wrong is.
- The journal is the witness. Where it is damaged itself, only what stands before that is believed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from supervisor import checkpoints, config, contract, events as ev, journal
from supervisor.checkpoint_proof import WHOLE, Verdict, promises, prove_checkpoint
from supervisor.contract import DIGESTS_FILE, ContractError, Json, checkpoint_stem
from supervisor.durable import size_of
from supervisor.ledger_proof import (
    Advance,
    Begin,
    LedgerProof,
    Problem,
    bindings_of,
    open_cold,
    prove_ledger,
)
from supervisor.readback import Found
from supervisor.rundir import RunDirectory, lock_holder
from supervisor.state import Durable, fold

SCHEMA_VERSION: Final = 1
_THREADS_MAX: Final = 4  # hashing leaves the interpreter's lock alone
_LOOKS: Final = 20
_LOOK_SECONDS: Final = 0.1
_STATE_FIELDS: Final = ("epoch", "policy_digest", "targets_seen", "bandit", "arms")

T = TypeVar("T")
Condemned = tuple[Found, str]  # a checkpoint whose bytes are known to be wrong, and why


@dataclass(slots=True)
class Report:
    """`problems` empty: everything is proven. `counts` say how much that is."""

    run: str
    directory: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> Json:
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "directory": self.directory,
            "proven": not self.problems,
            "problems": [
                {"file": problem.file, "place": problem.place, "what": problem.what}
                for problem in self.problems
            ],
            "notes": self.notes,
            "counts": self.counts,
            "moved_to": self.moved,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }


def size_bytes(directory: RunDirectory) -> int:
    """About how much `verify` will read, for a progress bar."""
    files = [directory.journal, directory.ledger, *directory.checkpoints.glob("step_*.bin")]
    return sum(map(size_of, files))


def no_progress(_: int) -> None:
    """The progress of a caller that shows none."""


def verify(directory: RunDirectory, advance: Advance = no_progress) -> Report:
    """Proves a run. `advance` is called with the number of bytes read, also from other threads.

    A run that is being supervised, or trained, may be verified: what is half-written at this
    moment is not judged.
    """
    return examine(directory, advance, living=_lives(directory))[0]


def examine(
    directory: RunDirectory, advance: Advance, *, living: bool
) -> tuple[Report, list[Condemned]]:
    """The report, and the checkpoints that are known to be bad. `living`: files may be half-written
    because somebody writes them at this moment."""
    proof = _Proof(directory, advance, living=living)
    return proof.run(), proof.condemned


def _lives(directory: RunDirectory) -> bool:
    locks = (directory.lock, directory.trainer_lock)
    return any(lock_holder(path) is not None for path in locks)


# --- the proof ------------------------------------------------------------------------------------


class _Proof:
    """One examination."""

    def __init__(self, directory: RunDirectory, advance: Advance, *, living: bool) -> None:
        self.directory = directory
        self.living = living
        self.report = Report(directory.run, str(directory.path.resolve()))
        self.condemned: list[Condemned] = []
        self._advance = advance
        self._counting = threading.Lock()
        self._witness = True  # the journal is whole
        self._summaries: dict[int, Json] = {}

    def run(self) -> Report:
        begin = time.monotonic()
        if self.living:
            self.report.notes.append("the run is alive: what is half-written now is not judged")
        lines = self._check_journal()
        records = list(self._records_of(lines))
        durable = fold(records)
        if not self._witness:
            # Whatever it promises may have been withdrawn behind the damage.
            durable = replace(durable, run_id=self._recorded_id() or durable.run_id, imported=True)
            records = [r for r in records if isinstance(r, ev.RunImported | ev.RunForked)]
        self._check_ledger(lines, durable, records)
        self._check_checkpoints(durable, records)
        self._check_stored(records)
        self._check_sidecars()
        self._check_archives()
        self._list_set_aside()
        self.report.seconds = time.monotonic() - begin
        return self.report

    def _say(self, path: Path, place: str, what: str) -> None:
        self.report.problems.append(Problem(self._name(path), place, what))

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.directory.path))

    def _read(self, count: int) -> None:
        with self._counting:
            self.report.bytes += count
            self._advance(count)

    def _content(self, path: Path) -> bytes | None:
        """A small file, whole; None, and a problem, where it cannot be read."""
        try:
            with open_cold(path) as file:
                data = file.read()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            self._say(path, WHOLE, "missing" if missing else f"cannot be read: {error}")
            return None
        self._read(len(data))
        return data

    # --- the journal ---

    def _check_journal(self) -> list[Json]:
        """The records up to the first damage."""
        path = self.directory.journal
        data = self._content(path) or b""
        lines: list[Json] = []
        check, start = "", 0
        while (stop := data.find(b"\n", start)) >= 0:
            number, place = len(lines) + 1, f"bytes {start} to {stop + 1}"
            try:
                record, check = journal.decode_line(data[start:stop], number, check)
            except ValueError as error:
                self._say(path, f"line {number}, {place}", f"{error}; nothing behind it is proven")
                self._witness = False
                break
            lines.append(record)
            start = stop + 1
        else:
            if start < len(data) and not self.living:
                place = f"line {len(lines) + 1}, bytes {start} to {len(data)}"
                self._say(path, place, "torn: no line break ends it (the next start repairs that)")
        self.report.counts["journal_records"] = len(lines)
        return lines

    def _records_of(self, lines: Iterable[Json]) -> Iterator[ev.Record]:
        for line in lines:
            try:
                record = ev.record_from_json(line)
            except ContractError as error:
                self._say(self.directory.journal, f"line {line['seq']}", str(error))
                self._witness = False
                continue
            if record is not None:
                yield record

    def _recorded_id(self) -> str:
        try:
            return config.load(self.directory.run_file).run.id or ""
        except config.ConfigError:
            return ""

    # --- the ledger ---

    def _check_ledger(
        self, lines: Sequence[Json], durable: Durable, records: Sequence[ev.Record]
    ) -> None:
        path, bindings = self.directory.ledger, bindings_of(lines)
        begin = Begin() if self._witness else Begin(imported=contract.INT32_MAX)
        for record in records:
            if isinstance(record, ev.RunImported):
                begin = Begin(imported=record.ledger_entries)
            elif isinstance(record, ev.RunForked) and record.ledger_entries == 0:
                begin = Begin(first_step=record.step + 1)
        try:
            proof = prove_ledger(path, bindings, begin, writing=self.living, advance=self._read)
        except FileNotFoundError:
            proof = LedgerProof()
            if durable.attempt or bindings:
                self._say(path, WHOLE, f"missing; the journal binds it {len(bindings)} times")
        except OSError as error:
            proof = LedgerProof()
            self._say(path, WHOLE, f"cannot be read: {error}")
        if proof.entries and not lines and self._witness:
            what = f"holds no record, so that none of the {proof.entries} ledger entries is proven"
            self._say(self.directory.journal, WHOLE, what)
        self.report.problems += proof.problems
        self.report.notes += proof.notes
        self.report.counts["ledger_entries"] = proof.entries
        self.report.counts["ledger_entries_bound"] = proof.bound
        self.report.counts["ledger_bindings"] = len(bindings)

    # --- checkpoints ---

    def _check_checkpoints(self, durable: Durable, records: Iterable[ev.Record]) -> None:
        promised = promises(records)
        found = checkpoints.find(self.directory.checkpoints)

        def check(one: Found) -> Verdict:
            return prove_checkpoint(
                one,
                promised.get(one.step),
                durable.run_id,
                durable.lineage,
                bare_allowed=durable.imported,
                advance=self._read,
            )

        # Training goes first: beside a living run one thread has to do.
        threads = 1 if self.living else min(_THREADS_MAX, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            verdicts = list(pool.map(check, found))
        present = {one.step for one in found}
        missing = set(promised) - present
        for verdict in verdicts:
            step = verdict.found.step
            if verdict.problems and self.living and not verdict.found.binary.exists():
                missing.add(step)
                continue
            self.report.problems += verdict.problems
            if verdict.condemned:
                self.condemned.append((verdict.found, verdict.condemned))
            if verdict.summary is not None:
                self._summaries[step] = verdict.summary
        if self.living and missing:
            missing = self._still(lambda records: missing & set(promises(records)))
        for step in sorted(missing):
            name = f"{checkpoint_stem(step)}{checkpoints.BINARY}"
            what = "missing; the journal says it is here"
            self._say(self.directory.checkpoints / name, WHOLE, what)
        unknown = sorted(present - set(promised))
        if unknown and self._witness:
            self.report.notes.append(f"checkpoints of steps {unknown} are not on record yet")
        self.report.counts["checkpoints"] = len(found)

    def _still(self, wrong: Callable[[list[ev.Record]], T]) -> T:
        """What is wrong by the journal of this moment, and stays so: a living supervisor may be
        between a file and its record, and has gone on since the journal was read."""
        for look in range(_LOOKS):
            if look:
                time.sleep(_LOOK_SECONDS)
            lines = journal.read(self.directory.journal)[0] if self._witness else []
            found = wrong(list(filter(None, map(ev.record_from_json, lines))))
            if not found:
                break
        return found

    # --- the small files ---

    def _check_stored(self, records: Iterable[ev.Record]) -> None:
        stored = _stored(records)
        for file, expected in sorted(stored.items()):
            path = self.directory.path / file
            data = self._content(path)
            if data is None:
                continue
            what = _differs(data, expected)
            if what and self.living:
                what = self._still(partial(_differs_now, path, file))
            if what:
                self._say(path, f"bytes 0 to {len(data)}", what)
        for path in sorted(self.directory.policies.glob("*.toml")):
            if self._witness and self._name(path) not in stored:
                self.report.notes.append(f"{self._name(path)} is not on record")
        if self.directory.run_file.exists():
            try:
                config.load(self.directory.run_file)
            except config.ConfigError as error:
                for problem in error.problems:
                    what = f"expected {problem.expected}, found {problem.value!r}"
                    self._say(self.directory.run_file, f"key {problem.key}", what)
        self.report.counts["stored_files"] = len(stored)

    def _check_sidecars(self) -> None:
        samples = self._json(self.directory.samples, list)
        for number, row in enumerate(samples or []):
            if not _is_sample(row):
                what = "expected an object with step, prompt and text"
                self._say(self.directory.samples, f"item {number}", what)
        for name, value in (self._json(self.directory.training, dict) or {}).items():
            if contract.parse_attempt_stem(name) is None or not isinstance(value, dict):
                what = "expected attempt-NNNN with an object"
                self._say(self.directory.training, f"key {name!r}", what)
        state = self._json(self.directory.state, dict)
        if state is not None:
            self._check_state(state)

    def _json(self, path: Path, kind: type) -> Any:
        """The content of a sidecar that need not exist; None, and a problem, if it is wrong."""
        data = self._content(path) if path.exists() else None
        if data is None:
            return None
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            place = f"line {error.lineno}, character {error.pos}"
            self._say(path, place, f"not JSON ({error.msg})")
            return None
        if not isinstance(value, kind):
            self._say(path, WHOLE, f"expected a JSON {kind.__name__}, got {type(value).__name__}")
            return None
        return value

    def _check_state(self, state: Json) -> None:
        """Against the manifest of its step, which is the authority."""
        path, step = self.directory.state, state.get("step")
        summary = self._summaries.get(step) if isinstance(step, int) else None
        fresh = not state.get("bandit")
        if summary is not None and fresh and state.get("epoch") != summary["epoch"]:
            summary = None  # a pivot has reset it, and no checkpoint of the new policy is there yet
        if not isinstance(step, int):
            self._say(path, "key 'step'", f"expected an integer, got {step!r}")
        elif summary is None:
            self.report.notes.append(
                f"{path.name} is of step {step}, whose checkpoint is not here to compare with"
            )
        for name in _STATE_FIELDS if isinstance(step, int) else ():
            if name not in state:
                self._say(path, f"key {name!r}", "missing")
            elif summary is not None and state[name] != summary[name]:
                what = f"differs from the manifest of checkpoint {step}"
                self._say(path, f"key {name!r}", what)

    # --- what was set aside ---

    def _check_archives(self) -> None:
        found = sorted((self.directory.path / contract.ARCHIVE).glob("*"))
        temporary = contract.TEMPORARY_PREFIX
        archives = [one for one in found if one.is_dir() and not one.name.startswith(temporary)]
        for archive in archives:
            if (archive / DIGESTS_FILE).exists():
                self._check_archive(archive, self._json(archive / DIGESTS_FILE, dict) or {})
            else:
                self.report.notes.append(f"{self._name(archive)}: no {DIGESTS_FILE}, not proven")
        self.report.counts["archives"] = len(archives)

    def _check_archive(self, archive: Path, digests: Json) -> None:
        for name, expected in sorted(digests.items()):
            if Path(name).name != name:
                self._say(archive / DIGESTS_FILE, f"key {name!r}", "expected the name of a file")
                continue
            data = self._content(archive / name)
            if data is not None and (found := contract.digest(data)) != expected:
                what = f"its SHA-256 is {found}, {DIGESTS_FILE} says {expected}"
                self._say(archive / name, f"bytes 0 to {len(data)}", what)
        for path in sorted(archive.iterdir()):
            if path.name not in digests and path.name != DIGESTS_FILE:
                self._say(path, WHOLE, f"{DIGESTS_FILE} does not list it")

    def _list_set_aside(self) -> None:
        for name in (contract.SUPERSEDED, contract.QUARANTINE):
            binaries = sorted(path.name for path in (self.directory.path / name).glob("*.bin"))
            self.report.counts[name] = len(binaries)
            if binaries:
                self.report.notes.append(f"{name}/ holds {', '.join(binaries)}")


def _is_sample(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    kinds: dict[str, type] = {"step": int, "prompt": str, "text": str}
    return all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def _stored(records: Iterable[ev.Record]) -> dict[str, str]:
    """The SHA-256 of each file that the journal speaks of."""
    return {one.file: one.sha256 for one in records if isinstance(one, ev.FileStored)}


def _differs(data: bytes, expected: str) -> str:
    found = contract.digest(data)
    return "" if found == expected else f"its SHA-256 is {found}, the journal recorded {expected}"


def _differs_now(path: Path, file: str, records: Iterable[ev.Record]) -> str:
    expected = _stored(records).get(file)
    return "" if expected is None else _differs(path.read_bytes(), expected)
