"""File operations on the checkpoints of one run: find, verify, select, set aside, retain.

What may live here: whatever lists, reads, moves or removes a checkpoint, and the rules that say
which. All of it blocks on the disk, so it runs in the helper process (`supervisor.verifier`), or
in a command that has no loop to keep alive.

Invariants:
- The `.bin` is the commit of a checkpoint: published last, moved and removed first. A manifest
  alone is a leftover and never a checkpoint.
- Order is by number. Nothing here compares names as text.
- Nothing is overwritten: what is moved gets a name that is free, what is removed was either a
  temporary, an orphaned manifest, or out of the reach of every retention rule.
- There is one writer at a time: the helper holds a lock while it lives (`supervisor.verifier`).
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.contract import (
    CHECKPOINTS,
    QUARANTINE,
    SUPERSEDED,
    TEMPORARY_PREFIX,
    canonical,
    checkpoint_stem,
    parse_checkpoint_stem,
    temporary_name,
)
from supervisor.durable import NO_ROOM, fsync_directory, replace_file
from supervisor.readback import Damaged, Found, Lineage, Tick, Verified, no_tick, verify

BINARY: Final = ".bin"
MANIFEST: Final = ".json"
REASON: Final = ".reason.json"


class NoSpace(OSError):
    """The file system cannot hold what the run is about to write."""

    def __init__(self, directory: Path, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            errno.ENOSPC,
            f"{directory}: {needed_bytes} bytes are needed for checkpoints and {available_bytes}"
            " are available; free some space, keep fewer checkpoints or move the run",
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


@dataclass(frozen=True, slots=True)
class Rejected:
    """`moved_to` is the new place of the `.bin`, relative to the run directory."""

    step: int
    reason: str
    moved_to: str


@dataclass(frozen=True, slots=True)
class Selection:
    """`chosen` None: the run has no valid checkpoint. `rejected` newest first. `present` are the
    steps of all checkpoints that were there to begin with, whatever the ceiling."""

    chosen: Verified | None
    rejected: tuple[Rejected, ...]
    present: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """`moved_to` is the new place of the first member, relative to the run directory."""

    step: int
    moved_to: str


# --- find ----------------------------------------------------------------------------------------


def find(directory: Path) -> list[Found]:
    """The committed checkpoints in a directory, oldest first; empty where there is none.

    Only regular files under exactly the names that we write count. Directories, links, other
    paddings, temporaries and foreign files are passed over, whatever they are called.
    """
    members = _members(directory, regular_only=True)
    return [
        Found(
            step=step,
            binary=directory / (checkpoint_stem(step) + BINARY),
            manifest=(
                directory / (checkpoint_stem(step) + MANIFEST) if MANIFEST in endings else None
            ),
        )
        for step, endings in sorted(members.items())
        if BINARY in endings
    ]


def _members(directory: Path, *, regular_only: bool) -> dict[int, set[str]]:
    """Step -> which of `.bin` and `.json` exist under a checkpoint's name."""
    members: dict[int, set[str]] = {}
    if not directory.exists():
        return members
    with os.scandir(directory) as entries:
        for entry in entries:
            stem, ending = os.path.splitext(entry.name)
            step = parse_checkpoint_stem(stem)
            if step is None or ending not in (BINARY, MANIFEST):
                continue
            if regular_only and not entry.is_file(follow_symlinks=False):
                continue
            members.setdefault(step, set()).add(ending)
    return members


# --- select and set aside ------------------------------------------------------------------------


