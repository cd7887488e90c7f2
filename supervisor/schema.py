"""The shape of a configuration: its tables, keys, kinds of values, and the rules between them.

What may live here: the tables, and what must hold between their values. Nothing is read and
nothing is reported here; that is `config`, through which all others use these names. Only these
two modules import pydantic.

Invariants:
- Settings never change once built, and nothing in them was converted: "1" is not 1.
- A key that is not in a table is a mistake, never ignored.
- Everything has a default but the name of an arm, so a wrong value can give way to its default
  while the rest is checked.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from supervisor import curriculum
from supervisor.contract import INT32_MAX, Json

BYTES_VOCABULARY: Final = 257  # 256 bytes and one special token

PRESETS: Final[Mapping[str, Mapping[str, int]]] = {
    "quickstart": {"width": 128, "heads": 4, "layers": 5, "context": 128},
    "andrea-12m": {"width": 384, "heads": 12, "layers": 6, "context": 1024},
    "andrea-120m": {"width": 768, "heads": 12, "layers": 12, "context": 1024},
}


def _absolute(path: str, info: ValidationInfo) -> str:
    """A path of the settings begins where the command runs: the validation's context, or here."""
    return os.path.abspath(os.path.join((info.context or {}).get("home", ""), path))


def _absolute_pattern(pattern: str, info: ValidationInfo) -> str:
    """Only what is written in the settings is a pattern, not the directory where it begins."""
    home = "" if os.path.isabs(pattern) else glob.escape(_absolute("", info))
    return os.path.normpath(os.path.join(home, pattern))


# --- kinds of values: the description completes "expected …" ---

Count = Annotated[int, Field(ge=1, le=INT32_MAX, description="an integer of at least 1")]
Natural = Annotated[int, Field(ge=0, le=INT32_MAX, description="an integer of at least 0")]
Seed = Annotated[int, Field(ge=0, lt=2**63, description="an integer from 0 to 2^63 - 1")]
# OpenMP ends the process, without a word or by a fault, where it cannot have its threads.
Threads = Annotated[int, Field(ge=1, le=4096, description="an integer from 1 to 4096")]
Positive = Annotated[float, Field(gt=0, description="a number above 0")]
NonNegative = Annotated[float, Field(ge=0, description="a number of at least 0")]
Fraction = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")]
Rate = Annotated[float, Field(gt=0, le=1, description="a number above 0 and at most 1")]
# Scores divided by less than this are infinite before it makes a difference which is the highest.
Temperature = Annotated[float, Field(ge=1e-3, description="a number of at least 0.001")]
Text = Annotated[str, Field(min_length=1, description="text that is not empty")]
FilePath = Annotated[Text, AfterValidator(_absolute), Field(description="a path")]
Pattern = Annotated[Text, AfterValidator(_absolute_pattern), Field(description="a path")]
RunName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="a name of at most 64 letters, digits, '.', '_', '-' (set run.name)",
    ),
]
ArmName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$",
        description="a name of at most 64 of a-z, 0-9, '_', '.', '-'",
    ),
]
Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$", description='"auto", "cpu" or "cuda:N"'),
]
Url = Annotated[
    str,
    Field(pattern=r"^https?://[!-~]+$", max_length=8192, description="a URL, https://HOST/PATH"),
]


