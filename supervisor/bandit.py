"""What losses say about arms: rewards, averages, confidence, and how much each arm is wanted. Pure.

What may live here: the formulas of the adaptive kinds and the few numbers per arm that they need.
It knows neither names nor bounds nor phases; sequences are indexed by active arm.

    ucb1         every step: ANDREA's reward, a plain mean, a bonus for the seldom pulled
    ducb         every window: scaled improvement, discounted sums, a bonus (Garivier & Moulines,
                 arXiv 0805.3415, windowed)
    softmax_ema  every window: scaled improvement, averaged
    exp3         every window: improvement by its quantiles in [0, 1], multiplied weights. Each arm
                 is seen in each window, so nothing is divided by the chance of a pull (Hedge)

Invariants:
- Every number is finite but an index, which is infinite for an arm that nothing is known of.
- An arm that was not seen keeps its mean; nothing is imputed.
- A first loss is only remembered: there is nothing yet to be better than.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

WINDOWED: Final = ("ducb", "softmax_ema", "exp3")

REWARD_SCALE: Final = 1000.0  # ANDREA's factor, from nats to the size of its bonus
COUNT_MIN: Final = 1e-9  # pulls; below it an arm counts as never seen
SCALE_MIN: Final = 1e-9  # nats per step; below it there is no progress to measure
GATE_NATS: Final = 0.2  # growth of the held-out gap at which an arm earns nothing more
RING_LENGTH: Final = 100  # rewards, of all arms together


@dataclass(frozen=True, slots=True)
class Tuning:
    """The constants of a policy. None stands for what the kind says.

    `confidence` is C, the weight of the bonus; `tau` divides an index before it becomes a
    preference; `gamma` is what a window leaves of the sums before it; `exploration` is the g of
    EXP3: its step, and the share that it and softmax_ema spread evenly where a floor is 0.
    """

    window_pulls: int | None = None
    run_steps_minimum: int | None = None
    run_steps_maximum: int | None = None
    confidence: float | None = None
    tau: float = 0.1
    gamma: float = 0.98
    ema_alpha: float = 0.1
    exploration: float = 0.1
    maximum_epochs: float | None = None
    text_discount: bool = True
    heldout_gate: bool = True


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one arm has shown so far.

    `gain` and `count` are the (discounted) sums of rewards and of the pulls that earned them.
    `value` is the average scaled reward of softmax_ema, or the log-weight of exp3. `baseline` is
    the average window loss in nats, last moved when `observed_step` steps were complete;
    `last_loss` is that window's loss. `gap_start` is the first held-out loss less the loss in
    training, `gate` what the latest such gap leaves of a reward, 0 to 1.
    """

    gain: float = 0.0
    count: float = 0.0
    value: float = 0.0
    baseline: float | None = None
    observed_step: int = 0
    last_loss: float | None = None
    gap_start: float | None = None
    gate: float = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """One arm in a complete window: pulls, and their mean loss in nats, None where it had none.

    `repetition` is the rep-4 of its training text, 0 where it is not to be discounted.
    """

    pulls: int
    loss: float | None
    repetition: float = 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """What the rewards of all arms together are measured by, in nats per step."""

    scale: float | None = None
    ring: tuple[float, ...] = ()


# --- rewards --------------------------------------------------------------------------------------


def averaged(average: float | None, value: float, alpha: float) -> float:
    return value if average is None else average + alpha * (value - average)


def andrea_reward(average: float, loss: float) -> float:
    """max(0, average - loss) * 1000, against the average before this loss. In thousandths of a nat;
    it ranks arms by noise: without any progress it averages about 409 per nat of deviation."""
    return max(0.0, average - loss) * REWARD_SCALE


def improvement(baseline: float, loss: float, steps: int) -> float:
    """Nats per step. An arm that waited long is rewarded for what others taught the model, so the
    difference is divided by the steps since it was last seen."""
    return (baseline - loss) / max(1, steps)


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear between the neighbours in `ordered`, which is not empty."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def quantile_scaled(reward: float, ring: Sequence[float]) -> float:
    """-1 at the 20% quantile of `ring`, 1 at the 80% quantile, clipped (Graves, 1704.03003); 0
    where these do not differ."""
    if not ring:
        return 0.0
    ordered = sorted(ring)
    low, high = quantile(ordered, 0.2), quantile(ordered, 0.8)
    if high - low < SCALE_MIN:
        return 0.0
    return min(1.0, max(-1.0, 2 * (reward - low) / (high - low) - 1))


