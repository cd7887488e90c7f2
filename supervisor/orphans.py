"""Descendants whose own parent has died: they come to us, and somebody has to wait for them.

What may live here: being the reaper of our descendants, and telling our own children, whose status
somebody here waits for, from those of others, whose status nobody wants.

Invariants:
- A process that this one starts is an `Owned`. Its status belongs to whoever holds it; `reap` never
  takes it.
- Processes are started and reaped by one thread, which lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import weakref
from typing import Any, ClassVar, Final

_PR_SET_CHILD_SUBREAPER: Final = 36


class Owned(subprocess.Popen[bytes]):
    """A child whose status its holder waits for."""

    _all: ClassVar[weakref.WeakSet[Owned]] = weakref.WeakSet()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all.add(self)


def become_subreaper() -> None:
    """From now on a descendant that loses its parent becomes our child instead of init's, so that
    it stays visible, and no zombie waits for an init that does not care. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def reap() -> tuple[int, ...]:
    """Waits for every orphan that has ended; returns their pids. Never blocks.

    It looks before it takes. The kernel shows the eldest first: an owned child that has ended hides
    those behind it until its owner has waited for it, which is a matter of one turn of the loop, or
    of the end of one death.
    """
    reaped: list[int] = []
    flags = os.WEXITED | os.WNOHANG
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, flags | os.WNOWAIT)
        except ChildProcessError:
            return tuple(reaped)
        owned = {one.pid for one in Owned._all if one.returncode is None}
        if ended is None or ended.si_pid in owned:
            return tuple(reaped)
        os.waitid(os.P_PID, ended.si_pid, flags)
        reaped.append(ended.si_pid)
