"""Which arm the next step trains on: preferences, then shares, then picks. Pure.

What may live here: the policy, the state it needs, and the way from one to the next pick. No
clock, file, process, random source, thread or socket, and neither torch nor numpy; everything is
a function of its arguments.

    preferences(state)  what the policy kind would like, any scale
    -> project          shares that sum to 1 within caps and floors      (supervisor.projection)
    -> integer_weights  the same in whole units, equal on every machine  (supervisor.projection)
    -> pick             smooth weighted round robin                      (supervisor.projection)

A further kind of policy adds its branch to `preferences` and its constants to `KINDS`.

Invariants:
- The configured arms and the arms of the state are the same list in the same order, and every sum
  runs over the arms that are active in the phase. An arm that left cannot take part in anything.
- Weights sum to SHARE_UNITS over the active arms and are 0 elsewhere; credits sum to 0.
- The state changes only through `next_arm` (counts a pull) and `observe` (counts a step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from supervisor.projection import Infeasible as Infeasible  # part of this module's interface
from supervisor.projection import check_feasible, integer_weights, pick, project

KINDS: Final = ("static",)
BOUNDS: Final = ("share", "weight")

WARM_UP: Final = "warm-up"
MAIN: Final = "main"

EMA_ALPHA: Final = 0.1
REWARD_SCALE: Final = 1000.0
STATE_FORMAT: Final = 1


class PolicyError(ValueError):
    """The operator's policy cannot be carried out; the text says what to change."""


class StateError(ValueError):
    """A saved state that does not belong to this policy, or is damaged."""


# --- policy and state ---


@dataclass(frozen=True, slots=True)
class ArmPolicy:
    """One arm: its relative `weight`, and the bounds on its share (or its weight)."""

    name: str
    weight: float
    floor: float
    cap: float


@dataclass(frozen=True, slots=True)
class Policy:
    """How arms are chosen from the policy's first step on.

    During the first `warmup_steps` steps only `warmup_arms` are active. `bounds` says what floors
    and caps bound: "share" the share of the picks, "weight" the relative weight before it is
    normalised (ANDREA's meaning, where a cap may well be above 1).
    """

    kind: str
    bounds: str
    warmup_steps: int
    warmup_arms: tuple[str, ...]
    arms: tuple[ArmPolicy, ...]

    def active(self, phase: str) -> tuple[int, ...]:
        """Positions of the arms that may be picked in `phase`, in configured order."""
        return tuple(
            position
            for position, arm in enumerate(self.arms)
            if phase == MAIN or arm.name in self.warmup_arms
        )


@dataclass(frozen=True, slots=True)
class ArmState:
    """What is remembered of one arm. The averages are None until there is a value to average.

    `ema_loss` is in nats; `ema_reward` in thousandths of a nat; `credit` in SHARE_UNITS.
    """

    pulls: int = 0
    ema_loss: float | None = None
    ema_reward: float | None = None
    credit: int = 0


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """Draws and completed optimizer steps of one phase."""

    pulls: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """The whole of the curriculum between two steps; `arms` stands in the policy's order.

    `shares` and `weights` are the decision in force, derived when the phase begins.
    """

    policy: Policy
    arms: tuple[ArmState, ...]
    warm_up: PhaseCount
    main: PhaseCount
    shares: tuple[float, ...]
    weights: tuple[int, ...]

    @property
    def phase(self) -> str:
        return WARM_UP if self.warm_up.steps < self.policy.warmup_steps else MAIN


# --- the life of a state ---


def create(policy: Policy) -> State:
    """A fresh state. Raises PolicyError (or Infeasible) if any phase cannot be carried out."""
    check_policy(policy)
    arms = tuple(ArmState() for _ in policy.arms)
    return _decide(State(policy, arms, PhaseCount(), PhaseCount(), (), ()))


def next_arm(state: State) -> tuple[str, State]:
    """The arm of the next draw, and the state that has counted this pull."""
    picked, credits = pick([arm.credit for arm in state.arms], state.weights)
    arms = tuple(
        ArmState(arm.pulls + (position == picked), arm.ema_loss, arm.ema_reward, credit)
        for position, (arm, credit) in enumerate(zip(state.arms, credits, strict=True))
    )
    return state.policy.arms[picked].name, replace(_count(state, pulls=1), arms=arms)


def observe(state: State, arm: str, loss: float) -> State:
    """The state after a completed step on `arm` with mean loss `loss` (nats); counts the step.

    Raises ValueError for an arm that is not active, and for a loss that is not finite: such a step
    has no update, so no reward.
    """
    names = [configured.name for configured in state.policy.arms]
    if arm not in names or names.index(arm) not in state.policy.active(state.phase):
        raise ValueError(f"arm {arm} is not active in phase {state.phase}")
    if not math.isfinite(loss):
        raise ValueError(f"arm {arm}: loss {loss} is not finite; a stopped step is not observed")
    arms = tuple(
        _learn(item, loss) if name == arm else item
        for name, item in zip(names, state.arms, strict=True)
    )
    after = replace(_count(state, steps=1), arms=arms)
    if after.phase == state.phase:
        return after
    # Other arms, other debts: credits start at zero, and the shares are decided anew.
    return _decide(replace(after, arms=tuple(replace(item, credit=0) for item in after.arms)))


