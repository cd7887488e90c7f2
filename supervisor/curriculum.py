"""Which arm the next step trains on: preferences, then shares, then picks. Pure.

What may live here: the way from one state of the curriculum to the next pick, and what steps,
evaluations and pivots do to it. No clock, file, process, random source, thread or socket, and
neither torch nor numpy; everything is a function of its arguments. This is the one door for others:
the policy is in `policy`, the state and its saved form in `curriculum_state`, the decision in
`mixture`, the formulas of the adaptive kinds in `bandit`.

A decision is made when a phase begins, and for the adaptive kinds after each complete window (ucb1:
each run of one arm). Between two decisions only picks and sums change.

Invariants:
- The configured arms and the arms of the state are the same list in the same order, and every sum
  runs over the arms that are active in the phase. An arm that left cannot take part in anything.
- Weights sum to SHARE_UNITS over the active arms and are 0 elsewhere; credits sum to 0.
- The state changes only through `next_arm` (counts a pull), `observe` (counts a step), `evaluated`,
  and what the operator does: `extended`, `pivoted`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from supervisor import bandit

# The names below are part of this module's interface.
from supervisor.bandit import WINDOWED, Tuning as Tuning, Window, averaged, run_length
from supervisor.curriculum_state import (
    STATE_FORMAT as STATE_FORMAT,
    ArmState as ArmState,
    PhaseCount as PhaseCount,
    Retired as Retired,
    Source as Source,
    State as State,
    StateError as StateError,
    from_json as from_json,
    to_json as to_json,
)
from supervisor.mixture import decided, planned, preferences as preferences, shares as shares
from supervisor.policy import (
    BOUNDS as BOUNDS,
    KINDS as KINDS,
    MAIN as MAIN,
    WARM_UP as WARM_UP,
    ArmPolicy as ArmPolicy,
    Policy as Policy,
    PolicyError as PolicyError,
    check_policy as check_policy,
    fragile_arms as fragile_arms,
)
from supervisor.projection import SHARE_UNITS, Infeasible as Infeasible, pick

# --- the first state of a policy ------------------------------------------------------------------


def create(
    policy: Policy,
    *,
    seed: int = 0,
    repetition: Mapping[str, float] | None = None,
    fingerprints: Mapping[str, str] | None = None,
    round_pulls: Mapping[str, float] | None = None,
    steps: int | None = None,
) -> State:
    """A fresh state.

    `seed` decides run lengths. By arm: `repetition`, the rep-4 of its training text (0 to 1);
    `fingerprints`, the digest of its text; `round_pulls`, the pulls of one pass over it. `steps`
    are those to come. `maximum_epochs` needs these last two. Raises PolicyError (or Infeasible) if
    any phase cannot be carried out.
    """
    check_policy(policy)
    sources = _sources(policy, repetition or {}, fingerprints or {})
    return _begin(policy, seed, sources, (), round_pulls or {}, steps)


def pivoted(
    old: State,
    policy: Policy,
    *,
    repetition: Mapping[str, float] | None = None,
    fingerprints: Mapping[str, str] | None = None,
    round_pulls: Mapping[str, float] | None = None,
    steps: int | None = None,
) -> State:
    """The fresh state of a new policy after `old`; keywords as for `create`.

    Nothing is kept of the old statistics, counters and credits. An arm that stays, by name and
    fingerprint, keeps its lifetime pulls and targets, also if it had been away for a while;
    everything that is not configured any more is in `retired`.
    """
    check_policy(policy)
    past = {(arm.name, arm.fingerprint): arm for arm in (*old.retired, *_lives(old))}
    sources = []
    for name, source in zip(
        policy.names, _sources(policy, repetition or {}, fingerprints or {}), strict=True
    ):
        life = past.pop((name, source.fingerprint), None)
        sources.append(
            source if life is None else replace(source, pulls=life.pulls, targets=life.targets)
        )
    retired = tuple(past.values())
    return _begin(policy, old.seed, tuple(sources), retired, round_pulls or {}, steps)


def extended(state: State, round_pulls: Mapping[str, float], steps: int) -> State:
    """The same state with another number of `steps` to come, shared anew under `maximum_epochs`.

    Raises Infeasible where the arms do not hold so many steps.
    """
    if state.policy.tuning.maximum_epochs is None:
        return state
    return decided(planned(state, round_pulls, steps))


def _sources(
    policy: Policy, repetition: Mapping[str, float], fingerprints: Mapping[str, str]
) -> tuple[Source, ...]:
    for what, given in (("repetition", repetition), ("fingerprints", fingerprints)):
        if unknown := sorted(set(given) - set(policy.names)):
            raise PolicyError(f"{what}: no arm is named {', '.join(unknown)}")
    for name, share in repetition.items():
        if not 0 <= share <= 1:
            raise PolicyError(f"arm {name}: repetition is {share}, expected a number from 0 to 1")
    return tuple(
        Source(fingerprint=fingerprints.get(name), repetition=repetition.get(name, 0.0))
        for name in policy.names
    )


def _lives(state: State) -> list[Retired]:
    return [
        Retired(
            name,
            arm.source.fingerprint,
            arm.source.pulls + arm.pulls,
            arm.source.targets + arm.targets,
        )
        for name, arm in zip(state.policy.names, state.arms, strict=True)
    ]


def _begin(
    policy: Policy,
    seed: int,
    sources: tuple[Source, ...],
    retired: tuple[Retired, ...],
    round_pulls: Mapping[str, float],
    steps: int | None,
) -> State:
    arms = tuple(ArmState(source=source) for source in sources)
    state = State(
        policy=policy,
        seed=seed,
        arms=arms,
        warm_up=PhaseCount(),
        main=PhaseCount(),
        shares=(),
        weights=(),
        credits=(0,) * len(arms),
        window_pulls=policy.window_pulls(policy.phases[0]),
        retired=retired,
    )
    return decided(planned(state, round_pulls, steps))


# --- steps ----------------------------------------------------------------------------------------


def next_arm(state: State) -> tuple[str, State]:
    """The arm of the next draw, and the state that has counted this pull."""
    picked, left = state.running, state.run_left - 1
    began = picked is None
    if picked is None:
        picked, credits = pick(state.credits, state.weights)
        counted = state.warm_up if state.phase == WARM_UP else state.main
        least, most = state.policy.run_steps
        left = run_length(state.seed, state.phase, counted.runs, least, most) - 1
    else:
        # Inside a run all earn and the running arm pays, as if it had been picked again.
        pairs = zip(state.credits, state.weights, strict=True)
        credits = [credit + weight for credit, weight in pairs]
        credits[picked] -= SHARE_UNITS
    arm = state.arms[picked]
    return state.policy.arms[picked].name, replace(
        state,
        arms=_with(state.arms, picked, replace(arm, pulls=arm.pulls + 1)),
        credits=tuple(credits),
        running=picked if left else None,
        run_left=left,
        **_counted(state, pulls=1, runs=int(began)),
    )


def observe(state: State, arm: str, loss: float, targets: int = 1) -> State:
    """The state after a completed step on `arm` with mean loss `loss` (nats) over `targets`.

    Counts the step. Raises ValueError for an arm that is not active, and for a loss that is not
    finite: such a step has no update, so no reward.
    """
    position = _active_position(state, arm)
    if not math.isfinite(loss):
        raise ValueError(f"arm {arm}: loss {loss} is not finite; a stopped step is not observed")
    if targets < 1:
        raise ValueError(f"arm {arm}: {targets} targets, expected at least 1")
    trained = _trained(state.policy, state.arms[position], loss, targets)
    windowed = state.policy.kind in WINDOWED
    window_steps = state.window_steps + windowed
    after = replace(
        state,
        arms=_with(state.arms, position, trained),
        window_steps=window_steps,
        **_counted(state, steps=1),
    )
    complete = windowed and window_steps >= state.window_pulls
    if complete:
        after = _close_window(after, state.active)
    if after.phase != state.phase:
        return _enter_main(after, state.active)
    if complete:
        return decided(after)
    if state.policy.kind == "ucb1" and after.running is None:
        return decided(after)
    return after


def evaluated(state: State, losses: Mapping[str, float]) -> State:
    """After an evaluation: held-out `losses` by arm, in nats per target.

    An arm that falls behind on text it does not train on earns less, from the next decision on.
    Raises ValueError for an unknown arm and for a loss that is not finite.
    """
    names = state.policy.names
    if unknown := sorted(set(losses) - set(names)):
        raise ValueError(f"evaluation: no arm is named {', '.join(unknown)}")
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise ValueError(f"arm {name}: held-out loss {loss} is not finite")
    if not state.policy.tuning.heldout_gate or state.policy.kind not in WINDOWED:
        return state
    arms = tuple(
        replace(arm, learned=bandit.gated(arm.learned, losses[name])) if name in losses else arm
        for name, arm in zip(names, state.arms, strict=True)
    )
    return replace(state, arms=arms)


def _active_position(state: State, arm: str) -> int:
    for position in state.active:
        if state.policy.arms[position].name == arm:
            return position
    raise ValueError(f"arm {arm} is not active in phase {state.phase}")


def _counted(state: State, pulls: int = 0, steps: int = 0, runs: int = 0) -> dict[str, Any]:
    """The counter of the current phase, as the field of the state that changes."""
    field = "warm_up" if state.phase == WARM_UP else "main"
    count = getattr(state, field)
    return {field: PhaseCount(count.pulls + pulls, count.steps + steps, count.runs + runs)}


def _trained(policy: Policy, arm: ArmState, loss: float, targets: int) -> ArmState:
    """One more step of the arm. The averages are ANDREA's, for all kinds; ucb1 learns from them."""
    alpha, learned, ema_reward = policy.tuning.ema_alpha, arm.learned, arm.ema_reward
    if arm.ema_loss is not None:
        reward = bandit.andrea_reward(arm.ema_loss, loss)
        ema_reward = averaged(ema_reward, reward, alpha)
        if policy.kind == "ucb1":
            learned = bandit.discounted(learned, 1, reward, 1.0)
    windowed = policy.kind in WINDOWED
    return replace(
        arm,
        targets=arm.targets + targets,
        ema_loss=averaged(arm.ema_loss, loss, alpha),
        ema_reward=ema_reward,
        window_steps=arm.window_steps + windowed,
        window_nats=arm.window_nats + loss * targets * windowed,
        window_targets=arm.window_targets + targets * windowed,
        learned=learned,
    )


