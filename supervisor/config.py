"""The settings of a run: read from file, environment and flags, checked, and written back.

What may live here: where each value comes from, and what is said of a wrong one. This is the one
door to settings for everyone else: their shape is in `schema`, what a run that exists says to new
ones in `changes`. Imported only where settings are read, because pydantic is slow to load:
`status` and `--help` do without.

Invariants:
- What `dump` writes, `load` reads back as an equal value.
- All mistakes are told at once, each with its file, key, value and what was expected.
- Precedence: flags over environment (`SUPERVISOR_TRAINING__STEPS=600`) over file over default.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from supervisor import contract
from supervisor.changes import Change, Comparison, accept, compare
from supervisor.contract import INT32_MAX, ContractError, Json, canonical, digest, runs_directory
from supervisor.foreign import OperatorError, check_depth
from supervisor.schema import (
    BYTES_VOCABULARY,
    PRESETS,
    Arm,
    KeyPath,
    Model,
    Policy,
    Settings,
    Training,
    broken_rules,
    curriculum_policy,
    parameter_count,
    show,
)

__all__ = [
    "BYTES_VOCABULARY",
    "PRESETS",
    "Arm",
    "Change",
    "Comparison",
    "ConfigError",
    "Model",
    "Policy",
    "Problem",
    "Settings",
    "Training",
    "accept",
    "compare",
    "curriculum_policy",
    "dump",
    "dump_policy",
    "load",
    "parameter_count",
    "parse",
    "parse_toml",
    "policy_digest",
    "read",
    "read_toml",
    "resolve",
    "show",
    "tables",
]

ENVIRONMENT_PREFIX: Final = "SUPERVISOR_"
FILE_BYTES_MAX: Final = 1024 * 1024
LINE_DOTS_MAX: Final = 200
KEY_PARTS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `file` is the file, "environment" or "--set"; no `key` is all of the file, and a
    `value` of None is no value."""

    file: str
    key: str
    value: object
    expected: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {show(self.value)}"
        place = f"{self.file}: {self.key}" if self.key else self.file
        return f"{place}{shown}: expected {self.expected}"


class ConfigError(OperatorError):
    """The operator's configuration is wrong; its text has one line for each of `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)


# --- reading --------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    home: Path | None = None,
) -> Settings:
    """The settings of a file under `environment` and `overrides` ("training.steps=800").

    Values of both are TOML; what is not TOML is text. A run without a name takes that of the file,
    one without a directory lives under its name where runs are; one that has begun is where its own
    file is now. Relative paths among the settings begin at `home`, or where this process is.
    Raises ConfigError with every mistake found.
    """
    file = Path(path)
    assignments, malformed = _split(overrides)
    layers = {
        "file": read_toml(file),
        "environment": _nest(_environment_assignments(environment or {})),
        "flag": _nest(assignments),
    }
    tree: Json = {}
    for layer in layers.values():
        tree = _merge(tree, layer)
    if isinstance(tree.setdefault("run", {}), dict):
        named = {"name": file.stem} | tree["run"]
        place = os.path.join(runs_directory(environment or {}), str(named["name"]))
        tree["run"] = {"directory": place} | named
        own = file.name == contract.RUN_FILE and (file.parent / contract.JOURNAL_FILE).exists()
        if own and _origin(("run", "directory"), layers) == "file":
            tree["run"]["directory"] = str(file.parent.absolute())
    settings, mistakes = _validate(tree, home)
    sources = {"flag": "--set", "environment": "environment"}
    problems = malformed + [
        mistake.of(sources.get(_origin(mistake.path, layers), str(path))) for mistake in mistakes
    ]
    if problems:
        raise ConfigError(problems)
    origins = {
        f"{section}.{key}": _origin((section, key), layers)
        for section, table in settings.tree().items()
        for key in table
    }
    return settings.with_origins(origins)


def parse(tree: Mapping[str, Any], where: str) -> Settings:
    """Settings out of JSON values, such as a manifest's configuration. Raises ConfigError."""
    settings, mistakes = _validate(tree)
    if mistakes:
        raise ConfigError([mistake.of(where) for mistake in mistakes])
    return settings


def parse_toml(text: str, where: str) -> Settings:
    """Settings out of what `dump` wrote. Raises ConfigError."""
    return parse(tables(text.encode(), where), where)


def read_toml(file: Path) -> Json:
    """The tables of a file, unchecked. Raises ConfigError where it is no TOML."""
    return tables(read(file), str(file))


