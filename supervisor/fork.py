"""A new run out of a checkpoint of another: its history begins with a copy of the other's.

What may live here: the steps of a fork, and what the new run records about where it comes from.

Invariants:
- The parent loses nothing and gains one pin, which is durable before a byte is copied: retention
  can not remove what is being copied, nor what the fork was made from.
- The new run exists as a whole or not at all: it is built in a directory beside its place, synced,
  proven, and renamed.
- Its ledger is the parent's canonical history up to the fork, entry by entry, and nothing else.
- It goes on as the parent did after that step: under the epoch that owned the next one, with the
  earlier ones on record as they were.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import client, config, contract, events as ev
from supervisor.checkpoints import BINARY, MANIFEST, find
from supervisor.config import Settings
from supervisor.contract import Entry, Json, Manifest, checkpoint_stem, digest
from supervisor.durable import copy_file, fsync_directory, replace_file
from supervisor.journal import Journal, read
from supervisor.ledger import Ledger, canonical, read_entries
from supervisor.readback import Damaged, verify
from supervisor.rundir import LockHeld, RunDirectory, RunError, take_lock
from supervisor.state import Durable, Epoch, fold

PIN_SECONDS: Final = 30.0
TEMPORARY_PREFIX: Final = ".tmp-fork-"


@dataclass(frozen=True, slots=True)
class Forked:
    """The new run. `sha256` is that of the ledger's prefix of `entries` entries."""

    directory: Path
    run: str
    run_id: str
    parent: str
    step: int
    entries: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Parent:
    directory: RunDirectory
    settings: Settings
    durable: Durable


def fork(parent: Path, step: int, target: Path) -> Forked:
    """Makes the run `target` from the checkpoint of `step` of the run in `parent`.

    The new run has the name of its directory, an id of its own, and the settings of the parent.
    Raises RunError, before anything is written, where that cannot be; OSError for the disk.
    """
    origin = _read_parent(parent)
    settings = _settings(origin, step, target)
    history = _history(origin, step)
    base = _proven(origin.directory.checkpoints, step, origin.durable)
    if os.path.lexists(target):
        raise RunError(f"{target}: exists already; give the new run another name")
    _pin(origin, step, f"fork {settings.run.name} ({settings.run.id})")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(
        tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{target.name}-", dir=target.parent)
    )
    try:
        directory = RunDirectory(temporary, settings.run.name)
        made = _build(origin, base, history, settings, directory)
        fsync_directory(temporary)
        _rename(temporary, target)
    except BaseException:  # an interrupt too: nothing half-made stays, and it goes on its way
        shutil.rmtree(temporary)
        raise
    fsync_directory(target.parent)
    return made


def _rename(temporary: Path, target: Path) -> None:
    if os.path.lexists(target):  # since we looked; rename would take an empty directory's place
        raise RunError(f"{target}: somebody else has made it meanwhile")
    os.rename(temporary, target)


# --- the parent -----------------------------------------------------------------------------------


def _read_parent(path: Path) -> _Parent:
    settings = config.load(path / contract.RUN_FILE)
    directory = RunDirectory(path, settings.run.name)
    durable = fold(filter(None, map(ev.record_from_json, read(directory.journal)[0])))
    return _Parent(directory, settings, durable)


def _settings(origin: _Parent, step: int, target: Path) -> Settings:
    """Those under which the parent made the step after `step`, and its newest target."""
    owner, _ = origin.durable.owner(step)
    run = {"name": target.name, "directory": str(target), "id": uuid.uuid4().hex}
    return _moved(_of_epoch(owner, origin.settings), run, origin.settings.training.steps)


def _of_epoch(epoch: Epoch, newest: Settings) -> Settings:
    return config.parse_toml(epoch.settings, contract.JOURNAL_FILE) if epoch.settings else newest


def _moved(settings: Settings, run: Json, steps: int) -> Settings:
    tree = settings.tree()
    tree["run"] |= run
    tree["training"]["steps"] = steps
    try:
        return config.parse(tree, "the new run")
    except config.ConfigError as error:
        raise RunError(str(error)) from error


def _history(origin: _Parent, step: int) -> list[Entry]:
    """The canonical entries up to the fork, which must be all of them."""
    entries = canonical(read_entries(origin.directory.ledger)[0])
    history = [entry for entry in entries if entry.step <= step]
    if [entry.step for entry in history] != list(range(1, step + 1)):
        raise RunError(
            f"{origin.directory.ledger}: has no unbroken history up to step {step}; it has"
            f" {len(history)} entries up to there"
        )
    return history


def _proven(directory: Path, step: int, durable: Durable) -> Manifest:
    """The manifest of a checkpoint that was read back whole. Raises RunError."""
    found = {one.step: one for one in find(directory)}
    if step not in found:
        listed = ", ".join(map(str, found)) or "none"
        raise RunError(f"{directory}: no checkpoint of step {step}; there are: {listed}")
    try:
        verified = verify(found[step], durable.run_id, durable.lineage)
    except Damaged as damage:
        raise RunError(f"{directory}: {damage}") from damage
    assert verified.manifest is not None, "a bare checkpoint was not allowed"
    return verified.manifest


def _pin(origin: _Parent, step: int, why: str) -> None:
    """By the parent's supervisor where one is alive, else in its place. Raises RunError."""
    path = origin.directory.path
    try:
        answer = client.ask(
            path,
            "pin",
            id=client.new_request_id(),
            timeout_seconds=PIN_SECONDS,
            step=step,
            why=why,
        )
    except client.NoSupervisor:
        _pin_unsupervised(origin.directory, step, why)
    except client.DeadlinePassed as error:
        raise RunError(f"{path}: the checkpoint could not be pinned: {error}") from error
    else:
        if answer.outcome != "done":
            raise RunError(f"{path}: the checkpoint could not be pinned: {answer.why}")