def tempered(scaled: float, gate: float, repetition: float) -> float:
    """What memorising and repetitive text leave of a gain. A loss is not made smaller."""
    return scaled * gate * (1 - repetition) if scaled > 0 else scaled


def gate(gap: float, gap_start: float) -> float:
    """1 while the held-out loss keeps up with the loss in training, 0 once GATE_NATS behind."""
    return min(1.0, max(0.0, 1 - max(0.0, gap - gap_start) / GATE_NATS))


def gated(learned: Statistics, heldout_loss: float) -> Statistics:
    """After an evaluation. Before the first complete window there is nothing to compare with."""
    if learned.last_loss is None:
        return learned
    gap = heldout_loss - learned.last_loss
    start = gap if learned.gap_start is None else learned.gap_start
    return replace(learned, gap_start=start, gate=gate(gap, start))


# --- learning -------------------------------------------------------------------------------------


def discounted(learned: Statistics, pulls: float, reward: float, gamma: float) -> Statistics:
    """S <- gamma S + n r and N <- gamma N + n."""
    return replace(
        learned, gain=gamma * learned.gain + pulls * reward, count=gamma * learned.count + pulls
    )


def log_weight_step(
    reward: float, exploration: float, arms: int, probability: float = 1.0
) -> float:
    """g x / (p K), what EXP3 adds to a log-weight for a reward in [0, 1]; p = 1 is Hedge."""
    return exploration * (reward / probability) / arms


def close_window(
    kind: str,
    tuning: Tuning,
    learned: Sequence[Statistics],
    windows: Sequence[Window],
    pool: Pool,
    step: int,
) -> tuple[list[Statistics], Pool]:
    """All active arms after a complete window that ended with step `step`."""
    rewards = [
        None
        if window.loss is None or one.baseline is None
        else improvement(one.baseline, window.loss, step - one.observed_step)
        for one, window in zip(learned, windows, strict=True)
    ]
    pool = _pooled(pool, [reward for reward in rewards if reward is not None], tuning.ema_alpha)
    after = []
    for one, window, reward in zip(learned, windows, rewards, strict=True):
        taught = _taught(kind, tuning, one, window, reward, pool, len(learned))
        after.append(taught if window.loss is None else _seen(taught, window.loss, tuning, step))
    if kind == "exp3":
        # Only differences count; the largest stays at 0, so none overflows.
        largest = max(one.value for one in after)
        after = [replace(one, value=one.value - largest) for one in after]
    return after, pool


def _pooled(pool: Pool, rewards: Sequence[float], alpha: float) -> Pool:
    if not rewards:
        return pool
    size = math.fsum(abs(reward) for reward in rewards) / len(rewards)
    return Pool(averaged(pool.scale, size, alpha), (*pool.ring, *rewards)[-RING_LENGTH:])


def _taught(
    kind: str,
    tuning: Tuning,
    learned: Statistics,
    window: Window,
    reward: float | None,
    pool: Pool,
    arms: int,
) -> Statistics:
    if reward is None:
        return discounted(learned, 0, 0.0, tuning.gamma) if kind == "ducb" else learned
    if kind == "exp3":
        scaled = tempered(quantile_scaled(reward, pool.ring), learned.gate, window.repetition)
        step = log_weight_step((1 + scaled) / 2, tuning.exploration, arms)
        return replace(learned, value=learned.value + step)
    scaled = tempered(reward / max(pool.scale or 0.0, SCALE_MIN), learned.gate, window.repetition)
    if kind == "ducb":
        return discounted(learned, window.pulls, scaled, tuning.gamma)
    return replace(learned, value=averaged(learned.value, scaled, tuning.ema_alpha))


