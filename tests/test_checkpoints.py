"""Checkpoints on disk: what counts as one, what is proven, what is chosen, moved and removed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from checkpoint_kit import (
    NONCE,
    RUN_ID,
    binary,
    flip_bit,
    manifest,
    publish,
    state,
    write_checkpoint,
)
from hypothesis import given, strategies as st

from supervisor import checkpoints
from supervisor.checkpoints import (
    NoSpace,
    clean_temporaries,
    find,
    plan_retention,
    preflight,
    quarantine,
    retain,
    select,
    supersede,
)
from supervisor.contract import (
    CHUNK_BYTES,
    INT32_MAX,
    ContractError,
    Manifest,
    Tensor,
    check_header,
    checkpoint_size_bytes,
    checkpoint_stem,
    chunks_digest,
    parse_manifest,
    temporary_name,
)
from supervisor.readback import Damaged, Found, regions, verify

TIME = 1_700_000_000.5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def write(run: Path, *steps: int, **overrides: object) -> None:
    for step in steps:
        write_checkpoint(run / "checkpoints", step, **overrides)  # type: ignore[arg-type]


def member(run: Path, step: int, ending: str) -> Path:
    return run / "checkpoints" / (checkpoint_stem(step) + ending)


def only(run: Path, step: int) -> Found:
    return next(found for found in find(run / "checkpoints") if found.step == step)


def chosen_step(run: Path, **options: object) -> int | None:
    selection = select(run, RUN_ID, time=TIME, **options)  # type: ignore[arg-type]
    return None if selection.chosen is None else selection.chosen.step


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# --- find ----------------------------------------------------------------------------------------


def test_find_orders_by_number_and_pairs_the_members(run: Path) -> None:
    write(run, 1_000_000, 99_900, 100)
    found = find(run / "checkpoints")
    assert [one.step for one in found] == [100, 99_900, 1_000_000]
    assert found[2].binary == member(run, 1_000_000, ".bin")
    assert found[2].manifest == member(run, 1_000_000, ".json")


@pytest.mark.parametrize(
    "name",
    [
        "step_100.bin",
        "step_0000100.bin",
        "step_000100.bin.bak",
        "step_000100.2.bin",
        "STEP_000100.bin",
        "step_000100.BIN",
        "step_-00100.bin",
        "step_9999999999.bin",
        "step_\u0660\u0660\u0660\u0661\u0660\u0660.bin",
        ".tmp-0001-01234567-step_000100.bin",
        "checkpoint-100",
    ],
)
def test_find_passes_over_names_that_we_never_write(run: Path, name: str) -> None:
    (run / "checkpoints" / name).write_bytes(binary(100, 6))
    assert find(run / "checkpoints") == []


def test_find_takes_a_manifest_alone_for_a_leftover(run: Path) -> None:
    write(run, 100)
    member(run, 100, ".bin").unlink()
    assert find(run / "checkpoints") == []


def test_find_passes_over_links_and_pipes(run: Path) -> None:
    write(run, 100)
    elsewhere = run / "elsewhere.bin"
    member(run, 100, ".bin").rename(elsewhere)
    member(run, 100, ".bin").symlink_to(elsewhere)
    os.mkfifo(member(run, 200, ".bin"))
    assert find(run / "checkpoints") == []


def test_find_in_a_run_that_has_no_directory_yet(tmp_path: Path) -> None:
    assert find(tmp_path / "checkpoints") == []


# --- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("parameters", [1, 6, 349_525, 349_526, 800_000])
def test_verify_proves_every_size_around_a_chunk(run: Path, cold: bool, parameters: int) -> None:
    written = write_checkpoint(run / "checkpoints", 100, parameters)
    verified = verify(only(run, 100), RUN_ID, cold=cold)
    data = member(run, 100, ".bin").read_bytes()
    assert verified.manifest == written
    assert verified.sha256 == hashlib.sha256(data).hexdigest()
    assert verified.binary_digest == written.binary_digest
    assert (verified.step, verified.parameters) == (100, parameters)
    assert verified.size_bytes == len(data) == 8 + 12 * parameters


@pytest.mark.parametrize(
    ("byte", "region", "chunk"),
    [
        (4 * 1024 * 1024 - 1, "header, weights, m", 0),
        (4 * 1024 * 1024, "m, v", 1),
        (8 + 12 * 800_000 - 1, "v", 2),
    ],
)
def test_verify_names_the_chunk_the_bytes_and_the_region(
    run: Path, byte: int, region: str, chunk: int
) -> None:
    write(run, 100, parameters=800_000)
    flip_bit(member(run, 100, ".bin"), 8 * byte + 3)
    with pytest.raises(Damaged) as raised:
        verify(only(run, 100), RUN_ID)
    start = chunk * CHUNK_BYTES
    stop = min(start + CHUNK_BYTES, 8 + 12 * 800_000)
    assert raised.value.step == 100
    assert raised.value.reason == (
        f"step_000100.bin: chunk {chunk} of 3, bytes {start} to {stop} ({region}),"
        " differs from its manifest"
    )


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 8, "header"),
        (0, 9, "header, weights"),
        (8, 48, "weights"),
        (47, 49, "weights, m"),
        (48, 88, "m"),
        (88, 128, "v"),
        (0, 128, "header, weights, m, v"),
    ],
)
def test_regions_of_ten_parameters(start: int, stop: int, expected: str) -> None:
    assert regions(start, stop, 10) == expected


def test_verify_reads_from_the_device_and_not_from_the_page_cache(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 100)
    direct: list[bool] = []
    read = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    verify(only(run, 100), RUN_ID, cold=True)
    assert len(direct) == 2
    assert all(direct)
    verify(only(run, 100), RUN_ID, cold=False)
    assert direct[2:] == [False, False]


@pytest.mark.parametrize("refuse_at", ["open", "read"])
def test_verify_where_the_file_system_has_no_direct_reads(
    run: Path, monkeypatch: pytest.MonkeyPatch, refuse_at: str
) -> None:
    write(run, 100, parameters=800_000)
    dropped: list[int] = []
    control, read = fcntl.fcntl, os.preadv

    def fcntl_without(descriptor: int, command: int, flags: int = 0) -> int:
        if refuse_at == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        return control(descriptor, command, flags)

    def read_without(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if control(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_without)
    monkeypatch.setattr(os, "preadv", read_without)
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: dropped.append(call[3]))
    assert verify(only(run, 100), RUN_ID).parameters == 800_000
    assert dropped == [os.POSIX_FADV_DONTNEED] * 2


def test_verify_puts_short_reads_together(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, 100, parameters=800_000)
    read = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda descriptor, buffers, offset: read(
            descriptor, [buffers[0][: 1 + offset % 700_000]], offset
        ),
    )
    verify(only(run, 100), RUN_ID, cold=False)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN])
def test_a_read_error_of_the_medium_condemns_one_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(run, 100, 200)
    bad = os.stat(member(run, 200, ".bin")).st_ino
    read = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(number, os.strerror(number))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    selection = select(run, RUN_ID, time=TIME)
    assert selection.chosen is not None
    assert selection.chosen.step == 100
    assert [one.step for one in selection.rejected] == [200]
    assert os.strerror(number) in selection.rejected[0].reason


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_an_error_of_the_machine_condemns_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(run, 100, 200)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        verify(only(run, 200), RUN_ID)
    with pytest.raises(OSError, match=os.strerror(number)):
        select(run, RUN_ID, time=TIME)
    assert [found.step for found in find(run / "checkpoints")] == [100, 200]
    assert names(run / "quarantine") == []


def test_verify_accepts_an_ancestors_steps_up_to_the_fork_only(run: Path) -> None:
    write(run, 100, 200, run_id="parent")
    lineage = [("grandparent", 500), ("parent", 100)]
    assert verify(only(run, 100), RUN_ID, lineage).step == 100
    with pytest.raises(Damaged, match=r"step 200 of run parent, which is neither this run"):
        verify(only(run, 200), RUN_ID, lineage)
    with pytest.raises(Damaged, match="step 100 of run parent"):
        verify(only(run, 100), RUN_ID)


def test_verify_judges_a_bare_file_by_its_header_and_only_when_told_to(run: Path) -> None:
    write(run, 100)
    member(run, 100, ".json").unlink()
    with pytest.raises(Damaged, match=r"step_000100\.bin: no manifest beside it"):
        verify(only(run, 100), RUN_ID)
    verified = verify(only(run, 100), RUN_ID, bare_allowed=True)
    data = member(run, 100, ".bin").read_bytes()
    assert verified.manifest is None
    assert verified.parameters == 6
    assert verified.sha256 == hashlib.sha256(data).hexdigest()
    assert verified.binary_digest == chunks_digest([hashlib.sha256(data).hexdigest()])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 parameters do not fit"),
        (binary(100, 6)[:7], "7 bytes, but 6 parameters make 80|parameters do not fit"),
        (binary(100, 6)[:-1], "79 bytes, but 6 parameters make 80"),
        (binary(100, 6) + b"\0", "81 bytes, but 6 parameters make 80"),
        (binary(101, 6), "its header says step 101"),
        (b"\x64\0\0\0\xff\xff\xff\xff", "-1 parameters do not fit"),
    ],
)
def test_verify_refuses_a_bare_file_that_contradicts_itself(
    run: Path, data: bytes, reason: str
) -> None:
    member(run, 100, ".bin").write_bytes(data)
    with pytest.raises(Damaged, match=reason):
        verify(only(run, 100), RUN_ID, bare_allowed=True)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"null", b"\0" * 4096, b'{"a":' + b"[" * 400 + b"]" * 400 + b"}", b"\xff\xfe"],
)
def test_verify_survives_any_bytes_in_a_manifest(run: Path, raw: bytes) -> None:
    write(run, 100)
    member(run, 100, ".json").write_bytes(raw)
    with pytest.raises(Damaged, match=r"step_000100\.json"):
        verify(only(run, 100), RUN_ID)


def test_verify_survives_a_manifest_that_is_nested_too_deep_to_write(run: Path) -> None:
    made = write_checkpoint(run / "checkpoints", 100)
    deep = b'"detectors":{"a":' + b"[" * 400 + b"]" * 400 + b"}"
    raw = made.to_bytes().replace(b'"detectors":{}', deep)
    member(run, 100, ".json").write_bytes(raw)
    with pytest.raises(Damaged, match=r"step_000100\.json: nested deeper than 64"):
        verify(only(run, 100), RUN_ID)


def test_verify_refuses_a_chunk_list_that_is_no_digest(run: Path) -> None:
    write(run, 100, chunks=("not hexadecimal",))
    with pytest.raises(Damaged, match=r"step_000100\.json"):
        verify(only(run, 100), RUN_ID)


def test_verify_refuses_a_manifest_of_unreasonable_size_unread(run: Path) -> None:
    write(run, 100)
    os.truncate(member(run, 100, ".json"), 2**40)
    with pytest.raises(Damaged, match="1099511627776 bytes, more than the limit"):
        verify(only(run, 100), RUN_ID)


def test_verify_refuses_what_became_a_pipe_or_nothing(run: Path) -> None:
    write(run, 100)
    found = only(run, 100)
    found.binary.unlink()
    with pytest.raises(Damaged, match="No such file"):
        verify(found, RUN_ID)
    os.mkfifo(found.binary)
    with pytest.raises(Damaged, match="not a regular file"):
        verify(found, RUN_ID)


def test_verify_notices_a_file_that_shrinks_under_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 100)
    found = only(run, 100)
    real = os.fstat

    def fstat_then_cut(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        if status.st_ino == os.stat(found.binary).st_ino:
            os.truncate(found.binary, 40)
        return status

    monkeypatch.setattr(os, "fstat", fstat_then_cut)
    with pytest.raises(Damaged, match="ends at byte 40 of 80"):
        verify(found, RUN_ID)


def test_verify_stops_where_its_caller_says(run: Path) -> None:
    class Stop(Exception):
        pass

    write(run, 100, parameters=800_000)
    ticks: list[None] = []

    def tick() -> None:
        ticks.append(None)
        if len(ticks) == 2:
            raise Stop

    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Stop):
        verify(only(run, 100), RUN_ID, tick=tick)
    assert len(ticks) == 2
    assert len(os.listdir("/proc/self/fd")) == open_before


# --- select --------------------------------------------------------------------------------------


def test_select_takes_the_newest_at_most_at_the_ceiling(run: Path) -> None:
    write(run, 100, 200, 300)
    assert chosen_step(run) == 300
    assert chosen_step(run, ceiling=299) == 200
    assert chosen_step(run, ceiling=200) == 200
    assert chosen_step(run, ceiling=99) is None
    assert [found.step for found in find(run / "checkpoints")] == [100, 200, 300]


def test_select_does_not_judge_what_is_above_the_ceiling(run: Path) -> None:
    write(run, 100, 200)
    flip_bit(member(run, 200, ".bin"), 100)
    assert chosen_step(run, ceiling=150) == 100
    assert member(run, 200, ".bin").exists()


def test_select_in_an_empty_run(tmp_path: Path) -> None:
    selection = select(tmp_path, RUN_ID, time=TIME)
    assert selection.chosen is None
    assert selection.rejected == ()
    assert names(tmp_path) == []


def test_select_takes_bare_files_only_where_the_run_allows_them(run: Path) -> None:
    write(run, 100, 200)
    member(run, 200, ".json").unlink()
    assert chosen_step(run, bare_allowed=True) == 200
    assert chosen_step(run) == 100
    assert names(run / "quarantine") == ["step_000200.bin", "step_000200.reason.json"]


def test_select_still_wants_a_damaged_manifest_right_where_bare_files_are_allowed(
    run: Path,
) -> None:
    write(run, 100, 200)
    flip_bit(member(run, 200, ".json"), 999)
    assert chosen_step(run, bare_allowed=True) == 100


def test_quarantine_keeps_every_member_and_says_why(run: Path) -> None:
    write(run, 100, 200)
    flip_bit(member(run, 200, ".bin"), 300)
    before = contents(run / "checkpoints")
    selection = select(run, RUN_ID, time=TIME)
    assert selection.rejected[0].moved_to == "quarantine/step_000200.bin"
    assert names(run / "quarantine") == [
        "step_000200.bin",
        "step_000200.json",
        "step_000200.reason.json",
    ]
    for ending in (".bin", ".json"):
        name = f"step_000200{ending}"
        assert (run / "quarantine" / name).read_bytes() == before[name]
    assert orjson.loads((run / "quarantine/step_000200.reason.json").read_bytes()) == {
        "step": 200,
        "reason": selection.rejected[0].reason,
        "time": TIME,
        "names": ["step_000200.bin", "step_000200.json"],
        "moved_to": "quarantine/step_000200.bin",
    }


def test_quarantine_never_overwrites_what_is_there(run: Path) -> None:
    kept: dict[str, bytes] = {}
    for seed in range(3):
        write(run, 200, seed=seed)
        flip_bit(member(run, 200, ".bin"), 300)
        select(run, RUN_ID, time=TIME + seed)
        now = contents(run / "quarantine")
        assert kept.items() <= now.items()
        assert len(now) == len(kept) + 3
        kept = now
    assert {"step_000200.bin", "step_000200.2.json", "step_000200.3.reason.json"} <= set(kept)


@pytest.mark.parametrize("ending", [".bin", ".json", ".reason.json"])
def test_quarantine_respects_whatever_is_left_of_an_earlier_one(run: Path, ending: str) -> None:
    (run / "quarantine").mkdir()
    (run / "quarantine" / f"step_000200{ending}").write_bytes(b"kept by the operator")
    write(run, 200)
    moved_to = quarantine(run, only(run, 200), "for the test", time=TIME)
    assert moved_to == "quarantine/step_000200.2.bin"
    assert (run / "quarantine" / f"step_000200{ending}").read_bytes() == b"kept by the operator"


def refuse_files(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoints, "replace_file", refuse)


def test_quarantine_writes_the_reason_before_it_moves_anything(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken disk stops it before the checkpoint has lost a member."""
    write(run, 200)
    refuse_files(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        quarantine(run, only(run, 200), "for the test", time=TIME)
    assert names(run / "checkpoints") == ["step_000200.bin", "step_000200.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_a_damaged_checkpoint_still_makes_way_for_an_older_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A save that a full disk cut is just what makes both come together."""
    write(run, 100, 200)
    os.truncate(member(run, 200, ".bin"), 50)
    refuse_files(monkeypatch, code)
    selection = select(run, RUN_ID, time=TIME)
    assert selection.chosen is not None
    assert selection.chosen.step == 100
    ((step, reason, moved_to),) = [
        (one.step, one.reason, one.moved_to) for one in selection.rejected
    ]
    assert (step, moved_to) == (200, "quarantine/step_000200.bin")
    assert "50 bytes" in reason, "it has no file, so the caller must have it"
    assert names(run / "quarantine") == ["step_000200.bin", "step_000200.json"]


def test_fc01_a_short_file_under_the_final_name_is_never_selected(run: Path) -> None:
    """A kill while saving left a cut file under the final name, and loading it died. Here a file
    of any smaller length is rejected and the one before it is used.

    Lightning-AI/pytorch-lightning #688.
    """
    whole = binary(200, 6)
    for length in range(len(whole)):
        write(run, 100, 200, attempt=1)
        os.truncate(member(run, 200, ".bin"), length)
        selection = select(run, RUN_ID, time=TIME)
        assert selection.chosen is not None
        assert selection.chosen.step == 100
        assert f"{length} bytes, but 6 parameters make 80" in selection.rejected[0].reason


def test_fc01_what_a_killed_save_leaves_is_ignored(run: Path) -> None:
    """The reader's side of the same trouble: leftovers carry temporary names and never count.

    Lightning-AI/pytorch-lightning #688.
    """
    write(run, 100)
    for number, point in enumerate(("json", "bin", "link json")):
        write(run, 200 + number, stop_before=point)
    assert any(name.startswith(".tmp-") for name in names(run / "checkpoints"))
    assert [found.step for found in find(run / "checkpoints")] == [100]
    assert chosen_step(run) == 100
    assert names(run / "quarantine") == []


@pytest.mark.parametrize("point", ["json", "bin", "link json", "link bin"])
def test_fc02_a_failed_write_of_any_member_leaves_the_last_set_selected(
    run: Path, point: str
) -> None:
    """A failed write left empty parts and temporaries inside the set that counts as the last one.

    facebookresearch/metaseq #53.
    """
    write(run, 100)
    before = contents(run / "checkpoints")
    write(run, 200, stop_before=point)
    assert chosen_step(run) == 100
    assert before.items() <= contents(run / "checkpoints").items()
    # The next attempt can publish the same step, whatever the dead one left behind.
    supersede(run, 100)
    clean_temporaries(run / "checkpoints", None)
    write(run, 200, attempt=2)
    assert chosen_step(run) == 200


def test_fc02_a_save_that_died_after_its_commit_counts(run: Path) -> None:
    """The other side of the same line: once the `.bin` has its name, the set is whole.

    facebookresearch/metaseq #53.
    """
    write(run, 100)
    write(run, 200, stop_before="unlink")
    assert chosen_step(run) == 200
    assert len(clean_temporaries(run / "checkpoints", None)) == 2
    assert chosen_step(run) == 200


def test_fc03_resume_falls_back_and_says_what_was_rejected_and_why(run: Path) -> None:
    """The machine died while saving; the newest set was bad and nothing fell back.

    allenai/allennlp #2129.
    """
    write(run, 100, 200, 300, 400)
    flip_bit(member(run, 400, ".bin"), 200)
    member(run, 300, ".json").write_bytes(b"\0" * 500)
    selection = select(run, RUN_ID, time=TIME)
    assert selection.chosen is not None
    assert selection.chosen.step == 200
    rejected = [(one.step, one.moved_to) for one in selection.rejected]
    assert rejected == [(400, "quarantine/step_000400.bin"), (300, "quarantine/step_000300.bin")]
    assert "chunk 0 of 1" in selection.rejected[0].reason
    assert "step_000300.json: not JSON" in selection.rejected[1].reason
    assert [found.step for found in find(run / "checkpoints")] == [100, 200]


def test_fc03_nothing_valid_at_all_is_an_answer_too(run: Path) -> None:
    """The chain of fallbacks ends; the caller learns every reason.

    allenai/allennlp #2129.
    """
    write(run, 100, 200)
    for step in (100, 200):
        flip_bit(member(run, step, ".bin"), 200)
    selection = select(run, RUN_ID, time=TIME)
    assert selection.chosen is None
    assert [one.step for one in selection.rejected] == [200, 100]


@pytest.mark.parametrize("ending", [".bin", ".json"])
def test_fc04_each_member_removed_in_turn_needs_no_human(run: Path, ending: str) -> None:
    """A checkpoint lacked one file and automatic resume failed until somebody deleted the rest.

    huggingface/transformers #35782, #35525.
    """
    write(run, 100, 200)
    member(run, 200, ending).unlink()
    assert chosen_step(run) == 100
    assert chosen_step(run) == 100
    supersede(run, 100)
    assert names(run / "checkpoints") == ["step_000100.bin", "step_000100.json"]
    write(run, 200, seed=1)
    assert chosen_step(run) == 200


def test_fc05_a_decoy_directory_is_never_selected(run: Path) -> None:
    """Any directory with a number for a name was trusted as a checkpoint.

    vllm-project/speculators PR 739.
    """
    write(run, 100)
    for name in ("step_000200.bin", "step_000200.json", "step_000300.bin"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "weights.bin").write_bytes(binary(200, 6))
    assert chosen_step(run) == 100
    assert names(run / "quarantine") == []


def test_fc06_a_second_publisher_of_a_step_is_refused(run: Path) -> None:
    """Several processes renamed the same temporary; late ones met a path that was gone. A name is
    given by link(2) here, which never replaces: the second publisher fails, the first one's bytes
    stay, and equal bytes are no conflict.

    huggingface/transformers PR 27820, #28015, #27925.
    """
    directory = run / "checkpoints"
    write_checkpoint(directory, 100, attempt=1)
    before = contents(directory)
    with pytest.raises(FileExistsError):
        write_checkpoint(directory, 100, attempt=2, nonce="fedcba9876543210")
    assert before.items() <= contents(directory).items()
    assert chosen_step(run) == 100
    write_checkpoint(directory, 100, attempt=1)
    clean_temporaries(directory, None)
    assert contents(directory) == before


def test_fc09_members_of_different_saves_are_invalid_as_a_whole(run: Path) -> None:
    """Each file was atomic and the set was not: a kill between two of them mixed steps.

    petuum/adaptdl PR 81.
    """
    write(run, 100, 200, 300)
    for ending in (".bin", ".json"):
        other = member(run, 200, ending).read_bytes()
        saved = member(run, 300, ending).read_bytes()
        member(run, 300, ending).write_bytes(other)
        with pytest.raises(Damaged):
            verify(only(run, 300), RUN_ID)
        member(run, 300, ending).write_bytes(saved)
    verify(only(run, 300), RUN_ID)
    # Two saves of the same step with other weights: only the digests can tell.
    member(run, 300, ".bin").write_bytes(binary(300, 6, seed=1))
    with pytest.raises(Damaged, match="differs from its manifest"):
        verify(only(run, 300), RUN_ID)
    assert chosen_step(run) == 200


def test_fc10_any_members_step_that_differs_is_refused(run: Path) -> None:
    """One part failed to save and was taken from an older step without a word.

    mosaicml/composer PR 2146.
    """
    data = binary(300, 6)
    directory = run / "checkpoints"
    # The name.
    publish(directory, 301, data, manifest(data, 300, 6).to_bytes())
    with pytest.raises(Damaged, match=r"step_000301\.json: written for step 300"):
        verify(only(run, 301), RUN_ID)
    # The manifest.
    publish(directory, 300, data, manifest(data, 302, 6).to_bytes())
    with pytest.raises(Damaged, match=r"step_000300\.json: written for step 302"):
        verify(only(run, 300), RUN_ID)
    # The header, with every digest right.
    old = binary(299, 6)
    publish(directory, 303, old, manifest(old, 303, 6).to_bytes())
    with pytest.raises(Damaged, match="header says step 299 with 6 parameters"):
        verify(only(run, 303), RUN_ID)
    # The update count in the state.
    data = binary(304, 6)
    publish(directory, 304, data, manifest(data, 304, 6, state=state(303)).to_bytes())
    with pytest.raises(Damaged, match="303 updates in a checkpoint of step 304"):
        verify(only(run, 304), RUN_ID)
    assert chosen_step(run) is None


@pytest.mark.parametrize("ending", [".bin", ".json"])
def test_fc11_every_single_flipped_bit_is_found(run: Path, ending: str) -> None:
    """The presence of metadata counted as validity; a flipped bit loaded and the run drifted.

    pytorch/torchtitan #4011.
    """
    write(run, 100, parameters=2)
    found = only(run, 100)
    path = member(run, 100, ending)
    for bit in range(8 * path.stat().st_size):
        flip_bit(path, bit)
        with pytest.raises(Damaged) as raised:
            verify(found, RUN_ID, cold=False)
        assert path.name in raised.value.reason or "step_000100.bin" in raised.value.reason
        flip_bit(path, bit)
    verify(found, RUN_ID)


def test_fc11_a_flipped_bit_anywhere_in_a_large_file_is_rejected_and_recorded(run: Path) -> None:
    """The same trouble in a file of several chunks: fallback, and the reason is kept on disk.

    pytorch/torchtitan #4011.
    """
    bits = random.Random(11)
    write(run, 100)
    for seed in range(8):
        write(run, 200, parameters=800_000, seed=seed)
        bit = bits.randrange(8 * (8 + 12 * 800_000))
        flip_bit(member(run, 200, ".bin"), bit)
        selection = select(run, RUN_ID, time=TIME)
        assert selection.chosen is not None
        assert selection.chosen.step == 100
        (rejected,) = selection.rejected
        reason = (run / rejected.moved_to).with_suffix(".reason.json")
        assert orjson.loads(reason.read_bytes())["reason"] == rejected.reason
        if bit >= 64:
            assert f"chunk {bit // 8 // CHUNK_BYTES} of 3" in rejected.reason


# --- supersede -----------------------------------------------------------------------------------


def test_supersede_moves_everything_above_and_nothing_else(run: Path) -> None:
    write(run, 100, 200, 300, 1_000_000)
    before = contents(run / "checkpoints")
    moved = supersede(run, 200)
    assert [(one.step, one.moved_to) for one in moved] == [
        (1_000_000, "superseded/step_1000000.bin"),
        (300, "superseded/step_000300.bin"),
    ]
    assert [found.step for found in find(run / "checkpoints")] == [100, 200]
    assert [found.step for found in find(run / "superseded")] == [300, 1_000_000]
    assert contents(run / "checkpoints") | contents(run / "superseded") == before
    assert supersede(run, 200) == []


def test_supersede_frees_names_that_leftovers_and_decoys_hold(run: Path) -> None:
    write(run, 100)
    write(run, 200, stop_before="link bin")
    (run / "checkpoints/step_000300.bin").mkdir()
    assert names(run / "checkpoints").count("step_000200.json") == 1
    moved = supersede(run, 100)
    assert [(one.step, one.moved_to) for one in moved] == [
        (300, "superseded/step_000300.bin"),
        (200, "superseded/step_000200.json"),
    ]
    write(run, 200, 300, attempt=2)
    assert chosen_step(run) == 300


def test_supersede_finishes_what_a_kill_cut_in_two(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `.bin` moves first, so half a move is no checkpoint in either place."""
    write(run, 100, 200)
    rename = os.rename

    class Killed(BaseException):
        pass

    def rename_once(source: Path, target: Path) -> None:
        rename(source, target)
        raise Killed

    monkeypatch.setattr(os, "rename", rename_once)
    with pytest.raises(Killed):
        supersede(run, 100)
    monkeypatch.setattr(os, "rename", rename)
    assert [found.step for found in find(run / "checkpoints")] == [100]
    assert [one.moved_to for one in supersede(run, 100)] == ["superseded/step_000200.json"]
    assert verify(find(run / "superseded")[0], RUN_ID).step == 200


def test_fc20_no_existing_checkpoint_is_ever_written_again(run: Path) -> None:
    """Numbering began at zero after a restore and overwrote older checkpoints. Here three lives
    pass the same steps, and every byte that was ever published is still there.

    ray-project/ray #29947, PR 31423.
    """
    ever: set[tuple[str, str]] = set()
    for attempt in (1, 2, 3):
        assert chosen_step(run) == (None if attempt == 1 else 100)
        supersede(run, 0 if attempt == 1 else 100)
        for step in (100, 200, 300):
            if step == 100 and attempt > 1:
                continue
            write(run, step, attempt=attempt, seed=attempt)
        here = {
            (hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
            for path in (run / "checkpoints").iterdir()
        }
        ever |= here
        supersede(run, 100)
    kept = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for place in ("checkpoints", "superseded")
        for path in (run / place).iterdir()
    ]
    assert sorted(kept) == sorted(digest for digest, _ in ever)
    assert "step_000300.3.bin" in names(run / "superseded")
    assert supersede(run, 100) == []


# --- retain --------------------------------------------------------------------------------------


def test_plan_keeps_the_last_the_periodic_and_the_pinned() -> None:
    steps = range(100, 1100, 100)
    assert plan_retention(steps, 2, 0, (), 1000) == [100, 200, 300, 400, 500, 600, 700, 800]
    assert plan_retention(steps, 3, 400, (100,), 1000) == [200, 300, 500, 600, 700]
    assert plan_retention(steps, 99, 0, (), 1000) == []
    assert plan_retention(steps, 2, 1, (), 1000) == []


def test_plan_counts_from_the_newest_verified_one() -> None:
    steps = [100, 200, 300, 400, 500]
    assert plan_retention(steps, 2, 0, (), None) == []
    assert plan_retention(steps, 2, 0, (), 450) == []
    assert plan_retention(steps, 2, 0, (), 300) == [100]
    assert plan_retention(steps, 2, 0, (), 500) == [100, 200, 300]
    assert plan_retention([], 2, 0, (), None) == []


@given(
    steps=st.sets(st.integers(0, INT32_MAX) | st.integers(0, 40), max_size=30),
    keep_last=st.integers(2, 8),
    keep_every=st.integers(0, 5),
    pins=st.sets(st.integers(0, 40), max_size=5),
    position=st.integers(0, 29) | st.none(),
)
def test_plan_never_removes_what_a_rule_keeps(
    steps: set[int], keep_last: int, keep_every: int, pins: set[int], position: int | None
) -> None:
    ordered = sorted(steps)
    newest = None if position is None or not ordered else ordered[position % len(ordered)]
    removed = plan_retention(steps, keep_last, keep_every, pins, newest)
    assert removed == sorted(set(removed))
    gone, left = set(removed), steps - set(removed)
    assert gone <= steps
    if newest is None:
        assert not gone
        return
    proven = [step for step in ordered if step <= newest]
    assert newest in left
    assert set(proven[-keep_last:]) <= left
    assert pins & steps <= left
    assert all(step <= newest for step in gone)
    if keep_every:
        assert not any(step % keep_every == 0 for step in gone)
    # Nothing is kept without a rule: a second pass, or another order, changes nothing.
    assert plan_retention(left, keep_last, keep_every, pins, newest) == []
    kept_by_rule = {
        step for step in proven if step in pins or (keep_every and not step % keep_every)
    }
    assert len([step for step in left if step <= newest]) <= keep_last + len(kept_by_rule)


def test_retain_removes_both_members_and_leftovers_below_the_newest_verified(run: Path) -> None:
    write(run, 100, 200, 300, 400)
    member(run, 100, ".bin").unlink()  # a removal that was cut in two
    write(run, 500, stop_before="link bin")  # a publication in progress
    assert retain(run, 2, 0, (), [400]) == [200]
    assert [found.step for found in find(run / "checkpoints")] == [300, 400]
    kept = {"step_000300.json", "step_000400.json", "step_000500.json"}
    assert {name for name in names(run / "checkpoints") if name.endswith("00.json")} >= kept
    assert not member(run, 100, ".json").exists()
    assert not member(run, 200, ".json").exists()


def test_retain_ignores_a_verified_step_that_somebody_deleted(run: Path) -> None:
    """With the newest gone by hand, the newest verified one that exists takes its place."""
    write(run, 100, 200, 300)
    assert retain(run, 2, 0, (), [300, 400]) == [100]
    assert retain(run, 2, 0, (), [400]) == []


def test_retain_does_not_mind_an_operator_who_is_faster(run: Path) -> None:
    write(run, 100, 200, 300, 400)

    def tick() -> None:
        for path in (
            member(run, step, ending) for step in (100, 200) for ending in (".bin", ".json")
        ):
            path.unlink(missing_ok=True)

    assert retain(run, 2, 0, (), [400], tick=tick) == [100, 200]
    assert [found.step for found in find(run / "checkpoints")] == [300, 400]


def test_retain_removes_the_binary_durably_before_its_manifest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 100, 200, 300, 400)
    happened: list[str] = []
    unlink = Path.unlink

    def spy(path: Path, missing_ok: bool = False) -> None:
        happened.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", spy)
    monkeypatch.setattr(checkpoints, "fsync_directory", lambda path: happened.append("sync"))
    assert retain(run, 2, 0, (), [400]) == [100, 200]
    assert happened == [
        *("step_000100.bin", "step_000200.bin", "sync"),
        *("step_000100.json", "step_000200.json", "sync"),
    ]


KILLED_RETENTION = """
import os, signal, sys
from pathlib import Path
from supervisor.checkpoints import retain
left = int(sys.argv[2])
def tick():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
retain(Path(sys.argv[1]), 2, 0, (), [400], tick=tick)
"""


def test_fc13_a_kill_anywhere_in_retention_leaves_verified_checkpoints(run: Path) -> None:
    """Old checkpoints were pruned before the new one was durable; a kill left nothing. Retention
    starts from a verified one here, and a real SIGKILL before each single removal leaves at least
    the newest two, selectable at once.

    KempnerInstitute/KempnerForge #102.
    """
    write(run, 100, 200, 300, 400)
    for allowed in range(5):
        command = [sys.executable, "-c", KILLED_RETENTION, str(run), str(allowed)]
        result = subprocess.run(command, check=False)
        if result.returncode == 0:
            break
        assert result.returncode == -signal.SIGKILL
        assert [found.step for found in find(run / "checkpoints")][-2:] == [300, 400]
        assert chosen_step(run) == 400
        assert names(run / "quarantine") == []
    assert result.returncode == 0
    kept = [f"step_000{step}{ending}" for step in (300, 400) for ending in (".bin", ".json")]
    assert names(run / "checkpoints") == kept


def test_fc13_nothing_is_pruned_on_the_word_of_an_unverified_checkpoint(run: Path) -> None:
    """The other half: the newest one is damaged and not verified; every older one stays.

    KempnerInstitute/KempnerForge #102.
    """
    write(run, 100, 200, 300)
    flip_bit(member(run, 300, ".bin"), 300)
    assert retain(run, 2, 0, (), []) == []
    assert retain(run, 2, 0, (), [200]) == []
    assert [found.step for found in find(run / "checkpoints")] == [100, 200, 300]


def test_fc17_retention_orders_by_number(run: Path) -> None:
    """Names were compared as text, so everything from step 10000 on was deleted.

    huggingface/transformers #27138.
    """
    steps = list(range(9000, 10_200, 100))
    write(run, *steps)
    retain(run, 3, 0, (), steps)
    assert [found.step for found in find(run / "checkpoints")] == [9900, 10_000, 10_100]
    million = [999_900, 1_000_000, 1_000_100]
    write(run, *million)
    assert retain(run, 2, 0, (), million) == [9900, 10_000, 10_100, 999_900]
    assert chosen_step(run) == 1_000_100


@pytest.mark.parametrize(("older", "newer"), [(9000, 10_000), (99_900, 100_000), (999_999, 10**6)])
def test_fc18_selection_orders_by_number(run: Path, older: int, newer: int) -> None:
    """A text sort chose 9000 over 10000.

    allenai/open-instruct PR 541; instructlab/instructlab #2362.
    """
    write(run, newer, older)
    assert chosen_step(run) == newer


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "field"),
    [(1, 0, "keep_last"), (0, 0, "keep_last"), (-1, 0, "keep_last"), (5, -1, "keep_every")],
)
def test_fc18_zero_and_negative_limits_remove_nothing(
    run: Path, keep_last: int, keep_every: int, field: str
) -> None:
    """ "-1 keeps all" deleted all. Every such value has one meaning here: it is refused by name.

    nvidia-cosmos/cosmos-rl PR 232.
    """
    write(run, 100, 200, 300)
    with pytest.raises(ValueError, match=f"checkpoint.{field} is -?[0-9]"):
        retain(run, keep_last, keep_every, (), [300])
    assert len(find(run / "checkpoints")) == 3


def test_fc18_keep_all_keeps_all(run: Path) -> None:
    """The way to keep everything is a period of one.

    nvidia-cosmos/cosmos-rl PR 232.
    """
    write(run, 100, 201, 302)
    assert retain(run, 2, 1, (), [302]) == []
    assert len(find(run / "checkpoints")) == 3


# --- temporaries, space, sizes -------------------------------------------------------------------


def test_clean_removes_the_temporaries_of_the_dead_only(run: Path) -> None:
    directory = run / "checkpoints"
    write(run, 100)
    living = temporary_name(2, "aaaaaaaaaaaaaaaa", "step_000200.bin")
    dead = [
        temporary_name(1, NONCE, "step_000200.bin"),
        temporary_name(2, NONCE, "step_000200.json"),
        temporary_name(12, "aaaaaaaaaaaaaaaa", "step_000200.bin"),
    ]
    for name in [living, *dead]:
        (directory / name).write_bytes(b"half")
    assert clean_temporaries(directory, (2, "aaaaaaaaaaaaaaaa")) == sorted(dead)
    assert names(directory) == [living, "step_000100.bin", "step_000100.json"]
    assert clean_temporaries(directory, None) == [living]
    assert clean_temporaries(run / "missing", None) == []


def statvfs_of(available_bytes: int) -> object:
    class Status:
        f_bavail = available_bytes // 4096
        f_frsize = 4096

    return lambda path: Status


def test_fc21_too_little_disk_is_said_before_the_first_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk too small for one save was noticed after an epoch.

    mlfoundations/open_lm #154.
    """
    monkeypatch.setattr(os, "statvfs", statvfs_of(4096 * 1000))
    assert preflight(run, 4096, 1000) == 4096 * 1000
    with pytest.raises(
        NoSpace, match=r"4100096 bytes are needed .* 4096000 are available"
    ) as raised:
        preflight(run, 4096, 1001)
    assert raised.value.errno == errno.ENOSPC
    assert (raised.value.needed_bytes, raised.value.available_bytes) == (4100096, 4096000)


def test_fc21_preflight_looks_where_the_checkpoints_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose checkpoints/ is a link to another disk needs the space there.

    mlfoundations/open_lm #154.
    """
    asked: list[Path] = []
    real = os.statvfs

    def spy(path: Path) -> os.statvfs_result:
        asked.append(path)
        return real(path)

    monkeypatch.setattr(os, "statvfs", spy)
    preflight(tmp_path, 1, 1)
    (tmp_path / "checkpoints").mkdir()
    preflight(tmp_path, 1, 1)
    assert asked == [tmp_path, tmp_path / "checkpoints"]


def test_fc24_sizes_and_offsets_are_64_bits_wide(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte count kept in 32 bits overflowed for larger models. The largest model that the header
    can name makes a file of 25.8 GB; its manifest, header, regions and preflight come out right.

    karpathy/llm.c PR 700 (commit 30f4f22).
    """
    size_bytes = checkpoint_size_bytes(INT32_MAX)
    assert size_bytes == 8 + 12 * (2**31 - 1) > 2**34
    zeros = hashlib.sha256(bytes(CHUNK_BYTES)).hexdigest()
    tail = hashlib.sha256(bytes(size_bytes % CHUNK_BYTES)).hexdigest()
    first = hashlib.sha256(b"\x64\0\0\0\xff\xff\xff\x7f".ljust(CHUNK_BYTES, b"\0")).hexdigest()
    chunks = (first, *[zeros] * (size_bytes // CHUNK_BYTES - 1), tail)
    half = INT32_MAX // 2
    large = manifest(
        b"",
        100,
        INT32_MAX,
        chunks=chunks,
        binary_digest=chunks_digest(chunks),
        tensors=(
            Tensor("low", (half,), "row", 0),
            Tensor("high", (INT32_MAX - half,), "row", half),
        ),
    )
    raw = large.to_bytes()
    assert parse_manifest(raw, "large") == large
    check_header(b"\x64\0\0\0\xff\xff\xff\x7f", large, "large")
    with pytest.raises(ContractError, match="do not fit"):
        checkpoint_size_bytes(INT32_MAX + 1)
    assert regions(size_bytes - CHUNK_BYTES, size_bytes, INT32_MAX) == "v"
    assert regions(2**32, 2**32 + CHUNK_BYTES, INT32_MAX) == "weights"
    assert regions(2**34 - CHUNK_BYTES, 2**34, INT32_MAX) == "m"
    assert regions(2**34, 2**34 + CHUNK_BYTES, INT32_MAX) == "v"
    monkeypatch.setattr(os, "statvfs", statvfs_of(2**40))
    assert preflight(run, size_bytes, 42) == 2**40
    with pytest.raises(NoSpace, match=str(size_bytes * 43)):
        preflight(run, size_bytes, 43)


def test_fc24_a_sparse_file_beyond_32_bits_is_measured_and_placed_right(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on a real file of 25.8 GB of holes: its length and the place of a damage near its
    end. Reading stands still on all chunks but the first and the last, to save the time.

    karpathy/llm.c PR 700 (commit 30f4f22).
    """
    size_bytes = checkpoint_size_bytes(INT32_MAX)
    count = -(-size_bytes // CHUNK_BYTES)
    with member(run, 100, ".bin").open("wb") as file:
        file.write(b"\x64\0\0\0\xff\xff\xff\x7f")
    os.truncate(member(run, 100, ".bin"), size_bytes)
    same = "5" * 64
    made: Manifest = manifest(
        b"", 100, INT32_MAX, chunks=(same,) * count, binary_digest=chunks_digest([same] * count)
    )
    member(run, 100, ".json").write_bytes(made.to_bytes())

    class Digest:
        """Stands for SHA-256: an empty hole has the digest `same`, anything else has not."""

        def __init__(self, data: bytes | memoryview = b"") -> None:
            self.zeros = bytes(data[:16]) in (bytes(16), b"\x64\0\0\0\xff\xff\xff\x7f" + bytes(8))

        def update(self, data: memoryview) -> None:
            pass

        def hexdigest(self) -> str:
            return same if self.zeros else "6" * 64

    offsets: list[int] = []

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_size != size_bytes:
            return real(descriptor, buffers, offset)
        offsets.append(offset)
        ends = offset == 0 or offset + CHUNK_BYTES > size_bytes
        return real(descriptor, buffers, offset) if ends else min(CHUNK_BYTES, len(buffers[0]))

    real = os.preadv
    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr("supervisor.readback.hashlib", SimpleNamespace(sha256=Digest))
    assert verify(only(run, 100), RUN_ID, cold=False).size_bytes == size_bytes
    assert offsets == list(range(0, size_bytes, CHUNK_BYTES))
    flip_bit(member(run, 100, ".bin"), 8 * (count - 1) * CHUNK_BYTES)
    with pytest.raises(Damaged, match=rf"bytes {(count - 1) * CHUNK_BYTES} to {size_bytes} \(v\)"):
        verify(only(run, 100), RUN_ID, cold=False)
    os.truncate(member(run, 100, ".bin"), size_bytes % 2**32)
    with pytest.raises(Damaged, match=f"{size_bytes % 2**32} bytes, but 2147483647 parameters"):
        verify(only(run, 100), RUN_ID, cold=False)
