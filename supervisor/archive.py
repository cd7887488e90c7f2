"""What a pivot writes to disk: the archive of the old policy, the new policy, and afterwards the
files that carry the epoch.

What may live here: the file side of a pivot, run by the worker thread. Whether and when is decided
in `pivoting`; the commit itself is a record in the journal.

Invariants:
- An archive appears whole, by one rename, before the commit. What has no PolicySwitched on record
  is a leftover and is removed at the next start.
- The ledger is never touched: the archive only notes how long it was and its digest.
- run.toml and the sidecars of an epoch are a function of the journal and can be made again.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import orjson

from supervisor import contract, events as ev
from supervisor.contract import Json, digest
from supervisor.durable import fsync_directory, replace_file
from supervisor.ledger import Ledger
from supervisor.recorder import Recorder
from supervisor.rundir import RunDirectory
from supervisor.state import Durable
from supervisor.worker import Job, Outcome

PIVOT_FILE: Final = "pivot.json"
ARCHIVE_PREFIX: Final = "pivot-"
_EPOCH_FILE: Final = re.compile(r"([0-9]{4,})(?:\.run)?\.toml")


def archive_name(epoch: int, base_step: int) -> str:
    return f"{ARCHIVE_PREFIX}{epoch:04d}-{contract.checkpoint_stem(base_step)}"


def policy_name(epoch: int) -> str:
    return f"{epoch:04d}.toml"


def write_archive(
    directory: RunDirectory, ledger: Ledger, effect: ev.Archive, new_epoch: int
) -> str:
    """Copies samples, state and policy, notes the ledger's length and digest and the reason, and
    stores the new policy. Returns the archive's name. Raises OSError; then nothing is in place."""
    name = archive_name(effect.epoch, effect.base_step)
    archives = directory.path / contract.ARCHIVE
    _make_places(directory)
    temporary = archives / f"{contract.TEMPORARY_PREFIX}{name}"
    _remove(temporary)
    temporary.mkdir(mode=0o700)
    sources = [directory.samples, directory.state, directory.policies / policy_name(effect.epoch)]
    digests: Json = {}
    for source in sources:
        if source.exists():
            data = source.read_bytes()
            replace_file(temporary / source.name, data)
            digests[source.name] = digest(data)
    entries, sha256 = (0, "") if ledger.last is None else ledger.binding(ledger.last.step)
    told = orjson.dumps(
        {
            "epoch": effect.epoch,
            "base_step": effect.base_step,
            "request": effect.pivot.request,
            "reason": effect.pivot.reason,
            "ledger_entries": entries,
            "ledger_sha256": sha256,
        },
        option=orjson.OPT_INDENT_2,
    )
    replace_file(temporary / PIVOT_FILE, told + b"\n")
    digests[PIVOT_FILE] = digest(told + b"\n")
    replace_file(
        temporary / contract.DIGESTS_FILE, orjson.dumps(digests, option=orjson.OPT_INDENT_2) + b"\n"
    )
    fsync_directory(temporary)
    _remove(archives / name)
    os.rename(temporary, archives / name)
    fsync_directory(archives)
    replace_file(directory.policies / policy_name(new_epoch), effect.pivot.policy.encode())
    return name


def sweep(directory: RunDirectory, archives: Iterable[str], epochs: int) -> None:
    """Removes every archive and policy that no committed pivot speaks of, and what a kill left of
    files that were being replaced. What has another name is somebody else's."""
    for path in directory.path.glob(f"{contract.TEMPORARY_PREFIX}*"):
        path.unlink()
    _make_places(directory)
    known = set(archives)
    for path in (directory.path / contract.ARCHIVE).iterdir():
        ours = path.name.startswith((ARCHIVE_PREFIX, contract.TEMPORARY_PREFIX))
        if ours and path.name not in known:
            _remove(path)
    for path in directory.policies.iterdir():
        named = _EPOCH_FILE.fullmatch(path.name)
        left = named is not None and int(named[1]) > epochs
        if left or path.name.startswith(contract.TEMPORARY_PREFIX):
            path.unlink()


def _make_places(directory: RunDirectory) -> None:
    """An operator who wanted room may have removed them."""
    for path in (directory.path / contract.ARCHIVE, directory.policies):
        path.mkdir(mode=0o700, exist_ok=True)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
        fsync_directory(path.parent)


def epoch_files(durable: Durable) -> Iterator[tuple[str, str]]:
    """Every file that carries an epoch, by its name in the run directory, with its content."""
    for epoch in durable.epochs:
        if epoch.policy:
            yield f"{contract.POLICIES}/{policy_name(epoch.number)}", epoch.policy
        if epoch.settings and epoch.number != durable.epoch:
            yield settings_name(epoch.number), epoch.settings
    current = durable.epochs[-1].settings
    if current:
        yield contract.RUN_FILE, current


def settings_name(epoch: int) -> str:
    """The effective settings of an epoch that no longer rules, for a fallback below its end."""
    return f"{contract.POLICIES}/{epoch:04d}.run.toml"


class EpochFiles:
    """The daemon's hand on these files. `submit` gives a job to the worker and its outcome to a
    callback; `emit` takes an event, `alarm` a name and a detail (empty: all is well)."""

    def __init__(
        self,
        directory: RunDirectory,
        ledger: Ledger,
        recorder: Recorder,
        *,
        submit: Callable[[Job, Callable[[Outcome], None]], None],
        emit: Callable[[ev.Event], None],
        alarm: Callable[[str, str], None],
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._recorder = recorder
        self._submit = submit
        self._emit = emit
        self._alarm = alarm

    def archive(self, effect: ev.Archive, new_epoch: int) -> None:
        sidecars = self._recorder.take_files()  # the selection has just brought one up to date

        def job() -> str:
            for path, content in sidecars.items():
                replace_file(path, content)
            return write_archive(self._directory, self._ledger, effect, new_epoch)

        def done(outcome: Outcome) -> None:
            problem = ""
            if outcome.error is not None:
                self._recorder.give_back(sidecars)
                problem = f"the archive could not be written: {outcome.error}"
            name = outcome.result or ""
            self._emit(ev.Archived(time.monotonic(), effect.base_step, name, problem))

        self._submit(job, done)

    def sweep(self, durable: Durable) -> None:
        names = [epoch.archive for epoch in durable.epochs if epoch.archive]

        def job() -> None:
            sweep(self._directory, names, len(durable.epochs))

        def done(outcome: Outcome) -> None:
            self._alarm("sweep", str(outcome.error) if outcome.error else "")

        self._submit(job, done)

    def regenerate(self, durable: Durable) -> list[ev.FileStored]:
        """run.toml, the policies and the sidecars as the journal says they are, all of which a
        crash may have left as they were before the commit; what is new to the record."""
        ruling = durable.epochs[-1]
        self._recorder.begin_epoch(
            ruling.number, ruling.base_step, ruling.policy_digest, durable.evaluated_step
        )
        return self.refresh(durable)

    def refresh(self, durable: Durable) -> list[ev.FileStored]:
        """run.toml and the policies as the journal says they are; what is new to the record."""
        on_record = dict(durable.stored)
        stored = []
        for name, text in epoch_files(durable):
            content = text.encode()
            path = self._directory.path / name
            sha256 = digest(content)
            if on_record.get(name) != sha256:
                stored.append(ev.FileStored(name, sha256))
            if not _holds(path, content):
                self._recorder.store(path, content)
        return stored


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False  # not there, or not to be read: it is written anew
