"""One child process and what can be proven about it.

What may live here: spawning, adopting, signalling and reaping the trainer, and the /proc readings
that prove who a process is.

Invariants:
- Nothing is signalled by name or by a bare pid. A signal goes through a pidfd that was opened
  before the identity was checked, or to a process that holds our lock and carries our nonce.
- The child holds trainer.lock from its first instruction, through an inherited descriptor.
- The child writes its own log file; no pipe runs through the supervisor.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import contract
from supervisor.events import AttemptSpawned, Holder

# Spawned with SIGUSR1 ignored, so that a request that comes too early cannot kill; and first in
# line when memory runs out, before the supervisor that would restart it. The command arrives as
# arguments, never as text for the shell to read.
_SHIM: Final = "trap '' USR1; { echo 500 > /proc/self/oom_score_adj; } 2> /dev/null; exec \"$@\""


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """The kernel's start time of a process in clock ticks since boot; None where it is gone.
    A zombie counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for this signal (SigCgt in /proc)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def holders(lock_path: Path, nonce: str, main: AttemptSpawned | None = None) -> tuple[Holder, ...]:
    """Every process that has trainer.lock open, by inode. Processes of other users are not
    visible and cannot hold it: the run directory is owner-only.

    `main` is the record of the attempt's main process. Where there is none, because the supervisor
    died before it was written, whoever leads a session is taken for it.
    """
    try:
        wanted = os.stat(lock_path)
    except FileNotFoundError:
        return ()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        pid = int(name)
        if not _has_open(pid, wanted.st_dev, wanted.st_ino):
            continue
        found.append(
            Holder(
                pid=pid,
                ours=bool(nonce) and _carries(pid, nonce),
                leader=_session(pid) == pid if main is None else _is(pid, main),
                command=_command(pid),
            )
        )
    return tuple(found)


def _is(pid: int, recorded: AttemptSpawned) -> bool:
    found = (pid, start_ticks(pid), boot_id())
    return found == (recorded.pid, recorded.start_ticks, recorded.boot_id)


def _has_open(pid: int, device: int, inode: int) -> bool:
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found = os.stat(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (device, inode):
                return True
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return False


def _carries(pid: int, nonce: str) -> bool:
    """Whether the process is of the attempt with this nonce. One that is ending has lost the memory
    that its environment was in, while the lock is open for some milliseconds more: it can no longer
    write, and must not be taken for a stranger."""
    return _environment(pid).get(contract.ENV_NONCE) == nonce or _is_ending(pid)


def _is_ending(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/statm").read_bytes().startswith(b"0 ")
    except (FileNotFoundError, ProcessLookupError):
        return True


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return os.fsdecode(raw.replace(b"\0", b" ")).strip()[:120] or "unknown"


@dataclass(slots=True)
class Child:
    """A trainer that is alive or not yet reaped. `process` is None for an adopted one: only a
    parent can wait for a status."""

    pid: int
    pidfd: int
    start_ticks: int
    process: subprocess.Popen[bytes] | None
    unlogged: str = ""  # why what it prints goes nowhere, where it does

    def poll(self) -> bool:
        """True once the main process has ended (a zombie has)."""
        if self.process is not None:
            return self.process.poll() is not None
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def status(self) -> tuple[int | None, int | None]:
        """(exit code, signal) of an ended child; (None, None) where nobody could see it."""
        if self.process is None or self.process.returncode is None:
            return None, None
        code = self.process.returncode
        return (None, -code) if code < 0 else (code, None)

    def send(self, number: int) -> bool:
        """A signal to exactly this process; False where it is gone already."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    home: Path,
    log_path: Path,
    lock_fd: int,
) -> Child:
    """Starts the trainer in `home`, in a session of its own. Raises OSError where it cannot be
    started.

    The caller keeps `lock_fd` open until this returns and then closes it: from there on only the
    child holds the lock.
    """
    log_fd, unlogged = _open_log(log_path)
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _SHIM, "trainer", *command],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            cwd=home,
            env={**environment, contract.ENV_LOCK_FD: str(lock_fd), "PYTHONUNBUFFERED": "1"},
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
    finally:
        os.close(log_fd)
    pidfd = os.pidfd_open(process.pid)
    return Child(process.pid, pidfd, start_ticks(process.pid) or 0, process, unlogged)


def _open_log(path: Path) -> tuple[int, str]:
    """Where a child prints, and why that is nowhere if it is: a log that cannot be written is no
    reason not to train."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666), ""
    except OSError as error:
        why = f"{path}: {error.strerror}: what this attempt prints goes nowhere"
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), why


def adopt(
    pid: int, lock_path: Path, nonce: str, main: AttemptSpawned | None = None
) -> Child | None:
    """A child that an earlier supervisor started, or None where its identity is not proven.

    The pidfd comes first, so that everything checked afterwards is checked of the process it
    names: it holds our lock, carries our nonce and is the main process on record.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    ticks = start_ticks(pid)
    proven = any(h.pid == pid and h.ours and h.leader for h in holders(lock_path, nonce, main))
    if ticks is None or not proven:
        os.close(pidfd)
        return None
    return Child(pid, pidfd, ticks, None)


def kill_proven(lock_path: Path, nonce: str, number: int) -> tuple[int, ...]:
    """Signals every process that holds the lock and carries the nonce; returns who still holds
    the lock, proven ours or not."""
    left = []
    for holder in holders(lock_path, nonce):
        left.append(holder.pid)
        if not holder.ours:
            continue
        try:
            pidfd = os.pidfd_open(holder.pid)
        except ProcessLookupError:
            continue
        try:
            again = holders(lock_path, nonce)
            if any(h.pid == holder.pid and h.ours for h in again):
                signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            continue
        finally:
            os.close(pidfd)
    return tuple(left)
