"""What a policy says of its arms, and whether it can be carried out. Pure.

What may live here: the policy as a value, what follows from it alone (who is active in a phase,
how long a window is), and its checks. Nothing of what a run has learned.

Invariant: a policy that passes `check_policy` can be scheduled in each of its phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from supervisor.bandit import WINDOWED, Tuning, window_required
from supervisor.projection import SHARE_UNITS, check_feasible

KINDS: Final = ("static", "ucb1", "ducb", "softmax_ema", "exp3")
BOUNDS: Final = ("share", "weight")

WARM_UP: Final = "warm-up"
MAIN: Final = "main"

# C of Auer et al. for UCB1; 2 B sqrt(xi) of Garivier & Moulines with B = 1 and xi = 0.6.
CONFIDENCE: Final = {"ucb1": math.sqrt(2), "ducb": 2 * math.sqrt(0.6)}
ANDREA_RUN_STEPS: Final = (7, 42)

# An arm without a floor may stay unseen; a window is still long enough for this part of an even
# share.
_NOMINAL_FLOOR: Final = 0.25
# A smaller share is a promise that no run is long enough to keep.
_LEAST_FLOOR: Final = 1e-6

# Least value, whether that itself is too little, and most.
_TUNING_RANGES: Final = (
    ("confidence", 0, False, math.inf),
    ("tau", 0, True, math.inf),
    ("gamma", 0, True, 1),
    ("ema_alpha", 0, True, 1),
    ("exploration", 0, False, 1),
    ("maximum_epochs", 0, True, math.inf),
    ("window_pulls", 1, False, math.inf),
    ("run_steps_minimum", 1, False, math.inf),
    ("run_steps_maximum", 1, False, math.inf),
)


class PolicyError(ValueError):
    """The operator's policy cannot be carried out; the text says what to change."""


@dataclass(frozen=True, slots=True)
class ArmPolicy:
    """One arm: its relative `weight`, and the bounds on its share (or its weight).

    The adaptive kinds multiply what they learned by the weight.
    """

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
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)

    @property
    def phases(self) -> tuple[str, ...]:
        return (WARM_UP, MAIN) if self.warmup_steps else (MAIN,)

    def active(self, phase: str) -> tuple[int, ...]:
        """Positions of the arms that may be picked in `phase`, in configured order."""
        return tuple(
            position
            for position, arm in enumerate(self.arms)
            if phase == MAIN or arm.name in self.warmup_arms
        )

    @property
    def confidence(self) -> float:
        """C of the bonus; 0 for the kinds that have none."""
        given = self.tuning.confidence
        return CONFIDENCE.get(self.kind, 0.0) if given is None else given

    @property
    def run_steps(self) -> tuple[int, int]:
        """The shortest and the longest run of one arm, in steps."""
        least, most = ANDREA_RUN_STEPS if self.kind == "ucb1" else (1, 1)
        tuning = self.tuning
        return (
            least if tuning.run_steps_minimum is None else tuning.run_steps_minimum,
            most if tuning.run_steps_maximum is None else tuning.run_steps_maximum,
        )

    def promised(self, phase: str) -> list[float]:
        """The share that each active arm has at least, whatever is learned."""
        arms = [self.arms[position] for position in self.active(phase)]
        if self.bounds == "share":
            return [arm.floor for arm in arms]
        most = [min(max(arm.weight, arm.floor), arm.cap) for arm in arms]
        total = math.fsum(most)
        return [
            arm.floor / (arm.floor + total - own) if arm.floor else 0.0
            for arm, own in zip(arms, most, strict=True)
        ]

    def window_pulls(self, phase: str) -> int:
        """Pulls between two decisions: as configured, or enough to see each arm with a floor."""
        if self.tuning.window_pulls is not None:
            return self.tuning.window_pulls
        floors = self.promised(phase)
        return window_required([floor or _NOMINAL_FLOOR / len(floors) for floor in floors])


# --- checks ---------------------------------------------------------------------------------------


