"""Who started this process, as far as it decides whether signals reach it.

What may live here: looking at the parent. Nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "fish", "busybox"})
_FIRST: Final = 1  # the process that a container, or a machine, begins with


def deaf_parent(environment: Mapping[str, str]) -> str:
    """A warning where a shell stands between us and whoever ends this service, or nothing."""
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""  # it has just ended, so it is in nobody's way
    return warning(parent, name, environment.get("SYSTEMD_EXEC_PID", ""))


def warning(parent: int, name: str, main: str) -> str:
    """`name` is the parent's program, `main` the process that systemd takes for the service. A
    shell gets the SIGTERM that is meant for us and passes nothing on; at a terminal it is not in
    the way, because nobody ends a session by a signal to its shell alone."""
    if name not in _SHELLS or (parent != _FIRST and main != str(parent)):
        return ""
    return (
        f"started by a shell, {name} (process {parent}), without exec: the signal that ends this"
        " service reaches the shell alone, and the run is killed without a last checkpoint; write"
        " `exec` before the command"
    )
