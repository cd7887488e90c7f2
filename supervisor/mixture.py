"""The decision: from what a state knows to the shares of its active arms. Pure.

What may live here: everything between preferences and whole weights, and what bounds them: caps and
floors, the epochs an arm may be repeated, and the ramp of arms that come late.

    preferences(state)  what the policy kind would like, any scale           (supervisor.bandit)
    -> project          shares that sum to 1 within caps and floors      (supervisor.projection)
    -> integer_weights  the same in whole units, equal on every machine  (supervisor.projection)

Invariants:
- Only active arms are looked at, and only they get a share.
- Shares are within the bounds of the policy, or there is no decision (Infeasible).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from supervisor import bandit
from supervisor.curriculum_state import ArmState, State
from supervisor.policy import MAIN, PolicyError
from supervisor.projection import (
    SHARE_UNITS,
    Infeasible,
    check_feasible,
    integer_weights,
    project,
)

# Arms that join others share at most RAMP_START of the picks at first, and are as free as the
# others after RAMP_WINDOWS windows.
RAMP_START: Final = 0.3
RAMP_WINDOWS: Final = 10


def decided(state: State) -> State:
    """With shares and weights from what is known now. Raises Infeasible."""
    policy, active = state.policy, state.active
    floors, caps = _limits(state, active, _ceilings(state, active))
    check_feasible(floors, caps, f"phase {state.phase}: ")
    desired = preferences(state)
    if policy.bounds == "weight":
        arms = [policy.arms[position] for position in active]
        desired = [min(max(q, arm.floor), arm.cap) for q, arm in zip(desired, arms, strict=True)]
    exact = project(desired, floors, caps)
    whole = integer_weights(exact, floors, caps)
    shares, weights = [0.0] * len(policy.arms), [0] * len(policy.arms)
    for position, share, weight in zip(active, exact, whole, strict=True):
        shares[position], weights[position] = share, weight
    return replace(state, shares=tuple(shares), weights=tuple(weights))


def shares(state: State) -> dict[str, float]:
    """Target share of the picks per arm in the current phase; dormant arms have 0."""
    return {arm.name: share for arm, share in zip(state.policy.arms, state.shares, strict=True)}


def preferences(state: State) -> list[float]:
    """How much the policy kind wants each active arm, in the order of `State.active`.

    Any scale; nonnegative. For "static" these are the configured weights; the others multiply the
    weights by what they learned, which is 1 for the arm they like best.
    """
    policy, active = state.policy, state.active
    weights = [policy.arms[position].weight for position in active]
    if policy.kind == "static":
        return weights
    # An arm that may never be picked stays unknown for ever, and nobody should long for it.
    open_to = [
        place
        for place, position in enumerate(active)
        if weights[place] and policy.arms[position].cap and state.arms[position].source.ceiling
    ]
    if not open_to:
        return weights
    liked = bandit.wanted(
        policy.kind,
        policy.tuning,
        policy.confidence,
        [state.arms[active[place]].learned for place in open_to],
        explore=not all(policy.arms[active[place]].floor for place in open_to),
    )
    found = [0.0] * len(active)
    for place, factor in zip(open_to, liked, strict=True):
        found[place] = weights[place] * factor
    return found


# --- bounds ---------------------------------------------------------------------------------------


def _limits(
    state: State, active: Sequence[int], ceilings: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Floors and caps of the shares. Relative weights are bounded before they become shares."""
    arms = [state.policy.arms[position] for position in active]
    if state.policy.bounds == "weight":
        caps = [ceiling if arm.cap else 0.0 for arm, ceiling in zip(arms, ceilings, strict=True)]
        return [0.0] * len(arms), caps
    caps = [min(arm.cap, ceiling) for arm, ceiling in zip(arms, ceilings, strict=True)]
    return [min(arm.floor, cap) for arm, cap in zip(arms, caps, strict=True)], caps


