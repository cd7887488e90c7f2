"""`supervisor start`: from a configuration file to a running daemon, and its report at the end.

What may live here: what happens before the loop (settings, the run directory, the lock) and what
is said after it.

Invariants: everything is validated before anything is touched, and the run directory is written
only under the run's lock.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import click

from supervisor import client, config, events as ev
from supervisor.acceptance import Refused, accept, created, on_record
from supervisor.attempt_logs import DETACHED_OUTPUT
from supervisor.checkpoints import NoSpace, find, preflight
from supervisor.commit import Unwritable, writable
from supervisor.config import Settings
from supervisor.contract import LOGS, RUN_FILE, ExitCode, Json, checkpoint_size_bytes
from supervisor.daemon import Daemon
from supervisor.data_check import DataRefused, examine
from supervisor.durable import size_of
from supervisor.journal import JournalDamaged, read
from supervisor.options import Begin
from supervisor.output import forgiving
from supervisor.parentage import deaf_parent
from supervisor.progress import Reporter, number
from supervisor.records import RecordBroken
from supervisor.reread import channels_of, options_of, reread
from supervisor.rows import LedgerDamaged
from supervisor.rundir import (
    LockHeld,
    RunDirectory,
    refuse_foreign,
    refuse_owned,
    take_lock,
)
from supervisor.sdnotify import VARIABLES, ServiceManager
from supervisor.sidecars import read_samples, read_status
from supervisor.signals import Signals
from supervisor.state import Durable, fold
from supervisor.tail import printable
from supervisor.terminal import PREFIX

DETACH_SECONDS: Final = 60.0
DESCRIPTORS: Final = 8192
SAMPLES_SHOWN: Final = 3
# What the operator must mend, so that it is no use to start again: the rest may pass by itself.
OPERATORS: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
        *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    }
)


class Owned(Refused):
    """Another supervisor has the run, so it is the one to ask."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line of `start`, or of another command without a supervisor, asked for."""

    wish: str | None = "run"
    id: str = ""
    from_scratch: bool = False
    pivot: Json | None = None


def start_from_file(
    path: str, overrides: Sequence[str], environment: Mapping[str, str], request: Request
) -> int:
    """Supervises the run that a configuration file describes. Raises Refused, ConfigError."""
    home = Path.cwd()
    settings = config.load(path, overrides, environment)
    file = Path(os.path.abspath(path))
    if file == Path(settings.run.directory) / RUN_FILE:
        file = Path(RUN_FILE)  # from inside, as the loop is: a renamed run is followed
    again = partial(config.load, file, overrides, environment, home)
    return _supervise(settings, again, environment, request)


def resume_directory(directory: Path, environment: Mapping[str, str], request: Request) -> int:
    """Supervises a run that exists, under its own recorded settings. Raises Refused and
    ConfigError."""
    place = RunDirectory(directory, directory.name)
    if place.run_file.exists():
        settings = config.load(place.run_file)
    else:  # its supervisor was killed in its first moments; the journal says what was to be there
        settings = on_record(_journalled(place), place)
    recorded = settings.tree()
    recorded["run"]["directory"] = str(directory.resolve())
    with forgiving("stdout"):
        settings = config.parse(recorded, str(place.run_file))
        return _supervise(settings, partial(config.load, RUN_FILE), environment, request)


def _supervise(
    settings: Settings,
    load: Callable[[], Settings],
    environment: Mapping[str, str],
    request: Request,
) -> int:
    """`load` reads the settings again, in a life that goes on."""
    _allow_many_clients()
    directory = RunDirectory(Path(settings.run.directory), settings.run.name)
    if request.wish != "stop":
        _check_supported(settings)
        _check_trainer(settings)
        channels_of(settings, environment, Path.cwd())
        _check_space(settings, directory)
    refuse_foreign(directory)
    signals = Signals()
    reporter = Reporter()
    manager = _service_manager(environment)
    lock_fd = -1
    try:
        with writable(directory.path):
            if request.wish != "stop":
                _check_epochs(settings, directory)
            directory.create()
            lock_fd = take_lock(directory)
        settings, records, before = _settle(settings, directory)
        if request.wish == "run" and not request.from_scratch:
            _check_manifests(settings, before, directory)
        if request.wish == "run" and (words := _forgiven(before)):
            reporter.say(words)
        home = Path.cwd()
        options = options_of(settings, directory, environment, home)
        begin = Begin(tuple(records), request.wish, request.id, request.from_scratch, request.pivot)
        inside = directory.enter()
        again = partial(reread, load, environment, inside, home)
        daemon = Daemon(inside, options, again, signals, reporter, manager)
        if words := deaf_parent(environment):
            daemon.log.write(words)
            reporter.say(f"warning: {words}")
        code = _live(daemon, begin, directory.path)
        signals.retire()
        reporter.close()
        if code == ExitCode.OK and request.pivot is None:
            report(inside)
        return code
    except LockHeld as held:
        raise Owned(str(held)) from held
    except Unwritable as problem:
        raise _refusal(problem) from problem
    except (JournalDamaged, LedgerDamaged, RecordBroken) as damage:
        raise Refused(str(damage), ExitCode.FAILED) from damage
    finally:
        reporter.close()
        if lock_fd >= 0:
            os.close(lock_fd)
        manager.close()
        signals.close()