class _Table(BaseModel):
    """A table of the file: nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(_Table):
    """The run directory is `directory` itself; `id` is given once, when the run is created."""

    name: RunName = "run"
    directory: FilePath
    shared: bool = False
    id: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_directory(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {"directory": f"runs/{data.get('name', 'run')}"} | data


class Model(_Table):
    """The shape of the network. Keys that are not given are those of the preset.

    `vocabulary` None means: whatever the tokenizer has.
    """

    preset: Literal["quickstart", "andrea-12m", "andrea-120m"] = "quickstart"
    vocabulary: Count | None = None
    width: Count
    heads: Count
    layers: Count
    context: Count
    dropout: Annotated[float, Field(ge=0, lt=1, description="a number from 0 to below 1")] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        preset = str(data.get("preset"))
        return {**PRESETS.get(preset, PRESETS["quickstart"]), **data}


class Tokenizer(_Table):
    kind: Literal["bytes", "segments", "json"] = "bytes"
    file: FilePath | None = None


class Training(_Table):
    """`schedule_steps` is the horizon of the schedule. It is frozen when the run is created, so
    that a run which is extended later keeps the learning rates it would have had."""

    steps: Count = 600
    seed: Seed = 0
    batch_windows: Count = 8
    accumulate: Count = 1
    learning_rate: Positive = 3e-3
    warmup_steps: Natural = 0
    schedule: Literal["constant", "cosine"] = "cosine"
    schedule_steps: Count | None = None
    minimum_rate_ratio: Fraction = 0.1
    weight_decay: NonNegative = 0.01
    clip_norm: Positive = 1.0


class Trainer(_Table):
    """`command` runs another program in place of our trainer."""

    device: Device = "auto"
    threads: Threads | Literal["auto"] = "auto"
    deterministic: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"
    tf32: bool = False
    command: tuple[Text, ...] | None = Field(
        default=None, strict=False, min_length=1, description="a list of at least one text"
    )
    processes: Count = 1


class Checkpoint(_Table):
    """`keep_superseded`: how many checkpoints of branches that were left stay, beside pinned ones.
    `when_full` says what to do once room for the next checkpoint cannot be made: train on without
    new ones until there is, or stop. Making room takes superseded/, then what is in quarantine/,
    then checkpoints down to the last two proven ones; pins stay."""

    every: Count = 100
    keep_last: Annotated[int, Field(ge=2, le=INT32_MAX, description="an integer of at least 2")] = 5
    keep_every: Natural = 0
    keep_superseded: Natural = 5
    when_full: Literal["continue", "stop"] = "continue"


class Samples(_Table):
    every: Count | None = None
    prompts: Annotated[
        tuple[Text, ...],
        Field(strict=False, min_length=1, description="a list of at least one text"),
    ] = ("The ", "In Python, ", "def ")
    tokens: Count = 120
    temperature: Temperature = 0.8
    keep: Annotated[int, Field(ge=1, le=10_000, description="an integer from 1 to 10000")] = 200


class Evaluation(_Table):
    """`fraction` of each arm's documents is held out and never trained on."""

    every: Count | None = None
    fraction: Annotated[float, Field(ge=0, lt=1, description="a number from 0 to below 1")] = 0.05
    windows: Count = 32


class Arm(_Table):
    """One source of training text: `files`, or a corpus that comes with Python."""

    name: ArmName
    files: Annotated[tuple[Pattern, ...], Field(strict=False, description="a list of paths")] = ()
    builtin: Literal["python-docs", "python-docstrings", "python-source"] | None = None
    weight: NonNegative = 1.0
    floor: NonNegative = 0.0
    cap: NonNegative = 1.0


class Policy(_Table):
    """How arms are chosen. Keys below `arms` tune the adaptive kinds, `run_steps_*` and
    `maximum_epochs` all; None is what the kind says (see `supervisor.policy`)."""

    kind: Literal["static", "ucb1", "ducb", "softmax_ema", "exp3"] = "ducb"
    bounds: Literal["share", "weight"] = "share"
    warmup_steps: Natural = 0
    warmup_arms: Annotated[
        tuple[ArmName, ...], Field(strict=False, description="a list of arm names")
    ] = ()
    arms: Annotated[
        tuple[Arm, ...], Field(strict=False, description="a list of tables [[policy.arms]]")
    ] = ()
    window_pulls: Count | None = None
    run_steps_minimum: Count | None = None
    run_steps_maximum: Count | None = None
    confidence: NonNegative | None = None
    tau: Positive = 0.1
    gamma: Rate = 0.98
    ema_alpha: Rate = 0.1
    exploration: Fraction = 0.1
    maximum_epochs: Positive | None = None
    text_discount: bool = True
    heldout_gate: bool = True


class Restart(_Table):
    delay_seconds: Positive = 1.0
    maximum_delay_seconds: Positive = 300.0
    deaths: Count = 5


