"""A seeded world around the supervisor: trainer, link, disk, operator, misfortune and a clock.

What may live here: what happens to a supervisor. How it takes that is in shell.py, and what must
hold whatever happens is said in test_simulation.py, through `Watcher`.

Invariants:
- All chance comes from the one generator of the world, and time is virtual: a seed is a schedule.
- Whatever can go wrong goes wrong only while `World.faulty`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from shell import Crash, Life

from supervisor import events as ev
from supervisor.contract import ExitCode, ExitLine, Json
from supervisor.patience import Limits
from supervisor.state import Rules, State, fold

RULES: Final = Rules(
    delay_seconds=1.0,
    maximum_delay_seconds=20.0,
    deaths=3,
    grace_seconds=15.0,
    signal_after_seconds=2.0,
    limits=Limits(start_seconds=40.0, step_seconds=20.0, save_seconds=30.0, evidence_seconds=2.0),
    hasten_seconds=3.0,
)
TARGET_STEP: Final = 14
CADENCE: Final = 4
PAUSE_SECONDS: Final = 10.0
RUN_ID: Final = "0f3a"


class Watcher(Protocol):
    """Who looks at everything. Each raises AssertionError for what must not be."""

    def decided(
        self, life: Life, before: State, event: ev.Event, effects: list[ev.Effect]
    ) -> None: ...

    def performs(self, life: Life, effect: ev.Effect) -> None: ...

    def closed(self, life: Life) -> None:
        """It has crashed or ended; nothing is lost yet."""


# --- the disk ---


@dataclass(slots=True)
class Checkpoint:
    step: int
    attempt: int
    reason: str
    requests: tuple[str, ...]
    epoch: int
    valid: bool


@dataclass(slots=True)
class Receipts:
    """`lines`: (step, whether it differs from the recorded one), and the exit line."""

    epoch: int
    lines: list[tuple[int, bool] | ExitLine] = field(default_factory=list)
    synced: int = 0


@dataclass(slots=True)
class Disk:
    """`owners[n]` is the (attempt, epoch) of the ledger's entry for step n + 1; `pivot_files` the
    names in archive/ and policies/; `run_epoch` the epoch of run.toml."""

    journal: list[Json] = field(default_factory=list)
    owners: list[tuple[int, int]] = field(default_factory=list)
    synced_owners: list[tuple[int, int]] = field(default_factory=list)
    pivot_files: set[str] = field(default_factory=lambda: {"policy-1"})
    run_epoch: int = 1
    receipts: dict[int, Receipts] = field(default_factory=dict)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)


# --- the world ---


class World:
    def __init__(self, seed: int, watcher: Watcher) -> None:
        self.rng = random.Random(seed)
        self.watcher = watcher
        self.now = 1000.0
        self.faulty = True
        self.rules = replace(
            RULES,
            deaths=self.rng.choice((1, 3, 5)),
            grace_seconds=self.rng.choice((1.0, 15.0)),
            stop_when_full=self.rng.random() < 0.1,
        )
        self.disk = Disk()
        self.trainer: Trainer | None = None
        self.stray: Stray | None = None
        self.life: Life | None = None
        self.lives = 0
        self.pids = 100
        self.events = 0
        self.operator = Operator(self)
        # How bad this world is: quiet ones get far, wild ones see odd overlaps.
        self.badness = self.rng.choice((0.0, 0.3, 1.0, 2.0))
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        created = ev.RunCreated(RUN_ID, "lesson", TARGET_STEP, "d1")
        self.disk.journal.append(ev.record_to_json(created))

    def chance(self, probability: float) -> bool:
        """Whether a fault of this probability strikes; never once faults have stopped."""
        return self.faulty and self.rng.random() < probability * self.badness

    def later(self, delay_seconds: float, action: Callable[[], None]) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (self.now + delay_seconds, self._entries, action))

    def run(self, fault_seconds: float, drain_seconds: float) -> None:
        """Faults for a while, then none; returns when nobody has anything left to do."""
        self.start("run")
        self.operator.begin()
        self._run_until(self.now + fault_seconds)
        self.faulty = False
        self.operator.drain()
        self._run_until(self.now + drain_seconds)

    def _run_until(self, end: float) -> None:
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, action = heapq.heappop(self._agenda)
            try:
                action()
            except Crash:
                self.crash()
        self.now = max(self.now, end) if self._agenda else self.now

    # --- lives of the supervisor ---

    def start(
        self,
        wish: str | None,
        request: str = "",
        from_scratch: bool = False,
        pivot: Json | None = None,
    ) -> None:
        if self.life is None:
            self.operator.signalled_stop = False
            self.lives += 1
            self.life = Life(self, f"life{self.lives}")
            self.life.open(wish, request, from_scratch, pivot)

    def crash(self) -> None:
        """SIGKILL to the supervisor. What the kernel has stays: the ledger, and as much of the
        journal as had been written of the commit under way."""
        life, self.life = self.life, None
        assert life is not None
        self.watcher.closed(life)
        commit = life.commit
        if commit is not None:
            written = self.rng.randint(0, len(commit.records))
            self.disk.journal.extend(commit.records[:written])
        self.operator.lost_supervisor()

    def pause(self, seconds: float) -> None:
        """The supervisor and its helper get no time; what they wait for goes on."""
        if self.life is not None:
            self.life.asleep_until = self.now + seconds

    def power_loss(self) -> None:
        """Everything dies, and what was never synced may be gone."""
        if self.trainer is not None:
            self.trainer.alive = False
        self.trainer = self.stray = None
        for receipts in self.disk.receipts.values():
            del receipts.lines[self.rng.randint(receipts.synced, len(receipts.lines)) :]
        self.disk.owners = list(self.disk.synced_owners)
        if self.life is not None:
            self.crash()

    def ended(self, life: Life) -> None:
        """It has performed its Exit and settled; what is not on the disk by now is lost."""
        self.life = None
        self.watcher.closed(life)
        self.operator.lost_supervisor(life)

    def holders(self, nonce: str) -> tuple[ev.Holder, ...]:
        """Who holds trainer.lock."""
        found = []
        if self.trainer is not None and self.trainer.alive:
            ours = self.trainer.nonce == nonce != ""
            dying = self.trainer.dying
            found.append(ev.Holder(self.trainer.pid, ours, True, "trainer", dying))
        if self.stray is not None:
            ours = self.stray.nonce == nonce != ""
            found.append(ev.Holder(self.stray.pid, ours, False, "worker"))
        if self.chance(0.01):
            found.append(ev.Holder(7, False, True, "vi"))
        return tuple(found)

    def new_trainer(self, spawn: ev.Spawn) -> Trainer:
        self.trainer = Trainer(self, spawn)
        return self.trainer

    def new_pid(self) -> int:
        self.pids += 1
        return self.pids


# --- the trainer ---


@dataclass(slots=True)
class Stray:
    """A worker that outlives its main process and keeps the lock. An unkillable one has lost its
    nonce, or hangs in the kernel."""

    pid: int
    nonce: str
    killable: bool


class Trainer:
    """One attempt: load, step, save, end; or die, hang, ignore. It polls at boundaries."""

    def __init__(self, world: World, spawn: ev.Spawn) -> None:
        self.world = world
        self.pid = world.new_pid()
        self.attempt, self.nonce = spawn.attempt, spawn.nonce
        self.epoch, self.until_step = spawn.epoch, spawn.until_step
        self.step = self.published = spawn.resume_step
        self.alive, self.hung, self.dying = True, False, False
        self.loaded = self.owes_hello = self.handles_signals = False
        self.terms = self.usr1s = 0
        self.mail: list[tuple[str, Json]] = []
        self.wanted: dict[str, str] = {}
        self.stop_wanted = self.exit_wanted = self.resume_wanted = False
        self.pause: str | None = None
        self.code: int | None = None
        self.signal: int | None = None
        self.receipts = world.disk.receipts.setdefault(self.attempt, Receipts(self.epoch))
        self.deaf = world.chance(0.15)  # the link never stands
        self.numb = world.chance(0.1)  # SIGTERM is swallowed
        self.diverges = world.chance(0.05)
        self.useless = world.chance(0.05)  # ends without ever saving
        self._arrived = 0.0
        self._then(world.rng.uniform(0.05, 1.0), self._install_handlers)
        self._load()

    # --- its life ---

    def _then(self, delay_seconds: float, action: Callable[[], None]) -> None:
        def unless_gone() -> None:
            if self.alive and not self.hung:
                action()

        self.world.later(delay_seconds, unless_gone)

    def _install_handlers(self) -> None:
        self.handles_signals = True

    def _load(self) -> None:
        self._say("phase", phase="load")
        if self._mishap(0.12):
            return
        if self.world.chance(0.04):
            self.receipts.lines.append((self.step + 5, False))  # a gap: the contract is broken
        self._then(self.world.rng.uniform(0.5, 8.0), self._loaded)

    def _loaded(self) -> None:
        self._poll()
        if self.terms or self.stop_wanted or self.exit_wanted:
            self._leave("stopped")
            return
        self.loaded = True
        self._say_hello()
        self._boundary()

    def _boundary(self) -> None:
        if self._mishap(0.025):
            return
        self._poll()
        final = self.step >= TARGET_STEP
        ended = self.until_step is not None and self.step >= self.until_step
        cadence = final or ended or self.step % CADENCE == 0
        stop = self.stop_wanted or self.exit_wanted or self.terms > 0
        if self.step == 0:
            if stop:
                self._leave("stopped")
            else:
                self._then(self.world.rng.uniform(0.2, 1.5), self._update)
            return
        requests = [id for id, at in self.wanted.items() if at == "now" or cadence]
        due = stop or cadence or bool(requests) or self.usr1s > 0
        if due and not (self.useless and (cadence or stop)):
            pause = self.pause if cadence and not stop and not final else None
            named = (*requests, *((f"stop-{self.attempt}",) if self.stop_wanted else ()))
            signalled = "sigusr1" if self.usr1s else "cadence"
            reason = "sigterm" if self.terms else "operator" if named else signalled
            end = "finished" if final else "stopped" if stop or ended else ""
            self.usr1s = 0
            self._then(
                self.world.rng.uniform(0.1, 3.0),
                lambda: self._save("pivot" if pause else reason, named, end, pause),
            )
        elif final or stop or ended:
            self._leave("finished" if final else "stopped")
        else:
            self._then(self.world.rng.uniform(0.2, 1.5), self._update)

    def _update(self) -> None:
        self.step += 1
        if self.world.chance(0.01):
            self.step += 1  # a step that left no receipt
        self.receipts.lines.append((self.step, self.diverges))
        self._say("step", step=self.step, loss=1.0)
        self._boundary()

    def _save(self, reason: str, named: tuple[str, ...], end: str, pause: str | None) -> None:
        if self._mishap(0.03):
            return
        disk = self.world.disk
        if self.published != self.step and self.world.chance(0.04):
            self._refused(named, end)
            return
        if self.published != self.step:
            assert self.step not in disk.checkpoints, f"the name of step {self.step} is taken"
            self.receipts.synced = len(self.receipts.lines)
            disk.checkpoints[self.step] = Checkpoint(
                self.step, self.attempt, reason, named, self.epoch, not self.world.chance(0.06)
            )
            self.published = self.step
            self.world.later(self.world.rng.uniform(0.0, 0.25), self.world_wakes)
            if self._mishap(0.03):
                return
        for id in named:
            self.wanted.pop(id, None)
        self._say(
            "saved",
            step=self.step,
            digest="bd",
            reason=reason,
            requests=list(named),
            seconds=0.1,
        )
        if self._mishap(0.05):
            return
        if end:
            self._leave(end)
        elif pause is not None:
            self.pause, self.resume_wanted = None, False
            self._wait_for_exit(pause, self.world.now + PAUSE_SECONDS)
        else:
            self._then(self.world.rng.uniform(0.2, 1.5), self._update)

    def _refused(self, named: tuple[str, ...], end: str) -> None:
        """The disk takes no checkpoint: training goes on, or ends without it."""
        failed = [id for id in named if self.wanted.pop(id, None) is not None]
        self._say("unsaved", step=self.step, why="no room", errno=28, requests=failed)
        if end:
            self.die(int(ExitCode.CHECKPOINT), None)
        else:
            self._then(self.world.rng.uniform(0.2, 1.5), self._update)

    def _wait_for_exit(self, pause: str, deadline: float) -> None:
        if self._mishap(0.01):
            return
        self._poll()
        if self.exit_wanted or self.terms:
            self._leave("stopped")
        elif self.resume_wanted or self.world.now >= deadline:
            self._then(self.world.rng.uniform(0.2, 1.5), self._update)
        else:
            self._say("paused", step=self.step, id=pause)
            self._then(1.0, lambda: self._wait_for_exit(pause, deadline))

    def _leave(self, why: str) -> None:
        if not self.world.chance(0.1):
            self.receipts.lines.append(ExitLine(why, self.step, 0, [], ""))
            self.receipts.synced = len(self.receipts.lines)
        self._say("farewell", why=why, step=self.step)
        self.die(0, None)

    def _mishap(self, probability: float) -> bool:
        """Death or a hang, here and now."""
        if not self.world.chance(probability):
            return False
        rng = self.world.rng
        if rng.random() < 0.2:
            self.hung = True
        elif rng.random() < 0.4:
            self.die(None, rng.choice((9, 11, 7)))
        else:
            codes = (0, 1, 1, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.AGAIN, ExitCode.AGAIN)
            code = int(rng.choice((*codes, ExitCode.CONFIGURATION, ExitCode.NON_FINITE)))
            if rng.random() < 0.5:
                self.receipts.lines.append(ExitLine("error", self.step, code, [], "it broke"))
            self.die(code, None)
        return True

    def die(self, code: int | None, signal: int | None) -> None:
        if not self.alive:
            return
        world = self.world
        self.alive, self.code, self.signal = False, code, signal
        if world.chance(0.1):
            killable = world.rng.random() < 0.5
            nonce = self.nonce if killable or world.rng.random() < 0.5 else ""
            world.stray = Stray(world.new_pid(), nonce, killable)
            if not killable:
                world.later(world.rng.choice((0.1, 29.0)), self._stray_works_on)
            # What hangs in the kernel is seldom alone.
            world.later(world.rng.choice((0.001, 0.01, 0.1)), lambda: world.pause(31.0))
        world.later(0.0, self.world_wakes)

    def _stray_works_on(self) -> None:
        """A worker that wrote the receipts goes on writing them for a while."""
        if self.world.stray is not None and self.world.rng.random() < 0.9:
            self.step += 1
            self.receipts.lines.append((self.step, self.diverges))
            self.world_wakes()
            self.world.later(self.world.rng.uniform(0.1, 0.6), self._stray_works_on)

    # --- signals ---

    def take_signal(self, name: str) -> None:
        if not self.alive:
            return
        if name == "USR1":
            if self.handles_signals:  # the shell looks first
                self.usr1s += 1
        elif not self.handles_signals:
            self.die(None, 15)
        elif not self.numb:
            self.terms += 1

    # --- the link ---

    def world_wakes(self) -> None:
        """Something of this attempt has become visible to whoever supervises it."""
        if self.world.life is not None:
            self.world.life.wake()

    def _say_hello(self) -> None:
        self._say("hello", step=self.step, pid=self.pid)

    def _say(self, verb: str, **content: object) -> None:
        """One message up, in order, at some time; even after the death of the one who sent it."""
        world, life = self.world, self.world.life
        if life is None or self.deaf or world.chance(0.05):
            self.owes_hello = self.owes_hello or verb == "hello"
            world.later(world.rng.uniform(0.0, 0.25), self.world_wakes)  # the receipts are read
            return
        delay = 35.0 if world.chance(0.005) else world.rng.uniform(0.001, 0.3)
        self._arrived = max(self._arrived, world.now + delay)

        def arrive() -> None:
            if world.life is life:
                life.receive(self, verb, dict(content))

        world.later(self._arrived - world.now, arrive)

    def _poll(self) -> None:
        if self.owes_hello and self.world.life is not None:
            self.owes_hello = False
            self._say_hello()
        mail, self.mail = self.mail, []
        for verb, content in mail:
            match verb:
                case "checkpoint":
                    self.wanted[content["id"]] = content["at"]
                    self._say("seen", id=content["id"])
                case "stop":
                    self.stop_wanted = True
                    self._say("seen", id=content["id"])
                case "pause":
                    self.pause = content["id"]
                    self._say("seen", id=content["id"])
                case "exit":
                    self.exit_wanted = True
                case "resume":
                    self.resume_wanted = True
                case "who" if self.loaded:
                    self._say_hello()


# --- the operator ---


class Operator:
    """Asks at random, sometimes twice under one id; starts the supervisor again when it is gone."""

    VERBS: Final = ("checkpoint",) * 4 + ("stop", "restart", "restart") + ("pivot",) * 5
    SIGNALS: Final = (("signal-usr1", "checkpoint"),) * 3 + (("signal-term", "stop"),)

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[tuple[str, str, str, Json]] = []
        self.interrupts = 0
        self.signalled_stop = False

    def begin(self) -> None:
        self._ask_again_in(self.world.rng.choice((4.0, 15.0, 60.0)))
        if self.world.badness:
            self.world.later(self.world.rng.expovariate(1 / 60), self._misfortune)

    def _ask_again_in(self, mean_seconds: float) -> None:
        def ask() -> None:
            if self.world.faulty:
                self._ask_again_in(mean_seconds)
                self._ask_something()

        self.world.later(self.world.rng.expovariate(1 / mean_seconds), ask)

    def _ask_something(self) -> None:
        rng, life = self.world.rng, self.world.life
        if life is None:
            return
        kind = rng.random()
        if kind < 0.15 and self.asked:
            life.ask(*rng.choice(self.asked[-6:]))
        elif kind < 0.8:
            self._request(life, rng.choice(self.VERBS))
        elif kind < 0.9:
            id, verb = rng.choice(self.SIGNALS)
            self._signal(life, f"{id}-{len(self.asked)}-{self.world.events}", verb)
        else:
            for _ in range(rng.choice((1, 2, 2, 3))):
                self._interrupt(life, rng.choice((0.0, 0.0, 1.0)))

    def _request(self, life: Life, verb: str) -> None:
        life.ask(*self._new(verb))

    def _new(self, verb: str) -> tuple[str, str, str, Json]:
        odds = ("now", "boundary", "boundary") if verb == "pivot" else ("now", "now", "boundary")
        at = self.world.rng.choice(odds)
        content = self._proposal(at) if verb == "pivot" else {}
        self.asked.append((f"r{len(self.asked) + 1}", verb, at, content))
        return self.asked[-1]

    def _proposal(self, at: str) -> Json:
        """A pivot, or every third time a rollback, checked against what the journal says; now and
        then the check is out of date."""
        rng = self.world.rng
        records = (ev.record_from_json(line) for line in self.world.disk.journal)
        durable = fold(record for record in records if record is not None)
        steps = sorted(durable.on_disk)
        to_step = rng.choice(steps) if steps and rng.random() < 0.3 else None
        parent = durable.parent_of(to_step)
        stale = rng.random() < 0.05
        return {
            "at": at if to_step is None else "now",
            "to_step": to_step,
            "epoch": durable.epoch + stale,
            "parent": parent.number,
            "policy": "p",
            "settings": "",
            "policy_digest": "d2",
            "reason": "",
        }

    def _interrupt(self, life: Life, delay_seconds: float) -> None:
        def press() -> None:
            self.interrupts += 1
            verb = {1: "stop", 2: "hasten"}.get(self.interrupts, "kill")
            self._signal(life, f"signal-int-{self.interrupts}", verb)

        self.world.later(delay_seconds, press)

    def _signal(self, life: Life, id: str, verb: str) -> None:
        if self.world.life is life:
            self.signalled_stop = self.signalled_stop or verb != "checkpoint"
            life.ask(id, verb, "now", {}, operator=False)

    def sees_a_change(self) -> None:
        """Much of what overlaps in life does so because of one cause."""
        world, rng = self.world, self.world.rng
        if world.chance(0.02):
            world.pause(rng.choice((0.5, 3.0, 31.0)))
        if world.chance(0.1):
            world.later(rng.choice((0.001, 0.01, 0.1, 0.4)), self._ask_something)

    def _misfortune(self) -> None:
        """What comes from outside: the supervisor or the machine dies or pauses, disks rot."""
        world = self.world
        if not world.faulty:
            return
        world.later(world.rng.expovariate(world.badness / 60), self._misfortune)
        kind = world.rng.random()
        if kind < 0.15:
            world.power_loss()
        elif kind < 0.5 and world.life is not None:
            world.crash()
        elif kind < 0.7:
            world.pause(world.rng.choice((0.5, 3.0, 31.0)))
        elif world.disk.checkpoints:
            world.rng.choice(sorted(world.disk.checkpoints.items()))[1].valid = False

    def lost_supervisor(self, ended: Life | None = None) -> None:
        """It crashed, or ended (`ended`); somebody may start it again."""
        world = self.world
        self.interrupts, rng = 0, world.rng
        if ended is not None and not (world.faulty and rng.random() < 0.6):
            return
        wish = "run" if ended is not None else rng.choice((None, None, "run", "stop"))
        request = ""
        if wish == "stop":
            stops = [asked for asked in self.asked if asked[1] == "stop"]
            request = stops[-1][0] if stops and rng.random() < 0.5 else self._new("stop")[0]

        def start() -> None:
            world.start(wish, request, rng.random() < 0.3)

        delay = rng.choice((0.1, 5.0, 20.0))
        world.later(delay, start)
        if world.faulty and rng.random() < 0.3:
            world.later(delay * rng.random(), self._pivot_unsupervised)

    def _pivot_unsupervised(self) -> None:
        """By the command itself, which is the supervisor for that long. It looks whether a trainer
        lives, and may see it too late."""
        world = self.world
        pivots = [asked for asked in self.asked if asked[1] == "pivot"]
        again = pivots and world.rng.random() < 0.2
        id, _, _, content = world.rng.choice(pivots) if again else self._new("pivot")
        alive = world.trainer is not None and world.trainer.alive
        if world.life is None and not (alive and world.rng.random() < 0.9):
            world.start(None, id, pivot=content)

    def drain(self) -> None:
        """Faults have stopped; whatever hangs must be found without the operator, who may say stop
        or nothing."""
        world = self.world

        def stop() -> None:
            if world.life is not None:
                self._request(world.life, "stop")
            elif world.trainer is not None and world.trainer.alive:
                world.later(25.0, stop)

        if world.rng.random() < 0.3:
            world.later(25.0, stop)
