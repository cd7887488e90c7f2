"""Replacement of files, publication, preallocation, and the growing file."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import Faults

from supervisor import durable
from supervisor.durable import (
    AppendFile,
    copy_file,
    describe_tail,
    fsync_directory,
    mend,
    preallocate,
    read_range,
    replace_file,
    write_all,
)

CLOSING = b"\n]\n"


def error_of(action: Callable[[], None]) -> OSError | None:
    try:
        action()
    except OSError as error:
        return error
    return None


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o666)
    yield number
    os.close(number)


# --- a copy ---


def test_a_copy_has_the_same_bytes_and_takes_the_place_of_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    content = os.urandom(3 * 1024 * 1024 + 7)
    source.write_bytes(content)
    copy_file(source, target)
    assert target.read_bytes() == content
    with pytest.raises(FileExistsError):
        copy_file(source, target)


def test_a_copy_without_room_names_the_target(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(4096))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        error = error_of(lambda: copy_file(source, target))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error is not None
    assert (error.errno, error.filename) == (errno.EFBIG, str(target))


def test_a_copy_that_is_not_on_the_device_names_the_target(tmp_path: Path, faults: Faults) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"content")
    faults.fail_at(0, errno.EIO, only="fsync")
    error = error_of(lambda: copy_file(source, target))
    assert error is not None
    assert (error.errno, error.filename) == (errno.EIO, str(target))


# --- single calls ---


def test_write_all_goes_on_after_short_writes(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:3], at))
    write_all(descriptor, b"0123456789", 2)
    assert read_range(descriptor, 0, 100) == b"\0\x000123456789"


def test_write_all_does_not_spin_on_a_write_of_nothing(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="wrote none of 4 bytes"):
        write_all(descriptor, b"data", 0)


def test_read_range_stops_at_the_end_of_the_file(descriptor: int) -> None:
    os.write(descriptor, b"abcdef")
    assert read_range(descriptor, 2, 4) == b"cd"
    assert read_range(descriptor, 4, 99) == b"ef"
    assert read_range(descriptor, 9, 99) == b""


def test_fsync_directory_takes_a_path_or_a_descriptor(tmp_path: Path, faults: Faults) -> None:
    fsync_directory(tmp_path)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fsync_directory(descriptor)
    os.close(descriptor)
    assert faults.calls == [("fsync", tmp_path.name)] * 2
    with pytest.raises(NotADirectoryError):
        fsync_directory(__file__)


# --- replacing a file ---


@pytest.mark.fault(
    "SV-74", phase="any", does="syncs a file before its rename and the directory after it"
)
def test_fc07_replace_syncs_the_file_before_and_the_directory_after_the_rename(
    tmp_path: Path, faults: Faults
) -> None:
    """A rename can reach the disk before the data it publishes: after a power loss the name is
    right and the content is zeros. So the file is synced first, and its name after.

    huggingface/transformers PR 28364, NodeDB-Lab/nodedb #78
    """
    replace_file(tmp_path / "run.toml", b"content")
    names = [(name, target.startswith(".tmp-")) for name, target in faults.calls]
    assert names == [("pwrite", True), ("fsync", True), ("rename", False), ("fsync", False)]
    assert faults.calls[2:] == [("rename", "run.toml"), ("fsync", tmp_path.name)]


@pytest.mark.fault(
    "SV-74", phase="any", does="keeps the old file whole when the disk takes no new one"
)
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_fc08_a_full_disk_leaves_the_old_file_whole(
    tmp_path: Path, faults: Faults, fault: int
) -> None:
    """A save on a full disk truncated the only good copy. Whatever call fails here, the file is
    the old one or, once renamed, the new one; and no temporary is left to fill the disk further.

    NVIDIA/NVFlare PR 5011
    """
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    number = 0
    while True:
        faults.fail_at(number, fault)
        failed = faults.failed
        error = error_of(lambda: replace_file(path, b"new"))
        if error is not None:
            assert error.errno == fault
            renamed = faults.calls[-1] == ("fsync", tmp_path.name)
            assert path.read_bytes() == (b"new" if renamed else b"old")
            assert list(tmp_path.iterdir()) == [path]
            path.write_bytes(b"old")
        if faults.failed == failed:
            break
        number += 1
    assert number == 4, "pwrite, fsync, rename, fsync of the directory"
    assert path.read_bytes() == b"new"


@pytest.mark.fault("SV-74", phase="any", does="keeps the old file, whatever part could be written")
def test_a_disk_that_fills_up_at_any_byte_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state file was emptied when the disk filled up while it was written (Unitech/pm2 #2827,
    #2971, #1035)."""
    path, new = tmp_path / "state.json", b'{"step": 100}\n'
    path.write_bytes(b"old")
    real = os.pwrite
    for room in range(len(new)):

        def pwrite(descriptor: int, data: bytes, offset: int, room: int = room) -> int:
            if offset >= room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, bytes(data)[: room - offset], offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, new)
        assert [(one, one.read_bytes()) for one in tmp_path.iterdir()] == [(path, b"old")]
    monkeypatch.undo()
    replace_file(path, new)
    assert path.read_bytes() == new


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_fc08_a_replaced_file_has_the_mode_that_the_umask_leaves(
    tmp_path: Path, umask: int, mode: int
) -> None:
    """The repair of the full-disk trouble published files through mkstemp, which only their owner
    can read: the group's tools went blind.

    NVIDIA/NVFlare PR 5011, its review
    """
    path = tmp_path / "status.json"
    before = os.umask(umask)
    try:
        replace_file(path, b"{}")
        replace_file(tmp_path / "secret", b"x", mode=0o600)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_replace_continues_a_short_write(tmp_path: Path, faults: Faults) -> None:
    faults.fail_at(0, "short")
    replace_file(tmp_path / "file", b"0123456789")
    assert faults.failed == 1
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_the_first_error_is_reported_even_if_the_temporary_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, ("fsync", "unlink"))

    def decide(number: int, name: str) -> int:
        return errno.ENOSPC if name == "fsync" else errno.EROFS

    monkeypatch.setattr(faults, "_decide", decide)
    with pytest.raises(OSError, match="ENOSPC in fsync"):
        replace_file(tmp_path / "file", b"new")
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".tmp-")


