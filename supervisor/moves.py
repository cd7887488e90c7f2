"""The moves that decisions are made of: start, spawn, stop, back off, end.

What may live here: functions that change a turn's state and add effects, called by more than one
event. Which event leads to which move is decided in `machine`.

Invariants:
- There is one way to a running trainer: merge, select, clear, spawn. Crash, restart, pivot and
  first start all take it.
- A spawn follows its AttemptStarted in the same decision, so it is on disk before the process is.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from supervisor import events as ev
from supervisor.contract import ExitCode, Json
from supervisor.state import AT_ONCE, PERMANENT, UNPLANNED, Durable, Epoch, Turn


def start(turn: Turn) -> None:
    if stop_wanted(turn):
        end(turn, "stopped", "stopped as asked")
        return
    turn.set(phase="starting", stage="merging", deadline=None, trainer_phase="", intent="")
    turn.do(ev.Merge())


def clear(turn: Turn, base_step: int) -> None:
    """The base is decided: nothing may stand above it when the trainer begins."""
    turn.set(stage="clearing", base_step=base_step)
    turn.do(ev.Clear(base_step))


def spawn(turn: Turn, resume_step: int) -> None:
    durable = turn.state.durable
    owner, until_step = durable.owner(resume_step)
    attempt = durable.attempt + 1
    word = f"{durable.run_id}:{turn.state.life}:{attempt}"
    nonce = hashlib.sha256(word.encode()).hexdigest()[:16]
    turn.append(ev.AttemptStarted(attempt, nonce, resume_step, owner.number, until_step))
    turn.set(
        stage="spawning",
        step=resume_step,
        attempt_verified=0,
        linked=False,
        trainer_pid=None,
        escalation="",
    )
    turn.do(ev.Spawn(attempt, nonce, resume_step, owner.number, until_step))


def ready(turn: Turn) -> None:
    """The trainer has said hello, or has made a step without one."""
    turn.set(phase="running", stage="", deadline=None)
    for id in turn.state.restart_ids:
        turn.answer(id, "restart", "done", attempt=turn.state.durable.attempt)
    turn.set(restart_ids=())
    forward_requests(turn)


def stop_wanted(turn: Turn) -> bool:
    return turn.state.intent == "stop" or turn.state.durable.wish == "stop"


def begin_stop(turn: Turn, intent: str) -> None:
    """Message first; the signal follows if the message goes unseen; SIGKILL ends the grace. The
    clock starts now, not when the trainer answers."""
    turn.set(
        phase="stopping",
        stage="",
        intent=intent,
        force_at=turn.now + turn.rules.grace_seconds,
    )
    if turn.state.linked:
        unseen_at = turn.now + turn.rules.signal_after_seconds
        turn.set(escalation="asked", deadline=min(unseen_at, turn.state.force_at))
        repeat_stop(turn)
    else:
        turn.set(escalation="signalled", deadline=turn.state.force_at)
        turn.do(ev.Signal("TERM"))


def repeat_stop(turn: Turn) -> None:
    turn.do(ev.Send("stop", {"id": stop_id(turn), "at": "now"}))


def stop_id(turn: Turn) -> str:
    return f"stop-{turn.state.durable.attempt}"


def begin_kill(turn: Turn, intent: str) -> None:
    """No more patience with a living trainer. A stop that is under way stays what it is."""
    if turn.state.phase != "stopping":
        turn.set(phase="stopping", stage="", intent=intent)
    kill(turn)


def kill(turn: Turn) -> None:
    """Once the main process is dead this only ends what it left behind: the death was not ours."""
    if turn.state.stage != "reaping":
        turn.set(escalation="killed")
    turn.set(deadline=None)
    turn.do(ev.Kill())


def forward_requests(turn: Turn, again: bool = False) -> None:
    """Sends what was not sent yet, or all of it again to a trainer that has just (re)connected."""
    waiting = []
    for request in turn.state.checkpoints:
        if request.sent_at is None or again:
            if turn.state.linked:
                turn.do(ev.Send("checkpoint", {"id": request.id, "at": request.at}))
            elif request.sent_at is None:
                turn.do(ev.Signal("USR1"))
            request = replace(request, sent_at=turn.now)
        waiting.append(request)
    turn.set(checkpoints=tuple(waiting))
    rearm(turn)


def rearm(turn: Turn) -> None:
    """In `running` the deadline is the moment the first unseen request falls back to a signal."""
    if turn.state.phase != "running":
        return
    unseen = [
        request.sent_at + turn.rules.signal_after_seconds
        for request in turn.state.checkpoints
        if request.sent_at is not None and not request.seen
    ]
    turn.set(deadline=min(unseen, default=None))


def refuse_checkpoints(turn: Turn, why: str) -> None:
    for request in turn.state.checkpoints:
        if request.operator:
            turn.answer(request.id, "checkpoint", "refused", why)
    turn.set(checkpoints=())


def commit(
    turn: Turn, step: int, attempt: int, reason: str, requests: tuple[str, ...], digest: str
) -> None:
    if step not in turn.state.durable.on_disk:
        turn.append(ev.CheckpointCommitted(step, attempt, reason, list(requests), digest))


def verify(turn: Turn, step: int) -> None:
    if step not in turn.state.durable.verified and step not in turn.state.verifying:
        turn.set(verifying=turn.state.verifying | {step})
        turn.do(ev.Verify(step))


def ended(
    turn: Turn,
    cause: str,
    code: int | None,
    signal: int | None,
    step: int,
    verified_steps: int,
    message: str,
    go_on: bool = True,
) -> None:
    durable = turn.state.durable
    planned = turn.state.intent in ("stop", "restart", "pivot")
    # Who says "finished" without a checkpoint at the target would be started again for ever.
    finished = cause == "finished" and (durable.best_checkpoint or 0) >= durable.target_step
    charged = cause == "finished" or (cause in UNPLANNED and cause != "again")
    counted = charged and not finished and not planned
    turn.append(
        ev.AttemptEnded(
            durable.attempt, cause, code, signal, step, counted, verified_steps, message
        )
    )
    turn.set(attempt_verified=0)
    refuse_checkpoints(turn, f"the trainer ended ({cause}) before it could save")
    if go_on:
        after(turn, cause, message)


def after(turn: Turn, cause: str, message: str) -> None:
    if stop_wanted(turn):
        end(turn, "stopped", stop_reason(turn, cause))
    elif turn.state.intent == "pivot":
        turn.set(pivoting=turn.state.durable.pivot is not None)
        start(turn)
    elif turn.state.intent == "restart" or turn.state.restart_ids or cause in AT_ONCE:
        start(turn)
    elif cause in PERMANENT:
        fail(turn, f"{PERMANENT[cause]}: {message}" if message else PERMANENT[cause])
    elif budget_spent(turn):
        give_up(turn)
    else:
        back_off(turn)


def budget_spent(turn: Turn) -> bool:
    return turn.state.durable.deaths >= turn.rules.deaths


def give_up(turn: Turn) -> None:
    durable = turn.state.durable
    last = durable.last_exit
    assert last is not None, "nothing died, yet deaths are counted"
    how = f"{last.cause}: {last.message}" if last.message else last.cause
    fail(turn, f"{durable.deaths} deaths without a new checkpoint, the last one by {how}")


def stop_reason(turn: Turn, cause: str) -> str:
    return "stopped as asked" if cause in ("stopped", "finished") else f"stopped; ended by {cause}"


def back_off(turn: Turn) -> None:
    """Doubling delay with jitter from the run and the attempt, so that it is the same in a replay
    and different between runs that died together."""
    durable = turn.state.durable
    doubling = min(max(durable.deaths - 1, 0), 30)
    delay = min(turn.rules.delay_seconds * 2**doubling, turn.rules.maximum_delay_seconds)
    word = hashlib.sha256(f"{durable.run_id}:{durable.attempt}".encode()).digest()
    jitter = 0.75 + 0.25 * word[0] / 255
    turn.set(phase="backoff", stage="", intent="", deadline=turn.now + delay * jitter)


def fail(turn: Turn, reason: str) -> None:
    turn.append(ev.RunFailed(reason))
    end(turn, "failed", reason)


def end(turn: Turn, phase: str, reason: str) -> None:
    """The end of this life of the supervisor, with every waiting operator answered."""
    give_up_pivot(turn, f"the supervisor ends ({phase}): {reason}")
    refuse_checkpoints(turn, f"the supervisor ends ({phase})")
    turn.append(ev.SupervisorEnded(phase, reason))
    newest = max(turn.state.durable.on_disk, default=None)
    for id in turn.state.stop_ids:
        turn.answer(id, "stop", "done", phase=phase, step=newest, reason=reason)
    for id in turn.state.restart_ids:
        turn.answer(id, "restart", "refused", f"the supervisor ends ({phase}): {reason}")
    turn.set(phase=phase, stage="", deadline=None, why=reason, stop_ids=(), restart_ids=())
    code = ExitCode.OK if phase in ("stopped", "finished") else ExitCode.FAILED
    turn.do(ev.Exit(int(ExitCode.FORCED if turn.state.forced else code), reason))


def abort_pivot(turn: Turn, why: str) -> None:
    pivot = turn.state.durable.pivot
    assert pivot is not None
    turn.append(ev.PivotAborted(pivot.request, why))
    turn.answer(pivot.request, "pivot", "refused", why)
    turn.set(pivot_ids=tuple(id for id in turn.state.pivot_ids if id != pivot.request))


def give_up_pivot(turn: Turn, why: str) -> None:
    """This life ends: a pivot that is not committed is aborted, one that is has its answer."""
    for id in turn.state.pivot_ids:
        answer_pivot(turn, id)
    if turn.state.durable.pivot is not None:
        abort_pivot(turn, why)


def answer_pivot(turn: Turn, id: str) -> None:
    durable = turn.state.durable
    epoch = next((epoch for epoch in durable.epochs if epoch.request == id), None)
    if epoch is not None:
        turn.answer(id, "pivot", "done", **pivot_result(durable, epoch))
        turn.set(pivot_ids=tuple(one for one in turn.state.pivot_ids if one != id))


def pivot_result(durable: Durable, epoch: Epoch) -> Json:
    return {
        "epoch": epoch.number,
        "base_step": epoch.base_step,
        "first_step": epoch.base_step + 1,
        "archive": epoch.archive,
    }
