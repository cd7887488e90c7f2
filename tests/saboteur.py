"""A trainer without torch, which can misbehave on command.

It speaks the link, writes receipts and small checkpoints, and resumes; a deterministic function of
the step stands in for training. Steps and cadence come from run.toml. Run by the supervisor as
`trainer.command`, without arguments; what it is to do wrong comes by the environment:

- SABOTEUR_FAULTS: a comma-separated list of `name@when` or `name@when#attempt` (in every attempt
  without `#`), where `when` is a step or one of load, hello, paused, exit (before the exit line)
  and gone (after it). Names: kill, signalN (dies of signal N), segv, deaf, native (hangs in native
  code that no signal interrupts), exitN (leaves with code N, and says so in its exit line), crashN
  (leaves with code N without a word), wrong (another loss than last time), gap (skips a step),
  restless (does not wait once it has paused), limit (little address space from here on), grow
  (takes memory until it has none), ecc (ends by a device that is broken), and torn:STAGE, a kill
  inside the publication of this step's checkpoint, for the stages of `checkpoint_kit.publish`.
  Others leave processes behind, each of which writes its pid to a line of SABOTEUR_LEFT: stray (of
  another session, with the lock), worker (of ours), daemon (of no session of ours, without the
  lock), bare (such a one that has lost its environment too), twins (a worker and a daemon, and
  between them a parent that has ended), orphansN (N of them that end at once). Those of HANGS make
  no progress any more; `stalled@STEP` is stuck in the save of that step. workers: it has two
  processes of its own session without which it cannot train; chatty: prints a thousand lines;
  hijack: lets a library have SIGUSR1; unsignalled: no signal reaches it; linger: waits while the
  file SABOTEUR_HOLD.end is there. These only print: words (a line, which is not flushed), flood
  (10 MB without a line end), noise (random bytes), environment (its own), trace (a traceback).
- SABOTEUR_GATE: a file with a number; training is held at that step until the file says more.
- SABOTEUR_HOLD: a file; while it is there, a save waits before its checkpoint is written.
- SABOTEUR_CGROUP: a cgroup.procs; it moves itself there before it loads.
- SABOTEUR_MUTE: anything; it has no link then and knows only signals.
- SABOTEUR_PARAMETERS: how many a checkpoint holds; six without it.
- SABOTEUR_PAUSE: how many seconds it waits for the word to exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import checkpoint_kit

from supervisor import contract
from supervisor.contract import AuditLine, Entry, EnvironmentLine, EvaluationLine
from supervisor.link import Link, life_from_environment

PARAMETERS = int(os.environ.get("SABOTEUR_PARAMETERS", "6"))
HELD_SECONDS = 0.005  # how long a step would take that the gate does not let happen
MOMENTS = ("load", "hello", "paused", "exit", "gone")
WORDS = {65: "data", 75: "again", 78: "configuration", 80: "non-finite"}


def loss_of(step: int) -> float:
    """A loss that looks random and depends on the step alone."""
    word = hashlib.sha256(str(step).encode()).digest()
    return 2.0 + int.from_bytes(word[:4], "little") / 2**32


def planned_faults(attempt: int) -> dict[str, list[str]]:
    """What this attempt does wrong: when -> names."""
    found: dict[str, list[str]] = {}
    for item in filter(None, os.environ.get("SABOTEUR_FAULTS", "").split(",")):
        name, _, where = item.partition("@")
        when, _, only = where.partition("#")
        assert when in MOMENTS or when.isdecimal(), item
        if not only or int(only) == attempt:
            found.setdefault(when, []).append(name)
    return found


class Saboteur:
    """One life. `step` is the number of completed updates."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.life = link.life
        with (link.life.settings_file or link.directory / contract.RUN_FILE).open("rb") as file:
            settings = tomllib.load(file)
        self.run_id: str = settings["run"]["id"]
        self.target: int = settings["training"]["steps"]
        self.cadence: int = settings["checkpoint"]["every"]
        policy = settings.get("policy", {})
        self.arms = [arm["name"] for arm in policy.get("arms", [])] or ["prose"]
        self.pause_seconds = float(os.environ.get("SABOTEUR_PAUSE", "30"))
        self.planned = planned_faults(link.life.attempt)
        self.step = self.saved = link.life.resume_step or 0
        self.told: str | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        self.misbehave("load")
        self.link.record(EnvironmentLine(self.life.attempt, {"saboteur": True}))
        self.link.hello(self.step, PARAMETERS, "0" * 64)
        self.connect()
        self.misbehave("hello")
        while not self.boundary():
            if self.held():
                time.sleep(HELD_SECONDS)
            else:
                self.update()
        self.misbehave("exit")
        self.link.farewell("finished" if self.step >= self.target else "stopped", self.step, 0)
        self.misbehave("gone")
        return 0

    def connect(self) -> None:
        """Waits, not for ever, until the hello has left. A trainer that does arithmetic has long
        been connected by its first checkpoint; here a whole run takes less time than that."""
        for _ in range(100):
            self.link.poll()
            if not self.link._owed:
                return
            time.sleep(HELD_SECONDS)

    def boundary(self) -> bool:
        """Saves if that is due. True: this life is over."""
        regular = self.step % self.cadence == 0 or self.step == self.target
        due = self.link.due(cadence=regular and self.step > self.saved)
        if self.link._pause not in (None, self.told):
            self.told = self.link._pause
            print(f"asked to pause: {self.told}", flush=True)
        until = self.life.until_step is not None and self.step >= self.life.until_step
        final = self.step >= self.target
        saved = True
        if due.reason is not None and self.step > 0:
            saved = self.save(due.reason, due.requests, due.stop or until or final)
        elif until and self.step > self.saved:
            self.save("cadence", (), True)
        if saved and due.pause is not None and not due.stop and not final:
            self.link.paused(self.step, due.pause)
            self.misbehave("paused")
            restless = "restless" in self.planned.get("paused", ())
            if not restless and self.link.wait_for_exit(self.pause_seconds):
                return True
        return due.stop or until or final

    def held(self) -> bool:
        gate = os.environ.get("SABOTEUR_GATE")
        return gate is not None and self.step >= int(Path(gate).read_text())

    def update(self) -> None:
        if any(worker.poll() is not None for worker in self.workers):
            raise RuntimeError("a data worker is gone")
        self.step += 1
        self.misbehave(str(self.step))
        names = self.planned.get(str(self.step), ())
        if "gap" in names:
            return
        loss = loss_of(self.step) + (1e-9 if "wrong" in names else 0.0)
        life, seen = self.life, 10 * self.step
        arm = self.arms[self.step % len(self.arms)]
        self.link.record(
            Entry(self.step, loss, time.time(), life.attempt, life.epoch, arm, seen, 1e-3)
        )

    def save(self, reason: str, requests: tuple[str, ...], must: bool) -> bool:
        """False where the disk refuses the checkpoint and training goes on without it."""
        begin = time.monotonic()
        step, life = self.step, self.life
        self.link.phase("save")
        samples = [{"prompt": "The ", "text": f"step {step}"}]
        self.link.record(AuditLine(step, time.time(), life.attempt, life.epoch, samples, {}))
        self.link.record(EvaluationLine(step, life.attempt, loss_of(-step), {}))
        data = checkpoint_kit.binary(step, PARAMETERS)
        manifest = checkpoint_kit.manifest(
            data,
            step,
            PARAMETERS,
            run_id=self.run_id,
            attempt=life.attempt,
            epoch=life.epoch,
            reason=reason,
            requests=requests,
            state=checkpoint_kit.state(step, self.arms),
        )
        if "stalled" in self.planned.get(str(step), ()):
            print("the saboteur hangs: stalled", flush=True)
            block()
        directory = self.link.directory / contract.CHECKPOINTS
        torn = [n[5:] for n in self.planned.get(str(step), ()) if n.startswith("torn:")]
        hold(f"saves step {step}")

        def publish() -> bool:
            self.link.sync()
            if not (directory / f"{contract.checkpoint_stem(step)}.bin").exists():
                checkpoint_kit.publish(
                    directory,
                    step,
                    data,
                    manifest.to_bytes(),
                    attempt=life.attempt,
                    nonce=life.nonce,
                    stop_before=torn[0] if torn else None,
                    synced=True,
                )
            return True

        saved = self.link.save(publish, step, requests, must=must)
        self.link.phase("step")
        if torn:
            kill()
        if not saved:
            return False
        seconds = time.monotonic() - begin
        self.link.saved(step, manifest.binary_digest, reason, requests, seconds)
        self.saved = step
        return True

    # --- what goes wrong ---

    def misbehave(self, when: str) -> None:
        for name in self.planned.get(when, ()):
            if name == "kill":
                kill()
            elif name == "segv":
                die_of(signal.SIGSEGV)
            elif name.startswith("signal"):
                die_of(int(name[6:]))
            elif name == "limit":
                limit_address_space()
            elif name == "grow":
                grow()
            elif name == "ecc":
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            elif name == "deaf":
                signal.signal(
                    signal.SIGTERM, lambda *_: print("SIGTERM, and no answer", flush=True)
                )
                while True:
                    signal.pause()
            elif name in HANGS:
                print(f"the saboteur hangs: {name}", flush=True)
                HANGS[name]()
            elif name == "unsignalled":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            elif name in LEFTOVERS:
                leave(name, self.life.lock_fd)
            elif name.startswith("orphans"):
                leave_orphans(int(name[7:]))
            elif name == "workers":
                self.workers = [subprocess.Popen([sys.executable, "-c", WORKER]) for _ in range(2)]
            elif name == "hijack":
                signal.signal(signal.SIGUSR1, lambda *_: None)
            elif name == "chatty":
                for line in range(1000):
                    print(f"step {self.step}, line {line}")
            elif name == "linger":
                hold("lingers", ".end")
            elif name in OUTPUTS:
                OUTPUTS[name]()
            elif name.startswith("exit"):
                code = int(name[4:])
                message = f"the saboteur leaves with {code}"
                self.link.farewell(WORDS[code], self.step, code, message)
                sys.exit(code)
            elif name.startswith("crash"):
                print("the saboteur crashes", file=sys.stderr)
                os._exit(int(name[5:]))


