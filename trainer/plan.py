"""What the policy makes of the data: the curriculum of the next step. No torch here.

What may live here: the way from settings, data and what a checkpoint holds to a curriculum, and the
same as a description, for a supervisor that asks before it pauses or records anything.

Invariant: what is described is what a trainer would begin with: the same function decides both.
"""

from __future__ import annotations

import math
from typing import Any

from supervisor import config, curriculum
from supervisor.config import Settings
from supervisor.contract import Json, Manifest
from trainer.data import Data


def begun(settings: Settings, data: Data, seed: int = 0) -> curriculum.State:
    """Before the first step. Raises PolicyError or Infeasible."""
    return curriculum.create(
        config.curriculum_policy(settings.policy),
        seed=seed,
        steps=settings.training.steps,
        **_sources(settings, data),
    )


def continued(
    settings: Settings, data: Data, manifest: Manifest, *, pivoted: bool
) -> curriculum.State:
    """After a checkpoint: as it was, or begun anew where a pivot lies between.

    Raises Infeasible or PolicyError where the arms do not hold the steps to come, StateError or
    ConfigError for what the checkpoint holds.
    """
    recorded = config.parse(
        manifest.state["configuration"], f"checkpoint {manifest.step} configuration"
    )
    policy = config.curriculum_policy(settings.policy)
    sources, steps = _sources(settings, data), settings.training.steps - manifest.step
    if pivoted:
        left = config.curriculum_policy(recorded.policy)
        old = curriculum.from_json(left, manifest.state["bandit"])
        return curriculum.pivoted(old, policy, steps=steps, **sources)
    state = curriculum.from_json(policy, manifest.state["bandit"])
    if settings.training.steps == recorded.training.steps:
        return state
    return curriculum.extended(state, sources["round_pulls"], steps)


def describe(
    settings: Settings, data: Data, manifest: Manifest | None = None, epoch: int = 1
) -> Json:
    """The data, how many parameters the model has, and the curriculum that a life of `epoch` makes
    of the data, from `manifest` on where there is one, as JSON. Raises what `begun` and
    `continued` raise."""
    if manifest is None:
        state = begun(settings, data)
    else:
        state = continued(settings, data, manifest, pivoted=epoch > manifest.epoch)
    return {
        "tokenizer": {"rule": data.tokenizer.rule, "digest": data.tokenizer.digest},
        "parameters": config.parameter_count(settings.model, data.tokenizer.vocabulary),
        "policy_digest": config.policy_digest(settings),
        "arms": {
            name: {
                "documents": arm.document_count,
                "windows": arm.window_count,
                "tokens": arm.token_count,
                "heldout_documents": arm.heldout.document_count,
                "heldout_windows": arm.heldout.window_count,
                "corpus_digest": arm.digest,
            }
            for name, arm in data.arms.items()
        },
        "bandit": curriculum.to_json(state),
    }


def _sources(settings: Settings, data: Data) -> dict[str, dict[str, Any]]:
    """What the curriculum needs to know of the arms, by name; see `curriculum.create`."""
    return {
        "repetition": {name: arm.repetition for name, arm in data.arms.items()},
        "fingerprints": {name: arm.digest for name, arm in data.arms.items()},
        "round_pulls": {
            name: math.ceil(arm.window_count / settings.training.batch_windows)
            / settings.training.accumulate
            for name, arm in data.arms.items()
        },
    }