def _pin_unsupervised(directory: RunDirectory, step: int, why: str) -> None:
    try:
        lock_fd = take_lock(directory)
    except LockHeld as held:
        raise RunError(f"{held}, just now; ask again") from held
    try:
        journal, records = Journal.open(directory.journal)
        with closing(journal):
            if step not in fold(filter(None, map(ev.record_from_json, records))).pins:
                journal.append([ev.record_to_json(ev.CheckpointPinned(step, why))], time.time())
                journal.sync()
    finally:
        os.close(lock_fd)


# --- the new run ----------------------------------------------------------------------------------


def _build(
    origin: _Parent,
    base: Manifest,
    history: list[Entry],
    settings: Settings,
    directory: RunDirectory,
) -> Forked:
    directory.create()
    replace_file(directory.run_file, config.dump(settings).encode())
    for epoch in _epochs(origin, base.step):
        policy = f"{epoch.number:04d}.toml"
        replace_file(directory.policies / policy, (origin.directory.policies / policy).read_bytes())
    if origin.directory.training.exists():
        # What the attempts of the copied history ran on: a later difference is explained by it.
        replace_file(directory.training, origin.directory.training.read_bytes())
    for ending in (BINARY, MANIFEST):
        name = checkpoint_stem(base.step) + ending
        copy_file(origin.directory.checkpoints / name, directory.checkpoints / name)
    fsync_directory(directory.checkpoints)
    lineage = _lineage(origin.durable, base.step)
    _proven(
        directory.checkpoints, base.step, Durable(run_id=settings.run.id or "", lineage=lineage)
    )
    entries, sha256 = _write_ledger(directory.ledger, history)
    made = Forked(
        directory=Path(settings.run.directory),
        run=settings.run.name,
        run_id=settings.run.id or "",
        parent=origin.durable.run_id,
        step=base.step,
        entries=entries,
        sha256=sha256,
    )
    _write_journal(origin, base, settings, directory, made, lineage)
    return made


def _lineage(parent: Durable, step: int) -> tuple[tuple[str, int], ...]:
    """Whose checkpoints the new run may build on, and up to which step: the parent's ancestors and
    the parent itself, none of them beyond the fork."""
    ancestors = tuple((run_id, min(last, step)) for run_id, last in parent.lineage)
    return (*ancestors, (parent.run_id, step))


def _write_ledger(path: Path, history: list[Entry]) -> tuple[int, str]:
    with closing(Ledger.open(path)) as ledger:
        ledger.append(history)
        ledger.sync()
        return ledger.binding(history[-1].step)


def _write_journal(
    origin: _Parent,
    base: Manifest,
    settings: Settings,
    directory: RunDirectory,
    made: Forked,
    lineage: tuple[tuple[str, int], ...],
) -> None:
    binding: Json = {"ledger_entries": made.entries, "ledger_sha256": made.sha256}
    committed = ev.CheckpointCommitted(
        base.step, base.attempt, base.reason, list(base.requests), base.binary_digest
    )
    forked = ev.RunForked(
        parent_directory=str(origin.directory.path.resolve()),
        lineage=[list(one) for one in lineage],
        step=base.step,
        attempt=origin.durable.attempt,
        ledger_entries=made.entries,
        ledger_sha256=made.sha256,
    )
    created, *switched = _begun(origin, base.step, settings)
    lines = [
        *map(ev.record_to_json, (created, forked, *switched)),
        ev.record_to_json(committed) | binding,
        *map(ev.record_to_json, _stored(directory)),
    ]
    journal, _ = Journal.open(directory.journal)
    with closing(journal):
        journal.append(lines, time.time())
        journal.sync()


def _epochs(origin: _Parent, step: int) -> tuple[Epoch, ...]:
    """Those that had begun when the one began that owned the step after `step`: they are numbered
    from 1, so they stand in this order."""
    owner, _ = origin.durable.owner(step)
    return origin.durable.epochs[: owner.number]


def _begun(origin: _Parent, step: int, settings: Settings) -> Iterator[ev.Record]:
    """How the run and each of its epochs began, with the place and the name of the new run."""
    run = settings.run.model_dump(mode="json")
    for epoch in _epochs(origin, step):
        theirs = _moved(_of_epoch(epoch, origin.settings), run, settings.training.steps)
        policy_digest = config.policy_digest(theirs)
        policy = epoch.policy or config.dump_policy(theirs)
        if epoch.number == 1:
            assert settings.run.id is not None
            yield ev.RunCreated(
                settings.run.id,
                settings.run.name,
                settings.training.steps,
                policy_digest,
                config.dump(theirs),
                policy,
            )
        else:
            yield ev.PolicySwitched(
                request=epoch.request,
                epoch=epoch.number,
                parent=epoch.parent,
                base_step=epoch.base_step,
                policy=policy,
                settings=config.dump(theirs),
                policy_digest=policy_digest,
                archive="",
                reason=f"a fork of {origin.settings.run.name} took it over",
            )


def _stored(directory: RunDirectory) -> Iterator[ev.FileStored]:
    for path in (directory.run_file, *sorted(directory.policies.glob("*.toml"))):
        yield ev.FileStored(str(path.relative_to(directory.path)), digest(path.read_bytes()))
