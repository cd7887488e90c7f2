"""The living attempt: its process, its lock, its death.

What may live here: what the daemon does to a trainer process, and how a death is completed.

Invariants:
- A death is complete when the main process has ended and nothing holds trainer.lock, within a
  bounded time; what is proven ours is asked, then killed; the rest is only reported.
- A second trainer never starts while the lock is held.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import child, contract, events as ev
from supervisor.archive import settings_name
from supervisor.log import Log
from supervisor.rundir import RunDirectory, take_trainer_lock
from supervisor.tail import printable

LOOK_INTERVAL_SECONDS: Final = 0.1
TERM_SECONDS: Final = 2.0
LIMIT_SECONDS: Final = 30.0
LAST_WORDS_BYTES: Final = 2048
LAST_WORDS_CHARACTERS: Final = 300


@dataclass(slots=True)
class _Death:
    since: float
    asked: bool = False
    looked: float = 0.0
    holders: tuple[int, ...] = ()


class Attendant:
    """At most one trainer at a time."""

    def __init__(self, directory: RunDirectory, log: Log) -> None:
        self._directory = directory
        self._log = log
        self._child: child.Child | None = None
        self._nonce = ""
        self._main: ev.AttemptSpawned | None = None
        self._told = False
        self._death: _Death | None = None

    @property
    def alive(self) -> bool:
        return self._child is not None and not self._told

    @property
    def reaping(self) -> bool:
        return self._death is not None

    @property
    def unlogged(self) -> str:
        """Why what the trainer prints goes nowhere, where it does."""
        return self._child.unlogged if self._child is not None else ""

    def fileno(self) -> int | None:
        """The pidfd: readable when the main process ends."""
        return self._child.pidfd if self._child is not None and not self._told else None

    def holders(self, nonce: str, main: ev.AttemptSpawned | None) -> tuple[ev.Holder, ...]:
        """Who holds trainer.lock; `nonce` is that of the attempt which may, `main` its process."""
        self._nonce = nonce
        self._main = main
        return child.holders(self._directory.trainer_lock, nonce, main)

    def spawn(
        self,
        effect: ev.Spawn,
        command: Sequence[str],
        environment: Mapping[str, str],
        home: Path,
    ) -> ev.Spawned | ev.SpawnFailed:
        """Starts the attempt's process, which holds trainer.lock from its first instruction."""
        lock_fd = take_trainer_lock(self._directory)
        if lock_fd is None:
            return ev.SpawnFailed(time.monotonic(), "trainer.lock is still held")
        self._nonce = effect.nonce
        self._told = False
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
            )
        except OSError as error:
            return ev.SpawnFailed(time.monotonic(), str(error))
        finally:
            os.close(lock_fd)
        started = self._child
        return ev.Spawned(time.monotonic(), started.pid, started.start_ticks, child.boot_id())

    def adopt(self, pid: int, nonce: str) -> bool:
        """False where the process has gone, or is not provably ours, by now."""
        self._nonce = nonce
        self._told = False
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
        if number == signal.SIGUSR1 and not child.handles_signal(self._child.pid, number):
            self._log.write("SIGUSR1 not sent: the trainer has no handler for it yet")
            return
        self._child.send(number)

    def kill(self) -> None:
        """SIGKILL to the main process and to everything that is proven to belong to it."""
        if self._child is not None:
            self._child.send(signal.SIGKILL)
        child.kill_proven(self._directory.trainer_lock, self._nonce, signal.SIGKILL)

    def begin_reaping(self, now: float) -> None:
        self._death = _Death(now)

    def end_of_tree(self, now: float) -> tuple[int, ...] | None:
        """None while the death goes on; then whoever still holds the lock, normally nobody."""
        death = self._death
        assert death is not None
        if self._child is not None and not self._child.poll():
            return None
        if now - death.looked >= LOOK_INTERVAL_SECONDS:
            death.looked = now
            death.holders = self._press(death, now)
        if death.holders and now - death.since < LIMIT_SECONDS:
            return None
        return death.holders

    def _press(self, death: _Death, now: float) -> tuple[int, ...]:
        lock = self._directory.trainer_lock
        if not death.asked:
            death.asked = True
            return child.kill_proven(lock, self._nonce, signal.SIGTERM)
        if now - death.since >= TERM_SECONDS:
            return child.kill_proven(lock, self._nonce, signal.SIGKILL)
        return tuple(holder.pid for holder in child.holders(lock, self._nonce))

    def bury(self) -> tuple[int | None, int | None]:
        """(exit code, signal) as the kernel told it; (None, None) where nobody could see it."""
        self._death = None
        if self._child is None:
            return None, None
        status = self._child.status()
        self.close()
        return status

    def last_words(self, attempt: int) -> str:
        """The last line that an attempt printed, for the record of its death: harmless, as it is
        shown on terminals and sent away."""
        path = self._directory.log(attempt)
        try:
            with path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LAST_WORDS_BYTES))
                words = log.read(LAST_WORDS_BYTES).replace(b"\0", b"")
        except OSError as error:
            self._log.write(f"{path}: no last words: {error.strerror}")
            return ""
        lines = (line.strip() for line in reversed(words.decode("utf-8", "replace").splitlines()))
        return printable(next(filter(None, lines), ""))[:LAST_WORDS_CHARACTERS]

    def close(self) -> None:
        """Lets go of the process; it lives on."""
        if self._child is not None:
            self._child.close()
            self._child = None
