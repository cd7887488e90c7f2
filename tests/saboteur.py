"""A trainer without torch, which can misbehave on command.

It speaks the link, writes receipts and small checkpoints, and resumes; a deterministic function of
the step stands in for training. Steps and cadence come from run.toml. Run by the supervisor as
`trainer.command`, without arguments; what it is to do wrong comes by the environment:

- SABOTEUR_FAULTS: a comma-separated list of `name@when` or `name@when#attempt` (in every attempt
  without `#`), where `when` is a step or one of load, hello, paused, exit (before the exit line)
  and gone (after it). Names: kill, segv, deaf, exitN (leaves with code N, and says so in its exit
  line), crashN (leaves with code N without a word), wrong (another loss than last time), gap (skips
  a step), restless (does not wait once it has paused), stray (leaves a process behind that holds
  the lock), and torn:STAGE, a kill inside the publication of this step's checkpoint, for the stages
  of `checkpoint_kit.publish`. These only print: words (a line, which is not flushed), flood (10 MB
  without a line end), noise (random bytes), environment (its own), trace (a traceback).
- SABOTEUR_GATE: a file with a number; training is held at that step until the file says more.
- SABOTEUR_MUTE: anything; it has no link then and knows only signals.
- SABOTEUR_PAUSE: how many seconds it waits for the word to exit.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import checkpoint_kit

from supervisor import contract
from supervisor.contract import AuditLine, Entry, EnvironmentLine, EvaluationLine
from supervisor.link import Link, life_from_environment

PARAMETERS = 6
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
        if self.link.pause_wanted not in (None, self.told):
            self.told = self.link.pause_wanted
            print(f"asked to pause: {self.told}", flush=True)
        until = self.life.until_step is not None and self.step >= self.life.until_step
        if due.reason is not None and self.step > 0:
            self.save(due.reason, due.requests)
        elif until and self.step > self.saved:
            self.save("cadence", ())
        if due.pause is not None and not due.stop and self.step < self.target:
            self.link.paused(self.step, due.pause)
            self.misbehave("paused")
            restless = "restless" in self.planned.get("paused", ())
            if not restless and self.link.wait_for_exit(self.pause_seconds):
                return True
        return due.stop or until or self.step >= self.target

    def held(self) -> bool:
        gate = os.environ.get("SABOTEUR_GATE")
        return gate is not None and self.step >= int(Path(gate).read_text())

    def update(self) -> None:
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

    def save(self, reason: str, requests: tuple[str, ...]) -> None:
        begin = time.monotonic()
        step, life = self.step, self.life
        self.link.phase("save")
        samples = [{"prompt": "The ", "text": f"step {step}"}]
        self.link.record(AuditLine(step, time.time(), life.attempt, life.epoch, samples, {}))
        self.link.record(EvaluationLine(step, life.attempt, loss_of(-step), {}))
        self.link.sync()
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
        directory = self.link.directory / contract.CHECKPOINTS
        torn = [n[5:] for n in self.planned.get(str(step), ()) if n.startswith("torn:")]
        if not (directory / f"{contract.checkpoint_stem(step)}.bin").exists():
            checkpoint_kit.publish(
                directory,
                step,
                data,
                manifest.to_bytes(),
                attempt=life.attempt,
                nonce=life.nonce,
                stop_before=torn[0] if torn else None,
            )
        if torn:
            kill()
        seconds = time.monotonic() - begin
        self.link.saved(step, manifest.binary_digest, reason, requests, seconds)
        self.saved = step

    # --- what goes wrong ---

    def misbehave(self, when: str) -> None:
        for name in self.planned.get(when, ()):
            if name == "kill":
                kill()
            elif name == "segv":
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGSEGV)
            elif name == "deaf":
                signal.signal(
                    signal.SIGTERM, lambda *_: print("SIGTERM, and no answer", flush=True)
                )
                while True:
                    signal.pause()
            elif name == "stray":
                leave_stray(self.life.lock_fd)
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


# No SIGTERM for it, and no end of its own.
STRAY = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"


def leave_stray(lock_fd: int | None) -> None:
    """A process of another session that holds the lock."""
    assert lock_fd is not None
    stray = subprocess.Popen(
        [sys.executable, "-c", STRAY],
        stdout=subprocess.PIPE,
        pass_fds=(lock_fd,),
        start_new_session=True,
    )
    assert stray.stdout is not None
    stray.stdout.readline()


def main() -> int:
    life = life_from_environment(os.environ)
    if life is None:
        print("the saboteur needs a supervisor", file=sys.stderr)
        return contract.ExitCode.CONFIGURATION
    if os.environ.get("SABOTEUR_MUTE"):
        life = replace(life, supervised=False)
    with Link(life) as link:
        link.install_signal_handlers()
        link.phase("load")
        return Saboteur(link).run()


if __name__ == "__main__":
    sys.exit(main())
