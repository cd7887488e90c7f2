"""The supervisor's shell in a simulated world, reduced to the order in which it does things.

What may live here: `Life`, one life of supervisor.daemon with its recorder, helper and worker. What
happens to it is in world.py.

Invariants:
- One turn gathers in the order of the daemon: what the worker and the helper have done, receipts,
  messages, death, tick, notice. Then it decides, makes durable, acts.
- An effect that follows an Append of its decision waits until that record is on the disk, and so
  does every effect after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from supervisor import events as ev, machine
from supervisor.contract import ExitLine, Json
from supervisor.state import State, apply, fold

if TYPE_CHECKING:
    from world import Trainer, World

KEEP_LAST: Final = 2
STATUS_SECONDS: Final = 1.0
REAP_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0
SETTLE_SECONDS: Final = 10.0


class Crash(Exception):
    """The supervisor's process is gone, in the middle of whatever it did."""


@dataclass(slots=True)
class Commit:
    """`recorded` is (last step, verified steps) where ledger entries wait for their sync;
    `run_epoch` the epoch of a run.toml that is written with it."""

    number: int
    records: list[Json]
    recorded: tuple[int, int] | None
    run_epoch: int | None


@dataclass(slots=True)
class Following:
    """A receipt file that is being read and merged."""

    attempt: int
    base: int
    epoch: int
    offset: int = 0
    last: int = 0
    verified: int = 0
    appending: bool = False
    refused: bool = False


