"""One child process: started or adopted, signalled, waited for.

What may live here: the trainer's main process and the proof that it is ours. What else belongs to
an attempt is `tree`.

Invariants:
- Nothing is signalled by name or by a bare pid. A signal goes through a pidfd that was opened
  before the identity was checked.
- The child holds trainer.lock from its first instruction, through an inherited descriptor.
- The child writes its own log file; no pipe runs through the supervisor.
- It stays a zombie until it is let go: until then its pid, and with it its session, is ours.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import contract, proc, tree
from supervisor.cgroup import Cgroup
from supervisor.events import AttemptSpawned, Holder
from supervisor.orphans import Owned

END_SECONDS: Final = 5.0

# Between fork and exec, in a program of its own instead of a callback in a process with threads:
# into the control group, if there is one; SIGUSR1 ignored, so that a request that comes too early
# cannot kill; first in line when memory runs out, before the supervisor that would restart it. The
# command arrives as arguments, never as text for the shell to read.
_SHIM: Final = (
    '[ -z "$1" ] || { echo 0 > "$1"; } 2> /dev/null; shift; trap \'\' USR1;'
    ' { echo 500 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"'
)


def holders(lock_path: Path, nonce: str, main: AttemptSpawned | None = None) -> tuple[Holder, ...]:
    """Every process that holds trainer.lock.

    `main` is the record of the attempt's main process. Where there is none, because the supervisor
    died before it was written, whoever leads a session is taken for it.
    """
    return tuple(
        Holder(
            pid=pid,
            # The main process may have written its title over its environment: the record and the
            # lock prove it. One that is ending has lost the memory that its environment was in,
            # while the lock is open for some milliseconds more: it can no longer write, and is no
            # stranger.
            ours=bool(nonce)
            and (
                proc.carries(pid, nonce)
                or proc.is_ending(pid)
                or (main is not None and _is(pid, main))
            ),
            leader=proc.session(pid) == pid if main is None else _is(pid, main),
            command=proc.command(pid),
            dying=proc.is_dying(pid),
        )
        for pid in proc.lock_holders(lock_path)
    )


def _is(pid: int, recorded: AttemptSpawned) -> bool:
    found = (pid, proc.start_ticks(pid), proc.boot_id())
    return found == (recorded.pid, recorded.start_ticks, recorded.boot_id)


@dataclass(slots=True)
class Child:
    """A trainer that is alive or not yet let go. `process` is None for an adopted one, whose parent
    somebody else is."""

    pid: int
    pidfd: int
    start_ticks: int
    process: Owned | None
    unlogged: str = ""  # why what it prints goes nowhere, where it does

    def poll(self) -> bool:
        """True once the main process has ended (a zombie has). Of a child of ours that is so once
        it can be waited for, which may be a moment after its descriptor says so."""
        if self.pidfd < 0:
            return True
        if self.process is not None:
            return self.process.returncode is not None or self._ended() is not None
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def status(self) -> tuple[int | None, int | None]:
        """(exit code, signal) of an ended child; (None, None) where nobody could see it."""
        if not self.poll():
            return None, None
        if self.process is not None and self.process.returncode is not None:
            code = self.process.returncode
        elif self.process is None:
            status = proc.wait_status(self.pid, self.pidfd)
            code = None if status is None else os.waitstatus_to_exitcode(status)
        else:
            ended = self._ended()
            assert ended is not None, "what has ended stays so until it is let go"
            exited = ended.si_code == os.CLD_EXITED
            code = ended.si_status if exited else -ended.si_status
        if code is None:
            return None, None
        return (None, -code) if code < 0 else (code, None)

    def _ended(self) -> os.waitid_result | None:
        return os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def send(self, number: int) -> bool:
        """A signal to exactly this process; False where it has ended already."""
        return not self.poll() and tree.send(self.pidfd, number)

    def close(self) -> None:
        """Lets it go: a zombie is waited for, a living one lives on."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self.process is not None:
            self.process.poll()


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    home: Path,
    log_path: Path,
    lock_fd: int,
    group: Cgroup | None = None,
) -> Child:
    """Starts the trainer in `home`, in a session of its own and in `group`. Raises OSError where it
    cannot be started.

    The caller keeps `lock_fd` open until this returns and then closes it: from there on only the
    child holds the lock.
    """
    procs = str(group.procs) if group is not None else ""
    log_fd, unlogged = _open_log(log_path)
    try:
        process = Owned(
            ["/bin/sh", "-c", _SHIM, "trainer", procs, *command],
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
    with contextlib.ExitStack() as undo:
        # One that nobody could watch must not train, and must not keep the lock.
        undo.callback(_end, process)
        pidfd = os.pidfd_open(process.pid)
        undo.callback(os.close, pidfd)
        made = Child(process.pid, pidfd, proc.start_ticks(process.pid) or 0, process, unlogged)
        undo.pop_all()
    return made


def _end(process: Owned) -> None:
    """SIGKILL to a child of ours that nobody has waited for, so that its number, and that of the
    session which it leads, mean nothing else. Bounded: who has not ended then keeps the lock."""
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


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
    names: it holds our lock and is the main process on record or, without a record, leads a session
    and carries our nonce.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    ticks = proc.start_ticks(pid)
    proven = any(h.pid == pid and h.ours and h.leader for h in holders(lock_path, nonce, main))
    if ticks is None or not proven:
        os.close(pidfd)
        return None
    return Child(pid, pidfd, ticks, None)
