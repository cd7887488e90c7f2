"""The two sockets of a supervisor: the trainer's link and the operator's. The only server-side
user of zmq.

What may live here: frames in, checked events out, and back.

Invariants:
- Bound only while the run's lock is held: a second bind on an ipc path would steal it silently.
- A frame of an earlier life of the trainer, or of nobody we know, never becomes an event. An
  unknown identity is asked `who` and only a hello with the right attempt and nonce is accepted.
- Nothing blocks: a peer that does not read loses messages, never our time.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from supervisor import contract
from supervisor.contract import ContractError, Json

FRAMES_PER_WAKE_UP: Final = 256
CLIENTS_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class FromTrainer:
    verb: str
    content: Json


@dataclass(frozen=True, slots=True)
class FromOperator:
    verb: str
    content: Json


class Wire:
    """`directory_fd` is the open run directory; sockets are reached through it, so that long paths
    and a renamed directory both work."""

    def __init__(self, directory_fd: int) -> None:
        self._base = f"/proc/self/fd/{directory_fd}/{contract.SOCKETS}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.refused = 0
        self._expected: tuple[int, str] | None = None
        self._trainer_identity: bytes | None = None
        self._trainer_version = contract.CONTRACT_VERSION_OLDEST
        self._asked_who: set[bytes] = set()
        self._clients: OrderedDict[str, list[bytes]] = OrderedDict()
        try:
            Path(self._base).mkdir(mode=0o700, exist_ok=True)
            os.chmod(self._base, 0o700)
            self.trainer = self._bind(contract.TRAINER_SOCKET)
            self.operator = self._bind(contract.OPERATOR_SOCKET)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bind(self, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, contract.MESSAGE_BYTES_MAX)
        socket.set(zmq.SNDHWM, 1000)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{self._base}/{name}")
        return socket

    def close(self) -> None:
        """Gives replies that are under way a moment, then closes everything and unlinks."""
        self.trainer.close(linger=0)
        self.operator.close(linger=500)
        self._context.term()
        for name in (contract.TRAINER_SOCKET, contract.OPERATOR_SOCKET):
            Path(f"{self._base}/{name}").unlink(missing_ok=True)

    def expect(self, attempt: int, nonce: str) -> None:
        """From now on only this life of the trainer is heard."""
        self._expected = (attempt, nonce)
        self._trainer_identity = None
        self._trainer_version = contract.CONTRACT_VERSION_OLDEST
        self._asked_who.clear()

    def receive(self) -> list[FromTrainer | FromOperator]:
        """Whatever has arrived, at most FRAMES_PER_WAKE_UP of each; call again after more."""
        heard: list[FromTrainer | FromOperator] = []
        for _ in range(FRAMES_PER_WAKE_UP):
            parts = _receive(self.trainer)
            if parts is None:
                break
            heard.extend(self._from_trainer(parts))
        for _ in range(FRAMES_PER_WAKE_UP):
            parts = _receive(self.operator)
            if parts is None:
                break
            heard.extend(self._from_operator(parts))
        return heard

    def _from_trainer(self, parts: list[bytes]) -> list[FromTrainer | FromOperator]:
        identity = parts[0]
        try:
            if len(parts) != 2:
                raise ContractError(f"message: {len(parts) - 1} frames, expected 1")
            verb, content = contract.parse_message(parts[1], contract.UP, "message")
        except ContractError:
            self.refused += 1
            return []
        if (content["attempt"], content["nonce"]) != self._expected:
            self.refused += 1
            return []
        if verb == "hello":
            self._trainer_identity = identity
            self._trainer_version = content.pop("version")
        elif identity != self._trainer_identity and identity not in self._asked_who:
            # It carries the right nonce, so it is our trainer from before we were (re)started.
            # Its word counts; what we need is the hello that names its step.
            self._asked_who.add(identity)
            self._trainer_identity = identity
            self.send_trainer("who", {})
        return [FromTrainer(verb, content)]

    def _from_operator(self, parts: list[bytes]) -> list[FromTrainer | FromOperator]:
        identity = parts[0]
        try:
            if len(parts) != 2:
                raise ContractError(f"request: {len(parts) - 1} frames, expected 1")
            verb, content = contract.parse_message(parts[1], contract.ASK, "request")
        except ContractError as error:
            self.refused += 1
            self._send(
                self.operator,
                identity,
                contract.encode_message(
                    "reply", id="", outcome="refused", why=str(error), result={}
                ),
            )
            return []
        waiting = self._clients.setdefault(content["id"], [])
        if identity not in waiting:
            waiting.append(identity)
        while len(self._clients) > CLIENTS_REMEMBERED:
            self._clients.popitem(last=False)
        return [FromOperator(verb, content)]

    def send_trainer(self, verb: str, content: Json) -> bool:
        """False where no trainer is connected, or where it does not read. One that an older
        version of us has started is spoken to in its own version, and until its hello has told that
        in the oldest."""
        if self._trainer_identity is None:
            return False
        frame = contract.encode_message(verb, **content, version=self._trainer_version)
        return self._send(self.trainer, self._trainer_identity, frame)

    def reply(self, id: str, outcome: str, why: str, result: Json) -> None:
        """To every client that asked under this id."""
        frame = contract.encode_message("reply", id=id, outcome=outcome, why=why, result=result)
        for identity in self._clients.pop(id, []):
            self._send(self.operator, identity, frame)

    def _send(self, socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> bool:
        try:
            socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                # It is gone or it does not read.
                return False
            raise
        return True


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
