"""How long a silence may be: learned, phase by phase, and never at a healthy trainer's cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor.patience import (
    DURATIONS_KEPT,
    LATE_SECONDS,
    WARM_UP_STEPS,
    Limits,
    Patience,
)

LIMITS: Final = Limits(
    start_seconds=100.0, step_seconds=10.0, save_seconds=50.0, factor=4.0, evidence_seconds=1.0
)
CI_HOURS: Final = 12
SOAK_HOURS: Final = 10_000


def trained(seconds: float = 1.0, steps: int = WARM_UP_STEPS + 20) -> Patience:
    """Patience with a trainer whose steps all took this long."""
    patience = Patience().began(0.0, 0).entered(0.0, "step")
    for step in range(1, steps + 1):
        patience = patience.stepped(step * seconds, step).looked_at(step * seconds, blind=False)
    return patience


def allowed(patience: Patience) -> float:
    return patience.allowed_seconds(LIMITS)


# --- which limit ---


def test_until_it_has_warmed_up_it_has_the_time_of_a_start() -> None:
    patience = Patience().began(0.0, 40)
    assert patience.deadline(LIMITS) == 100.0
    for phase in ("load", "compile", "step"):
        patience = patience.entered(7.0, phase)
        assert patience.deadline(LIMITS) == 107.0
    for step in range(41, 40 + WARM_UP_STEPS):
        patience = patience.stepped(8.0, step)
        assert allowed(patience) == 100.0
    assert allowed(patience.stepped(9.0, 40 + WARM_UP_STEPS)) == 10.0


def test_a_step_has_the_floor_or_a_multiple_of_the_median_whichever_is_longer() -> None:
    assert allowed(trained(1.0)) == 10.0
    assert allowed(trained(30.0)) == 120.0


def test_the_warm_up_teaches_nothing() -> None:
    patience = trained(1000.0, WARM_UP_STEPS)
    assert patience.durations == ()
    assert allowed(patience) == 10.0


def test_other_phases_have_a_floor_and_a_median_of_their_own() -> None:
    patience, now = trained(), 100.0
    assert allowed(patience.entered(now, "save")) == 50.0
    for _ in range(3):
        patience = patience.entered(now, "save").entered(now + 20.0, "step")
        now += 30.0
    assert allowed(patience.entered(now, "save")) == 80.0
    assert allowed(patience.entered(now, "evaluate")) == 50.0
    assert allowed(patience) == 10.0


@pytest.mark.fault("SV-43", phase="saving", does="each phase has a deadline, learned of itself")
def test_fc85_a_save_ten_times_as_long_as_a_step_is_no_hang() -> None:
    """A long save was mistaken for a hang (flagos-ai/FlagScale PR 1267)."""
    patience = trained(1.0).entered(30.0, "save")
    assert patience.deadline(LIMITS) > 40.0


def test_what_the_trainer_asks_for_counts_and_may_be_asked_for_again() -> None:
    patience = trained().entered(30.0, "save", 0, 70.0)
    assert patience.deadline(LIMITS) == 100.0
    again = patience.entered(60.0, "save", 0, 200.0)
    assert again.since == 30.0, "to say it again is no progress"
    assert again.deadline(LIMITS) == 230.0
    assert allowed(again.entered(80.0, "step")) == 10.0


def test_the_step_before_a_save_does_not_end_the_save() -> None:
    # The announcement overtakes the receipt: they come by two ways.
    patience = trained(steps=30).entered(31.0, "save", 31)
    assert patience.stepped(31.2, 31) == patience
    assert patience.stepped(33.0, 32).phase == "step"


def test_only_a_new_step_is_progress() -> None:
    patience = trained(steps=30)
    assert patience.stepped(99.0, 30) == patience
    assert patience.stepped(99.0, 12) == patience
    assert patience.entered(99.0, "step") == patience


def test_a_new_attempt_begins_afresh_and_knows_what_was_learned() -> None:
    patience = trained(30.0)
    begun = patience.began(5000.0, 10)
    assert (begun.step, begun.steps_seen, begun.since) == (10, 0, 5000.0)
    assert begun.durations == patience.durations
    assert allowed(begun) == 100.0


def test_it_says_how_long_it_has_waited_and_will() -> None:
    assert trained(steps=30).to_json(LIMITS, 34.5) == {
        "phase": "step",
        "silent_seconds": 4.5,
        "allowed_seconds": 10.0,
    }


# --- our own lateness ---


@pytest.mark.fault("SV-47", phase="any", does="re-bases deadlines after a pause of its own")
def test_time_in_which_we_did_not_look_is_not_held_against_it() -> None:
    """A watchdog fired after resume from sleep (systemd #20284, #9538); a clock that was set back
    hung or crashed a supervisor (Supervisor #1043, #802, #281)."""
    patience = trained(steps=30).looked_at(32.0, blind=False)
    assert patience.looked_at(34.0, blind=False).deadline(LIMITS) == 40.0
    slept = patience.looked_at(4032.0, blind=False)
    assert slept.deadline(LIMITS) == 4040.0, "two seconds of the silence were its own"


def test_while_we_cannot_see_it_is_not_silent() -> None:
    patience = trained(steps=30).looked_at(32.0, blind=True)
    assert patience.deadline(LIMITS) == 42.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "save", "evaluate", "look", "blind", "begin", "same"]),
            st.floats(0.0, 500.0, allow_nan=False),
        ),
        max_size=60,
    )
)
@cases(300)
def test_a_deadline_is_never_earlier_than_the_floor_after_the_last_progress(
    script: list[tuple[str, float]],
) -> None:
    now, step = 0.0, 0
    patience = Patience().began(now, step)
    for what, seconds in script:
        now += seconds
        before = patience
        match what:
            case "step":
                step += 1
                patience = patience.stepped(now, step)
                assert patience.since == now
            case "look" | "blind":
                patience = patience.looked_at(now, blind=what == "blind")
                assert patience.since >= before.since
            case "begin":
                patience = patience.began(now, step)
            case "same":
                assert patience.stepped(now, step) == patience
            case _:
                patience = patience.entered(now, what, step)
        assert patience.since <= now
        assert patience.deadline(LIMITS) - patience.since >= LIMITS.step_seconds
        assert all(len(seconds) <= DURATIONS_KEPT for _, seconds in patience.durations)


