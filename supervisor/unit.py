"""The systemd unit of a run: its text, and how a word is written so that systemd reads it back.

What may live here: composing and quoting, from values that others have found. Nothing is read and
nothing is written.

Invariants:
- Each word that goes in comes out of systemd's own reading unchanged, or is refused.
- Every line that is not self-evident has its reason above it: the unit outlives the person who
  made it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# After the grace: the death of a tree (30 s), what is under way (10 s), a last sync of the disk.
STOP_MARGIN_SECONDS: Final = 90
# The history is opened and repaired before anything else; a trainer's start is not waited for.
START_SECONDS: Final = 300
WATCHDOG_SECONDS: Final = 120
RESTART_SECONDS: Final = 10

# What decides where programs, caches and devices are found, and which bits come out.
_NAMES: Final = frozenset(
    {
        *("PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "TMPDIR"),
        *("LANG", "LC_ALL", "TZ", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_OFFLINE"),
        *("TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG", "SUPERVISOR_RUNS"),
    }
)
_PREFIXES: Final = (
    *("CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "PYTORCH_"),
    # By these the libraries under torch choose kernels: without them a resume is another run.
    *("ATEN_", "OMP_", "MKL_", "ONEDNN_", "DNNL_", "CUBLAS_", "CUBLASLT_", "CUDNN_"),
)
_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY\b|API_?KEY", re.I)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


class Unwritable(ValueError):
    """A value that no unit can hold; the text names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Service:
    """`home` is where the command runs, `needs` are paths that must be mounted first. `user` None
    makes a unit of the user's own service manager. `keep` is --on-stop keep."""

    run: str
    command: Sequence[str]
    home: str
    needs: Sequence[str]
    environment: Mapping[str, str]
    grace_seconds: float
    keep: bool
    user: str | None


# --- words ---


def quote(word: str) -> str:
    """One word, as systemd.syntax(7) and the specifiers of systemd.unit(5) want it."""
    text = _printable(word).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def quote_line(path: str) -> str:
    """A value that systemd takes to the end of its line, without quotes."""
    if _printable(path) != path.strip() or path.endswith("\\"):
        raise Unwritable(
            f"{path!r}: a unit cannot hold a directory whose name ends in a space or a backslash;"
            " rename it"
        )
    return path.replace("%", "%%")


def quote_command(words: Sequence[str]) -> str:
    """A command line. The first word is never substituted but what the program sees as its name
    is, so a dollar sign is not doubled: substitution is switched off, only where there is one,
    because systemd before 244 cannot."""
    line = " ".join(map(quote, words))
    return f":{line}" if "$" in line else line


def _printable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unwritable(f"{text!r}: a unit is UTF-8 text; rename what is not") from None
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise Unwritable(f"{text!r}: a unit cannot hold control characters; rename it")
    return text


# --- the environment ---


def choose_environment(
    environment: Mapping[str, str], wanted: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The variables to write down, `wanted` ones among them, and the names of those that were left
    out although they matter: everybody can read a unit, so a secret must not get into one."""
    chosen, left_out = {}, []
    for name, value in sorted(environment.items()):
        if name not in wanted and not _matters(name):
            continue
        if _SECRET.search(name) or not value.isprintable():
            left_out.append(name)
        else:
            chosen[name] = value
    return chosen, left_out


def _matters(name: str) -> bool:
    setting = name.startswith("SUPERVISOR_") and "__" in name
    return name in _NAMES or name.startswith(_PREFIXES) or setting


# --- the text ---


def render(service: Service) -> str:
    """The unit. Raises Unwritable."""
    whose = [] if service.user is None else [f"User={service.user}"]
    lines = [
        "# Written by `supervisor unit`: write it again when a path has changed.",
        "",
        "[Unit]",
        f"Description=Training run {service.run}",
        f"RequiresMountsFor={' '.join(map(quote, service.needs))}",
        "# Starting by hand always works. How often a trainer may die is the run's own rule.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        *whose,
        f"WorkingDirectory={quote_line(service.home)}",
        *(f"Environment={quote(f'{k}={v}')}" for k, v in service.environment.items()),
        "# --as-recorded: a run that was stopped by `supervisor stop` stays stopped, also at boot.",
        f"ExecStart={quote_command(service.command)}",
        "# `systemctl reload`: the settings are read again, and the trainer works on.",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "# Ready: the run is owned and its record open. A trainer may take longer, and may die.",
        f"TimeoutStartSec={START_SECONDS}",
        "# The loop itself reports that it goes round.",
        f"WatchdogSec={WATCHDOG_SECONDS}",
        "",
        *(_keep_lines() if service.keep else _end_lines(service.grace_seconds)),
        f"RestartSec={RESTART_SECONDS}",
        "# Where memory runs out the trainer goes first, and the supervisor starts it again.",
        "OOMPolicy=continue",
        "# Nobody else touches the group of the run's processes.",
        "Delegate=yes",
        "",
        "[Install]",
        f"WantedBy={'default.target' if service.user is None else 'multi-user.target'}",
    ]
    return "\n".join(lines) + "\n"


def _end_lines(grace_seconds: float) -> list[str]:
    return [
        "# Stop means: nothing of the run is left. SIGTERM goes to the supervisor alone, which has",
        "# the trainer finish its step, save and end. To all of them at once, it would take the",
        "# data workers away under a trainer that has yet to save. What is left then, or after a",
        "# crash of the supervisor, is killed; the next start goes on from the newest checkpoint.",
        "# (`supervisor unit --on-stop keep` lets the trainer live through both.)",
        "KillMode=mixed",
        "KillSignal=SIGTERM",
        "SendSIGKILL=yes",
        f"# stop.grace_seconds ({grace_seconds:g}) for the save, and what the supervisor needs",
        "# after it. While it waits it asks for more, so a grace made longer later is kept too.",
        f"TimeoutStopSec={math.ceil(grace_seconds) + STOP_MARGIN_SECONDS}",
        "# 70, a signal or a silent watchdog: start it again. 1: the run has failed, 2: settings",
        "# are wrong, 130: somebody forced it to end; a restart would change none of these.",
        "Restart=on-failure",
        "RestartPreventExitStatus=1 2 130",
    ]


def _keep_lines() -> list[str]:
    return [
        "# Stop and restart mean the supervisor alone; the trainer trains on, and the next start",
        "# takes it over. To end the run: `supervisor stop`, which this unit then obeys.",
        "# SIGTERM would have the supervisor end the trainer, so it is killed instead: it is made",
        "# for that, and nothing on record is lost.",
        "KillMode=process",
        "KillSignal=SIGKILL",
        "SendSIGKILL=yes",
        "SuccessExitStatus=SIGKILL",
        "TimeoutStopSec=30",
        "# A kill counts as success above, so on-failure would miss the kill by a full memory.",
        "# 0: finished or stopped, 1: the run has failed, 2: settings are wrong, 130: somebody",
        "# forced it to end.",
        "Restart=always",
        "RestartPreventExitStatus=0 1 2 130",
    ]
