"""The lifecycle: what the supervisor decides, and nothing of how it is done.

What may live here: `decide(rules, state, event) -> (state, effects)` and the table of every
(phase, event). No clock, file, socket, process or random source; time arrives inside events and
results of I/O come back as events.

Invariants:
- Every (phase, event) cell exists; one that cannot happen raises Impossible, which ends this life.
- A stop is sticky: nothing but the end of the attempt leaves `stopping`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from supervisor import blame, events as ev, moves, pivoting, requests, saving, shortage, vigil
from supervisor.causes import explain, judge
from supervisor.state import PHASES, PLANNED, Durable, Impossible, Rules, State, Turn

Handler = Callable[[Turn, ev.Event], None]


def decide(rules: Rules, state: State, event: ev.Event) -> tuple[State, list[ev.Effect]]:
    """The next state and what to do. Raises Impossible for an event that this phase excludes."""
    turn = Turn(rules, state, event.now)
    TABLE[state.phase, type(event)](turn, event)
    return turn.state, turn.effects


# --- opening ---


def _opened(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Opened)
    turn.set(life=event.life, from_scratch=event.from_scratch)
    if event.wish is not None:
        turn.append(ev.Wished(event.wish, event.request))
    wish = turn.state.durable.wish
    answered = any(reply.id == event.request for reply in turn.state.durable.replies)
    if wish == "stop" and event.request and not answered and event.pivot is None:
        turn.set(stop_ids=(event.request,))
    pivoting.forget_unfinished(turn)
    turn.do(ev.Sweep(), ev.Regenerate())
    strangers = [holder for holder in event.holders if not holder.ours]
    leader = next((holder for holder in event.holders if holder.leader), None)
    if strangers:
        named = ", ".join(f"{h.pid} ({h.command})" for h in strangers)
        moves.end(
            turn, "stuck", f"trainer.lock is held by process {named}, which is not provably ours"
        )
    elif event.pivot is not None and not pivoting.begin_unsupervised(
        turn, event.request, event.pivot, leader.pid if leader is not None else None
    ):
        return
    elif leader is not None:  # ours, as there are no strangers
        _adopt(turn, leader, wish, event.stepped)
    elif turn.state.durable.open is not None:
        # Its main process is dead; what else of it still holds the lock is ended by the reaping.
        turn.set(phase="backoff", stage="reaping")
        turn.do(ev.Reap())
    else:
        moves.start(turn)


def _adopt(turn: Turn, found: ev.Holder, wish: str, stepped: bool) -> None:
    """One that has made no step yet may still be loading, and has no longer for it than others."""
    opened = turn.state.durable.open
    assert opened is not None
    turn.append(ev.AttemptAdopted(opened.attempt, found.pid))
    step = max(opened.resume_step, turn.state.history_step if stepped else 0)
    turn.set(trainer_pid=found.pid, step=step, ready=stepped)
    place = ("running", "") if stepped else ("starting", "loading")
    turn.set(phase=place[0], stage=place[1])
    vigil.begin(turn, opened.resume_step)
    turn.do(ev.Adopt(found.pid))
    if found.dying:
        moves.begin_kill(turn, "stop" if wish == "stop" else "kill")
    elif wish == "stop":
        moves.begin_stop(turn, "stop")


# --- merge, select, spawn ---


def _merged(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Merged)
    turn.set(history_step=event.step, step=event.step, merged_attempt=event.attempt)
    if moves.stop_wanted(turn):
        moves.rest(turn)
        return
    turn.set(stage="selecting")
    turn.do(ev.Select(ceiling=pivoting.ceiling(turn)))


def _selected(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Selected)
    turn.set(unread=frozenset())
    if gone := turn.state.durable.on_disk.difference(event.present):
        # Removed or moved by a helper or in a life that was killed before it could say so.
        turn.append(ev.CheckpointsRemoved(sorted(gone)))
    for step, reason, moved_to in event.rejected:
        turn.append(ev.CheckpointQuarantined(step, reason, moved_to))
        turn.append(ev.Alarmed("checkpoint_quarantined", f"step {step}: {reason}"))
    if event.step is not None:
        moves.commit(
            turn, event.step, event.attempt, event.reason, event.requests, event.binary_digest
        )
        if event.step not in turn.state.durable.verified:
            turn.append(ev.CheckpointVerified(event.step, event.sha256))
    if pivoting.wanted_here(turn) and pivoting.selected(turn, event.step):
        return
    durable = turn.state.durable
    if turn.state.alone:
        moves.end(turn, durable.outcome or "stopped", "not pivoted")
    elif event.step is not None and event.step >= durable.target_step:
        turn.append(ev.RunFinished(event.step))
        turn.do(ev.Retain(newest_verified=event.step))
        moves.end(turn, "finished", f"reached step {event.step}")
    elif moves.stop_wanted(turn):
        moves.rest(turn)
    elif event.step is None and durable.best_checkpoint and not turn.state.from_scratch:
        moves.fail(turn, _none_is_left(durable))
    elif moves.budget_spent(turn) and not turn.state.restart_ids:
        # An earlier life ended between the last death and its verdict, or the trainer says that
        # it has finished and the checkpoints say that it has not.
        moves.give_up(turn)
    elif event.step is not None and (why := blame.verdict(durable, event.step)):
        turn.append(ev.CheckpointSetAside(event.step, why))
        turn.append(ev.Alarmed("checkpoint_set_aside", f"step {event.step}: {why}"))
        turn.do(ev.Select(ceiling=pivoting.ceiling(turn)))
    else:
        moves.clear(turn, event.step or 0)


def _none_is_left(durable: Durable) -> str:
    """Why there is nothing to begin with, and what to do."""
    scratch = "or begin again from step 0 with --from-scratch"
    if durable.set_aside:
        steps = ", ".join(map(str, sorted(durable.set_aside)))
        return (
            f"no valid checkpoint is left but what killed those who began with it (step {steps})."
            " It is still in checkpoints/: mend what made them die and start again, which tries it"
            f" again, {scratch}"
        )
    return (
        f"no valid checkpoint is left, though step {durable.best_checkpoint} was saved: look at"
        f" quarantine/, put a good pair back into checkpoints/, {scratch}"
    )


def _cleared(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Cleared)
    # Also what was set aside by a life that was killed before it could say so.
    durable = turn.state.durable
    above = {step for step in durable.on_disk | durable.set_aside if step > event.base_step}
    if gone := {*event.superseded, *above}:
        turn.append(ev.CheckpointsSuperseded(event.base_step, sorted(gone)))
    if event.base_step and event.base_step not in turn.state.durable.on_disk:
        moves.start(turn)  # a read-back that was under way found it damaged after all
    elif turn.state.alone:
        words = (
            f"rolled back to step {event.base_step}; `supervisor start` trains on from there"
            if turn.state.back
            else "pivoted; `supervisor start` trains under the new policy"
        )
        moves.end(turn, "stopped", words)
    elif moves.stop_wanted(turn):
        moves.rest(turn)
    else:
        moves.spawn(turn, event.base_step)


def _spawned(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Spawned)
    durable = turn.state.durable
    turn.append(ev.AttemptSpawned(durable.attempt, event.pid, event.start_ticks, event.boot_id))
    turn.set(stage="loading", trainer_pid=event.pid)
    vigil.begin(turn, turn.state.step)
    if turn.state.forced:
        moves.begin_kill(turn, "stop")
    elif moves.stop_wanted(turn):
        moves.begin_stop(turn, "stop")


def _spawn_failed(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.SpawnFailed)
    state = turn.state
    moves.ended(turn, "spawn", None, None, state.history_step, 0, event.why)


# --- what a living trainer does ---


def _heard(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Heard)
    content = event.content
    if turn.state.phase == "starting" and turn.state.stage != "loading":
        return  # late news of the attempt before; what it saved is found by the selection
    turn.set(linked=True, unlinked_until=None)
    match event.verb:
        case "hello":
            turn.set(step=max(turn.state.step, content["step"]), ready=True)
            if turn.state.phase == "starting":
                moves.ready(turn)
                pivoting.ready(turn)
            elif turn.state.phase == "stopping":
                moves.repeat_stop(turn)
            else:
                moves.forward_requests(turn, again=True)
                pivoting.advance(turn)
        case "phase":
            turn.set(trainer_phase=content["phase"])
            vigil.entered(turn, content["phase"], content)
        case "step":
            turn.set(step=max(turn.state.step, content["step"]), trainer_phase="step")
            vigil.progressed(turn, content["step"])
            pivoting.progressed(turn)
        case "seen":
            _seen(turn, content["id"])
        case "saved":
            saving.saved(turn, content)
        case "unsaved":
            shortage.unsaved(turn, content)
        case "paused":
            vigil.entered(turn, "paused", content)
            pivoting.paused(turn, content)
        case "farewell":
            turn.set(trainer_phase="exit")
            vigil.entered(turn, "exit", content)
    moves.rearm(turn)


def _heard_late(turn: Turn, event: ev.Event) -> None:
    """After a death: what it had said before about a checkpoint counts, the rest is over."""
    assert isinstance(event, ev.Heard)
    if turn.state.stage == "reaping" and event.verb == "saved":
        saving.saved(turn, event.content)


def _recorded(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Recorded)
    turn.set(history_step=event.step, attempt_verified=event.verified_steps)
    if not _stepped(turn, event.step):
        pivoting.progressed(turn)


def _stepped(turn: Turn, step: int) -> bool:
    """A step that perhaps nobody told of: its receipt says that the trainer is at work. True where
    that is news."""
    turn.set(step=max(turn.state.step, step))
    if turn.state.stage != "loading":
        return False
    moves.ready(turn)
    pivoting.ready(turn)
    return True


def _seen(turn: Turn, id: str) -> None:
    turn.set(
        checkpoints=tuple(
            replace(request, seen=True) if request.id == id else request
            for request in turn.state.checkpoints
        )
    )
    if id == moves.stop_id(turn) and turn.state.escalation == "asked":
        turn.set(escalation="seen")


def _broken(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Broken)
    turn.append(ev.Alarmed("contract_broken", event.why))
    turn.set(why=event.why)
    moves.begin_kill(turn, "kill")


# --- stopping ---


def _tick(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Ticked)
    vigil.watch(turn, event)
    state = turn.state
    opened = state.durable.open
    again = opened is not None and opened.resume_step < event.read_step <= state.history_step
    if again and vigil.watched(state):
        _stepped(turn, event.read_step)  # nothing else tells of what is executed again
        state = turn.state
    if state.deadline is None or turn.now < state.deadline:
        return
    match state.phase:
        case "backoff":
            moves.start(turn)
        case "running":
            moves.remind(turn)
            pivoting.progressed(turn)
        case "stopping" if state.escalation == "killed":
            moves.give_up_killing(turn)
        case "stopping" if turn.now >= state.force_at:
            moves.kill(turn)
        case "stopping":
            if state.escalation == "asked":
                turn.set(escalation="signalled")
                turn.do(ev.Signal("TERM"))
            turn.set(deadline=state.force_at)


# --- death ---


def _died(turn: Turn, event: ev.Event) -> None:
    if turn.state.phase != "stopping":
        turn.set(phase="backoff")
    turn.set(stage="reaping", deadline=None, linked=False)
    turn.do(ev.Reap())


def _reaped(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Reaped)
    state = turn.state
    cause = judge(
        event, state.intent in PLANNED, state.escalation == "killed", state.intent == "hang"
    )
    message = explain(cause, event, state.why)
    turn.set(history_step=event.step, step=event.step, trainer_pid=None, trainer_phase="", why="")
    turn.set(ready=state.ready or event.loaded)
    left = moves.left_behind(event)
    moves.ended(
        turn,
        cause,
        event.code,
        event.signal,
        event.step,
        event.verified_steps,
        message,
        go_on=not left,
        reached_step=event.reached_step,
    )
    if left:
        moves.end(turn, "stuck", left)


# --- the table ---


def _ignore(turn: Turn, event: ev.Event) -> None:
    """Late news of something that no longer matters here."""


def _impossible(turn: Turn, event: ev.Event) -> None:
    raise Impossible(f"{type(event).__name__} in phase {turn.state.phase} ({turn.state.stage})")


def _ended_already(turn: Turn, event: ev.Event) -> None:
    assert isinstance(event, ev.Asked)
    known = moves.answered(turn.state.durable, event.id, event.verb)
    if known is not None:
        turn.do(known)
    elif event.operator:
        turn.do(ev.Reply(event.id, "busy", f"the supervisor is ending ({turn.state.phase})"))


_ANYWHERE: Final[dict[type, Handler]] = {
    ev.Verified: saving.verified,
    ev.Unverified: saving.unverified,
    ev.Removed: shortage.removed,
    ev.Noticed: saving.noticed,
    ev.Full: shortage.full,
}
_TERMINAL_ROW: Final[dict[type, Handler]] = {
    **_ANYWHERE,
    ev.Ticked: _ignore,
    ev.Asked: _ended_already,
    ev.Heard: _ignore,
    ev.Recorded: _ignore,
}
_ROWS: Final[dict[str, dict[type, Handler]]] = {
    "idle": {ev.Opened: _opened},
    "starting": {
        **_ANYWHERE,
        ev.Ticked: _tick,
        ev.Asked: requests.asked,
        ev.Heard: _heard,
        ev.Recorded: _recorded,
        ev.Merged: _merged,
        ev.Selected: _selected,
        ev.Cleared: _cleared,
        ev.Archived: pivoting.archived,
        ev.Spawned: _spawned,
        ev.SpawnFailed: _spawn_failed,
        ev.Died: _died,
        ev.Broken: _broken,
    },
    "running": {
        **_ANYWHERE,
        ev.Ticked: _tick,
        ev.Asked: requests.asked,
        ev.Heard: _heard,
        ev.Recorded: _recorded,
        ev.Died: _died,
        ev.Broken: _broken,
    },
    "stopping": {
        **_ANYWHERE,
        ev.Ticked: _tick,
        ev.Asked: requests.asked,
        ev.Heard: _heard,
        ev.Recorded: _recorded,
        ev.Died: _died,
        ev.Reaped: _reaped,
        ev.Broken: _broken,
    },
    "backoff": {
        **_ANYWHERE,
        ev.Ticked: _tick,
        ev.Asked: requests.asked,
        ev.Heard: _heard_late,
        ev.Recorded: _recorded,
        ev.Reaped: _reaped,
    },
    # What could not be killed may end after all.
    "stuck": {**_TERMINAL_ROW, ev.Died: _ignore},
}
EVENTS: Final[tuple[type, ...]] = ev.Event.__args__
TABLE: Final[dict[tuple[str, type], Handler]] = {
    (phase, event): _ROWS.get(phase, _TERMINAL_ROW).get(event, _impossible)
    for phase in PHASES
    for event in EVENTS
}
