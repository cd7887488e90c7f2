"""Processes that a trainer leaves behind, and the mechanisms that hold an attempt together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from runs_kit import Run, kill, wait_for_end, wait_until

from supervisor import cgroup, proc


def _can_make_groups() -> bool:
    parent = cgroup.delegated()
    made = cgroup.create(parent, f"probe-{os.getpid()}") if parent is not None else None
    return made is not None and made.remove()


# A control group is there or is not; without one, everything has to work all the same.
MECHANISMS: Final = ("session", "cgroup") if _can_make_groups() else ("session",)
each_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


class Leftovers:
    """Processes that the saboteur leaves behind, by their pids in a file."""

    def __init__(self, run: Run) -> None:
        self._path = run.home / "left"
        run.environment["SABOTEUR_LEFT"] = str(self._path)

    def pids(self) -> list[int]:
        return [int(line) for line in self._path.read_text().split()] if self._path.exists() else []

    def wait_for(self, count: int) -> list[int]:
        wait_until(lambda: len(self.pids()) == count, f"{count} processes left behind")
        return self.pids()

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if proc.start_ticks(pid) is not None]

    def close(self) -> None:
        for pid in self.alive():
            kill(pid)
            wait_for_end(pid)


@contextlib.contextmanager
def run_of(home: Path, mechanism: str) -> Iterator[tuple[Run, Leftovers]]:
    run = Run(home)
    run.patch("attendant", "TERM_SECONDS", 0.2)
    if mechanism == "session":
        run.patch("cgroup", "MOUNTS", os.devnull)
    leftovers = Leftovers(run)
    with contextlib.closing(run), contextlib.closing(leftovers):
        yield run, leftovers


def zombies_of(pid: int) -> list[int]:
    """Children of a process that have ended and that it has not waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError):
            if entry.name.isdecimal():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if (state, int(parent)) == ("Z", pid):
                    found.append(int(entry.name))
    return found