class Hang(_Table):
    """How long a trainer may make no progress: `start_seconds` until it has loaded and made its
    first steps; then `factor` times the median step, but never less than `step_seconds`; in a save,
    a sample or an evaluation never less than `save_seconds`. Its stacks are taken first, and it has
    `evidence_seconds` more to go on."""

    start_seconds: Positive = 1200.0
    step_seconds: Positive = 60.0
    save_seconds: Positive = 900.0
    evidence_seconds: Positive = 5.0
    factor: Annotated[float, Field(ge=1, description="a number of at least 1")] = 10.0


class Stop(_Table):
    """How long a trainer has for its last checkpoint, when a signal follows the message, and how
    long one that was killed may take to be gone."""

    grace_seconds: Positive = 120.0
    signal_after_seconds: Positive = 2.0
    kill_seconds: Positive = 30.0


class Alarms(_Table):
    """Who is told when a run fails, finishes, is stuck, goes round in circles or raises an alarm
    that matters. `notify` is a program and its arguments: it gets one JSON object on stdin.
    `webhook` is a URL that the same object is POSTed to; it is recorded with the other settings, so
    one with a secret in it belongs in a file of mode 0600, `webhook_file`, or in the environment,
    SUPERVISOR_WEBHOOK.

    `disk_headroom_bytes`: less free space than this on a disk of the run is an alarm."""

    notify: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[^\x00]+$", description="text")], ...],
        Field(strict=False, description="a list of texts, a program and its arguments"),
    ] = ()
    webhook: Url | None = None
    webhook_file: FilePath | None = None
    disk_headroom_bytes: Annotated[
        int, Field(ge=0, lt=2**63, description="an integer of at least 0")
    ] = 1 << 30


class Logs(_Table):
    """What attempts print, and the supervisor's own log. A log that takes more than `size_bytes`
    loses its middle; of old attempts `keep` logs stay, and those of the first and of the newest
    failures."""

    size_bytes: Annotated[
        int, Field(ge=1 << 16, lt=2**63, description="an integer of at least 65536")
    ] = 64 << 20
    keep: Count = 50


class Settings(_Table):
    """Every setting of a run. Compare by value; `origins` is beside the value."""

    run: Run = Field(default_factory=lambda: Run.model_validate({}))
    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    tokenizer: Tokenizer = Tokenizer()
    training: Training = Training()
    trainer: Trainer = Trainer()
    checkpoint: Checkpoint = Checkpoint()
    samples: Samples = Samples()
    evaluation: Evaluation = Evaluation()
    policy: Policy = Policy()
    restart: Restart = Restart()
    hang: Hang = Hang()
    stop: Stop = Stop()
    alarms: Alarms = Alarms()
    logs: Logs = Logs()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key -> flag, environment, file or default. Empty where nothing was loaded."""
        return self._origins

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.tree() == other.tree()

    __hash__ = None  # type: ignore[assignment]

    def tree(self) -> Json:
        """The settings as JSON values, for a manifest or a message; `parse` is the inverse."""
        return self.model_dump(mode="json")

    def with_origins(self, origins: Mapping[str, str]) -> Self:
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy


def parameter_count(model: Model, vocabulary: int) -> int:
    """2·V·d + T·d + 12·L·d²: token and output embedding, positions, and per layer four attention
    matrices and an MLP of four times the width. No biases, no learned normalisation."""
    width = model.width
    return 2 * vocabulary * width + model.context * width + 12 * model.layers * width**2


def show(value: object, length_max: int = 100) -> str:
    """A value as a configuration would have it, on one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


# --- rules between values -------------------------------------------------------------------------

KeyPath = tuple[str | int, ...]
_Broken = tuple[list[KeyPath], object, str]