def select(
    run_directory: Path,
    run_id: str,
    lineage: Lineage = (),
    *,
    time: float,
    ceiling: int | None = None,
    bare_allowed: bool = False,
    tick: Tick = no_tick,
) -> Selection:
    """The newest checkpoint that verifies, at most at step `ceiling`; worse ones are set aside.

    Every newer one that is damaged moves to quarantine/ with the reason and `time` (UTC seconds).
    Raises OSError where a failure says nothing about a checkpoint; then nothing was decided.
    """
    rejected: list[Rejected] = []
    there = find(run_directory / CHECKPOINTS)
    present = tuple(found.step for found in there)
    for found in reversed(there):
        if ceiling is not None and found.step > ceiling:
            continue
        try:
            chosen = verify(found, run_id, lineage, bare_allowed=bare_allowed, tick=tick)
        except Damaged as damage:
            moved_to = quarantine(run_directory, found, damage.reason, time=time)
            rejected.append(Rejected(found.step, damage.reason, moved_to))
        else:
            return Selection(chosen, tuple(rejected), present)
    return Selection(None, tuple(rejected), present)


def quarantine(run_directory: Path, found: Found, reason: str, *, time: float) -> str:
    """Moves both members to quarantine/ beside a `.reason.json`; the new place of the `.bin`.

    The reason is durable first: a kill half-way leaves a reason too many, never one too few. But
    a disk without room for that file must not keep a run from its older checkpoints: there the
    move goes without, and the journal's record is where the reason is.
    """
    target = _directory(run_directory, QUARANTINE)
    stem = checkpoint_stem(found.step)
    suffix = _free_suffix(target, stem, (BINARY, MANIFEST, REASON))
    body = {
        "step": found.step,
        "reason": reason,
        "time": time,
        "names": [path.name for path in (found.binary, found.manifest) if path is not None],
        "moved_to": f"{QUARANTINE}/{stem}{suffix}{BINARY}",
    }
    try:
        replace_file(target / f"{stem}{suffix}{REASON}", canonical(body) + b"\n")
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
    _move(found.binary.parent, target, stem, suffix, (BINARY, MANIFEST))
    return f"{QUARANTINE}/{stem}{suffix}{BINARY}"


def supersede(run_directory: Path, above_step: int, *, tick: Tick = no_tick) -> list[Moved]:
    """Moves whatever has a checkpoint's name above a step to superseded/, newest first.

    Leftover manifests and decoys move too, so that every name ahead of the next trainer is free.
    Newest first: what a kill leaves behind is a prefix of the history.
    """
    source = run_directory / CHECKPOINTS
    members = _members(source, regular_only=False)
    moved: list[Moved] = []
    for step in sorted((step for step in members if step > above_step), reverse=True):
        tick()
        target = _directory(run_directory, SUPERSEDED)
        stem = checkpoint_stem(step)
        endings = [ending for ending in (BINARY, MANIFEST) if ending in members[step]]
        suffix = _free_suffix(target, stem, endings)
        _move(source, target, stem, suffix, endings)
        moved.append(Moved(step, f"{SUPERSEDED}/{stem}{suffix}{endings[0]}"))
    return moved


def _directory(run_directory: Path, name: str) -> Path:
    target = run_directory / name
    if not target.exists():
        target.mkdir(exist_ok=True)
        fsync_directory(run_directory)
    return target


def _free_suffix(target: Path, stem: str, endings: Collection[str]) -> str:
    """The first of nothing, ".2", ".3" and so on under which none of the names is taken."""
    suffixes = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    return next(
        suffix
        for suffix in suffixes
        if not any(os.path.lexists(target / f"{stem}{suffix}{ending}") for ending in endings)
    )


def _move(source: Path, target: Path, stem: str, suffix: str, endings: Iterable[str]) -> None:
    """Moves the members that are there, in the order given, and makes it durable."""
    for ending in endings:
        if os.path.lexists(source / f"{stem}{ending}"):
            os.rename(source / f"{stem}{ending}", target / f"{stem}{suffix}{ending}")
    fsync_directory(target)
    fsync_directory(source)


# --- retain --------------------------------------------------------------------------------------


