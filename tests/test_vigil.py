"""What silence and a row of deaths lead to, decided by example on the pure machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from test_machine import LOOK_SECONDS, PID, RULES, Case, ours

from supervisor import blame, events as ev, vigil
from supervisor.contract import ExitCode, ExitLine
from supervisor.patience import Limits
from supervisor.state import Durable

HASTY: Final = replace(
    RULES,
    deaths=9,
    limits=Limits(
        start_seconds=600.0,
        step_seconds=60.0,
        save_seconds=900.0,
        factor=10.0,
        evidence_seconds=5.0,
    ),
)
SAVED: Final = (
    ev.CheckpointCommitted(100, 1, "cadence", [], "bd"),
    ev.CheckpointCommitted(200, 1, "cadence", [], "bd"),
)


def warm(*records: ev.Record, steps: int = 10) -> Case:
    """A trainer that has made some steps and says so."""
    case = Case(*records, rules=HASTY).to_running()
    for step in range(1, steps + 1):
        case.now += 1.0
        case.feed(ev.Ticked)
        case.hear("step", step=step, loss=1.0)
    return case


def silent(case: Case, seconds: float) -> list[ev.Effect]:
    """Everything that was done in so many seconds without a word from the trainer."""
    end, done = case.now + seconds, []
    while case.now < end:
        case.now = min(end, case.now + LOOK_SECONDS)
        done += case.feed(ev.Ticked)
    return done


# --- silence ---


def test_silence_leads_to_evidence_then_to_message_signal_and_kill() -> None:
    case = warm()
    assert silent(case, 59.0) == []
    assert silent(case, 1.0) == [ev.Examine()]
    assert silent(case, 4.0) == []
    alarm, stop = silent(case, 1.0)
    where = "no progress for 65 s after step 10, in phase step; where it stood is in"
    assert isinstance(alarm, ev.Append)
    assert isinstance(alarm.record, ev.Alarmed)
    assert alarm.record.detail == f"{where} logs/attempt-0001.log"
    assert stop == ev.Send("stop", {"id": "stop-1", "at": "now"})
    assert case.place == ("stopping", "")
    assert silent(case, RULES.signal_after_seconds) == [ev.Signal("TERM")]
    assert silent(case, RULES.grace_seconds) == [ev.Kill()]
    case.die(signal=9)
    ended = case.state.durable.last_exit
    assert ended is not None
    assert (ended.cause, ended.signal, ended.counted) == ("hang", 9, True)
    assert ended.message.startswith(where)
    assert case.place == ("backoff", "")


def test_a_trainer_that_saves_and_leaves_when_it_is_told_to_has_hung_all_the_same() -> None:
    case = warm()
    silent(case, 66.0)
    case.saved(10, reason="operator")
    case.die(0, line=ExitLine("stopped", 10, 0, [], ""))
    ended = case.state.durable.last_exit
    assert ended is not None
    assert (ended.cause, ended.code) == ("hang", 0)
    assert case.place == ("backoff", ""), "it is started again"


def test_silence_is_shown_of_a_trainer_that_is_waited_for() -> None:
    case = warm()
    case.now += 7.0
    shown = vigil.silence(case.state, HASTY.limits, case.now)
    assert shown == {"phase": "step", "silent_seconds": 7.0, "allowed_seconds": 60.0}
    case.feed(ev.Asked, "s1", "stop")
    assert case.state.phase == "stopping"
    assert vigil.silence(case.state, HASTY.limits, case.now) is None


def test_an_operator_who_stops_a_hanging_run_has_stopped_it() -> None:
    case = warm()
    silent(case, 66.0)
    case.ask("stop", "s1")
    case.die(signal=9)
    assert case.state.phase == "stopped"


@pytest.mark.parametrize("how", ["a message", "a receipt", "a phase"])
def test_progress_in_the_last_moment_calls_it_off(how: str) -> None:
    case = warm()
    assert silent(case, 60.0) == [ev.Examine()]
    if how == "a message":
        case.hear("step", step=11, loss=1.0)
    elif how == "a receipt":
        case.feed(ev.Ticked, 11)
    else:
        case.hear("phase", phase="save", step=10)
    assert case.state.examined_at is None
    assert silent(case, 59.0) == []
    assert case.place == ("running", "")


def test_a_message_without_progress_calls_nothing_off() -> None:
    case = warm()
    silent(case, 60.0)
    case.hear("seen", id="x")
    case.hear("step", step=10, loss=1.0)
    case.hear("phase", phase="step", step=10)
    case.hear("hello", step=10, pid=PID)
    assert case.state.examined_at is not None
    silent(case, 5.0)
    assert case.place == ("stopping", "")


def test_while_the_disk_takes_no_history_nobody_hangs() -> None:
    case = warm()
    for _ in range(100):
        case.now += LOOK_SECONDS
        assert case.feed(ev.Ticked, 10, True) == []
    assert silent(case, 59.0) == []
    assert silent(case, 1.0) == [ev.Examine()]


def test_a_pause_of_the_supervisor_is_not_the_trainers() -> None:
    case = warm()
    assert silent(case, 50.0) == []
    assert case.tick(3600.0) == []
    assert silent(case, 9.0) == []
    assert silent(case, 1.0) == [ev.Examine()]


def test_a_wanted_pause_has_time_and_a_trainer_that_never_leaves_is_found() -> None:
    case = warm()
    case.hear("farewell", why="finished", step=10)
    assert silent(case, 899.0) == []
    assert silent(case, 1.0) == [ev.Examine()]


def test_a_pause_that_nobody_wants_any_more_is_no_step_yet() -> None:
    case = warm()
    assert case.hear("paused", step=10, id="p1") == [ev.Send("resume")]
    assert silent(case, 899.0) == []
    assert silent(case, 1.0) == [ev.Examine()]


def test_an_adopted_trainer_has_the_time_of_a_start_and_no_more() -> None:
    case = Case(*SAVED, rules=HASTY).to_running(base=200).reopened()
    case.open("run", ours())
    assert case.place == ("running", "")
    assert silent(case, 599.0) == []
    assert silent(case, 1.0) == [ev.Examine()]


def test_re_executed_steps_are_progress() -> None:
    # The history is at 150 already; what the trainer does again is read and adds nothing.
    case = Case(SAVED[0], rules=HASTY).to_running(base=100, history=150)
    for step in range(101, 150):
        case.now += 50.0
        case.feed(ev.Ticked, step)
    assert case.state.patience.step == 149
    assert case.place == ("running", "")


def test_a_hang_that_stops_anyhow_is_not_examined() -> None:
    case = warm()
    case.ask("stop", "s1")
    effects = silent(case, 120.0)
    assert ev.Examine() not in effects
    assert ev.Kill() in effects


def test_the_alarm_ends_with_the_next_new_checkpoint() -> None:
    case = warm()
    silent(case, 66.0)
    case.die(signal=9)
    assert dict(case.state.durable.alarms).keys() == {"hang"}
    case.wait(60.0)
    case.to_running()
    case.saved(20)
    assert case.state.durable.alarms == ()


# --- deaths ---


@pytest.mark.parametrize(
    ("cause", "signal", "ready", "suspicious"),
    [
        ("crash", None, True, True),
        ("unknown", None, True, True),
        ("hang", 9, True, True),
        ("hang", None, True, True),
        ("signal", 11, True, True),
        ("signal", 6, True, True),
        ("signal", 9, True, False),
        ("signal", 15, True, False),
        ("killed", 9, True, False),
        ("spawn", None, True, False),
        ("again", None, True, False),
        ("checkpoint", None, True, False),
        ("crash", None, False, False),
        ("signal", 11, False, False),
    ],
)
def test_which_ends_may_be_the_fault_of_the_checkpoint(
    cause: str, signal: int | None, ready: bool, suspicious: bool
) -> None:
    assert blame.blames(cause, signal, ready) == suspicious


@pytest.mark.parametrize(
    ("blamed", "reason"),
    [
        ((), ""),
        (((100, 0),), ""),
        (((100, 0), (100, 0)), "2 trainers that loaded it died before a new step"),
        (((100, 0), (100, 100)), "2 trainers that loaded it died before a new step"),
        (((90, 0), (100, 0)), ""),
        (((90, 0), (90, 0)), ""),
        (((100, 120), (100, 121)), ""),
        (((100, 120), (100, 0)), ""),
        (((100, 120), (100, 120)), "2 trainers died after step 120, the last from here"),
        (((90, 120), (100, 120)), "2 trainers died after step 120, the last from here"),
        (((90, 120), (90, 120)), ""),
    ],
)
def test_when_a_checkpoint_is_to_blame(blamed: tuple[tuple[int, int], ...], reason: str) -> None:
    assert blame.verdict(Durable(blamed=blamed), 100) == reason


def crash(case: Case, reached: int = 0, **more: Any) -> None:
    case.die(1, reached_step=reached, loaded=True, **more)
    case.wait(HASTY.maximum_delay_seconds)


def test_a_checkpoint_that_kills_twice_is_set_aside_and_the_one_before_is_tried() -> None:
    case = Case(*SAVED, rules=HASTY).to_running(base=200)
    crash(case)
    case.to_running(base=200)
    crash(case)
    case.to_selecting(200)
    assert case.select(200) == [
        ev.Append(ev.CheckpointSetAside(200, "2 trainers that loaded it died before a new step")),
        ev.Append(
            ev.Alarmed(
                "checkpoint_set_aside",
                "step 200: 2 trainers that loaded it died before a new step",
            )
        ),
        ev.Select(ceiling=199),
    ]
    assert case.select(100)[-1] == ev.Clear(100)
    case.clear(200)
    assert ev.CheckpointsSuperseded(100, [200]) in case.records
    assert case.state.durable.set_aside == frozenset()
    assert case.state.durable.on_disk == {100}


def test_a_life_that_ends_in_between_tries_the_one_before_as_well() -> None:
    case = Case(*SAVED, ev.CheckpointSetAside(200, "x"), rules=HASTY)
    case.open(None)
    assert case.feed(ev.Merged, 200) == [ev.Select(ceiling=199)]
    case.select(100)
    case.clear()  # the files of 200 had been moved away before
    assert ev.CheckpointsSuperseded(100, [200]) in case.records
    case.feed(ev.Spawned, PID, 77, "boot")
    assert case.state.durable.set_aside == frozenset()


def test_when_it_is_made_again_it_is_a_checkpoint_like_any_other() -> None:
    case = Case(*SAVED, ev.CheckpointSetAside(200, "x"), rules=HASTY).to_running(100, history=200)
    case.saved(200)
    assert case.state.durable.set_aside == frozenset()
    assert 200 in case.state.durable.on_disk


def test_a_run_whose_last_checkpoint_is_set_aside_says_that_a_start_tries_it_again() -> None:
    case = Case(*SAVED, ev.CheckpointSetAside(200, "x"), rules=HASTY)
    case.open(None)
    case.feed(ev.Merged, 200)
    case.select(None)
    assert "step 200" in case.state.why
    assert "still in checkpoints/" in case.state.why
    assert "start again, which tries it again" in case.state.why
    assert "quarantine" not in case.state.why


def test_the_operators_start_gives_it_another_chance() -> None:
    case = Case(*SAVED, ev.CheckpointSetAside(200, "x"), rules=HASTY)
    case.open("run")
    assert case.feed(ev.Merged, 200) == [ev.Select(ceiling=200)]
    assert case.state.durable.set_aside == frozenset()


def test_new_progress_forgets_whom_it_blamed() -> None:
    case = Case(*SAVED, rules=HASTY).to_running(base=200)
    crash(case)
    case.to_running(base=200)
    assert len(case.state.durable.blamed) == 1
    case.saved(300)
    assert len(case.state.durable.blamed) == 0


def test_a_crash_before_it_had_loaded_blames_nothing() -> None:
    case = Case(*SAVED, rules=HASTY)
    for _ in range(4):
        case.to_loading(base=200)
        case.die(1)
        case.wait(HASTY.maximum_delay_seconds)
    assert case.state.durable.blamed == ()
    assert case.state.durable.last_exit.blames is False  # type: ignore[union-attr]


def test_what_its_receipts_say_of_loading_counts_without_a_link() -> None:
    case = Case(*SAVED, rules=HASTY).to_loading(base=200)
    case.die(1, loaded=True)
    assert case.state.durable.blamed == ((200, 0),)


def test_who_is_taken_over_after_a_step_had_loaded() -> None:
    case = Case(*SAVED, rules=HASTY).to_running(base=200).reopened()
    case.open("run", ours(), stepped=True)
    case.die(1, reached_step=200)
    assert case.state.durable.blamed == ((200, 200),)


@pytest.mark.parametrize("code", [int(ExitCode.AGAIN), int(ExitCode.CHECKPOINT)])
def test_what_says_that_it_is_not_the_checkpoint_is_believed(code: int) -> None:
    case = Case(*SAVED, rules=HASTY).to_running(base=200)
    case.die(code, reached_step=0, loaded=True)
    assert case.state.durable.blamed == ()


def test_giving_up_says_at_which_step_they_died() -> None:
    case = Case(rules=replace(HASTY, deaths=3))
    for reached in (7, 9, 7):
        case.to_running()
        crash(case, reached, message="CUDA error")
    assert case.state.why.endswith("; 2 of them after step 7: look at what comes in step 8")
