"""The status of a run: composed by its supervisor, judged by whoever reads it.

What may live here: the shape of status.json and of `status --json`, and the exit code that a
reader gives it. The file is a hint; the run's lock says whether anybody stands behind it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

import orjson

from supervisor import contract, events as ev
from supervisor.contract import Json, encode_number
from supervisor.durable import replace_file
from supervisor.gauge import Gauge
from supervisor.journal import read
from supervisor.ledger import iterate_backward
from supervisor.rundir import RunDirectory, lock_holder
from supervisor.sidecars import read_status
from supervisor.state import TERMINAL, Durable, State, fold

SCHEMA_VERSION: Final = 1

RUNNING, DEAD, NOT_RUNNING, UNKNOWN = 0, 1, 3, 4


def compose(
    directory: RunDirectory,
    state: State,
    gauge: Gauge,
    *,
    trouble: str,
    supervisor_pid: int | None,
    control: Json,
    containment: str,
    notifications: Json,
    logs: Json,
    silence: Json | None,
    grace_seconds: float | None,
) -> Json:
    """Everything `supervisor status` shows. Unknown values are null. `control`, `notifications` and
    `logs` count what this life of the supervisor has had to do with its peers; `silence` is how
    long the trainer has made no progress, and how long it may; `grace_seconds` what one that is
    being ended still has, until it is killed."""
    durable = state.durable
    newest = max(durable.on_disk, default=None)
    exit_record = durable.last_exit
    alarms = [{"name": name, "detail": detail} for name, detail in durable.alarms]
    if trouble:
        alarms.append({"name": "durability", "detail": trouble})
    return {
        "schema_version": SCHEMA_VERSION,
        "run": directory.run,
        "run_id": durable.run_id,
        "directory": str(directory.path.resolve()),
        "time": time.time(),
        "phase": state.phase,
        "stage": state.stage,
        "trainer_phase": state.trainer_phase,
        "wish": durable.wish,
        "step": state.step if state.phase not in TERMINAL else state.history_step,
        "target_step": durable.target_step,
        "attempt": durable.attempt,
        "restarts": durable.restarts,
        "deaths_without_progress": durable.deaths,
        "requests": [
            {"id": request.id, "at": request.at, "seen": request.seen}
            for request in state.checkpoints
        ],
        "epoch": durable.epoch,
        "arm": gauge.arm,
        "loss": encode_number(gauge.loss),
        "loss_ema": encode_number(gauge.loss_ema),
        "steps_per_second": gauge.steps_per_second if state.phase == "running" else None,
        "evaluation": None if durable.evaluation is None else asdict(durable.evaluation),
        "checkpoint": {
            "step": newest,
            "path": None if newest is None else str(_path(directory.path, newest)),
            "verified": None if newest is None else newest in durable.verified,
        },
        "supervisor_pid": supervisor_pid,
        "trainer_pid": state.trainer_pid,
        "silence": silence,
        "grace_seconds": grace_seconds,
        "control": control,
        "containment": containment,
        "replay": {
            "verified_steps": durable.verified_steps + state.attempt_verified,
            "diverged_steps": durable.diverged_steps,
            "first_diverged_step": durable.first_diverged_step,
        },
        "last_exit": {
            "cause": exit_record.cause if exit_record else None,
            "code": exit_record.code if exit_record else None,
            "signal": exit_record.signal if exit_record else None,
            "message": exit_record.message or None if exit_record else None,
        },
        "alarms": alarms,
        "notifications": notifications,
        "logs": logs,
        "reason": state.why or durable.reason or None,
    }


def write(path: Path, status: Json, durable: bool) -> None:
    """Replaces the file whole. It is synced only where `durable`: it is a hint, not a fact. Raises
    OSError."""
    content = orjson.dumps(status, option=orjson.OPT_INDENT_2) + b"\n"
    if durable:
        replace_file(path, content)
        return
    temporary = path.with_name(f"{contract.TEMPORARY_PREFIX}{path.name}")
    temporary.write_bytes(content)
    temporary.rename(path)


def located(directory: RunDirectory, result: Json) -> Json:
    """A step in a reply comes with the path of its checkpoint."""
    step = result.get("step")
    return {**result, "path": str(_path(directory.path, step))} if isinstance(step, int) else result


def _path(directory: Path, step: int) -> Path:
    return directory.resolve() / contract.CHECKPOINTS / f"{contract.checkpoint_stem(step)}.bin"


def _age_seconds(directory: Path, step: int) -> float | None:
    file = directory / contract.CHECKPOINTS / f"{contract.checkpoint_stem(step)}.bin"
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return None


def _durable(path: Path) -> Durable:
    lines, _ = read(path / contract.JOURNAL_FILE)
    return fold(filter(None, map(ev.record_from_json, lines)))


def _newest_left(path: Path) -> Json:
    durable = _durable(path)
    left = [step for step in durable.on_disk if _age_seconds(path, step) is not None]
    newest = max(left, default=None)
    return {"step": newest, "verified": None if newest is None else newest in durable.verified}


def _of_the_journal(path: Path) -> Json | None:
    """The status of a run that no supervisor has written one of: a fork or an import before its
    first start, or a life that was killed in its first moments. None where nothing is on record."""
    durable = _durable(path)
    if not durable.run:
        return None
    directory = RunDirectory(path, durable.run)
    ruling = durable.epochs[-1]
    newest = next(iterate_backward(directory.ledger), None) if directory.ledger.exists() else None
    step = 0 if newest is None else newest.step
    if newest is not None and (newest.epoch or 1) < ruling.number:
        step = min(step, ruling.base_step)
    # What is beyond the history is set aside before a trainer begins.
    base = max((one for one in durable.on_disk if one <= step), default=0)
    gauge = Gauge()
    if newest is not None:
        gauge.go_on_from(directory.ledger, step)
    words = f"not started yet, begins at step {base}" if durable.begun is None else ""
    begun = "running" if durable.open is not None else "stopped"
    return compose(
        directory,
        State(
            durable=durable,
            phase=durable.outcome or ("idle" if durable.begun is None else begun),
            step=step,
            history_step=step,
            why=words,
        ),
        gauge,
        trouble="",
        supervisor_pid=None,
        control={},
        containment="",
        notifications={},
        logs={},
        silence=None,
        grace_seconds=None,
    )


def _of_one_moment(path: Path) -> tuple[Json | None, int | None]:
    """The status file and who owns the run. A supervisor that ends between the two looks, or
    starts, would be taken for one that died without a word."""
    while True:
        owner = lock_holder(path / contract.LOCK_FILE)
        status = read_status(path)
        if lock_holder(path / contract.LOCK_FILE) == owner:
            return status, owner


def observe(path: Path) -> tuple[Json | None, int]:
    """The last status of a run and the exit code that says whether it lives.

    0 running, 1 dead though recorded as running, 3 not running, 4 unknown. Takes no lock.
    """
    status, owner = _of_one_moment(path)
    if status is None:
        status = _of_the_journal(path)
    if status is None:
        return None, RUNNING if owner is not None else UNKNOWN
    step = status["checkpoint"]["step"]
    age = None if step is None else _age_seconds(path, step)
    if step is not None and age is None and owner is None:
        # Somebody has moved it since, as `verify --repair` does.
        status["checkpoint"] = _newest_left(path)
        step = status["checkpoint"]["step"]
        age = None if step is None else _age_seconds(path, step)
    # Where the run is, which may have another name or place since it was written.
    status["directory"] = str(path.resolve())
    place = None if step is None else str(_path(path, step))
    status["checkpoint"] = {**status["checkpoint"], "path": place, "age_seconds": age}
    if status["phase"] in TERMINAL or (status["phase"] == "idle" and owner is None):
        code = NOT_RUNNING
    elif owner is not None:
        code = RUNNING
    else:
        code = DEAD
        trainer = lock_holder(path / contract.TRAINER_LOCK_FILE) is not None
        status["reason"] = (
            "the supervisor is dead; the trainer trains on without it: `supervisor start` takes it"
            " over"
            if trainer
            else "the supervisor is dead and so is the trainer: `supervisor start` resumes"
        )
        if not trainer:
            status["trainer_pid"] = None
    if owner is None:
        status["supervisor_pid"] = None
    return status, code