# --- preallocation ---


def test_preallocate_takes_blocks_and_keeps_the_size(descriptor: int) -> None:
    os.write(descriptor, b"content")
    if preallocate(descriptor, 7, 1 << 20):
        assert os.fstat(descriptor).st_blocks * 512 >= 1 << 20
    assert os.fstat(descriptor).st_size == 7


def _fake_fallocate(monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
    left = list(codes)

    def fallocate(fd: int, mode: int, offset: int, size: int) -> int:
        code = left.pop(0)
        ctypes.set_errno(code)
        return -1 if code else 0

    monkeypatch.setattr(durable, "_fallocate", fallocate)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_fallocate_is_tolerated(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _fake_fallocate(monkeypatch, code)
    assert preallocate(descriptor, 0, 4096) is False


def test_a_full_disk_is_reported_and_an_interruption_is_not(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_fallocate(monkeypatch, errno.EINTR, 0, errno.EINTR, errno.ENOSPC)
    assert preallocate(descriptor, 0, 4096) is True
    with pytest.raises(OSError, match="cannot reserve 4096 bytes") as raised:
        preallocate(descriptor, 0, 4096)
    assert raised.value.errno == errno.ENOSPC


# --- the growing file ---


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[AppendFile]:
    path = tmp_path / "grows"
    path.write_bytes(b"[" + CLOSING)
    file = AppendFile(os.open(path, os.O_RDWR), 1, CLOSING)
    yield file
    file.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "grows"


def test_an_append_is_one_write_over_the_closing(
    growing: AppendFile, path: Path, faults: Faults
) -> None:
    growing.append(b"\n1")
    growing.append(b",\n2")
    assert faults.writes == [("pwrite", 1, b"\n1\n]\n"), ("pwrite", 3, b",\n2\n]\n")]
    assert path.read_bytes() == b"[\n1,\n2\n]\n"
    assert growing.end == 6
    assert growing.unsynced_bytes == 5
    growing.sync()
    assert growing.unsynced_bytes == 0
    assert growing.synced_end == growing.end


def test_a_short_write_is_undone_at_once_and_tried_again(
    growing: AppendFile, path: Path, faults: Faults
) -> None:
    faults.fail_at(0, "short")
    growing.append(b"\n12345")
    assert [name for name, _ in faults.calls] == ["pwrite", "pwrite", "ftruncate", "pwrite"]
    assert faults.writes[0] == ("pwrite", 1, CLOSING), "the closing comes back before anything else"
    assert path.read_bytes() == b"[\n12345\n]\n"


def test_a_write_that_stays_short_is_an_error_and_leaves_the_file_whole(
    growing: AppendFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.append(b"\n1")
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[: 5 if len(data) > 3 else 3], at)
    )
    with pytest.raises(OSError, match="only 5 of 9 bytes") as raised:
        growing.append(b",\n2222")
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"[\n1\n]\n"
    monkeypatch.setattr(os, "pwrite", pwrite)
    growing.append(b",\n3")
    assert path.read_bytes() == b"[\n1,\n3\n]\n"


def test_a_closing_that_could_not_be_restored_is_restored_before_the_next_append(
    growing: AppendFile, path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.append(b"\n1")
    outcomes: Iterator[str | int | None] = iter(["short", errno.EIO, errno.EIO, None])
    monkeypatch.setattr(faults, "_decide", lambda number, name: next(outcomes, None))
    with pytest.raises(OSError, match="EIO"):
        growing.append(b",\n" + b"2" * 50)
    assert path.read_bytes().startswith(b"[\n1,\n2222")
    growing.append(b",\n3")
    assert path.read_bytes() == b"[\n1,\n3\n]\n"


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EDQUOT, "short"])
def test_whichever_call_fails_nothing_that_was_appended_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | str
) -> None:
    """Each call of a run of appends and syncs fails in turn: what had succeeded stays, byte by
    byte, what failed leaves no trace once the disk heals, and the file goes on."""
    number, failed = 0, -1
    while failed:
        path = tmp_path / f"{fault}-{number}"
        path.write_bytes(b"[" + CLOSING)
        file = AppendFile(os.open(path, os.O_RDWR), 1, CLOSING)
        with monkeypatch.context() as patch:
            faults = Faults(patch)
            faults.fail_at(number, fault, only="pwrite" if fault == "short" else None)
            kept = b"["
            for item in range(4):
                data = b"%s\n%d" % (b"," if len(kept) > 1 else b"", item * 1111)
                try:
                    file.append(data)
                    kept += data
                    file.sync()
                except OSError:
                    pass
                assert path.read_bytes() == kept + CLOSING
            failed = faults.failed
        file.sync()
        assert file.unsynced_bytes == 0
        assert path.read_bytes() == kept + CLOSING
        file.close()
        number += 1
    assert number >= (5 if fault == "short" else 9)


