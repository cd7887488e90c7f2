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
from typing import Final

from supervisor import blame, events as ev
from supervisor.contract import ExitCode, Json
from supervisor.patience import LATE_SECONDS
from supervisor.state import (
    AT_ONCE,
    PERMANENT,
    PLANNED,
    UNPLANNED,
    Durable,
    Epoch,
    Pending,
    Turn,
)

UNSAVED: Final = "unsaved"  # the alarm from the first save that fails to the next that does not


def start(turn: Turn) -> None:
    if stop_wanted(turn):
        rest(turn)
        return
    turn.set(phase="starting", stage="merging", deadline=None, trainer_phase="", intent="")
    turn.do(ev.Merge())


def rest(turn: Turn) -> None:
    """Stopped, while nothing lives. What has finished stays finished: there is nothing to stop."""
    durable = turn.state.durable
    if durable.outcome == "finished":
        end(turn, "finished", durable.reason)
    else:
        end(turn, "stopped", "stopped as asked")


def clear(turn: Turn, base_step: int) -> None:
    """The base is decided: nothing may stand above it when the trainer begins."""
    turn.set(stage="clearing")
    turn.do(ev.Clear(base_step))


def spawn(turn: Turn, resume_step: int) -> None:
    durable = turn.state.durable
    owner, until_step = durable.owner(resume_step)
    attempt = max(durable.attempt, turn.state.merged_attempt) + 1
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
        unlinked_until=None,
        ready=False,
    )
    turn.do(ev.Spawn(attempt, nonce, resume_step, owner.number, until_step))


def ready(turn: Turn) -> None:
    """The trainer has said hello, or has made a step without one."""
    turn.set(phase="running", stage="", deadline=None, ready=True)
    for id in turn.state.restart_ids:
        turn.answer(id, "restart", "done", attempt=turn.state.durable.attempt)
    turn.set(restart_ids=())
    forward_requests(turn)


def stop_wanted(turn: Turn) -> bool:
    """A life for one pivot ends anyhow: it may come to a run whose operator wants it stopped."""
    wished = turn.state.durable.wish == "stop" and not turn.state.alone
    return wished or turn.state.intent == "stop"


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
    if turn.state.stage == "reaping":
        turn.set(deadline=None)
    elif turn.state.escalation != "killed":
        turn.set(escalation="killed", deadline=turn.now + turn.rules.kill_seconds)
    turn.do(ev.Kill())


def give_up_killing(turn: Turn) -> None:
    end(
        turn,
        "stuck",
        f"process {turn.state.trainer_pid} does not end, {turn.rules.kill_seconds:g} s after"
        " SIGKILL: the kernel waits in it for a disk or a device. Once it is gone,"
        " `supervisor start` goes on",
    )


def left_behind(event: ev.Reaped) -> str:
    """What of the dead attempt does not go away, or nothing."""
    left = []
    if event.holders:
        pids = ", ".join(str(pid) for pid in event.holders)
        left.append(f"processes {pids} of the dead attempt do not end")
    if event.held:
        left.append(f"the memory of the dead attempt is not released: {event.held}")
    return "; ".join(left)


def forward_requests(turn: Turn, again: bool = False) -> None:
    """Sends what was not sent yet, or all of it again to a trainer that has just (re)connected."""
    waiting = []
    for request in turn.state.checkpoints:
        if request.sent_at is None or again:
            if turn.state.linked:
                turn.do(ev.Send("checkpoint", {"id": request.id, "at": request.at}))
            elif request.sent_at is None:
                turn.do(ev.Signal("USR1"))
            request = replace(request, sent_at=turn.now, sent_step=turn.state.step)
        waiting.append(request)
    turn.set(checkpoints=tuple(waiting))
    rearm(turn)


def rearm(turn: Turn) -> None:
    """In `running` the deadline is the moment that the first thing unseen falls back to a signal
    (a request, or a pivot that no link could be told of), or that its silence is looked at."""
    state = turn.state
    if state.phase != "running":
        return
    moments = [
        request.sent_at + turn.rules.signal_after_seconds
        for request in state.checkpoints
        if request.sent_at is not None and not request.seen
    ]
    if state.unlinked_until is not None:
        moments.append(state.unlinked_until)
    turn.set(deadline=min([*moments, next_look(turn)]))


