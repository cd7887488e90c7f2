"""One operator request and its reply.

What may live here: the client's end of the operator socket, for commands and views.

Invariants:
- Four failures are told apart: no supervisor, refused, busy, deadline passed.
- The deadline is total and monotonic; a late reply can be asked for again under the same id.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from supervisor import contract
from supervisor.contract import Json
from supervisor.rundir import lock_holder


class NoSupervisor(Exception):
    """Nobody holds the run's lock, so nobody can answer."""


class DeadlinePassed(Exception):
    """No reply in time. `id` asks for the same reply again."""

    def __init__(self, id: str, seconds: float) -> None:
        super().__init__(
            f"no reply within {seconds:g} s; the request may still be carried out: ask again with"
            f" --request-id {id}"
        )
        self.id = id


@dataclass(frozen=True, slots=True)
class Answer:
    """`outcome` is done, refused or busy; `why` says why not."""

    id: str
    outcome: str
    why: str
    result: Json


def new_request_id() -> str:
    return uuid.uuid4().hex[:12]


def ask(directory: Path, verb: str, *, id: str, timeout_seconds: float, **content: Any) -> Answer:
    """Sends one request and waits for its reply. Raises NoSupervisor or DeadlinePassed."""
    deadline = time.monotonic() + timeout_seconds
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, 20)
        socket.set(zmq.MAXMSGSIZE, contract.MESSAGE_BYTES_MAX)
        socket.connect(
            f"ipc:///proc/self/fd/{directory_fd}/{contract.SOCKETS}/{contract.OPERATOR_SOCKET}"
        )
        absent = lock_holder(directory / contract.LOCK_FILE) is None
        socket.send(contract.encode_message(verb, id=id, **content))
        while True:
            if not socket.poll(int(max(0, min(0.5, deadline - time.monotonic())) * 1000)):
                # Whoever has ended may have replied last of all: nobody is there only where nobody
                # was before this wait, either.
                was_absent, absent = absent, lock_holder(directory / contract.LOCK_FILE) is None
                if absent and was_absent:
                    raise NoSupervisor(f"{directory}: no supervisor is running")
                if time.monotonic() >= deadline:
                    raise DeadlinePassed(id, timeout_seconds)
                continue
            _, body = contract.parse_message(socket.recv(), contract.ANSWER, "reply")
            if body["id"] in (id, ""):
                return Answer(id, body["outcome"], body.get("why", ""), body["result"])
    finally:
        socket.close(linger=0)
        context.term()
        os.close(directory_fd)
