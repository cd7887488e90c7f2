"""Runs on a disk that becomes full: by a layer below every process, or by a small tmpfs.

The layer works everywhere and can be as precise as one call on one file. The tmpfs is the kernel's
own word; it lives in a namespace of its own, so that nobody needs to be root.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from runs_kit import Run

from supervisor.contract import Json

SOURCE: Final = Path(__file__).with_name("full_disk.c")

# What a full disk refuses: all that needs blocks which nobody has reserved.
FULL: Final = (
    "\n".join(
        f"{errno.ENOSPC} {target} write,open,fallocate"
        for target in ("checkpoints/", "logs/", ".log", ".tmp-", "supervisor.log")
    )
    + f"\n{errno.ENOSPC} / fallocate\n"
)


# What takes seconds elsewhere takes moments here. Each process loads only what it needs anyhow.
IMPATIENT: Final = """
import sys
if "start" in sys.orig_argv:
    from supervisor import commit, daemon, space
    commit.RETRY_SECONDS = daemon.RETRY_SECONDS = 0.1
    daemon.STATUS_INTERVAL_SECONDS = space.LOOK_INTERVAL_SECONDS = 0.05
elif any(word.endswith("saboteur.py") for word in sys.orig_argv):
    from supervisor import link, receipt_file
    link.RETRY_SECONDS = receipt_file.RESERVE_AGAIN_SECONDS = 0.05
"""


def build(directory: Path) -> Path:
    """The layer, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "these faults need a C compiler"
    built = directory / "full_disk.so"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", built, SOURCE, "-ldl"], check=True, timeout=60)
    return built


class DiskRun(Run):
    """A run of the saboteur whose disk obeys `rules`; small, quick to try again."""

    def __init__(self, home: Path, layer: Path | None, **settings: Json) -> None:
        super().__init__(home)
        for section, table in settings.items():
            self.set(section, **table)
        self.set("alarms", disk_headroom_bytes=0)
        self.rules_file = home / "rules"
        self.rules_file.touch()
        if layer is not None:
            self.environment = {"LD_PRELOAD": str(layer), "DISK_RULES": str(self.rules_file)}
        self.patch("contract", "CONTRACT_VERSION", 1)  # sets the path that this file is found on
        (self.home / "sitecustomize.py").write_text(IMPATIENT)

    def rule(self, text: str) -> None:
        """The disk is like this from the next call on."""
        temporary = self.rules_file.with_suffix(".new")
        temporary.write_text(text)
        temporary.rename(self.rules_file)

    def heal(self) -> None:
        self.rule("")

    def alarms(self) -> dict[str, str]:
        return {alarm["name"]: alarm["detail"] for alarm in self.status()["alarms"]}


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Another program's file takes all the room that there is, for the time of the context."""
    glutton = directory / "glutton"
    with glutton.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
    try:
        yield
    finally:
        glutton.unlink(missing_ok=True)