def _refusal(problem: Unwritable) -> Refused:
    mine = problem.errno not in OPERATORS
    return Refused(str(problem), ExitCode.OURS if mine else ExitCode.USAGE)


class LifeBroken(Exception):
    """The machine failed a life that was under way: not the operator's mistake, and to be tried
    again by whoever starts us."""


def _live(daemon: Daemon, begin: Begin, place: Path) -> int:
    try:
        return daemon.run(begin)
    except PermissionError as error:  # no other life would fare better
        name = str(error.filename or "")
        raise PermissionError(error.errno, error.strerror, str(place / name)) from error
    except OSError as error:
        raise LifeBroken(f"the life of the supervisor ended: {error}") from error


def _allow_many_clients() -> None:
    """Each client is a descriptor of ours, and the usual limit of 1024 leaves few for the run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _service_manager(environment: Mapping[str, str]) -> ServiceManager:
    """From here on nothing that we start, the helper process among it, speaks in our name."""
    manager = ServiceManager(environment)
    for name in VARIABLES:
        os.environ.pop(name, None)
    return manager


def _check_supported(settings: Settings) -> None:
    """Settings that are understood but cannot be carried out yet are refused, not ignored."""
    if settings.run.shared:
        raise Refused(
            "run.shared = true: a run directory on a network file system is not supported yet; set"
            " it to false and put run.directory on a local disk"
        )
    if settings.trainer.processes > 1 and settings.trainer.command is None:
        raise Refused(
            f"trainer.processes = {settings.trainer.processes}: our trainer runs as one process;"
            " set it to 1, or set trainer.command to a launcher of your own"
        )


def _check_trainer(settings: Settings) -> None:
    if settings.trainer.command is None and importlib.util.find_spec("torch") is None:
        raise Refused(
            "our trainer needs PyTorch, which is not installed here: pip install"
            " 'trainer-supervisor[trainer]' (or set trainer.command to run a program of your own)"
        )


def _check_space(settings: Settings, directory: RunDirectory) -> None:
    """Room for all checkpoints that will be kept, and one more while it is written."""
    vocabulary = settings.model.vocabulary or (
        config.BYTES_VOCABULARY if settings.tokenizer.kind == "bytes" else None
    )
    if vocabulary is None or settings.trainer.command is not None:
        return
    size = checkpoint_size_bytes(config.parameter_count(settings.model, vocabulary))
    there = sum(1 for _ in directory.checkpoints.glob("step_*.bin"))
    try:
        preflight(directory.path, size, max(1, settings.checkpoint.keep_last + 1 - there))
    except NoSpace as error:
        raise Refused(f"{error.strerror}: see checkpoint.keep_last") from error


def _check_epochs(settings: Settings, directory: RunDirectory) -> None:
    """That `maximum_epochs` leaves room for the steps that a start would promise: those of a new
    run, or more than an old one had. Nothing else needs the data before the trainer loads it."""
    durable = _journalled(directory)
    if durable != Durable() or directory.run_file.exists():
        recorded = on_record(durable, directory)
        if settings.training.steps <= recorded.training.steps:
            return
        longer = (c for c in config.compare(recorded, settings).operational if _is_steps(c))
        settings = config.accept(recorded, longer)
    if settings.policy.maximum_epochs is None or settings.trainer.command is not None:
        return
    try:
        examine(settings, directory.path, durable.epoch)
    except DataRefused as refusal:
        raise Refused(str(refusal)) from refusal


def _check_manifests(settings: Settings, before: Durable, directory: RunDirectory) -> None:
    """Our own trainer goes on from nothing that another program saved: there is no state of the
    samplers, the bandit and the generators beside the weights."""
    if not before.imported or settings.trainer.command is not None:
        return
    newest = max(find(directory.checkpoints), key=lambda found: found.step, default=None)
    if newest is not None and newest.manifest is None:
        raise Refused(
            f"{newest.binary}: a checkpoint without a manifest, from which our own trainer cannot"
            " go on: import again with --config and a trainer.command, or begin again from step 0"
            " with --from-scratch"
        )


def _is_steps(change: config.Change) -> bool:
    return change.key == "training.steps"


def _settle(
    settings: Settings, directory: RunDirectory
) -> tuple[Settings, list[ev.Record], Durable]:
    """The settings that rule, what to put on record first, and what was on record before. Under
    the lock.

    The journal is the authority; run.toml is written from it by the daemon, once it is durable.
    """
    durable = _journalled(directory)
    if durable != Durable():
        recorded = on_record(durable, directory)
        return *accept(recorded, settings, durable, directory), durable
    if directory.run_file.exists():  # a trainer has worked here alone
        recorded = config.load(directory.run_file)
        begun, accepted = accept(recorded, settings, durable, directory)
        return begun, [created(recorded), *accepted], durable
    settings = config.resolve(settings, uuid.uuid4().hex)
    return settings, [created(settings)], durable


def _forgiven(before: Durable) -> str:
    """What a start by hand wipes out, in words; nothing where there is nothing to wipe out."""
    if before.outcome == "failed":
        return f"the run had failed ({before.reason}); started by hand, it has its budget again"
    if before.deaths:
        return f"started by hand: deaths without a new checkpoint, {before.deaths}, are forgiven"
    return ""


def _journalled(directory: RunDirectory) -> Durable:
    journal = read(directory.journal)[0] if directory.journal.exists() else []
    return fold(filter(None, map(ev.record_from_json, journal)))


def report(directory: RunDirectory) -> None:
    """What there is to see once a run has stopped: where it stands, its samples, how to go on."""
    status = read_status(directory.path) or {}
    phase, step, target = status.get("phase"), status.get("step"), status.get("target_step")
    place = directory.path.resolve()
    click.echo(f"{directory.run}: {phase} at step {step} of {target}, in {place}")
    evaluation = status.get("evaluation")
    if evaluation:
        loss = number(evaluation.get("loss"), ".4f")
        click.echo(f"held-out loss at step {evaluation.get('step')}: {loss} nats")
        for arm, row in evaluation.get("arms", {}).items():
            if isinstance(row, dict):  # a trainer of another make says what it likes about an arm
                words = [number(row.get(key), ".4f") for key in ("loss", "byte_entropy")]
                click.echo(f"  {arm}: {words[0]} nats; the bytes alone have {words[1]}")
    samples = read_samples(directory.samples)
    newest = [row for row in samples if row["step"] == samples[-1]["step"]] if samples else []
    for row in newest[:SAMPLES_SHOWN]:
        click.echo(f"  step {row['step']} | {printable(row['prompt'] + row['text'])}")
    again = f"supervisor start --config {shlex.quote(str(place / RUN_FILE))}"
    run = shlex.quote(str(place))
    if phase == "finished":
        click.echo(
            f"to train on: {again} --set training.steps={int(target or 0) * 2}"
            f"\nto see more: supervisor status {run}; supervisor samples {run};"
            f" python -m trainer generate {run} --prompt 'The '"
        )
    elif phase == "stopped":
        click.echo(f"to go on: {again}")


def detach(arguments: Sequence[str], directory: Path) -> int:
    """Runs `supervisor start ...` in a session of its own and waits until it answers.

    Raises Refused with what it printed where it ends before that.
    """
    place = RunDirectory(directory, "run")
    refuse_foreign(place)
    try:
        with writable(directory):
            place.create()
    except Unwritable as problem:
        raise _refusal(problem) from problem
    try:
        refuse_owned(place)
    except LockHeld as held:
        raise Owned(str(held)) from held
    output = directory / LOGS / DETACHED_OUTPUT
    begin = size_of(output)
    with output.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "supervisor", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    deadline = time.monotonic() + DETACH_SECONDS
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            text = output.read_bytes()[begin:].decode("utf-8", "replace").strip()
            if code == 0:
                click.echo(text)
                return 0
            raise _ended(code, own_words(text))
        try:
            answer = client.ask(
                directory, "status", id=client.new_request_id(), timeout_seconds=1.0
            )
        except (client.NoSupervisor, client.DeadlinePassed):
            continue
        if answer.result["supervisor_pid"] == process.pid:
            run = shlex.quote(str(directory))
            click.echo(
                f"supervisor {process.pid} owns {directory}; it prints to {output}\n"
                f"to watch it: supervisor status {run}; supervisor logs {run} --supervisor -f"
            )
            return 0
    raise Refused(f"no answer within {DETACH_SECONDS:g} s; look at {output}", ExitCode.DEADLINE)


def _ended(code: int, text: str) -> Refused:
    """A detached start that ended before it answered, and what it printed. An exit status that is
    none of ours is our own fault: it was killed, or the interpreter failed."""
    if code in {int(known) for known in ExitCode}:
        return Refused(text or f"it ended with exit code {code}", ExitCode(code))
    how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
    return Refused(f"{text}\nit ended with {how}".strip(), ExitCode.OURS)


def own_words(text: str) -> str:
    """What it said of its own end, without the name that is put before it again. Others may have
    printed into the same file meanwhile."""
    lines = [line for line in text.splitlines() if line.startswith(PREFIX)]
    return "\n".join(line.removeprefix(PREFIX) for line in lines) or text


__all__ = ["Owned", "Refused", "Request", "detach", "resume_directory", "start_from_file"]
