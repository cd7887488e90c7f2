"""The run directory: where things are, who owns it, and how a reader finds out.

What may live here: paths, the two locks, discovery of runs.

Invariants:
- The owner holds `lock` for life, close-on-exec, before it binds or writes anything. The content
  of the file is a hint for people; the lock is the truth.
- Readers never take a lock, because a probing reader makes real starts fail: they look the inode
  up in /proc/locks.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from supervisor import contract, proc

_DIRECTORIES: Final = (
    contract.POLICIES,
    contract.CHECKPOINTS,
    contract.SUPERSEDED,
    contract.QUARANTINE,
    contract.ARCHIVE,
    contract.RECEIPTS,
    contract.LOGS,
    contract.SOCKETS,
)
HINT_SECONDS: Final = 0.5
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "gpfs", "glusterfs", "ceph"}
)


class RunError(ValueError):
    """The operator named a run or a directory that cannot be used; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Owner:
    pid: int | None
    host: str
    started: str

    def __str__(self) -> str:
        who = f"process {self.pid}" if self.pid is not None else "a process"
        return f"{who} on {self.host}, started {self.started}"


class LockHeld(RunError):
    """Another supervisor owns the run."""

    def __init__(self, directory: Path, owner: Owner) -> None:
        super().__init__(f"{directory}: already supervised by {owner}")
        self.owner = owner


class RunDirectory:
    """Paths of one run. Making one touches nothing."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run
        self.run_file = path / contract.RUN_FILE
        self.ledger = path / contract.ledger_name(run)
        self.samples = path / contract.samples_name(run)
        self.state = path / contract.state_name(run)
        self.journal = path / contract.JOURNAL_FILE
        self.training = path / contract.TRAINING_FILE
        self.status = path / contract.STATUS_FILE
        self.lock = path / contract.LOCK_FILE
        self.trainer_lock = path / contract.TRAINER_LOCK_FILE
        self.supervisor_log = path / contract.SUPERVISOR_LOG_FILE
        self.policies = path / contract.POLICIES
        self.checkpoints = path / contract.CHECKPOINTS
        self.superseded = path / contract.SUPERSEDED
        self.quarantine = path / contract.QUARANTINE
        self.receipts = path / contract.RECEIPTS
        self.logs = path / contract.LOGS

    def create(self) -> None:
        """Makes the directories, owner-only. Raises RunError on a network file system, and where
        others may put files of theirs in the place of ours."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & 0o022:
            raise RunError(
                f"{self.path}: mode {mode:04o}, so others may write in it; expected a run directory"
                f" that only its owner writes in: chmod go-w {self.path}"
            )
        kind = file_system(self.path)
        if kind in NETWORK_FILE_SYSTEMS:
            raise RunError(
                f"{self.path}: on a network file system ({kind}), where locks and sockets cannot be"
                " trusted; put run.directory on a local disk"
            )
        for name in _DIRECTORIES:
            (self.path / name).mkdir(mode=0o700, exist_ok=True)

    def enter(self) -> RunDirectory:
        """The same run from inside. Who works on a run for weeks stands in its directory: a rename
        of it, or of a directory above, then changes nothing."""
        os.chdir(self.path)
        return RunDirectory(Path(), self.run)

    def log(self, attempt: int) -> Path:
        return self.logs / f"{contract.attempt_stem(attempt)}.log"

    def receipt_files(self) -> list[tuple[int, Path]]:
        """(attempt, path) of every receipt file, in the order of the attempts."""
        found = []
        for path in self.receipts.glob("*.jsonl"):
            attempt = contract.parse_attempt_stem(path.stem)
            if attempt is not None:
                found.append((attempt, path))
        return sorted(found)


