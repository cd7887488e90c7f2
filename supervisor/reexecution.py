"""Executing a stretch of a run again in a scratch directory, and comparing all that it recorded.

What may live here: the plan of a re-execution, the scratch run with its trainer, the comparison of
receipts with the canonical history and of checkpoints with those that the run still has.

Invariants:
- Nothing of the run is written; its checkpoints are linked or copied, never opened for writing.
- The first step that differs ends it: whatever follows is made of other numbers.
- However it ends, the trainer is ended first and the scratch directory is removed.
- What decides no bit is not compared: where the run is, when somebody looked (audits, requests),
  how long a step took, what the machine was (that explains a difference, and is reported).
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from supervisor import config, contract, events as ev
from supervisor.attendant import LOOK_INTERVAL_SECONDS, Attendant
from supervisor.checkpoints import BINARY, MANIFEST, find
from supervisor.comparison import Part, compare_checkpoints
from supervisor.config import Settings
from supervisor.contract import (
    Entry,
    EnvironmentLine,
    ExitLine,
    Json,
    Manifest,
    checkpoint_stem,
    differing_fields,
)
from supervisor.durable import replace_file
from supervisor.journal import read
from supervisor.ledger import canonical, read_entries
from supervisor.log import Log
from supervisor.readback import Damaged, verify
from supervisor.replay import environment_changes, likely_class
from supervisor.rundir import RunDirectory, RunError
from supervisor.sidecars import read_training
from supervisor.state import Durable, fold

LOOK_MILLISECONDS: Final = 50
ATTEMPT: Final = 1


class TrainerEnded(Exception):
    """The trainer ended before the stretch was through, and not because of a difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that differs. `where` is receipt or checkpoint; `likely` is the class."""

    step: int
    where: str
    parts: tuple[Part, ...]
    likely: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is executed again: the steps after `start` up to `stop`, from the checkpoint `base`
    (None: from the beginning), compared with `entries` and with `checkpoints`."""

    directory: RunDirectory
    settings: Settings
    start: int
    stop: int
    epoch: int
    entries: Mapping[int, Entry]
    checkpoints: tuple[int, ...]
    base: Manifest | None
    environments: Json


@dataclass(slots=True)
class Report:
    """What came of it. `environment_changes` lists why exactness is not claimed, if so."""

    run: str
    start: int
    stop: int
    steps_compared: int = 0
    checkpoints_compared: list[int] = field(default_factory=list)
    environment_changes: dict[str, tuple[object, object]] = field(default_factory=dict)
    difference: Difference | None = None
    seconds: float = 0.0

    def to_json(self) -> Json:
        fields = asdict(self)
        return {
            "run": fields.pop("run"),
            "from_step": fields.pop("start"),
            "to_step": fields.pop("stop"),
            "equal": self.difference is None,
            **fields,
        }


# --- the plan -------------------------------------------------------------------------------------


def plan(path: Path, start: int, stop: int | None) -> Plan:
    """Everything that can be said before a trainer starts. Raises RunError with what to do."""
    settings = config.load(path / contract.RUN_FILE)
    if settings.trainer.command is not None:
        raise RunError(
            f"{path}: its trainer is {settings.trainer.command[0]!r}; only a run of the trainer"
            " that comes with the supervisor can be executed again"
        )
    directory = RunDirectory(path, settings.run.name)
    entries = {entry.step: entry for entry in canonical(read_entries(directory.ledger)[0])}
    stop = _check_stretch(directory, entries, start, stop)
    epochs = {step: entries[step].epoch or 1 for step in range(start + 1, stop + 1)}
    epoch = epochs[start + 1]
    changed = next((step for step in epochs if epochs[step] != epoch), None)
    if changed is not None:
        raise RunError(
            f"{path}: the policy changed with step {changed}; execute --to {changed - 1} and"
            f" --from {changed - 1} one after the other"
        )
    return Plan(
        directory=directory,
        settings=_settings_under(epoch, settings, _durable(directory)),
        start=start,
        stop=stop,
        epoch=epoch,
        entries={step: entries[step] for step in epochs},
        checkpoints=tuple(
            found.step
            for found in find(directory.checkpoints)
            if start < found.step <= stop and found.manifest is not None
        ),
        base=_base(directory, start) if start else None,
        environments=read_training(directory.training),
    )