def test_after_a_failed_sync_everything_since_the_last_good_one_is_written_through_a_new_descriptor(
    growing: AppendFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a lost write once and may forget the data. The device here really loses
    it; a second fdatasync of the same descriptor would succeed and prove nothing."""
    growing.append(b"\n1")
    growing.sync()
    growing.append(b",\n2")
    growing.append(b",\n3")
    synced: list[int] = []
    fdatasync = os.fdatasync

    def lossy(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 1:
            os.lseek(fd, 1, os.SEEK_SET)  # a duplicate of this descriptor would share the position
            path.write_bytes(b"[\n1\n]\n")
            raise OSError(errno.EIO, "lost")
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", lossy)
    growing.sync()
    assert path.read_bytes() == b"[\n1,\n2,\n3\n]\n"
    assert synced[1] != synced[0]
    growing.append(b",\n4")
    growing.sync()
    assert path.read_bytes() == b"[\n1,\n2,\n3,\n4\n]\n"
    assert synced[2] == synced[1], "the new descriptor stays in use"


def test_a_second_failure_is_raised_and_the_next_sync_writes_again(
    growing: AppendFile, path: Path, faults: Faults
) -> None:
    growing.append(b"\n1")
    faults.fail_always(errno.EIO, only="fdatasync")
    for _ in range(3):
        with pytest.raises(OSError, match="EIO"):
            growing.sync()
        assert growing.unsynced_bytes == 2
    growing.append(b",\n2")
    faults.heal()
    faults.writes.clear()
    growing.sync()
    assert faults.writes == [("pwrite", 1, b"\n1,\n2\n]\n")]
    assert growing.unsynced_bytes == 0
    assert path.read_bytes() == b"[\n1,\n2\n]\n"


def test_a_failed_sync_leaks_no_descriptor(growing: AppendFile, faults: Faults) -> None:
    growing.append(b"\n1")
    before = len(os.listdir("/proc/self/fd"))
    faults.fail_always(errno.EIO, only="fdatasync")
    for _ in range(5):
        with pytest.raises(OSError, match="EIO"):
            growing.sync()
    assert len(os.listdir("/proc/self/fd")) == before
    faults.heal()
    growing.sync()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_renamed_file_is_still_written_again(growing: AppendFile, path: Path) -> None:
    growing.append(b"\n1")
    moved = path.rename(path.with_name("moved"))
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch).fail_at(0, errno.EIO, only="fdatasync")
        growing.sync()
    assert growing.unsynced_bytes == 0
    assert moved.read_bytes() == b"[\n1\n]\n"
    assert not path.exists()


def test_an_append_does_not_wait_for_a_sync_in_another_thread(
    growing: AppendFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        started.set()
        assert release.wait(60)

    monkeypatch.setattr(os, "fdatasync", slow)
    growing.append(b"\n1")
    thread = threading.Thread(target=growing.sync)
    thread.start()
    assert started.wait(60)
    growing.append(b",\n2")
    assert path.read_bytes() == b"[\n1,\n2\n]\n"
    release.set()
    thread.join()
    assert growing.unsynced_bytes == len(b",\n2"), "the later append was not part of that sync"

    def lossy(fd: int) -> None:
        path.write_bytes(b"[\n1\n]\n")
        monkeypatch.setattr(os, "fdatasync", lambda fd: None)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fdatasync", lossy)
    growing.sync()
    assert path.read_bytes() == b"[\n1,\n2\n]\n", "and was kept in memory for the next"


def test_an_append_does_not_wait_for_a_disk_that_fails_slowly(
    growing: AppendFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sync fails, and what was not synced is on its way once more: for as long as a
    broken device takes to say so."""
    started, release = threading.Event(), threading.Event()
    answers = iter((errno.EIO, 0))

    def slow(fd: int) -> None:
        if code := next(answers):
            raise OSError(code, "lost")
        started.set()
        assert release.wait(60)

    monkeypatch.setattr(os, "fdatasync", slow)
    growing.append(b"\n1")
    thread = threading.Thread(target=growing.sync)
    thread.start()
    assert started.wait(60)
    growing.append(b",\n2")  # would wait for ever
    release.set()
    thread.join()
    assert path.read_bytes() == b"[\n1,\n2\n]\n"
    assert growing.unsynced_bytes == len(b",\n2"), "the later append was not part of that sync"
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    growing.sync()
    assert growing.unsynced_bytes == 0


def test_space_is_reserved_ahead_and_a_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[tuple[int, int]] = []
    refuse = False

    def fake(fd: int, offset: int, size: int) -> bool:
        if refuse:
            raise OSError(errno.ENOSPC, "full")
        reserved.append((offset, size))
        return True

    monkeypatch.setattr(durable, "preallocate", fake)
    path = tmp_path / "file"
    path.touch()
    file = AppendFile(os.open(path, os.O_RDWR), 0, b"")
    block = b"x" * (1 << 20)
    for _ in range(20):
        file.append(block)
        file.sync()
        assert sum(reserved[-1]) - file.end >= 4 << 20
    assert len(reserved) <= 6, "reserved in large pieces, not at each sync"
    refuse = True
    for _ in range(6):
        file.append(block)
        file.sync()
    problem = file.reserve_problem
    assert problem is not None
    assert problem.errno == errno.ENOSPC
    assert path.stat().st_size == 26 << 20, "a warning, not a failure"
    refuse = False
    file.append(block)
    file.sync()
    assert file.reserve_problem is None
    file.close()


# --- repair ---


def test_a_repair_says_what_it_drops(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"kept" + b"\xff\0gone" * 100)
    descriptor = os.open(path, os.O_RDWR)
    repair = describe_tail(path, descriptor, 4, 604)
    mend(descriptor, 4, b"!\n")
    os.close(descriptor)
    assert path.read_bytes() == b"kept!\n"
    assert (repair.kept_bytes, repair.dropped_bytes) == (4, 600)
    assert repair.preview.startswith("\\xff\\x00gone")
    assert len(repair.preview) < 1000
    assert repair.to_json() == {
        "path": str(path),
        "kept_bytes": 4,
        "dropped_bytes": 600,
        "sha256": repair.sha256,
        "preview": repair.preview,
        "set_aside": None,
    }
