"""A checkpoint, from the news of it to its proof: what that does to a turn.

What may live here: what follows from a checkpoint that was announced, noticed or read back. Pure,
like `machine`, whose table sends the news here. A save that was refused is `shortage`.

Invariant: a request is answered by a checkpoint that is committed, once, and by no other news.
"""

from __future__ import annotations

from collections.abc import Sequence

from supervisor import events as ev, moves
from supervisor.contract import Json
from supervisor.state import Turn


def saved(turn: Turn, content: Json) -> None:
    step = content["step"]
    turn.set(step=max(turn.state.step, step))
    moves.commit(
        turn,
        step,
        turn.state.durable.attempt,
        content["reason"],
        tuple(str(item) for item in content["requests"]),
        content["digest"],
    )
    moves.verify(turn, step)
    _answer(turn, step, content["reason"], content["requests"])


def _answer(turn: Turn, step: int, reason: str, named: Sequence[str]) -> None:
    """Requests that the trainer named are answered; so is one that was never seen and went out as
    a signal, which carries no name, if somebody asked for this checkpoint at all and it is not from
    before the request."""
    waiting = turn.state.checkpoints
    unnamed = reason != "cadence"
    answered = [
        request
        for request in waiting
        if request.id in named
        or (
            unnamed
            and request.sent_at is not None
            and not request.seen
            and step >= request.sent_step
        )
    ]
    turn.set(checkpoints=tuple(request for request in waiting if request not in answered))
    for request in answered:
        if request.operator:
            turn.answer(request.id, "checkpoint", "done", step=step)


def noticed(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Noticed)
    moves.verify(turn, event.step)


def verified(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Verified)
    turn.set(verifying=turn.state.verifying - {event.step})
    if event.problem:
        if not event.moved_to and event.step not in turn.state.durable.on_disk:
            return  # it has gone between two tries, by retention say
        turn.append(ev.CheckpointQuarantined(event.step, event.problem, event.moved_to))
        turn.append(ev.Alarmed("checkpoint_quarantined", f"step {event.step}: {event.problem}"))
        return
    told = event.step in turn.state.durable.on_disk
    moves.commit(turn, event.step, event.attempt, event.reason, event.requests, event.binary_digest)
    turn.append(ev.CheckpointVerified(event.step, event.sha256))
    if not told:  # no message has, so this is the answer to whoever waits for one
        _answer(turn, event.step, event.reason, event.requests)
        moves.rearm(turn)
    if turn.state.stage != "selecting":  # what to resume from is being looked for among them
        turn.do(ev.Retain(newest_verified=max(turn.state.durable.verified)))


def unverified(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Unverified)
    turn.set(verifying=turn.state.verifying - {event.step}, unread=turn.state.unread | {event.step})
