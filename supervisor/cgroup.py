"""A control group of the kernel (version 2) for each attempt, where we have been given our own.

What may live here: finding the group that we run in, and making, reading, killing and removing one
below it. Who belongs to an attempt where there is no group is `tree`'s business.

Invariants:
- A group is made only in a subtree that was delegated to us: what belongs to somebody else's
  hierarchy is not touched, also where root could.
- Everything in a group of ours is of that attempt: nothing but its first process was put there, and
  the kernel puts every descendant where its parent is.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOUNTS: Final = "/proc/self/mountinfo"
# Set by systemd on a unit's group with Delegate=yes.
_DELEGATED: Final = ("user.delegate", "trusted.delegate")


@dataclass(frozen=True, slots=True)
class Cgroup:
    path: Path

    @property
    def procs(self) -> Path:
        """A process that writes 0 to this file moves itself, with all that it will ever start."""
        return self.path / "cgroup.procs"

    def members(self) -> tuple[int, ...]:
        """Every living process in it and below; none where it is gone. The kernel does not list
        zombies, and shows processes that we cannot see as 0."""
        found: list[int] = []
        for directory, _, _ in os.walk(self.path):
            with contextlib.suppress(FileNotFoundError, OSError):
                pids = Path(directory, "cgroup.procs").read_text(encoding="ascii").split()
                found.extend(int(pid) for pid in pids if pid != "0")
        return tuple(found)

    def kill(self) -> bool:
        """SIGKILL to all of it at once, also to what is being forked just now. False where it is
        gone, or where the kernel cannot (before 5.14)."""
        try:
            (self.path / "cgroup.kill").write_text("1", encoding="ascii")
        except OSError:
            return False
        return True

    def remove(self) -> bool:
        """False where something still lives in it, or where it is gone already."""
        for directory, _, _ in os.walk(self.path, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                return False
        return True


def of(pid: int | str) -> Cgroup | None:
    """The group that a process is in; None where it is gone, or where there is no version 2."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = Path(MOUNTS).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    inside = next((line[3:] for line in lines if line.startswith("0::")), None)
    if inside is None:
        return None
    for line in mounts:
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            root, point = before.split(" ")[3:5]
            within = Path(inside).relative_to(root) if Path(inside).is_relative_to(root) else None
            if within is not None:
                return Cgroup(Path(point.replace("\\040", " ")) / within)
    return None


def delegated() -> Cgroup | None:
    """Our own group, where it was given to us to make others in."""
    own = of("self")
    if own is None or not all(os.access(path, os.W_OK) for path in (own.path, own.procs)):
        return None
    # Being able to write is being allowed to, but for root, who is able to everywhere. The root of
    # a hierarchy is nobody's unit: that of a container, or of a machine without systemd.
    at_root = not (own.path / "cgroup.events").exists()
    if os.geteuid() == 0 and not at_root and not _is_marked(own.path):
        return None
    return own


def _is_marked(path: Path) -> bool:
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(path, name) == b"1":
                return True
    return False


def create(parent: Cgroup, name: str) -> Cgroup | None:
    """A group below `parent`; None where that does not work, or where it could not be killed."""
    made = Cgroup(parent.path / name)
    try:
        made.path.mkdir(exist_ok=True)
    except OSError:
        return None
    if not (made.path / "cgroup.kill").exists():
        made.remove()
        return None
    return made


def find(parent: Cgroup | None, name: str, pid: int | None = None) -> Cgroup | None:
    """The group of this name, which an earlier life of ours has made: that of `pid`, or where we
    would make it ourselves."""
    places = [of(pid) if pid is not None else None]
    places.append(Cgroup(parent.path / name) if parent is not None else None)
    fitting = (g for g in places if g is not None and g.path.name == name and g.path.is_dir())
    return next(fitting, None)