def next_look(turn: Turn) -> float:
    """When a trainer that is not heard of must be looked at again: in time for its deadline, and
    often enough to know a pause of our own from its silence."""
    state, limits = turn.state, turn.rules.limits
    if state.examined_at is None:
        silent_until = state.patience.deadline(limits)
    else:
        silent_until = state.examined_at + limits.evidence_seconds
    return min(silent_until, state.patience.looked + LATE_SECONDS / 2)


def remind(turn: Turn) -> None:
    """A signal to a trainer that has not said that it saw a request in time; and again, later."""

    def late(request: Pending) -> bool:
        sent_at = request.sent_at
        return (
            sent_at is not None
            and not request.seen
            and turn.now >= sent_at + turn.rules.signal_after_seconds
        )

    waiting = turn.state.checkpoints
    if any(late(request) for request in waiting):
        turn.do(ev.Signal("USR1"))
    turn.set(
        checkpoints=tuple(
            replace(request, sent_at=turn.now) if late(request) else request for request in waiting
        )
    )
    rearm(turn)


def refuse_checkpoints(turn: Turn, why: str) -> None:
    for request in turn.state.checkpoints:
        if request.operator:
            turn.answer(request.id, "checkpoint", "refused", why)
    turn.set(checkpoints=())


def commit(
    turn: Turn, step: int, attempt: int, reason: str, requests: tuple[str, ...], digest: str
) -> None:
    durable = turn.state.durable
    if step in durable.on_disk:
        return
    turn.append(ev.CheckpointCommitted(step, attempt, reason, list(requests), digest))
    if "hang" in dict(durable.alarms) and step > (durable.best_checkpoint or 0):
        turn.append(ev.AlarmCleared("hang"))
    if UNSAVED in dict(durable.alarms):
        turn.append(ev.AlarmCleared(UNSAVED))


def verify(turn: Turn, step: int) -> None:
    """Reads a checkpoint back, and with it those that could not be read back before: once more for
    each new one, so that a helper that always fails is not asked without end."""
    state = turn.state
    wanted = ({step} | state.unread) - state.durable.verified - state.verifying
    turn.set(verifying=state.verifying | wanted, unread=frozenset())
    turn.do(*(ev.Verify(one) for one in sorted(wanted)))


def ended(
    turn: Turn,
    cause: str,
    code: int | None,
    signal: int | None,
    step: int,
    verified_steps: int,
    message: str,
    go_on: bool = True,
    reached_step: int = 0,
) -> None:
    durable = turn.state.durable
    planned = turn.state.intent in PLANNED
    # Who says "finished" without a checkpoint at the target would be started again for ever.
    finished = cause == "finished" and (durable.best_checkpoint or 0) >= durable.target_step
    charged = cause == "finished" or (cause in UNPLANNED and cause != "again")
    counted = charged and not finished and not planned
    turn.append(
        ev.AttemptEnded(
            durable.attempt,
            cause,
            code,
            signal,
            step,
            counted,
            verified_steps,
            message,
            counted and blame.blames(cause, signal, turn.state.ready),
            reached_step,
        )
    )
    turn.set(attempt_verified=0)
    refuse_checkpoints(turn, f"the trainer ended ({cause}) before it could save")
    if go_on:
        after(turn, cause, message)


def after(turn: Turn, cause: str, message: str) -> None:
    pivot = turn.state.durable.pivot
    # A rollback asks nothing of the trainer, so a trainer that dies is as good as one that leaves.
    left = turn.state.alone or turn.state.intent == "pivot"
    if stop_wanted(turn):
        end(turn, "stopped", stop_reason(turn, cause))
    elif turn.state.intent == "full" and cause != "finished":
        fail(turn, turn.state.full)
    elif pivot is not None and (left or pivot.to_step is not None):
        turn.set(pivoting=True)
        start(turn)
    elif turn.state.intent in ("restart", "pivot") or turn.state.restart_ids or cause in AT_ONCE:
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
    where = blame.pattern(durable)
    fail(turn, f"{durable.deaths} deaths without a new checkpoint, the last one by {how}{where}")


def stop_reason(turn: Turn, cause: str) -> str:
    return "stopped as asked" if cause in ("stopped", "finished") else f"stopped; ended by {cause}"