def spin() -> NoReturn:
    """Busy, and none the further for it."""
    while True:
        pass


def seem_alive() -> NoReturn:
    """A helper thread shows life while the work stands still."""
    threading.Thread(target=spin_slowly, daemon=True).start()
    while True:
        threading.Event().wait()


def spin_slowly() -> NoReturn:
    while True:
        print("still here", flush=True)
        time.sleep(HELD_SECONDS)


def block() -> NoReturn:
    """Waits for data that never come, as a loader does on storage that has gone."""
    reader, _writer = os.pipe()
    while True:
        os.read(reader, 1)


def stop() -> NoReturn:
    """The kernel gives it no time any more."""
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


def hang_in_native_code() -> None:
    """The interpreter's lock is kept, as by many an extension; a lock that is taken twice by one
    thread is waited for whatever signal comes."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


HANGS: Final = {
    "native": hang_in_native_code,
    "spin": spin,
    "seeming": seem_alive,
    "block": block,
    "frozen": stop,
}


def print_trace() -> None:
    try:
        raise ValueError("the first of all troubles")
    except ValueError:
        traceback.print_exc()


FLOOD = b"x" * 10_000_000
NOISE_BYTES = 300_000
OUTPUTS: dict[str, Callable[[], object]] = {
    "words": lambda: print("words that nobody flushed"),
    "flood": lambda: sys.stdout.buffer.write(FLOOD),
    "noise": lambda: sys.stdout.buffer.write(os.urandom(NOISE_BYTES)),
    "environment": lambda: print(dict(os.environ)),
    "trace": print_trace,
}


def kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives SIGKILL")


def die_of(number: int) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def limit_address_space() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 32 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def grow() -> NoReturn:
    taken = []
    while True:
        taken.append(bytearray(os.urandom(2**20)))


def hold(what: str, ending: str = "") -> None:
    """Says what is held, once it is, and waits while the file is there."""
    place = os.environ.get("SABOTEUR_HOLD", "") + ending
    if not os.path.exists(place):
        return
    print(f"held: {what}", flush=True)
    while os.path.exists(place):
        time.sleep(HELD_SECONDS)


# Like a data loader's: it dies of SIGTERM, and of the end of whoever it works for.
WORKER = (
    "import os, select; w = os.pidfd_open(os.getppid()); p = select.poll(); p.register(w); p.poll()"
)

# No SIGTERM for it, and no end of its own.
STRAY = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"


LEFTOVERS = {
    "stray": {"lock": True, "session": True, "environment": True},
    "worker": {"lock": False, "session": False, "environment": True},
    "daemon": {"lock": False, "session": True, "environment": True},
    "bare": {"lock": False, "session": True, "environment": False},
    "twins": {"lock": False, "session": False, "environment": True},
}


def leave(name: str, lock_fd: int | None) -> None:
    """A process that outlives this one, and is deaf."""
    assert lock_fd is not None
    how = LEFTOVERS[name]
    if name == "twins":
        if os.fork() == 0:
            for one in ("worker", "daemon"):
                leave(one, lock_fd)
            os._exit(0)
        os.wait()
        return
    stray = subprocess.Popen(
        [sys.executable, "-S", "-c", STRAY],
        stdout=subprocess.PIPE,
        pass_fds=(lock_fd,) if how["lock"] else (),
        start_new_session=how["session"],
        # The tests' own mark stays, so that they find what nobody else does.
        env=None if how["environment"] else {"TESTS_STARTED_BY": os.environ["TESTS_STARTED_BY"]},
    )
    assert stray.stdout is not None
    stray.stdout.readline()
    left = os.environ.get("SABOTEUR_LEFT")
    if left is not None:
        with open(left, "a") as file:
            file.write(f"{stray.pid}\n")


def leave_orphans(count: int) -> None:
    """Grandchildren that lose their parent and then end, with nobody to wait for them."""
    middle = os.fork()
    if middle == 0:
        reader, writer = os.pipe()
        for _ in range(count):
            if os.fork() == 0:
                os.close(writer)
                os.read(reader, 1)  # until the parent is gone
                os._exit(0)
        os._exit(0)
    os.waitpid(middle, 0)


def main() -> int:
    life = life_from_environment(os.environ)
    if life is None:
        print("the saboteur needs a supervisor", file=sys.stderr)
        return contract.ExitCode.CONFIGURATION
    if os.environ.get("SABOTEUR_MUTE"):
        life = replace(life, supervised=False)
    if group := os.environ.get("SABOTEUR_CGROUP"):
        Path(group).write_text(str(os.getpid()))
    with Link(life) as link:
        link.forgive_output()
        link.install_signal_handlers()
        link.phase("load")
        saboteur = Saboteur(link)
        try:
            return saboteur.run()
        except OSError as error:
            code = contract.ExitCode.CHECKPOINT
            with contextlib.suppress(OSError):
                link.farewell("checkpoint", saboteur.step, code, str(error))
            return code


if __name__ == "__main__":
    sys.exit(main())
