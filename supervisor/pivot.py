"""What is checked before a pivot is asked for: the policy file against the run, and its data.

What may live here: the client's part of a pivot, a rollback and a look at policies. Nothing here
touches the run; the daemon carries out what was found good, and only for the epoch that it was
checked against.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor import config, contract, curriculum, data_check, events as ev
from supervisor.changes import Change
from supervisor.config import Settings
from supervisor.contract import Json
from supervisor.journal import read
from supervisor.state import Durable, Epoch, fold


class PolicyRefused(ValueError):
    """The policy cannot rule this run; the text says which key, which value, and what would do."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A checked pivot: what the request to the daemon says, what it would change, and what is
    allowed and yet worth a word. `bandit` is how the new policy would begin; None where the data
    is not ours to look at."""

    content: Json
    changes: list[Change]
    settings: Settings
    bandit: Json | None
    warnings: list[str]


def durable_of(directory: Path) -> Durable:
    """What the journal of a run adds up to. Takes no lock."""
    lines, _ = read(directory / contract.JOURNAL_FILE)
    records = (ev.record_from_json(line) for line in lines)
    return fold(record for record in records if record is not None)


def propose(
    directory: Path,
    policy_file: Path | None,
    *,
    at: str,
    reason: str,
    to_step: int | None,
    same_allowed: bool = False,
) -> Proposal:
    """Checks everything that can be checked without touching the run.

    `policy_file` None is for a rollback: the settings of the epoch that took `to_step`.
    `same_allowed` is for a look at a policy, which may be the one that rules. Raises PolicyRefused,
    config.ConfigError, or OSError where the data cannot be looked at.
    """
    durable = durable_of(directory)
    if to_step is not None and to_step not in durable.on_disk:
        steps = sorted(durable.on_disk)
        raise PolicyRefused(f"there is no checkpoint of step {to_step}; there are {steps}")
    parent = durable.parent_of(to_step)
    ruling = _ruling(durable, directory)
    base = _settings_of(parent, ruling)
    text, settings = ("", base) if policy_file is None else _submitted(base, policy_file)
    changes = _checked(ruling, settings, policy_file)
    found = None
    if policy_file is not None and settings.trainer.command is None:
        found = _examined(settings, directory, durable, to_step)
        changes += _other_texts(found)
    if to_step is None and not changes and not same_allowed:
        raise PolicyRefused(f"{policy_file}: changes nothing; the run has this policy already")
    content: Json = {
        "at": at,
        "epoch": durable.epoch,
        "against": durable.settings_digest,
        "parent": parent.number,
        "to_step": to_step,
        "policy": text or config.dump_policy(settings),
        "settings": config.dump(settings),
        "policy_digest": config.policy_digest(settings),
        "reason": reason,
    }
    warnings = curriculum.fragile_arms(config.curriculum_policy(settings.policy))
    return Proposal(content, changes, settings, found.bandit if found else None, warnings)


def epoch_of(durable: Durable, request: str) -> Epoch | None:
    """The epoch that this request has begun."""
    return next((epoch for epoch in durable.epochs if epoch.request == request), None)


def _ruling(durable: Durable, directory: Path) -> Settings:
    """As the journal has them: a crash may have left run.toml behind."""
    recorded = durable.epochs[-1].settings
    if not recorded:
        return config.load(directory / contract.RUN_FILE)
    return config.parse_toml(recorded, str(directory / contract.JOURNAL_FILE))


def _settings_of(epoch: Epoch, ruling: Settings) -> Settings:
    """An epoch's settings with the operational ones of today; its own are as old as it is."""
    if not epoch.settings:
        return ruling
    old = config.parse_toml(epoch.settings, "the journal")
    return config.accept(old, config.compare(old, ruling).operational)


def _submitted(base: Settings, policy_file: Path) -> tuple[str, Settings]:
    """The text of the file and the base under it: its [policy] replaces the old one, other keys
    overlay. The file is read once, so that what was checked is what is sent."""
    raw = config.read(policy_file)
    submitted = config.tables(raw, str(policy_file))
    allowed = {"policy", "training", "samples", "checkpoint", "evaluation"}
    unknown = sorted(submitted.keys() - allowed)
    if unknown:
        raise config.ConfigError(
            [
                config.Problem(
                    str(policy_file), name, None, f"only what a pivot may change: {sorted(allowed)}"
                )
                for name in unknown
            ]
        )
    tree: dict[str, Any] = base.tree()
    for section, table in submitted.items():
        replaced = section == "policy" or not isinstance(table, dict)
        tree[section] = table if replaced else {**tree[section], **table}
    return raw.decode(), config.parse(tree, str(policy_file))


def _checked(ruling: Settings, settings: Settings, policy_file: Path | None) -> list[Change]:
    comparison = config.compare(ruling, settings)
    refused = [*comparison.identity, *comparison.operational]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        raise PolicyRefused(f"{policy_file}: a pivot cannot change these:\n{lines}")
    return comparison.policy


def _examined(
    settings: Settings, directory: Path, durable: Durable, to_step: int | None
) -> data_check.Found:
    try:
        return data_check.examine(settings, directory, durable.epoch + 1, to_step)
    except data_check.DataRefused as refusal:
        raise PolicyRefused(str(refusal)) from refusal


def _other_texts(found: data_check.Found) -> list[Change]:
    """Arms that stay by name and have other text now: to the run each is a new arm, and the one
    that had its name has left."""
    saved = {} if found.base is None else found.base.state["arms"]
    return [
        Change(f"policy.arms.{name}.text", saved[name]["corpus_digest"], digest)
        for name, digest in found.digests.items()
        if name in saved and saved[name]["corpus_digest"] != digest
    ]
