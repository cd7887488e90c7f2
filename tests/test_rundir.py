"""The run directory: its owner, its readers, and how a run is found."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from runs_kit import DEADLINE_SECONDS, wait_for_end

from supervisor import contract, rundir
from supervisor.rundir import (
    LockHeld,
    RunDirectory,
    RunError,
    find_run,
    list_runs,
    lock_holder,
    take_lock,
    take_trainer_lock,
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run", "run")
    made.create()
    return made


def test_making_the_paths_touches_nothing(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(
    "SV-66", phase="starting", does="makes the directory owner-only before anything is in it"
)
def test_a_run_directory_is_for_its_owner_only(directory: RunDirectory) -> None:
    directory.create()  # harmless where it exists
    for path in (directory.path, *directory.path.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {path.name for path in directory.path.iterdir()} == {
        *("policies", "checkpoints", "superseded", "quarantine", "archive", "receipts"),
        *("logs", "sockets"),
    }


def test_receipt_files_come_in_the_order_of_the_attempts(directory: RunDirectory) -> None:
    for name in ("attempt-0002", "attempt-10000", "attempt-9999", "attempt-2", "notes"):
        (directory.receipts / f"{name}.jsonl").touch()
    assert [attempt for attempt, _ in directory.receipt_files()] == [2, 9999, 10000]


# --- where it may be ------------------------------------------------------------------------------


def test_the_file_system_is_that_of_the_deepest_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (
        "/dev/a / ext4 rw 0 0\n"
        "server:/x /mnt nfs4 rw 0 0\n"
        "/dev/b /mnt/with\\040space xfs rw 0 0\n"
        "tmpfs /mntx tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self, **more: mounts)
    assert rundir.file_system(Path("/data/x")) == "ext4"
    assert rundir.file_system(Path("/mnt/runs/a")) == "nfs4"
    assert rundir.file_system(Path("/mnt")) == "nfs4"
    assert rundir.file_system(Path("/mnt/with space/a")) == "xfs"
    assert rundir.file_system(Path("/mntx/a")) == "tmpfs"


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "file_system", lambda path: "nfs4")
    with pytest.raises(RunError, match=r"network file system \(nfs4\).*local disk"):
        RunDirectory(tmp_path / "run", "run").create()


# --- the lock -------------------------------------------------------------------------------------


@pytest.mark.fault(
    "SV-73", phase="running", does="keeps its lock from every process that it starts"
)
def test_an_owner_is_named_and_readers_do_not_disturb_it(directory: RunDirectory) -> None:
    assert lock_holder(directory.lock) is None
    fd = take_lock(directory)
    assert lock_holder(directory.lock) == os.getpid()
    assert not os.get_inheritable(fd)
    with pytest.raises(LockHeld, match=f"already supervised by process {os.getpid()} on") as held:
        take_lock(directory)
    assert held.value.owner.pid == os.getpid()
    assert held.value.owner.host == os.uname().nodename
    os.close(fd)
    assert lock_holder(directory.lock) is None


@pytest.mark.fault(
    "SV-69", phase="starting", does="asks the lock and not the file: what a crash left bars nobody"
)
@pytest.mark.fault("FC-80", phase="starting", does="takes a lock file over that nobody holds")
@pytest.mark.fault("FC-80", phase="starting", does="takes over a lock file that outlived its owner")
def test_fc80_a_stale_lock_is_taken_over(directory: RunDirectory) -> None:
    """A lock file outlived a crash and blocked every later start (ChrisCummins/clgen #116)."""
    directory.lock.write_bytes(orjson.dumps({"pid": 1, "host": "gone", "started": "long ago"}))
    fd = take_lock(directory)
    assert orjson.loads(directory.lock.read_bytes())["pid"] == os.getpid()
    os.close(fd)


@pytest.mark.fault("SV-73", phase="starting", does="finds the owner of the lock in the kernel")
def test_an_owner_that_was_killed_holds_nothing(directory: RunDirectory) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(directory.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"owner\n"
        assert lock_holder(directory.lock) == process.pid
        process.kill()
        wait_for_end(process.pid)
        os.close(take_lock(directory))


@pytest.mark.fault(
    "SV-69", phase="starting", does="refuses by the lock, whatever garbage the file holds"
)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b'{"pid": 1}'])
def test_a_hint_that_is_none_does_not_hide_the_refusal(
    directory: RunDirectory, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "HINT_SECONDS", 0.01)
    fd = os.open(directory.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, content)
    with pytest.raises(LockHeld, match=r"already supervised by .* on .*, started .*"):
        take_lock(directory)
    os.close(fd)


