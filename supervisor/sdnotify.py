"""What a service manager is told: ready, still alive, ending, and one line for people.

What may live here: datagrams to NOTIFY_SOCKET, in the words of sd_notify(3). What is true of the
run is the machine's business.

Invariants:
- Nothing here waits. Where nobody takes a message it is said again later, and the run goes on.
- The loop itself says that it is alive, never a thread beside it: a stuck loop must be noticed.
- Moments are the loop's own monotonic ones. One that comes late, after a sleep of the machine,
  makes one message and not many.
- NOTIFY_SOCKET and its like are ours alone: no child gets them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Final

from supervisor.contract import Json
from supervisor.state import TERMINAL, State

VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
# Said about once a second while we end. It outlasts what is silent at the very end: the death of
# a tree (30 s), the errands under way (10 s), a last sync.
EXTENSION_SECONDS: Final = 60
RETRY_SECONDS: Final = 0.25
LINE_CHARACTERS: Final = 200


def without_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for children, which must not speak in our name."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}


def ending(state: State) -> bool:
    """This life is over or will be as soon as it can: a restart or a pivot stops a trainer too,
    and is not the end."""
    return state.phase in TERMINAL or state.intent == "stop" or state.durable.wish == "stop"


def status_line(status: Json) -> str:
    """Where the run stands, on one line."""
    parts = [f"{status['phase']}: step {status['step']} of {status['target_step']}"]
    loss = status["loss"]
    if loss is not None:
        parts.append(f"loss {loss:.4f}" if isinstance(loss, float) else f"loss {loss}")
    if status["grace_seconds"] is not None:
        parts.append(f"the trainer has {round(status['grace_seconds'])} s left to save and end")
    if status["phase"] in TERMINAL and status["reason"]:
        parts.append(" ".join(str(status["reason"]).split()))
    return ", ".join(parts)[:LINE_CHARACTERS]


class ServiceManager:
    """Silent where nobody has asked to be told. `due_at` is when the loop must wake for it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._interval_seconds = _interval_seconds(environment) if self._address else None
        self._said: dict[str, str] = {}
        self._socket: socket.socket | None = None
        self.due_at: float | None = None if self._interval_seconds is None else 0.0
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def beat(self, now: float) -> None:
        """The loop is alive. Twice as often as asked for, so that one may come late."""
        if self.due_at is None or self._interval_seconds is None or now < self.due_at:
            return
        sent = self._send({"WATCHDOG": "1"})
        self.due_at = now + (
            self._interval_seconds if sent else min(self._interval_seconds, RETRY_SECONDS)
        )

    def tell(self, line: str, ends: bool) -> None:
        """Says what has changed since the last time, and again that an end is under way.

        READY does not wait for the trainer: it means that the run is owned, its record open, and
        every request answered. A trainer may load for twenty minutes, or die and be started again
        for an hour, while all of this holds; a service manager that took that for a start which
        failed would kill the one process that is dealing with it.
        """
        told = {"READY": "1", "STATUS": line, **({"STOPPING": "1"} if ends else {})}
        news = {key: value for key, value in told.items() if self._said.get(key) != value}
        more = {"EXTEND_TIMEOUT_USEC": str(EXTENSION_SECONDS * 1_000_000)} if ends else {}
        if (news or more) and self._send(news | more):
            self._said |= news

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, assignments: Mapping[str, str]) -> bool:
        """False where it was not taken: the queue is full, or whoever listened has gone. Neither
        may cost the run anything."""
        if self._socket is None or self._address is None:
            return False
        message = "\n".join(f"{key}={value}" for key, value in assignments.items())
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError:
            return False
        return True


def _address(text: str) -> Any:
    """The address of a socket file, or of an abstract name, which begins with "@"; None for
    anything else."""
    if text.startswith("@") and len(text) > 1:
        return b"\0" + os.fsencode(text[1:])
    return text if text.startswith("/") else None


def _interval_seconds(environment: Mapping[str, str]) -> float | None:
    """Half of what the watchdog allows; None where there is none, or where it watches another."""
    allowed = environment.get("WATCHDOG_USEC", "")
    whose = environment.get("WATCHDOG_PID", str(os.getpid()))
    if not allowed.isdecimal() or int(allowed) == 0 or whose != str(os.getpid()):
        return None
    return int(allowed) / 2_000_000