def refuse_foreign(directory: RunDirectory) -> None:
    """Raises RunError where a new run would begin among what is somebody else's."""
    begun = (directory.journal, directory.run_file, directory.lock)
    if not directory.path.is_dir() or any(os.path.lexists(file) for file in begun):
        return
    # What a start that was killed early, or a file system, may have left is nobody else's.
    ours = (
        *(*_DIRECTORIES, contract.TRAINER_LOCK_FILE, contract.SUPERVISOR_LOG_FILE),
        "lost+found",
    )
    names = sorted(os.listdir(directory.path))
    foreign = [name for name in names if name not in ours and not name.startswith(".")]
    if foreign:
        raise RunError(
            f"{directory.path}: no run, and not empty ({', '.join(foreign[:3])}); give"
            " run.directory a place of its own, or make a run of what is there: supervisor import"
            f" {shlex.quote(str(directory.path))}"
        )


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, as the kernel calls it."""
    real = str(path.resolve())
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mounted, found, *_ = line.split(" ")
        point = mounted.replace("\\040", " ")
        prefix = point.rstrip("/") + "/"
        if (real + "/").startswith(prefix) and len(point) >= len(best):
            best, kind = point, found
    return kind


def attempt_logs(logs: Path) -> dict[int, Path]:
    """attempt -> its log, of all that are in the directory."""
    found = ((contract.parse_attempt_stem(path.stem), path) for path in logs.glob("*.log"))
    return {attempt: path for attempt, path in found if attempt is not None}


# --- locks ---


def refuse_owned(directory: RunDirectory) -> None:
    """Raises LockHeld where somebody supervises the run now. Takes no lock, so it is no promise."""
    if lock_holder(directory.lock) is not None:
        raise LockHeld(directory.path, _owner_hint(directory))


def take_lock(directory: RunDirectory) -> int:
    """Takes the run's lock for life; the descriptor keeps it. Raises LockHeld with the owner."""
    fd = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise LockHeld(directory.path, _owner_hint(directory)) from None
    hint = {
        "pid": os.getpid(),
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime()),
    }
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, orjson.dumps(hint) + b"\n", 0)
    except OSError:
        os.close(fd)  # nobody may hold a lock that nobody knows of
        raise
    return fd


def take_trainer_lock(directory: RunDirectory) -> int | None:
    """The descriptor to hand down to a trainer, or None while a writer still lives."""
    fd = os.open(directory.trainer_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _owner_hint(directory: RunDirectory) -> Owner:
    # The owner writes its name just after it has the lock; until then it is the name of the owner
    # before, or none. Give it that moment.
    owner = Owner(None, "an unknown host", "at an unknown time")
    deadline = time.monotonic() + HINT_SECONDS
    while time.monotonic() < deadline:
        try:
            hint = orjson.loads(directory.lock.read_bytes())
            owner = Owner(int(hint["pid"]), str(hint["host"]), str(hint["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.01)
            continue
        holder = lock_holder(directory.lock)
        if not holder or holder == owner.pid:  # 0 and None: the kernel's answer is no help here
            return owner
        owner = Owner(holder, owner.host, "just now")
        time.sleep(0.01)
    return owner


def lock_holder(path: Path) -> int | None:
    """The pid that holds a flock on this file, read from /proc/locks, or None.

    A lock that was handed down to a child shows the pid of whoever took it; 0 stands for a holder
    outside our pid namespace. In two cases the list is no answer: overlayfs and btrfs have a device
    of their own for stat; and inside a pid namespace a lock is not listed once its taker is dead,
    as that of a trainer's lock may be. Then the descriptors of all processes are looked at.
    """
    try:
        wanted = os.stat(path)
    except FileNotFoundError:
        return None
    place = f"{os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x}:{wanted.st_ino}"
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == place:
            return int(fields[4])
    if os.major(wanted.st_dev) == 0 or path.name == contract.TRAINER_LOCK_FILE:
        return next(iter(proc.lock_holders(path)), None)
    return None


# --- discovery ---


def find_run(named: str | None, root: Path) -> Path:
    """The directory of a run given by name or directory; None means the one that ran last.

    Raises RunError that says what there is.
    """
    if named is not None:
        for candidate in (Path(named), root / named):
            if (candidate / contract.JOURNAL_FILE).is_file():
                return candidate
        known = ", ".join(sorted(path.name for path in list_runs(root))) or "none"
        raise RunError(
            f"no run {named!r}: neither a run directory nor one of those in {root}: {known}"
        )
    runs = list_runs(root)
    if not runs:
        raise RunError(f"no run in {root}; start one with: supervisor start --config FILE")
    return max(runs, key=_last_sign_of_life)


def list_runs(root: Path, tell: Callable[[OSError], None] = lambda error: None) -> list[Path]:
    """The runs below `root`, by name; half a fork or import is none. `tell` hears of each directory
    that cannot be looked into."""
    if not root.is_dir():
        return []
    found = []
    for path in sorted(root.iterdir()):
        if path.name.startswith(contract.TEMPORARY_PREFIX):
            continue
        try:
            if (path / contract.JOURNAL_FILE).is_file():
                found.append(path)
        except OSError as error:
            tell(error)
    return found


def _last_sign_of_life(path: Path) -> tuple[bool, float]:
    """Whether it lives, and when it last said so: the least of all where that cannot be seen."""
    status, journal = path / contract.STATUS_FILE, path / contract.JOURNAL_FILE
    try:
        when = (status if status.exists() else journal).stat().st_mtime
        return lock_holder(path / contract.LOCK_FILE) is not None, when
    except OSError:
        return False, 0.0
