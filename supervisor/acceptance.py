"""What a start makes of a run that exists: the recorded settings, with what a start may change.

What may live here: the refusal, and the records that an accepted change leaves. Nothing is written
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from supervisor import config, events as ev
from supervisor.changes import Change
from supervisor.checkpoints import find
from supervisor.config import Settings
from supervisor.contract import ContractError, Entry, ExitCode, parse_receipt
from supervisor.ledger import iterate_backward
from supervisor.rundir import RunDirectory, lock_holder
from supervisor.state import Durable


class Refused(Exception):
    """The operator's request cannot be carried out; `code` is the exit code it deserves."""

    def __init__(self, text: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(text)
        self.code = code


def on_record(durable: Durable, directory: RunDirectory) -> Settings:
    current = durable.epochs[-1].settings
    if not current:
        return config.load(directory.run_file)
    return config.parse_toml(current, str(directory.journal))


def created(settings: Settings) -> ev.RunCreated:
    assert settings.run.id is not None
    return ev.RunCreated(
        settings.run.id,
        settings.run.name,
        settings.training.steps,
        config.policy_digest(settings),
        config.dump(settings),
        config.dump_policy(settings),
    )


def accept(
    recorded: Settings, requested: Settings, durable: Durable, directory: RunDirectory
) -> tuple[Settings, list[ev.Record]]:
    """The recorded settings with what a start may change. Raises Refused for the rest."""
    comparison = config.compare(recorded, requested)
    everything = [*comparison.identity, *comparison.policy, *comparison.operational]
    keys = {change.key for change in everything}
    if keys - {"run.directory"} and "run.name" not in keys and not _begun(durable, directory):
        settings = config.resolve(requested, recorded.run.id or "")
        return settings, [_changed(everything, settings, whole=True)]
    identity = [
        change
        for change in comparison.identity
        # A file that still says what it said before the run was extended does not shorten it.
        if not (change.key == "training.steps" and requested.origins.get(change.key) != "flag")
    ]
    if identity:
        lines = "\n".join(f"  {change}" for change in identity)
        raise Refused(
            f"{directory.path} is a run with other settings; start cannot change these:\n{lines}\n"
            "give the new run another run.name (or run.directory), or take the recorded values"
        )
    if comparison.policy and not _was_policy_once(requested, durable):
        lines = "\n".join(f"  {change}" for change in comparison.policy)
        raise Refused(
            f"{directory.path}: these change how the run learns; only a pivot may"
            f" (supervisor pivot --policy FILE):\n{lines}"
        )
    records: list[ev.Record] = []
    if durable.run_id and not durable.epochs[-1].settings:
        # An import's may be edited until its first life, which is measured by them from then on.
        records.append(_changed([], recorded, whole=True))
    changes = [c for c in comparison.operational if c.key != "run.directory"]
    if changes:
        recorded = config.accept(recorded, changes)
        records.append(_changed(changes, recorded))
    return recorded, records


def _begun(durable: Durable, directory: RunDirectory) -> bool:
    """Whether there is anything that other settings could contradict: a step, a checkpoint, an
    ancestor, or a trainer that may be about to make one."""
    if durable.best_checkpoint is not None or durable.lineage or durable.imported:
        return True
    if len(durable.epochs) > 1 or find(directory.checkpoints) or find(directory.superseded):
        return True
    if directory.ledger.exists() and next(iterate_backward(directory.ledger), None) is not None:
        return True
    if lock_holder(directory.trainer_lock) is not None:
        return True
    return any(map(_has_steps, directory.receipt_files()))


def _has_steps(receipts: tuple[int, Path]) -> bool:
    """Whether receipts hold a step that is not merged yet, or something that nobody can read."""
    _, path = receipts
    try:
        lines = (line for line in path.read_bytes().split(b"\n") if line.strip(b"\0"))
        return any(isinstance(parse_receipt(line, path.name), Entry) for line in lines)
    except ContractError:
        return True


def _changed(
    changes: Iterable[Change], settings: Settings, whole: bool = False
) -> ev.SettingsChanged:
    """`whole`: the policy is another one, too."""
    return ev.SettingsChanged(
        {change.key: [change.recorded, change.requested] for change in changes},
        settings.training.steps,
        config.dump(settings),
        config.policy_digest(settings) if whole else "",
        config.dump_policy(settings) if whole else "",
    )


def _was_policy_once(requested: Settings, durable: Durable) -> bool:
    """The file from before a pivot asks for nothing new: it is how the run was begun."""
    return any(
        epoch.settings
        and not config.compare(config.parse_toml(epoch.settings, "journal"), requested).policy
        for epoch in durable.epochs[:-1]
    )
