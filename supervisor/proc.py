"""What the kernel says of processes and locks, read from /proc.

What may live here: readings, each of one fact about one process or one file. Nothing is signalled,
and nothing is taken but the flock that a look tries and lets go at once.

Invariants:
- A process that has gone is an ordinary answer, never an error.
- A zombie counts as gone: it holds nothing and runs nothing.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Final

from supervisor import contract

_GONE: Final = (FileNotFoundError, ProcessLookupError)
_HIDDEN: Final = (FileNotFoundError, ProcessLookupError, PermissionError)
_SIGKILL_BIT: Final = 1 << 8
# Of the fields after the command.
_MEMORY_FIELD: Final = 20
_CODE_FIELD: Final = 23
_ENVIRONMENT_FIELDS: Final = slice(47, 49)
_EXIT_CODE_FIELD: Final = 49
_EXEC_LOOKS: Final = 100
_EXEC_LOOK_SECONDS: Final = 0.001
# struct pidfd_info up to exit_code, and the request that fills it (Linux 6.13; exits since 6.15).
_PIDFD_INFO: Final = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO: Final = 0xC0000000 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT: Final = 1 << 3


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def processes() -> list[int]:
    """All but this one."""
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != own]


def _stat(pid: int) -> list[bytes] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except _GONE:
        return None
    return stat[stat.rindex(b")") + 2 :].split()


def start_ticks(pid: int) -> int | None:
    """The kernel's start time of a process in clock ticks since boot; None where it is gone."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def wait_status(pid: int, pidfd: int) -> int | None:
    """The wait status of a process that has ended and is not our child, where the kernel tells:
    from the zombie, or through the descriptor once somebody has waited for it."""
    for _ in range(2):  # it may be waited for between the two looks
        fields = _stat(pid)
        if fields is not None and fields[0] == b"Z":
            return int(fields[_EXIT_CODE_FIELD])
        buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
        except OSError:
            return None  # an older kernel, which does not keep it
        mask, *_, status = _PIDFD_INFO.unpack(buffer)
        if mask & _PIDFD_INFO_EXIT:
            return int(status)
    return None


def _status_mask(pid: int, *names: str) -> int:
    """Bits of the named signal sets of a process, together; 0 where it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except _GONE:
        return 0
    found = 0
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found |= int(value, 16)
    return found


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for this signal."""
    return bool(_status_mask(pid, "SigCgt") >> (number - 1) & 1)


def is_dying(pid: int) -> bool:
    """Whether SIGKILL was sent and the process is still there: the kernel cannot end it yet."""
    return bool(_status_mask(pid, "SigPnd", "ShdPnd") & _SIGKILL_BIT)


def is_ending(pid: int) -> bool:
    """Whether it has given up its memory already, and with that its environment."""
    try:
        return Path(f"/proc/{pid}/statm").read_bytes().startswith(b"0 ")
    except _GONE:
        return True


def carries(pid: int, nonce: str) -> bool:
    """Whether the process was started with this nonce in its environment, or its parent was."""
    return bool(nonce) and environment(pid).get(contract.ENV_NONCE) == nonce


def environment(pid: int) -> dict[str, str]:
    """What the process was started with. In the middle of an exec the kernel shows nothing for a
    moment; that is waited out."""
    raw = b""
    for _ in range(_EXEC_LOOKS):
        try:
            raw = Path(f"/proc/{pid}/environ").read_bytes()
        except _HIDDEN:
            return {}
        if raw or _has_no_environment(pid):
            break
        time.sleep(_EXEC_LOOK_SECONDS)
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def _has_no_environment(pid: int) -> bool:
    """Whether an empty answer is the truth: it has no memory, or an environment of no bytes. While
    a program is being loaded, its environment has a place before it has a length, and its code has
    neither."""
    fields = _stat(pid)
    if fields is None or fields[_MEMORY_FIELD] == b"0":
        return True
    start, end = fields[_ENVIRONMENT_FIELDS]
    return fields[_CODE_FIELD] != b"0" and start == end


def command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except _GONE:
        return "gone"
    return os.fsdecode(raw.replace(b"\0", b" ")).strip()[:120] or "unknown"


# --- who holds a lock -----------------------------------------------------------------------------


def is_free(lock: Path) -> bool:
    """Whether the lock could be taken; it is let go at once. Only for who may take it: to anybody
    else's start, a look like this is a lock that is held."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def lock_holders(path: Path) -> tuple[int, ...]:
    """Every process that has a flock on this file, by a descriptor of its own or an inherited one.

    /proc/locks would be shorter, but it names who took the lock, who may be gone, and the device of
    the file system, which is not the one that stat gives on overlayfs and btrfs. Where the kernel
    says nothing of locks (gVisor), whoever has the file open is taken for a holder.
    """
    try:
        wanted = os.stat(path)
    except FileNotFoundError:
        return ()
    place = wanted.st_dev, wanted.st_ino
    opened = {pid: fds for pid in processes() if (fds := _descriptors_of(pid, place))}
    locking = tuple(pid for pid, fds in opened.items() if any(_locks(pid, fd) for fd in fds))
    return locking or (tuple(opened) if opened and not _kernel_tells_of_locks() else ())


def _descriptors_of(pid: int, place: tuple[int, int]) -> list[str]:
    """The descriptors through which a process has this file open. Those of other users are not
    visible and cannot hold a lock of ours: the run directory is owner-only."""
    found = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                stat = os.stat(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if (stat.st_dev, stat.st_ino) == place:
                found.append(fd)
    except _HIDDEN:
        return []
    return found


def _locks(pid: int, fd: str) -> bool:
    try:
        info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii", errors="replace")
    except _HIDDEN:
        return False
    return any(line.startswith("lock:") and "FLOCK" in line for line in info.splitlines())


def _kernel_tells_of_locks() -> bool:
    return Path("/proc/locks").exists()
