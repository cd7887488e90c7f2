"""The curriculum: projection, whole weights, picks, phases, rewards, and the saved state."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor import bandit, curriculum, curriculum_state, mixture, policy as policies, projection
from supervisor.curriculum import (
    MAIN,
    WARM_UP,
    ArmPolicy,
    Infeasible,
    Policy,
    PolicyError,
    State,
    StateError,
)
from supervisor.projection import SHARE_UNITS, check_feasible, integer_weights, pick, project

examples = cases(1_000)

# Seven arms of a warm-up that end up beside nine more, as in the system this was born from.
SEVEN = ("general", "creative", "roleplay", "chat", "smalltalk", "assistant", "books")


def arm(name: str, weight: float = 1.0, floor: float = 0.0, cap: float = 1.0) -> ArmPolicy:
    return ArmPolicy(name, weight, floor, cap)


def policy(
    *arms: ArmPolicy,
    bounds: str = "share",
    warmup_steps: int = 0,
    warmup_arms: tuple[str, ...] = (),
    kind: str = "static",
) -> Policy:
    return Policy(kind, bounds, warmup_steps, warmup_arms, arms)


def run(state: State, steps: int, loss: float = 2.0) -> tuple[list[str], State]:
    """The arms of so many steps in a row, each with the same loss."""
    names = []
    for _ in range(steps):
        name, state = curriculum.next_arm(state)
        state = curriculum.observe(state, name, loss)
        names.append(name)
    return names, state


# --- projection: worked vectors -------------------------------------------------------------------

ROOMY = [0.02, 0.10, 0.02, 0.15, 0.02, 0.02]


@pytest.mark.parametrize(
    ("q", "floors", "caps", "expected"),
    [
        ([0.5, 0.3, 0.2], [0.05] * 3, [0.6] * 3, [0.5, 0.3, 0.2]),
        ([0.7, 0.2, 0.08, 0.02], [0.05] * 4, [0.4] * 4, [0.4, 0.392857143, 0.157142857, 0.05]),
        ([0.7, 0.3, 0, 0], [0, 0, 0.05, 0.05], [0.3, 0.3, 0.5, 0.5], [0.3, 0.3, 0.2, 0.2]),
        ([0.6, 0.3, 0.1], [0.1] * 3, [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
        ([0.7, 0.2, 0.08, 0.02], [0.05] * 3 + [0], [0.4] * 3 + [0], [0.4, 0.4, 0.2, 0]),
        (
            [0.40, 0.25, 0.15, 0.10, 0.06, 0.04],
            ROOMY,
            [0.3, 0.3, 0.1, 0.3, 0.3, 0.3],
            [0.3, 0.3, 0.1, 0.15, 0.09, 0.06],
        ),
        ([1, 1, 1, 1], [0] * 4, [0.02, 0.08, 1, 1], [0.02, 0.08, 0.45, 0.45]),
    ],
    ids=["A", "B", "E", "F", "G", "H", "epoch-caps"],
)
def test_projection_gives_the_worked_vectors(
    q: list[float], floors: list[float], caps: list[float], expected: list[float]
) -> None:
    assert project(q, floors, caps) == pytest.approx(expected, abs=1e-9)


def test_projection_refuses_caps_that_cannot_fill_the_whole() -> None:
    with pytest.raises(Infeasible, match=r"7 caps sum to 0\.84") as caught:
        project([1 / 7] * 7, [0.0] * 7, [0.12] * 7)
    assert caught.value.bound == "caps"
    assert caught.value.total == pytest.approx(0.84)


def test_projection_refuses_floors_that_claim_more_than_the_whole() -> None:
    with pytest.raises(Infeasible, match=r"3 floors sum to 1\.1") as caught:
        project([0.5, 0.3, 0.2], [0.4, 0.4, 0.3], [1.0] * 3)
    assert caught.value.bound == "floors"
    assert caught.value.total == pytest.approx(1.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
def test_projection_refuses_a_preference_that_is_no_amount(bad: float) -> None:
    with pytest.raises(ValueError, match="preference 1"):
        project([0.5, bad], [0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("floors", "caps"), [([0.5, 0.0], [0.4, 1.0]), ([-0.1, 0.0], [1, 1]), ([0, 0], [1, 1.5])]
)
def test_projection_refuses_bounds_out_of_order(floors: list[float], caps: list[float]) -> None:
    with pytest.raises(ValueError, match=r"bounds [01]: expected 0 <= floor"):
        project([0.5, 0.5], floors, caps)


def test_projection_refuses_lengths_that_differ_and_no_arms_at_all() -> None:
    with pytest.raises(ValueError, match="2 preferences, 1 floors"):
        project([0.5, 0.5], [0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="0 preferences"):
        project([], [], [])


def test_one_arm_takes_everything() -> None:
    assert project([0.0], [0.0], [1.0]) == [1.0]
    assert project([3.0], [0.2], [1.0]) == [1.0]


def test_nobody_wanted_means_everybody_alike() -> None:
    assert project([0, 0, 0, 0], [0] * 4, [1] * 4) == [0.25] * 4
    assert project([0, 0, 0], [0.5, 0, 0], [1] * 3) == [0.5, 0.25, 0.25]


def test_an_arm_with_equal_bounds_is_fixed() -> None:
    assert project([5, 1, 1], [0.2, 0, 0], [0.2, 1, 1]) == pytest.approx([0.2, 0.4, 0.4])


def test_bounds_that_leave_no_choice_are_met_exactly() -> None:
    assert project([1, 9], [0.5, 0.5], [1, 1]) == [0.5, 0.5]
    assert project([1, 9, 0], [0, 0, 0], [0.25, 0.25, 0.5]) == [0.25, 0.25, 0.5]


def test_tiny_preferences_keep_their_odds() -> None:
    """A sweep with running differences was off by 3e-8 here; sums computed afresh are not."""
    found = project([1.0, 3e-10, 1e-10], [0.0] * 3, [0.5, 1.0, 1.0])
    assert found == pytest.approx([0.5, 0.375, 0.125], abs=1e-15)
    assert abs(math.fsum(found) - 1) <= 4.5e-16


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e300])
def test_extreme_scales_neither_overflow_nor_vanish(scale: float) -> None:
    expected = project([0.75, 0.25], [0.0, 0.0], [0.6, 1.0])
    assert project([3 * scale, scale], [0.0, 0.0], [0.6, 1.0]) == pytest.approx(expected)
    assert math.fsum(project([1e300, 1e-300, 0], [0] * 3, [0.5, 0.4, 1])) == 1.0


# --- projection: properties -----------------------------------------------------------------------

Problem = tuple[list[float], list[float], list[float]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Feasible bounds and any preferences, zeros and extremes included."""
    count = draw(st.integers(1, 16))
    amounts = st.floats(0, 1).map(lambda value: value if value > 1e-9 else 0.0)
    inside = [draw(amounts) + 1e-3 for _ in range(count)]
    total = math.fsum(inside)
    feasible = [value / total for value in inside]
    floors = [p * draw(st.sampled_from([0, 0.3, 0.9, 0.999])) for p in feasible]
    caps = [min(1.0, p * (1 + 1e-9) + draw(st.sampled_from([0, 0.01, 1.0]))) for p in feasible]
    wanted = st.one_of(st.just(0.0), st.floats(1e-12, 1), st.floats(0.1, 1))
    return [draw(wanted) for _ in range(count)], floors, caps