class Life:
    """The shell, reduced to its order."""

    def __init__(self, world: World, word: str) -> None:
        self.world = world
        self.word = word
        world.disk.synced_owners = list(world.disk.owners)  # opening the ledger syncs it
        records = [ev.record_from_json(line) for line in world.disk.journal]
        self.state = State(durable=fold(record for record in records if record is not None))
        self.inbox: deque[ev.Event] = deque()
        self.held: deque[tuple[int, ev.Effect]] = deque()
        self.records: list[Json] = []
        self.batch = 1
        self.commit: Commit | None = None
        self.asleep_until = 0.0
        self._rises_at = 0.0
        self._settled_by: float | None = None
        self.attached: Trainer | None = None
        self.told = False
        self._mail: list[ev.Event] = []
        self._saved: list[ev.Event] = []
        self._committed = False
        self._helped: deque[ev.Event] = deque()
        self._errands: deque[ev.Effect] = deque()
        self._expected: tuple[int, str] | None = None
        self._connected = False
        self._file: Following | None = None
        self._leftovers: deque[Following] = deque()
        self._unsynced = False
        self._exit_line: ExitLine | None = None
        self._merging = False
        self._death: float | None = None
        self._pressed = False
        self._next_notice = 0.0
        self._planned: float | None = None
        self._jobs: deque[Callable[[], None]] = deque()
        ruling = self.state.durable.epochs[-1]
        self._epoch, self._base_step = ruling.number, ruling.base_step
        step = self._history_step
        self.state = replace(self.state, step=step, history_step=step)
        self._run_epoch: int | None = None

    def open(
        self, wish: str | None, request: str, from_scratch: bool, pivot: Json | None = None
    ) -> None:
        self._remember(ev.SupervisorStarted(self.word, 1, "host", "0"))
        opened = self.state.durable.open
        holders = self.world.holders(opened.nonce if opened is not None else "")
        owners = self.world.disk.owners
        stepped = bool(owners) and opened is not None and owners[-1][0] == opened.attempt
        self._feed(
            ev.Opened(
                self.world.now, self.word, holders, wish, request, from_scratch, pivot, stepped
            )
        )
        self._work_off()

    # --- what wakes it ---

    def wake(self) -> None:
        """One turn of the loop."""
        world = self.world
        if world.life is not self:
            return
        if world.now < self.asleep_until:
            if self._rises_at != self.asleep_until:  # however much comes meanwhile, it wakes once
                self._rises_at = self.asleep_until
                world.later(self.asleep_until - world.now, self.wake)
            return
        if self._planned is not None and world.now >= self._planned:
            self._planned = None
        if world.chance(0.0005):
            raise Crash
        self._gather()
        self._work_off()

    def receive(self, trainer: Trainer, verb: str, content: Json) -> None:
        """A frame. One of another life is refused; the first of an unknown peer is asked who."""
        if self._expected != (trainer.attempt, trainer.nonce):
            return
        if not self._connected and verb != "hello":
            trainer.mail.append(("who", {}))
        self._connected = True
        self._mail.append(ev.Heard(0.0, verb, content))
        self.wake()

    def ask(
        self, id: str, verb: str, at: str, content: Json | None = None, operator: bool = True
    ) -> None:
        self._mail.append(ev.Asked(0.0, id, verb, at, operator, content=content or {}))
        self.wake()

    def _gather(self) -> None:
        world, now = self.world, self.world.now
        if self._committed:
            self._committed = False
            self._finish_commit()
        while self._helped:
            self.inbox.append(replace(self._helped.popleft(), now=now))
        self._pump()
        # After a pause there are more frames than one wake-up takes.
        taken = world.rng.choice((1, 100)) if self._mail else 0
        mail, self._mail = self._mail[:taken], self._mail[taken:]
        for event in (replace(event, now=now) for event in mail):
            saved = isinstance(event, ev.Heard) and event.verb == "saved"
            (self._saved if saved else self.inbox).append(event)
        died = self.attached is not None and not self.told and not self.attached.alive
        if self._at_end():
            # A checkpoint comes after the receipts of its steps.
            self.inbox.extend(self._saved)
            self._saved = []
        if died:
            self.told = True
            self.inbox.append(ev.Died(now))
        if self._death is not None:
            self._complete_death(now)
        read_step = self._file.last if self._file is not None else 0
        self.inbox.append(ev.Ticked(now, read_step))
        if now >= self._next_notice:
            self._next_notice = now + STATUS_SECONDS
            self._notice(now)
            if world.chance(0.02):
                self.inbox.append(ev.Full(now, "no room"))

    def _work_off(self) -> None:
        while self.inbox:
            self._feed(self.inbox.popleft())
        if self._merging and not self._leftovers and self._at_end() and not self._unsettled():
            self._merging = False
            self.inbox.append(ev.Merged(self.world.now, self._history_step))
        self._start_commit()
        busy = self._errands or self.inbox or self.records or self._unsettled()
        if self._settled_by is not None and (not busy or self.world.now >= self._settled_by):
            for job in self._jobs:  # the worker finishes what it was given, but for a commit
                if job != self._write:
                    job()
            self.world.ended(self)
        else:
            self._plan_next()

    def _plan_next(self) -> None:
        """The next wake-up that nothing from outside brings."""
        now, moments = self.world.now, []
        reading = (self._merging or self._death is not None) and self.commit is None
        if (
            self.inbox
            or self._mail
            or self._saved
            or (reading and (self._leftovers or not self._at_end()))
        ):
            moments.append(now)
        if self._death is not None:
            moments.append(now + (LOOK_SECONDS if self._holders() else LOOK_SECONDS / 20))
        if self.state.deadline is not None:
            moments.append(self.state.deadline)
        if self._settled_by is not None:
            moments.append(self._settled_by)
        if self._unannounced():
            moments.append(self._next_notice)
        soonest = min(moments, default=None)
        if soonest is not None and (self._planned is None or soonest < self._planned):
            self._planned = soonest
            self.world.later(max(0.0, soonest - now), self.wake)

    # --- deciding ---

    def _remember(self, record: ev.Record) -> None:
        self.state = replace(self.state, durable=apply(self.state.durable, record))
        self.records.append(ev.record_to_json(record))

    def _feed(self, event: ev.Event) -> None:
        before = self.state
        self.world.events += 1
        self.state, effects = machine.decide(self.world.rules, before, event)
        if self.state.phase != before.phase:
            self._next_notice = 0.0
        self.world.watcher.decided(self, before, event, effects)
        if (self.state.phase, self.state.stage) != (before.phase, before.stage):
            self.world.operator.sees_a_change()
        barrier = self.held[-1][0] if self.held else 0
        for effect in effects:
            if isinstance(effect, ev.Append):
                self.records.append(ev.record_to_json(effect.record))
                barrier = self.batch
            else:
                self.held.append((barrier, effect))
        self._release()

    def _release(self) -> None:
        durable_below = self.commit.number if self.commit is not None else self.batch
        while self.held and self.held[0][0] < durable_below:
            self._perform(self.held.popleft()[1])

    # --- making durable ---

    @property
    def _history_step(self) -> int:
        owners = self.world.disk.owners
        ours = not owners or owners[-1][1] >= self._epoch
        return len(owners) if ours else min(len(owners), self._base_step)

    def _unsettled(self) -> bool:
        return self.commit is not None or self._unsynced or self._run_epoch is not None

    def _start_commit(self) -> None:
        wanted = self.records or self._unsynced or self._run_epoch is not None
        if self.commit is not None or not wanted:
            return
        recorded = None
        if self._unsynced:
            verified = self._file.verified if self._file is not None else 0
            recorded = (self._history_step, verified)
        self.commit = Commit(self.batch, self.records, recorded, self._run_epoch)
        self.records, self._unsynced, self._run_epoch = [], False, None
        self.batch += 1
        self._submit(self._write)

    def _submit(self, job: Callable[[], None]) -> None:
        """To the worker, which does one job after the other."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin_job()

    def _begin_job(self) -> None:
        self.world.later(self.world.rng.choice((0.002, 0.02, 0.5)), self._end_job)

    def _end_job(self) -> None:
        if self.world.life is not self:
            return
        self._jobs[0]()
        self._jobs.popleft()
        if self._jobs:
            self._begin_job()
        self.wake()

    def _write(self) -> None:
        if self.world.chance(0.01):  # the disk refuses; it is tried again
            self.world.later(RETRY_SECONDS, lambda: self._submit(self._write))
        else:
            self._committed = True

    def _finish_commit(self) -> None:
        commit, self.commit = self.commit, None
        assert commit is not None
        disk = self.world.disk
        disk.journal.extend(commit.records)
        if commit.run_epoch is not None:
            disk.run_epoch = commit.run_epoch
        if commit.recorded is not None:
            disk.synced_owners = disk.owners[: commit.recorded[0]]
            self.inbox.append(ev.Recorded(self.world.now, *commit.recorded))
        self._release()

    # --- acting ---

    def _perform(self, effect: ev.Effect) -> None:
        world = self.world
        if world.chance(0.004):
            raise Crash
        world.watcher.performs(self, effect)
        match effect:
            case ev.Merge():
                begun = self.state.durable.begun
                followed = self._file is not None and begun and self._file.attempt == begun.attempt
                if begun is not None and begun.attempt in world.disk.receipts and not followed:
                    base = begun.resume_step
                    leftover = Following(begun.attempt, base, begun.epoch, last=base)
                    self._leftovers.append(leftover)
                self._merging = True
                world.later(0.0, self.wake)
            case ev.Spawn():
                self._spawn(effect)
            case ev.Adopt(pid):
                self._adopt(pid)
            case ev.Send(verb, content):
                if self._connected and self.attached is not None and not world.chance(0.05):
                    self.attached.mail.append((verb, content))
            case ev.Signal(name):
                if self.attached is not None:
                    self.attached.take_signal(name)
            case ev.Kill():
                self._kill()
            case ev.Reap():
                self._death = world.now
                self._pressed = False
                opened = self.state.durable.open
                if opened is not None:
                    self._follow(opened.attempt, opened.resume_step, opened.epoch)
            case ev.Archive():
                self._archive(effect)
            case ev.Sweep():
                self._sweep()
            case ev.Regenerate():
                ruling = self.state.durable.epochs[-1]
                self._epoch, self._base_step = ruling.number, ruling.base_step
                self._run_epoch = ruling.number
            case ev.Select() | ev.Clear() | ev.Verify() | ev.Retain():
                self._errands.append(effect)
                if len(self._errands) == 1:
                    self._begin_errand()
            case ev.Reply():
                pass  # the watcher has seen it
            case ev.Exit():
                # What is under way still gets its moment.
                self._settled_by = world.now + SETTLE_SECONDS

    # --- the files of a pivot ---

    def _archive(self, effect: ev.Archive) -> None:
        """A temporary, then the archive under its name, then the new policy; it may fail after
        each, and a crash may come between."""
        disk = self.world.disk
        name = f"pivot-{effect.epoch}-{effect.base_step}"
        epoch = len(self.state.durable.epochs) + 1
        parts = (f".tmp-{name}", name, f"policy-{epoch}")

        def put(number: int) -> None:
            if self.world.chance(0.03):
                self._helped.append(ev.Archived(0.0, effect.base_step, "", "no space"))
                return
            disk.pivot_files.add(parts[number])
            disk.pivot_files.discard(parts[0] if number else "")
            if number + 1 < len(parts):
                self._submit(lambda: put(number + 1))
            else:
                self._helped.append(ev.Archived(0.0, effect.base_step, name))

        self._submit(lambda: put(0))

    def _sweep(self) -> None:
        durable = self.state.durable
        known = {f"policy-{epoch.number}" for epoch in durable.epochs}
        known |= {epoch.archive for epoch in durable.epochs}

        def sweep() -> None:
            self.world.disk.pivot_files &= known

        self._submit(sweep)

    def _spawn(self, effect: ev.Spawn) -> None:
        world = self.world
        if world.chance(0.04):
            self.inbox.append(ev.SpawnFailed(world.now, "no memory"))
            return
        self._expected, self._connected = (effect.attempt, effect.nonce), False
        for attempt in [a for a in world.disk.receipts if a < effect.attempt]:
            del world.disk.receipts[attempt]
        self._file = None
        self._follow(effect.attempt, effect.resume_step, effect.epoch)
        self.attached, self.told = world.new_trainer(effect), False
        self.inbox.append(ev.Spawned(world.now, self.attached.pid, 1, "boot"))

    def _adopt(self, pid: int) -> None:
        opened, trainer = self.state.durable.open, self.world.trainer
        assert opened is not None
        self._expected, self._connected = (opened.attempt, opened.nonce), False
        self._follow(opened.attempt, opened.resume_step, opened.epoch)
        if trainer is not None and trainer.alive and trainer.pid == pid:
            self.attached, self.told = trainer, False
        else:
            self.inbox.append(ev.Died(self.world.now))

    def _kill(self) -> None:
        trainer = self.attached
        if trainer is not None:
            delay = self.world.rng.uniform(0.0, 0.5)
            if self.world.chance(0.05):  # it is in the kernel, and does not come back soon
                trainer.hung = trainer.dying = True
                delay = self.world.rng.choice((20.0, 40.0, 80.0))
            self.world.later(delay, lambda: trainer.die(None, 9))
        self._kill_stray()

    def _kill_stray(self) -> None:
        stray, opened = self.world.stray, self.state.durable.open
        if stray is not None and stray.killable and opened and stray.nonce == opened.nonce:
            self.world.stray = None

    def _holders(self) -> tuple[int, ...]:
        stray = self.world.stray
        return () if stray is None else (stray.pid,)

    def _complete_death(self, now: float) -> None:
        assert self._death is not None
        if self._pressed:
            self._kill_stray()
        self._pressed = True
        holders = self._holders()
        if holders and now - self._death < REAP_SECONDS:
            return
        if not self._at_end() or self._saved or self._unsettled():
            return
        self._death = None
        dead, self.attached = self.attached, None
        self.inbox.append(
            ev.Reaped(
                now,
                dead.code if dead is not None else None,
                dead.signal if dead is not None else None,
                self._exit_line,
                self._history_step,
                self._file.verified if self._file is not None else 0,
                holders,
                reached_step=self._file.last if self._file is not None else 0,
                loaded=dead is not None and dead.loaded,
                evidence=ev.Evidence(
                    "the kernel ended 1 process" if self.world.chance(0.1) else "",
                    self.world.rng.random() < 0.5,
                    "fallen off the bus" if self.world.chance(0.1) else "",
                ),
                held="process 9 still holds memory" if self.world.chance(0.002) else "",
            )
        )

    # --- receipts ---

    def _follow(self, attempt: int, base: int, epoch: int) -> None:
        if self._file is None or self._file.attempt != attempt:
            self._file = Following(attempt, base, epoch, last=base)
            self._exit_line = None

    def _at_end(self) -> bool:
        file = self._file
        if file is None or file.refused:
            return True
        receipts = self.world.disk.receipts.get(file.attempt)
        return receipts is None or file.offset >= len(receipts.lines)

    def _pump(self) -> None:
        if self._leftovers and self._at_end():
            self._file = self._leftovers.popleft()
        file = self._file
        if file is None or file.refused:
            return
        receipts = self.world.disk.receipts.get(file.attempt)
        lines = receipts.lines if receipts is not None else []
        limit = min(len(lines), file.offset + self.world.rng.choice((1, 3, 9)))
        while file.offset < limit and not file.refused:
            line = lines[file.offset]
            file.offset += 1
            if isinstance(line, ExitLine):
                self._exit_line = line
            else:
                self._take(file, *line)

    def _take(self, file: Following, step: int, differs: bool) -> None:
        owners = self.world.disk.owners
        if step != file.last + 1:
            file.refused = True
            trouble = f"attempt {file.attempt}: step {step}, expected {file.last + 1}"
            if self.attached is not None and not self.told:
                self.inbox.append(ev.Broken(self.world.now, trouble))
            else:
                self._remember(ev.Alarmed("receipts_refused", trouble))
            return
        file.last = step
        recorded = step <= len(owners)
        comparable = recorded and owners[step - 1][1] == file.epoch and not file.appending
        if recorded and owners[step - 1][0] == file.attempt:
            file.appending = True
        elif comparable and not differs:
            file.verified += 1
        else:
            if comparable:
                self._remember(
                    ev.ReplayDiverged(step, file.attempt, ["loss"], {}, {}, "unexplained")
                )
            del owners[step - 1 :]
            owners.append((file.attempt, file.epoch))
            file.appending = self._unsynced = True

    # --- checkpoints ---

    def _notice(self, now: float) -> None:
        self.inbox.extend(ev.Noticed(now, step) for step in self._unannounced())

    def _unannounced(self) -> list[int]:
        if self.state.phase not in ("running", "stopping"):
            return []
        known = self.state.durable.on_disk | self.state.verifying | self.state.unread
        return sorted(step for step in self.world.disk.checkpoints if step not in known)

    def _begin_errand(self) -> None:
        seconds = 40.0 if self.world.chance(0.003) else self.world.rng.choice((0.01, 0.3, 2.0))
        self.world.later(seconds, self._end_errand)

    def _end_errand(self) -> None:
        world = self.world
        if world.life is not self:
            return
        if world.now < self.asleep_until:
            delay = self.asleep_until - world.now + world.rng.uniform(0.0, 0.5)
            world.later(delay, self._end_errand)
            return
        match self._errands.popleft():
            case ev.Select(ceiling):
                self._helped.append(self._select(ceiling))
            case ev.Clear(base_step):
                self._helped.append(self._clear(base_step))
            case ev.Verify(step):
                self._helped.append(self._verify(step))
            case ev.Retain(newest):
                self._helped.extend(self._retain(newest))
        if self._errands:
            self._begin_errand()
        self.wake()

    def _select(self, ceiling: int) -> ev.Selected:
        found = self.world.disk.checkpoints
        present = tuple(sorted(found))
        rejected = []
        chosen = None
        for step in sorted((step for step in found if step <= ceiling), reverse=True):
            if found[step].valid:
                chosen = found[step]
                break
            del found[step]
            rejected.append((step, "chunk 0 differs", f"quarantine/{step}"))
        if rejected and self.world.chance(0.1):  # the helper was killed, and is asked again
            return self._select(ceiling)
        if chosen is None:
            return ev.Selected(0.0, None, present, rejected=tuple(rejected))
        return ev.Selected(
            0.0,
            chosen.step,
            present,
            "bd",
            "sha",
            chosen.attempt,
            chosen.reason,
            chosen.requests,
            tuple(rejected),
        )

    def _clear(self, base_step: int) -> ev.Cleared:
        found = self.world.disk.checkpoints
        superseded = tuple(step for step in sorted(found) if step > base_step)
        for step in superseded:
            del found[step]
        return ev.Cleared(0.0, base_step, superseded)

    def _verify(self, step: int) -> ev.Verified | ev.Unverified:
        if self.world.chance(0.1):  # killed, as often as it was asked
            return ev.Unverified(0.0, step)
        found = self.world.disk.checkpoints.get(step)
        if found is None:
            return ev.Verified(0.0, step, "no such file")
        if not found.valid:
            del self.world.disk.checkpoints[step]
            return ev.Verified(0.0, step, "chunk 0 differs", moved_to=f"quarantine/{step}")
        return ev.Verified(0.0, step, "", "sha", "bd", found.attempt, found.reason, found.requests)

    def _retain(self, newest: int) -> list[ev.Event]:
        """What is told of it: nothing where the helper is killed, before its end or after."""
        found = self.world.disk.checkpoints
        durable = self.state.durable
        verified = (durable.verified | {newest}).intersection(found)
        proven = [step for step in sorted(found) if step <= max(verified, default=0)]
        wanted = durable.pivot.to_step if durable.pivot is not None else None
        removed = tuple(s for s in proven[:-KEEP_LAST] if s not in durable.pins and s != wanted)
        killed = self.world.chance(0.1)
        if killed or self.world.chance(0.1):  # or an error has ended it
            removed = removed[: self.world.rng.randint(0, len(removed))]
        for step in removed:
            del found[step]
        return [] if killed else [ev.Removed(0.0, removed)]
