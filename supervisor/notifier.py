"""Tells somebody: the operator's notifier runs, once for each notification and channel.

What may live here: the queue of notifications and the one short-lived process that delivers them.
What is worth telling is `notices`; the process that POSTs is `webhook`.

Invariants:
- Nothing here waits. The loop registers `fileno()` once, for reading, and calls `advance`; a
  notifier that does not end is killed, with its session, when its time is up.
- A notifier is given one JSON object on stdin and nothing else of ours: no descriptor, no lock, no
  nonce, no socket of a service manager. What it leaves behind in its session ends with it.
- A failing notifier costs its notification and is counted; nothing of it reaches the run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from supervisor import contract
from supervisor.channels import ENV_WEBHOOK, Channel
from supervisor.contract import Json
from supervisor.orphans import Owned
from supervisor.tail import printable

LIMIT_SECONDS: Final = 30.0
QUEUE_MAX: Final = 32
CLOSE_SECONDS: Final = 1.0
_WORDS_BYTES: Final = 4096  # of what a notifier writes to stderr, the end is kept
_WORDS_CHARACTERS: Final = 300

_NOT_GIVEN: Final = frozenset(
    {
        *(value for name, value in vars(contract).items() if name.startswith("ENV_")),
        ENV_WEBHOOK,
        *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),
        *("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"),
    }
)


def given_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a notifier gets of the supervisor's environment."""
    return {name: value for name, value in environment.items() if name not in _NOT_GIVEN}


@dataclass(slots=True)
class _Delivery:
    channel: Channel
    event: str
    process: Owned
    pidfd: int
    errors: int
    deadline: float
    killed: str = ""  # why, once it was
    words: bytes = b""


class Notifier:
    """At most one process at a time. `home` is where the operator's command runs, `say` takes a
    line for the log."""

    def __init__(
        self,
        channels: Sequence[Channel],
        environment: Mapping[str, str],
        home: Path,
        say: Callable[[str], None],
    ) -> None:
        self.sent = self.failed = self.dropped = 0
        self.channels = channels
        self._environment = given_environment(environment)
        self._home = home
        self._say = say
        self._queue: deque[tuple[Channel, Json]] = deque()
        self._current: _Delivery | None = None
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Readable when `advance` has something to do."""
        return self._epoll.fileno()

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._queue)

    def counts(self) -> Json:
        return {"sent": self.sent, "failed": self.failed, "dropped": self.dropped}

    def offer(self, notification: Json) -> None:
        """Takes a notification for every channel. The oldest makes room: the newest is the one
        that says how it ended."""
        for channel in self.channels:
            if len(self._queue) == QUEUE_MAX:
                self._drop(*self._queue.popleft(), "too many wait")
            self._queue.append((channel, notification))

    def advance(self, now: float) -> None:
        """Ends what has ended or is late, and starts what is next."""
        if self._current is not None:
            self._look_at(self._current, now)
        while self._current is None and self._queue:
            self._start(*self._queue.popleft(), now)

    def close(self) -> None:
        """Bounded: kills what still runs and drops what still waits."""
        if self._current is not None:
            self._kill(self._current, "this life of the supervisor ends")
            _ended(self._current.pidfd, CLOSE_SECONDS)
            self._look_at(self._current, time.monotonic())
        while self._queue:
            self._drop(*self._queue.popleft(), "this life of the supervisor ends")
        self._epoll.close()

    # --- one delivery ---

    def _start(self, channel: Channel, notification: Json, now: float) -> None:
        event = notification["event"]
        try:
            process, pidfd, errors = self._spawn(channel, orjson.dumps(notification) + b"\n")
        except OSError as error:
            self._fail(channel, event, f"it cannot be started: {error}")
            return
        self._epoll.register(pidfd, select.EPOLLIN)
        self._current = _Delivery(channel, event, process, pidfd, errors, now + LIMIT_SECONDS)

    def _spawn(self, channel: Channel, content: bytes) -> tuple[Owned, int, int]:
        """The process, its pidfd, and the end of its stderr that is read."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            errors, writer = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, errors)
            theirs.callback(os.close, writer)
            os.set_blocking(errors, False)
            reader = _as_file(content)
            theirs.callback(os.close, reader)
            process = Owned(
                channel.command,
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=writer,
                cwd=self._home,
                env={**self._environment, **channel.environment},
                start_new_session=True,
            )
            ours.callback(process.wait)
            ours.callback(process.kill)
            pidfd = os.pidfd_open(process.pid)
            ours.pop_all()
            return process, pidfd, errors

    def _look_at(self, delivery: _Delivery, now: float) -> None:
        self._listen(delivery)
        if _ended(delivery.pidfd, 0):
            self._finish(delivery)
        elif now >= delivery.deadline and not delivery.killed:
            self._kill(delivery, f"it had not ended after {LIMIT_SECONDS:g} s")

    def _listen(self, delivery: _Delivery) -> None:
        """One piece of what it has to say; the next look takes more. Nothing wakes the loop for
        it: who floods his stderr waits, and not we."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(delivery.errors, 16 * _WORDS_BYTES)
            delivery.words = (delivery.words + data)[-_WORDS_BYTES:]

    def _finish(self, delivery: _Delivery) -> None:
        # It is not reaped yet, so its session is still its own: nobody else can have the number.
        _kill_session(delivery.process.pid)
        self._listen(delivery)
        code = delivery.process.wait()
        self._epoll.unregister(delivery.pidfd)
        os.close(delivery.pidfd)
        os.close(delivery.errors)
        self._current = None
        if code == 0:
            self.sent += 1
            self._say(f"notified ({delivery.channel.name}): {delivery.event}")
            return
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        if delivery.killed:
            how = f"killed: {delivery.killed}"
        words = _last_line(delivery.words)
        self._fail(delivery.channel, delivery.event, f"{how}: {words}" if words else how)

    def _kill(self, delivery: _Delivery, why: str) -> None:
        """Its session is killed as at every end, once it is dead and can start nothing more."""
        delivery.killed = why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(delivery.pidfd, signal.SIGKILL)

    # --- what went wrong ---

    def _fail(self, channel: Channel, event: str, why: str) -> None:
        self.failed += 1
        self._say(f"notification of {event!r} not delivered (alarms.{channel.name}): {why}")

    def _drop(self, channel: Channel, notification: Json, why: str) -> None:
        self.dropped += 1
        event = notification["event"]
        self._say(f"notification of {event!r} dropped (alarms.{channel.name}): {why}")


def _ended(pidfd: int, seconds: float) -> bool:
    """Whether the process is dead, or dies within so many seconds."""
    end = select.poll()
    end.register(pidfd, select.POLLIN)
    return bool(end.poll(1000 * seconds))


def _as_file(content: bytes) -> int:
    """A descriptor that reads as `content`: unlike a pipe it holds up nobody, however long the
    content is and whether it is read or not."""
    descriptor = os.memfd_create("notification", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _last_line(words: bytes) -> str:
    lines = [line.strip() for line in words.decode("utf-8", "replace").splitlines()]
    return printable(next(filter(None, reversed(lines)), ""))[:_WORDS_CHARACTERS]


def _kill_session(session: int) -> None:
    """SIGKILL to every process of a session but its leader, each through a descriptor that was
    opened before the process was looked at."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == session or _session_of(int(name)) != session:
            continue
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(int(name))
            try:
                if _session_of(int(name)) == session:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
