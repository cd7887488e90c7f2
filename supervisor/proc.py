"""What the kernel says of processes and locks, read from /proc.

What may live here: readings, each of one fact about one process or one file. Nothing is signalled,
and nothing is taken but the flock that a look tries and lets go at once.

Invariants:
- A process that has gone is an ordinary answer, never an error.
- A zombie counts as gone: it holds nothing and runs nothing.
- No file system is asked but that of the lock, and /proc: a dead file server under somebody else's
  descriptor holds up nobody here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
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

    /proc/locks would be shorter, but it names who took the lock, who may be gone. Where the kernel
    says nothing of locks (gVisor), whoever has the file open is taken for a holder.

    A descriptor of somebody else is read about and never asked: what it stands for may be on a
    file server that is gone, and whoever asks that one waits for ever. The name under which it was
    opened, and then its locks, the kernel tells by itself.
    """
    try:
        place = _place(path)
    except FileNotFoundError:
        return ()
    opened = {pid: fds for pid in processes() if (fds := _opened_as(pid, path.name))}
    locking = tuple(pid for pid, fds in opened.items() if any(_locks(pid, f, place) for f in fds))
    if locking or not opened or _kernel_tells_of_locks():
        return locking
    whole = os.path.realpath(path)
    return tuple(pid for pid, fds in opened.items() if whole in fds.values())


def _place(path: Path) -> str:
    """A file as the kernel names it in its lock: the device of its file system, which on overlayfs
    and btrfs is not the one that stat gives, and the inode."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        told = dict(re.findall(r"^(\w+):\s+(\d+)$", _fdinfo(os.getpid(), fd), re.MULTILINE))
    finally:
        os.close(fd)
    major, minor = os.major(stat.st_dev), os.minor(stat.st_dev)
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        mount, _, device, _ = line.split(" ", 3)
        if mount == told.get("mnt_id"):
            major, minor = map(int, device.split(":"))
    return f"{major:02x}:{minor:02x}:{told.get('ino', stat.st_ino)}"


def _opened_as(pid: int, name: str) -> dict[int, str]:
    """The descriptors of a process that were opened under this file name, each with its whole path.
    Those of other users are not visible and cannot hold a lock of ours: the run directory is
    owner-only."""
    found = {}
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if os.path.basename(target) == name:
                    found[int(fd)] = target
    except _HIDDEN:
        return {}
    return found


def _locks(pid: int, fd: int, place: str) -> bool:
    """Whether a line says so: `lock: 1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF`."""
    lines = (line.split() for line in _fdinfo(pid, fd).splitlines())
    return any(words[:1] == ["lock:"] and "FLOCK" in words and place in words for words in lines)


def _fdinfo(pid: int, fd: int) -> str:
    try:
        return Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii", errors="replace")
    except _HIDDEN:
        return ""


def _kernel_tells_of_locks() -> bool:
    return Path("/proc/locks").exists()
