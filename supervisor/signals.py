"""Signals to the supervisor, turned into counts that the loop reads.

What may live here: handlers that count, the wake-up of the loop, and what a signal asks for. A
handler does nothing but count: saving or printing inside one is how runs are lost.
"""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Final

from supervisor.events import Asked

INTERRUPT_WORDS: Final = {
    "stop": "stopping: the trainer finishes its step, saves and ends (Ctrl-C again: less patience)",
    "hasten": "stopping sooner: SIGTERM now, SIGKILL in a few seconds (Ctrl-C again: SIGKILL now)",
    "kill": "killing the trainer",
}


class Signals:
    """Installed before the run's lock is taken, so that a stop is honoured from the first moment
    on; `close` puts the previous handlers back."""

    NUMBERS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self._counts: dict[int, int] = dict.fromkeys(self.NUMBERS, 0)
        self._taken: dict[int, int] = dict.fromkeys(self.NUMBERS, 0)
        self._interrupts = 0
        self._usr1s = 0
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous = {number: signal.signal(number, self._count) for number in self.NUMBERS}
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._counts[number] += 1

    def fileno(self) -> int:
        """Readable once a signal has come."""
        return self._reader.fileno()

    def drain(self) -> None:
        """Empties the wake-up pipe; what came is in the counts, so a full pipe loses nothing."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def take(self, number: signal.Signals) -> int:
        """How many of this kind came since the last look."""
        new = self._counts[number] - self._taken[number]
        self._taken[number] += new
        return new

    def requests(self, now: float, life: str) -> list[Asked]:
        """What the signals since the last look ask for. The trainer remembers the requests that
        it has served, also those of an earlier life of the supervisor, so `life` names them."""
        asked = []
        if self.take(signal.SIGTERM):
            asked.append(Asked(now, "signal-term", "stop", operator=False))
        for _ in range(self.take(signal.SIGINT)):
            self._interrupts += 1
            verb = {1: "stop", 2: "hasten"}.get(self._interrupts, "kill")
            asked.append(Asked(now, f"signal-int-{self._interrupts}", verb, operator=False))
        if self.take(signal.SIGUSR1):
            self._usr1s += 1
            id = f"signal-usr1-{life}-{self._usr1s}"
            asked.append(Asked(now, id, "checkpoint", operator=False))
        return asked

    def retire(self) -> None:
        """Nothing is left to stop: a signal between here and the exit must not turn a clean end
        into a death. Ignored, it stays so through the interpreter's own end, where a handler does
        not."""
        for number in self.NUMBERS:
            signal.signal(number, signal.SIG_IGN)
        self._previous = {}

    def close(self) -> None:
        if self._reader.fileno() < 0:
            return
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()
