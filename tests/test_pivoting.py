"""The pivot's decisions by example: what leads to the switch, what ends it, who is answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, strategies as st
from property_kit import cases
from test_machine import OPENING, PID, RULES, Case, ours

from supervisor import events as ev
from supervisor.contract import ExitLine, Json
from supervisor.state import Durable, Epoch

SAVED: Final = ev.CheckpointCommitted(100, 1, "cadence", [], "bd")
NEWER: Final = ev.CheckpointCommitted(200, 1, "cadence", [], "bd")
STOPPED: Final = ExitLine("stopped", 200, 0, [], "")


def content(at: str = "boundary", to_step: int | None = None, **more: Any) -> Json:
    return {
        "at": at,
        "to_step": to_step,
        "epoch": 1,
        "parent": 1,
        "policy": "[policy]",
        "settings": "[run]",
        "policy_digest": "d2",
        "reason": "polish",
    } | more


def ask(case: Case, id: str = "p1", **more: Any) -> list[ev.Effect]:
    return case.feed(ev.Asked, id, "pivot", content=content(**more))


def intended(id: str = "p1", at: str = "boundary", to_step: int | None = None) -> ev.PivotIntended:
    return ev.PivotIntended(id, at, to_step, 1, "[policy]", "[run]", "d2", "polish")


def running(history: int = 200) -> Case:
    """A living run with checkpoints at 100 and 200, its history recorded up to `history`."""
    case = Case(SAVED, NEWER).to_running(base=200, history=history)
    case.effects = []
    return case


def left(case: Case, step: int = 200) -> Case:
    """The trainer has gone, and the merge after it is through."""
    case.die(0, line=STOPPED, step=step)
    case.feed(ev.Merged, step)
    return case


def switched(case: Case, base_step: int = 200) -> Case:
    case.select(base_step)
    case.feed(ev.Archived, base_step, f"pivot-0001-step_{base_step:06d}")
    return case


def replies(case: Case) -> list[tuple[str, str]]:
    return [(reply.id, reply.outcome) for reply in case.state.durable.replies]


# --- the way to the switch ------------------------------------------------------------------------


def test_a_pivot_from_the_request_to_the_reply() -> None:
    case = running()
    assert ask(case) == [ev.Append(intended()), ev.Send("pause", {"id": "p1"})]
    assert case.hear("paused", step=200, id="p1") == [
        ev.Send("stop", {"id": "stop-1", "at": "now"}),
        ev.Send("exit"),
    ]
    assert case.place == ("stopping", "")
    left(case)
    assert case.acts == [ev.Select(ceiling=200)]
    assert case.select(200)[-1] == ev.Archive(1, 200, intended())
    assert case.place == ("starting", "archiving")
    name = "pivot-0001-step_000200"
    assert case.feed(ev.Archived, 200, name) == [
        ev.Append(ev.PolicySwitched("p1", 2, 1, 200, "[policy]", "[run]", "d2", name, "polish")),
        ev.Regenerate(),
        ev.Clear(200),
    ]
    case.clear()
    assert case.acts == [ev.Spawn(2, case.state.durable.open.nonce, 200, 2)]  # type: ignore[union-attr]
    case.feed(ev.Spawned, PID, 78, "boot")
    assert replies(case) == [], "not before the new trainer is ready"
    case.hear("hello", step=200, pid=PID)
    result = {"epoch": 2, "base_step": 200, "first_step": 201, "archive": name}
    assert case.acts == [ev.Reply("p1", "done", "", result)]
    assert case.state.durable.pins == {200}
    assert case.state.durable.deaths == 0


def test_a_trainer_that_connects_anew_is_told_again() -> None:
    case = running()
    ask(case)
    assert case.hear("hello", step=200, pid=PID) == [ev.Send("pause", {"id": "p1"})]


def test_what_executes_recorded_steps_again_is_sent_on_to_the_next_boundary() -> None:
    """It stands at 200, and the history ends at 250: a pivot here would leave steps behind, and
    a restart would bring it back to this very boundary, again and again."""
    case = running(history=250)
    ask(case)
    assert case.hear("paused", step=200, id="p1") == [
        ev.Send("resume"),
        ev.Send("pause", {"id": "p1"}),
    ]
    assert case.hear("paused", step=300, id="p1")[-1] == ev.Send("exit")


def test_at_now_waits_for_a_trainer_that_executes_recorded_steps_again() -> None:
    case = running(history=250)
    assert ask(case, at="now") == [ev.Append(intended(at="now"))]
    assert case.hear("step", step=249, loss=1.0) == []
    assert case.hear("step", step=250, loss=1.0) == [ev.Send("stop", {"id": "stop-1", "at": "now"})]


def test_a_trainer_without_a_link_is_asked_for_a_checkpoint_and_then_to_end() -> None:
    case = Case(SAVED, NEWER).to_loading(base=200)
    case.feed(ev.Ticked, 201)
    case.feed(ev.Recorded, 201, 0)
    assert ask(case) == [ev.Append(intended()), ev.Signal("USR1")]
    assert case.state.deadline == case.now + RULES.signal_after_seconds
    assert case.feed(ev.Ticked, 202) == case.feed(ev.Recorded, 202, 0) == []
    assert case.tick(RULES.signal_after_seconds - 0.5) == []
    assert case.tick(0.5) == [ev.Signal("TERM")]
    assert case.place == ("stopping", "")


def test_what_is_on_record_moves_a_pivot_on_where_no_link_does() -> None:
    case = Case(SAVED, NEWER).to_loading(base=200, history=250)
    case.feed(ev.Recorded, 250, 40)
    case.feed(ev.Ticked, 240)
    assert ask(case, at="now") == [ev.Append(intended(at="now"))], "it executes steps again"
    assert case.feed(ev.Recorded, 250, 49) == []
    assert case.feed(ev.Ticked, 251) == []
    assert case.feed(ev.Recorded, 251, 50) == [ev.Signal("USR1")]


def test_the_first_step_of_the_new_policy_answers_for_a_trainer_without_a_link() -> None:
    case = Case(SAVED, NEWER).to_loading(base=200)
    case.feed(ev.Ticked, 201)
    case.feed(ev.Recorded, 201, 0)
    ask(case)
    case.tick(RULES.signal_after_seconds)
    case.die(0, step=230)
    case.feed(ev.Merged, 230)
    switched(case, 230).clear()
    case.feed(ev.Spawned, PID, 78, "boot")
    assert replies(case) == []
    case.feed(ev.Recorded, 231, 0)
    assert replies(case) == [("p1", "done")]


def test_a_link_that_comes_late_is_still_a_link() -> None:
    case = Case(SAVED, NEWER).to_running(base=200).reopened()
    case.open("run", ours())
    ask(case)
    assert case.hear("hello", step=230, pid=PID) == [ev.Send("pause", {"id": "p1"})]
    assert case.state.unlinked_until is None
    assert case.tick(10 * RULES.signal_after_seconds) == []


def test_a_request_during_a_backoff_ends_the_wait_and_not_the_old_policy() -> None:
    case = Case(SAVED).to_running(base=100)
    case.die(signal=9, step=150)
    assert ask(case) == [ev.Append(intended()), ev.Merge()]
    case.feed(ev.Merged, 150)
    assert case.select(100) == [ev.Clear(100)]


def test_a_trainer_that_dies_at_the_boundary_has_left_a_base_all_the_same() -> None:
    case = running()
    ask(case)
    case.hear("paused", step=200, id="p1")
    case.die(signal=9, step=200)
    assert case.place == ("starting", "merging")
    case.feed(ev.Merged, 200)
    switched(case)
    assert case.state.durable.epoch == 2
    assert case.state.durable.last_exit.counted is False  # type: ignore[union-attr]


def test_what_was_switched_before_a_crash_is_answered_after_it_and_not_done_again() -> None:
    case = running()
    ask(case)
    case.hear("paused", step=200, id="p1")
    again = switched(left(case)).reopened()
    again.to_running(base=200)
    ask(again)
    assert replies(again) == [("p1", "done")]
    assert len(again.state.durable.epochs) == 2


def test_nothing_is_retained_away_while_a_base_is_looked_for() -> None:
    """What is newest may lie above the base, and push it out; all that is left at the end goes."""
    case = Case(SAVED, NEWER).to_selecting(history=1000)
    assert case.feed(ev.Verified, 200, "", "sha", "bd", 1, "cadence") == [
        ev.Append(ev.CheckpointVerified(200, "sha"))
    ]
    case.select(1000)
    assert case.acts[0] == ev.Retain(1000)


# --- given up -------------------------------------------------------------------------------------


def test_a_second_request_replaces_the_first() -> None:
    case = running()
    ask(case, "p1")
    assert ask(case, "p2") == [
        ev.Append(ev.PivotAborted("p1", "replaced by request p2")),
        ev.Append(ev.Replied("p1", "pivot", "refused", "replaced by request p2", {})),
        ev.Reply("p1", "refused", "replaced by request p2"),
        ev.Append(intended("p2")),
        ev.Send("pause", {"id": "p2"}),
    ]
    assert case.hear("paused", step=200, id="p1") == [ev.Send("resume")]


@pytest.mark.parametrize("stage", ["selecting", "archiving"])
def test_once_its_base_is_looked_for_a_pivot_is_not_replaced(stage: str) -> None:
    """The selection was made for the first: for a rollback it looked at nothing newer."""
    case = running()
    ask(case, to_step=100)
    left(case)
    if stage == "archiving":
        case.select(100)
    assert case.place == ("starting", stage)
    ask(case, "p2")
    assert replies(case) == [("p2", "busy")]
    assert case.state.durable.pivot == intended(to_step=100)


def test_a_new_request_while_the_last_pivot_is_not_answered_yet_answers_both() -> None:
    case = running()
    ask(case)
    case.hear("paused", step=200, id="p1")
    switched(left(case))
    ask(case, "p2", epoch=2, parent=2)
    case.feed(ev.Cleared, 200, ())
    case.feed(ev.Spawned, PID, 78, "boot")
    case.hear("hello", step=200, pid=PID)
    assert replies(case) == [("p1", "done")]
    assert case.state.pivot_ids == ("p2",)
    assert case.acts[-1] == ev.Send("pause", {"id": "p2"})


def test_a_check_that_is_out_of_date_is_refused() -> None:
    case = running()
    ask(case, epoch=2)
    assert replies(case) == [("p1", "refused")]
    assert "checked against epoch 2, but the run is at epoch 1" in case.state.durable.replies[0].why
    assert case.state.durable.pivot is None


def test_a_check_against_other_settings_is_refused() -> None:
    """It would undo what an operator has changed in between."""
    case = running()
    ask(case, against="those of before")
    assert replies(case) == [("p1", "refused")]
    assert "have changed since" in case.state.durable.replies[0].why
    ask(case, id="p2", against=case.state.durable.settings_digest)
    assert case.state.durable.pivot == intended("p2")


def test_no_trainer_is_stopped_for_a_step_whose_files_went_without_a_word() -> None:
    case = Case(SAVED, NEWER).to_selecting(history=200)
    case.select(200, present=(200,))
    case.clear()
    case.feed(ev.Spawned, PID, 77, "boot")
    case.hear("hello", step=200, pid=PID)
    ask(case, to_step=100)
    assert replies(case) == [("p1", "refused")]
    assert case.state.phase == "running"


@pytest.mark.parametrize("more", [{"parent": 2}, {"parent": 7, "to_step": 100}])
def test_a_pivot_says_which_epoch_it_follows_and_it_is_that_one(more: Json) -> None:
    """Its settings were made from those of that epoch."""
    case = running()
    ask(case, **more)
    assert replies(case) == [("p1", "refused")]
    why = case.state.durable.replies[0].why
    assert why == f"it follows epoch {more['parent']}, and should follow 1"
    assert case.state.durable.pivot is None


def test_a_failed_archive_leaves_the_old_policy_and_nothing_else() -> None:
    case = running()
    ask(case)
    case.hear("paused", step=200, id="p1")
    left(case).select(200)
    effects = case.feed(ev.Archived, 200, "", "no space")
    assert [effect for effect in effects if not isinstance(effect, ev.Append)] == [
        ev.Reply("p1", "refused", "no space"),
        ev.Sweep(),
        ev.Merge(),
    ]
    assert (case.state.durable.epoch, case.state.durable.pivot) == (1, None)


def test_an_intent_does_not_outlive_its_supervisor() -> None:
    case = running()
    ask(case)
    again = case.reopened()
    effects = again.open(None, ours())
    why = "the supervisor ended before the switch; nothing was changed"
    assert effects == [
        ev.Append(ev.PivotAborted("p1", why)),
        ev.Append(ev.Replied("p1", "pivot", "refused", why, {})),
        ev.Reply("p1", "refused", why),
        *OPENING,
        ev.Append(ev.AttemptAdopted(1, PID)),
        ev.Adopt(PID),
    ]
    assert again.hear("paused", step=300, id="p1") == [ev.Send("resume")]
    assert ask(again) == [ev.Reply("p1", "refused", why)]


@pytest.mark.parametrize("intent", ["stop", "restart", "pivot"])
def test_a_paused_trainer_that_is_being_stopped_may_go(intent: str) -> None:
    case = running()
    ask(case)
    if intent == "pivot":
        case.hear("paused", step=200, id="p1")
    else:
        case.ask(intent, "x1")
    assert case.hear("paused", step=200, id="p1") == [ev.Send("exit")]


def test_a_trainer_that_saves_nothing_when_stopped_is_not_stopped_for_ever() -> None:
    case = running()
    ask(case, at="now")
    case.feed(ev.Recorded, 230, 0)
    left(case, step=230).select(200)
    assert replies(case) == [("p1", "refused")]
    assert "ended at step 230 without saving it; step 200 is the newest" in (
        case.state.durable.replies[0].why
    )
    assert case.acts[-1] == ev.Clear(200)


def test_a_boundary_that_was_missed_is_followed_by_another() -> None:
    case = running()
    ask(case)
    case.hear("paused", step=200, id="p1")
    left(case, step=230).select(200)
    case.clear()
    assert case.state.durable.pivot == intended(), "the wish stays"
    case.feed(ev.Spawned, PID, 78, "boot")
    case.hear("hello", step=200, pid=PID)
    assert case.acts == [ev.Send("pause", {"id": "p1"})]


def test_a_stop_overtakes_a_pivot() -> None:
    case = running()
    ask(case)
    case.ask("stop", "s1")
    case.die(0, line=STOPPED, step=210)
    assert case.state.phase == "stopped"
    assert replies(case) == [("p1", "refused"), ("s1", "done")]


# --- rollback -------------------------------------------------------------------------------------


def test_a_rollback_looks_for_its_base_and_nothing_newer() -> None:
    case = running()
    assert ask(case, to_step=100)[-1] == ev.Send("stop", {"id": "stop-1", "at": "now"})
    left(case)
    assert case.acts == [ev.Select(ceiling=100)]
    switched(case, 100)
    assert case.clear(200)[0] == ev.Append(ev.CheckpointsSuperseded(100, [200]))
    assert case.state.durable.owner(100) == (case.state.durable.epochs[1], None)
    assert case.state.durable.owner(99) == (case.state.durable.epochs[0], 100)


@pytest.mark.parametrize("found", [None, 50])
def test_a_rollback_to_a_spoiled_checkpoint_does_not_go_back_further(found: int | None) -> None:
    """What the selection found instead is not where the run goes on from."""
    case = running()
    ask(case, to_step=100)
    left(case)
    case.select(found)
    assert replies(case) == [("p1", "refused")]
    assert case.acts[-1] == ev.Merge()
    case.feed(ev.Merged, 200)
    assert case.acts == [ev.Select(ceiling=200)]
    assert case.select(200)[-1] == ev.Clear(200)


def test_a_rollback_forward_onto_a_branch_that_was_left_is_refused() -> None:
    case = Case(SAVED, NEWER)
    case.open(None, pivot=content(to_step=200), request="p1")
    case.feed(ev.Merged, 150)  # a rollback before it went to 150 and was killed before it cleared
    case.select(200)
    assert "is on a branch that ended at step 150" in case.state.durable.replies[0].why


@pytest.mark.parametrize("stage", ["spawning", "loading"])
def test_a_rollback_needs_no_trainer_that_gets_ready(stage: str) -> None:
    case = Case(SAVED, NEWER).to_spawning(base=200)
    if stage == "loading":
        case.feed(ev.Spawned, PID, 77, "boot")
    expected = [ev.Signal("TERM")] if stage == "loading" else []
    assert ask(case, to_step=100) == [ev.Append(intended(to_step=100)), *expected]
    if stage == "spawning":
        case.feed(ev.Spawned, PID, 77, "boot")
    case.die(1, step=200)
    case.feed(ev.Merged, 200)
    assert case.acts == [ev.Select(ceiling=100)]


# --- a run that nobody supervises -----------------------------------------------------------------


def alone(*records: ev.Record, wish: str = "run", **more: Any) -> Case:
    case = Case(SAVED, NEWER, ev.Wished(wish, ""), *records)
    case.open(None, pivot=content(**more), request="p1")
    return case


@pytest.mark.parametrize("wish", ["run", "stop"])
def test_a_run_that_is_stopped_is_pivoted_and_stays_stopped(wish: str) -> None:
    case = alone(wish=wish)
    assert case.acts == [ev.Merge()]
    case.feed(ev.Merged, 230)
    switched(case)
    assert case.acts == [ev.Clear(200)]
    case.clear()
    assert case.state.phase == "stopped"
    assert case.state.why.startswith("pivoted; ")
    assert replies(case) == [("p1", "done")]
    assert case.state.durable.wish == wish
    assert case.state.durable.attempt == 0


def test_a_failed_run_is_pivoted_although_its_budget_is_spent() -> None:
    death = ev.AttemptEnded(1, "crash", 1, None, 230, True, 0, "")
    case = alone(*[replace(death, attempt=n) for n in (1, 2, 3)], ev.RunFailed("3 deaths"))
    case.feed(ev.Merged, 230)
    switched(case).clear()
    assert (case.state.durable.deaths, case.state.durable.outcome) == (0, "")


def test_without_a_base_it_stays_as_it_was_and_trains_nothing() -> None:
    case = alone()
    case.feed(ev.Merged, 230)
    case.select(None)
    assert (case.state.phase, replies(case)) == ("stopped", [("p1", "refused")])
    failed = alone(ev.RunFailed("no luck"))
    failed.feed(ev.Merged, 230)
    failed.select(None)
    assert (failed.state.phase, failed.state.durable.outcome) == ("failed", "failed")
    case = alone(to_step=100)
    case.feed(ev.Merged, 230)
    assert case.select(None, rejected=((100, "rotten", "quarantine/100"),))
    assert case.acts == [ev.Reply("p1", "refused", case.state.durable.replies[0].why), ev.Merge()]
    case.feed(ev.Merged, 230)
    case.select(200)
    assert (case.state.phase, case.state.why) == ("stopped", "not pivoted")


def test_what_is_refused_leaves_a_failed_run_failed() -> None:
    case = alone(ev.RunFailed("no luck"), epoch=3)
    assert (case.state.phase, case.state.durable.outcome) == ("failed", "failed")
    assert replies(case) == [("p1", "refused")]


def test_an_attempt_that_died_with_its_supervisor_is_reaped_first() -> None:
    case = Case(SAVED, NEWER).to_running(base=200).reopened()
    case.open(None, pivot=content(), request="p1")
    assert case.acts == [ev.Reap()]
    case.reap(step=230)
    assert case.acts == [ev.Merge()]


def test_a_trainer_that_lives_is_not_pivoted_behind_its_back() -> None:
    case = Case(SAVED, NEWER).to_running(base=200).reopened()
    case.open(None, ours(), pivot=content(), request="p1")
    assert (case.state.phase, replies(case)) == ("stuck", [("p1", "refused")])
    assert "`supervisor start` takes it over" in case.state.why


# --- a policy that never gets going ---------------------------------------------------------------


def test_a_failure_before_the_first_checkpoint_offers_the_way_back() -> None:
    case = running()
    ask(case)
    case.hear("paused", step=200, id="p1")
    switched(left(case)).clear()
    case.feed(ev.Spawned, PID, 78, "boot")
    case.die(78, message="no such key", step=200)
    assert case.state.phase == "failed"
    assert case.state.why == (
        "the trainer refused its configuration: no such key; no checkpoint of epoch 2 is there"
        " yet: `supervisor rollback --to-step 200` goes back to the policy before it"
    )
    (reply,) = case.state.durable.replies
    assert (reply.outcome, reply.result["epoch"]) == ("done", 2)
    assert case.state.why in reply.why


def test_after_its_first_checkpoint_a_failure_is_one_like_any_other() -> None:
    case = running()
    ask(case)
    case.hear("paused", step=200, id="p1")
    switched(left(case)).clear()
    case.feed(ev.Spawned, PID, 78, "boot")
    case.hear("hello", step=200, pid=PID)
    case.saved(300)
    case.die(80, step=310)
    assert "rollback" not in case.state.why


# --- who owns a step ------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), max_size=7))
@cases(300)
def test_a_step_belongs_to_the_newest_epoch_on_its_branch(pivots: list[tuple[int, int]]) -> None:
    """Against a table of owners that each pivot rewrites from its base on. Its parent is the owner
    of its base, or the one before it where that has none of its own."""
    epochs = [Epoch(1, 0, 1, "")]
    owners = [1] * 40
    for base_step, choice in pivots:
        parent = owners[base_step - 1] if base_step and choice else epochs[-1].number
        epochs.append(Epoch(len(epochs) + 1, base_step, parent, ""))
        before = epochs[parent - 1]
        known = Durable(epoch=before.number, epochs=tuple(epochs))
        owners = [known.owner(step)[0].number for step in range(base_step)] + [
            epochs[-1].number
        ] * (40 - base_step)
    durable = Durable(epoch=len(epochs), epochs=tuple(epochs))
    for step in range(40):
        owner, until_step = durable.owner(step)
        assert owner.number == owners[step]
        if until_step is None:
            assert owner.number == durable.epoch
        else:
            assert owners[step:until_step] == [owner.number] * (until_step - step)
            assert owners[until_step] != owner.number