def check_policy(policy: Policy) -> None:
    """Raises PolicyError, or Infeasible where the bounds of a phase do not fit together.

    The text names the arm or the phase, and a change that would do.
    """
    for name, value, choices in (("kind", policy.kind, KINDS), ("bounds", policy.bounds, BOUNDS)):
        if value not in choices:
            raise PolicyError(f"policy.{name} is {value!r}, expected one of {', '.join(choices)}")
    _check_names(policy)
    for arm in policy.arms:
        _check_arm(arm, policy.bounds)
    _check_tuning(policy)
    for phase in policy.phases:
        _check_phase(policy, phase)


def fragile_arms(policy: Policy) -> list[str]:
    """A warning for each arm without which the caps of a phase would no longer fill the whole."""
    if policy.bounds == "weight":
        return []
    warnings = []
    for phase in policy.phases:
        arms = [policy.arms[position] for position in policy.active(phase)]
        for lost in arms if len(arms) > 1 else ():
            rest = math.fsum(arm.cap for arm in arms if arm is not lost)
            if rest < 1 - 1 / SHARE_UNITS:
                warnings.append(
                    f"phase {phase}: without arm {lost.name} the caps of the others sum to"
                    f" {rest:g}, less than 1; the run could not go on"
                )
    return warnings


def _check_names(policy: Policy) -> None:
    names = policy.names
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
    for name, value in (("weight", arm.weight), ("floor", arm.floor), ("cap", arm.cap)):
        if not math.isfinite(value) or value < 0:
            raise PolicyError(f"arm {arm.name}: {name} is {value}, expected a number of 0 or more")
    if arm.floor > arm.cap:
        raise PolicyError(f"arm {arm.name}: floor {arm.floor} is above cap {arm.cap}")
    if bounds == "share" and arm.cap > 1:
        raise PolicyError(
            f"arm {arm.name}: cap {arm.cap} is above 1; a share is at most 1"
            ' (for relative weights set policy.bounds = "weight")'
        )


def _check_tuning(policy: Policy) -> None:
    tuning = policy.tuning
    for name, least_value, open_below, most_value in _TUNING_RANGES:
        value = getattr(tuning, name)
        if value is None:
            continue
        above = value > least_value if open_below else value >= least_value
        if not (math.isfinite(value) and above and value <= most_value):
            least_text = f"{'above' if open_below else 'of at least'} {least_value}"
            most_text = "" if most_value == math.inf else f" and at most {most_value}"
            raise PolicyError(
                f"policy.{name} is {value}, expected a number {least_text}{most_text}"
            )
    least, most = policy.run_steps
    if least > most:
        raise PolicyError(
            f"policy.run_steps_minimum is {least}, above policy.run_steps_maximum {most}"
        )


def _check_phase(policy: Policy, phase: str) -> None:
    arms = [policy.arms[position] for position in policy.active(phase)]
    if policy.bounds == "weight":
        if not any(min(max(arm.weight, arm.floor), arm.cap) > 0 for arm in arms):
            raise PolicyError(f"phase {phase}: every weight is 0 within its bounds; raise one")
    else:
        if not any(arm.weight > 0 for arm in arms):
            raise PolicyError(f"phase {phase}: every weight is 0; raise one above 0")
        check_feasible([arm.floor for arm in arms], [arm.cap for arm in arms], f"phase {phase}: ")
    floors = policy.promised(phase)
    for arm, floor in zip(arms, floors, strict=True):
        if 0 < floor < _LEAST_FLOOR:
            raise PolicyError(
                f"arm {arm.name}: its floor {arm.floor:g} is a share of {floor:g} in phase {phase};"
                f" expected 0, or a share of at least {_LEAST_FLOOR:g}"
            )
    given = policy.window_pulls(phase)
    if policy.kind in WINDOWED and all(floors) and given < (required := window_required(floors)):
        raise PolicyError(
            f"policy.window_pulls is {given}; with the floors of phase {phase} it takes"
            f" {required} pulls to see each arm once. Leave it out, or raise it or the floors"
        )