def broken_rules(settings: Settings) -> Iterator[_Broken]:
    """The paths that a broken rule involves, the value at the first of them, what was expected."""
    yield from _broken_model_rules(settings.model, settings.tokenizer)
    training, restart, policy = settings.training, settings.restart, settings.policy
    horizon = training.schedule_steps or training.steps
    if training.schedule == "cosine" and training.warmup_steps >= horizon:
        involved = [("training", key) for key in ("warmup_steps", "schedule_steps", "steps")]
        yield [*involved], training.warmup_steps, f"fewer steps than the schedule has, {horizon}"
    if restart.delay_seconds > restart.maximum_delay_seconds:
        yield (
            [("restart", "delay_seconds"), ("restart", "maximum_delay_seconds")],
            restart.delay_seconds,
            f"at most restart.maximum_delay_seconds, {restart.maximum_delay_seconds:g}",
        )
    if settings.alarms.webhook is not None and settings.alarms.webhook_file is not None:
        involved = [("alarms", "webhook"), ("alarms", "webhook_file")]
        yield [*involved], None, "no value, as alarms.webhook_file has one"
    if policy.arms or settings.trainer.command is None:
        yield from _broken_policy_rules(policy)


def _broken_model_rules(model: Model, tokenizer: Tokenizer) -> Iterator[_Broken]:
    if model.width % model.heads:
        involved: list[KeyPath] = [("model", "width"), ("model", "heads")]
        yield involved, model.width, f"a multiple of model.heads, {model.heads}"
    own_file, of_bytes = tokenizer.file is not None, tokenizer.kind == "bytes"
    if own_file and of_bytes:
        yield [("tokenizer", "file")], tokenizer.file, 'no file, as tokenizer.kind is "bytes"'
    if not own_file and not of_bytes:
        yield [("tokenizer", "file")], None, f'a file, as tokenizer.kind is "{tokenizer.kind}"'
    if of_bytes and model.vocabulary not in (None, BYTES_VOCABULARY):
        yield (
            [("model", "vocabulary"), ("tokenizer", "kind")],
            model.vocabulary,
            f'{BYTES_VOCABULARY}, as tokenizer.kind is "bytes"',
        )
    # Without a known vocabulary this is a lower bound; the trainer counts again.
    count = parameter_count(model, model.vocabulary or BYTES_VOCABULARY)
    if count > INT32_MAX:
        keys = ("width", "vocabulary", "layers", "context")
        expected = f"a model of at most {INT32_MAX} parameters; this one has {count}"
        yield [("model", key) for key in keys], model.width, expected


def _broken_policy_rules(policy: Policy) -> Iterator[_Broken]:
    names = [arm.name for arm in policy.arms]
    sound = True
    for broken in _broken_arm_rules(policy, names):
        sound = False
        yield broken
    if sound:
        try:
            curriculum.check_policy(curriculum_policy(policy))
        except (curriculum.PolicyError, curriculum.Infeasible) as error:
            yield [("policy",)], None, f"arms that can be scheduled ({error})"


def _broken_arm_rules(policy: Policy, names: list[str]) -> Iterator[_Broken]:
    for index, arm in enumerate(policy.arms):
        place: KeyPath = ("policy", "arms", index)
        if arm.name in names[:index]:
            yield [(*place, "name")], arm.name, "a name that no earlier arm has"
        if bool(arm.files) == (arm.builtin is not None):
            yield [place], arm.name, "either files or builtin, and not both"
        if arm.floor > arm.cap:
            yield [(*place, "floor"), (*place, "cap")], arm.floor, f"at most its cap, {arm.cap:g}"
    for index, name in enumerate(policy.warmup_arms):
        if name not in names:
            expected = f"the name of an arm, one of {', '.join(names)}"
            yield [("policy", "warmup_arms", index), ("policy", "arms")], name, expected


_TUNING_KEYS: Final = {field.name for field in fields(curriculum.Tuning)}


def curriculum_policy(policy: Policy) -> curriculum.Policy:
    """The part of a policy that chooses arms."""
    return curriculum.Policy(
        arms=tuple(
            curriculum.ArmPolicy(arm.name, arm.weight, arm.floor, arm.cap) for arm in policy.arms
        ),
        kind=policy.kind,
        bounds=policy.bounds,
        warmup_steps=policy.warmup_steps,
        warmup_arms=policy.warmup_arms,
        tuning=curriculum.Tuning(**policy.model_dump(include=_TUNING_KEYS)),
    )
