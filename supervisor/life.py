"""Which life of which run a trainer process is, as the supervisor that started it says.

What may live here: reading that out of the environment, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from supervisor import contract
from supervisor.contract import ContractError


@dataclass(frozen=True, slots=True)
class Life:
    """Which life of which run this process is. `resume_step` None leaves the choice to us."""

    run_directory: Path
    attempt: int
    nonce: str
    epoch: int
    resume_step: int | None
    supervised: bool
    lock_fd: int | None = None
    settings_file: Path | None = None
    until_step: int | None = None


def life_from_environment(environment: Mapping[str, str]) -> Life | None:
    """The life that a supervisor gave us, or None in a process that has none.

    Raises ContractError where the variables are there but broken.
    """
    if contract.ENV_ATTEMPT not in environment:
        return None

    def integer(name: str) -> int:
        text = environment.get(name, "")
        if re.fullmatch("[0-9]{1,10}", text) is None:
            raise ContractError(f"environment {name}: expected a number, got {text[:80]!r}")
        return int(text)

    def text(name: str) -> str:
        value = environment.get(name)
        if not value:
            raise ContractError(f"environment {name}: missing beside {contract.ENV_ATTEMPT}")
        return value

    settings = environment.get(contract.ENV_SETTINGS)
    return Life(
        run_directory=Path(text(contract.ENV_RUN_DIRECTORY)),
        attempt=integer(contract.ENV_ATTEMPT),
        nonce=text(contract.ENV_NONCE),
        epoch=integer(contract.ENV_EPOCH),
        resume_step=integer(contract.ENV_RESUME_STEP),
        supervised=True,
        lock_fd=integer(contract.ENV_LOCK_FD),
        settings_file=Path(settings) if settings else None,
        until_step=integer(until) if (until := contract.ENV_UNTIL_STEP) in environment else None,
    )
