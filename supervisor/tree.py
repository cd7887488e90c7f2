"""Everything that belongs to one attempt: the processes themselves, found and signalled.

What may live here: telling an attempt's processes from everybody else's, by what only they have.

Invariants:
- A process is ours by proof: it carries the attempt's nonce, or it is in the session of a main
  process that we have not let go (so that its number means nothing else yet), or in the attempt's
  control group. Nothing else is ever signalled; parentage and names prove nothing.
- A signal goes through a pidfd that was opened before the proof was made.
- What holds trainer.lock, or is in the session or the group, keeps a death from being complete.
  What only carries the nonce has made itself independent: it is ended, but nothing waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisor import proc
from supervisor.cgroup import Cgroup


@dataclass(frozen=True, slots=True)
class Member:
    """`ours`: it may be signalled. `blocks`: the death is not complete while it lives."""

    pid: int
    ours: bool
    blocks: bool


@dataclass(slots=True)
class Tree:
    """`main` is the pid of the main process; `kept` whether we are its parent and have not waited
    for it yet."""

    lock: Path
    nonce: str
    main: int | None = None
    kept: bool = False
    group: Cgroup | None = None

    def look(self) -> tuple[Member, ...]:
        """Every living process of the attempt, and whoever else holds its lock. Not the main one:
        its end is known by its descriptor."""
        locking = frozenset(() if proc.is_free(self.lock) else proc.lock_holders(self.lock))
        grouped = self._grouped()
        found = []
        for pid in proc.processes():
            locks, inside = pid in locking, pid in grouped or self._in_session(pid)
            if pid == self.main or not (locks or inside or proc.carries(pid, self.nonce)):
                continue
            if proc.start_ticks(pid) is not None:
                ours = self._owns(pid, grouped, locks)
                found.append(Member(pid, ours, blocks=locks or (inside and ours)))
        return tuple(found)

    def _grouped(self) -> frozenset[int]:
        return frozenset(self.group.members()) if self.group is not None else frozenset()

    def _in_session(self, pid: int) -> bool:
        return self.main is not None and proc.session(pid) == self.main

    def _owns(self, pid: int, grouped: frozenset[int], locks: bool) -> bool:
        return (
            pid in grouped
            or (self.kept and self._in_session(pid))
            or proc.carries(pid, self.nonce)
            # It has lost its environment, and can no longer write.
            or (locks and bool(self.nonce) and proc.is_ending(pid))
        )

    def signal(self, number: int) -> tuple[Member, ...]:
        """A signal to all of it but the main process; returns what was there. What is being forked
        meanwhile is found by the next look, or has died with its group."""
        if number == signal.SIGKILL and self.group is not None:
            self.group.kill()
        members = self.look()
        for member in members:
            if member.ours:
                with self.proven(member.pid) as pidfd:
                    send(pidfd, number)
        return members

    @contextlib.contextmanager
    def proven(self, pid: int) -> Iterator[int | None]:
        """A descriptor of a process that was proven to be ours after it was opened, or None."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield pidfd if self._owns(pid, self._grouped(), locks=False) else None
        finally:
            os.close(pidfd)


def send(pidfd: int | None, number: int) -> bool:
    """False where the process is gone, which is as good as signalled."""
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True