def _settings_under(epoch: int, newest: Settings, durable: Durable) -> Settings:
    """The settings of that epoch as the journal has them. Raises RunError where it knows none."""
    found = next((one for one in durable.epochs if one.number == epoch), None)
    if found is None:
        raise RunError(f"the journal of {durable.run} has no epoch {epoch}, but the ledger has")
    return config.parse_toml(found.settings, contract.JOURNAL_FILE) if found.settings else newest


def _durable(directory: RunDirectory) -> Durable:
    return fold(filter(None, map(ev.record_from_json, read(directory.journal)[0])))


def _check_stretch(
    directory: RunDirectory, entries: Mapping[int, Entry], start: int, stop: int | None
) -> int:
    last = max(entries, default=0)
    stop = last if stop is None else stop
    if not 0 <= start < stop <= last:
        raise RunError(
            f"{directory.path}: --from {start} --to {stop}: expected two steps in ascending order"
            f" of the history, which goes from 0 to {last}"
        )
    missing = next((step for step in range(start + 1, stop + 1) if step not in entries), None)
    if missing is not None:
        raise RunError(f"{directory.ledger}: no entry of step {missing}, so nothing to compare")
    return stop


def _base(directory: RunDirectory, step: int) -> Manifest:
    """The manifest of the checkpoint to begin from, read back whole. Raises RunError."""
    durable = _durable(directory)
    found = {one.step: one for one in find(directory.checkpoints)}
    if step not in found:
        listed = ", ".join(map(str, found)) or "none"
        raise RunError(
            f"{directory.path}: no checkpoint of step {step} to begin from; there are: 0 (the"
            f" beginning), {listed}"
        )
    try:
        verified = verify(found[step], durable.run_id, durable.lineage)
    except Damaged as damage:
        raise RunError(f"{directory.path}: {damage}") from damage
    assert verified.manifest is not None, "a bare checkpoint was not allowed"
    return verified.manifest


# --- the execution --------------------------------------------------------------------------------


def execute(
    plan: Plan,
    environment: Mapping[str, str],
    *,
    scratch: Path | None = None,
    tick: Callable[[int], None] = lambda step: None,
) -> Report:
    """Executes the plan in a directory below `scratch`, by default beside the run's; it is removed.

    `tick` hears of each step that was compared. Raises TrainerEnded; RunError where the scratch
    directory cannot be used.
    """
    began = time.monotonic()
    report = Report(plan.settings.run.name, plan.start, plan.stop)
    with _scratch_run(plan, scratch or plan.directory.path.resolve().parent) as directory:
        comparison = Comparison(plan, directory, report, tick)
        with _trainer(plan, directory, environment) as attendant:
            _watch(attendant, comparison)
            if report.difference is None and not comparison.complete:
                raise TrainerEnded(comparison.last_words() or attendant.last_words(ATTEMPT))
    report.seconds = time.monotonic() - began
    return report


def _watch(attendant: Attendant, comparison: Comparison) -> None:
    """Compares what is there until the trainer has ended or something differs."""
    descriptor = attendant.fileno()
    assert descriptor is not None, "the trainer was just started"
    end = select.poll()
    end.register(descriptor, select.POLLIN)
    ended = False
    while not ended:
        # Once more after the end: the last receipts were written before it.
        ended = bool(end.poll(LOOK_MILLISECONDS))
        if comparison.differs():
            return


@contextmanager
def _scratch_run(plan: Plan, parent: Path) -> Iterator[RunDirectory]:
    """A run directory with the settings and the base of the plan, removed in the end."""
    path = Path(tempfile.mkdtemp(prefix=f".replay-{plan.settings.run.name}-", dir=parent))
    try:
        directory = RunDirectory(path, plan.settings.run.name)
        directory.create()
        tree = plan.settings.tree()
        tree["run"]["directory"] = str(path)
        tree["training"]["steps"] = plan.stop
        settings = config.parse(tree, str(plan.directory.run_file))
        replace_file(directory.run_file, config.dump(settings).encode())
        if plan.base is not None:
            for ending in (BINARY, MANIFEST):
                _link(plan.directory.checkpoints, directory.checkpoints, plan.start, ending)
        yield directory
    finally:
        shutil.rmtree(path)


def _link(source: Path, target: Path, step: int, ending: str) -> None:
    name = checkpoint_stem(step) + ending
    try:
        os.link(source / name, target / name)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source / name, target / name)


