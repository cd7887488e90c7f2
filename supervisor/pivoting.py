"""The pivot, decided: a change of policy in the middle of a run, as one transaction.

What may live here: what a pivot, a rollback among them, does to a turn. Pure, like `moves`. What is
archived and written is `archive`; what a policy may change is checked by `pivot`, before it asks.

    intent -> pause at the boundary -> exit -> merge, select -> archive -> PolicySwitched -> spawn

Invariants:
- PolicySwitched is the commit. Before it the old policy rules and an interrupted pivot is aborted;
  after it there is only forward.
- A live pivot begins where the history ends: its base is the last recorded step, so it leaves no
  step behind. Only a rollback, or a pivot of a run that is not running, may go back. A trainer that
  still executes recorded steps again is not stopped before it has caught up.
- A step belongs to the epoch that first took it: a fallback below the base of an epoch runs up to
  that base under the parent epoch.
"""

from __future__ import annotations

from supervisor import events as ev, moves
from supervisor.contract import Json
from supervisor.state import Turn


def ask(turn: Turn, event: ev.Asked) -> None:
    """A request to pivot. A second one before the commit replaces the first."""
    durable = turn.state.durable
    done = next((epoch for epoch in durable.epochs if epoch.request == event.id), None)
    if done is not None:
        turn.answer(event.id, "pivot", "done", **moves.pivot_result(done))
        return
    refusal = _refusal(turn, event.content)
    if refusal:
        turn.answer(event.id, "pivot", *refusal)
        return
    if durable.pivot is not None:
        moves.abort_pivot(turn, f"replaced by request {event.id}")
    _intend(turn, event.id, event.content)
    advance(turn)


def begin_unsupervised(turn: Turn, id: str, content: Json, living: int | None) -> bool:
    """The pivot of a run that nobody supervises: this life of the supervisor is for it alone.
    False where this life is over already: it was refused, or answered by an earlier one. `living`
    is the process of a trainer that has outlived its supervisor."""
    known = moves.answered(turn.state.durable, id, "pivot")
    done = next((epoch for epoch in turn.state.durable.epochs if epoch.request == id), None)
    refusal = _refusal(turn, content)
    if living is not None:
        why = f"the trainer (process {living}) lives; `supervisor start` takes it over, then pivot"
        refusal = ("refused", why)
    as_before = turn.state.durable.outcome or "stopped" if living is None else "stuck"
    turn.set(alone=True)
    if known is not None:
        moves.end(turn, as_before, f"this pivot was answered before: {known.outcome}")
    elif done is not None:
        turn.answer(id, "pivot", "done", **moves.pivot_result(done))
        moves.end(turn, as_before, f"this pivot was done before, as epoch {done.number}")
    elif refusal is not None:
        turn.answer(id, "pivot", *refusal)
        moves.end(turn, as_before, f"not pivoted: {refusal[1]}")
    else:
        _intend(turn, id, content)
        turn.set(pivoting=True)
        return True
    return False


def _intend(turn: Turn, id: str, content: Json) -> None:
    turn.append(
        ev.PivotIntended(
            request=id,
            at=content["at"],
            to_step=content["to_step"],
            parent=content["parent"],
            policy=content["policy"],
            settings=content["settings"],
            policy_digest=content["policy_digest"],
            reason=content["reason"],
        )
    )
    turn.set(pivot_ids=(*turn.state.pivot_ids, id))


def _refusal(turn: Turn, content: Json) -> tuple[str, str] | None:
    """(outcome, why) where this cannot be begun now."""
    durable = turn.state.durable
    if wanted_here(turn) and turn.state.stage in ("selecting", "archiving"):
        return "busy", "another pivot is being committed"
    if content["epoch"] != durable.epoch:
        return "refused", (
            f"checked against epoch {content['epoch']}, but the run is at epoch {durable.epoch}:"
            " look at `supervisor policy show` and ask again"
        )
    if (content.get("against") or durable.settings_digest) != durable.settings_digest:
        return "refused", "the settings of the run have changed since it was checked: ask again"
    to_step = content["to_step"]
    if to_step is not None and to_step not in durable.on_disk:
        return "refused", f"no checkpoint of step {to_step}; there are {sorted(durable.on_disk)}"
    parent = durable.parent_of(to_step).number
    if content["parent"] != parent:
        return "refused", f"it follows epoch {content['parent']}, and should follow {parent}"
    return None


def advance(turn: Turn) -> None:
    """Takes the next step towards a pivot that is wanted, where one can be taken now."""
    state, pivot = turn.state, turn.state.durable.pivot
    if pivot is None:
        return
    back = pivot.to_step is not None
    if state.phase == "backoff" and state.stage != "reaping":
        turn.set(pivoting=back)
        moves.start(turn)
    elif back and (state.phase == "running" or state.stage == "loading"):
        moves.begin_stop(turn, "pivot")
    elif state.phase != "running":
        return
    elif pivot.at == "boundary" and state.linked:
        turn.do(ev.Send("pause", {"id": pivot.request}))
    else:
        _stop_here(turn)