def bisected(q: Sequence[float], floors: Sequence[float], caps: Sequence[float]) -> list[float]:
    """The same projection by brute force, for positive preferences."""

    def shares(s: float) -> list[float]:
        return [min(max(s * v, f), u) for v, f, u in zip(q, floors, caps, strict=True)]

    low, high = -60.0, 60.0  # exponents of s
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(shares(2**middle)) < 1 else (low, middle)
    return shares(2**high)


@examples
@given(problems())
def test_shares_stay_within_bounds_and_sum_to_one(problem: Problem) -> None:
    q, floors, caps = problem
    found = project(q, floors, caps)
    assert all(f <= p <= u for p, f, u in zip(found, floors, caps, strict=True))
    assert abs(math.fsum(found) - 1) <= 1e-15


@examples
@given(problems())
def test_projecting_shares_again_changes_nothing(problem: Problem) -> None:
    q, floors, caps = problem
    once = project(q, floors, caps)
    assert project(once, floors, caps) == pytest.approx(once, abs=1e-14)


@examples
@given(problems())
def test_projection_agrees_with_bisection(problem: Problem) -> None:
    q, floors, caps = problem
    positive = [value or 0.5 for value in q]
    assert project(positive, floors, caps) == pytest.approx(
        bisected(positive, floors, caps), abs=1e-12
    )


