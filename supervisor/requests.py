"""What an operator's request, or a signal to the supervisor, leads to.

What may live here: one function for each verb, and the rule that the same id is answered once and
then again with the same words. Pure, like `machine`, whose table sends requests here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from supervisor import events as ev, moves, pivoting
from supervisor.contract import Json
from supervisor.state import Pending, Turn


def of_message(now: float, verb: str, content: Json) -> ev.Asked:
    """The checked content of an operator's message, as an event."""
    return ev.Asked(
        now,
        content["id"],
        verb,
        content.get("at", "now"),
        step=content.get("step", 0),
        why=content.get("why", ""),
        content={"to_step": None, **content} if verb == "pivot" else {},
    )


def asked(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Asked)
    known = moves.answered(turn.state.durable, event.id, event.verb)
    if known is not None:
        turn.do(known)
        return
    waiting = {request.id for request in turn.state.checkpoints}
    state = turn.state
    if event.id in waiting | {*state.stop_ids, *state.restart_ids, *state.pivot_ids}:
        return
    _VERBS[event.verb](turn, event)


def _ask_checkpoint(turn: Turn, event: ev.Asked) -> None:
    state = turn.state
    if state.phase not in ("starting", "running", "stopping") or state.stage == "reaping":
        newest = max(state.durable.on_disk, default=None)
        why = f"no trainer is running ({state.phase}); the newest checkpoint is step {newest}"
        if event.operator:
            turn.answer(event.id, "checkpoint", "busy", why)
        return
    if not event.operator and _joins_an_earlier_one(turn):
        return
    turn.set(checkpoints=(*state.checkpoints, Pending(event.id, event.at, event.operator)))
    if state.phase != "starting":
        moves.forward_requests(turn)
        moves.rearm(turn)


def _joins_an_earlier_one(turn: Turn) -> bool:
    """Ten thousand signals are one request until the trainer has seen it: its next boundary, which
    is yet to come, answers them all. One that went out as a signal is never seen, so it is sent
    again: the save that is under way may be that of an earlier boundary."""
    for request in turn.state.checkpoints:
        if not request.operator and not request.seen:
            if request.sent_at is not None and not turn.state.linked:
                turn.do(ev.Signal("USR1"))
            return True
    return False


def _ask_stop(turn: Turn, event: ev.Asked) -> None:
    if event.operator:
        turn.append(ev.Wished("stop", event.id))
        turn.set(stop_ids=(*turn.state.stop_ids, event.id))
    match turn.state.phase:
        case "backoff" if turn.state.stage != "reaping":
            moves.rest(turn)
        case "running":
            moves.begin_stop(turn, "stop")
        case "starting" if turn.state.stage == "loading":
            moves.begin_stop(turn, "stop")
        case _:
            turn.set(intent="stop")


def _ask_restart(turn: Turn, event: ev.Asked) -> None:
    state = turn.state
    if state.phase == "stopping" and state.intent == "stop":
        turn.answer(event.id, "restart", "busy", "a stop is under way")
        return
    turn.set(restart_ids=(*state.restart_ids, event.id))
    if state.phase == "running":
        moves.begin_stop(turn, "restart")
    elif state.phase == "backoff" and state.stage != "reaping":
        moves.start(turn)


def _ask_hasten(turn: Turn, event: ev.Asked) -> None:
    """The operator's second Ctrl-C: the same stop, with less patience."""
    if turn.state.phase == "stopping" and turn.state.escalation in ("asked", "seen", "signalled"):
        force_at = min(turn.state.force_at, turn.now + turn.rules.hasten_seconds)
        turn.set(force_at=force_at, deadline=force_at)
        if turn.state.escalation != "signalled":
            turn.set(escalation="signalled")
            turn.do(ev.Signal("TERM"))
    else:
        _ask_stop(turn, event)


def _ask_kill(turn: Turn, event: ev.Asked) -> None:
    """The operator's third Ctrl-C."""
    turn.set(forced=True)
    if turn.state.phase in ("running", "stopping") or turn.state.stage == "loading":
        moves.begin_kill(turn, "stop")
        turn.set(intent="stop")
    else:
        _ask_stop(turn, event)


def _ask_pin(turn: Turn, event: ev.Asked) -> None:
    if event.step not in turn.state.durable.on_disk:
        steps = sorted(turn.state.durable.on_disk)
        turn.answer(event.id, "pin", "refused", f"no checkpoint of step {event.step}; have {steps}")
        return
    turn.append(ev.CheckpointPinned(event.step, event.why))
    turn.answer(event.id, "pin", "done", step=event.step)


_VERBS: Final[dict[str, Callable[[Turn, ev.Asked], None]]] = {
    "checkpoint": _ask_checkpoint,
    "stop": _ask_stop,
    "restart": _ask_restart,
    "pin": _ask_pin,
    "pivot": pivoting.ask,
    "hasten": _ask_hasten,
    "kill": _ask_kill,
}