@contextmanager
def _trainer(
    plan: Plan, directory: RunDirectory, environment: Mapping[str, str]
) -> Iterator[Attendant]:
    """The trainer at work in `directory`; ended, whatever happens, before this is left."""
    extra = [f"--save-at={step}" for step in plan.checkpoints]
    command = [sys.executable, "-m", "trainer", "--run", str(directory.path), *extra]
    attendant = Attendant(directory, Log(directory.supervisor_log))
    try:
        spawn = ev.Spawn(ATTEMPT, secrets.token_hex(8), plan.start, plan.epoch)
        started = attendant.spawn(spawn, command, environment, Path.cwd())
        if isinstance(started, ev.SpawnFailed):
            raise TrainerEnded(f"it could not be started: {started.why}")
        yield attendant
    finally:
        with _uninterrupted():
            _end(attendant)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not keep the first from being carried out."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(attendant: Attendant) -> None:
    if attendant.alive:
        attendant.kill()
        attendant.begin_reaping()
        while attendant.end_of_tree(time.monotonic()) is None:
            time.sleep(LOOK_INTERVAL_SECONDS / 10)
        attendant.bury()
    attendant.close()


# --- the comparison -------------------------------------------------------------------------------


class Comparison:
    """What the scratch run has written so far, against what the run recorded."""

    def __init__(
        self, plan: Plan, scratch: RunDirectory, report: Report, tick: Callable[[int], None]
    ) -> None:
        self._plan = plan
        self._scratch = scratch
        self._report = report
        self._tick = tick
        self._receipts = scratch.receipts / f"{contract.attempt_stem(ATTEMPT)}.jsonl"
        self._offset = 0
        self._rest = b""
        self._environment: Json = {}
        self._exit: ExitLine | None = None
        self._pending = list(plan.checkpoints)

    @property
    def complete(self) -> bool:
        wanted = self._plan.stop - self._plan.start
        return self._report.steps_compared == wanted and not self._pending

    def last_words(self) -> str:
        return "" if self._exit is None else f"{self._exit.why}: {self._exit.message}"

    def differs(self) -> bool:
        """Compares what is new; True once something differs."""
        for line in self._new_lines():
            receipt = contract.parse_receipt(line, self._receipts.name)
            match receipt:
                case Entry():
                    if self._differs_in_step(receipt):
                        return True
                case EnvironmentLine():
                    self._environment = receipt.environment
                    first = self._plan.entries[self._plan.start + 1]
                    self._report.environment_changes = environment_changes(
                        self._environment_of(first.attempt, self._plan.base), self._environment
                    )
                case ExitLine():
                    self._exit = receipt
        return self._differs_in_checkpoint()

    def _new_lines(self) -> list[bytes]:
        try:
            with self._receipts.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line.strip(b"\0")]

    def _differs_in_step(self, now: Entry) -> bool:
        recorded = self._plan.entries[now.step]
        parts = tuple(
            Part(name, _shown(getattr(recorded, name)), _shown(getattr(now, name)))
            for name in differing_fields(recorded, now)
            if getattr(recorded, name) is not None  # a history that came from elsewhere has less
        )
        if parts:
            before = self._environment_of(recorded.attempt, self._plan.base)
            self._found(now.step, "receipt", parts, before)
            return True
        self._report.steps_compared += 1
        self._tick(now.step)
        return False

    def _differs_in_checkpoint(self) -> bool:
        while self._pending:
            step = self._pending[0]
            binary = self._scratch.checkpoints / (checkpoint_stem(step) + BINARY)
            if not binary.exists():
                return False
            # Where retention was faster there is nothing to compare any more.
            with suppress(FileNotFoundError):
                if self._differs_at(step):
                    return True
                self._report.checkpoints_compared.append(step)
            binary.unlink()
            binary.with_suffix(MANIFEST).unlink()
            del self._pending[0]
        return False

    def _differs_at(self, step: int) -> bool:
        directories = (self._plan.directory.checkpoints, self._scratch.checkpoints)
        recorded, parts = compare_checkpoints(step, *directories)
        if parts:
            before = self._environment_of(recorded.attempt, recorded)
            self._found(step, "checkpoint", tuple(parts), before)
        return bool(parts)

    def _found(self, step: int, where: str, parts: tuple[Part, ...], before: Json) -> None:
        likely = likely_class(before, self._environment, [part.name for part in parts])
        self._report.difference = Difference(step, where, parts, likely)

    def _environment_of(self, attempt: int | None, manifest: Manifest | None) -> Json:
        """What that attempt read back: by its own line, else by a checkpoint."""
        found: Json = self._plan.environments.get(contract.attempt_stem(attempt or 0), {})
        return found or (manifest.state["environment"] if manifest is not None else {})


def _shown(value: float | str | None) -> float | str | None:
    return contract.encode_number(value) if isinstance(value, float) else value