def _seen(learned: Statistics, loss: float, tuning: Tuning, step: int) -> Statistics:
    return replace(
        learned,
        baseline=averaged(learned.baseline, loss, tuning.ema_alpha),
        observed_step=step,
        last_loss=loss,
    )


def joining(others: Sequence[Statistics], pulls: float) -> Statistics:
    """An arm that joins `others`: as good as their median, known as if from `pulls` pulls.

    Unknown arms would come in with endless bonuses and push all others to their floors.
    """
    means = [one.gain / one.count for one in others if one.count >= COUNT_MIN]
    value = _median([one.value for one in others])
    if not means:
        return Statistics(value=value)
    return Statistics(gain=_median(means) * pulls, count=pulls, value=value)


def _median(values: Sequence[float]) -> float:
    return quantile(sorted(values), 0.5) if values else 0.0


# --- preferences ----------------------------------------------------------------------------------


def upper_bound(mean: float, count: float, total: float, confidence: float) -> float:
    """mean + C sqrt(max(0, ln N) / n); infinite for an arm that was never seen.

    UCB1 (Auer, Cesa-Bianchi, Fischer 2002) for C = sqrt 2. A discounted total may be below 1.
    """
    if count < COUNT_MIN:
        return math.inf
    return mean + confidence * math.sqrt(max(0.0, math.log(max(total, COUNT_MIN))) / count)


def indices(learned: Sequence[Statistics], confidence: float) -> list[float]:
    """The upper bound of each arm; N is the sum over these arms and over no others."""
    total = math.fsum(one.count for one in learned)
    return [
        upper_bound(one.gain / max(one.count, COUNT_MIN), one.count, total, confidence)
        for one in learned
    ]


def softmax(values: Sequence[float], tau: float) -> list[float]:
    """exp(value / tau) over its sum; infinite values share everything evenly."""
    largest = max(values)
    if largest == math.inf:
        raised = [float(value == math.inf) for value in values]
    else:
        raised = [math.exp((value - largest) / tau) for value in values]
    total = math.fsum(raised)
    return [one / total for one in raised]


def mixed(shares: Sequence[float], exploration: float) -> list[float]:
    """(1 - g) p + g / K: nobody is below g / K."""
    return [(1 - exploration) * share + exploration / len(shares) for share in shares]


def wanted(
    kind: str, tuning: Tuning, confidence: float, learned: Sequence[Statistics], *, explore: bool
) -> list[float]:
    """How much each arm is wanted, beside the most wanted, which has 1.

    `explore`: spread a part evenly, for kinds without a bonus where no floor does it.
    """
    if kind in ("ucb1", "ducb"):
        shares = softmax(indices(learned, confidence), tuning.tau)
    else:
        tau = tuning.tau if kind == "softmax_ema" else 1.0
        shares = softmax([one.value for one in learned], tau)
        shares = mixed(shares, tuning.exploration) if explore else shares
    largest = max(shares)
    return [share / largest for share in shares]


# --- windows and runs -----------------------------------------------------------------------------


def window_required(floors: Sequence[float]) -> int:
    """The fewest pulls in which each of K arms with these floors (all above 0) is picked.

    Smooth weighted round robin gives at least M f - H_K + 1/K of M pulls, whatever came before.
    """
    arms = len(floors)
    harmonic = math.fsum(1 / k for k in range(1, arms + 1))
    return math.floor((harmonic - 1 / arms) / min(floors)) + 1


def epoch_share(epochs: float, round_pulls: float, spent: int, pulls_left: int) -> float:
    """The share of `pulls_left` that takes an arm of `round_pulls` a round no further than `epochs`
    rounds, `spent` pulls of which are gone; 1 where that is no limit."""
    return min(1.0, max(0.0, epochs * round_pulls - spent) / max(1, pulls_left))


def run_length(seed: int, phase: str, number: int, least: int, most: int) -> int:
    """Steps in run `number` of a phase, even over `least` to `most`: a hash, so no generator has
    to be saved. Of 64 bits the remainder is as good as even."""
    if least == most:
        return least
    drawn = hashlib.sha256(f"run:{seed}:{phase}:{number}".encode()).digest()[:8]
    return least + int.from_bytes(drawn, "big") % (most - least + 1)
