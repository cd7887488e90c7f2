"""What the silence of a trainer leads to: evidence first, then its end.

What may live here: what a turn does when a trainer makes progress and when it makes none. How long
it may be silent is `patience`; what its death leads to is `moves`, as for every death.

    silent beyond its deadline -> stacks into its log -> still silent -> stop (message, SIGTERM,
    SIGKILL) with the cause `hang`
"""

from __future__ import annotations

from supervisor import events as ev, moves
from supervisor.contract import Json, attempt_stem
from supervisor.patience import Limits, Patience
from supervisor.state import State, Turn


def begin(turn: Turn, step: int) -> None:
    """A trainer is there from now on: spawned, or taken over."""
    turn.set(patience=turn.state.patience.began(turn.now, step), examined_at=None)
    rearm(turn)


def entered(turn: Turn, phase: str, content: Json) -> None:
    """`content` may say which step was complete by then, and how long the phase may take."""
    step, hint_seconds = content.get("step") or 0, content.get("deadline_seconds") or 0.0
    _saw(turn, turn.state.patience.entered(turn.now, phase, step, hint_seconds))


def progressed(turn: Turn, step: int) -> None:
    _saw(turn, turn.state.patience.stepped(turn.now, step))


def excused(turn: Turn) -> None:
    """The disk refuses what it would write: it waits, and says so as long as it does."""
    if not watched(turn.state):
        return
    _saw(turn, turn.state.patience.looked_at(turn.now, blind=True))


def watch(turn: Turn, event: ev.Ticked) -> None:
    """Every wake-up looks here while a trainer is loading or running."""
    if not watched(turn.state):
        return
    progressed(turn, event.read_step)
    _saw(turn, turn.state.patience.looked_at(turn.now, event.blind))
    state, limits = turn.state, turn.rules.limits
    if turn.now < state.patience.deadline(limits):
        return
    if state.examined_at is None:
        turn.set(examined_at=turn.now)
        turn.do(ev.Examine())
        rearm(turn)
    elif turn.now >= state.examined_at + limits.evidence_seconds:
        detail = _detail(state, limits.start_seconds, turn.now - state.patience.since)
        turn.append(ev.Alarmed("hang", detail))
        turn.set(why=detail)
        moves.begin_stop(turn, "hang")


def silence(state: State, limits: Limits, now: float) -> Json | None:
    """For the status; None where nobody is waited for."""
    return state.patience.to_json(limits, now) if watched(state) else None


def rearm(turn: Turn) -> None:
    """A trainer that is still loading is only looked at; a running one has more to wait for."""
    if turn.state.stage == "loading":
        turn.set(deadline=moves.next_look(turn))
    else:
        moves.rearm(turn)


def watched(state: State) -> bool:
    return state.phase == "running" or state.stage == "loading"


def _saw(turn: Turn, patience: Patience) -> None:
    """Progress while the evidence is being gathered calls everything off."""
    silent = patience.since == turn.state.patience.since
    turn.set(patience=patience, examined_at=turn.state.examined_at if silent else None)
    rearm(turn)


def _detail(state: State, start_seconds: float, silent_seconds: float) -> str:
    log = f"logs/{attempt_stem(state.durable.attempt)}.log"
    if state.stage == "loading":
        what = f"no hello within {start_seconds:g} s"
    else:
        step, phase = state.patience.step, state.patience.phase or "load"
        what = f"no progress for {silent_seconds:.0f} s after step {step}, in phase {phase}"
    return f"{what}; where it stood is in {log}"
