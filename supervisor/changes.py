"""What a run that exists says to other settings: refused, "use pivot", or accepted.

What may live here: the class of change of each key, and the comparison of two settings. Pure.

Invariant: every key of the schema has exactly one class, chosen by a person and not by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from supervisor.contract import Json
from supervisor.schema import Settings, show

IDENTITY: Final = "identity"  # refused: it would be another run
PIVOT: Final = "policy"  # refused here: `pivot` changes it, on record
OPERATIONAL: Final = "operational"  # accepted and journalled

# A section that is of one class throughout, or a class for each of its keys. `training.steps` is
# operational upwards only, `trainer.device` within one type of device (see `_class_of_change`);
# `schedule_steps` is not, lest a longer run bend its learning rate.
CHANGES: Final[Mapping[str, str | Mapping[str, str]]] = {
    "run": {"name": IDENTITY, "id": IDENTITY, "directory": OPERATIONAL, "shared": OPERATIONAL},
    "model": IDENTITY,
    "tokenizer": IDENTITY,
    "training": {
        "steps": OPERATIONAL,
        "seed": IDENTITY,
        "batch_windows": IDENTITY,
        "accumulate": IDENTITY,
        "learning_rate": PIVOT,
        "warmup_steps": PIVOT,
        "schedule": PIVOT,
        "schedule_steps": PIVOT,
        "minimum_rate_ratio": PIVOT,
        "weight_decay": IDENTITY,
        "clip_norm": IDENTITY,
    },
    "trainer": IDENTITY,
    "checkpoint": {
        "every": PIVOT,
        "keep_last": OPERATIONAL,
        "keep_every": OPERATIONAL,
        "keep_superseded": OPERATIONAL,
        "when_full": OPERATIONAL,
    },
    "samples": {
        "every": PIVOT,
        "prompts": PIVOT,
        "tokens": PIVOT,
        "temperature": PIVOT,
        "keep": OPERATIONAL,
    },
    "evaluation": {"every": PIVOT, "fraction": IDENTITY, "windows": PIVOT},
    "policy": PIVOT,
    "restart": OPERATIONAL,
    "hang": OPERATIONAL,
    "stop": OPERATIONAL,
    "alarms": OPERATIONAL,
    "logs": OPERATIONAL,
}

# What `resolve` fills in, or once did. Left open in a request, these are as they were recorded.
_RESOLVED: Final = {
    "run.id": None,
    "model.vocabulary": None,
    "training.schedule_steps": None,
    "trainer.threads": "auto",
    "samples.every": None,
    "evaluation.every": None,
}


class Change(NamedTuple):
    key: str
    recorded: object
    requested: object

    def __str__(self) -> str:
        text = f"{self.key}: recorded {show(self.recorded)}, requested {show(self.requested)}"
        return f"{text}; it may only grow" if self.shorter else text

    @property
    def shorter(self) -> bool:
        """The steps between have been promised, perhaps taken."""
        return self.key == "training.steps" and self.requested < self.recorded  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a request would change in a run that exists, by class of change."""

    identity: list[Change]
    policy: list[Change]
    operational: list[Change]


def compare(recorded: Settings, requested: Settings) -> Comparison:
    """The differences, by class."""
    before, after = _flatten(recorded), _flatten(requested)
    for key, unresolved in _RESOLVED.items():
        if after[key] == unresolved:
            after[key] = before[key]
    changes: dict[str, list[Change]] = {IDENTITY: [], PIVOT: [], OPERATIONAL: []}
    for key in before | after:
        change = Change(key, before.get(key), after.get(key))
        if change.recorded != change.requested:
            changes[_class_of_change(change)].append(change)
    return Comparison(changes[IDENTITY], changes[PIVOT], changes[OPERATIONAL])


def accept(recorded: Settings, changes: Iterable[Change]) -> Settings:
    """The recorded settings with the operational `changes` of a comparison."""
    tree = recorded.tree()
    for change in changes:
        section, key = change.key.split(".")
        tree[section][key] = change.requested
    return Settings.model_validate(tree).with_origins(recorded.origins)


def class_of(key: str) -> str:
    section, name, *_ = key.split(".")
    change = CHANGES[section]
    return change if isinstance(change, str) else change[name]


def _class_of_change(change: Change) -> str:
    """A target below the recorded one is a change of identity: the steps between have been
    promised, perhaps taken. "auto" names no type of device, so a run may come from it and go back
    to it: the trainer holds each run to the type that its checkpoints are from."""
    if change.shorter:
        return IDENTITY
    if change.key == "trainer.device":
        types = {str(name).partition(":")[0] for name in (change.recorded, change.requested)}
        if "auto" in types or len(types) == 1:
            return OPERATIONAL
    return class_of(change.key)


def _flatten(settings: Settings) -> Json:
    """Dotted key -> value. Arms go by name (`policy.arms.prose.cap`), beside the list of names."""
    tree = settings.tree()
    arms = tree["policy"].pop("arms")
    flat = {f"{section}.{key}": value for section in tree for key, value in tree[section].items()}
    flat["policy.arms"] = [arm["name"] for arm in arms]
    for arm in arms:
        name = arm.pop("name")
        flat |= {f"policy.arms.{name}.{key}": value for key, value in arm.items()}
    return flat
