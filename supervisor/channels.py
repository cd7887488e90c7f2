"""Where notifications go: the operator's command, his webhook, and the secret in its URL.

What may live here: which channels the settings name, and whether they can be used.

Invariant: a URL may hold a secret. One that does comes from the environment or from a file that
only its owner can read; it is in no argument, no message and no file of ours.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ENV_WEBHOOK: Final = "SUPERVISOR_WEBHOOK"
URL_PATTERN: Final = r"^https?://[!-~]+$"
_URL_BYTES_MAX: Final = 8192


class ChannelError(ValueError):
    """A channel cannot be used; the text names the setting, and says what to do."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One way to tell: a command, and what its environment has beside the common one."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def channels(
    notify: Sequence[str],
    webhook: str | None,
    webhook_file: str | None,
    environment: Mapping[str, str],
) -> tuple[Channel, ...]:
    """The channels that are configured. A URL in the environment goes before those of the
    settings; a file is read by the process that needs it, each time."""
    found = [Channel("notify", tuple(notify))] if notify else []
    # -P: a file of the operator's own, email.py say, must not become a module of ours.
    post = (sys.executable, "-P", "-m", "supervisor.webhook")
    url = environment.get(ENV_WEBHOOK)
    if url is None and webhook_file is not None:
        found.append(Channel("webhook", (*post, "--file", webhook_file)))
    elif url is not None or webhook is not None:
        found.append(Channel("webhook", post, {ENV_WEBHOOK: url or webhook or ""}))
    return tuple(found)


def check(configured: Sequence[Channel], search_path: str | None, home: Path) -> None:
    """Raises ChannelError for one that could never deliver, as far as this can be known now. A
    relative path of a program begins at `home`."""
    for channel in configured:
        program = channel.command[0]
        path = str(home / program) if os.path.dirname(program) else program
        if shutil.which(path, path=search_path) is None:
            raise ChannelError(
                f"alarms.{channel.name} = {list(channel.command)}: expected a program that can be"
                f" run; {program!r} is none on PATH: give its path, or take the setting out"
            )
        if ENV_WEBHOOK in channel.environment:
            check_url(channel.environment[ENV_WEBHOOK], f"alarms.webhook or {ENV_WEBHOOK}")
        elif channel.name == "webhook":
            read_url(Path(channel.command[-1]))


def read_url(path: Path) -> str:
    """The URL in a file that belongs to us alone. Raises ChannelError."""
    where = f"alarms.webhook_file = {str(path)!r}"
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(_URL_BYTES_MAX)
    except OSError as error:
        raise ChannelError(
            f"{where}: expected a file that can be read: {error.strerror}"
        ) from error
    if stat.S_IMODE(about.st_mode) & 0o077 or about.st_uid != os.geteuid():
        raise ChannelError(
            f"{where}: mode {stat.S_IMODE(about.st_mode):04o}, owner {about.st_uid}; expected a"
            f" file of our own that nobody else can read, as it holds a secret: chmod 600 {path}"
        )
    return check_url(content.decode("utf-8", "replace").strip(), where)


def check_url(url: str, where: str) -> str:
    if not re.fullmatch(URL_PATTERN, url):
        raise ChannelError(f"{where}: expected one URL, https://HOST/PATH, and nothing else")
    return url