@pytest.mark.fault(
    "SV-73", phase="starting", does="names the process that holds the lock, not the one in the file"
)
def test_the_name_of_the_owner_before_is_not_given_for_this_one(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "HINT_SECONDS", 0.01)
    directory.lock.write_bytes(orjson.dumps({"pid": 1, "host": "old", "started": "then"}))
    fd = os.open(directory.lock, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(LockHeld) as held:
        take_lock(directory)
    os.close(fd)
    assert held.value.owner.pid == os.getpid()


_OWNER = """
import sys
from pathlib import Path
from supervisor.rundir import LockHeld, RunDirectory, take_lock
try:
    take_lock(RunDirectory(Path(sys.argv[1]), "run"))
except LockHeld as held:
    print(held.owner.pid, flush=True)
else:
    print("owner", flush=True)
sys.stdin.read()
"""


@pytest.mark.fault(
    "SV-56", phase="starting", does="gives fifty simultaneous starts exactly one owner"
)
@pytest.mark.fault(
    "FC-81", phase="starting", does="gives fifty simultaneous starts exactly one owner"
)
def test_fc81_fifty_starts_at_once_give_one_owner(directory: RunDirectory) -> None:
    """Two trainings in one directory overwrote each other (deepinv/deepinv PR 550,
    TheCacophonyProject/classifier-pipeline #14)."""
    starts = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", _PATH + _OWNER, str(directory.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(50)
    ]
    # Nobody ends before all have spoken, so that there is one owner at every moment.
    words = []
    for process in starts:
        assert process.stdout is not None
        words.append(process.stdout.readline().strip())
    owners = [p for p, word in zip(starts, words, strict=True) if word == b"owner"]
    for process in starts:
        process.communicate(timeout=DEADLINE_SECONDS)
    assert len(owners) == 1
    assert sorted(set(words)) == sorted({b"owner", str(owners[0].pid).encode()})


# Without the site module a start takes half the time; what it would have found is named here.
_PATH = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"


def test_the_trainers_lock_can_be_handed_down(directory: RunDirectory) -> None:
    fd = take_trainer_lock(directory)
    assert fd is not None
    assert take_trainer_lock(directory) is None
    keeper = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=(fd,),
    )
    os.close(fd)
    assert take_trainer_lock(directory) is None, "the child has it now"
    keeper.communicate(timeout=DEADLINE_SECONDS)
    again = take_trainer_lock(directory)
    assert again is not None
    os.close(again)


def test_lock_holder_looks_at_the_file_and_at_nothing_else(directory: RunDirectory) -> None:
    assert lock_holder(directory.path / "nothing") is None
    other = directory.path / "other"
    with other.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        directory.lock.touch()
        assert lock_holder(other) == os.getpid()
        assert lock_holder(directory.lock) is None


# --- finding a run --------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for number, name in enumerate(("anna", "berta", "carla")):
        made = root / name
        made.mkdir(parents=True)
        (made / contract.JOURNAL_FILE).touch()
        os.utime(made / contract.JOURNAL_FILE, (1000 + number, 1000 + number))
    (root / "README.md").touch()
    (root / "not-a-run").mkdir()
    return root


def test_a_run_is_found_by_name_or_directory(runs: Path) -> None:
    assert find_run("berta", runs) == runs / "berta"
    assert find_run(str(runs / "berta"), Path("elsewhere")) == runs / "berta"
    assert [path.name for path in list_runs(runs)] == ["anna", "berta", "carla"]
    assert list_runs(runs / "nothing") == []


def test_half_a_fork_is_no_run(runs: Path) -> None:
    """A kill in the moment before it gets its name leaves one that has all of a run."""
    half = runs / ".tmp-fork-dora-x"
    half.mkdir()
    (half / contract.JOURNAL_FILE).touch()
    assert find_run(None, runs) == runs / "carla"
    assert half not in list_runs(runs)


def test_without_a_name_it_is_the_run_that_ran_last(runs: Path) -> None:
    assert find_run(None, runs) == runs / "carla"
    status = runs / "berta" / contract.STATUS_FILE
    status.write_text("{}")
    assert find_run(None, runs) == runs / "berta"


@pytest.fixture
def owned(runs: Path) -> Iterator[Path]:
    with (runs / "anna" / contract.LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield runs / "anna"


def test_a_run_that_is_supervised_comes_before_all_others(runs: Path, owned: Path) -> None:
    (runs / "berta" / contract.STATUS_FILE).write_text("{}")
    assert find_run(None, runs) == owned


def test_what_is_not_found_is_answered_with_what_there_is(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run 'dora'.*anna, berta, carla"):
        find_run("dora", runs)
    with pytest.raises(RunError, match=r"no run 'dora'.*none"):
        find_run("dora", tmp_path / "empty")
    with pytest.raises(RunError, match="supervisor start --config FILE"):
        find_run(None, tmp_path / "empty")


def test_whoever_stands_inside_is_not_moved_by_a_rename(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back at the end
    inside = directory.enter()
    moved = directory.path.rename(tmp_path / "moved")
    inside.supervisor_log.write_text("still here")
    assert (moved / contract.SUPERVISOR_LOG_FILE).read_text() == "still here"
    assert inside.path.resolve() == moved
    assert (inside.run, inside.ledger.name) == ("run", "run.loss.json")
