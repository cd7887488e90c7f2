"""The living attempt: its process, its lock, its death.

What may live here: what the daemon does to a trainer process, and how a death is completed.

Invariants:
- A death is complete when the main process has ended and nothing holds trainer.lock, lives in its
  session or its control group, or has memory of a device, within a bounded time from the first
  look. What is proven ours is asked, then killed; the rest is only reported.
- Nothing is given up before it was sent SIGKILL.
- A second trainer never starts while the lock is held.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor import cgroup, child, contract, events as ev, proc, standing
from supervisor.archive import settings_name
from supervisor.devices import Gate
from supervisor.evidence import Witness
from supervisor.log import Log
from supervisor.orphans import reap
from supervisor.rundir import RunDirectory, take_trainer_lock
from supervisor.strays import Strays
from supervisor.tree import Tree

LOOK_INTERVAL_SECONDS: Final = 0.1
TERM_SECONDS: Final = 2.0
LIMIT_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Death:
    """`met` is every process of the attempt that a look has found."""

    asked_at: float | None = None
    killed_at: float | None = None
    looked_at: float = 0.0
    blocking: tuple[int, ...] = ()
    met: set[int] = field(default_factory=set)
    left: tuple[int, ...] | None = None  # the answer, once there is one


class Attendant:
    """At most one trainer at a time."""

    def __init__(self, directory: RunDirectory, log: Log) -> None:
        self._directory = directory
        self._log = log
        self._child: child.Child | None = None
        self._tree = Tree(directory.trainer_lock, "")
        self._main: ev.AttemptSpawned | None = None
        self._told = False
        self._death: _Death | None = None
        self._examiner = standing.Examiner()
        self._parent = cgroup.delegated()
        self._strays = Strays(log)
        self._gate = Gate()
        self._witness = Witness()

    @property
    def alive(self) -> bool:
        return self._child is not None and not self._told

    @property
    def reaping(self) -> bool:
        return self._death is not None

    @property
    def containment(self) -> str:
        """What holds an attempt together: its control group, or its session and its nonce."""
        return "session" if self._parent is None else "cgroup"

    @property
    def unlogged(self) -> str:
        """Why what the trainer prints goes nowhere, where it does."""
        return self._child.unlogged if self._child is not None else ""

    def fileno(self) -> int | None:
        """The pidfd: readable when the main process ends."""
        return self._child.pidfd if self._child is not None and not self._told else None

    def tend(self, now: float) -> None:
        """What has to be done now and then, whatever happens."""
        orphans = reap()
        if orphans:
            self._log.write(f"waited for {len(orphans)} orphans: {_listed(orphans)}")
        self._strays.press(now)
        self._examiner.tend()
        if self.alive:
            self._witness.look(now)

    def holders(self, nonce: str, main: ev.AttemptSpawned | None) -> tuple[ev.Holder, ...]:
        """Who holds trainer.lock; `nonce` is that of the attempt which may, `main` its process."""
        self._main = main
        self._expect(nonce, main.pid if main is not None else None)
        if proc.is_free(self._directory.trainer_lock):
            return ()
        return child.holders(self._directory.trainer_lock, nonce, main)

    def _expect(self, nonce: str, main: int | None) -> None:
        """The attempt that an earlier life of ours has left, and what there is of it."""
        group = cgroup.find(self._parent, group_name(nonce), main) if nonce else None
        self._tree = Tree(self._directory.trainer_lock, nonce, main, False, group)

    def ready(self, now: float) -> bool:
        """Whether all is known that has to be known before a spawn."""
        return self._gate.measured(now)

    def spawn(
        self,
        effect: ev.Spawn,
        command: Sequence[str],
        environment: Mapping[str, str],
        home: Path,
    ) -> ev.Spawned | ev.SpawnFailed:
        """Starts the attempt's process, which holds trainer.lock from its first instruction."""
        try:
            lock_fd = take_trainer_lock(self._directory)
        except OSError as error:
            return ev.SpawnFailed(time.monotonic(), f"trainer.lock: {error}")
        if lock_fd is None:
            return ev.SpawnFailed(time.monotonic(), "trainer.lock is still held")
        self._told = False
        group = None
        if self._parent is not None:
            group = cgroup.create(self._parent, group_name(effect.nonce))
        given = {
            **environment,
            contract.ENV_RUN_DIRECTORY: str(self._directory.path.resolve()),
            contract.ENV_ATTEMPT: str(effect.attempt),
            contract.ENV_NONCE: effect.nonce,
            contract.ENV_EPOCH: str(effect.epoch),
            contract.ENV_RESUME_STEP: str(effect.resume_step),
        }
        if effect.until_step is not None:
            # A stretch of an epoch that no longer rules, under the settings it ruled with.
            given[contract.ENV_UNTIL_STEP] = str(effect.until_step)
            given[contract.ENV_SETTINGS] = str(
                (self._directory.path / settings_name(effect.epoch)).resolve()
            )
        try:
            self._child = child.spawn(
                command,
                environment=given,
                home=home,
                log_path=self._directory.log(effect.attempt),
                lock_fd=lock_fd,
                group=group,
            )
        except OSError as error:
            if group is not None:
                group.kill()
                group.remove()
            return ev.SpawnFailed(time.monotonic(), str(error))
        finally:
            os.close(lock_fd)
        started = self._child
        if not self._directory.log(effect.attempt).exists():
            self._log.write(f"attempt {effect.attempt} runs without a log: none could be made")
        lock = self._directory.trainer_lock
        self._tree = Tree(lock, effect.nonce, started.pid, True, group)
        self._witness = Witness(group)
        return ev.Spawned(time.monotonic(), started.pid, started.start_ticks, proc.boot_id())

    def adopt(self, pid: int, nonce: str) -> bool:
        """False where the process has gone, or is not provably ours, by now."""
        self._expect(nonce, pid)
        self._told = False
        self._witness = Witness(self._tree.group)
        self._child = child.adopt(pid, self._directory.trainer_lock, nonce, self._main)
        return self._child is not None

    def died(self) -> bool:
        """True once for each death of the main process."""
        if self._child is None or self._told or not self._child.poll():
            return False
        self._told = True
        return True

    def signal(self, name: str) -> None:
        number = signal.Signals[f"SIG{name}"]
        if self._child is None:
            return
        if number == signal.SIGUSR1 and not proc.handles_signal(self._child.pid, number):
            self._log.write("SIGUSR1 not sent: the trainer has no handler for it yet")
            return
        self._child.send(number)

    def examine(self, attempt: int) -> None:
        """Puts where the trainer stands into its log: what the kernel says of each of its threads,
        the stacks of its Python threads where it can write them, the native ones where a tool can
        read them. Bounded, and it changes nothing."""
        if self._child is None:
            return
        log_path = self._directory.log(attempt)
        words = standing.of(self._child.pid)
        if proc.handles_signal(self._child.pid, signal.SIGUSR2):
            self._child.send(signal.SIGUSR2)
        try:
            with log_path.open("ab", buffering=0) as log:
                log.write(words.encode("utf-8", "replace"))
            self._examiner.begin(self._child.pid, log_path)
        except OSError as error:
            self._log.write(f"evidence of a hang: {error}\n{words}")

    def kill(self) -> None:
        """SIGKILL to the main process and to everything that is proven to belong to it. A debugger
        that still holds it would keep its death from us."""
        self._examiner.end()
        if self._child is not None:
            self._child.send(signal.SIGKILL)
        self._tree.signal(signal.SIGKILL)

    # --- death ---

    def begin_reaping(self) -> None:
        self._death = _Death()

    def end_of_tree(self, now: float) -> tuple[int, ...] | None:
        """None while the death goes on; then whoever is left of it, normally nobody."""
        death = self._death
        assert death is not None
        if death.left is None and (self._child is None or self._child.poll()):
            if now - death.looked_at >= LOOK_INTERVAL_SECONDS:
                death.looked_at = now
                self._press(death, now)
            killed_at = death.killed_at
            given_up = killed_at is not None and now - killed_at >= LIMIT_SECONDS
            if given_up or not death.blocking:
                # A process that cannot be ended may keep its memory: nobody waits for that too.
                done = bool(death.blocking) or self._gate.is_open(death.met, now)
                death.left = death.blocking if done else None
        return death.left

    def _press(self, death: _Death, now: float) -> None:
        """Asks, then kills, then kills again whatever has been forked meanwhile."""
        if death.asked_at is None:
            death.asked_at = now
            members = self._tree.signal(signal.SIGTERM)
            self._strays.take(self._tree, members, now + TERM_SECONDS)
            if self._child is not None:
                death.met.add(self._child.pid)
        elif now - death.asked_at >= TERM_SECONDS:
            death.killed_at = now if death.killed_at is None else death.killed_at
            members = self._tree.signal(signal.SIGKILL)
        else:
            members = self._tree.look()
        death.met.update(member.pid for member in members if member.ours)
        death.blocking = tuple(member.pid for member in members if member.blocks)

    @property
    def held(self) -> str:
        """Who holds memory of a device although it should be dead, or nothing."""
        return self._gate.held

    def evidence(self, attempt: int) -> ev.Evidence:
        """What there is to see of a death besides its status."""
        if self._gate.note:
            self._log.write(self._gate.note)
        return self._witness.evidence(self._directory.log(attempt), self._gate.lost)

    def last_words(self, attempt: int) -> str:
        """The last line that an attempt printed, for the record of its death."""
        return self._witness.last_words(self._directory.log(attempt))

    def bury(self) -> tuple[int | None, int | None]:
        """(exit code, signal) as the kernel told it; (None, None) where nobody could see it."""
        self._death = None
        status = self._child.status() if self._child is not None else (None, None)
        self._let_go()
        if self._tree.group is not None:
            self._tree.group.remove()
        return status

    def _let_go(self) -> None:
        self._tree.kept = False
        if self._child is not None:
            self._child.close()
            self._child = None

    def close(self) -> None:
        """Lets go of the process; it lives on. What was left of a dead one does not."""
        self._let_go()
        self._examiner.close()
        self._strays.close()
        self._gate.close()


def group_name(nonce: str) -> str:
    return f"attempt-{nonce}"


def _listed(pids: Sequence[int], shown: int = 10) -> str:
    more = ", ..." if len(pids) > shown else ""
    return ", ".join(str(pid) for pid in pids[:shown]) + more
