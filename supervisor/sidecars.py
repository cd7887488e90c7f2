"""The small JSON files of a run, as their readers get them: status, samples, state, training.

What may live here: the shape of each, checked once where it is read. They are hints and views, not
history: what is wrong with one is told with its place and what to do. The supervisor itself sets a
damaged one aside and goes on; no life ends of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from supervisor.contract import STATUS_FILE, ContractError, Json
from supervisor.foreign import array, count, integer, number, object_, parse_json, shown, text
from supervisor.rundir import RunError

T = TypeVar("T")

SIDECAR_BYTES_MAX: Final = 64 * 1024 * 1024
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_Check = Callable[[Any, str], Any]


def _or_none(check: _Check) -> _Check:
    return lambda value, where: None if value is None else check(value, where)


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ContractError(f"{where}: expected true or false, got {shown(value)}")
    return value


def _figure(value: Any, where: str) -> float | str:
    return value if isinstance(value, str) else number(value, where)


def _run(value: Any, where: str) -> str:
    """Names files, so it is none but a plain name."""
    if _RUN.fullmatch(text(value, where)) is None:
        raise ContractError(f"{where}: expected the name of a run, got {shown(value)}")
    return str(value)


def _alarms(value: Any, where: str) -> list[Json]:
    return [_filled(one, _ALARM, where) for one in array(value, where)]


# Key -> what it must be, and its value where an older or newer version did not write it.
_Shape = dict[str, tuple[_Check, Any]]
_TEXT: Final = (_or_none(text), None)
_COUNT: Final = (_or_none(count), None)
_INTEGER: Final = (_or_none(lambda value, where: integer(value, where, -(2**31))), None)
_FIGURE: Final = (_or_none(_figure), None)

_ALARM: Final[_Shape] = {"name": (text, ""), "detail": (text, "")}
_CHECKPOINT: Final[_Shape] = {"step": _COUNT, "path": _TEXT, "verified": (_or_none(_truth), None)}
_REPLAY: Final[_Shape] = {
    "verified_steps": _COUNT,
    "diverged_steps": _COUNT,
    "first_diverged_step": _COUNT,
}
_LAST_EXIT: Final[_Shape] = {"cause": _TEXT, "code": _INTEGER, "signal": _INTEGER}


def _table(shape: _Shape) -> tuple[_Check, Json]:
    return lambda value, where: _filled(value, shape, where), {
        key: missing for key, (_, missing) in shape.items()
    }


_STATUS: Final[_Shape] = {
    "run": (_or_none(_run), None),
    "phase": _TEXT,
    "trainer_phase": _TEXT,
    "wish": _TEXT,
    "step": _COUNT,
    "target_step": _COUNT,
    "attempt": _COUNT,
    "restarts": _COUNT,
    "epoch": _COUNT,
    "loss": _FIGURE,
    "loss_ema": _FIGURE,
    "steps_per_second": _FIGURE,
    "evaluation": (_or_none(object_), None),
    "checkpoint": _table(_CHECKPOINT),
    "supervisor_pid": _COUNT,
    "trainer_pid": _COUNT,
    "grace_seconds": _FIGURE,
    "replay": _table(_REPLAY),
    "last_exit": _table(_LAST_EXIT),
    "alarms": (_alarms, []),
    "reason": _TEXT,
}


def _filled(value: Any, shape: _Shape, where: str) -> Json:
    found = object_(value, where)
    return {
        **found,
        **{
            key: check(found[key], f"{where} {key}") if key in found else missing
            for key, (check, missing) in shape.items()
        },
    }


def unknown_status(directory: Path) -> Json:
    """What there is to say of a run of which nothing is on record: every key, and no value."""
    place = {"schema_version": 1, "directory": str(directory.resolve())}
    return {**place, **_filled({}, _STATUS, str(directory))}


def read_status(directory: Path) -> Json | None:
    """The status of a run with every key that a reader relies on; None where there is none.

    Raises RunError where the file is something else.
    """
    path = directory / STATUS_FILE

    def checked(value: Any) -> Json | None:
        return _filled(value, _STATUS, str(path))

    return _read(path, checked, None)


def read_samples(path: Path) -> list[Json]:
    """The sample audits of a run, oldest first; each has a step, a prompt and a text."""

    def checked(value: Any) -> list[Json]:
        return [_sample(row, str(path)) for row in array(value, str(path))]

    return _read(path, checked, [])


def _sample(value: Any, where: str) -> Json:
    row = object_(value, f"{where} row")
    count(row.get("step"), f"{where} step")
    for key in ("prompt", "text"):
        text(row.get(key), f"{where} {key}")
    return row


def read_state(path: Path) -> Json:
    """The operator's view of the bandit; empty where there is none."""
    return _read(path, lambda value: object_(value, str(path)), {})


def read_training(path: Path) -> Json:
    """What each attempt ran on, by its name; empty where there is none."""

    def checked(value: Any) -> Json:
        found = object_(value, str(path))
        for environment in found.values():
            object_(environment, f"{path} attempt")
        return found

    return _read(path, checked, {})


def set_aside(path: Path) -> Path:
    """Gives a damaged file a name under which nobody looks for it; returns that."""
    names = (f"{path.name}.damaged{number or ''}" for number in itertools.count())
    free = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(free)
    return free


def _read(path: Path, check: Callable[[Any], T], missing: T) -> T:
    """What `check` makes of a file's JSON; `missing` where there is no file."""
    try:
        with path.open("rb") as file:
            raw = file.read(SIDECAR_BYTES_MAX + 1)
    except FileNotFoundError:
        return missing
    try:
        return check(parse_json(raw, str(path), SIDECAR_BYTES_MAX))
    except ContractError as error:
        raise RunError(
            f"{error}; expected what the supervisor wrote: the next start begins it anew"
        ) from error