def _ceilings(state: State, active: Sequence[int]) -> list[float]:
    """What else limits shares: epochs, and for some windows that arms came late.

    Those that joined take at most RAMP_START together at first, or what their floors sum to:
    with nothing known of them they would claim all that their caps allow.
    """
    arms = [state.arms[position] for position in active]
    ceilings = [arm.source.ceiling for arm in arms]
    new = [place for place, arm in enumerate(arms) if _is_late(state, arm)]
    if not new:
        return ceilings
    latest = max(arms[place].joined_step or 0 for place in new)
    windows = (state.steps - latest) // state.window_pulls
    most = RAMP_START + (1 - RAMP_START) * windows / RAMP_WINDOWS
    floors, _ = _limits(state, active, ceilings)
    spare = max(0.0, most - math.fsum(floors[place] for place in new)) / len(new)
    ramped = list(ceilings)
    for place in new:
        ramped[place] = min(ceilings[place], _on_grid(floors[place] + spare))
    # Where the others cannot fill the rest, late is as good as early.
    filled = sum(map(_units, _limits(state, active, ramped)[1]))
    return ramped if filled >= SHARE_UNITS else ceilings


def _is_late(state: State, arm: ArmState) -> bool:
    ramp_steps = RAMP_WINDOWS * state.window_pulls
    return arm.joined_step is not None and state.steps - arm.joined_step < ramp_steps


def planned(state: State, round_pulls: Mapping[str, float], steps: int | None) -> State:
    """With the share of the `steps` to come that `maximum_epochs` leaves each arm.

    Raises PolicyError where a size is not known, Infeasible where the arms do not hold so many.
    """
    policy, epochs = state.policy, state.policy.tuning.maximum_epochs
    if epochs is None:
        return state
    missing = [name for name in policy.names if name not in round_pulls]
    if missing or steps is None:
        raise PolicyError(
            f"policy.maximum_epochs is {epochs:g}, but the size of"
            f" {', '.join(missing) or 'the run'} is not known; leave it out, or give the pulls of"
            " one pass over each arm and the steps to come"
        )
    limited = _limited(state, epochs, round_pulls, steps)
    for phase in dict.fromkeys((state.phase, MAIN)):
        try:
            _check_filled(limited, phase)
        except Infeasible as error:
            told = _too_long(limited, epochs, round_pulls, steps, phase)
            raise Infeasible(told, error.bound, error.total) from error
    return limited


def _limited(state: State, epochs: float, round_pulls: Mapping[str, float], steps: int) -> State:
    """With the ceilings that `epochs` and `steps` to come make, whether or not those suffice."""
    policy = state.policy
    locked_steps = max(0, policy.warmup_steps - state.warm_up.steps)
    arms = []
    for name, arm in zip(policy.names, state.arms, strict=True):
        pulls_left = steps if name in policy.warmup_arms else steps - locked_steps
        spent = arm.source.pulls + arm.pulls
        share = bandit.epoch_share(epochs, round_pulls[name], spent, pulls_left)
        arms.append(replace(arm, source=replace(arm.source, ceiling=_on_grid(share))))
    return replace(state, arms=tuple(arms))


def _check_filled(state: State, phase: str) -> None:
    active = state.policy.active(phase)
    floors, caps = _limits(state, active, [state.arms[k].source.ceiling for k in active])
    check_feasible(floors, caps)


def _too_long(
    state: State, epochs: float, round_pulls: Mapping[str, float], steps: int, phase: str
) -> str:
    """What stands in the way of so many steps, and how many there could be. The more there are to
    come, the lower the ceilings."""

    def too_long(fewer: int) -> bool:
        try:
            _check_filled(_limited(state, epochs, round_pulls, fewer), phase)
        except Infeasible:
            return True
        return False

    most = bisect_left(range(1, steps), True, key=too_long)
    arms = [(state.policy.names[k], state.arms[k]) for k in state.policy.active(phase)]
    left = [
        f"{name} {max(0, math.floor(epochs * round_pulls[name] - arm.source.pulls - arm.pulls))}"
        for name, arm in arms
        if arm.source.ceiling < 1
    ]
    return (
        f"policy.maximum_epochs is {epochs:g}, which leaves room for {most} of the {steps} steps to"
        f" come (phase {phase}; steps left of arm {', '.join(left)}): raise it, add text to these"
        " arms or other arms, or train for fewer steps"
    )


def _units(share: float) -> int:
    return math.floor(share * SHARE_UNITS + 1e-6)


def _on_grid(share: float) -> float:
    """Down to a whole unit, so that a floor that is cut to it can be met exactly."""
    return _units(share) / SHARE_UNITS