def shares(state: State) -> dict[str, float]:
    """Target share of the picks per arm in the current phase; dormant arms have 0."""
    return {arm.name: share for arm, share in zip(state.policy.arms, state.shares, strict=True)}


def preferences(state: State) -> list[float]:
    """How much the policy kind wants each active arm, in the order of `Policy.active`.

    Any scale; nonnegative. For "static" these are the configured weights.
    """
    return [state.policy.arms[position].weight for position in state.policy.active(state.phase)]


def _learn(arm: ArmState, loss: float) -> ArmState:
    """ANDREA's reward, max(0, average - loss) * 1000, against the average before this loss.

    The first loss only sets the average: there is nothing yet to be better than.
    """
    if arm.ema_loss is None:
        return replace(arm, ema_loss=loss)
    reward = max(0.0, arm.ema_loss - loss) * REWARD_SCALE
    return replace(
        arm, ema_loss=_average(arm.ema_loss, loss), ema_reward=_average(arm.ema_reward, reward)
    )


def _average(average: float | None, value: float) -> float:
    return value if average is None else average + EMA_ALPHA * (value - average)


def _count(state: State, pulls: int = 0, steps: int = 0) -> State:
    def more(count: PhaseCount) -> PhaseCount:
        return PhaseCount(count.pulls + pulls, count.steps + steps)

    if state.phase == WARM_UP:
        return replace(state, warm_up=more(state.warm_up))
    return replace(state, main=more(state.main))


def _decide(state: State) -> State:
    policy, active = state.policy, state.policy.active(state.phase)
    arms = [policy.arms[position] for position in active]
    decided, whole = _targets(arms, preferences(state), policy.bounds)
    shares, weights = [0.0] * len(policy.arms), [0] * len(policy.arms)
    for position, share, weight in zip(active, decided, whole, strict=True):
        shares[position], weights[position] = share, weight
    return replace(state, shares=tuple(shares), weights=tuple(weights))


def _targets(
    arms: Sequence[ArmPolicy], wanted: Sequence[float], bounds: str
) -> tuple[list[float], list[int]]:
    """Shares, and the same in whole SHARE_UNITS, for the active arms."""
    if bounds == "weight":
        clamped = [min(max(q, arm.floor), arm.cap) for q, arm in zip(wanted, arms, strict=True)]
        total = math.fsum(clamped)
        decided = [weight / total for weight in clamped]
        return decided, integer_weights(decided, [0.0] * len(arms), [1.0] * len(arms))
    floors, caps = [arm.floor for arm in arms], [arm.cap for arm in arms]
    decided = project(wanted, floors, caps)
    return decided, integer_weights(decided, floors, caps)


# --- checking a policy ---


def check_policy(policy: Policy) -> None:
    """Raises PolicyError, or Infeasible where the bounds of a phase do not fit together.

    The text names the arm or the phase, and a change that would do.
    """
    for field, value, choices in (("kind", policy.kind, KINDS), ("bounds", policy.bounds, BOUNDS)):
        if value not in choices:
            raise PolicyError(f"policy.{field} is {value!r}, expected one of {', '.join(choices)}")
    _check_names(policy)
    for arm in policy.arms:
        _check_arm(arm, policy.bounds)
    for phase in (WARM_UP, MAIN) if policy.warmup_steps else (MAIN,):
        _check_phase(policy, phase)


def _check_names(policy: Policy) -> None:
    names = [arm.name for arm in policy.arms]
    if not names:
        raise PolicyError("policy.arms is empty; at least one arm is needed")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise PolicyError(f"policy.arms: {', '.join(repeated)} appears twice; names must differ")
    if unknown := [name for name in policy.warmup_arms if name not in names]:
        raise PolicyError(f"policy.warmup_arms: no arm is named {', '.join(unknown)}")
    if policy.warmup_steps < 0 or (policy.warmup_steps and not policy.warmup_arms):
        raise PolicyError(
            f"policy.warmup_steps is {policy.warmup_steps} with {len(policy.warmup_arms)}"
            " warmup_arms; expected 0, or a number of steps and the arms that are active in them"
        )


def _check_arm(arm: ArmPolicy, bounds: str) -> None:
    for field, value in (("weight", arm.weight), ("floor", arm.floor), ("cap", arm.cap)):
        if not math.isfinite(value) or value < 0:
            raise PolicyError(f"arm {arm.name}: {field} is {value}, expected a number of 0 or more")
    if arm.floor > arm.cap:
        raise PolicyError(f"arm {arm.name}: floor {arm.floor} is above cap {arm.cap}")
    if bounds == "share" and arm.cap > 1:
        raise PolicyError(
            f"arm {arm.name}: cap {arm.cap} is above 1; a share is at most 1"
            ' (for relative weights set policy.bounds = "weight")'
        )