def back_off(turn: Turn) -> None:
    """Doubling delay with jitter from the run and the attempt, so that it is the same in a replay
    and different between runs that died together. What is not charged to the budget waits as long:
    a trainer that only ever asks to be tried again must not spin."""
    durable = turn.state.durable
    best = durable.best_checkpoint
    fruitless = turn.state.fruitless + 1 if turn.state.fruitless_since == best else 1
    turn.set(fruitless=fruitless, fruitless_since=best)
    doubling = min(max(durable.deaths, fruitless) - 1, 30)
    delay = min(turn.rules.delay_seconds * 2**doubling, turn.rules.maximum_delay_seconds)
    word = hashlib.sha256(f"{durable.run_id}:{durable.attempt}".encode()).digest()
    jitter = 0.75 + 0.25 * word[0] / 255
    turn.set(phase="backoff", stage="", intent="", deadline=turn.now + delay * jitter)


def fail(turn: Turn, reason: str) -> None:
    durable = turn.state.durable
    base_step = durable.epochs[-1].base_step
    begun = durable.best_checkpoint != base_step
    if durable.epoch > 1 and not begun and base_step in durable.on_disk:
        reason += (
            f"; no checkpoint of epoch {durable.epoch} is there yet:"
            f" `supervisor rollback --to-step {base_step}` goes back to the policy before it"
        )
    turn.append(ev.RunFailed(reason))
    end(turn, "failed", reason)


def end(turn: Turn, phase: str, reason: str) -> None:
    """The end of this life of the supervisor, with every waiting operator answered."""
    give_up_pivot(turn, f"the supervisor ends ({phase}): {reason}")
    refuse_checkpoints(turn, f"the supervisor ends ({phase})")
    turn.append(ev.SupervisorEnded(phase, reason))
    newest = max(turn.state.durable.on_disk, default=None)
    for id in turn.state.stop_ids:
        if phase == "stuck":  # something of the run may still be at work
            turn.answer(id, "stop", "refused", f"stuck: {reason}", phase=phase, step=newest)
        else:
            turn.answer(id, "stop", "done", phase=phase, step=newest, reason=reason)
    for id in turn.state.restart_ids:
        turn.answer(id, "restart", "refused", f"the supervisor ends ({phase}): {reason}")
    turn.set(phase=phase, stage="", deadline=None, why=reason, stop_ids=(), restart_ids=())
    code = ExitCode.OK if phase in ("stopped", "finished") else ExitCode.FAILED
    turn.do(ev.Exit(int(ExitCode.FORCED if turn.state.forced else code), reason))


def answered(durable: Durable, id: str, verb: str) -> ev.Reply | None:
    """What was said to this request before. An id that was another verb's is no repetition: its
    answer would be taken for what has not been done."""
    known = next((reply for reply in durable.replies if reply.id == id), None)
    if known is None:
        return None
    if known.verb != verb:
        return ev.Reply(id, "refused", f"this id is that of a {known.verb} that was answered")
    return ev.Reply(id, known.outcome, known.why, known.result)


def abort_pivot(turn: Turn, why: str) -> None:
    pivot = turn.state.durable.pivot
    assert pivot is not None
    turn.append(ev.PivotAborted(pivot.request, why))
    turn.answer(pivot.request, "pivot", "refused", why)
    waiting = tuple(id for id in turn.state.pivot_ids if id != pivot.request)
    turn.set(pivot_ids=waiting, pivoting=False)


def give_up_pivot(turn: Turn, why: str) -> None:
    """This life ends: a pivot that is not committed is aborted, one that is has its answer."""
    answer_pivots(turn, "" if turn.state.alone else why)
    if turn.state.durable.pivot is not None:
        abort_pivot(turn, why)


def answer_pivots(turn: Turn, why: str = "") -> None:
    """Who waits for a pivot that is committed. `why`: what became of the run right after it."""
    done = {epoch.request: epoch for epoch in turn.state.durable.epochs}
    for id in turn.state.pivot_ids:
        if id in done:
            turn.answer(id, "pivot", "done", why, **pivot_result(done[id]))
    turn.set(pivot_ids=tuple(id for id in turn.state.pivot_ids if id not in done))


def pivot_result(epoch: Epoch) -> Json:
    return {
        "epoch": epoch.number,
        "base_step": epoch.base_step,
        "first_step": epoch.base_step + 1,
        "archive": epoch.archive,
    }
