"""Descendants whose own parent has died: they come to us, and somebody has to wait for them.

What may live here: being the reaper of our descendants, and telling our own children, whose status
somebody here waits for, from those of others, whose status nobody wants.

Invariants:
- A process that this one starts is an `Owned`. Its status belongs to whoever holds it; `reap` never
  takes it, and it hides nobody.
- Processes are started and reaped by one thread, which lives as long as the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import weakref
from pathlib import Path
from typing import Any, ClassVar, Final

_PR_SET_CHILD_SUBREAPER: Final = 36


class Owned(subprocess.Popen[bytes]):
    """A child whose status its holder waits for. Once nobody holds it any more, it is an orphan
    like any other."""

    _all: ClassVar[weakref.WeakSet[Owned]] = weakref.WeakSet()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all.add(self)

    def __del__(self) -> None:
        # Not what it overrides: that would keep the object, until the next process is started.
        self._all.discard(self)


def become_subreaper() -> None:
    """From now on a descendant that loses its parent becomes our child instead of init's, so that
    it stays visible, and no zombie waits for an init that does not care. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def reap() -> tuple[int, ...]:
    """Waits for every orphan that has ended; returns their pids. Never blocks."""
    flags = os.WEXITED | os.WNOHANG
    try:
        eldest = os.waitid(os.P_ALL, 0, flags | os.WNOWAIT)
    except ChildProcessError:
        return ()
    if eldest is None:
        return ()
    owned = {one.pid for one in Owned._all if one.returncode is None}
    # Whoever looks for any child is shown the eldest that has ended, and one that is owned may stay
    # so for long: those behind it are looked at one by one.
    orphans = {eldest.si_pid, *_children()} - owned
    return tuple(pid for pid in sorted(orphans) if os.waitid(os.P_PID, pid, flags) is not None)


def _children() -> list[int]:
    """Our children, living and ended; none where this kernel does not list them."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/self/task/{thread}/children").read_text(encoding="ascii")
            found.extend(map(int, children.split()))
    return found