def _check_phase(policy: Policy, phase: str) -> None:
    arms = [policy.arms[position] for position in policy.active(phase)]
    if policy.bounds == "weight":
        if not any(min(max(arm.weight, arm.floor), arm.cap) > 0 for arm in arms):
            raise PolicyError(f"phase {phase}: every weight is 0 within its bounds; raise one")
        return
    if not any(arm.weight > 0 for arm in arms):
        raise PolicyError(f"phase {phase}: every weight is 0; raise one above 0")
    check_feasible([arm.floor for arm in arms], [arm.cap for arm in arms], f"phase {phase}: ")


# --- saved form ---

_STATE_FIELDS: Final = ("format", "kind", "phases", "arms")
_ARM_FIELDS: Final = ("pulls", "ema_loss", "ema_reward", "credit")


def to_json(state: State) -> dict[str, Any]:
    """The state as plain JSON values, keyed by arm; `from_json` gives back an equal State."""
    return {
        "format": STATE_FORMAT,
        "kind": state.policy.kind,
        "phases": {
            name: {"pulls": count.pulls, "steps": count.steps}
            for name, count in ((WARM_UP, state.warm_up), (MAIN, state.main))
        },
        "arms": {
            arm.name: {field: getattr(saved, field) for field in _ARM_FIELDS}
            for arm, saved in zip(state.policy.arms, state.arms, strict=True)
        },
    }


def from_json(policy: Policy, value: Any) -> State:
    """The State that `to_json` saved under this policy.

    Raises StateError, naming what is missing, unknown or impossible; nothing is ever guessed, and
    an arm that the policy does not configure is refused, not summed.
    """
    body = _fields(value, _STATE_FIELDS, "bandit state")
    if (body["format"], body["kind"]) != (STATE_FORMAT, policy.kind):
        raise StateError(
            f"bandit state: format {body['format']!r} of kind {body['kind']!r}, expected format"
            f" {STATE_FORMAT} of kind {policy.kind!r}"
        )
    names = tuple(arm.name for arm in policy.arms)
    saved = _fields(body["arms"], names, "bandit state arms")
    phases = _fields(body["phases"], (WARM_UP, MAIN), "bandit state phases")
    state = replace(
        create(policy),
        arms=tuple(_parse_arm(saved[name], f"bandit state arm {name}") for name in names),
        warm_up=_parse_count(phases[WARM_UP], f"bandit state phase {WARM_UP}"),
        main=_parse_count(phases[MAIN], f"bandit state phase {MAIN}"),
    )
    _check_state(state)
    return _decide(state)


def _fields(value: Any, expected: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StateError(f"{where}: expected an object, got {value!r}")
    missing = [name for name in expected if name not in value]
    unknown = sorted(str(name) for name in value if name not in expected)
    if missing or unknown:
        raise StateError(
            f"{where}: missing [{', '.join(missing)}], unknown [{', '.join(unknown)}]"
            f" (expected {', '.join(expected)})"
        )
    return value


def _parse_arm(value: Any, where: str) -> ArmState:
    body = _fields(value, _ARM_FIELDS, where)
    return ArmState(
        pulls=_whole(body["pulls"], f"{where} pulls", 0),
        ema_loss=_optional_number(body["ema_loss"], f"{where} ema_loss"),
        ema_reward=_optional_number(body["ema_reward"], f"{where} ema_reward"),
        credit=_whole(body["credit"], f"{where} credit", -(2**63)),
    )


def _parse_count(value: Any, where: str) -> PhaseCount:
    body = _fields(value, ("pulls", "steps"), where)
    return PhaseCount(*(_whole(body[name], f"{where} {name}", 0) for name in ("pulls", "steps")))


def _whole(value: Any, where: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StateError(f"{where}: expected a whole number of at least {least}, got {value!r}")
    return value


def _optional_number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StateError(f"{where}: expected a finite number or null, got {value!r}")
    return float(value)


def _check_state(state: State) -> None:
    """The invariants that tie the parts together: a state edited in one place is refused."""
    policy = state.policy
    if state.warm_up.steps > policy.warmup_steps or (state.phase == WARM_UP and state.main.steps):
        raise StateError(
            f"bandit state: {state.warm_up.steps} warm-up and {state.main.steps} main steps do not"
            f" fit policy.warmup_steps {policy.warmup_steps}"
        )
    pulls = sum(arm.pulls for arm in state.arms)
    if pulls != state.warm_up.pulls + state.main.pulls:
        raise StateError(
            f"bandit state: the arms count {pulls} pulls, the phases"
            f" {state.warm_up.pulls + state.main.pulls}"
        )
    for position in set(range(len(policy.arms))) - set(policy.active(state.phase)):
        if state.arms[position] != ArmState():
            name = policy.arms[position].name
            raise StateError(f"bandit state arm {name}: dormant in {state.phase}, yet used")
    if total := sum(arm.credit for arm in state.arms):
        raise StateError(f"bandit state: credits sum to {total}, expected 0")