def progressed(turn: Turn) -> None:
    """A step is on record, or a moment has passed: a stop may have waited for either."""
    pivot = turn.state.durable.pivot
    paused_by_message = pivot is not None and pivot.at == "boundary" and turn.state.linked
    if turn.state.phase == "running" and not paused_by_message:
        advance(turn)


def _stop_here(turn: Turn) -> None:
    """At the next step instead of the next boundary. A trainer without a link is one that knows
    only signals, or one that we cannot hear yet. Until that is clear it is asked for a checkpoint,
    so that a save that fails on SIGTERM costs little."""
    state = turn.state
    if state.patience.step < state.history_step:
        return  # it executes again what is on record
    if state.linked:
        moves.begin_stop(turn, "pivot")
    elif state.unlinked_until is None:
        turn.do(ev.Signal("USR1"))
        turn.set(unlinked_until=turn.now + turn.rules.signal_after_seconds)
        moves.rearm(turn)
    elif turn.now >= state.unlinked_until:
        moves.begin_stop(turn, "pivot")


def paused(turn: Turn, content: Json) -> None:
    """The trainer waits at the boundary, its checkpoint committed."""
    pivot = turn.state.durable.pivot
    if turn.state.phase == "stopping":
        turn.do(ev.Send("exit"))
    elif pivot is None or pivot.request != content["id"] or turn.state.phase != "running":
        turn.do(ev.Send("resume"))
    elif content["step"] < turn.state.history_step:
        turn.do(ev.Send("resume"), ev.Send("pause", {"id": pivot.request}))
    else:
        moves.begin_stop(turn, "pivot")
        turn.do(ev.Send("exit"))


def wanted_here(turn: Turn) -> bool:
    """Whether the selection that is under way is the pivot's."""
    return turn.state.pivoting and turn.state.durable.pivot is not None


def ceiling(turn: Turn) -> int:
    pivot = turn.state.durable.pivot
    if wanted_here(turn) and pivot is not None and pivot.to_step is not None:
        return pivot.to_step
    return min((step - 1 for step in turn.state.durable.set_aside), default=turn.state.history_step)


def selected(turn: Turn, step: int | None) -> bool:
    """Whether the selection was the pivot's alone. If not, it is where the run goes on from."""
    pivot, history_step = turn.state.durable.pivot, turn.state.history_step
    assert pivot is not None
    left = pivot.to_step is not None and pivot.to_step > history_step
    if pivot.to_step is not None and (left or step != pivot.to_step):
        why = f"is on a branch that ended at step {history_step}" if left else "is not valid"
        moves.abort_pivot(turn, f"the checkpoint of step {pivot.to_step} {why}")
        moves.start(turn)  # this selection looked at nothing newer
        return True
    if step is None:
        why = "there is no valid checkpoint to begin the new policy from"
        if not history_step:
            why += "; no step is on record either, so `supervisor start` takes any settings"
        moves.abort_pivot(turn, why)
    elif pivot.to_step is not None or turn.state.alone or step == history_step:
        turn.set(stage="archiving")
        turn.do(ev.Archive(turn.state.durable.epoch, step, pivot))
        return True
    elif pivot.at == "now" or _killed(turn):
        moves.abort_pivot(
            turn,
            f"the trainer ended at step {history_step} without saving it; step {step} is the newest"
            " valid checkpoint",
        )
    # Else the wish stays, and the next boundary is tried.
    turn.set(pivoting=False)
    return False


def _killed(turn: Turn) -> bool:
    """Whether the trainer had to be killed: it would have to be again."""
    last = turn.state.durable.last_exit
    return last is not None and last.cause == "killed"


def archived(turn: Turn, event: ev.Event) -> None:
    """Everything is prepared: commit, or give up if it could not be written."""
    assert isinstance(event, ev.Archived)
    pivot = turn.state.durable.pivot
    assert pivot is not None
    if event.problem:
        moves.abort_pivot(turn, event.problem)
        turn.do(ev.Sweep())
        moves.start(turn)
        return
    turn.append(
        ev.PolicySwitched(
            request=pivot.request,
            epoch=len(turn.state.durable.epochs) + 1,
            parent=pivot.parent,
            base_step=event.base_step,
            policy=pivot.policy,
            settings=pivot.settings,
            policy_digest=pivot.policy_digest,
            archive=event.name,
            reason=pivot.reason,
        )
    )
    turn.do(ev.Regenerate())
    # The history of the new epoch ends at its base, whatever a branch that was left recorded.
    step = event.base_step
    turn.set(pivoting=False, back=pivot.to_step is not None, step=step, history_step=step)
    moves.clear(turn, event.base_step)


def ready(turn: Turn) -> None:
    """A new trainer is ready: what waited for it is answered, what is still wanted goes on."""
    moves.answer_pivots(turn)
    advance(turn)


def forget_unfinished(turn: Turn) -> None:
    """At the beginning of a life: an intent of an earlier one is not carried out behind the
    operator's back."""
    if turn.state.durable.pivot is not None:
        moves.abort_pivot(turn, "the supervisor ended before the switch; nothing was changed")