def read(file: Path) -> bytes:
    """The content of a file of settings. Raises ConfigError where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return stream.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        expected = f"a file of settings, in TOML ({reason})"
    raise ConfigError([Problem(str(file), "", None, expected)])


def tables(raw: bytes, where: str) -> Json:
    """The tables of a text, unchecked. Raises ConfigError where it is no TOML, or a TOML that
    takes tomllib minutes and gigabytes: a key of many parts costs the square of their number."""
    try:
        if len(raw) > FILE_BYTES_MAX:
            raise ContractError(f"more than {FILE_BYTES_MAX} bytes")
        if max(line.count(b".") for line in raw.split(b"\n")) > LINE_DOTS_MAX:
            raise ContractError(f"a line with more than {LINE_DOTS_MAX} dots; break it")
        found = tomllib.loads(raw.decode("utf-8-sig"))  # some editors begin a file with a mark
        check_depth(found, "the tables")
        return found
    except RecursionError:
        expected = "TOML that is not nested so deep"
    except ValueError as error:  # TOMLDecodeError names line and column, UnicodeDecodeError a byte
        expected = f"TOML in UTF-8 ({error})"
    raise ConfigError([Problem(where, "", None, expected)])


def _split(overrides: Iterable[str]) -> tuple[dict[str, str], list[Problem]]:
    assignments: dict[str, str] = {}
    malformed = []
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if equals and key.isascii() and all(parts) and len(parts) <= KEY_PARTS_MAX:
            assignments[key.strip()] = value.strip()
        else:
            malformed.append(Problem("--set", text, None, "the form section.key=value"))
    return assignments, malformed


def _environment_assignments(environment: Mapping[str, str]) -> dict[str, str]:
    """Only names with `__` are settings. What a supervised trainer is told (contract.ENV_ATTEMPT
    and its neighbours) has none, nor have the variables of the PyPI project `supervisor`."""
    names = {name: name.removeprefix(ENVIRONMENT_PREFIX) for name in sorted(environment)}
    return {
        short.lower().replace("__", "."): environment[name]
        for name, short in names.items()
        if short != name and all(short.split("__")) and 1 <= short.count("__") < KEY_PARTS_MAX
    }


def _nest(assignments: Mapping[str, str]) -> Json:
    tree: Json = {}
    for key, text in assignments.items():
        branch: Any = _toml_value(text)
        for part in reversed(key.split(".")):
            branch = {part: branch}
        tree = _merge(tree, branch)
    return tree


def _toml_value(text: str) -> Any:
    try:
        document = tables(f"value = {text}".encode("utf-8", "surrogateescape"), "--set")
    except ConfigError:
        return text
    return document["value"] if document.keys() == {"value"} else text


def _merge(below: Json, above: Json) -> Json:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            value = _merge(under, value)
        merged[key] = value
    return merged


def _origin(path: KeyPath, layers: dict[str, Json]) -> str:
    """The highest layer that has a value at `path`, or the list that `path` leads into."""
    for name, layer in reversed(layers.items()):
        node: Any = layer
        for part in path:
            if not isinstance(node, dict):
                return name
            if part not in node:
                break
            node = node[part]
        else:
            return name
    return "default"


# --- mistakes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mistake:
    """What is wrong at `path` of a tree; a `value` of None means that there is none."""

    path: KeyPath
    value: object
    expected: str

    def of(self, file: str) -> Problem:
        return Problem(file, _dotted(self.path), self.value, self.expected)


def _dotted(path: KeyPath) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _validate(tree: Mapping[str, Any], home: Path | None = None) -> tuple[Settings, list[_Mistake]]:
    """The settings of `tree`, and every mistake in it; they are of use only if there is none.

    A wrong value gives way to its default, so that one pass finds the mistakes behind it as well.
    A rule that involves such a value is not judged.
    """
    valid: Any = tree
    mistakes: list[_Mistake] = []
    while True:
        try:
            settings = Settings.model_validate(valid, context={"home": home or ""})
            break
        except ValidationError as error:
            found = _mistakes(error, valid)
            mistakes = mistakes or found
            valid = _without(valid, [mistake.path for mistake in found])
            if valid is None:  # not one table was sound, such as under a key that is no text
                return Settings(), mistakes
    wrong = [mistake.path for mistake in mistakes]
    for paths, value, expected in broken_rules(settings):
        if not any(_overlap(path, other) for path in paths for other in wrong):
            mistakes.append(_Mistake(paths[0], value, expected))
    return settings, mistakes


def _overlap(a: KeyPath, b: KeyPath) -> bool:
    return a[: len(b)] == b[: len(a)]


def _mistakes(error: ValidationError, tree: Any) -> list[_Mistake]:
    """One mistake a place, though pydantic reports every branch of a union, and of a list with a
    wrong item that it is too short as well."""
    mistakes: dict[KeyPath, _Mistake] = {}
    for detail in error.errors(include_url=False):
        path, value = _follow(detail["loc"], tree)
        match detail["type"]:
            case "missing":
                path, value = detail["loc"], None
                expected = _expected(path)
            case "extra_forbidden":
                expected = _expected_key(path)
            case "less_than_equal" if detail["ctx"]["le"] == INT32_MAX:
                expected = f"{_expected(path)} and at most {INT32_MAX}"
            case _:
                expected = _expected(path)
        mistakes.setdefault(path, _Mistake(path, value, expected))
    return [
        mistake
        for path, mistake in mistakes.items()
        if not any(len(other) > len(path) and _overlap(path, other) for other in mistakes)
    ]


def _follow(loc: KeyPath, tree: Any) -> tuple[KeyPath, object]:
    """The part of `loc` that exists in `tree`, and its value; a union adds its branch."""
    for depth, part in enumerate(loc):
        if isinstance(part, str) and not (isinstance(tree, dict) and part in tree):
            return loc[:depth], tree
        tree = tree[part]
    return loc, tree


def _without(tree: Any, paths: Sequence[KeyPath]) -> Any:
    """A copy of `tree` less what is at `paths`; a table that lacks a key goes as a whole."""
    if () in paths:
        return None
    branches = {path[0]: [other[1:] for other in paths if other[0] == path[0]] for path in paths}
    if not isinstance(tree, dict):
        items = [
            _without(item, branches[index]) if index in branches else item
            for index, item in enumerate(tree)
        ]
        return [item for item in items if item is not None]
    if any(key not in tree for key in branches):
        return None
    pruned = tree | {key: _without(tree[key], branches[key]) for key in branches}
    return {key: value for key, value in pruned.items() if key not in branches or value is not None}


# --- what a value should have been ----------------------------------------------------------------


def _kind_at(path: KeyPath) -> Any:
    """The type at `path` of the schema, a place that exists."""
    kind: Any = Settings
    for part in path:
        if isinstance(part, str):
            kind = kind.model_fields[part].annotation
        else:
            items = get_args(kind)[0] if NoneType in get_args(kind) else kind
            kind = get_args(items)[0]
    return kind


def _expected(path: KeyPath) -> str:
    if not path or isinstance(path[-1], int):
        return _describe(_kind_at(path))
    field = _kind_at(path[:-1]).model_fields[path[-1]]
    return field.description or _describe(field.annotation)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        described = (extra.description for extra in get_args(kind) if isinstance(extra, FieldInfo))
        return [text for text in described if text][-1]
    if get_origin(kind) is Literal:
        values = ", ".join(show(value) for value in get_args(kind))
        return f"one of {values}" if len(get_args(kind)) > 1 else values
    if get_args(kind):
        return " or ".join(_describe(one) for one in get_args(kind) if one is not NoneType)
    return "true or false" if kind is bool else "a table"


def _expected_key(path: KeyPath) -> str:
    """What an unknown key may have meant: the same name in another section, or a neighbour of
    nearly the same name."""
    *parents, name = path
    siblings = list(_kind_at(tuple(parents)).model_fields)
    meant = [
        f"{section}.{name}"
        for section in Settings.model_fields
        if name in _kind_at((section,)).model_fields
    ]
    near = difflib.get_close_matches(str(name), siblings, 1)
    meant += [_dotted((*parents, one)) for one in near]
    if meant:
        return f"a known key; did you mean {meant[0]}?"
    return f"a known key, one of {', '.join(siblings)}"


# --- writing --------------------------------------------------------------------------------------


def resolve(settings: Settings, run_id: str) -> Settings:
    """The settings of a new run: what depends on the machine, and the horizon of the schedule,
    decided for good. `samples.every` and `evaluation.every` stay open: they follow the cadence of
    checkpoints, also where a pivot changes that."""
    tree = settings.tree()
    cores = len(os.sched_getaffinity(0))
    tree["run"]["id"] = run_id
    if settings.trainer.threads == "auto":
        tree["trainer"]["threads"] = max(1, cores // settings.trainer.processes)
    if settings.training.schedule_steps is None:
        tree["training"]["schedule_steps"] = settings.training.steps
    return parse(tree, "resolved settings").with_origins(settings.origins)


def dump(settings: Settings) -> str:
    """The TOML of all settings that have a value."""
    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))


def dump_policy(settings: Settings) -> str:
    """The TOML of the policy alone, as a pivot would submit it."""
    return tomli_w.dumps({"policy": settings.model_dump(mode="json", exclude_none=True)["policy"]})


def policy_digest(settings: Settings) -> str:
    """SHA-256 of the canonical policy: of what it says, not of how the file is laid out."""
    return digest(canonical(settings.tree()["policy"]))
