"""What one life of the supervisor is given to begin with.

What may live here: plain values, made by `start` out of the settings and the command line, and
read by the daemon. Nothing here is looked up or decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from supervisor import events as ev
from supervisor.attempt_logs import LogRules
from supervisor.channels import Channel
from supervisor.contract import Json
from supervisor.state import Rules


class Retention(NamedTuple):
    """How many checkpoints stay: the newest, those of every so many steps (0: none), and those of
    branches that were left behind."""

    keep_last: int
    keep_every: int
    keep_superseded: int


@dataclass(frozen=True, slots=True)
class Options:
    """What the daemon needs of the settings, already checked. `home` is where the command runs:
    relative paths of the settings begin there."""

    rules: Rules
    run_id: str
    command: Sequence[str]
    environment: Mapping[str, str]
    home: Path
    retention: Retention
    samples_keep: int
    disk_headroom_bytes: int
    logs: LogRules
    channels: Sequence[Channel] = ()


@dataclass(frozen=True, slots=True)
class Reread:
    """What the settings say now, and what of it is to be put on record; or why nothing changes."""

    options: Options | None
    records: tuple[ev.Record, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """How this life begins: records to journal first, and what the operator wants."""

    records: tuple[ev.Record, ...]
    wish: str | None
    request: str
    from_scratch: bool
    pivot: Json | None = None
