"""The trainer's side of the contract: receipts, requests, the exit record.

What may live here: everything a training loop needs to be supervised, and nothing that needs
torch. Any PyTorch loop, or any Python program, can use it.

Invariants:
- The receipt file, not the link, is the record. Nobody runs ahead of it: `record` waits while
  the disk takes nothing.
- Nothing here waits for the supervisor. Where it is away, training goes on; a message that
  cannot be sent is dropped, because the receipts say the same. What somebody waits for, the hello
  and the newest `saved`, is sent once there is a supervisor to hear it.
- A disk that refuses ends nothing by itself. Only who wants to stop is told, after LAST_TRIES, that
  the last thing could not be written.
- A signal handler only sets a flag. Requests are looked at where the trainer polls.
- The link is of the process that made it. In one that was forked off it, such as a loader of data,
  it says and hears nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

import zmq

from supervisor import contract
from supervisor.contract import ContractError, Entry, ExitLine, LoadedLine, Receipt
from supervisor.life import Life as Life, life_from_environment as life_from_environment
from supervisor.output import ForgivingOutput
from supervisor.receipt_file import ReceiptFile

STEP_MESSAGE_INTERVAL_SECONDS: Final = 0.05
PAUSED_INTERVAL_SECONDS: Final = 1.0
PHASE_INTERVAL_SECONDS: Final = 5.0  # for a supervisor that has come since, and heard nothing
RETRY_SECONDS: Final = 1.0
SAVE_AGAIN_SECONDS: Final = 30.0  # so that a disk that stays full does not cost each step a save
LAST_TRIES: Final = 5

T = TypeVar("T")


class ReceiptNotWritten(OSError):
    """A step is not on record and this life ends: the next one executes it again."""


@dataclass(frozen=True, slots=True)
class Due:
    """What a boundary has to do: save for `reason` (None: nothing asked), then stop or pause."""

    reason: str | None
    requests: tuple[str, ...]
    stop: bool
    pause: str | None


class Link:
    """One life of the trainer, as the supervisor sees it. Use it as a context manager: leaving
    it restores the signal handlers and closes everything."""

    def __init__(self, life: Life) -> None:
        self.life = life
        directory = life.run_directory
        receipts = directory / contract.RECEIPTS
        receipts.mkdir(exist_ok=True)
        self.receipts_path = receipts / f"{contract.attempt_stem(life.attempt)}.jsonl"
        self._output: ForgivingOutput | None = None
        self._told = ""
        self._hello: dict[str, Any] | None = None
        self._owed: dict[str, dict[str, Any]] = {}  # verb -> content, until the wire has taken it
        self._last_step_message = 0.0
        self._step = life.resume_step or 0
        self._phase: dict[str, Any] = {}
        self._phase_told = 0.0
        self._checkpoints: dict[str, str] = {}
        self._stop: dict[str, str] = {}
        self._pause: str | None = None
        self._exit_now = False
        self._resume_now = False
        self._paused: dict[str, Any] = {}
        self._served: dict[str, dict[str, Any]] = {}  # request -> the message that it was served
        self._previous_handlers: dict[int, Any] = {}
        self._explains = False
        self._terms = 0
        self._usr1s = 0
        self._usr1s_tried = 0  # those that a save has been due for,
        self._usr1s_served = 0  # and those that one has succeeded for
        self._unsaved_at: float | None = None  # when the last save failed that is still owed
        self._pid = os.getpid()
        # Through an open descriptor: a long path fits, and a renamed run directory is followed.
        self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.directory = Path(f"/proc/self/fd/{self._directory_fd}")
        self._receipts = ReceiptFile(self.directory / contract.RECEIPTS / self.receipts_path.name)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        if life.supervised:
            self._connect()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Puts the signal handlers back and closes what is open. Safe to call twice."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
        if self._explains:
            faulthandler.unregister(signal.SIGUSR2)
            self._explains = False
        if self._socket is not None:
            # A farewell may wait a moment for the wire; a dead supervisor must not hold us.
            self._socket.close(linger=200)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self._receipts.close()
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1
        if self._output is not None:
            self._output.restore()
            self._output = None

    def forgive_output(self) -> None:
        """From now on a print that the disk of the log refuses costs its line, not the training."""
        self._output = self._output or ForgivingOutput()

    # --- signals ---

    def install_signal_handlers(self) -> str | None:
        """SIGTERM asks for checkpoint and exit, SIGUSR1 for checkpoint and carry on; SIGUSR2 writes
        the stacks of all threads to standard error.

        Python installs handlers in the main thread only. Elsewhere nothing is changed and the
        sentence to tell the user is returned: requests then arrive by message alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return (
                "signal handlers need the main thread: SIGTERM and SIGUSR1 are not handled,"
                " stop and checkpoint requests arrive by the supervisor's link only"
            )
        for number, handler in ((signal.SIGTERM, self._on_term), (signal.SIGUSR1, self._on_usr1)):
            self._previous_handlers[number] = signal.signal(number, handler)
        if self.life.supervised:
            # In C, so that it also speaks for a thread that holds the interpreter lock for ever.
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
            self._explains = True
        return None

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._terms += 1
        else:  # a worker that was forked has inherited this; it is to end, as any process does
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._usr1s += 1

    # --- receipts ---

    def record(self, receipt: Receipt) -> None:
        """Appends one line, however long the disk makes us wait. Raises ReceiptNotWritten where a
        stop is wanted meanwhile; the line is still the first to be written when anything is."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"only process {self._pid}, which made the link, records steps")
        self._receipts.add(contract.encode_receipt(receipt))
        step = getattr(receipt, "step", self.life.resume_step or 0)
        try:
            self._insist(self._receipts.flush, step, self._checkpoints)
        except OSError as error:
            text = f"a receipt of step {step} could not be written: {error}"
            raise ReceiptNotWritten(error.errno, text) from error
        if isinstance(receipt, Entry):
            self._step = receipt.step
            now = time.monotonic()
            if now - self._last_step_message >= STEP_MESSAGE_INTERVAL_SECONDS:
                self._last_step_message = now
                self._send("step", step=receipt.step, loss=contract.encode_number(receipt.loss))

    def sync(self) -> None:
        """Makes every receipt durable; called before a checkpoint is committed."""
        self._receipts.sync()

    def farewell(self, why: str, step: int, code: int, message: str = "") -> None:
        """Writes and syncs the exit record, the last line of this life, and says goodbye. Raises
        OSError where the disk does not take it in LAST_TRIES."""
        requests = list({**self._served, **self._stop})
        # What it quotes may be no text, as the name of a file, and longer than a line may be.
        message = message[: contract.RECEIPT_BYTES_MAX // 16].encode(errors="replace").decode()
        line = ExitLine(why=why, step=step, code=code, requests=requests, message=message)
        self._receipts.add(contract.encode_receipt(line))
        self._insist(self._receipts.sync, step, (), leaving=True)
        self._send("farewell", why=why, step=step)

    # --- a disk that refuses ---

    def save(
        self, write: Callable[[], T], step: int, requests: Iterable[str], *, must: bool
    ) -> T | None:
        """Runs `write`, which saves a checkpoint and raises OSError where the disk refuses it.

        None: it did, which is said, `requests` are answered by it, and training goes on. The save
        is owed then: a boundary is due every SAVE_AGAIN_SECONDS until one succeeds. `must`, where
        there is nothing to train on to (the last step, a stop): it is tried again until it works;
        who wants to stop by then gets the error.
        """
        if must:
            return self._insist(write, step, requests)
        try:
            return write()
        except OSError as error:
            self._unsaved_at = time.monotonic()
            self._tell_unsaved(error, step, requests)
            return None

    def _insist(
        self, act: Callable[[], T], step: int, requests: Iterable[str], leaving: bool = False
    ) -> T:
        """Until it works. Once a stop is wanted, or while `leaving`, LAST_TRIES more."""
        tries = LAST_TRIES
        while True:
            try:
                return act()
            except OSError as error:
                self._tell_unsaved(error, step, list(requests))
                if leaving or self.stop_wanted():
                    tries -= 1
                    if tries == 0:
                        raise
            self._rest()

    def _tell_unsaved(self, error: OSError, step: int, requests: Iterable[str]) -> None:
        """A stop and a pause are not answered by this: they go on."""
        failed = [request for request in requests if request in self._checkpoints]
        for request in failed:
            del self._checkpoints[request]
        told = f"step {step} is not saved: {error}"
        if told != self._told:  # else it would fill the log while it waits for room
            self._told = told
            print(told, file=sys.stderr)
        content = {"step": step, "why": str(error), "errno": error.errno or 0, "requests": failed}
        self._send("unsaved", **content)

    def _rest(self) -> None:
        """RETRY_SECONDS, or until something is asked for."""
        until = time.monotonic() + RETRY_SECONDS
        terms = self._terms
        while (left := until - time.monotonic()) > 0 and self._terms == terms:
            step_seconds = min(left, 0.1)
            if self._socket is None:
                time.sleep(step_seconds)
            else:
                self._socket.poll(int(step_seconds * 1000))
                self.poll()

    # --- requests ---

    def stop_wanted(self) -> bool:
        """Polls. True once somebody asked this life to end at the next boundary: long phases
        (loading, sampling, evaluating) look here and give up early."""
        self.poll()
        return self._exit_now or self._terms > 0 or "now" in self._stop.values()

    def due(self, *, cadence: bool) -> Due:
        """What this boundary owes. `cadence`: it is a multiple of the checkpoint cadence. A save
        that the disk refused is owed at any boundary, now and then; a pause waits for the cadence.
        """
        self.poll()
        requests = [i for i, at in self._checkpoints.items() if at == "now" or cadence]
        stops = [i for i, at in self._stop.items() if at == "now" or cadence]
        pause = self._pause if cadence else None
        term = self._terms > 0
        failed_at = self._unsaved_at
        owed = failed_at is not None and time.monotonic() - failed_at >= SAVE_AGAIN_SECONDS
        usr1 = self._usr1s > (self._usr1s_served if owed else self._usr1s_tried)
        reason: str | None
        if pause is not None:
            reason = "pivot"
        elif term:
            reason = "sigterm"
        elif stops or requests:
            reason = "operator"
        elif usr1:
            reason = "sigusr1"
        else:
            reason = "cadence" if cadence or owed else None
        named = [*requests, *stops, *([pause] if pause else [])]
        if reason is not None:
            self._usr1s_tried = self._usr1s
        return Due(reason, tuple(named), bool(stops) or term or self._exit_now, pause)

    def poll(self) -> None:
        """Takes in every message that has arrived. Costs about a microsecond when none has."""
        if self._socket is None or os.getpid() != self._pid:
            return
        for verb, content in list(self._owed.items()):
            self._say(verb, content)
        if self._phase and time.monotonic() - self._phase_told >= PHASE_INTERVAL_SECONDS:
            self._tell_phase()
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            frame = self._socket.recv(zmq.NOBLOCK)
            try:
                verb, content = contract.parse_message(frame, contract.DOWN, "message")
            except ContractError as error:
                # A newer supervisor, or a broken one: its mistake must not end the training.
                print(f"link: a frame was not understood and is dropped: {error}", file=sys.stderr)
                continue
            match verb:
                case "checkpoint":
                    self._take(self._checkpoints, content)
                case "stop":
                    self._take(self._stop, content)
                case "pause":
                    self._pause = content["id"]
                    self._send("seen", id=content["id"])
                case "exit":
                    self._exit_now = True
                case "resume":
                    self._resume_now = True
                case "who" if self._hello is not None:
                    self._say("hello", self._hello)

    def _take(self, requests: dict[str, str], content: Mapping[str, Any]) -> None:
        id = content["id"]
        self._send("seen", id=id)
        if id in self._served:
            # It was served, and the supervisor that was told has died since.
            self._send("saved", **self._served[id])
        else:
            requests[id] = content["at"]

    # --- what the trainer says ---

    def hello(self, step: int, parameters: int, policy_digest: str) -> None:
        self._hello = {
            "pid": os.getpid(),
            "step": step,
            "parameters": parameters,
            "policy_digest": policy_digest,
            "capabilities": ["checkpoint", "stop", "pause"],
        }
        self.record(LoadedLine(self.life.attempt, step))
        self._say("hello", self._hello)

    def phase(self, phase: str, deadline_seconds: float | None = None) -> None:
        """Announces a phase of contract.TRAINER_PHASES; a long one gives a hint of its limit."""
        self._phase = {"phase": phase, "deadline_seconds": deadline_seconds}
        self._tell_phase()

    def _tell_phase(self) -> None:
        self._phase_told = time.monotonic()
        self._send("phase", step=self._step, **self._phase)

    def saved(
        self, step: int, digest: str, reason: str, requests: tuple[str, ...], seconds: float
    ) -> None:
        """A checkpoint is committed: its requests are served and never served again."""
        self._unsaved_at = None
        self._usr1s_served = self._usr1s_tried
        content = {
            "step": step,
            "digest": digest,
            "reason": reason,
            "requests": list(requests),
            "seconds": seconds,
        }
        for request in requests:
            self._checkpoints.pop(request, None)
            self._served[request] = content
        self._say("saved", content)

    def paused(self, step: int, request: str) -> None:
        self._pause = None
        self._resume_now = False
        self._paused = {"step": step, "id": request}
        self._send("paused", **self._paused)

    def wait_for_exit(self, timeout_seconds: float) -> bool:
        """While paused, and says so again and again, because a supervisor that has just come does
        not know: True when told to exit; False when told to go on, or when nobody says anything
        for this long: then training goes on too."""
        deadline = time.monotonic() + timeout_seconds
        say_at = time.monotonic() + PAUSED_INTERVAL_SECONDS
        while not self._exit_now and self._terms == 0:
            now = time.monotonic()
            if self._socket is None or self._resume_now or now >= deadline:
                return False
            if now >= say_at:
                say_at = now + PAUSED_INTERVAL_SECONDS
                self._send("paused", **self._paused)
            self._socket.poll(int(min(deadline - now, 0.1) * 1000))
            self.poll()
        return True

    def _say(self, verb: str, content: dict[str, Any]) -> None:
        """Sends it, now or as soon as the connection stands: poll tries again."""
        if self._send(verb, **content):
            self._owed.pop(verb, None)
        else:
            self._owed[verb] = content

    def _send(self, verb: str, **content: Any) -> bool:
        if self._socket is None or os.getpid() != self._pid:
            return False
        message = contract.encode_message(
            verb, attempt=self.life.attempt, nonce=self.life.nonce, **content
        )
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            # No supervisor is listening. The receipts carry the same facts; it asks `who` when it
            # is back.
            return False
        return True

    def _connect(self) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 1000)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.MAXMSGSIZE, contract.MESSAGE_BYTES_MAX)
        socket.connect(f"ipc://{self.directory}/{contract.SOCKETS}/{contract.TRAINER_SOCKET}")
        self._socket = socket
