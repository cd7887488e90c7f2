"""The one loop: wait, gather events, decide, make durable, act.

What may live here: the shell around `machine.decide`. It is the only reader of the clock and the
only place where events meet effects; every decision is the machine's.

Invariants:
- One thread owns the state. It never syncs, and never reads, hashes or unlinks a checkpoint: the
  worker thread syncs, the helper process verifies and deletes, and both answer with events.
- Durable before visible: an effect that follows an Append in the same decision waits until that
  record is on the disk. Order of durability: ledger, journal, sidecars, then everything else.
- Signal handlers only count and wake.
"""

from __future__ import annotations

import math
import os
import platform
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import orjson
import zmq

from supervisor import __version__, events as ev, machine, notices, reloading, requests, vigil
from supervisor.archive import EpochFiles
from supervisor.attempt_logs import AttemptLogs
from supervisor.attendant import LOOK_INTERVAL_SECONDS, Attendant
from supervisor.commit import RETRY_SECONDS, Pipeline, writable
from supervisor.contract import Json
from supervisor.housekeeping import Housekeeper
from supervisor.journal import Journal
from supervisor.ledger import Ledger
from supervisor.log import Log
from supervisor.notifier import LIMIT_SECONDS, Notifier
from supervisor.options import Begin, Options, Reread
from supervisor.orphans import become_subreaper
from supervisor.progress import Reporter, describe
from supervisor.recorder import Recorder
from supervisor.reloading import Reloader
from supervisor.rundir import RunDirectory
from supervisor.sdnotify import ServiceManager, ending, status_line
from supervisor.signals import INTERRUPT_WORDS, Signals
from supervisor.space import Watch
from supervisor.state import TERMINAL, Durable, State, apply, fold
from supervisor.status import compose, located, write
from supervisor.wire import FromOperator, FromTrainer, Wire
from supervisor.worker import Job, Outcome, Worker

RECEIPT_INTERVAL_SECONDS: Final = 0.25
STATUS_INTERVAL_SECONDS: Final = 1.0
SETTLE_SECONDS: Final = 10.0


