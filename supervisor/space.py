"""Room on the disk: what there is, what the next checkpoint needs, what is said and done about it.

What may live here: measuring, which is a job for the worker thread, and the memory that keeps an
alarm from flapping. What can be removed to make room is `reclaim`; whether a full disk ends the run
is decided in `shortage`.

Invariants:
- The loop's thread measures nothing.
- An alarm is raised once, with the figures of that moment, and cleared when there is a tenth more
  room than would raise it.
- Room is made before anybody is told that there is none, and only while a trainer runs.
- An attempt to make room that fails is no proof that there is none to make: it is tried again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import contract
from supervisor.checkpoints import find
from supervisor.durable import NO_ROOM, size_of
from supervisor.rundir import RunDirectory
from supervisor.worker import Job, Outcome

LOOK_INTERVAL_SECONDS: Final = 5.0
CLEARED_AT: Final = 1.1
TRIES: Final = 5
ALARM: Final = "disk"


@dataclass(frozen=True, slots=True)
class Room:
    """One file system: where it is mounted, and what is left of it for us."""

    place: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """`history` is the file system of the run directory, `checkpoints` that of its checkpoints;
    `checkpoint_bytes` what the newest one takes, 0 where there is none."""

    history: Room
    checkpoints: Room
    checkpoint_bytes: int


def measure(directory: RunDirectory) -> Measured:
    """Raises OSError."""
    newest = max(find(directory.checkpoints), default=None, key=lambda found: found.step)
    files = [] if newest is None else [newest.binary, newest.manifest]
    size_bytes = sum(size_of(path) for path in files if path is not None)
    return Measured(_room(directory.path), _room(directory.checkpoints), size_bytes)


def _room(path: Path) -> Room:
    status = os.statvfs(path)
    place = path.resolve()
    while not place.is_mount():
        place = place.parent
    return Room(str(place), status.f_bavail * status.f_frsize)


class Watch:
    """`reclaim` gets the bytes that are wanted and a function for the bytes that came free, None
    where it failed, perhaps half-way; it answers whether it has begun at all. `full` gets the
    reason when nothing helps."""

    def __init__(
        self,
        directory: RunDirectory,
        headroom_bytes: int,
        *,
        submit: Callable[[Job, Callable[[Outcome], None]], None],
        alarm: Callable[[str, str], None],
        reclaim: Callable[[int, Callable[[int | None], None]], bool],
        full: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self.headroom_bytes = headroom_bytes
        self._submit = submit
        self._alarm = alarm
        self._reclaim = reclaim
        self._full = full
        self._next_look = 0.0
        self._busy = False
        self._expected_bytes = 0
        self._about = ""
        self._detail = ""
        self._made_room = False  # what could go has gone since there was room last
        self._failures = 0  # of making room, in a row
        self._refused = ""  # why the disk refused the newest save, until that was dealt with

    @property
    def short(self) -> bool:
        """There is no room for the next checkpoint, as far as is known."""
        return self._about == "checkpoint"

    def expect(self, parameters: int) -> None:
        """The trainer has said how large its checkpoints will be."""
        self._expected_bytes = contract.checkpoint_size_bytes(parameters)

    def hasten(self) -> None:
        """Something has changed: look soon."""
        self._next_look = 0.0

    def refused(self, code: int, why: str) -> None:
        """A save has failed. The kernel's word counts more than any figure: of a quota there is no
        figure. What is not a lack of room is not helped by making some."""
        if code in NO_ROOM:
            self._refused = why
            self._made_room = False
            self.hasten()
        else:
            self._full(why)

    def look(self, now: float) -> None:
        if self._busy or now < self._next_look:
            return
        self._busy = True
        self._next_look = now + LOOK_INTERVAL_SECONDS
        self._submit(lambda: measure(self._directory), self._measured)

    def _measured(self, outcome: Outcome) -> None:
        self._busy = False
        if outcome.error is not None:
            self._alarm(ALARM, f"free space cannot be measured: {outcome.error}")
            return
        found: Measured = outcome.result
        needed = found.checkpoint_bytes or self._expected_bytes
        missing = max(0, needed - found.checkpoints.free_bytes)
        self._say(found, needed)
        if missing or self._refused:
            self._make_room(missing or needed)
        else:
            self._made_room = False
            self._failures = 0

    def _make_room(self, wanted_bytes: int) -> None:
        refused, self._refused = self._refused, ""
        why = refused or self._detail
        if self._made_room:
            self._full(why)
            return

        def made(freed_bytes: int | None) -> None:
            self._busy = False
            self.hasten()
            self._failures = self._failures + 1 if freed_bytes is None else 0
            if 0 < self._failures < TRIES:  # a part may have gone: what is missing is measured anew
                self._refused = self._refused or refused
                return
            self._failures = 0
            self._made_room = True
            self._refused = ""  # refused before there was this room: the next save tells
            if not freed_bytes:
                self._full(why)

        self._busy = True
        if not self._reclaim(wanted_bytes, made):
            self._busy = False

    def _say(self, found: Measured, needed: int) -> None:
        about = self._judge(found, needed)
        if about != self._about:
            self._about = about
            self._detail = self._words(found, needed)
        self._alarm(ALARM, self._detail)

    def _judge(self, found: Measured, needed: int) -> str:
        """What there is too little room for: a checkpoint, the headroom, or nothing."""
        margin = CLEARED_AT if self._about == "checkpoint" else 1.0
        if needed and found.checkpoints.free_bytes < needed * margin:
            return "checkpoint"
        margin = CLEARED_AT if self._about else 1.0
        least = min(found.history.free_bytes, found.checkpoints.free_bytes)
        return "headroom" if least < self.headroom_bytes * margin else ""

    def _words(self, found: Measured, needed: int) -> str:
        if self._about == "checkpoint":
            room = found.checkpoints
            return (
                f"{room.place}: {room.free_bytes} bytes are free and the next checkpoint needs"
                f" {needed}; free some space"
            )
        if self._about == "headroom":
            room = min(found.history, found.checkpoints, key=lambda one: one.free_bytes)
            return (
                f"{room.place}: {room.free_bytes} bytes are free, less than"
                f" alarms.disk_headroom_bytes = {self.headroom_bytes}; the next checkpoint needs"
                f" {needed}"
            )
        return ""
