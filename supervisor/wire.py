"""The two sockets of a supervisor: the trainer's link and the operator's. The only server-side
user of zmq.

What may live here: frames in, checked events out, and back.

Invariants:
- Bound only while the run's lock is held: a second bind on an ipc path would steal it silently.
- Only the owner of the process gets as far as a socket: it is made in a directory that nobody else
  may enter, and for nobody else.
- A frame of an earlier life of the trainer, or of nobody we know, never becomes an event. An
  unknown identity is asked `who` and only a hello with the right attempt and nonce is accepted.
- Nothing blocks: a peer that does not read loses messages, never our time, and what waits for it
  is bounded in number and size.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from supervisor import contract
from supervisor.contract import ContractError, Json
from supervisor.rundir import RunError

FRAMES_PER_WAKE_UP: Final = 256
CLIENTS_REMEMBERED: Final = 4096
FRAMES_QUEUED_MAX: Final = 100  # for one peer, in each direction
CONNECTIONS_WAITING_MAX: Final = 1024


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
    and a renamed directory both work.

    `refused` counts frames that were not understood or not from our trainer, `unheard` what we had
    to say to a peer that was gone or did not read.
    """

    def __init__(self, directory_fd: int) -> None:
        self._base = f"/proc/self/fd/{directory_fd}/{contract.SOCKETS}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.refused = 0
        self.unheard = 0
        self._files: dict[str, tuple[int, int] | None] = {}
        self._expected: tuple[int, str] | None = None
        self._trainer_identity: bytes | None = None
        self._trainer_version = contract.CONTRACT_VERSION_OLDEST
        self._asked_who: set[bytes] = set()
        self._clients: OrderedDict[str, tuple[str, list[bytes]]] = OrderedDict()
        try:
            self._enclose()
            self.trainer = self._socket()
            self.operator = self._socket()
            self._bind(self.trainer, contract.TRAINER_SOCKET)
            self._bind(self.operator, contract.OPERATOR_SOCKET)
        except BaseException:  # nobody else could close the sockets that are open by now
            self._context.destroy(linger=0)
            raise

    def _enclose(self) -> None:
        """Makes the directory of the sockets. Raises RunError where others may enter it."""
        Path(self._base).mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(self._base)
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and mode & 0o077 == 0:
            return
        raise RunError(
            f"{Path(self._base).resolve()}: mode {mode:04o}, owner {found.st_uid}; expected a"
            f" directory of mode 0700 that belongs to user {os.geteuid()}, because who reaches a"
            " socket in it commands the run. Remove it and start again: it holds nothing to keep"
        )

    def _socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, contract.MESSAGE_BYTES_MAX)
        socket.set(zmq.SNDHWM, FRAMES_QUEUED_MAX)
        socket.set(zmq.RCVHWM, FRAMES_QUEUED_MAX)
        socket.set(zmq.BACKLOG, CONNECTIONS_WAITING_MAX)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], name: str) -> None:
        before = os.umask(0o077)
        try:
            socket.bind(f"ipc://{self._base}/{name}")
        finally:
            os.umask(before)
        self._files[name] = self._file(name)

    def _file(self, name: str) -> tuple[int, int] | None:
        try:
            found = os.stat(f"{self._base}/{name}")
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def look_after(self) -> str:
        """Looks whether the files of the sockets are still there and ours, and brings them back:
        cleaners of old files remove them, and whoever comes then finds nobody. To be called about
        once a second. Returns what is wrong, or nothing.

        One call lets go of what is gone, the next one binds: only by then has zmq closed the old
        socket, which would take a new file of its name away with it.
        """
        problems = []
        for socket, name in (
            (self.trainer, contract.TRAINER_SOCKET),
            (self.operator, contract.OPERATOR_SOCKET),
        ):
            try:
                if self._files[name] is None:
                    self._enclose()
                    self._bind(socket, name)
                elif self._file(name) != self._files[name]:
                    self._files[name] = None
                    socket.unbind(f"ipc://{self._base}/{name}")
            except (OSError, RunError, zmq.ZMQError) as error:
                problems.append(f"socket {name} is away and cannot be made again: {error}")
        return "; ".join(problems)

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
            self._refuse(identity, "", str(error))
            return []
        asked, waiting = self._clients.setdefault(content["id"], (verb, []))
        if asked != verb:
            self._refuse(identity, content["id"], f"this id is that of a {asked} that waits")
            return []
        if identity not in waiting:
            waiting.append(identity)
        while len(self._clients) > CLIENTS_REMEMBERED:
            self._clients.popitem(last=False)
        return [FromOperator(verb, content)]

    def _refuse(self, identity: bytes, id: str, why: str) -> None:
        """To this client alone, whoever else has asked under the id."""
        frame = contract.encode_message("reply", id=id, outcome="refused", why=why, result={})
        self._send(self.operator, identity, frame)

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
        if len(frame) > contract.MESSAGE_BYTES_MAX:
            why = f"{outcome}, but the reply has {len(frame)} bytes, more than a message may have"
            frame = contract.encode_message("reply", id=id, outcome="refused", why=why, result={})
        _, waiting = self._clients.pop(id, ("", []))
        for identity in waiting:
            self._send(self.operator, identity, frame)

    def _send(self, socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> bool:
        try:
            socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                self.unheard += 1
                return False
            raise
        return True


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