class Daemon:
    def __init__(
        self,
        directory: RunDirectory,
        options: Options,
        reread: Callable[[Durable], Reread],
        signals: Signals,
        reporter: Reporter,
        manager: ServiceManager,
    ) -> None:
        self.directory = directory
        self.options = options
        self.signals = signals
        self.reporter = reporter
        self.manager = manager
        self.reloader = Reloader(
            reread,
            ruling=self._ruling,
            submit=self._submit,
            take=self._take,
            alarm=self._alarm,
            say=self._say,
        )
        self.log = Log(directory.supervisor_log, options.logs.size_bytes)
        self.attendant = Attendant(directory, self.log)
        self.state = State()
        self._directory_fd = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._inbox: deque[ev.Event] = deque()
        self._merging = False
        self._jobs: dict[int, Callable[[Outcome], None]] = {}
        self._saved: list[ev.Heard] = []
        self._next_status = 0.0
        self._wake_ups = 0
        self._exit: ev.Exit | None = None
        self._pidfd: int | None = None
        self._spawning: ev.Spawn | None = None
        self._worked_with = False  # a trainer lives that we found, or has lived in this life
        self._told_trouble = ""

    # --- life ---

    def run(self, begin: Begin) -> int:
        """Supervises until the run ends or this life is told to; returns the exit code. Raises
        Unwritable where the disk takes nothing and no trainer lives."""
        try:
            self._open(begin)
            while self._exit is None:
                self._wait()
                self._gather()
                self._work_off()
                self._look_at_the_disk(time.monotonic())
            self._settle()
            self._write_status(durable=True)  # the worker has written it when `_close` is through
            return self._exit.code
        finally:
            self._close()

    def _settle(self) -> None:
        """After the last decision: what is under way still gets its moment."""
        self.attempt_logs.look()
        now = time.monotonic()
        self.pipeline.try_late(now)
        limit = now + SETTLE_SECONDS
        # Somebody waits for the news of how a run ended; who stops it knows, and wants to go on.
        told = limit if self.state.phase == "stopped" else limit + LIMIT_SECONDS
        while (
            now < limit and (self.housekeeper.busy or self._inbox or not self.pipeline.empty)
        ) or (now < told and self.notifier.busy):
            self._wait()
            self._gather()
            self._work_off()
            now = time.monotonic()
        if self.state.durable.open is None and self.pipeline.idle and not self.pipeline.late:
            self._alarm("receipts", self.recorder.forget_before(self.state.durable.attempt + 1))
            self._work_off()  # on record too: `_close` waits for the worker

    def _look_at_the_disk(self, now: float) -> None:
        """Says at once what cannot be written, and goes on trying as long as a trainer lives or its
        death is not on record. Where none does, nothing is lost by an end."""
        trouble = self.pipeline.trouble
        if trouble != self._told_trouble:
            self._told_trouble = trouble
            words = f"{trouble}; it is tried again" if trouble else "the disk takes history again"
            self._say(words)
        if not (self.attendant.alive or self.attendant.reaping):
            over = self.state.phase in TERMINAL or self.state.intent == "stop"
            self.pipeline.check(now, self._worked_with, over)

    def _open(self, begin: Begin) -> None:
        with writable(self.directory.path):
            self.journal, lines = Journal.open(self.directory.journal)
            self.ledger = Ledger.open(self.directory.ledger)
        self.worker = Worker()
        self.wire = Wire(self._directory_fd)
        become_subreaper()
        records = [ev.record_from_json(line) for line in lines]
        known = [record for record in records if record is not None]
        durable = fold(known)
        ruling = durable.epochs[-1]
        self.recorder = Recorder(
            self.directory,
            self.ledger,
            self.options.samples_keep,
            ruling.number,
            ruling.base_step,
        )
        step = self.recorder.history_step
        self.state = State(durable=durable, step=step, history_step=step)
        hints = (self.directory.samples, self.directory.state, self.directory.training)
        self.pipeline = Pipeline(self.ledger, self.journal, self.worker, self.recorder, hints)
        self.files = EpochFiles(
            self.directory,
            self.ledger,
            self.recorder,
            submit=self._submit,
            emit=self._inbox.append,
            alarm=self._alarm,
        )
        self.poller = zmq.Poller()
        for source in (self.wire.trainer, self.wire.operator):
            self.poller.register(source, zmq.POLLIN)
        self.watch = notices.watch_of(known)
        self.notifier = Notifier(
            self.options.channels, self.options.environment, self.options.home, self.log.write
        )
        self.attempt_logs = AttemptLogs(
            self.directory, self.options.logs, known, submit=self._look, alarm=self._alarm
        )
        life = os.urandom(8).hex()
        self._remember(ev.SupervisorStarted(life, os.getpid(), platform.node(), __version__))
        for file in (self.journal, self.ledger):
            if file.repaired is not None:
                self._remember(
                    ev.FileRepaired(
                        Path(file.repaired.path).name,
                        file.repaired.dropped_bytes,
                        orjson.dumps(file.repaired.to_json()).decode(),
                    )
                )
        for record in begin.records:
            self._remember(record)
        begun = self.state.durable
        self.housekeeper = Housekeeper(
            self.directory,
            begun.run_id,
            begun.lineage,
            begun.imported,
            emit=self._inbox.append,
            alarm=self._alarm,
            seen=self.recorder.remember_bandit,
        )
        self.space = Watch(
            self.directory,
            self.options.disk_headroom_bytes,
            submit=self._look,
            alarm=self._alarm,
            reclaim=self._reclaim,
            full=lambda why: self._inbox.append(ev.Full(time.monotonic(), why)),
        )
        for part in (self.signals, self.worker, self.housekeeper, self.notifier):
            self.poller.register(part.fileno(), zmq.POLLIN)
        self._alarm("sidecars", "; ".join(self.recorder.set_aside))
        self._alarm(reloading.ALARM, "")  # this start has taken them
        opened = begun.open
        holders = self.attendant.holders(
            opened.nonce if opened is not None else "", self.state.durable.spawned
        )
        self._worked_with = bool(holders)
        self.log.write(f"supervisor {__version__} owns {self.directory.path.resolve()}")
        self._feed(
            ev.Opened(
                time.monotonic(),
                life,
                holders,
                begin.wish,
                begin.request,
                begin.from_scratch,
                begin.pivot,
                self._stepped(),
            )
        )
        self._work_off()

    def _stepped(self) -> bool:
        opened, last = self.state.durable.open, self.ledger.last
        return opened is not None and last is not None and last.attempt == opened.attempt

    def _remember(self, record: ev.Record) -> None:
        """A record of the shell's own, through the same apply as the machine's."""
        durable = apply(self.state.durable, record)
        self.state = replace(self.state, durable=durable)
        self.pipeline.remember(record)
        self._tell(record)

    def _close(self) -> None:
        for name in (
            *("notifier", "worker", "housekeeper", "wire"),
            *("recorder", "ledger", "journal"),
        ):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        self.attendant.close()
        self.log.write("this life ends: " + (self._exit.why if self._exit else "by an error"))
        self.log.close()
        os.close(self._directory_fd)

    # --- waiting and gathering ---

    def _wait(self) -> None:
        pidfd = self.attendant.fileno()
        if pidfd != self._pidfd:
            if self._pidfd is not None:
                self.poller.unregister(self._pidfd)
            if pidfd is not None:
                self.poller.register(pidfd, zmq.POLLIN)
            self._pidfd = pidfd
        now = time.monotonic()
        moments = [self._next_status]
        if self.manager.due_at is not None:
            moments.append(self.manager.due_at)
        if self.state.deadline is not None:
            moments.append(self.state.deadline)
        if self.pipeline.retry_at is not None:
            moments.append(self.pipeline.retry_at)
        if self.attendant.alive:
            moments.append(now + RECEIPT_INTERVAL_SECONDS)
        if self.attendant.reaping or self._spawning is not None:
            moments.append(now + LOOK_INTERVAL_SECONDS)
        if self.recorder.trouble:
            moments.append(now + RETRY_SECONDS)
        if self._inbox or self.recorder.behind:
            moments.append(now)
        self.poller.poll(max(0, math.ceil((min(moments) - now) * 1000)))
        self._wake_ups += 1

    def _gather(self) -> None:
        self.signals.drain()
        self._gather_signals()
        now = time.monotonic()
        for outcome in self.worker.outcomes():
            self._worked(outcome, now)
        self.housekeeper.receive()
        self.notifier.advance(now)
        self.reloader.look()
        messages = self.wire.receive()
        self._pump()
        for message in messages:
            match message:
                case FromTrainer(verb, content):
                    self._heard(ev.Heard(now, verb, content))
                case FromOperator("status", content):
                    self.wire.reply(content["id"], "done", "", self.status())
                case FromOperator(verb, content):
                    self._inbox.append(requests.of_message(now, verb, content))
        if self.recorder.at_end():
            # Only now: a checkpoint is bound to the entry of its step, and the receipt of that was
            # written before the message. A death does not hurry it.
            self._inbox.extend(self._saved)
            self._saved.clear()
        self.attendant.tend(now)
        if self._spawning is not None:
            self._spawn(self._spawning)
        if self.attendant.died():
            self._inbox.append(ev.Died(now))
        if self.attendant.reaping:
            self._complete_death(now)
        # A trainer without a link cannot say that it waits for the disk.
        waits = self.space.short and not self.state.linked
        blind = bool(self.recorder.trouble or self.pipeline.trouble) or waits
        self._inbox.append(ev.Ticked(now, self.recorder.read_step, blind))
        if now >= self._next_status:
            self._next_status = now + STATUS_INTERVAL_SECONDS
            self.housekeeper.notice(self.state, self.recorder, now)
            self._alarm("sockets", self.wire.look_after())
            self.space.look(now)
            reserve = self.ledger.reserve_problem or self.journal.reserve_problem
            self._alarm("reserve", str(reserve or ""))
            self.attempt_logs.look()
            self.log.look(self._look)
            self._write_status()
        self.manager.beat(now)

    def _heard(self, message: ev.Heard) -> None:
        match message.verb:
            case "hello":
                self.space.expect(message.content["parameters"])
            case "saved":
                self.space.hasten()
            case "unsaved":
                self.space.refused(message.content["errno"], message.content["why"])
        waits = message.verb == "saved" or (message.verb == "unsaved" and self._saved)
        (self._saved if waits else self._inbox).append(message)

    def _worked(self, outcome: Outcome, now: float) -> None:
        done = self._jobs.pop(outcome.ticket, None)
        if done is not None:
            done(outcome)
        recorded = self.pipeline.ended(outcome.ticket, outcome.error, now)
        if recorded is not None:
            self._inbox.append(ev.Recorded(now, *recorded))
        self._release()

    def _submit(self, job: Job, done: Callable[[Outcome], None]) -> None:
        self._jobs[self.worker.submit(job)] = done

    def _look(self, job: Job, done: Callable[[Outcome], None]) -> None:
        """Something to see now and then, whose answer has time until the loop wakes up anyhow."""
        self._jobs[self.worker.submit(job, wakes=False)] = done

    def _gather_signals(self) -> None:
        for asked in self.signals.requests(time.monotonic(), self.state.life):
            self._inbox.append(asked)
            if asked.id.startswith("signal-int"):
                self.reporter.say(INTERRUPT_WORDS[asked.verb])
        if self.signals.take(signal.SIGHUP):
            self.log.reopen()
            self.reloader.ask()

    # --- recording ---

    def _pump(self) -> None:
        """Takes in receipts. What the recorder found goes to the journal with the next commit."""
        problem = self.recorder.pump()
        for record in self.recorder.take_records():
            self._remember(record)
        if problem:
            if self.attendant.alive:
                self._inbox.append(ev.Broken(time.monotonic(), problem))
            else:
                self._remember(ev.Alarmed("receipts_refused", problem))
        self._alarm("ledger", self.recorder.trouble)

    def _alarm(self, name: str, detail: str) -> None:
        raised = dict(self.state.durable.alarms).get(name, "")
        if detail and detail != raised:
            self._remember(ev.Alarmed(name, detail))
            self.log.write(f"alarm {name}: {detail}")
        elif raised and not detail:
            self._remember(ev.AlarmCleared(name))

    def _release(self) -> None:
        """Performs the effects whose records are durable, in order."""
        for effect in self.pipeline.ready():
            self._perform(effect)

    def _work_off(self) -> None:
        while self._inbox:
            self._feed(self._inbox.popleft())
        if self._merging and self.recorder.idle and self.pipeline.idle:
            self._merging = False
            merged = ev.Merged(
                time.monotonic(), self.recorder.history_step, self.recorder.last_attempt
            )
            self._inbox.append(merged)
        self.pipeline.start(time.monotonic())

    def _feed(self, event: ev.Event) -> None:
        before = self.state
        self.state, effects = machine.decide(self.options.rules, self.state, event)
        if self.state.phase != before.phase:
            self.log.write(f"{before.phase} -> {self.state.phase} {self.state.why}".rstrip())
            self._next_status = 0.0
        for record in self.pipeline.queue(effects):
            self._tell(record)
        self._release()

    # --- settings of a life that goes on ---

    def _ruling(self) -> Durable | None:
        """What is on record, while a change of settings would be one."""
        over = self._exit is not None or self.state.phase in TERMINAL
        return None if over or self.state.durable.pivot is not None else self.state.durable

    def _take(self, options: Options, records: tuple[ev.Record, ...]) -> None:
        self.options = options
        self.log.size_bytes = options.logs.size_bytes
        self.attempt_logs.rules = options.logs
        self.notifier.channels = options.channels
        self.space.headroom_bytes = options.disk_headroom_bytes
        self.space.hasten()
        self.recorder.samples_keep = options.samples_keep
        for record in records:
            self._remember(record)
        for record in self.files.refresh(self.state.durable):
            self._remember(record)

    # --- effects ---

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Merge():
                self.recorder.merge_leftovers(self.state.durable.begun)
                self._merging = True
                self._inbox.append(ev.Ticked(time.monotonic()))
            case ev.Select():
                self.housekeeper.select(effect.ceiling)
            case ev.Clear():
                self.housekeeper.clear(effect.base_step)
            case ev.Archive():
                self.recorder.give_back(self.pipeline.take_late())
                self.files.archive(effect, len(self.state.durable.epochs) + 1)
            case ev.Regenerate():
                for record in self.files.regenerate(self.state.durable):
                    self._remember(record)
            case ev.Sweep():
                self.files.sweep(self.state.durable)
            case ev.Spawn():
                self._spawn(effect)
            case ev.Adopt():
                self._adopt(effect.pid)
            case ev.Send():
                self.wire.send_trainer(effect.verb, effect.content)
            case ev.Signal():
                self.attendant.signal(effect.name)
            case ev.Examine():
                self.attendant.examine(self.state.durable.attempt)
            case ev.Kill():
                self.attendant.kill()
            case ev.Reap():
                self.attendant.begin_reaping()
                opened = self.state.durable.open
                if opened is not None:
                    self.recorder.follow(opened.attempt, opened.resume_step, opened.epoch)
            case ev.Verify():
                self.housekeeper.verify(effect.step)
            case ev.Retain():
                keep, durable = self.options.retention, self.state.durable
                self.housekeeper.retain(keep, durable, effect.newest_verified)
            case ev.Reply():
                self.wire.reply(
                    effect.id, effect.outcome, effect.why, located(self.directory, effect.result)
                )
            case ev.Exit():
                self._exit = effect

    def _reclaim(self, wanted_bytes: int, done: Callable[[int | None], None]) -> bool:
        """False where no trainer runs: a selection may be looking at what would go."""
        if self.state.phase != "running":
            return False
        keep, durable = self.options.retention, self.state.durable
        return self.housekeeper.reclaim(wanted_bytes, keep, durable, done)

    def _spawn(self, effect: ev.Spawn) -> None:
        self._spawning = None if self.attendant.ready(time.monotonic()) else effect
        if self._spawning is not None:
            return  # the next turn of the loop tries again
        self._worked_with = True
        self.wire.expect(effect.attempt, effect.nonce)
        if not self.pipeline.late:
            self._alarm("receipts", self.recorder.forget_before(effect.attempt))
        self.recorder.follow(effect.attempt, effect.resume_step, effect.epoch)
        self._inbox.append(
            self.attendant.spawn(
                effect, self.options.command, self.options.environment, self.options.home
            )
        )
        self.attempt_logs.spawned(self.attendant.unlogged)

    def _adopt(self, pid: int) -> None:
        opened = self.state.durable.open
        assert opened is not None
        self.wire.expect(opened.attempt, opened.nonce)
        self.recorder.follow(opened.attempt, opened.resume_step, opened.epoch)
        if not self.attendant.adopt(pid, opened.nonce):
            self._inbox.append(ev.Died(time.monotonic()))

    def _complete_death(self, now: float) -> None:
        """Complete when nothing of the attempt lives and all its receipts are recorded."""
        holders = self.attendant.end_of_tree(now)
        read = self.recorder.at_end() and not self._saved
        if holders is None or not read or not self.pipeline.idle:
            return
        opened = self.state.durable.open
        words, evidence = "", ev.Evidence()
        if opened is not None:
            words = self.attendant.last_words(opened.attempt)
            evidence = self.attendant.evidence(opened.attempt)
        code, number = self.attendant.bury()
        self._inbox.append(
            ev.Reaped(
                now,
                code,
                number,
                self.recorder.exit_line,
                self.recorder.history_step,
                self.recorder.verified_steps,
                holders,
                words,
                evidence,
                self.attendant.held,
                self.recorder.read_step,
                self.recorder.loaded,
            )
        )

    # --- status ---

    def status(self) -> Json:
        return compose(
            self.directory,
            self.state,
            self.recorder.gauge,
            trouble=self.pipeline.trouble,
            supervisor_pid=os.getpid(),
            control={
                "wake_ups": self._wake_ups,
                "frames_refused": self.wire.refused,
                "messages_unheard": self.wire.unheard,
            },
            containment=self.attendant.containment,
            silence=vigil.silence(self.state, self.options.rules.limits, time.monotonic()),
            grace_seconds=self.state.grace_seconds(time.monotonic()),
            notifications=self.notifier.counts(),
            logs={"lost_lines": self.log.lost_lines, **self.attempt_logs.counts()},
        )

    def _write_status(self, durable: bool = False) -> None:
        status = self.status()
        self.reporter.show(status)
        self.manager.tell(status_line(status), ending(self.state))
        self.worker.submit_hint(partial(write, self.directory.status, status, durable))

    def _say(self, words: str) -> None:
        self.log.write(words)
        self.reporter.say(words)

    def _tell(self, record: ev.Record) -> None:
        """Journal records that a person wants to see as they happen, or to be told of."""
        self.attempt_logs.remember(record)
        words = describe(record)
        if words:
            self._say(words)
        self.watch, notice = notices.judge(self.watch, record)
        if notice is not None:
            self.notifier.offer(notices.compose(notice, self.status(), time.time()))