def plan_retention(
    steps: Iterable[int],
    keep_last: int,
    keep_every: int,
    pins: Collection[int],
    newest_verified: int | None,
) -> list[int]:
    """The steps to remove, ascending. Pure.

    Kept are the last `keep_last` up to and with the newest verified one, every multiple of
    `keep_every` (0: none), the pins, and everything above the newest verified one, which is not
    proven yet. Without a verified one nothing is removed.

    Raises ValueError for a `keep_last` below 2 or a negative `keep_every`: with one checkpoint a
    bad block ends the run, and "-1 keeps all" has deleted all elsewhere. To keep all, use
    `keep_every` 1.
    """
    if keep_last < 2:
        raise ValueError(f"checkpoint.keep_last is {keep_last}; at least 2 must be kept")
    if keep_every < 0:
        raise ValueError(f"checkpoint.keep_every is {keep_every}; use 0 for none, 1 to keep all")
    if newest_verified is None:
        return []
    proven = sorted(step for step in set(steps) if step <= newest_verified)
    if newest_verified not in proven:
        return []
    return [
        step
        for step in proven[:-keep_last]
        if step not in pins and not (keep_every and step % keep_every == 0)
    ]


def retain(
    run_directory: Path,
    keep_last: int,
    keep_every: int,
    pins: Collection[int],
    verified_steps: Iterable[int],
    *,
    removed: list[int] | None = None,
    tick: Tick = no_tick,
) -> list[int]:
    """Removes the checkpoints that no rule keeps; their steps, ascending. `removed` is a list of
    the caller's for them, who has there what is gone when an error ends this early.

    `verified_steps` are those that were read back from the device; which of them still exist is
    looked up here. Each `.bin` goes, durably, before its manifest: a kill half-way leaves a
    manifest alone, which is no checkpoint and which the next call removes. The operator may be
    faster anywhere.
    """
    directory = run_directory / CHECKPOINTS
    present = [found.step for found in find(directory)]
    newest_verified = max(set(verified_steps).intersection(present), default=None)
    removed = [] if removed is None else removed
    for step in plan_retention(present, keep_last, keep_every, pins, newest_verified):
        tick()
        (directory / (checkpoint_stem(step) + BINARY)).unlink(missing_ok=True)
        removed.append(step)
    if removed:
        fsync_directory(directory)
    # A manifest above the newest verified step may be half of a publication in progress.
    orphans = [
        step
        for step, endings in _members(directory, regular_only=True).items()
        if BINARY not in endings and newest_verified is not None and step < newest_verified
    ]
    for step in sorted(orphans):
        tick()
        (directory / (checkpoint_stem(step) + MANIFEST)).unlink(missing_ok=True)
    if orphans:
        fsync_directory(directory)
    return removed


def clean_temporaries(directory: Path, living: tuple[int, str] | None) -> list[str]:
    """Removes the temporaries of attempts that are dead."""
    found = temporaries(directory, living)
    for path in found:
        path.unlink(missing_ok=True)
    if found:
        fsync_directory(directory)
    return [path.name for path in found]


def temporaries(directory: Path, living: tuple[int, str] | None) -> list[Path]:
    """The temporaries of attempts that are dead; `living` is (attempt, nonce) or None."""
    ours = None if living is None else temporary_name(*living, "")
    if not directory.exists():
        return []
    return [
        directory / name
        for name in sorted(os.listdir(directory))
        if name.startswith(TEMPORARY_PREFIX) and not (ours is not None and name.startswith(ours))
    ]


def preflight(run_directory: Path, size_bytes: int, count: int) -> int:
    """The bytes available for checkpoints, if `count` more of `size_bytes` fit; else NoSpace.

    A quota is not visible here; it shows as EDQUOT when a checkpoint is written.
    """
    directory = place = run_directory / CHECKPOINTS
    while not place.exists():  # the run may be one that is yet to begin
        place = place.parent
    status = os.statvfs(place)
    available_bytes = status.f_bavail * status.f_frsize
    if size_bytes * count > available_bytes:
        raise NoSpace(directory, size_bytes * count, available_bytes)
    return available_bytes
