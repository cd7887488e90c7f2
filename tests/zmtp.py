"""A client of a ROUTER socket on the bare wire, so that it can misbehave at every byte.

It speaks as much of ZMTP 3.0 as a DEALER without security needs: greeting, READY, frames.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from supervisor import contract

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_PROPERTIES = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_READY = b"\x05READY" + _PROPERTIES
READY = bytes([4, len(_READY)]) + _READY
_MORE, _LONG, _COMMAND = 1, 2, 4


def frame(content: bytes) -> bytes:
    if len(content) < 256:
        return bytes([0, len(content)]) + content
    return bytes([_LONG]) + struct.pack(">Q", len(content)) + content


class Client:
    """A connection to one of the sockets of a run; nothing is sent before `greet`."""

    def __init__(self, run_directory: Path, name: str = contract.OPERATOR_SOCKET) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(30.0)
        descriptor = os.open(run_directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.socket.connect(f"/proc/self/fd/{descriptor}/{contract.SOCKETS}/{name}")
        finally:
            os.close(descriptor)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

    def greet(self) -> Client:
        """The handshake to its end: a message before that is a breach of the protocol."""
        self.socket.sendall(GREETING + READY)
        self._exactly(len(GREETING))
        assert self._frame()[1].startswith(b"\x05READY")
        return self

    def send(self, content: bytes) -> None:
        self.socket.sendall(frame(content))

    def receive(self) -> bytes:
        """The next message, past the commands of the other side."""
        while True:
            flags, content = self._frame()
            if not flags & (_COMMAND | _MORE):
                return content

    def _frame(self) -> tuple[int, bytes]:
        flags = self._exactly(1)[0]
        size = int.from_bytes(self._exactly(8 if flags & _LONG else 1), "big")
        return flags, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionResetError("the other side has hung up")
            data += more
        return data

    def close(self) -> None:
        self.socket.close()
