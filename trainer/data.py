"""The data that the settings name: the tokenizer and the arms. No torch here.

What may live here: the way from settings to text that is ready to draw from.

Invariant: a path in the settings is absolute, so what is loaded does not depend on where the
process was started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import config, contract
from supervisor.contract import INT32_MAX
from trainer import corpus, tokenizer
from trainer.corpus import Arm, DataError
from trainer.tokenizer import Tokenizer, TokenizerError

_ROOT: Final = Path("/")
# In base64 a window takes 16/3 bytes of the manifest; half a million of them are for all the rest.
WINDOWS_MAX: Final = contract.MANIFEST_BYTES_MAX * 3 // 16 - 500_000


@dataclass(frozen=True, slots=True)
class Data:
    """`arms` by name, in the order of the policy."""

    tokenizer: Tokenizer
    arms: dict[str, Arm]


def load(settings: config.Settings, give_up: Callable[[], bool] = lambda: False) -> Data | None:
    """Everything that the policy trains on; None where `give_up` said so between two arms.

    Raises ConfigError, TokenizerError or DataError, which name the setting, the file or the line.
    """
    ours = load_tokenizer(settings)
    _check_size(settings, ours)
    arms: dict[str, Arm] = {}
    for arm in settings.policy.arms:
        if give_up():
            return None
        arms[arm.name] = _load_arm(arm, ours, settings)
        _check_windows(sum(loaded.window_count for loaded in arms.values()))
    return Data(ours, arms)


def load_tokenizer(settings: config.Settings) -> Tokenizer:
    """The tokenizer, of the vocabulary that the model was given. Raises TokenizerError."""
    file = settings.tokenizer.file
    ours = tokenizer.load(settings.tokenizer.kind, None if file is None else Path(file))
    wanted = settings.model.vocabulary
    if wanted not in (None, ours.vocabulary):
        raise TokenizerError(
            f"model.vocabulary is {wanted}, but the tokenizer has {ours.vocabulary} ids; leave"
            " model.vocabulary out or use the tokenizer that it was written for"
        )
    return ours


def _check_size(settings: config.Settings, ours: Tokenizer) -> None:
    """Counts again what the settings alone could only count from below."""
    count = config.parameter_count(settings.model, ours.vocabulary)
    if count > INT32_MAX:
        where = settings.tokenizer.file or "settings"
        expected = (
            f"a model of at most {INT32_MAX} parameters; with the {ours.vocabulary} ids of this"
            f" tokenizer it has {count}"
        )
        raise config.ConfigError(
            [config.Problem(where, "model.width", settings.model.width, expected)]
        )


def _check_windows(count: int) -> None:
    """A checkpoint lists every window, in an order; one too long for its readers is none."""
    if count > WINDOWS_MAX:
        raise DataError(
            f"the arms have {count} windows, more than the {WINDOWS_MAX} that a checkpoint can"
            " list; raise model.context, join short documents, or leave text out"
        )


def _load_arm(arm: config.Arm, ours: Tokenizer, settings: config.Settings) -> Arm:
    loaded = corpus.load_arm(
        arm.name,
        files=arm.files,
        builtin=arm.builtin,
        tokenizer=ours,
        context=settings.model.context,
        holdout_fraction=settings.evaluation.fraction,
        base=_ROOT,
        cache=corpus.cache_directory(),
    )
    if loaded.window_count == 0:
        raise DataError(
            f"arm {arm.name}: nothing is left to train on; add text or lower evaluation.fraction"
            f" ({settings.evaluation.fraction:g})"
        )
    return loaded
