"""Where a silent trainer stands: what the kernel and the debuggers of the machine say.

What may live here: reading /proc of a process for people, and running one debugger on it. The
stacks of its Python threads it writes itself, on SIGUSR2 (see `link`).

Invariants:
- Nothing here changes the trainer but for the moment that a debugger holds it.
- A debugger is given a limited time, and nobody waits for it. What it holds cannot die before it
  does: whoever kills the trainer ends the debugger first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from supervisor.orphans import Owned

DEBUGGER_SECONDS: Final = 20.0
CLOSE_SECONDS: Final = 10.0
THREADS_SHOWN: Final = 64


def of(pid: int) -> str:
    """What the kernel knows of each thread: its name, its state, and in what call it waits."""
    lines = [f"--- no progress: the threads of process {pid}, as the kernel sees them ---"]
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except (FileNotFoundError, ProcessLookupError):
        return f"{lines[0]}\ngone\n"
    for thread in threads[:THREADS_SHOWN]:
        place = Path(f"/proc/{pid}/task/{thread}")
        name, state = _read(place / "comm"), _state(_read(place / "stat"))
        waits_in, call = _read(place / "wchan"), _read(place / "syscall").partition(" ")[0]
        lines.append(f"{thread} {name}: state {state}, in {waits_in or '-'}, call {call or '-'}")
    if len(threads) > THREADS_SHOWN:
        lines.append(f"and {len(threads) - THREADS_SHOWN} more")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> str:
    """A file of /proc; empty where the thread has gone or the kernel will not say."""
    try:
        return path.read_text(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _state(stat: str) -> str:
    _, _, rest = stat.rpartition(")")
    return rest.split()[0] if rest.split() else "?"


def debugger(pid: int) -> list[str] | None:
    """The command that writes the native stacks of a process, where this machine has one."""
    if shutil.which("py-spy"):
        return ["py-spy", "dump", "--native", "--nonblocking", "--pid", str(pid)]
    if shutil.which("gdb"):
        return ["gdb", "-nx", "-batch", "-ex", "thread apply all bt 40", "-p", str(pid)]
    return None


class Examiner:
    """At most one debugger at a time, in a session of its own, writing to the trainer's log."""

    def __init__(self) -> None:
        self._process: Owned | None = None
        self._until = 0.0

    def begin(self, pid: int, log_path: Path) -> None:
        """Raises OSError where no process can be started."""
        self.tend()
        command = debugger(pid)
        if command is None or self._process is not None:
            return
        with log_path.open("ab") as log:
            self._process = Owned(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._until = time.monotonic() + DEBUGGER_SECONDS

    def tend(self) -> None:
        """Called again and again: lets go of one that has ended, kills one that takes too long."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        elif time.monotonic() >= self._until:
            self.end()

    def end(self) -> None:
        """SIGKILL to what is at work, which lets go of the trainer with that. Nobody waits."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it, and waits for that, but not for ever."""
        self.end()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
            self._process = None
