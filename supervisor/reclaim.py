"""What goes when there is no room, and in which order; and how long a branch that was left stays.

What may live here: the choice and the removal of what a run can do without. It blocks on the disk,
so it runs in the helper process. Whether room is needed is decided by `supervisor.space`.

Invariants:
- Nothing but temporaries of dead attempts goes before two checkpoints are proven, and these two,
  everything above them and every pin (a pivot's base, a fork's origin) stay whatever happens.
- A step that is pinned keeps its files in superseded/ too.
- Each `.bin` goes before its manifest; the reason of a quarantine is never removed.
- What has gone is told, also where an error ends the rest.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor import checkpoints
from supervisor.checkpoints import BINARY, MANIFEST, REASON, find, plan_retention, temporaries
from supervisor.contract import (
    CHECKPOINTS,
    QUARANTINE,
    SUPERSEDED,
    TEMPORARY_PREFIX,
    checkpoint_stem,
    parse_checkpoint_stem,
)
from supervisor.durable import fsync_directory
from supervisor.readback import Tick, no_tick

PROVEN_LEAST: Final = 2
_BLOCK_BYTES: Final = 512  # the unit of st_blocks, whatever the file system's own


@dataclass(slots=True)
class Reclaimed:
    """`steps` are checkpoints of the living branch; `names` all other files, relative to the run
    directory."""

    names: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    freed_bytes: int = 0


class Unfinished(OSError):
    """An error has ended a removal; `done` is what had gone by then."""

    def __init__(self, why: str, done: Reclaimed) -> None:
        super().__init__(why)
        self.done = done


@dataclass(frozen=True, slots=True)
class _SetAside:
    """The files of one checkpoint in superseded/ or quarantine/, `.bin` first."""

    step: int
    written_at: float
    files: tuple[Path, ...]


def retain(
    run_directory: Path,
    *,
    keep_last: int,
    keep_every: int,
    keep_superseded: int,
    pins: Collection[int],
    verified_steps: Iterable[int],
    tick: Tick = no_tick,
) -> Reclaimed:
    """Removes the checkpoints that no rule keeps, and what is in superseded/ but for the
    `keep_superseded` that were written last and the pins. Raises Unfinished."""
    done = Reclaimed()
    with _told(done):
        checkpoints.retain(
            run_directory,
            keep_last,
            keep_every,
            pins,
            verified_steps,
            removed=done.steps,
            tick=tick,
        )
        loose = [one for one in _set_aside(run_directory / SUPERSEDED) if one.step not in pins]
        for one in loose[: max(0, len(loose) - keep_superseded)]:
            tick()
            _remove(run_directory, one.files, done)
    return done


def reclaim(
    run_directory: Path,
    wanted_bytes: int,
    *,
    keep_every: int,
    pins: Collection[int],
    verified_steps: Iterable[int],
    living: tuple[int, str] | None,
    tick: Tick = no_tick,
) -> Reclaimed:
    """Removes what the run can do without, the least needed first, until `wanted_bytes` are free
    that were not: temporaries of the dead, superseded/, the `.bin` of what is in quarantine/, then
    checkpoints beyond the last two that are proven, those of `keep_every` last of all. Raises
    Unfinished."""
    done = Reclaimed()
    with _told(done):
        for name in (CHECKPOINTS, QUARANTINE):
            _remove(run_directory, temporaries(run_directory / name, living), done)
        present = [found.step for found in find(run_directory / CHECKPOINTS)]
        proven = sorted(set(verified_steps).intersection(present))
        if len(proven) < PROVEN_LEAST:
            return done
        for files in _expendable(run_directory, proven, keep_every, pins):
            if done.freed_bytes >= wanted_bytes:
                break
            tick()
            _remove(run_directory, files, done)
    return done


@contextmanager
def _told(done: Reclaimed) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unfinished(str(error), done) from error


def _expendable(
    run_directory: Path, proven: list[int], keep_every: int, pins: Collection[int]
) -> Iterator[tuple[Path, ...]]:
    for one in _set_aside(run_directory / SUPERSEDED):
        if one.step not in pins:
            yield one.files
    for one in _set_aside(run_directory / QUARANTINE):
        yield tuple(path for path in one.files if path.suffix == BINARY)
    directory, newest = run_directory / CHECKPOINTS, proven[-1]
    first = plan_retention(proven, PROVEN_LEAST, keep_every, pins, newest)
    last = plan_retention(proven, PROVEN_LEAST, 0, pins, newest)
    for step in (*first, *(step for step in last if step not in first)):
        stem = checkpoint_stem(step)
        yield (directory / (stem + BINARY), directory / (stem + MANIFEST))


def _set_aside(directory: Path) -> list[_SetAside]:
    """What was moved here, in the order in which it was written. Names may have a number behind the
    step: `step_000100.2.bin`. What an operator removes meanwhile is passed over."""
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    found: dict[str, _SetAside] = {}
    for path in paths:  # .bin sorts before .json
        step = parse_checkpoint_stem(path.name.partition(".")[0])
        if step is None or path.suffix not in (BINARY, MANIFEST) or path.name.endswith(REASON):
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            before = found.get(path.stem, _SetAside(step, 0.0, ()))
            written_at = max(before.written_at, status.st_mtime)
            found[path.stem] = _SetAside(step, written_at, (*before.files, path))
    return sorted(found.values(), key=lambda one: (one.written_at, one.step))


def _remove(run_directory: Path, files: Collection[Path], done: Reclaimed) -> None:
    """Each file durably before the next: what a kill leaves is a manifest without its `.bin`."""
    for path in files:
        size_bytes = _freed_by(path)
        try:
            path.unlink()
        except FileNotFoundError:
            continue  # the operator may have been faster
        done.freed_bytes += size_bytes
        if path.parent.name != CHECKPOINTS or path.name.startswith(TEMPORARY_PREFIX):
            done.names.append(str(path.relative_to(run_directory)))
        elif path.suffix == BINARY:
            done.steps.append(parse_checkpoint_stem(path.stem) or 0)
        fsync_directory(path.parent)


def _freed_by(path: Path) -> int:
    """The bytes that come free with this name: none where the file has another one, or is gone, as
    the living trainer's temporaries are at any moment."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return status.st_blocks * _BLOCK_BYTES if status.st_nlink == 1 else 0
