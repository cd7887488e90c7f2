"""A disk that is full or broken, decided: what a refused save leads to, and what no room does.

What may live here: what the shell's findings about the disk do to a turn. Pure, like `machine`,
whose table sends them here. How room is measured is `space`, how it is made is `reclaim`.

Invariant: a refused save is an alarm and an answer, never a death. Whether a full disk ends the run
is the operator's choice (`checkpoint.when_full`).
"""

from __future__ import annotations

from supervisor import events as ev, moves, vigil
from supervisor.contract import Json
from supervisor.state import Turn


def unsaved(turn: Turn, content: Json) -> None:
    """The disk refuses a checkpoint or a receipt; the trainer goes on or waits, and tries again."""
    vigil.excused(turn)  # to wait for the disk is no silence, however long it takes
    why = f"step {content['step']} could not be saved: {content['why']}"
    if moves.UNSAVED not in dict(turn.state.durable.alarms):
        turn.append(ev.Alarmed(moves.UNSAVED, why))
    failed = [one for one in turn.state.checkpoints if one.id in content["requests"]]
    turn.set(checkpoints=tuple(one for one in turn.state.checkpoints if one not in failed))
    for request in failed:
        if request.operator:
            turn.answer(request.id, "checkpoint", "refused", why)


def full(turn: Turn, event: ev.Event) -> None:
    """No room for the next checkpoint, and none can be made."""
    assert isinstance(event, ev.Full)
    if turn.rules.stop_when_full and turn.state.phase == "running":
        turn.set(full=f"stopped, as checkpoint.when_full says: {event.why}")
        moves.begin_stop(turn, "full")


def removed(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Removed)
    turn.set(unread=turn.state.unread.difference(event.steps))
    if event.steps:
        turn.append(ev.CheckpointsRemoved(list(event.steps)))
    if event.names:
        turn.append(ev.LeftoversRemoved(list(event.names), event.freed_bytes))
