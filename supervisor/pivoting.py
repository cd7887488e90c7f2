"""The pivot, decided: a change of policy in the middle of a run, as one transaction.

What may live here: what a pivot, a rollback among them, does to a turn. Pure, like `moves`. What is
archived and written is `archive`; what a policy may change is checked by `pivot`, before it asks.

    intent -> pause at the boundary -> exit -> merge, select -> archive -> PolicySwitched -> spawn

Invariants:
- PolicySwitched is the commit. Before it the old policy rules and an interrupted pivot is aborted;
  after it there is only forward.
- A live pivot begins where the history ends: its base is the last recorded step, so it leaves no
  step behind. Only a rollback, or a pivot of a run that is not running, may go back.
- A step belongs to the epoch that first took it: a fallback below the base of an epoch runs up to
  that base under the parent epoch.
"""

from __future__ import annotations

from supervisor import events as ev
from supervisor import moves
from supervisor.contract import Json
from supervisor.state import Turn

LIVE = ("running", "starting", "backoff", "stopping")


def ask(turn: Turn, event: ev.Asked) -> None:
    """A request to pivot. A second one before the commit replaces the first."""
    durable = turn.state.durable
    done = next((epoch for epoch in durable.epochs if epoch.request == event.id), None)
    if done is not None:
        turn.answer(event.id, "pivot", "done", **moves.pivot_result(durable, done))
        return
    refusal = _refusal(turn, event.content)
    if refusal:
        turn.answer(event.id, "pivot", *refusal)
        return
    if durable.pivot is not None:
        moves.abort_pivot(turn, f"replaced by request {event.id}")
    _intend(turn, event.id, event.content)
    turn.set(pivot_ids=(event.id,))
    advance(turn)


def begin_unsupervised(turn: Turn, id: str, content: Json) -> bool:
    """The pivot of a run that nobody supervises: this life of the supervisor is for it alone.
    False where it was refused, or done before; the answer is given."""
    ask_done = next((e for e in turn.state.durable.epochs if e.request == id), None)
    if ask_done is not None:
        moves.end(turn, "stopped", f"this pivot was done before, as epoch {ask_done.number}")
        return False
    refusal = _refusal(turn, content)
    if refusal:
        moves.end(turn, "stopped", f"not pivoted: {refusal[1]}")
        return False
    _intend(turn, id, content)
    turn.set(pivot_ids=(id,), pivoting=True, alone=True)
    return True


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


def _refusal(turn: Turn, content: Json) -> tuple[str, str] | None:
    """(outcome, why) where this cannot be begun now."""
    durable = turn.state.durable
    if turn.state.stage in ("archiving", "clearing") and durable.pivot is not None:
        return "busy", "another pivot is being committed"
    if content["epoch"] != durable.epoch:
        return "refused", (
            f"checked against epoch {content['epoch']}, but the run is at epoch {durable.epoch}:"
            " look at `supervisor policy show` and ask again"
        )
    to_step = content["to_step"]
    if to_step is not None and to_step not in durable.on_disk:
        return "refused", f"no checkpoint of step {to_step}; there are {sorted(durable.on_disk)}"
    return None


def advance(turn: Turn) -> None:
    """Takes the next step towards a pivot that is wanted, if the trainer can take one now."""
    pivot = turn.state.durable.pivot
    if pivot is None:
        return
    if turn.state.phase == "backoff" and turn.state.stage != "reaping":
        moves.start(turn)
    elif turn.state.phase != "running":
        return
    elif pivot.at == "boundary" and turn.state.linked:
        turn.do(ev.Send("pause", {"id": pivot.request}))
    elif turn.state.linked:
        moves.begin_stop(turn, "pivot")
    else:
        # A trainer that knows only signals: a checkpoint first, so that a save that fails on
        # SIGTERM costs little; the base is whatever SIGTERM writes.
        turn.do(ev.Signal("USR1"))
        moves.begin_stop(turn, "pivot")


def paused(turn: Turn, content: Json) -> None:
    """The trainer waits at the boundary, its checkpoint committed."""
    pivot = turn.state.durable.pivot
    if pivot is None or pivot.request != content["id"] or turn.state.phase != "running":
        turn.do(ev.Send("resume"))
        return
    moves.begin_stop(turn, "pivot")
    turn.do(ev.Send("exit"))


def wanted_here(turn: Turn) -> bool:
    """Whether the selection that is under way is the pivot's."""
    return turn.state.pivoting and turn.state.durable.pivot is not None


def ceiling(turn: Turn, history_step: int) -> int:
    pivot = turn.state.durable.pivot
    if wanted_here(turn) and pivot is not None and pivot.to_step is not None:
        return pivot.to_step
    return history_step


def selected(turn: Turn, step: int | None) -> bool:
    """Whether the pivot goes on from the selected base. If not, the run goes on without it."""
    pivot = turn.state.durable.pivot
    assert pivot is not None
    if step is None:
        moves.abort_pivot(turn, "there is no valid checkpoint to begin the new policy from")
    elif pivot.to_step is not None and step != pivot.to_step:
        moves.abort_pivot(turn, f"the checkpoint of step {pivot.to_step} is not valid")
    elif pivot.to_step is None and not turn.state.alone and step != turn.state.history_step:
        # The trainer did not end where it said. The wish stays; the next boundary is tried.
        turn.set(pivoting=False)
        return False
    else:
        turn.set(stage="archiving")
        turn.do(ev.Archive(turn.state.durable.epoch, step, pivot))
        return True
    turn.set(pivoting=False)
    return False


def archived(turn: Turn, event: ev.Event) -> None:
    """Everything is prepared: commit, or give up if it could not be written."""
    assert isinstance(event, ev.Archived)
    pivot = turn.state.durable.pivot
    assert pivot is not None
    if event.problem:
        moves.abort_pivot(turn, event.problem)
        turn.set(pivoting=False)
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
    turn.set(pivoting=False)
    if turn.state.alone:
        for id in turn.state.pivot_ids:
            moves.answer_pivot(turn, id)
        moves.end(turn, "stopped", "pivoted; `supervisor start` trains under the new policy")
    else:
        moves.clear(turn, event.base_step)


def ready(turn: Turn) -> None:
    """A new trainer is ready: what waited for it is answered, what is still wanted goes on."""
    for id in turn.state.pivot_ids:
        moves.answer_pivot(turn, id)
    advance(turn)


def forget_unfinished(turn: Turn) -> None:
    """At the beginning of a life: an intent of an earlier one is not carried out behind the
    operator's back."""
    if turn.state.durable.pivot is not None:
        moves.abort_pivot(turn, "the supervisor ended before the switch; nothing was changed")