# --- healthy trainers, and ones that hang ---


@dataclass
class Healthy:
    """Hours of a healthy trainer as a row of (seconds until, what), what being a step, a phase
    that begins, or a pause in which nobody runs (the machine sleeps) or we do not (we are starved).
    Steps have a heavy tail, up to a stall of 45 seconds; a save may take minutes."""

    seed: int
    hours: float

    def __iter__(self) -> Iterator[tuple[float, str]]:
        chance = random.Random(self.seed)
        left, step = 3600 * self.hours, 0
        while left > 0:
            step += 1
            seconds = chance.lognormvariate(0.0, 0.5)
            if chance.random() < 1e-3:  # a neighbour on the disk, a slow page, a thermal limit
                seconds += min(45.0, chance.paretovariate(1.0))
            yield seconds, "step"
            left -= seconds
            if step % 500 == 0:
                seconds = 0.0  # of the phase before: none between a step and what follows it
                for phase in ("evaluate", "sample", "save", "step"):
                    yield seconds, phase
                    left -= seconds
                    seconds = chance.lognormvariate(1.5, 1.0)
            if chance.random() < 2e-5:
                yield chance.uniform(10.0, 3600.0), chance.choice(("asleep", "starved"))


def false_alarms(seed: int, hours: float, limits: Limits) -> tuple[int, int]:
    """(alarms, steps) in so many hours in which nothing was wrong."""
    now, step, alarms = 0.0, 0, 0
    patience = Patience().began(now, 0).entered(now, "load").entered(now, "step")
    for seconds, what in Healthy(seed, hours):
        if what in ("asleep", "starved"):
            now += seconds
            if what == "starved":  # it trained on; we read its receipts before we judge
                step += int(seconds)
                patience = patience.stepped(now, step)
            patience = patience.looked_at(now, blind=False)
            continue
        end = now + seconds
        while now + LATE_SECONDS / 2 < end:
            now += LATE_SECONDS / 2
            patience = patience.looked_at(now, blind=False)
            alarms += now >= patience.deadline(limits)
        now = end
        if what == "step" and seconds:
            step += 1
            patience = patience.stepped(now, step)
        else:
            patience = patience.entered(now, what, step)
        patience = patience.looked_at(now, blind=False)
    return alarms, step


@pytest.mark.fault("FC-87", phase="running", does="a hang is the lack of progress alone")
def test_fc87_hours_of_a_healthy_trainer_raise_no_alarm() -> None:
    """Healthy jobs were reaped for a stale heartbeat while the log moved on (longtermrisk/
    openweights PR 82, sipyourdrink-ltd/bernstein #3012)."""
    alarms, steps = false_alarms(1, CI_HOURS, Limits())
    assert alarms == 0
    assert steps > 20_000


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_healthy_hours_raise_no_alarm() -> None:
    found = [false_alarms(seed, SOAK_HOURS / 100, Limits()) for seed in range(100)]
    assert sum(alarms for alarms, _ in found) == 0
    print(f"{SOAK_HOURS} hours, {sum(steps for _, steps in found):,} steps, no alarm")


def test_limits_that_are_too_tight_do_raise_one() -> None:
    # That the row of a healthy trainer could show a false alarm at all.
    alarms, _ = false_alarms(1, CI_HOURS, Limits(step_seconds=2.0, factor=2.0))
    assert alarms > 0


@given(st.floats(0.001, 600.0), st.integers(1, 40))
@cases(100)
def test_a_hang_is_found_at_its_deadline_and_not_later_than_one_look(
    seconds: float, steps: int
) -> None:
    patience = trained(seconds, WARM_UP_STEPS + steps)
    deadline = patience.deadline(Limits())
    now = patience.since
    while now < deadline:
        now += min(LATE_SECONDS / 2, deadline - now)
        patience = patience.looked_at(now, blind=False)
    assert patience.deadline(Limits()) == deadline
    assert deadline - patience.since <= max(60.0, 10 * seconds) * 1.000001
