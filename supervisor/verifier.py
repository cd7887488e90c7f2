"""The helper process that does the slow file work on checkpoints, and the loop's end of it.

`python -m supervisor.verifier --directory RUN` reads one JSON request a line on stdin and writes
one JSON reply a line on stdout, in order. It exists because the supervisor's loop must never
hash, read a checkpoint or unlink a gigabyte.

What may live here: the life of the helper and the wire to it. What a request may say and what it
does is `supervisor.checkpoint_requests`.

Invariants:
- The helper lives as long as its input is open. When that closes it stops between two chunks or
  two moves, without a reply; every operation is safe to stop there, as it is after SIGKILL.
- At most one helper works on a run directory: it holds a lock on the directory while it lives, so
  the helper of a killed supervisor is gone before the next one touches a file.
- A request gets exactly one reply, also when the helper dies in the middle of it.
- The loop's end never waits; only `close` does, for a bounded time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from supervisor.checkpoint_requests import Requests
from supervisor.contract import ContractError, ExitCode, Json, parse_object
from supervisor.orphans import Owned

CLOSE_SECONDS: Final = 1.0
_SIGNALS_OF_OTHERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NICENESS: Final = 10  # training goes first
_REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
_RECEIVE_BYTES: Final = 64 * 1024


# --- the helper ----------------------------------------------------------------------------------


class Abandoned(Exception):
    """Nobody is left to answer to."""


def serve(run_directory: Path, requests: int, replies: int) -> None:
    """Answers until `requests` ends. Raises Abandoned when that happens during a request."""
    hang_up = select.poll()
    hang_up.register(requests, 0)  # POLLHUP is always reported; nothing else interests us

    def tick() -> None:
        if hang_up.poll(0):
            raise Abandoned

    work = Requests(run_directory, tick)
    with open(requests, "rb", closefd=False) as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                raise Abandoned
            reply = orjson.dumps(work.answer(line), option=orjson.OPT_APPEND_NEWLINE)
            while reply:
                reply = reply[os.write(replies, reply) :]


def main() -> int:
    """The entry of the helper process."""
    if len(sys.argv) != 3 or sys.argv[1] != "--directory":
        print("usage: python -m supervisor.verifier --directory RUN", file=sys.stderr)
        return ExitCode.USAGE
    run_directory = Path(sys.argv[2])
    # The end of the input ends this process. A signal to the whole service must not do it while
    # the supervisor still needs its last checkpoint verified.
    for number in _SIGNALS_OF_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    lock = _lock(run_directory)
    try:
        serve(run_directory, sys.stdin.fileno(), sys.stdout.fileno())
    except (Abandoned, BrokenPipeError):
        return ExitCode.OK
    finally:
        os.close(lock)
    return ExitCode.OK


def _lock(run_directory: Path) -> int:
    """Waits until no other helper works on the directory; the descriptor that holds the lock."""
    descriptor = os.open(run_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        # A network file system cannot lock a directory. There the supervisor's own lock is all
        # the protection, as it is for everything else in a shared run.
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return descriptor


# --- the loop's end ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request. `kind` and `error` are empty when `ok`."""

    id: int
    do: str
    ok: bool
    result: Json
    kind: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Request:
    id: int
    do: str
    line: bytes


