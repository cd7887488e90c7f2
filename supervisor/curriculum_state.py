"""The curriculum between two steps, and the form in which a checkpoint carries it. Pure.

What may live here: the state as a value, its saved form, and the checks of a saved one. How it
changes is in `curriculum`.

Invariants:
- The arms of the policy and the arms of the state are the same list in the same order; what left
  with an earlier policy is in `retired`, which takes part in nothing.
- `from_json(policy, to_json(state)) == state`, also in what is drawn later.
- Nothing saved is guessed: unknown, missing and impossible values are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from supervisor.bandit import RING_LENGTH, Pool, Statistics
from supervisor.policy import MAIN, WARM_UP, Policy
from supervisor.projection import SHARE_UNITS

STATE_FORMAT: Final = 1


class StateError(ValueError):
    """A saved state that does not belong to this policy, or is damaged."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of an arm's text when its policy begins.

    `fingerprint` identifies text and tokenizer. `repetition` is the rep-4 of the training text.
    `ceiling` is the share that `maximum_epochs` leaves it, 1 where there is no limit. `pulls` and
    `targets` were made under earlier policies.
    """

    fingerprint: str | None = None
    repetition: float = 0.0
    ceiling: float = 1.0
    pulls: int = 0
    targets: int = 0


@dataclass(frozen=True, slots=True)
class ArmState:
    """What is remembered of one arm under this policy.

    `targets` are targets trained on. `ema_loss` is in nats and `ema_reward` in thousandths of a
    nat; both move at each step of the arm and are None until there is a value to average.
    `window_*` sum up the steps of the open window. `joined_step` is when it joined arms that were
    there before.
    """

    pulls: int = 0
    targets: int = 0
    ema_loss: float | None = None
    ema_reward: float | None = None
    window_steps: int = 0
    window_nats: float = 0.0
    window_targets: int = 0
    learned: Statistics = field(default_factory=Statistics)
    joined_step: int | None = None
    source: Source = field(default_factory=Source)


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """Draws, completed optimizer steps and runs begun of one phase."""

    pulls: int = 0
    steps: int = 0
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Retired:
    """An arm of an earlier policy, kept as a record and never summed."""

    name: str
    fingerprint: str | None
    pulls: int
    targets: int


@dataclass(frozen=True, slots=True)
class State:
    """The whole of the curriculum between two steps; `arms` stands in the policy's order.

    `shares` and `weights` are the decision in force, `credits` what each arm is owed under it, in
    SHARE_UNITS. `running` is the position of the arm whose run goes on for `run_left` more pulls,
    None between runs. `window_steps` counts the steps of the open window; its length
    `window_pulls` follows from policy and phase.
    """

    policy: Policy
    seed: int
    arms: tuple[ArmState, ...]
    warm_up: PhaseCount
    main: PhaseCount
    shares: tuple[float, ...]
    weights: tuple[int, ...]
    credits: tuple[int, ...]
    running: int | None = None
    run_left: int = 0
    window_steps: int = 0
    window_pulls: int = 1
    pool: Pool = field(default_factory=Pool)
    retired: tuple[Retired, ...] = ()

    @property
    def phase(self) -> str:
        return WARM_UP if self.warm_up.steps < self.policy.warmup_steps else MAIN

    @property
    def steps(self) -> int:
        """Completed steps under this policy."""
        return self.warm_up.steps + self.main.steps

    @property
    def active(self) -> tuple[int, ...]:
        """Positions of the arms that may be picked now, in configured order."""
        return self.policy.active(self.phase)


# --- writing --------------------------------------------------------------------------------------


def to_json(state: State) -> dict[str, Any]:
    """The state as plain JSON values, keyed by arm; `from_json` gives back an equal State."""
    names = state.policy.names
    picking = zip(state.weights, state.shares, state.credits, strict=True)
    return {
        "format": STATE_FORMAT,
        "kind": state.policy.kind,
        "seed": state.seed,
        "phases": {WARM_UP: _record(state.warm_up), MAIN: _record(state.main)},
        "run": {
            "arm": None if state.running is None else names[state.running],
            "left": state.run_left,
        },
        "window_steps": state.window_steps,
        "pool": {"scale": state.pool.scale, "ring": list(state.pool.ring)},
        "arms": {
            name: _record(arm)
            | {"learned": _record(arm.learned), "source": _record(arm.source)}
            | {"weight": weight, "share": share, "credit": credit}
            for name, arm, (weight, share, credit) in zip(names, state.arms, picking, strict=True)
        },
        "retired": [_record(arm) for arm in state.retired],
    }


def _record(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}


# --- reading --------------------------------------------------------------------------------------


def from_json(policy: Policy, value: Any) -> State:
    """The State that `to_json` saved under this policy.

    Raises StateError, naming what is missing, unknown or impossible; an arm that the policy does
    not configure is refused, not summed.
    """
    where = "bandit state"
    body = _read(value, _STATE, where)
    if (body["format"], body["kind"]) != (STATE_FORMAT, policy.kind):
        raise StateError(
            f"{where}: format {body['format']!r} of kind {body['kind']!r}, expected format"
            f" {STATE_FORMAT} of kind {policy.kind!r}"
        )
    names = policy.names
    saved = _fields(body["arms"], names, f"{where} arms")
    arms = [_read(_today(saved[name]), _ARM, f"{where} arm {name}") for name in names]
    running = body["run"]["arm"]
    if running is not None and running not in names:
        raise StateError(f"{where} run arm: {running!r} is no arm of the policy")
    weights, shares, credits = (
        tuple(arm.pop(key) for arm in arms) for key in ("weight", "share", "credit")
    )
    state = State(
        policy=policy,
        seed=body["seed"],
        arms=tuple(ArmState(**arm) for arm in arms),
        warm_up=body["phases"][WARM_UP],
        main=body["phases"][MAIN],
        shares=shares,
        weights=weights,
        credits=credits,
        running=None if running is None else names.index(running),
        run_left=body["run"]["left"],
        window_steps=body["window_steps"],
        pool=body["pool"],
        retired=body["retired"],
    )
    _check_state(state)
    return replace(state, window_pulls=policy.window_pulls(state.phase))


def _today(arm: Any) -> Any:
    """Without a mark of earlier versions, which no arm of theirs could bear."""
    if isinstance(arm, dict) and arm.get("resting") is False:
        return {key: value for key, value in arm.items() if key != "resting"}
    return arm


Parser = Callable[[Any, str], Any]


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


def _read(value: Any, parsers: Mapping[str, Parser], where: str) -> dict[str, Any]:
    body = _fields(value, tuple(parsers), where)
    return {name: parse(body[name], f"{where} {name}") for name, parse in parsers.items()}


def _whole(value: Any, where: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StateError(f"{where}: expected a whole number of at least {least}, got {value!r}")
    return value


def _credit(value: Any, where: str) -> int:
    return _whole(value, where, -(2**63))


def _number(value: Any, where: str, expected: str = "a finite number") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StateError(f"{where}: expected {expected}, got {value!r}")
    return float(value)


def _optional_number(value: Any, where: str) -> float | None:
    return None if value is None else _number(value, where, "a finite number or null")


def _amount(value: Any, where: str) -> float:
    number = _number(value, where)
    if number < 0:
        raise StateError(f"{where}: expected a number of at least 0, got {value!r}")
    return number


def _fraction(value: Any, where: str) -> float:
    number = _number(value, where)
    if not 0 <= number <= 1:
        raise StateError(f"{where}: expected a number from 0 to 1, got {value!r}")
    return number


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise StateError(f"{where}: expected text, got {value!r}")
    return value


def _optional(parse: Parser) -> Parser:
    return lambda value, where: None if value is None else parse(value, where)


def _several(parse: Parser) -> Parser:
    def parse_all(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise StateError(f"{where}: expected a list, got {value!r}")
        return tuple(parse(item, f"{where}[{index}]") for index, item in enumerate(value))

    return parse_all


def _built(kind: Callable[..., Any], parsers: Mapping[str, Parser]) -> Parser:
    return lambda value, where: kind(**_read(value, parsers, where))


_COUNT: Final = _built(PhaseCount, {"pulls": _whole, "steps": _whole, "runs": _whole})
_LEARNED: Final[Mapping[str, Parser]] = {
    "gain": _number,
    "count": _amount,
    "value": _number,
    "baseline": _optional_number,
    "observed_step": _whole,
    "last_loss": _optional_number,
    "gap_start": _optional_number,
    "gate": _fraction,
}
_SOURCE: Final[Mapping[str, Parser]] = {
    "fingerprint": _optional(_text),
    "repetition": _fraction,
    "ceiling": _fraction,
    "pulls": _whole,
    "targets": _whole,
}
_ARM: Final[Mapping[str, Parser]] = {
    "pulls": _whole,
    "targets": _whole,
    "ema_loss": _optional_number,
    "ema_reward": _optional_number,
    "window_steps": _whole,
    "window_nats": _number,
    "window_targets": _whole,
    "learned": _built(Statistics, _LEARNED),
    "joined_step": _optional(_whole),
    "source": _built(Source, _SOURCE),
    "weight": _whole,
    "share": _fraction,
    "credit": _credit,
}
_RETIRED: Final[Mapping[str, Parser]] = {
    "name": _text,
    "fingerprint": _optional(_text),
    "pulls": _whole,
    "targets": _whole,
}
_STATE: Final[Mapping[str, Parser]] = {
    "format": _whole,
    "kind": _text,
    "seed": _whole,
    "phases": lambda value, where: _read(value, {WARM_UP: _COUNT, MAIN: _COUNT}, where),
    "run": lambda value, where: _read(value, {"arm": _optional(_text), "left": _whole}, where),
    "window_steps": _whole,
    "pool": _built(Pool, {"scale": _optional(_amount), "ring": _several(_number)}),
    "arms": lambda value, where: value,
    "retired": _several(_built(Retired, _RETIRED)),
}


def _check_state(state: State) -> None:
    """The invariants that tie the parts together: a state edited in one place is refused."""
    policy, arms, where = state.policy, state.arms, "bandit state"
    if state.warm_up.steps > policy.warmup_steps or (state.phase == WARM_UP and state.main.steps):
        raise StateError(
            f"{where}: {state.warm_up.steps} warm-up and {state.main.steps} main steps do not"
            f" fit policy.warmup_steps {policy.warmup_steps}"
        )
    pulls, counted = sum(arm.pulls for arm in arms), state.warm_up.pulls + state.main.pulls
    if pulls != counted:
        raise StateError(f"{where}: the arms count {pulls} pulls, the phases {counted}")
    if (steps := sum(arm.window_steps for arm in arms)) != state.window_steps:
        raise StateError(f"{where}: the arms count {steps} window steps, not {state.window_steps}")
    if total := sum(state.credits):
        raise StateError(f"{where}: credits sum to {total}, expected 0")
    if (total := sum(state.weights)) != SHARE_UNITS:
        raise StateError(f"{where}: weights sum to {total}, expected {SHARE_UNITS}")
    if abs(math.fsum(state.shares) - 1) > 1e-9:
        raise StateError(f"{where}: shares sum to {math.fsum(state.shares)}, expected 1")
    _check_shares(state)
    if (state.running is None) != (state.run_left == 0) or (
        state.running is not None and state.running not in state.active
    ):
        raise StateError(f"{where} run: {state.run_left} left, of an arm that cannot have a run")
    if state.run_left >= policy.run_steps[1]:
        raise StateError(f"{where} run: {state.run_left} left, runs last {policy.run_steps[1]}")
    if len(state.pool.ring) > RING_LENGTH:
        raise StateError(f"{where} pool ring: {len(state.pool.ring)} values, not {RING_LENGTH}")
    gone = [(arm.name, arm.fingerprint) for arm in state.retired]
    live = [(name, arm.source.fingerprint) for name, arm in zip(policy.names, arms, strict=True)]
    if len({*gone, *live}) != len(gone) + len(live):
        raise StateError(f"{where} retired: lists an arm twice, or one that is configured")


def _check_shares(state: State) -> None:
    """Shares are within bounds; an arm that may not be picked has none, and no past if locked."""
    unlocked = state.policy.active(state.phase)
    for position, (arm, kept) in enumerate(zip(state.policy.arms, state.arms, strict=True)):
        share, where = state.shares[position], f"bandit state arm {arm.name}"
        if position not in unlocked and kept != ArmState(source=kept.source):
            raise StateError(f"{where}: dormant in {state.phase}, yet used")
        if position not in unlocked:
            if share or state.weights[position] or state.credits[position]:
                raise StateError(f"{where}: not active, yet it has a share or credit")
        elif state.policy.bounds == "share":
            floor = min(arm.floor, kept.source.ceiling)
            if not floor - 1e-9 <= share <= arm.cap + 1e-9:
                raise StateError(f"{where} share: {share} is not from {floor} to {arm.cap}")
        if abs(state.weights[position] - share * SHARE_UNITS) > len(state.arms):
            raise StateError(f"{where} weight: {state.weights[position]} is not {share} in whole")
