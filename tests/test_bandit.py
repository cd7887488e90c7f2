"""The adaptive kinds: formulas, decisions, cohorts, epochs, pivots, and the saved state."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor import bandit, curriculum, mixture
from supervisor.bandit import WINDOWED, Pool, Statistics, Tuning, Window
from supervisor.curriculum import (
    KINDS,
    MAIN,
    WARM_UP,
    ArmPolicy,
    Infeasible,
    Policy,
    PolicyError,
    State,
    StateError,
)
from supervisor.projection import SHARE_UNITS

examples = cases(60)

ADAPTIVE = KINDS[1:]
UNIT_RUNS: dict[str, Any] = {"run_steps_minimum": 1, "run_steps_maximum": 1}


def arm(name: str, weight: float = 1.0, floor: float = 0.0, cap: float = 1.0) -> ArmPolicy:
    return ArmPolicy(name, weight, floor, cap)


def policy(
    *arms: ArmPolicy,
    kind: str = "ducb",
    bounds: str = "share",
    warmup_steps: int = 0,
    warmup_arms: tuple[str, ...] = (),
    **tuning: Any,
) -> Policy:
    return Policy(kind, bounds, warmup_steps, warmup_arms, arms, Tuning(**tuning))


def even(count: int, floor: float = 0.1, **fields: Any) -> Policy:
    return policy(*(arm("abcdefghijklmnop"[k], floor=floor) for k in range(count)), **fields)


class Losses:
    """Losses that fall at a rate per arm, with noise; the same calls give the same losses."""

    def __init__(self, seed: int, falls: Mapping[str, float] | None = None, noise: float = 0.1):
        self.random, self.falls, self.noise = Random(seed), falls or {}, noise
        self.step = 0

    def __call__(self, name: str) -> float:
        self.step += 1
        level = 4.0 - self.falls.get(name, 0.0) * self.step
        return level + self.noise * self.random.gauss(0, 1)


def walk(state: State, steps: int, losses: Losses | None = None) -> Iterator[tuple[str, State]]:
    losses = losses or Losses(0)
    for _ in range(steps):
        name, state = curriculum.next_arm(state)
        state = curriculum.observe(state, name, losses(name))
        yield name, state


def after(state: State, steps: int, losses: Losses | None = None) -> State:
    return ([state] + [now for _, now in walk(state, steps, losses)])[-1]


def through_json(state: State) -> State:
    return curriculum.from_json(state.policy, json.loads(json.dumps(curriculum.to_json(state))))


# --- upper confidence bounds: worked vectors ------------------------------------------------------


def known(mean: float, count: float) -> Statistics:
    return Statistics(gain=mean * count, count=count)


def test_ucb1_indices() -> None:
    means, counts = [0.42, 0.55, 0.30], [40, 50, 10]
    learned = [known(mean, count) for mean, count in zip(means, counts, strict=True)]
    wide = bandit.indices(learned, math.sqrt(2))
    assert wide == pytest.approx([0.899853, 0.979193, 1.259705], abs=5e-7)
    narrow = bandit.indices(learned, 0.5)
    assert narrow == pytest.approx([0.589654, 0.701743, 0.639307], abs=5e-7)
    assert (wide.index(max(wide)), narrow.index(max(narrow))) == (2, 1)
    haunted = [bandit.upper_bound(m, n, 160, 0.5) for m, n in zip(means, counts, strict=True)]
    assert haunted == pytest.approx([0.598101, 0.709298, 0.656201], abs=5e-7)
    assert bandit.indices([*learned[:2], Statistics()], 0.5)[2] == math.inf
    assert bandit.indices([Statistics()] * 3, 0.5) == [math.inf] * 3


def test_a_new_arm_beside_old_ones_has_an_enormous_bonus() -> None:
    assert bandit.upper_bound(0.0, 1, 20_000, 0.5) == pytest.approx(1.573490, abs=5e-7)
    assert bandit.upper_bound(0.0, 2857, 20_000, 0.5) == pytest.approx(0.029438, abs=5e-7)


def test_a_discounted_total_below_one_gives_no_bonus() -> None:
    assert bandit.upper_bound(0.3, 0.2, 0.4, 1.0) == 0.3
    assert bandit.upper_bound(0.3, 0.9e-9, 5.0, 1.0) == math.inf


PULLS = [(0, 1.0), (1, 0.0), (2, 0.5), (0, 0.8), (0, 0.6), (1, 0.9), (0, 0.4), (2, 0.2)]


def test_discounted_ucb_per_pull() -> None:
    learned = [Statistics()] * 3
    for pulled, reward in PULLS:
        learned = [
            bandit.discounted(one, int(k == pulled), reward, 0.9) for k, one in enumerate(learned)
        ]
    counts = [one.count for one in learned]
    assert [one.gain for one in learned] == pytest.approx([1.8005769, 0.729, 0.495245], abs=5e-8)
    assert counts == pytest.approx([2.7633969, 1.341441, 1.59049], abs=5e-8)
    assert math.fsum(counts) == pytest.approx(5.6953279, abs=5e-8)
    means = [one.gain / one.count for one in learned]
    assert means == pytest.approx([0.651581, 0.543445, 0.311379], abs=5e-7)
    found = bandit.indices(learned, 2 * math.sqrt(0.6))  # 2 B sqrt(xi)
    assert found == pytest.approx([1.880758, 2.307656, 1.931586], abs=1e-6)
    pads = [index - mean for index, mean in zip(found, means, strict=True)]
    assert pads == pytest.approx([1.229177, 1.764210, 1.620207], abs=5e-7)


def test_sliding_window_ucb() -> None:
    learned = [
        known(math.fsum(x for j, x in PULLS[-5:] if j == k), 1) for k in range(3)
    ]  # sums first
    counts = [sum(j == k for j, _ in PULLS[-5:]) for k in range(3)]
    assert counts == [3, 1, 1]
    found = [
        bandit.upper_bound(one.gain / n, n, 5, math.sqrt(0.6))
        for one, n in zip(learned, counts, strict=True)
    ]
    assert found == pytest.approx([1.167351, 1.882681, 1.182681], abs=5e-7)


def test_discounted_ucb_per_window() -> None:
    learned = [Statistics(), Statistics()]
    for window in ([(3, 0.2), (1, 0.5)], [(2, 0.1), (2, 0.4)]):
        learned = [
            bandit.discounted(one, n, r, 0.9) for one, (n, r) in zip(learned, window, strict=True)
        ]
    assert [one.gain for one in learned] == pytest.approx([0.74, 1.25])
    assert [one.count for one in learned] == pytest.approx([4.7, 2.9])
    assert bandit.indices(learned, 0.5) == pytest.approx([0.485898, 0.849174], abs=5e-7)


# --- exp3 and softmax: worked vectors -------------------------------------------------------------


def test_exp3_single_pull() -> None:
    weights, gamma = [1.0, 2.0, 1.0], 0.1
    chances = bandit.mixed([weight / 4 for weight in weights], gamma)
    assert chances == pytest.approx([0.258333, 0.483333, 0.258333], abs=5e-7)
    assert 0.6 / chances[1] == pytest.approx(1.241379, abs=5e-7)
    step = bandit.log_weight_step(0.6, gamma, 3, chances[1])
    assert math.exp(step) == pytest.approx(1.042247, abs=5e-7)
    assert 2 * math.exp(step) == pytest.approx(2.084495, abs=1e-6)
    logs = [0.0, math.log(2) + step, 0.0]
    expected = [0.253679, 0.492642, 0.253679]
    assert bandit.mixed(bandit.softmax(logs, 1.0), gamma) == pytest.approx(expected, abs=5e-7)


def test_odm_gibbs_step() -> None:
    epsilon = min(1 / 3, math.sqrt(math.log(3) / (3 * 1000)))
    assert epsilon == pytest.approx(0.019136, abs=5e-7)
    found = bandit.mixed(bandit.softmax([2, 3, 2.5], 1 / 0.05), 3 * epsilon)
    assert found == pytest.approx([0.325512, 0.341220, 0.333268], abs=5e-7)


def test_softmax() -> None:
    expected = [0.785597, 0.039113, 0.175290]
    assert bandit.softmax([0.2, -0.1, 0.05], 0.1) == pytest.approx(expected, abs=5e-7)
    assert bandit.softmax([math.inf, 1.0, math.inf], 0.1) == [0.5, 0.0, 0.5]
    assert bandit.softmax([1e9, -1e9], 0.1) == [1.0, 0.0]


# --- rewards: worked vectors ----------------------------------------------------------------------


def test_improvement_against_the_average_before() -> None:
    average: float | None = None
    found = []
    for loss in (4.0, 3.8, 3.9, 3.5):
        found.append(None if average is None else bandit.improvement(average, loss, 1))
        average = bandit.averaged(average, loss, 0.1)
    assert found == [None, pytest.approx(0.2), pytest.approx(0.08), pytest.approx(0.472)]
    assert average == pytest.approx(3.9248)


def test_steady_progress_earns_its_slope_over_alpha() -> None:
    average, reward = 3.0, 0.0
    for step in range(1, 400):
        reward = bandit.improvement(average, 3.0 - 0.003 * step, 1)
        average = bandit.averaged(average, 3.0 - 0.003 * step, 0.1)
    assert reward == pytest.approx(0.030000, abs=5e-7)


def test_waiting_earns_nothing_once_time_is_counted() -> None:
    """Seen every tenth step, an arm shows ten times the gain of one that is seen at each."""
    average, plain, timely = 3.0, 0.0, 0.0
    for step in range(10, 4000, 10):
        loss = 3.0 - 0.001 * step
        plain = bandit.improvement(average, loss, 1)
        timely = bandit.improvement(average, loss, 10)
        average = bandit.averaged(average, loss, 0.1)
    assert plain == pytest.approx(0.100000, abs=5e-7)
    assert timely == pytest.approx(0.010000, abs=5e-7)


RING = [-0.02, 0, 0.01, 0.03, 0.05, 0.08, 0.10, 0.15, 0.20, 0.40]


def test_rewards_by_their_quantiles() -> None:
    assert bandit.quantile(RING, 0.2) == pytest.approx(0.008)
    assert bandit.quantile(RING, 0.8) == pytest.approx(0.16)
    assert bandit.quantile_scaled(-0.02, RING) == -1
    assert bandit.quantile_scaled(0.05, RING[::-1]) == pytest.approx(-0.447368, abs=5e-7)
    assert bandit.quantile_scaled(0.40, RING) == 1
    assert bandit.quantile_scaled(7.0, [0.1] * 9) == bandit.quantile_scaled(7.0, []) == 0
    assert bandit.quantile([3.0], 0.8) == 3.0


def test_reward_of_the_first_system_ranks_by_noise() -> None:
    """EMA 4.521, loss 4.520: 1.0. Stationary noise of deviation s and no learning: 409 s."""
    assert bandit.andrea_reward(4.521, 4.520) == pytest.approx(1.0)
    assert bandit.averaged(4.521, 4.520, 0.1) == pytest.approx(4.5209)
    assert bandit.andrea_reward(2.0, 5.0) == 0.0
    random, average, total, count = Random(5), 4.0, 0.0, 200_000
    for _ in range(count):
        loss = 4.0 + 0.5 * random.gauss(0, 1)
        total += bandit.andrea_reward(average, loss)
        average = bandit.averaged(average, loss, 0.1)
    assert total / count == pytest.approx(409 * 0.5, rel=0.01)


def test_only_gains_are_tempered() -> None:
    assert bandit.tempered(2.0, 0.5, 0.25) == pytest.approx(0.75)
    assert bandit.tempered(-2.0, 0.5, 0.25) == -2.0
    assert bandit.tempered(2.0, 1.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("gap", "left"), [(0.1, 1.0), (0.3, 1.0), (0.35, 0.75), (0.4, 0.5), (0.5, 0.0), (9.0, 0.0)]
)
def test_the_gate_closes_with_the_gap(gap: float, left: float) -> None:
    assert bandit.gate(gap, 0.3) == pytest.approx(left)


# --- windows, runs, epochs: worked vectors --------------------------------------------------------


def test_windows_are_long_enough_to_see_every_arm() -> None:
    assert bandit.window_required([0.01] * 16) == 332
    assert bandit.window_required([0.02] * 7) == 123
    assert bandit.window_required([0.3]) == 1
    assert bandit.window_required([0.25, 0.5]) == 5  # 4 would be the bound itself
    assert even(7, 0.02).window_pulls(MAIN) == 123
    assert even(7, 0.02, window_pulls=200).window_pulls(MAIN) == 200
    assert even(4, 0.0).window_pulls(MAIN) == bandit.window_required([1 / 16] * 4)
    some = policy(arm("a"), arm("b", floor=0.01))
    assert some.window_pulls(MAIN) == bandit.window_required([0.125, 0.01])


def test_a_relative_floor_promises_what_the_others_leave() -> None:
    relative = policy(
        arm("a", 1.0, 0.5, 9), arm("b", 4.0, 0.0, 2.0), arm("c", 0.5, 1.0, 3.0), bounds="weight"
    )
    assert relative.promised(MAIN) == pytest.approx([0.5 / 3.5, 0.0, 1.0 / 4.0])


def test_epochs_become_shares() -> None:
    sizes = [5, 20, 400, 2000]
    found = [bandit.epoch_share(4, size, 0, 1000) for size in sizes]
    assert found == pytest.approx([0.02, 0.08, 1, 1])
    assert bandit.epoch_share(4, 5, 30, 1000) == 0
    limited = even(4, 0.0, kind="static", maximum_epochs=4.0)
    state = curriculum.create(
        limited, round_pulls=dict(zip("abcd", sizes, strict=True)), steps=1000
    )
    assert list(state.shares) == pytest.approx([0.02, 0.08, 0.45, 0.45])


def test_run_lengths_are_a_hash_of_seed_phase_and_number() -> None:
    drawn = [bandit.run_length(7, MAIN, number, 7, 42) for number in range(3600)]
    assert drawn[:6] == [bandit.run_length(7, MAIN, number, 7, 42) for number in range(6)]
    counts = Counter(drawn)
    assert sorted(counts) == list(range(7, 43))
    assert min(counts.values()) > 60
    assert max(counts.values()) < 140
    assert drawn[:9] != [bandit.run_length(8, MAIN, number, 7, 42) for number in range(9)]
    assert drawn[:9] != [bandit.run_length(7, WARM_UP, number, 7, 42) for number in range(9)]
    assert bandit.run_length(7, MAIN, 5, 1, 1) == 1
    # Another number here would send every resumed run another way.
    assert drawn[:6] == [10, 40, 35, 34, 16, 27]


# --- closing a window -----------------------------------------------------------------------------


def closed(
    kind: str, learned: list[Statistics], losses: list[float | None], step: int, **tuning: Any
) -> tuple[list[Statistics], Pool]:
    windows = [Window(0 if loss is None else 5, loss) for loss in losses]
    return bandit.close_window(kind, Tuning(**tuning), learned, windows, Pool(), step)


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_first_window_is_only_remembered(kind: str) -> None:
    learned, pool = closed(kind, [Statistics()] * 2, [4.0, 3.0], 10)
    assert pool == Pool()
    assert learned == [
        Statistics(baseline=loss, last_loss=loss, observed_step=10) for loss in (4.0, 3.0)
    ]


@pytest.mark.parametrize("kind", WINDOWED)
def test_an_arm_that_was_not_seen_keeps_its_mean(kind: str) -> None:
    seen = Statistics(5.0, 10.0, -0.5, 4.0, 10, 4.0)
    (_, unseen), _ = closed(kind, [replace(seen, value=0.0), seen], [3.9, None], 20)
    assert (unseen.baseline, unseen.observed_step, unseen.last_loss) == (4.0, 10, 4.0)
    assert unseen.gain / unseen.count == pytest.approx(0.5)
    # Only its certainty fades, and exp3 counts from the best arm.
    assert unseen.count == (pytest.approx(9.8) if kind == "ducb" else 10.0)


def test_ducb_learns_scaled_improvement_per_step() -> None:
    before = [Statistics(baseline=4.0, observed_step=10), Statistics(baseline=3.0, observed_step=0)]
    learned, pool = closed("ducb", before, [3.9, 3.1], 20, gamma=0.5)
    assert pool.ring == pytest.approx((0.01, -0.005))
    assert pool.scale == pytest.approx(0.0075)
    assert [one.gain for one in learned] == pytest.approx([5 * 4 / 3, -5 * 2 / 3])
    assert [one.count for one in learned] == [5, 5]
    assert [one.baseline for one in learned] == pytest.approx([3.99, 3.01])
    assert [one.observed_step for one in learned] == [20, 20]


def test_softmax_ema_averages_what_ducb_sums() -> None:
    before = [Statistics(value=1.0, baseline=4.0), Statistics(value=1.0, baseline=3.0)]
    learned, _ = closed("softmax_ema", before, [3.9, 3.1], 10, ema_alpha=0.5)
    assert [one.value for one in learned] == pytest.approx([1.0, 0.0])


def test_exp3_raises_log_weights_and_keeps_the_largest_at_zero() -> None:
    before = [Statistics(baseline=4.0), Statistics(baseline=4.0), Statistics(baseline=4.0)]
    learned, _ = closed("exp3", before, [3.8, 3.9, 4.1], 10, exploration=0.3)
    assert [one.value for one in learned] == pytest.approx(
        [0.0, -0.1 * (1 - (1 + bandit.quantile_scaled(0.01, [0.02, 0.01, -0.01])) / 2), -0.1]
    )


def test_the_pool_of_rewards_has_an_end() -> None:
    pool = Pool()
    learned = [Statistics(baseline=4.0)]
    for step in range(1, 200):
        learned, pool = bandit.close_window(
            "exp3", Tuning(), learned, [Window(1, 4.0 - step / 1000)], pool, step
        )
    assert len(pool.ring) == bandit.RING_LENGTH
    assert pool.scale is not None


@pytest.mark.parametrize("kind", ["ducb", "softmax_ema"])
def test_the_size_of_a_nat_does_not_matter(kind: str) -> None:
    """Rewards are measured by each other, so early and late in a run they count alike."""

    def value(nats: float) -> list[float]:
        before = [Statistics(baseline=4.0), Statistics(baseline=4.0)]
        learned, _ = closed(kind, before, [4.0 - nats, 4.0 + nats / 2], 10)
        return [one.gain + one.value for one in learned]

    assert value(1e-3) == pytest.approx(value(1.0))
    assert value(0.0) == [0.0, 0.0]


# --- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_before_anything_is_known_the_weights_decide(kind: str) -> None:
    state = curriculum.create(
        policy(arm("a", 3, 0.1), arm("b", 1, 0.1), kind=kind, exploration=0.0)
    )
    assert state.shares == pytest.approx((0.75, 0.25))


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_the_arm_that_learns_gets_more_but_no_more_than_its_cap(kind: str) -> None:
    ours = policy(
        arm("fast", 1, 0.1, 0.6), arm("slow", 1, 0.1), arm("idle", 1, 0.1),
        kind=kind, exploration=0.5,
    )  # fmt: skip
    losses = Losses(3, {"fast": 0.001, "slow": 0.0002}, noise=0.001)
    state = after(curriculum.create(ours), 1500, losses)
    shares = curriculum.shares(state)
    assert shares["fast"] == max(shares.values())
    assert shares["fast"] <= 0.6
    assert shares["idle"] >= 0.1
    assert state.arms[0].pulls > 1.15 * state.arms[2].pulls


def test_shares_are_decided_once_a_window_and_once_a_run() -> None:
    windowed = curriculum.create(even(3, 0.1))
    assert windowed.window_pulls == 16
    changes = [
        step for step, (_, state) in enumerate(walk(windowed, 160), 1) if state.window_steps == 0
    ]
    assert changes == list(range(16, 161, 16))
    shares = [state.shares for _, state in walk(windowed, 160)]
    assert all(len(set(shares[k : k + 16])) == 1 for k in range(15, 140, 16))
    assert len(set(shares)) > 3


def test_ucb1_runs_last_as_drawn() -> None:
    state = curriculum.create(even(3, 0.2, kind="ucb1"), seed=11)
    names, states = zip(*walk(state, 2000), strict=True)
    starts = [0] + [k + 1 for k, s in enumerate(states[:-1]) if s.running is None]
    lengths = [b - a for a, b in pairwise(starts)]
    expected = [bandit.run_length(11, MAIN, k, 7, 42) for k in range(len(lengths))]
    assert lengths == expected
    for start, length in zip(starts, lengths, strict=False):
        assert len(set(names[start : start + length])) == 1
    assert states[-1].main.runs == len(starts)
    # What is learned inside a run moves no share before its end.
    assert all(
        one.shares == other.shares for one, other in pairwise(states) if other.running is not None
    )
    # Other seeds, other runs; the same seed, the same.
    again = [name for name, _ in walk(curriculum.create(state.policy, seed=11), 2000)]
    assert list(names) == again
    assert again != [name for name, _ in walk(curriculum.create(state.policy, seed=12), 2000)]


def test_ucb1_serves_the_unknown_first_and_then_the_best_index() -> None:
    ours = even(3, 0.0, kind="ucb1", **UNIT_RUNS)
    # A first loss earns nothing, so each is pulled twice before the three are known.
    names = [name for name, _ in walk(curriculum.create(ours), 6)]
    assert Counter(names) == {"a": 2, "b": 2, "c": 2}
    assert names[:3] == ["a", "b", "c"]
    state = after(curriculum.create(ours), 60)
    indices = bandit.indices([one.learned for one in state.arms], math.sqrt(2))
    best = indices.index(max(indices))
    assert state.shares[best] == max(state.shares)
    assert mixture.preferences(state)[best] == 1.0


def test_ucb1_learns_the_plain_mean_of_the_first_systems_reward() -> None:
    state = curriculum.create(even(1, 0.0, kind="ucb1", **UNIT_RUNS))
    for loss in (4.0, 3.8, 3.9, 3.5):
        _, state = curriculum.next_arm(state)
        state = curriculum.observe(state, "a", loss)
    only = state.arms[0]
    assert only.learned.count == 3
    assert only.learned.gain / 3 == pytest.approx((200 + 80 + 472) / 3)
    assert only.ema_loss == pytest.approx(3.9248)


def test_relative_bounds_raise_and_cut_what_was_learned() -> None:
    """The first system: weights after ranking are raised to their floors, then normalised."""
    ours = policy(
        arm("best", 1.0, 0.0, 5.0), arm("chat", 1.0, 0.8, 5.0), arm("books", 1.0, 0.2, 5.0),
        kind="ucb1", bounds="weight", **UNIT_RUNS,
    )  # fmt: skip
    state = curriculum.create(ours)
    arms = tuple(
        replace(one, learned=known(mean, 1000.0))
        for one, mean in zip(state.arms, (300.0, 100.0, 90.0), strict=True)
    )
    decided = mixture.decided(replace(state, arms=arms))
    assert decided.shares == pytest.approx((0.5, 0.4, 0.1))


def test_losses_in_a_window_are_weighed_by_their_targets() -> None:
    state = curriculum.create(even(1, 0.5, window_pulls=2))
    for loss, targets in ((4.0, 300), (1.0, 100)):
        _, state = curriculum.next_arm(state)
        state = curriculum.observe(state, "a", loss, targets)
    assert state.arms[0].learned.baseline == pytest.approx((4.0 * 300 + 1.0 * 100) / 400)
    assert state.arms[0].targets == 400
    with pytest.raises(ValueError, match=r"arm a: 0 targets, expected at least 1"):
        curriculum.observe(state, "a", 1.0, 0)


def test_an_arm_that_can_never_be_picked_is_not_longed_for() -> None:
    """Its index is infinite for ever; were it counted, nobody else would ever be preferred."""
    ours = policy(arm("a", 1, 0.1), arm("b", 1, 0.1), arm("shut", 1, 0, 0), arm("nil", 0, 0, 1))
    state = after(curriculum.create(ours), 600, Losses(1, {"a": 0.001}, noise=0.001))
    assert [one.pulls > 0 for one in state.arms] == [True, True, False, False]
    assert state.shares[0] > 2 * state.shares[1]


def test_exploration_spreads_only_where_no_floor_does() -> None:
    learned = [Statistics(value=0.0), Statistics(value=-50.0)]
    spread = bandit.wanted("exp3", Tuning(), 0.0, learned, explore=True)
    assert spread == pytest.approx([1.0, 0.05 / 0.95])
    assert bandit.wanted("exp3", Tuning(), 0.0, learned, explore=False)[1] < 1e-20
    state = curriculum.create(even(2, 0.1, kind="exp3"))
    arms = tuple(
        replace(one, learned=value) for one, value in zip(state.arms, learned, strict=True)
    )
    assert mixture.preferences(replace(state, arms=arms))[1] < 1e-20
    free = replace(state, arms=arms, policy=even(2, 0.0, kind="exp3"))
    assert mixture.preferences(free)[1] == pytest.approx(0.05 / 0.95)


# --- repetitive text and the held-out gate --------------------------------------------------------


def test_repetitive_text_earns_less_unless_that_is_switched_off() -> None:
    """Two arms with equal losses; lists are easy to predict and teach a model to repeat."""

    def pulls(**tuning: Any) -> list[int]:
        state = curriculum.create(even(2, 0.1, **tuning), repetition={"b": 0.9})
        for step in range(400):
            name, state = curriculum.next_arm(state)
            state = curriculum.observe(state, name, 4.0 - 0.01 * (step // state.window_pulls))
        return [one.pulls for one in state.arms]

    assert pulls()[0] > 2 * pulls()[1]
    assert pulls(text_discount=False) == pytest.approx([200, 200], abs=20)


@pytest.mark.parametrize("rho", [-0.1, 1.1, math.nan])
def test_a_repetition_that_is_no_share_is_refused(rho: float) -> None:
    with pytest.raises(PolicyError, match=r"arm a: repetition is"):
        curriculum.create(even(2), repetition={"a": rho})


def test_measures_of_an_unknown_arm_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"repetition: no arm is named z"):
        curriculum.create(even(2), repetition={"z": 0.1})
    with pytest.raises(PolicyError, match=r"fingerprints: no arm is named z"):
        curriculum.create(even(2), fingerprints={"z": "x"})


def test_memorising_closes_the_gate() -> None:
    state = after(curriculum.create(even(2, 0.1)), 40, Losses(0, noise=0.0))
    assert {one.learned.last_loss for one in state.arms} == {4.0}
    first = curriculum.evaluated(state, {"a": 4.1, "b": 4.1})
    assert [one.learned.gate for one in first.arms] == [1.0, 1.0]
    assert [one.learned.gap_start for one in first.arms] == pytest.approx([0.1, 0.1])
    later = curriculum.evaluated(first, {"a": 4.2})
    assert [one.learned.gate for one in later.arms] == pytest.approx([0.5, 1.0])
    assert curriculum.evaluated(later, {"a": 4.2}) == later  # twice is once
    assert curriculum.evaluated(later, {"a": 3.0}).arms[0].learned.gate == 1.0
    assert later.shares == state.shares  # from the next decision on
    # What it gains counts half from there on.
    gaining = Losses(0, {"a": 0.01, "b": 0.01}, noise=0.0)
    ahead = after(curriculum.evaluated(later, {"a": 9.0}), 200, gaining)
    assert ahead.arms[0].learned.gain <= 0 < ahead.arms[1].learned.gain


def test_an_evaluation_before_the_first_window_or_switched_off_changes_nothing() -> None:
    state = curriculum.create(even(2))
    assert curriculum.evaluated(state, {"a": 9.0}) == state
    shut = after(curriculum.create(even(2, heldout_gate=False)), 40)
    assert curriculum.evaluated(shut, {"a": 9.0}) == shut


def test_an_evaluation_of_an_unknown_arm_or_no_number_is_refused() -> None:
    state = curriculum.create(even(2))
    with pytest.raises(ValueError, match=r"evaluation: no arm is named zombie"):
        curriculum.evaluated(state, {"a": 1.0, "zombie": 1.0})
    with pytest.raises(ValueError, match=r"arm a: held-out loss nan is not finite"):
        curriculum.evaluated(state, {"a": math.nan})


# --- arms that come late --------------------------------------------------------------------------


def cohort(kind: str = "ducb", cap: float = 0.6) -> Policy:
    """Two arms warm up; three join after 60 steps."""
    arms = [arm(name, floor=0.04, cap=cap) for name in ("a", "b", "x", "y", "z")]
    return policy(*arms, kind=kind, warmup_steps=60, warmup_arms=("a", "b"))


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_a_cohort_takes_no_more_than_its_ramp(kind: str) -> None:
    """Nine unknown arms at once would claim all that their caps allow: 1.08 of the picks."""
    state = after(curriculum.create(cohort(kind)), 60)
    assert (state.phase, state.main.steps) == (MAIN, 0)
    window = state.window_pulls
    for step, (_, now) in enumerate(walk(state, 11 * window, Losses(2)), 1):
        together = math.fsum(now.shares[2:])
        assert together <= min(1.0, 0.3 + 0.07 * (step // window)) + 1e-9
        assert min(now.shares[2:]) >= 0.04 - 1e-12


def test_a_cohort_is_as_free_as_the_others_after_ten_windows() -> None:
    state = after(curriculum.create(cohort(cap=0.9)), 60)
    keen = tuple(
        replace(one, learned=known(mean, 50))
        for one, mean in zip(state.arms, (0.0, 0.0, 9.0, 9.0, 9.0), strict=True)
    )
    state = replace(state, arms=keen)
    found = []
    for windows in range(12):
        steps = replace(state.main, steps=windows * state.window_pulls)
        found.append(math.fsum(mixture.decided(replace(state, main=steps)).shares[2:]))
    assert found[:9] == pytest.approx([0.3 + 0.07 * windows for windows in range(9)], abs=1e-5)
    assert found[9:] == pytest.approx([0.92] * 3, abs=1e-5)  # all but the floors of the others


def test_a_joining_arm_starts_as_the_median_of_the_others() -> None:
    learned = [known(0.2, 100), known(0.6, 50), known(0.9, 30)]
    joined = bandit.joining(learned, 4.0)
    assert (joined.gain / joined.count, joined.count, joined.baseline) == (0.6, 4.0, None)
    assert bandit.joining([Statistics(value=v) for v in (-3.0, -1.0)], 4.0) == Statistics(value=-2)
    state = after(curriculum.create(cohort()), 60, Losses(4, {"a": 0.01}))
    means = [state.arms[k].learned.gain / state.arms[k].learned.count for k in range(5)]
    assert means[2:] == pytest.approx([(means[0] + means[1]) / 2] * 3)
    assert state.arms[2].learned.count == pytest.approx(max(1, 0.04 * state.window_pulls))
    assert [one.joined_step for one in state.arms] == [None, None, 60, 60, 60]


@pytest.mark.parametrize("kind", bandit.WINDOWED)
@pytest.mark.parametrize("windows", [1, 3])
def test_a_window_that_ends_with_the_warm_up_is_learned_from(kind: str, windows: int) -> None:
    """It was thrown away as an open one is; after the only one, nothing at all was known."""
    arms = [arm("a"), arm("b"), arm("x")]
    fields: dict[str, Any] = {"kind": kind, "warmup_arms": ("a", "b"), "window_pulls": 50}
    states = [
        after(curriculum.create(policy(*arms, warmup_steps=steps, **fields)), 50 * windows)
        for steps in (50 * windows, 50 * windows + 1)
    ]
    assert [state.phase for state in states] == [MAIN, WARM_UP]
    ended, goes_on = ([one.learned for one in state.arms[:2]] for state in states)
    assert ended == goes_on
    assert all(one.baseline is not None for one in ended)
    assert states[0].pool == states[1].pool
    assert (states[0].window_steps, states[0].arms[2].joined_step) == (0, 50 * windows)
    assert through_json(states[0]) == states[0]


def test_unequal_floors_keep_a_cohort_within_its_ramp() -> None:
    arms = [arm("a"), arm("x", floor=0.25), arm("y", floor=0.01)]
    state = after(curriculum.create(policy(*arms, warmup_steps=9, warmup_arms=("a",))), 9)
    assert state.shares[1] >= 0.25
    assert math.fsum(state.shares[1:]) <= 0.3 + 1e-9


def test_floors_above_the_ramp_are_met_all_the_same() -> None:
    arms = [arm("a"), arm("x", floor=0.4), arm("y", floor=0.3)]
    state = after(curriculum.create(policy(*arms, warmup_steps=9, warmup_arms=("a",))), 9)
    assert state.shares == pytest.approx((0.3, 0.4, 0.3))


def test_a_floor_finer_than_a_unit_survives_the_ramp() -> None:
    arms = [arm("a"), *(arm(name, floor=0.0999999) for name in "xyz")]
    state = after(curriculum.create(policy(*arms, warmup_steps=9, warmup_arms=("a",))), 9)
    assert sum(state.weights) == SHARE_UNITS


def test_the_static_kind_knows_no_ramp() -> None:
    state = after(curriculum.create(cohort("static")), 60)
    assert state.shares == pytest.approx((0.2,) * 5)


def test_the_ramp_gives_way_where_the_others_cannot_fill_in() -> None:
    """The text of the two that were there is used up in a run that is made longer."""
    arms = [arm(name) for name in "abxy"]
    ours = policy(*arms, warmup_steps=9, warmup_arms=("a", "b"), maximum_epochs=1.0)
    sizes = {"a": 60.0, "b": 60.0, "x": 6000.0, "y": 6000.0}
    state = after(curriculum.create(ours, round_pulls=sizes, steps=100), 9)
    assert math.fsum(state.shares[2:]) == pytest.approx(0.3)
    longer = curriculum.extended(state, sizes, 10_000)
    assert math.fsum(longer.shares[2:]) > 0.98


# --- epochs ---------------------------------------------------------------------------------------

SIZES = {"a": 10.0, "b": 30.0, "c": 900.0}


@pytest.mark.parametrize("kind", KINDS)
def test_no_arm_is_repeated_more_often_than_allowed(kind: str) -> None:
    limited = even(3, 0.05, kind=kind, maximum_epochs=2.5, **UNIT_RUNS)
    state = curriculum.create(limited, round_pulls=SIZES, steps=1000)
    state = after(state, 1000, Losses(1, {"a": 0.01}))
    assert state.arms[0].pulls <= 25
    assert state.arms[1].pulls <= 75


def test_relative_weights_are_limited_by_epochs_too() -> None:
    limited = even(3, 0.05, kind="static", bounds="weight", maximum_epochs=2.5)
    state = curriculum.create(limited, round_pulls=SIZES, steps=1000)
    assert state.shares == pytest.approx((0.025, 0.075, 0.9))


def test_epochs_of_a_locked_arm_count_from_when_it_opens() -> None:
    limited = even(
        3, 0.0, kind="static", warmup_steps=500, warmup_arms=("b", "c"), maximum_epochs=2.0
    )
    state = curriculum.create(limited, round_pulls=SIZES, steps=1000)
    assert [one.source.ceiling for one in state.arms] == pytest.approx([0.04, 0.06, 1.0])


def test_too_little_text_for_the_run_is_refused_before_it_starts() -> None:
    limited = even(2, 0.0, maximum_epochs=4.0)
    with pytest.raises(Infeasible) as refusal:
        curriculum.create(limited, round_pulls={"a": 100, "b": 100}, steps=1000)
    assert str(refusal.value) == (
        "policy.maximum_epochs is 4, which leaves room for 800 of the 1000 steps to come (phase"
        " main; steps left of arm a 400, b 400): raise it, add text to these arms or other arms, or"
        " train for fewer steps"
    )
    fewer = curriculum.create(limited, round_pulls={"a": 100, "b": 100}, steps=800)
    assert fewer.shares == (0.5, 0.5)
    warm = even(2, 0.0, maximum_epochs=4.0, warmup_steps=10, warmup_arms=("a",))
    with pytest.raises(Infeasible, match=r"400 of the 1000 .*phase warm-up; .* a 400\)"):
        curriculum.create(warm, round_pulls={"a": 100, "b": 1e6}, steps=1000)


def test_epochs_need_sizes() -> None:
    limited = even(2, 0.0, maximum_epochs=4.0)
    with pytest.raises(PolicyError, match=r"maximum_epochs is 4, but the size of a, b is not"):
        curriculum.create(limited)
    with pytest.raises(PolicyError, match=r"the size of the run is not known"):
        curriculum.create(limited, round_pulls={"a": 1, "b": 1})


def test_a_longer_run_shares_what_is_left_anew() -> None:
    limited = even(2, 0.0, kind="static", maximum_epochs=1.0)
    sizes = {"a": 100.0, "b": 5000.0}
    state = after(curriculum.create(limited, round_pulls=sizes, steps=1000), 500)
    assert state.arms[0].pulls == 50
    longer = curriculum.extended(state, sizes, 2000)
    assert longer.shares == pytest.approx((0.025, 0.975))
    assert longer.arms[0].pulls == 50
    with pytest.raises(Infeasible, match=r"room for 4599 of the 20000 steps .* a 50, b 4550\)"):
        curriculum.extended(state, sizes, 20_000)
    free = curriculum.create(even(2))
    assert curriculum.extended(free, {}, 5) == free


# --- pivots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_pivot_begins_anew_and_lists_what_left(kind: str) -> None:
    old = after(curriculum.create(even(3, 0.1, kind=kind), seed=5), 300, Losses(1))
    wanted = policy(arm("c", 2, 0.1), arm("new", 1, 0.1), kind=kind)
    new = curriculum.pivoted(old, wanted)
    fresh = curriculum.create(wanted, seed=5)
    sources = [one.source for one in new.arms]
    assert (sources[0].pulls, sources[0].targets) == (old.arms[2].pulls, old.arms[2].targets)
    assert (sources[1].pulls, sources[1].targets) == (0, 0)
    assert [(gone.name, gone.pulls) for gone in new.retired] == [
        ("a", old.arms[0].pulls),
        ("b", old.arms[1].pulls),
    ]
    # Nothing else differs from a state without a past, and nothing that is drawn does.
    assert replace(new, arms=fresh.arms, retired=()) == fresh
    assert [name for name, _ in walk(new, 300)] == [name for name, _ in walk(fresh, 300)]
    assert through_json(new) == new


def test_an_arm_that_comes_back_keeps_its_lifetime() -> None:
    first = after(curriculum.create(even(2, kind="static")), 10)
    second = after(curriculum.pivoted(first, policy(arm("a"), kind="static")), 7)
    assert second.retired == (curriculum.Retired("b", None, 5, 5),)
    third = curriculum.pivoted(second, even(2, kind="static"))
    assert [one.source.pulls for one in third.arms] == [12, 5]
    assert third.retired == ()
    assert through_json(third) == third


def test_other_text_under_an_old_name_is_another_arm() -> None:
    first = after(curriculum.create(even(1), fingerprints={"a": "one"}), 10)
    second = curriculum.pivoted(first, even(1), fingerprints={"a": "two"})
    assert second.arms[0].source == curriculum.Source(fingerprint="two")
    assert second.retired == (curriculum.Retired("a", "one", 10, 10),)
    assert through_json(second) == second
    same = curriculum.pivoted(first, even(1), fingerprints={"a": "one"})
    assert same.arms[0].source == curriculum.Source(fingerprint="one", pulls=10, targets=10)
    assert same.retired == ()


def test_epochs_before_a_pivot_count() -> None:
    first = after(curriculum.create(even(2, kind="static")), 100)
    limited = even(2, 0.05, kind="static", maximum_epochs=1.0)
    second = curriculum.pivoted(first, limited, round_pulls={"a": 50, "b": 9000}, steps=500)
    assert second.shares == (0.0, 1.0)
    assert {name for name, _ in walk(second, 100)} == {"b"}
    assert through_json(second) == second


def test_an_arm_without_epochs_left_is_not_longed_for() -> None:
    first = after(curriculum.create(even(3, kind="static")), 150)
    limited = even(3, 0.05, maximum_epochs=1.0)
    sizes = {"a": 50, "b": 9000, "c": 9000}
    second = curriculum.pivoted(first, limited, round_pulls=sizes, steps=500)
    second = after(second, 600, Losses(1, {"b": 0.001}, noise=0.001))
    assert second.arms[0].pulls == 0
    assert second.shares[1] > 2 * second.shares[2]


def test_a_pivot_to_what_cannot_be_carried_out_is_refused() -> None:
    old = after(curriculum.create(even(2)), 20)
    with pytest.raises(Infeasible, match=r"caps of its 1 arms"):
        curriculum.pivoted(old, policy(arm("a", cap=0.5)))
    with pytest.raises(PolicyError, match=r"repetition: no arm is named b"):
        curriculum.pivoted(old, policy(arm("a")), repetition={"b": 0.1})


def test_zombie_pulls_turn_a_decision_and_cannot_be_loaded() -> None:
    """400 pulls of an arm that no longer exists, summed into N, flip the choice of two others."""
    live = [known(0.50, 20), known(0.40, 10)]
    honest = bandit.indices(live, 0.5)
    assert honest == pytest.approx([0.706192, 0.691599], abs=5e-7)
    haunted = [bandit.upper_bound(m, n, 430, 0.5) for m, n in ((0.50, 20), (0.40, 10))]
    assert haunted == pytest.approx([0.775313, 0.789352], abs=5e-7)
    assert (honest.index(max(honest)), haunted.index(max(haunted))) == (0, 1)

    state = after(curriculum.create(even(2, kind="ucb1")), 50)
    saved = curriculum.to_json(state)
    saved["arms"]["repo-docstrings"] = dict(saved["arms"]["a"], pulls=400)
    with pytest.raises(StateError, match=r"arms: missing \[\], unknown \[repo-docstrings\]"):
        curriculum.from_json(state.policy, saved)


def test_what_is_retired_weighs_nothing() -> None:
    plain = after(curriculum.create(even(2, kind="ucb1")), 200)
    ghosts = (curriculum.Retired("repo-docstrings", None, 10**9, 10**12),)
    haunted = replace(plain, retired=ghosts)
    drawn = list(walk(haunted, 300))
    assert [name for name, _ in drawn] == [name for name, _ in walk(plain, 300)]
    assert drawn[-1][1].retired == ghosts


# --- checks of a policy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"tau": 0.0}, r"policy\.tau is 0\.0, expected a number above 0"),
        ({"tau": math.nan}, r"policy\.tau is nan"),
        ({"tau": math.inf}, r"policy\.tau is inf"),
        ({"gamma": 1.5}, r"policy\.gamma is 1\.5, expected a number above 0 and at most 1"),
        ({"gamma": 0.0}, r"policy\.gamma is 0\.0"),
        ({"ema_alpha": 0.0}, r"policy\.ema_alpha is 0\.0"),
        ({"exploration": -0.1}, r"policy\.exploration is -0\.1, expected a number of at least 0"),
        ({"confidence": -1.0}, r"policy\.confidence is -1\.0"),
        ({"maximum_epochs": 0.0}, r"policy\.maximum_epochs is 0\.0, expected a number above 0"),
        ({"window_pulls": 0}, r"policy\.window_pulls is 0"),
        ({"run_steps_minimum": 0}, r"policy\.run_steps_minimum is 0"),
        ({"run_steps_minimum": 9, "run_steps_maximum": 8}, r"minimum is 9, above .*maximum 8"),
        ({"run_steps_minimum": 2}, r"run_steps_minimum is 2, above policy\.run_steps_maximum 1"),
        ({"window_pulls": 15}, r"window_pulls is 15; .* phase main it takes 16 pulls"),
    ],
)
def test_constants_out_of_range_are_refused(tuning: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        curriculum.create(even(3, 0.1, **tuning))


def test_short_windows_are_fine_where_nothing_was_promised() -> None:
    assert curriculum.create(even(3, 0.0, window_pulls=2)).window_pulls == 2
    assert curriculum.create(even(3, 0.1, window_pulls=2, kind="static")).phase == MAIN
    warm = {"warmup_steps": 5, "warmup_arms": ("a",)}
    with pytest.raises(PolicyError, match="phase main it takes 16 pulls"):
        curriculum.create(even(3, 0.1, window_pulls=15, **warm))


def test_a_kind_brings_its_own_constants() -> None:
    assert even(2, kind="ucb1").run_steps == (7, 42)
    assert even(2, kind="ucb1", run_steps_maximum=9).run_steps == (7, 9)
    assert even(2, kind="ducb").run_steps == (1, 1)
    assert even(2, kind="ucb1").confidence == math.sqrt(2)
    assert even(2, kind="ducb").confidence == 2 * math.sqrt(0.6)
    assert even(2, kind="ducb", confidence=0.0).confidence == 0.0


def test_warned_of_an_arm_that_cannot_be_spared() -> None:
    arms = [arm("a", cap=0.5), arm("b", cap=0.3), arm("c", cap=0.3), arm("d", cap=0.3)]
    (warning,) = curriculum.fragile_arms(policy(*arms))
    assert warning.startswith("phase main: without arm a the caps of the others sum to 0.9, less")
    warm = policy(*arms, arm("e"), warmup_steps=3, warmup_arms=("a", "b", "c"))
    assert [text.split(" the caps")[0] for text in curriculum.fragile_arms(warm)] == [
        "phase warm-up: without arm a",
        "phase warm-up: without arm b",
        "phase warm-up: without arm c",
    ]
    assert curriculum.fragile_arms(policy(arm("a"))) == []
    assert curriculum.fragile_arms(policy(*arms, bounds="weight")) == []
    hundredths = [arm("a", cap=0.01), arm("b", cap=0.29), arm("c", cap=0.7), arm("d", cap=0.01)]
    assert math.fsum([0.01, 0.29, 0.7]) < 1  # in binary, and not on paper
    without = [text.split()[4] for text in curriculum.fragile_arms(policy(*hundredths))]
    assert without == ["b", "c"]


# --- saved state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fc63_the_whole_mixture_state_is_in_the_checkpoint(kind: str) -> None:
    """Weights, reward history and generator of a dynamic mixture were not in the checkpoint, so a
    resumed run trained on another mixture (eth-easl/mixtera PR 183,
    foundation-model-stack/fms-acceleration PR 155). Everything comes back, in the middle of a run
    of one arm and of a window too, and the next 1,000 draws are equal."""
    arms = [arm("a", 2, 0.05), arm("b", 1, 0.05, 0.5), arm("c", 1, 0.05), arm("d", 1, 0.05)]
    ours = policy(*arms, kind=kind, warmup_steps=100, warmup_arms=("a", "b"))
    falls = {"a": 0.001, "c": 0.002}
    state = after(curriculum.create(ours, seed=9, repetition={"c": 0.3}), 437, Losses(1, falls))
    state = curriculum.evaluated(state, {"a": 4.0, "b": 4.5})
    saved = json.loads(json.dumps(curriculum.to_json(state)))
    resumed = curriculum.from_json(ours, saved)
    assert resumed == state
    assert curriculum.to_json(resumed) == saved
    straight = list(walk(state, 1000, Losses(2, falls)))
    assert list(walk(resumed, 1000, Losses(2, falls))) == straight
    assert len({name for name, _ in straight}) == 4


def forged(place: str, value: object, kind: str = "ducb", steps: int = 70) -> tuple[Policy, Any]:
    ours = cohort(kind)
    saved = curriculum.to_json(after(curriculum.create(ours), steps))
    *path, last = place.split(".")
    target = saved
    for key in path:
        target = target[key]
    target[last] = value
    return ours, saved


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("kind", "exp3", r"of kind 'exp3', expected format 1 of kind 'ducb'"),
        ("kind", 5, r"kind: expected text, got 5"),
        ("seed", -1, r"seed: expected a whole number of at least 0"),
        ("window_steps", 3, r"the arms count 10 window steps, not 3"),
        ("pool.scale", math.inf, r"pool scale: expected a finite number, got inf"),
        ("pool.ring", {}, r"pool ring: expected a list, got \{\}"),
        ("pool.ring", [0.1, math.nan], r"pool ring\[1\]: expected a finite number, got nan"),
        ("pool.ring", [0.0] * 101, r"pool ring: 101 values, not 100"),
        ("pool.extra", 0, r"pool: missing \[\], unknown \[extra\]"),
        ("run.arm", "zombie", r"run arm: 'zombie' is no arm of the policy"),
        ("run.arm", "a", r"run: 0 left, of an arm that cannot have a run"),
        ("run.left", 4, r"run: 4 left, of an arm that cannot have a run"),
        ("arms.a.learned.gain", math.inf, r"arm a learned gain: expected a finite number, got inf"),
        ("arms.a.learned.count", -1.0, r"arm a learned count: expected a number of at least 0"),
        ("arms.a.learned.gate", 1.5, r"arm a learned gate: expected a number from 0 to 1"),
        ("arms.a.learned.luck", 1, r"arm a learned: missing \[\], unknown \[luck\]"),
        ("arms.a.learned", None, r"arm a learned: expected an object, got None"),
        ("arms.a.source.repetition", math.nan, r"arm a source repetition: expected a finite"),
        ("arms.a.source.fingerprint", "", r"arm a source fingerprint: expected text, got ''"),
        ("arms.a.source.pulls", 0.5, r"arm a source pulls: expected a whole number"),
        ("arms.a.resting", True, r"arm a: missing \[\], unknown \[resting\]"),
        ("arms.a.joined_step", "x", r"arm a joined_step: expected a whole number"),
        ("arms.a.weight", 999_999, r"weights sum to .*, expected 1000000"),
        ("arms.a.share", 0.9999, r"shares sum to .*, expected 1"),
        ("arms.zombie", {}, r"arms: missing \[\], unknown \[zombie\]"),
        ("retired", None, r"retired: expected a list, got None"),
        ("retired", [{"name": "x"}], r"retired\[0\]: missing \[fingerprint, pulls, targets\]"),
    ],
)
def test_a_damaged_adaptive_state_is_refused(place: str, value: object, message: str) -> None:
    ours, saved = forged(place, value)
    with pytest.raises(StateError, match=message):
        curriculum.from_json(ours, saved)


def test_shares_that_the_policy_forbids_are_refused() -> None:
    state = after(curriculum.create(even(2, 0.1)), 20)
    saved = curriculum.to_json(state)
    for name, weight in (("a", 50_000), ("b", 950_000)):
        saved["arms"][name] |= {"weight": weight, "share": weight / 1e6}
    with pytest.raises(StateError, match=r"arm a share: 0\.05 is not from 0\.1 to 1\.0"):
        curriculum.from_json(state.policy, saved)
    for name, weight in (("a", 300_000), ("b", 700_000)):
        saved["arms"][name] |= {"weight": weight, "share": 0.5}
    with pytest.raises(StateError, match=r"arm a weight: 300000 is not 0\.5 in whole"):
        curriculum.from_json(state.policy, saved)


@pytest.mark.parametrize(
    "place", ["seed", "pool", "window_steps", "run.left", "arms.x.learned.gain", "arms.x.source"]
)
def test_nothing_missing_is_guessed(place: str) -> None:
    ours, saved = forged(place, None)
    *path, last = place.split(".")
    target = saved
    for key in path:
        target = target[key]
    del target[last]
    with pytest.raises(StateError, match=rf"missing \[{last}\]"):
        curriculum.from_json(ours, saved)


def test_a_run_longer_than_any_is_refused() -> None:
    state = curriculum.create(even(2, kind="ucb1"))
    _, state = curriculum.next_arm(state)
    saved = curriculum.to_json(state)
    assert curriculum.from_json(state.policy, saved) == state
    saved["run"]["left"] = 42
    with pytest.raises(StateError, match=r"run: 42 left, runs last 42"):
        curriculum.from_json(state.policy, saved)


def test_a_retired_arm_that_is_configured_or_listed_twice_is_refused() -> None:
    state = curriculum.create(even(2))
    saved = curriculum.to_json(state)
    gone = {"name": "gone", "fingerprint": None, "pulls": 3, "targets": 4}
    saved["retired"] = [gone]
    assert curriculum.from_json(state.policy, saved).retired[0].targets == 4
    for bad in ([gone, gone], [gone | {"name": "a"}]):
        saved["retired"] = bad
        with pytest.raises(StateError, match="retired: lists an arm twice, or one that is conf"):
            curriculum.from_json(state.policy, saved)


def test_a_state_of_an_earlier_version_is_read() -> None:
    state = after(curriculum.create(even(2)), 20)
    saved = curriculum.to_json(state)
    for one in saved["arms"].values():
        one["resting"] = False
    assert curriculum.from_json(state.policy, saved) == state


def test_a_locked_arm_with_a_past_is_refused() -> None:
    for place, value in (
        ("arms.x.learned.gain", 1.0),
        ("arms.x.joined_step", 5),
        ("arms.x.targets", 9),
    ):
        ours, saved = forged(place, value, steps=20)
        with pytest.raises(StateError, match="arm x: dormant in warm-up, yet used"):
            curriculum.from_json(ours, saved)


# --- properties -----------------------------------------------------------------------------------


@st.composite
def policies(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = KINDS,
    floor_min: int = 0,
    unit_runs: bool = True,
    warm_up: bool = False,
) -> Policy:
    """Feasible policies with bounds in thousandths; those that warm up can fill the whole."""
    count = draw(st.integers(2, 7))
    warm = draw(st.integers(1, count)) if warm_up else count
    floors = [draw(st.integers(floor_min, max(floor_min, 900 // count))) for _ in range(count)]
    caps = [max(low, draw(st.integers(50, 1000))) for low in floors]
    for position in range(warm):
        if sum(caps[:warm]) < 1000:
            caps[position] = min(1000, caps[position] + 1000 - sum(caps[:warm]))
    weights = [draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in range(count)]
    return policy(
        *(arm("abcdefg"[k], weights[k], floors[k] / 1000, caps[k] / 1000) for k in range(count)),
        kind=draw(st.sampled_from(kinds)),
        warmup_steps=draw(st.integers(1, 60)) if warm_up else 0,
        warmup_arms=tuple("abcdefg"[:warm]),
        **(UNIT_RUNS if unit_runs else {}),
    )


falls = st.dictionaries(st.sampled_from("abcdefg"), st.floats(-0.01, 0.01))


@cases(1_000)
@given(policies(), st.integers(0, 1000), falls)
def test_bounds_hold_on_counts_under_every_kind(
    ours: Policy, seed: int, slopes: dict[str, float]
) -> None:
    state = curriculum.create(ours, seed=seed)
    arms = len(ours.arms)
    slack = math.fsum(1 / k for k in range(1, arms + 1)) - 1
    for step, (_, now) in enumerate(walk(state, 250, Losses(seed, slopes)), 1):
        assert abs(math.fsum(now.shares) - 1) < 1e-12
        assert sum(now.credits) == 0
        for bounds, kept in zip(ours.arms, now.arms, strict=True):
            assert kept.pulls <= -(-round(bounds.cap * 1000) * step // 1000)
            assert kept.pulls >= bounds.floor * step - slack - 1e-9


@cases(1_000)
@given(policies(kinds=WINDOWED, floor_min=10), st.integers(0, 1000), falls)
def test_every_window_sees_every_arm(ours: Policy, seed: int, slopes: dict[str, float]) -> None:
    state = curriculum.create(ours)
    window = state.window_pulls
    assert window == bandit.window_required([one.floor for one in ours.arms])
    names = [name for name, _ in walk(state, 5 * window, Losses(seed, slopes))]
    for start in range(0, 5 * window, window):
        assert len(set(names[start : start + window])) == len(ours.arms)


@cases(1_000)
@given(policies(unit_runs=False, warm_up=True), st.integers(0, 1000), falls)
def test_locked_arms_are_never_pulled_before_the_warm_up_ends(
    ours: Policy, seed: int, slopes: dict[str, float]
) -> None:
    for step, (name, now) in enumerate(
        walk(curriculum.create(ours, seed=seed), 150, Losses(seed, slopes)), 1
    ):
        assert step > ours.warmup_steps or name in ours.warmup_arms
        assert now.warm_up.steps == min(step, ours.warmup_steps)
        assert now.steps == sum(one.pulls for one in now.arms) == step


@examples
@given(
    policies(unit_runs=False, warm_up=True),
    st.integers(0, 1000),
    falls,
    st.integers(0, 120),
    st.integers(0, 120),
)
def test_a_run_resumed_twice_is_the_run_that_never_stopped(
    ours: Policy, seed: int, slopes: dict[str, float], first: int, second: int
) -> None:
    straight = list(walk(curriculum.create(ours, seed=seed), 300, Losses(seed, slopes)))
    losses, drawn, state = Losses(seed, slopes), [], curriculum.create(ours, seed=seed)
    for steps in (first, second, 300 - first - second):
        state = through_json(state)
        drawn += list(walk(state, steps, losses))
        state = drawn[-1][1] if drawn else state
    assert drawn == straight


@examples
@given(policies(unit_runs=False), st.integers(0, 1000), falls, st.integers(1, 200))
def test_reordering_a_policy_is_no_new_state(
    ours: Policy, seed: int, slopes: dict[str, float], steps: int
) -> None:
    """A saved state is keyed by name: under the same arms in another order each finds its own."""
    state = after(curriculum.create(ours), steps, Losses(seed, slopes))
    turned = replace(ours, arms=ours.arms[::-1])
    loaded = curriculum.from_json(turned, curriculum.to_json(state))
    assert loaded.arms == state.arms[::-1]
    assert loaded.credits == state.credits[::-1]
    assert curriculum.shares(loaded) == curriculum.shares(state)


@examples
@given(policies(unit_runs=False, kinds=("ucb1",)), st.integers(0, 1000), falls)
def test_longer_runs_pass_a_cap_by_less_than_one_run(
    ours: Policy, seed: int, slopes: dict[str, float]
) -> None:
    longest = ours.run_steps[1]
    state = curriculum.create(ours, seed=seed)
    for step, (_, now) in enumerate(walk(state, 400, Losses(seed, slopes)), 1):
        for bounds, kept in zip(ours.arms, now.arms, strict=True):
            assert kept.pulls < bounds.cap * step + longest


def test_runs_of_one_arm_are_not_broken_by_a_window() -> None:
    ours = even(3, 0.0, run_steps_minimum=5, run_steps_maximum=5, window_pulls=7)
    names = [name for name, _ in walk(curriculum.create(ours), 300)]
    lengths = [len(list(group)) for _, group in groupby(names)]
    assert all(length % 5 == 0 for length in lengths)
    assert len(set(names)) == 3