class Verifier:
    """Starts the helper and talks to it without ever waiting for it.

    The loop registers `fileno()` once, for reading, and calls `receive` when it is readable; the
    number stays the same when the helper dies and another is started. Requests are sent one at a
    time. If the helper dies, the request it was doing fails and the next one starts a new helper;
    where none can be started, the request fails too.

    Raises OSError from the constructor where no process can be started.
    """

    def __init__(self, run_directory: Path) -> None:
        self._command = [
            sys.executable,
            "-P",  # a file of the operator's own, random.py say, must not become a module of ours
            "-m",
            "supervisor.verifier",
            "--directory",
            os.fspath(run_directory),
        ]
        self._epoll = select.epoll()
        self._process: Owned | None = None
        self._pidfd = -1
        self._socket: socket.socket | None = None
        self._queue: deque[_Request] = deque()
        self._current: _Request | None = None
        self._unsent = b""
        self._received = bytearray()
        self._submitted = 0
        self._refused: list[Reply] = []  # what no helper could be started for
        self._spawn()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Readable when `receive` has something to do: a reply, a death, room to send."""
        return self._epoll.fileno()

    def submit(self, request: Json) -> int:
        """Queues a request (`do` and its fields) and returns the id that its reply will carry."""
        self._submitted += 1
        line = orjson.dumps({**request, "id": self._submitted}, option=orjson.OPT_APPEND_NEWLINE)
        self._queue.append(_Request(self._submitted, request["do"], line))
        self._advance()
        return self._submitted

    def receive(self) -> list[Reply]:
        """Every reply that has arrived, in the order of the requests."""
        dead = self._process is not None and self._process.poll() is not None
        replies = self._read()
        if dead:
            replies += self._bury()
        self._advance()
        refused, self._refused = self._refused, []
        return replies + refused

    def close(self) -> None:
        """Ends the helper, in the middle of a request if need be. Harmless when repeated."""
        if self._process is not None:
            self._process.kill()
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            # Bounded: a process inside a dead disk cannot be killed, and must not hold us up.
            ended.poll(1000 * CLOSE_SECONDS)
            self._process.poll()
            self._forget()
        self._epoll.close()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        # It ignores these, but only once it runs. Until then they wait, there as here: a signal to
        # the whole service would end it, and what was asked of it, while it begins.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_OTHERS)
        with theirs:
            try:
                process = Owned(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()  # nobody waits for it; `reap` has it then
            ours.close()
            raise
        ours.setblocking(False)
        self._process, self._socket = process, ours
        self._epoll.register(ours, select.EPOLLIN)
        self._epoll.register(self._pidfd, select.EPOLLIN)

    def _advance(self) -> None:
        """Sends what can be sent; starts a helper where one is needed."""
        if self._current is None and self._queue:
            if self._process is None and not self._try_to_spawn():
                return
            if self._socket is not None:
                self._current = self._queue.popleft()
                self._unsent = self._current.line
        self._send()

    def _try_to_spawn(self) -> bool:
        """False where no process can be started; what waits for one is refused then."""
        try:
            self._spawn()
        except OSError as error:
            why = f"no verifier can be started: {error}"
            self._refused += [Reply(one.id, one.do, False, {}, "os", why) for one in self._queue]
            self._queue.clear()
            return False
        return True

    def _send(self) -> None:
        if self._socket is None or self._current is None:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            if self._unsent == self._current.line:  # it never knew of this one
                self._queue.appendleft(self._current)
                self._current = None
            self._hang_up()
            return
        interest = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
        self._epoll.modify(self._socket, interest)

    def _read(self) -> list[Reply]:
        while self._socket is not None:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self._received += data
            if not data:
                self._hang_up()
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        return [self._parse(bytes(line)) for line in lines]

    def _parse(self, line: bytes) -> Reply:
        body = parse_object(line, "reply of the verifier", _REPLY_BYTES_MAX)
        current, self._current = self._current, None
        if current is None or body["id"] != current.id:
            raise ContractError(f"reply of the verifier: id {body['id']} was not asked for")
        return Reply(
            id=current.id,
            do=current.do,
            ok=body["ok"],
            result=body["result"],
            kind=body.get("kind", ""),
            error=body.get("error", ""),
        )

    def _hang_up(self) -> None:
        """Lets go of the socket; the death that belongs to it is told by the pidfd."""
        if self._socket is not None:
            self._epoll.unregister(self._socket)
            self._socket.close()
            self._socket = None
            self._unsent = b""
        if self._process is not None:
            self._process.kill()

    def _bury(self) -> list[Reply]:
        assert self._process is not None
        code = self._process.returncode
        self._forget()
        if self._current is None:
            return []
        current, self._current = self._current, None
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        error = f"the verifier ended {how} during {current.do}; the next request starts another"
        return [Reply(current.id, current.do, False, {}, "os" if code < 0 else "ours", error)]

    def _forget(self) -> None:
        self._hang_up()
        self._epoll.unregister(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._process = None
        self._received.clear()


if __name__ == "__main__":
    sys.exit(main())