@examples
@given(problems())
def test_who_is_wanted_more_within_wider_bounds_gets_no_less(problem: Problem) -> None:
    q, floors, caps = problem
    found = project(q, floors, caps)
    for i in range(len(q)):
        for j in range(len(q)):
            if q[i] >= q[j] and floors[i] >= floors[j] and caps[i] >= caps[j]:
                assert found[i] >= found[j] - 1e-14


@examples
@given(problems(), st.integers(0, 15), st.floats(1.001, 100))
def test_wanting_one_arm_more_never_helps_another(
    problem: Problem, position: int, factor: float
) -> None:
    q, floors, caps = problem
    raised = position % len(q)
    more = [value * factor if k == raised else value for k, value in enumerate(q)]
    before, after = project(q, floors, caps), project(more, floors, caps)
    assert after[raised] >= before[raised] - 1e-14
    assert all(after[k] <= before[k] + 1e-14 for k in range(len(q)) if k != raised)


@examples
@given(problems(), st.randoms(use_true_random=False))
def test_order_of_arms_does_not_matter(problem: Problem, random: object) -> None:
    q, floors, caps = problem
    order = list(range(len(q)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = project(*([values[k] for k in order] for values in (q, floors, caps)))
    straight = project(q, floors, caps)
    assert shuffled == pytest.approx([straight[k] for k in order], abs=1e-14)


@examples
@given(problems(), st.floats(1e-6, 1e6))
def test_scale_of_preferences_does_not_matter(problem: Problem, scale: float) -> None:
    q, floors, caps = problem
    found = project([value * scale for value in q], floors, caps)
    assert found == pytest.approx(project(q, floors, caps), abs=1e-12)


# --- whole weights --------------------------------------------------------------------------------


def test_whole_weights_of_the_worked_example() -> None:
    floors, caps = [0.05] * 4, [0.4] * 4
    shares = project([0.7, 0.2, 0.08, 0.02], floors, caps)
    assert integer_weights(shares, floors, caps) == [400_000, 392_857, 157_143, 50_000]


def test_whole_weights_give_the_rest_to_the_largest_remainder_and_then_to_the_first() -> None:
    third = [1 / 3] * 3
    assert integer_weights(third, [0.0] * 3, [1.0] * 3) == [333_334, 333_333, 333_333]


def test_bounds_mean_the_decimal_that_was_written() -> None:
    """0.07 * 1e6 is a little above 70,000; rounding that up would refuse a policy that fits."""
    floors = [0.07, 0.14, 0.28, 0.51]
    assert integer_weights(floors, floors, floors) == [70_000, 140_000, 280_000, 510_000]


def test_bounds_finer_than_a_unit_are_snapped_inward() -> None:
    floors, caps = [0.2000001, 0.0, 0.0], [1.0, 0.3999999, 1.0]
    found = integer_weights(project([0, 9, 1], floors, caps), floors, caps)
    assert sum(found) == SHARE_UNITS
    assert found[0] >= 200_001
    assert found[1] <= 399_999


def test_bounds_without_a_whole_unit_between_them_are_refused() -> None:
    bounds = [0.33333333, 0.0]
    with pytest.raises(
        Infeasible, match=r"between floor 0\.33333333 and cap 0\.33333333"
    ) as caught:
        check_feasible(bounds, [0.33333333, 1.0])
    assert "no multiple of 0.000001" in str(caught.value)


@examples
@given(problems())
def test_whole_weights_stay_within_bounds_and_sum_exactly(problem: Problem) -> None:
    q, floors, caps = problem
    try:
        found = integer_weights(project(q, floors, caps), floors, caps)
    except Infeasible:
        with pytest.raises(Infeasible):
            check_feasible(floors, caps)
        return
    assert sum(found) == SHARE_UNITS
    for weight, floor, cap in zip(found, floors, caps, strict=True):
        assert floor * SHARE_UNITS <= weight + 1e-6
        assert weight <= cap * SHARE_UNITS + 1e-6


def test_infeasible_caps_name_the_sum_and_what_would_do() -> None:
    with pytest.raises(Infeasible) as caught:
        check_feasible([0.0] * 7, [0.12] * 7, "phase warm-up: ")
    text = str(caught.value)
    assert text.startswith("phase warm-up: the caps of its 7 arms sum to 0.84, less than 1")
    assert "raise caps by 0.16 in all" in text
    assert "at least 0.142858 each" in text
    check_feasible([0.0] * 7, [0.142858] * 7)  # the advice is good


def test_infeasible_floors_name_the_sum_and_what_would_do() -> None:
    with pytest.raises(Infeasible) as caught:
        check_feasible([0.4, 0.4, 0.3], [1.0] * 3)
    text = str(caught.value)
    assert "the floors of its 3 arms sum to 1.1, more than 1" in text
    assert "lower floors by 0.1 in all" in text
    assert "at most 0.333333 each" in text
    check_feasible([0.333333] * 3, [1.0] * 3)


# --- picks ----------------------------------------------------------------------------------------


def picks(weights: Sequence[int], count: int) -> tuple[str, list[int]]:
    credits, names = [0] * len(weights), ""
    for _ in range(count):
        picked, credits = pick(credits, weights)
        names += "ABCDEFGHIJKLMNOP"[picked]
    return names, credits


def test_picks_of_the_worked_examples() -> None:
    assert picks([5, 3, 2], 12) == ("ABCAABACBAAB", [0, -4, 4])
    assert picks([5, 3, 2], 10)[1] == [0, 0, 0]
    assert picks([5, 1, 1], 12)[0] == "AABACAAAABAC"
    found = picks([400_000, 392_857, 157_143, 50_000], 12)
    assert found == ("ABCABABDABCA", [-200_000, 714_284, -114_284, -400_000])
    assert Counter(found[0]) == {"A": 5, "B": 4, "C": 2, "D": 1}
    thousand = Counter(picks([400_000, 392_857, 157_143, 50_000], 1000)[0])
    assert thousand == {"A": 400, "B": 393, "C": 157, "D": 50}


@st.composite
def schedules(draw: st.DrawFn) -> list[list[int]]:
    """Whole weights over time for up to 16 arms, changing as an adversary likes."""
    count = draw(st.integers(2, 16))
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        raw = [draw(st.integers(0, 1000)) for _ in range(count)]
        raw[draw(st.integers(0, count - 1))] += 1
        shares = [value / sum(raw) for value in raw]
        rows += [integer_weights(shares, [0.0] * count, [1.0] * count)] * draw(st.integers(1, 9))
    return rows


@examples
@given(schedules())
def test_counts_stay_close_to_their_targets_whatever_the_weights_do(rows: list[list[int]]) -> None:
    """Above by at most 1 - 1/K, so a cap on shares is a cap on counts; below by at most H_K - 1."""
    arms = len(rows[0])
    harmonic = math.fsum(1 / k for k in range(1, arms + 1))
    credits, counts, targets = [0] * arms, [0] * arms, [0] * arms
    for weights in rows:
        picked, credits = pick(credits, weights)
        counts[picked] += 1
        targets = [target + weight for target, weight in zip(targets, weights, strict=True)]
        assert sum(credits) == 0
        for count, target in zip(counts, targets, strict=True):
            assert count * SHARE_UNITS - target <= SHARE_UNITS * (1 - 1 / arms)
            assert count <= -(-target // SHARE_UNITS)
            assert target / SHARE_UNITS - count <= harmonic - 1 + 1e-9


def test_undershoot_reaches_its_bound_but_never_passes_it() -> None:
    """Sharing every pick among those not served yet starves the last of four by 1.083333."""
    credits, waiting = [0] * 4, [0, 1, 2, 3]
    while len(waiting) > 1:
        units = 12_000_000 // len(waiting)
        picked, credits = pick(credits, [units if k in waiting else 0 for k in range(4)])
        waiting.remove(picked)
    assert credits[waiting[0]] / 12_000_000 == pytest.approx(1 / 2 + 1 / 3 + 1 / 4)


# --- shares of a policy, and phases ---------------------------------------------------------------


def test_static_weights_become_shares_within_bounds() -> None:
    state = curriculum.create(
        policy(
            arm("a", 70, 0.05, 0.4), arm("b", 20, 0.05, 0.4), arm("c", 8, 0.05, 0.4),
            arm("d", 2, 0.05, 0.4),
        )
    )  # fmt: skip
    assert curriculum.shares(state) == pytest.approx(
        {"a": 0.4, "b": 0.392857143, "c": 0.157142857, "d": 0.05}, abs=1e-9
    )
    assert state.phase == MAIN
    assert "".join(run(state, 12)[0]) == "abcababdabca"


def test_caps_hold_on_counts_and_not_only_in_expectation() -> None:
    state = curriculum.create(policy(arm("a", 99, cap=0.06), arm("b", 1), arm("c", 1, floor=0.3)))
    for steps in range(1, 201):
        _, state = run(state, 1)
        pulls = [item.pulls for item in state.arms]
        assert pulls[0] <= math.ceil(0.06 * steps)
        assert pulls[2] >= 0.3 * steps - 1


def test_relative_weights_are_clamped_then_normalised() -> None:
    """The first system's floors sum to 3 and are no shares: raise to the floor, cut to the cap."""
    relative = policy(
        arm("general", 0.2, 0.8, 5.0), arm("chat", 1.0, 0.8, 5.0), arm("books", 4.0, 0.7, 2.2),
        bounds="weight",
    )  # fmt: skip
    found = curriculum.shares(curriculum.create(relative))
    assert found == pytest.approx({"general": 0.2, "chat": 0.25, "books": 0.55})
    assert "".join(name[0] for name in run(curriculum.create(relative), 20)[0]).count("b") == 11


def sixteen(cap: float) -> Policy:
    names = SEVEN + tuple(f"later-{number}" for number in range(9))
    return policy(
        *(arm(name, floor=0.01, cap=cap) for name in names), warmup_steps=21, warmup_arms=SEVEN
    )


def test_warm_up_serves_its_arms_only_and_ends_after_its_last_step() -> None:
    state = curriculum.create(sixteen(0.2))
    assert state.phase == WARM_UP
    shares = curriculum.shares(state)
    assert [name for name, share in shares.items() if share] == list(SEVEN)
    warm, state = run(state, 21)
    assert Counter(warm) == dict.fromkeys(SEVEN, 3)
    assert (state.phase, state.warm_up.steps, state.main.steps) == (MAIN, 21, 0)
    assert not any(state.credits)
    later, state = run(state, 16)
    assert len(set(later)) == 16
    assert (state.warm_up.pulls, state.main.pulls, state.main.steps) == (21, 16, 16)


def test_credits_are_forgiven_when_the_active_arms_change() -> None:
    changing = policy(arm("a", 5), arm("b", 3), arm("c", 2), warmup_steps=1, warmup_arms=("a", "b"))
    _, state = run(curriculum.create(changing), 1)
    assert state.credits == (0, 0, 0)
    assert "".join(run(state, 10)[0]) == "abcaabacba"


def test_caps_that_fit_all_arms_but_not_the_warm_up_are_refused_with_its_name() -> None:
    """Seven of sixteen arms at a cap of 0.12 fill 0.84 of the picks, though sixteen would do."""
    with pytest.raises(Infeasible, match=r"phase warm-up: the caps of its 7 arms sum to 0\.84"):
        curriculum.create(sixteen(0.12))


def test_floors_of_dormant_arms_are_not_owed_in_the_warm_up() -> None:
    state = curriculum.create(
        policy(
            arm("a", floor=0.6), arm("b", floor=0.4), warmup_steps=3, warmup_arms=("a",)
        )
    )  # fmt: skip
    assert curriculum.shares(state) == {"a": 1.0, "b": 0.0}
    assert curriculum.shares(run(state, 3)[1]) == pytest.approx({"a": 0.6, "b": 0.4})


def test_floors_too_high_for_the_main_phase_are_refused_with_its_name() -> None:
    with pytest.raises(Infeasible, match=r"phase main: the floors of its 2 arms sum to 1\.2"):
        curriculum.create(
            policy(
                arm("a", floor=0.6), arm("b", floor=0.6), warmup_steps=3, warmup_arms=("a",)
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (policy(arm("a"), kind="ucb9"), r"policy\.kind is 'ucb9', expected one of static"),
        (policy(arm("a"), bounds="loose"), r"policy\.bounds is 'loose', expected one of share"),
        (policy(), r"policy\.arms is empty"),
        (policy(arm("a"), arm("b"), arm("a")), r"policy\.arms: a appears twice"),
        (policy(arm("a"), warmup_steps=1, warmup_arms=("z",)), r"no arm is named z"),
        (policy(arm("a"), warmup_steps=-1), r"warmup_steps is -1"),
        (policy(arm("a"), warmup_steps=5), r"warmup_steps is 5 with 0 warmup_arms"),
        (policy(arm("a", weight=-1)), r"arm a: weight is -1, expected a number of 0 or more"),
        (policy(arm("a", weight=math.nan)), r"arm a: weight is nan"),
        (policy(arm("a", cap=math.inf)), r"arm a: cap is inf"),
        (policy(arm("a", floor=0.5, cap=0.4)), r"arm a: floor 0\.5 is above cap 0\.4"),
        (policy(arm("a", cap=1.5)), r"arm a: cap 1\.5 is above 1.*policy\.bounds = \"weight\""),
        (policy(arm("a", weight=0)), r"phase main: every weight is 0"),
        (policy(arm("a", 1, 1e-9)), r"arm a: its floor 1e-09 is a share of 1e-09 in phase main"),
        (
            policy(arm("a", 1, 0.1, 1), arm("b", 1e308, 0, 1e308), bounds="weight"),
            r"arm a: its floor 0.1 is a share of 1e-309 in phase main; expected 0, or",
        ),
        (policy(arm("a", 1, 0, 0), bounds="weight"), r"phase main: every weight is 0 within"),
    ],
)
def test_a_policy_that_cannot_be_carried_out_is_refused(broken: Policy, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        curriculum.create(broken)


def test_a_warm_up_of_no_steps_may_keep_its_arms_listed() -> None:
    assert curriculum.create(policy(arm("a"), arm("b"), warmup_arms=("a",))).phase == MAIN


# --- rewards --------------------------------------------------------------------------------------


def rewards(losses: Sequence[float], state: State | None = None) -> list[State]:
    state, seen = state or curriculum.create(policy(arm("a"))), []
    for loss in losses:
        name, state = curriculum.next_arm(state)
        state = curriculum.observe(state, name, loss)
        seen.append(state)
    return seen


def test_reward_of_the_first_system() -> None:
    """EMA 4.521, loss 4.520: reward 1.0, new EMA 4.5209."""
    state = rewards([4.521, 4.520])[-1]
    assert state.arms[0].ema_reward == pytest.approx(1.0, abs=1e-9)
    assert state.arms[0].ema_loss == pytest.approx(4.5209, abs=1e-12)


def test_first_loss_sets_the_average_and_earns_nothing() -> None:
    first, second, third, fourth = (s.arms[0] for s in rewards([4.0, 3.8, 3.9, 3.5]))
    assert (first.ema_loss, first.ema_reward) == (4.0, None)
    assert second.ema_reward == pytest.approx(200)
    assert third.ema_reward == pytest.approx(200 + 0.1 * (80 - 200))
    assert fourth.ema_reward == pytest.approx(188 + 0.1 * (472 - 188))
    assert fourth.ema_loss == pytest.approx(3.9248)


def test_a_worse_loss_is_no_penalty() -> None:
    assert rewards([2.0, 5.0])[-1].arms[0].ema_reward == 0.0


def test_steady_progress_earns_its_slope_over_alpha() -> None:
    state = rewards([3.0 - 0.003 * step for step in range(400)])[-1]
    assert state.arms[0].ema_reward == pytest.approx(0.03 * 1000, rel=1e-6)


def test_only_the_trained_arm_learns() -> None:
    state = curriculum.create(policy(arm("a"), arm("b")))
    name, state = curriculum.next_arm(state)
    after = curriculum.observe(state, name, 3.0)
    assert (name, after.arms[0].ema_loss, after.arms[1]) == ("a", 3.0, state.arms[1])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_never_rewarded(loss: float) -> None:
    state = curriculum.create(policy(arm("a")))
    with pytest.raises(ValueError, match=r"arm a: loss .* is not finite"):
        curriculum.observe(state, "a", loss)


def test_an_arm_that_is_not_active_cannot_be_observed() -> None:
    state = curriculum.create(policy(arm("a"), arm("b"), warmup_steps=2, warmup_arms=("a",)))
    for name in ("b", "zombie"):
        with pytest.raises(ValueError, match=f"arm {name} is not active in phase warm-up"):
            curriculum.observe(state, name, 1.0)


# --- saved state ----------------------------------------------------------------------------------

THREE = policy(
    arm("a", 5), arm("b", 3, floor=0.1), arm("c", 2), warmup_steps=7, warmup_arms=("a", "b")
)


def through_json(state: State) -> State:
    return curriculum.from_json(state.policy, json.loads(json.dumps(curriculum.to_json(state))))


@pytest.mark.parametrize("steps", [0, 1, 6, 7, 8, 40])
def test_two_resumes_in_a_row_change_nothing(steps: int) -> None:
    straight = run(curriculum.create(THREE), steps + 60, loss=2.5)[0]
    first, state = run(curriculum.create(THREE), steps, loss=2.5)
    second, state = run(through_json(state), 13, loss=2.5)
    third, state = run(through_json(through_json(state)), 47, loss=2.5)
    assert first + second + third == straight
    assert through_json(state) == state


def test_a_state_between_draw_and_step_survives_too() -> None:
    _, state = curriculum.next_arm(run(curriculum.create(THREE), 3)[1])
    assert through_json(state) == state


def test_the_saved_form_is_plain_and_keyed_by_arm() -> None:
    _, state = run(curriculum.create(policy(arm("a", 3), arm("b", 1))), 1, loss=2.0)
    untaught = {
        "gain": 0.0,
        "count": 0.0,
        "value": 0.0,
        "baseline": None,
        "observed_step": 0,
        "last_loss": None,
        "gap_start": None,
        "gate": 1.0,
    }
    source = {"fingerprint": None, "repetition": 0.0, "ceiling": 1.0, "pulls": 0, "targets": 0}
    common = {
        "window_steps": 0,
        "window_nats": 0.0,
        "window_targets": 0,
        "learned": untaught,
        "joined_step": None,
        "source": source,
    }
    a = {"pulls": 1, "targets": 1, "ema_loss": 2.0, "ema_reward": None}
    b = {"pulls": 0, "targets": 0, "ema_loss": None, "ema_reward": None}
    assert curriculum.to_json(state) == {
        "format": 1,
        "kind": "static",
        "seed": 0,
        "phases": {
            "warm-up": {"pulls": 0, "steps": 0, "runs": 0},
            "main": {"pulls": 1, "steps": 1, "runs": 1},
        },
        "run": {"arm": None, "left": 0},
        "window_steps": 0,
        "pool": {"scale": None, "ring": []},
        "arms": {
            "a": common | a | {"weight": 750_000, "share": 0.75, "credit": -250_000},
            "b": common | b | {"weight": 250_000, "share": 0.25, "credit": 250_000},
        },
        "retired": [],
    }


def test_the_order_of_keys_in_a_saved_state_means_nothing() -> None:
    _, state = run(curriculum.create(THREE), 20)
    saved = curriculum.to_json(state)
    for order in permutations(saved["arms"].items()):
        assert curriculum.from_json(THREE, saved | {"arms": dict(order)}) == state


def test_a_zombie_arm_is_refused_and_takes_no_share() -> None:
    """An arm with weight 1.546 whose source is gone, kept beside three live arms of weight 1.

    Summing over whatever a saved file holds would hand it 0.340079 of the picks; among sixteen
    live arms 0.088111.
    """
    beside_three, beside_sixteen = 1.546 / (1.546 + 3), 1.546 / (1.546 + 16)
    assert beside_three == pytest.approx(0.340079, abs=1e-6)
    assert beside_sixteen == pytest.approx(0.088111, abs=1e-6)
    live = policy(arm("a"), arm("b"), arm("c"))
    haunted = policy(*live.arms, arm("repo-docstrings", 1.546))
    _, state = run(curriculum.create(haunted), 100)
    assert curriculum.shares(state)["repo-docstrings"] == pytest.approx(0.340079, abs=1e-6)
    with pytest.raises(StateError, match=r"arms: missing \[\], unknown \[repo-docstrings\]"):
        curriculum.from_json(live, curriculum.to_json(state))
    assert curriculum.shares(curriculum.create(live)) == pytest.approx(
        {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    )


def test_a_missing_arm_is_refused_by_name() -> None:
    _, state = run(curriculum.create(policy(arm("a"), arm("b"))), 2)
    wider = policy(arm("a"), arm("b"), arm("new"))
    with pytest.raises(StateError, match=r"missing \[new\], unknown \[\]"):
        curriculum.from_json(wider, curriculum.to_json(state))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format", 2, r"format 2 of kind 'static', expected format 1"),
        ("kind", "ucb1", r"kind 'ucb1', expected format 1 of kind 'static'"),
        ("extra", 1, r"unknown \[extra\]"),
        ("phases", [], r"phases: expected an object, got \[\]"),
        ("phases.polish", {}, r"phases: missing \[\], unknown \[polish\]"),
        ("phases.main.steps", -1, r"phases main steps: expected a whole number of at least 0"),
        ("phases.main.steps", True, r"got True"),
        ("phases.main.pulls", 99, r"the arms count 20 pulls, the phases 106"),
        ("phases.warm-up.steps", 8, r"8 warm-up and 13 main steps do not fit .*warmup_steps 7"),
        ("phases.warm-up.steps", 6, r"6 warm-up and 13 main steps"),
        ("arms.a.pulls", 1.5, r"arm a pulls: expected a whole number"),
        ("arms.a.ema_loss", math.nan, r"arm a ema_loss: expected a finite number or null, got nan"),
        ("arms.a.ema_reward", "nan", r"arm a ema_reward: expected a finite number"),
        ("arms.b.credit", None, r"arm b credit: expected a whole number"),
        ("arms.b.credit", 12345, r"credits sum to .*, expected 0"),
        ("arms.b.luck", 1, r"arm b: missing \[\], unknown \[luck\]"),
    ],
)
def test_a_damaged_state_is_refused(place: str, value: object, message: str) -> None:
    saved = curriculum.to_json(run(curriculum.create(THREE), 20)[1])
    *path, last = place.split(".")
    target = saved
    for key in path:
        target = target[key]
    target[last] = value
    with pytest.raises(StateError, match=message):
        curriculum.from_json(THREE, saved)


@pytest.mark.parametrize("place", ["kind", "phases.main", "arms.a", "arms.a.credit"])
def test_nothing_missing_is_guessed(place: str) -> None:
    saved = curriculum.to_json(run(curriculum.create(THREE), 20)[1])
    *path, last = place.split(".")
    target = saved
    for key in path:
        target = target[key]
    del target[last]
    with pytest.raises(StateError, match=rf"missing \[{last}\]"):
        curriculum.from_json(THREE, saved)


def test_a_dormant_arm_with_a_past_is_refused() -> None:
    saved = curriculum.to_json(run(curriculum.create(THREE), 3)[1])
    saved["arms"]["c"]["ema_loss"] = 2.0
    with pytest.raises(StateError, match="arm c: dormant in warm-up, yet used"):
        curriculum.from_json(THREE, saved)


@examples
@given(st.lists(st.floats(0.5, 6), min_size=1, max_size=60), st.integers(0, 59))
def test_a_resume_anywhere_equals_never_stopping(losses: list[float], stop: int) -> None:
    straight = rewards(losses, curriculum.create(THREE))
    cut = min(stop, len(losses) - 1)
    before = rewards(losses[: cut + 1], curriculum.create(THREE))[-1]
    after = rewards(losses[cut + 1 :], through_json(before)) or [before]
    assert after[-1] == straight[-1]


@examples
@given(st.integers(1, 80))
def test_counters_agree_at_every_step(steps: int) -> None:
    _, state = run(curriculum.create(THREE), steps)
    pulls = sum(item.pulls for item in state.arms)
    assert pulls == steps == state.warm_up.pulls + state.main.pulls
    assert state.warm_up.steps == min(steps, 7)
    assert sum(state.weights) == SHARE_UNITS
    assert sum(state.credits) == 0
    assert replace(state) == state


# --- purity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [curriculum, curriculum_state, mixture, policies, bandit, projection]
)
def test_decisions_reach_for_nothing_outside(module: object) -> None:
    source = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    allowed = {"__future__", "bisect", "collections", "dataclasses", "decimal", "hashlib"}
    assert imported <= allowed | {"math", "typing"} | {"supervisor"}
