"""Processes of a dead attempt that have made themselves independent, until they have ended too.

What may live here: keeping hold of them and pressing them, while the run goes on.

Invariants:
- They are known by descriptors that were opened before the proof that they are ours, so that they
  can be ended long after anything else is known of them.
- Nothing waits for them.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from supervisor import proc
from supervisor.log import Log
from supervisor.tree import Member, Tree, send


@dataclass(slots=True)
class _Stray:
    pid: int
    pidfd: int
    command: str
    kill_at: float
    killed: bool = False

    def ended(self) -> bool:
        look = select.poll()
        look.register(self.pidfd, select.POLLIN)
        return bool(look.poll(0))


class Strays:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._strays: list[_Stray] = []

    def take(self, tree: Tree, members: Iterable[Member], kill_at: float) -> None:
        """Those that were asked to end and that a death does not wait for. The rest is named."""
        for member in members:
            command = proc.command(member.pid)
            if not member.ours:
                self._log.write(f"process {member.pid} is not provably ours: {command}")
            elif not member.blocks:
                with tree.proven(member.pid) as pidfd:
                    if pidfd is not None:
                        self._strays.append(_Stray(member.pid, os.dup(pidfd), command, kill_at))

    def press(self, now: float) -> None:
        """SIGKILL to those whose time is over, once; lets go of those that have ended."""
        for stray in list(self._strays):
            if stray.ended():
                os.close(stray.pidfd)
                self._strays.remove(stray)
            elif now >= stray.kill_at and not stray.killed:
                stray.killed = send(stray.pidfd, signal.SIGKILL)
                self._log.write(f"killed what an attempt left: {stray.pid} ({stray.command})")

    def close(self) -> None:
        """No more time for any of them."""
        for stray in self._strays:
            send(stray.pidfd, signal.SIGKILL)
            os.close(stray.pidfd)
        self._strays.clear()
