"""The one question about data that a supervisor has, who never loads any: put to the trainer.

What may live here: the process that is asked, what it is told, and what it found.

Invariant: the answer is what a life of the trainer would begin with: the same code, the same
settings, and what the newest checkpoint says has been spent already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from supervisor import checkpoints, config, contract
from supervisor.config import Settings
from supervisor.contract import ContractError, Json, Manifest

CHECK_SECONDS: Final = 600.0


class DataRefused(ValueError):
    """The data cannot carry out the settings; the text says which setting, arm or file."""


@dataclass(frozen=True, slots=True)
class Found:
    """By arm the digest of its text; the bandit as it would begin, and after which checkpoint."""

    digests: dict[str, str]
    bandit: Json
    base: Manifest | None


def examine(settings: Settings, directory: Path, epoch: int, step: int | None = None) -> Found:
    """Loads every arm of the settings, and plans from the checkpoint of `step` (else the newest) of
    the run in `directory` on, as a life of `epoch` would. Raises DataRefused."""
    base = _base(directory.resolve() / contract.CHECKPOINTS, step)
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(config.dump(settings))
        file.flush()
        command = [sys.executable, "-m", "trainer", "check", "--config", file.name]
        if base is not None:
            command += ["--base", str(base[0]), "--epoch", str(epoch)]
        try:
            check = subprocess.run(
                command, capture_output=True, timeout=CHECK_SECONDS, check=False, env=_environment()
            )
        except subprocess.TimeoutExpired as error:
            raise DataRefused(f"the data was not loaded within {CHECK_SECONDS:g} s") from error
    if check.returncode != 0:
        text = check.stderr.decode("utf-8", "replace").strip().replace(file.name, "the policy")
        raise DataRefused(text or f"the data check ended with code {check.returncode}")
    answer = orjson.loads(check.stdout)
    digests = {name: arm["corpus_digest"] for name, arm in answer["arms"].items()}
    return Found(digests, answer["bandit"], None if base is None else base[1])


def _base(directory: Path, step: int | None) -> tuple[Path, Manifest] | None:
    """The newest whose manifest can be read; whoever selects one says what is wrong with others."""
    for one in reversed(checkpoints.find(directory)):
        if one.manifest is None or step not in (None, one.step):
            continue
        try:
            raw = one.manifest.read_bytes()
            return one.manifest, contract.parse_manifest(raw, one.manifest.name)
        except (OSError, ContractError):
            continue
    return None


def _environment() -> dict[str, str]:
    """Without settings, which are in the file: they were meant for another command."""
    ours = config.ENVIRONMENT_PREFIX
    return {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(ours) and "__" in name)
    }
