"""From preferences to shares, from shares to whole weights, from weights to picks. Pure.

What may live here: the arithmetic of dividing picks among K arms under caps and floors. It knows
neither arms' names nor policies nor phases; sequences are indexed by arm.

Invariants:
- Shares and weights never leave their bounds; shares sum to 1 within a few ulps, weights to
  SHARE_UNITS exactly.
- Weights and credits are integers, so ranks and machines agree bit for bit.
- A bound means the decimal that was written, not its binary neighbour.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Final

SHARE_UNITS: Final = 1_000_000

# Decimals that sum to 1 on paper may miss it by a few ulps in binary.
_SUM_SLACK: Final = 2.0**-50
# A preference this small beside the largest counts as zero, so that a bound divided by it is
# always finite.
_PREFERENCE_RATIO_MIN: Final = 1e-280


class Infeasible(ValueError):
    """No shares fit the bounds: `bound` is "caps" or "floors", `total` what they sum to."""

    def __init__(self, message: str, bound: str, total: float) -> None:
        super().__init__(message)
        self.bound = bound
        self.total = total


# --- preferences to shares ---


def project(q: Sequence[float], floors: Sequence[float], caps: Sequence[float]) -> list[float]:
    """The shares closest to `q` in relative entropy: p = clip(s * q, floor, cap), sum 1.

    Arms that meet no bound keep their odds; the scale of `q` does not matter. Arms with q = 0 get
    their floors, unless all others are at their caps: then they share the rest evenly. Exact, in
    O(K log K). Raises ValueError for a malformed input and Infeasible if no shares fit.
    """
    _check_projection(q, floors, caps)
    largest = max(q)
    least = largest * _PREFERENCE_RATIO_MIN
    liked = [k for k, value in enumerate(q) if value > least]
    unliked = [k for k, value in enumerate(q) if value <= least]

    fixed = {k: floors[k] for k in unliked}
    free, odds = liked, {k: q[k] / largest for k in liked}
    if math.fsum([*fixed.values(), *(caps[k] for k in liked)]) < 1:
        fixed = {k: caps[k] for k in liked}
        free, odds = unliked, dict.fromkeys(unliked, 1.0)
    filled = fixed | _fill(_rest(1.0, fixed), free, odds, floors, caps)
    return [filled[k] for k in range(len(q))]


def _fill(
    total: float,
    members: Sequence[int],
    odds: dict[int, float],
    floors: Sequence[float],
    caps: Sequence[float],
) -> dict[int, float]:
    """clip(s * odds, floor, cap) for the one s at which these sum to `total`; odds are positive.

    The sum is piecewise linear in s. The bracket between two bends is found by bisection on sums
    computed afresh: a sweep with running differences loses 3e-8 where odds are tiny.
    """
    leaves_floor = {k: floors[k] / odds[k] for k in members}
    meets_cap = {k: caps[k] / odds[k] for k in members}
    bends = sorted({*leaves_floor.values(), *meets_cap.values()})

    def level(s: float) -> float:
        return math.fsum(min(max(s * odds[k], floors[k]), caps[k]) for k in members)

    upper = bisect_left(bends, total, key=level)
    if upper == 0:
        return {k: floors[k] for k in members}
    if upper == len(bends):
        return {k: caps[k] for k in members}
    below, above = bends[upper - 1], bends[upper]
    at_cap = {k: caps[k] for k in members if meets_cap[k] <= below}
    at_floor = {k: floors[k] for k in members if leaves_floor[k] >= above}
    fixed = at_cap | at_floor
    free = [k for k in members if k not in fixed]
    rest, mass = _rest(total, fixed), math.fsum(odds[k] for k in free)
    return fixed | {k: min(max(rest * (odds[k] / mass), floors[k]), caps[k]) for k in free}


def _rest(total: float, fixed: dict[int, float]) -> float:
    return math.fsum([total, *(-share for share in fixed.values())])


def _check_projection(q: Sequence[float], floors: Sequence[float], caps: Sequence[float]) -> None:
    if not q or not len(q) == len(floors) == len(caps):
        raise ValueError(f"{len(q)} preferences, {len(floors)} floors and {len(caps)} caps")
    for k, (value, floor, cap) in enumerate(zip(q, floors, caps, strict=True)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"preference {k} is {value}, expected a finite number of 0 or more")
        if not 0 <= floor <= cap <= 1:
            raise ValueError(f"bounds {k}: expected 0 <= floor {floor} <= cap {cap} <= 1")
    if (total := math.fsum(caps)) < 1 - _SUM_SLACK:
        raise Infeasible(f"the {len(caps)} caps sum to {total:g}, less than 1", "caps", total)
    if (total := math.fsum(floors)) > 1 + _SUM_SLACK:
        raise Infeasible(f"the {len(floors)} floors sum to {total:g}, more than 1", "floors", total)


# --- shares to whole weights ---


def integer_weights(
    shares: Sequence[float], floors: Sequence[float], caps: Sequence[float]
) -> list[int]:
    """`shares` in whole SHARE_UNITS that sum to SHARE_UNITS, by largest remainder (ties: first).

    Floors are first rounded up to a unit and caps down, so rounding cannot leave the bounds.
    Raises Infeasible where no whole weights fit.
    """
    check_feasible(floors, caps)
    lowest, highest = list(map(_floor_units, floors)), list(map(_cap_units, caps))
    exact = [share * SHARE_UNITS for share in shares]
    weights = [
        min(max(math.floor(value), low), high)
        for value, low, high in zip(exact, lowest, highest, strict=True)
    ]
    while missing := SHARE_UNITS - sum(weights):
        unit = 1 if missing > 0 else -1
        limits = highest if missing > 0 else lowest
        movable = [k for k in range(len(weights)) if weights[k] != limits[k]]
        movable.sort(key=lambda k: unit * (weights[k] - exact[k]))
        for k in movable[: abs(missing)]:
            weights[k] += unit
    return weights


def check_feasible(floors: Sequence[float], caps: Sequence[float], where: str = "") -> None:
    """Raises Infeasible unless sum of floors <= 1 <= sum of caps, counted in SHARE_UNITS.

    Floors are rounded up to a unit and caps down, as `integer_weights` does: what passes here can
    be scheduled.
    """
    count = len(floors)
    for floor, cap in zip(floors, caps, strict=True):
        if _floor_units(floor) > _cap_units(cap):
            raise Infeasible(
                f"{where}between floor {floor} and cap {cap} lies no multiple of"
                f" {1 / SHARE_UNITS:.6f}; round both to 6 decimals",
                "floors",
                math.fsum(floors),
            )
    lowest, highest = sum(map(_floor_units, floors)), sum(map(_cap_units, caps))
    if highest < SHARE_UNITS:
        total = highest / SHARE_UNITS
        equal = -(-SHARE_UNITS // count) / SHARE_UNITS
        raise Infeasible(
            f"{where}the caps of its {count} arms sum to {total:g}, less than 1;"
            f" raise caps by {1 - total:g} in all (equal caps: at least {equal} each) or add arms",
            "caps",
            total,
        )
    if lowest > SHARE_UNITS:
        total = lowest / SHARE_UNITS
        raise Infeasible(
            f"{where}the floors of its {count} arms sum to {total:g}, more than 1;"
            f" lower floors by {total - 1:g} in all"
            f" (equal floors: at most {SHARE_UNITS // count / SHARE_UNITS} each)",
            "floors",
            total,
        )


def _floor_units(floor: float) -> int:
    # From the decimal that was written: 0.07 is 70,000 units, though 0.07 * 1e6 is a little more.
    return int((Decimal(repr(floor)) * SHARE_UNITS).to_integral_value(ROUND_CEILING))


def _cap_units(cap: float) -> int:
    return int((Decimal(repr(cap)) * SHARE_UNITS).to_integral_value(ROUND_FLOOR))


# --- shares to picks ---


def pick(credits: Sequence[int], weights: Sequence[int]) -> tuple[int, list[int]]:
    """One draw of smooth weighted round robin: the position picked, and the credits after it.

    Everyone earns their weight, the richest is picked (ties: first) and pays the sum. Whatever the
    weights did over time, a count never exceeds the ceiling of its target.
    """
    earned = [credit + weight for credit, weight in zip(credits, weights, strict=True)]
    picked = max(range(len(earned)), key=earned.__getitem__)
    earned[picked] -= sum(weights)
    return picked, earned