def _close_window(state: State, active: Sequence[int]) -> State:
    """What the window has shown of the arms that were active in it."""
    policy = state.policy
    windows = []
    for arm in (state.arms[position] for position in active):
        loss = arm.window_nats / arm.window_targets if arm.window_steps else None
        repetition = arm.source.repetition if policy.tuning.text_discount else 0.0
        windows.append(Window(arm.window_steps, loss, repetition))
    before = [state.arms[position].learned for position in active]
    learned, pool = bandit.close_window(
        policy.kind, policy.tuning, before, windows, state.pool, state.steps
    )
    arms = list(state.arms)
    for position, taught in zip(active, learned, strict=True):
        arms[position] = replace(
            arms[position], learned=taught, window_steps=0, window_nats=0.0, window_targets=0
        )
    return replace(state, arms=tuple(arms), pool=pool, window_steps=0)


def _fresh_window(state: State) -> State:
    """Other arms, other debts: credits are zeroed, and the open window and run are given up."""
    arms = tuple(
        replace(arm, window_steps=0, window_nats=0.0, window_targets=0) for arm in state.arms
    )
    owed = (0,) * len(arms)
    return replace(state, arms=arms, credits=owed, window_steps=0, running=None, run_left=0)


def _enter_main(state: State, before: Sequence[int]) -> State:
    window_pulls = state.policy.window_pulls(MAIN)
    state = _fresh_window(replace(state, window_pulls=window_pulls))
    new = [position for position in state.active if position not in before]
    return decided(_joined(state, before, new))


def _joined(state: State, before: Sequence[int], new: Sequence[int]) -> State:
    """Arms `new` beside those that were active `before`: known as if from one window's floor."""
    if state.policy.kind == "static":
        return state
    others = [state.arms[position].learned for position in before]
    promised = dict(
        zip(state.policy.active(state.phase), state.policy.promised(state.phase), strict=True)
    )
    arms = list(state.arms)
    for position in new:
        learned = bandit.joining(others, max(1.0, state.window_pulls * promised[position]))
        arms[position] = replace(
            arms[position], learned=learned, ema_loss=None, joined_step=state.steps
        )
    return replace(state, arms=tuple(arms))


def _with(arms: Sequence[ArmState], position: int, arm: ArmState) -> tuple[ArmState, ...]:
    return (*arms[:position], arm, *arms[position + 1 :])
