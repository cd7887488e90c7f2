"""The ledger: nothing recorded is ever lost or rewritten, whatever fails and whenever it is cut."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest
from faults import Faults, states_of
from hypothesis import given, strategies as st
from ledger_kit import holds
from property_kit import cases, scratch

from supervisor import ledger as module, rows, stretches
from supervisor.contract import ContractError, Entry, parse_entry
from supervisor.durable import AppendFile, read_range
from supervisor.ledger import (
    Ledger,
    LedgerFailure,
    canonical,
    iterate_backward,
    read_entries,
)
from supervisor.rows import LedgerDamaged

EMPTY = b"[\n]\n"
CLOSING = b"\n]\n"


def entry(step: int, attempt: int = 1, epoch: int = 1, loss: float = 0.0) -> Entry:
    return Entry(step, loss or 5.0 / step, 1.7e9 + step, attempt, epoch, "books", step * 64)


def row(step: int) -> bytes:
    return orjson.dumps(entry(step).to_json())


def file_of(*steps: int) -> bytes:
    return b"[\n" + b",\n".join(row(step) for step in steps) + CLOSING if steps else EMPTY


def steps_of(path: Path) -> list[int]:
    entries, torn = read_entries(path)
    assert torn is None
    return [item.step for item in entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.loss.json"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open thousands of files and do not care about the device."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr("supervisor.durable.preallocate", lambda fd, offset, size: False)


# --- format ---


def test_a_new_ledger_is_an_empty_array_synced_with_its_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    ledger = Ledger.open(path)
    ledger.close()
    assert path.read_bytes() == EMPTY
    assert [call for call in faults.calls if call[0] == "fsync"][-2:] == [
        ("fsync", path.name),
        ("fsync", path.parent.name),
    ]
    assert (ledger.count, ledger.last, ledger.repaired, ledger.end) == (0, None, None, 1)


def test_the_file_is_one_object_a_line(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append([entry(1)])
    ledger.append([entry(2), entry(3)])
    ledger.close()
    assert path.read_bytes() == file_of(1, 2, 3)
    assert ledger.count == 3
    assert ledger.last == entry(3)
    assert ledger.end == len(file_of(1, 2, 3)) - 3


def test_fc93_bytes_before_a_resume_are_a_prefix_of_the_bytes_after_it(path: Path) -> None:
    """A logger that opened the directory of an earlier run deleted its metrics file. Here every
    later state of the file begins with all bytes of every earlier one, less the closing bracket,
    over any number of openings; and each state is JSON for any reader.

    roboflow/rf-detr #1321
    """
    before, step = EMPTY, 0
    inode = None
    for _ in range(5):
        ledger = Ledger.open(path)
        assert path.read_bytes() == before, "opening a whole file changes nothing"
        for _ in range(7):
            step += 1
            ledger.append([entry(step)])
            after = path.read_bytes()
            assert after.startswith(before.removesuffix(CLOSING))
            assert len(json.loads(after)) == step
            before = after
        ledger.sync()
        ledger.close()
        inode = inode or path.stat().st_ino
        assert path.stat().st_ino == inode


def test_a_group_is_one_write_of_at_most_64_kib(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(path)
    faults = Faults(monkeypatch)
    ledger.append([entry(step) for step in range(1, 2001)])
    sizes = [len(data) for _, _, data in faults.writes]
    assert len(sizes) > 2
    assert max(sizes) <= 64 * 1024
    assert min(sizes[:-1]) > 60 * 1024
    assert steps_of(path) == list(range(1, 2001))
    ledger.append([])
    assert ledger.count == 2000
    ledger.close()


def test_an_entry_that_fits_into_no_write_is_refused_before_anything_is_written(
    path: Path,
) -> None:
    ledger = Ledger.open(path)
    with pytest.raises(ContractError, match="the entry of step 2 takes"):
        ledger.append([entry(1), Entry(2, 1.0, arm="x" * 70_000)])
    fits = Entry(1, 1.0, arm="x" * 65_400)
    ledger.append([fits])
    ledger.close()
    assert read_entries(path) == ([fits], None)
    again = Ledger.open(path)
    again.close()
    assert again.last == fits


floats = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)
naturals = st.integers(min_value=0, max_value=2**53)
counts = st.integers(min_value=0, max_value=2**31 - 1)
entries = st.builds(
    Entry,
    step=counts,
    loss=floats,
    time=st.none() | floats,
    attempt=st.none() | counts,
    epoch=st.none() | counts,
    arm=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    targets_seen=st.none() | naturals,
    learning_rate=st.none() | floats,
    gradient_norm=st.none() | floats,
    step_seconds=st.none() | floats,
)


@cases(100)
@given(st.lists(st.lists(entries, max_size=4), max_size=4))
def test_every_value_survives_to_the_last_bit(batches: list[list[Entry]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        path = Path(f"/proc/self/fd/{os.memfd_create('ledger')}")
        ledger = Ledger.open(path)
        written = []
        for batch in batches:
            ledger.append(batch)
            written += batch
            json.loads(path.read_bytes())
        ledger.close()
        # repr tells -0.0 from 0.0 and every float from its neighbour, and makes NaN equal to NaN
        assert repr(read_entries(path)) == repr((written, None))
        again = Ledger.open(path)
        assert (again.count, repr(again.last)) == (
            len(written),
            repr(written[-1] if written else None),
        )
        again.close()
        os.close(int(path.name))


@pytest.mark.parametrize("loss", [5e-324, -0.0, 1.7976931348623157e308, 0.1 + 0.2])
def test_a_finite_loss_is_a_json_number(path: Path, loss: float) -> None:
    ledger = Ledger.open(path)
    ledger.append([Entry(1, loss)])
    ledger.close()
    (value,) = json.loads(path.read_bytes())
    assert value["loss"].hex() == loss.hex()


# --- repair ---


def open_and_check(path: Path, content: bytes, least: int, written: int) -> None:
    """Opens a damaged file; a prefix of the entries 1..written must be there, at least `least` of
    them, in a file that is whole, whose appends work."""
    path.write_bytes(content)
    whole_before, torn = read_entries(path)
    ledger = Ledger.open(path)
    kept = ledger.count
    assert least <= kept <= written
    assert path.read_bytes() == file_of(*range(1, kept + 1))
    assert [item.step for item in whole_before] == list(range(1, kept + 1))
    # A reader has nothing to report where all that is missing is the last line break.
    whole = content in (file_of(*range(1, kept + 1)), file_of(*range(1, kept + 1))[:-1])
    assert (torn is None) == whole
    assert (ledger.repaired is None) == (content in (file_of(*range(1, kept + 1)), b""))
    assert ledger.last == (entry(kept) if kept else None)
    ledger.append([entry(kept + 1)])
    ledger.close()
    assert path.read_bytes() == file_of(*range(1, kept + 2))


def ends(*steps: int) -> list[int]:
    """The offsets after each entry."""
    found: list[int] = []
    offset = 1
    for step in steps:
        offset += len(row(step)) + (2 if found else 1)
        found.append(offset)
    return found


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("tail", [b"", b"\0", b"\0" * 5000, b"garbage", b'\xff\xfe{"step"', b"{["])
def test_a_file_cut_at_any_byte_keeps_every_entry_before_the_cut(path: Path, tail: bytes) -> None:
    steps = range(1, 4)
    whole = file_of(*steps)
    for cut in range(len(whole) + 1):
        if cut < 3 and tail.strip(b"\0"):
            continue  # nothing says that this ever was a ledger
        least = sum(end <= cut for end in ends(*steps))
        open_and_check(path, whole[:cut] + tail, least, least)


@pytest.mark.usefixtures("fast")
def test_a_kill_after_any_byte_of_any_write_loses_no_entry_of_an_earlier_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes are recorded and every state that a kill can leave is built from them."""
    ledger = Ledger.open(path)
    with monkeypatch.context() as patch:
        faults = Faults(patch, ("pwrite", "ftruncate"))
        for first, stop in [(1, 2), (2, 4), (4, 5)]:
            ledger.append([entry(step) for step in range(first, stop)])
    ledger.close()
    assert len(faults.writes) == 3
    in_writes = [0, 1, 3, 4]
    for done, content in states_of(faults.writes, EMPTY):
        written = in_writes[min(done + 1, 3)]
        open_and_check(path, content, in_writes[done], written)
        if content in [file_of(*range(1, n + 1)) for n in in_writes]:
            assert len(json.loads(content)) >= in_writes[done]


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, "short"])
def test_whichever_call_fails_no_entry_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | str
) -> None:
    """Every call of a session fails in turn, once or from then on. What was acknowledged stays,
    old bytes stay, and after the disk has healed the rest goes in."""
    only = "pwrite" if fault == "short" else None
    number, failed = 0, -1
    while failed:
        path = tmp_path / f"{number}.loss.json"
        path.write_bytes(file_of(1, 2))
        ledger = Ledger.open(path)
        acknowledged = 2
        with monkeypatch.context() as patch:
            faults = Faults(patch, ("pwrite", "ftruncate", "fdatasync"))
            faults.fail_at(number, fault, only)
            for step in range(3, 7):
                try:
                    ledger.append([entry(step) for step in range(ledger.count + 1, step + 1)])
                    ledger.sync()
                    acknowledged = ledger.count
                except LedgerFailure:
                    pass
                assert path.read_bytes() == file_of(*range(1, ledger.count + 1))
                assert ledger.count >= acknowledged
            failed = faults.failed
        ledger.append([entry(step) for step in range(ledger.count + 1, 8)])
        ledger.sync()
        ledger.close()
        assert path.read_bytes() == file_of(*range(1, 8))
        number += 1
    assert number >= (5 if fault == "short" else 9)


def test_a_failure_between_groups_says_how_many_entries_are_in_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(path)
    everything = [entry(step) for step in range(1, 2001)]
    with monkeypatch.context() as patch:
        Faults(patch).fail_at(2, errno.ENOSPC, only="pwrite")
        with pytest.raises(LedgerFailure, match="free disk space") as raised:
            ledger.append(everything)
    assert raised.value.errno == errno.ENOSPC
    assert 0 < raised.value.appended == ledger.count < 2000
    ledger.append(everything[raised.value.appended :])
    assert steps_of(path) == list(range(1, 2001))
    ledger.close()


def test_a_failed_sync_is_answered_by_writing_again_and_a_second_one_is_an_alarm(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing device forgets what it was given, so that only a second write brings it back."""
    ledger = Ledger.open(path)
    ledger.append([entry(1)])
    ledger.sync()
    ledger.append([entry(2), entry(3)])
    fdatasync, failures = os.fdatasync, [2]

    def lossy(fd: int) -> None:
        if failures[0]:
            failures[0] -= 1
            path.write_bytes(file_of(1))
            raise OSError(errno.EIO, "lost")
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", lossy)
    with pytest.raises(LedgerFailure, match="not durable, also after a second try"):
        ledger.sync()
    ledger.append([entry(4)])
    ledger.sync()
    ledger.close()
    assert path.read_bytes() == file_of(1, 2, 3, 4)


def test_what_is_dropped_is_described(path: Path) -> None:
    torn = row(3)[:20]
    path.write_bytes(file_of(1, 2).removesuffix(CLOSING) + b",\n" + torn + b"\0" * 30)
    ledger = Ledger.open(path)
    ledger.close()
    repaired = ledger.repaired
    assert repaired is not None
    assert repaired.kept_bytes == len(file_of(1, 2)) - 3
    assert repaired.dropped_bytes == 2 + 20 + 30
    assert repaired.sha256 == hashlib.sha256(b",\n" + torn + b"\0" * 30).hexdigest()
    assert repaired.preview.startswith(r",\n{")
    assert repaired.set_aside is None
    assert steps_of(path) == [1, 2]


def test_a_hole_of_nuls_ends_the_history_and_what_stood_behind_it_is_set_aside(
    path: Path, tmp_path: Path
) -> None:
    """After a power loss a page in the middle of what was never synced may be missing. Nothing
    behind it can follow, but it may be more than one broken line, so it is not thrown away."""
    content = bytearray(file_of(*range(1, 9)))
    _, second, third, *_ = ends(*range(1, 9))
    content[second + 5 : third - 3] = b"\0" * (third - second - 8)
    path.write_bytes(content)
    entries_read, torn = read_entries(path)
    assert [item.step for item in entries_read] == [1, 2]
    assert torn is not None
    ledger = Ledger.open(path)
    ledger.close()
    assert path.read_bytes() == file_of(1, 2)
    assert ledger.repaired is not None
    assert ledger.repaired.set_aside is not None
    aside = Path(ledger.repaired.set_aside)
    assert aside.parent == tmp_path
    assert aside.read_bytes() == content[second:]


def test_a_hole_far_before_the_tail_is_found(path: Path) -> None:
    content = bytearray(file_of(*range(1, 5001)))
    content[ends(*range(1, 5001))[1000] - 5] = 0
    path.write_bytes(content)
    ledger = Ledger.open(path)
    ledger.close()
    assert ledger.count == 1000
    assert path.read_bytes() == file_of(*range(1, 1001))


@pytest.mark.parametrize("garbage", [b"x" * 400_000, b"\nline" * 80_000])
def test_a_torn_tail_longer_than_one_look_back_hides_no_entry(path: Path, garbage: bytes) -> None:
    path.write_bytes(file_of(1, 2).removesuffix(CLOSING) + b",\n" + garbage)
    assert [item.step for item in iterate_backward(path)] == [2, 1]
    ledger = Ledger.open(path)
    ledger.close()
    assert path.read_bytes() == file_of(1, 2)


def test_a_tail_of_nuls_of_any_size_is_cut(path: Path) -> None:
    with path.open("wb") as file:
        file.write(file_of(1, 2))
        file.truncate(40 << 20)
    assert next(iterate_backward(path)).step == 2
    ledger = Ledger.open(path)
    ledger.close()
    assert path.read_bytes() == file_of(1, 2)
    assert ledger.repaired is not None
    assert ledger.repaired.dropped_bytes == (40 << 20) - len(file_of(1, 2))


def test_damage_larger_than_an_interrupted_append_is_not_repaired(path: Path) -> None:
    content = file_of(1, 2).removesuffix(CLOSING) + b",\n" + b"x" * (5 << 20)
    path.write_bytes(content)
    with pytest.raises(LedgerDamaged, match="more than an interrupted append leaves"):
        Ledger.open(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"{}", b"[[1, 2.5]]", b"[1]", b"# loss", b'[\n  {"step":1,"loss":2}\n]\n']
)
def test_a_file_of_another_program_is_refused_and_not_touched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerDamaged, match="supervisor import"):
        Ledger.open(path)
    assert path.read_bytes() == content


def test_entries_that_span_lines_are_refused(path: Path) -> None:
    content = b'[\n{"step":1,\n"loss":2},\n{"step":2,"loss":2}\n]\n'
    path.write_bytes(content)
    with pytest.raises(LedgerDamaged, match="one on a line"):
        Ledger.open(path)
    assert path.read_bytes() == content


def test_opening_syncs_what_a_killed_writer_left_in_the_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(file_of(1))
    faults = Faults(monkeypatch)
    Ledger.open(path).close()
    assert ("fsync", path.name) in faults.calls


def test_a_failed_opening_leaks_no_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    path.write_bytes(b"not a ledger")
    with pytest.raises(LedgerDamaged):
        Ledger.open(path)
    path.write_bytes(EMPTY)
    Faults(monkeypatch).fail_always(errno.EIO, only="fsync")
    with pytest.raises(OSError, match="EIO"):
        Ledger.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each row that is parsed from now on."""
    parsed: list[int] = []
    parse = rows.parse_line

    def counting(line: bytes) -> object:
        parsed.append(1)
        return parse(line)

    monkeypatch.setattr(stretches, "parse_line", counting)
    return parsed


def test_opening_parses_only_the_tail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(file_of(*range(1, 20_001)))
    parsed: list[int] = []
    parse = parse_entry

    def counting(value: object, where: str) -> Entry:
        parsed.append(1)
        return parse(value, where)

    monkeypatch.setattr(rows, "parse_entry", counting)
    indexed = counted(monkeypatch)
    ledger = Ledger.open(path)
    assert ledger.count == 20_000
    assert ledger.last == entry(20_000)
    assert len(parsed) < 2000
    assert len(indexed) < 4000
    ledger.close()


WRITER = """
import sys
import threading
from supervisor.contract import Entry
from supervisor.ledger import Ledger
ledger = Ledger.open(sys.argv[1])
step = ledger.count
while True:
    batch = [Entry(step + k, 5.0 / (step + k), 1.5, 1, 1, "arm") for k in range(1, 1 + step % 50)]
    batch = batch or [Entry(step + 1, 5.0, 1.5, 1, 1, "arm")]
    ledger.append(batch)
    ledger.sync()
    step += len(batch)
    sys.stdout.buffer.write(b"%d\\n" % step)
    sys.stdout.buffer.flush()
"""


def test_entries_acknowledged_before_a_kill_are_all_there_after_it(path: Path) -> None:
    """A real writer is killed with SIGKILL at random moments, five lives one after the other."""
    chance = random.Random(20)
    acknowledged, before = 0, EMPTY
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert writer.stdout is not None
        for _ in range(chance.randrange(1, 60)):
            acknowledged = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        acknowledged = int((writer.stdout.read().split() or [b"%d" % acknowledged])[-1])
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL
        ledger = Ledger.open(path)
        ledger.close()
        assert ledger.count >= acknowledged
        after = path.read_bytes()
        assert after.startswith(before.removesuffix(CLOSING))
        assert [item["step"] for item in json.loads(after)] == list(range(1, ledger.count + 1))
        before = after


# --- readers ---


def test_fc99_one_torn_last_line_hides_no_row_and_is_reported_once(path: Path) -> None:
    """A history became unreadable as a whole because its last line was cut.

    sipyourdrink-ltd/bernstein PR 5919
    """
    path.write_bytes(file_of(*range(1, 101)).removesuffix(CLOSING) + b",\n" + row(101)[:-1])
    found, torn = read_entries(path)
    assert [item.step for item in found] == list(range(1, 101))
    assert torn is not None
    assert "torn after entry 100" in torn
    assert str(path) in torn
    assert [item.step for item in iterate_backward(path)] == list(range(100, 0, -1))


def test_fc94_new_fields_never_invalidate_old_rows(path: Path) -> None:
    """A metrics file repeated its header and broke when a column was added. Here every row names
    its own fields: rows of an older and of a newer version stand side by side.

    DeepLabCut/DeepLabCut PR 3179
    """
    old, new = b'{"step":1,"loss":2.5}', b'{"step":2,"loss":2.25,"arm":"code","later":{"a":[1]}}'
    path.write_bytes(b"[\n" + old + b",\n" + new + CLOSING)
    ledger = Ledger.open(path)
    assert ledger.repaired is None
    ledger.append([entry(3)])
    ledger.close()
    assert path.read_bytes() == b"[\n" + old + b",\n" + new + b",\n" + row(3) + CLOSING
    assert read_entries(path) == ([Entry(1, 2.5), Entry(2, 2.25, arm="code"), entry(3)], None)


def test_fc95_the_canonical_view_is_monotonic_and_the_raw_file_keeps_both(path: Path) -> None:
    """After a resume from an earlier step the rows of the future that never was stayed in the
    log, so that steps stood twice and out of order with nothing to tell them apart.

    PaddlePaddle/PaddleFormers PR 4744
    """
    first = [entry(step, attempt=1) for step in range(1, 8)]
    second = [entry(step, attempt=2, loss=9.0) for step in (5, 6)]
    ledger = Ledger.open(path)
    ledger.append(first)
    ledger.append(second)
    ledger.close()
    raw, torn = read_entries(path)
    assert torn is None
    assert raw == first + second
    view = canonical(raw)
    assert [(item.step, item.attempt) for item in view] == [
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2),
    ]  # fmt: skip
    assert len(json.loads(path.read_bytes())) == 9


@pytest.mark.parametrize("layout", [dict(indent=2), dict(separators=(",", ":")), {}])
def test_rows_of_the_first_system_are_read_in_any_layout(
    path: Path, layout: dict[str, object]
) -> None:
    values = [[step, 5.0 / step] for step in range(1, 200)]
    path.write_text(json.dumps(values, **layout))  # type: ignore[arg-type]
    expected = [Entry(step, 5.0 / step) for step in range(1, 200)]
    assert read_entries(path) == (expected, None)
    assert list(iterate_backward(path)) == expected[::-1]
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    found, torn = read_entries(path)
    assert found == expected[: len(found)]
    assert len(found) > 90
    assert torn is not None


def test_a_nan_of_another_program_is_a_value_and_not_a_tear(path: Path) -> None:
    path.write_text(json.dumps([[1, 2.5], [2, float("nan")], [3, float("-inf")]]))
    found, torn = read_entries(path)
    assert torn is None
    assert repr([item.loss for item in found]) == "[2.5, nan, -inf]"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"step":1}', "expected a JSON array"),
        (b"hello", "expected a JSON array"),
        (b'[{"step":1,"loss":"high"}]', "entry 1 loss"),
        (b"[[1,2.0],[2]]", "entry 2"),
    ],
)
def test_a_reader_refuses_what_is_no_history(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ContractError, match=what):
        read_entries(path)


def test_a_backward_reader_reads_no_more_than_it_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(file_of(*range(1, 30_001)))
    read: list[int] = []
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    backward = iterate_backward(path)
    assert [next(backward).step for _ in range(100)] == list(range(30_000, 29_900, -1))
    backward.close()  # type: ignore[attr-defined]
    assert sum(read) < path.stat().st_size / 2
    assert [item.step for item in iterate_backward(path)] == list(range(30_000, 0, -1))


def test_a_backward_reader_names_damage_that_is_not_at_the_tail(path: Path) -> None:
    content = bytearray(file_of(*range(1, 5001)))
    middle = ends(*range(1, 5001))[2000]
    content[middle - 5] = ord("#")
    path.write_bytes(content)
    with pytest.raises(LedgerDamaged, match="is not a whole entry"):
        list(iterate_backward(path))


def test_readers_see_a_whole_history_while_a_writer_lives(path: Path) -> None:
    ledger = Ledger.open(path)
    for step in range(1, 50):
        ledger.append([entry(step)])
        assert steps_of(path)[-1] == step
        assert next(iterate_backward(path)) == entry(step)
    ledger.close()


# --- canonical history ---


def slow_canonical(everything: list[Entry]) -> list[Entry]:
    """The definition, word for word."""
    return [
        item
        for position, item in enumerate(everything)
        if all(later.step > item.step for later in everything[position + 1 :])
    ]


histories = st.lists(
    st.builds(entry, st.integers(1, 9), st.integers(1, 3), st.integers(1, 2)), max_size=30
)


@cases(300)
@given(histories)
def test_canonical_is_what_the_definition_says(everything: list[Entry]) -> None:
    view = canonical(everything)
    assert view == slow_canonical(everything)
    steps = [item.step for item in view]
    assert steps == sorted(set(steps))


# --- what an attempt is merged into ---

# Each attempt: the step after which it began, how many it appended and in which epoch. The first
# rows may be of another program, out of order, with steps left out and no attempt.
lives = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=6)
foreign = st.lists(st.integers(1, 12), max_size=8)


@pytest.mark.parametrize("size", [1, 300, 1000, 1 << 18])
@cases(60)
@given(imported=foreign, plan=lives, reread=st.integers(0, 5))
def test_the_tail_of_an_attempt_is_the_canonical_history_before_it(
    size: int,
    imported: list[int],
    plan: list[tuple[int, int]],
    reread: int,
) -> None:
    """Whether the index was made by appends or by an opening, for the newest attempt and for one
    that is read again although later ones followed; and each step is bound to its newest row."""
    everything = [Entry(step, 2.0) for step in imported]
    begun: list[tuple[int, int]] = []  # where the rows of each attempt begin, and its base
    for attempt, (base, length) in enumerate(plan, start=1):
        base = min(base, everything[-1].step if everything else 0)
        begun.append((len(everything), base))
        everything += [entry(base + k, attempt) for k in range(1, length + 1)]
    reread = min(reread, len(plan) - 1)
    start, base = begun[reread]
    stop = begun[reread + 1][0] if reread + 1 < len(begun) else len(everything)
    expected = {item.step: item for item in canonical(everything[:start])}
    own = everything[start:stop]
    with scratch() as place, pytest.MonkeyPatch.context() as patch:
        path = place / "run.loss.json"
        patch.setattr(stretches, "STRETCH_BYTES", size)
        patch.setattr(module, "STRETCH_BYTES", size)
        writer = Ledger.open(path)
        writer.append(everything)
        for ledger in (writer, Ledger.open(path)):
            tail = ledger.tail(base, reread + 1)
            assert {
                step: found for step in range(45) if (found := tail.earlier(step)) is not None
            } == expected
            assert (tail.own_first, tail.own_last) == (
                (own[0].step, own[-1].step) if own else (None, None)
            )
            for count, item in enumerate(everything, start=1):
                if item.step not in {later.step for later in everything[count:]}:
                    assert ledger.binding(item.step) == expected_binding(path, count)
            ledger.close()


def test_nothing_is_parsed_for_an_attempt_that_goes_on_or_that_compares_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adoption after 20,000 steps of one attempt, and a rollback that leaves them behind, cost
    the loop no more than after 20; what is compared is read as it is needed."""
    path.write_bytes(file_of(*range(1, 20_001)))
    ledger = Ledger.open(path)
    parsed = counted(monkeypatch)
    adopted = ledger.tail(0, 1)
    assert (adopted.own_first, adopted.own_last) == (1, 20_000)
    back = ledger.tail(100, 2)
    assert not parsed
    assert [back.earlier(step) for step in (101, 102)] == [entry(101), entry(102)]
    assert len(parsed) < 4000
    ledger.close()


def test_rows_that_a_fork_brought_along_are_not_its_own(path: Path) -> None:
    """An attempt of the parent that its journal does not know yet has the number of the first one
    of the fork."""
    ledger = Ledger.open(path)
    ledger.append([entry(step, attempt=6) for step in range(1, 21)])
    assert ledger.tail(20, 6).own_first is None
    ledger.append([entry(21, attempt=6), entry(22, attempt=6)])
    tail = ledger.tail(20, 6)
    assert (tail.own_first, tail.own_last) == (21, 22)
    ledger.close()


def test_damage_among_the_rows_that_are_compared_is_named(path: Path) -> None:
    content = bytearray(file_of(*range(1, 5001)))
    content[ends(*range(1, 5001))[2000] - 5] = ord("#")
    path.write_bytes(content)
    ledger = Ledger.open(path)
    tail = ledger.tail(1990, 2)
    with pytest.raises(LedgerDamaged, match="is not a whole entry"):
        tail.earlier(1991)
    ledger.close()


# --- binding and proof ---


def expected_binding(path: Path, count: int) -> tuple[int, str]:
    lines = path.read_bytes().split(b"\n")[: count + 1]
    return count, hashlib.sha256(b"\n".join(lines).removesuffix(b",")).hexdigest()


def test_a_binding_is_the_digest_of_the_prefix_that_ends_with_the_step(path: Path) -> None:
    ledger = Ledger.open(path)
    for first in range(1, 3000, 100):
        ledger.append([entry(step) for step in range(first, first + 100)])
        for step in (first + 99, first + 95, first, 1):
            assert ledger.binding(step) == expected_binding(path, step)
    ledger.append([entry(2000, attempt=2)])
    assert ledger.binding(2000) == expected_binding(path, 3001), "the newest entry of the step"
    with pytest.raises(LookupError, match="no entry of step 9999"):
        ledger.binding(9999)
    ledger.close()
    again = Ledger.open(path)
    assert again.binding(1500) == expected_binding(path, 1500)
    assert again.binding(2999) == expected_binding(path, 2999)
    again.close()


def test_a_binding_asked_for_in_the_middle_of_an_append_counts_what_it_hashes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are in the file then, and the loop has not got round to counting them."""
    ledger = Ledger.open(path)
    ledger.append([entry(step) for step in range(1, 6001)])
    append, raced = AppendFile.append, []

    def interrupted(file: AppendFile, data: bytes) -> None:
        append(file, data)
        worker = threading.Thread(target=lambda: raced.append(ledger.binding(1000)))
        worker.start()
        worker.join()

    monkeypatch.setattr(AppendFile, "append", interrupted)
    ledger.append([entry(step) for step in range(6001, 6026)])
    assert raced == [expected_binding(path, 1000)]
    ledger.close()


def test_a_binding_of_an_old_step_reads_one_stretch_and_parses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(file_of(*range(1, 20_001)))
    ledger = Ledger.open(path)
    ledger.append([entry(20_001)])
    parsed = counted(monkeypatch)
    read: list[int] = []

    def counting(descriptor: int, start: int, stop: int) -> bytes:
        read.append(stop - start)
        return read_range(descriptor, start, stop)

    monkeypatch.setattr(stretches, "read_range", counting)
    assert ledger.binding(1000) == expected_binding(path, 1000)
    assert not parsed
    assert len(read) == 1
    assert read[0] <= stretches.STRETCH_BYTES + 1024
    ledger.close()


def test_rows_that_another_program_wrote_are_bound_too(path: Path) -> None:
    rows = [b'{"loss":2.5,"step":1}', b'{ "step": 2, "loss": NaN}', b"[3,2.5]"]
    path.write_bytes(b"[\n" + b",\n".join(rows) + CLOSING)
    ledger = Ledger.open(path)
    assert [ledger.binding(step) for step in (1, 2, 3)] == [
        expected_binding(path, count) for count in (1, 2, 3)
    ]
    ledger.close()


def test_bindings_in_order_hash_every_byte_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(file_of(*range(1, 2001)))
    ledger = Ledger.open(path)
    hashed: list[int] = []
    hash_range = rows.hash_range

    def counting(hasher: hashlib._Hash, descriptor: int, start: int, stop: int) -> None:
        hashed.append(stop - start)
        hash_range(hasher, descriptor, start, stop)

    monkeypatch.setattr(module, "hash_range", counting)
    assert not hashed, "opening hashes nothing"
    for step in range(100, 2001, 100):
        ledger.binding(step)
    assert sum(hashed) == ledger.end
    ledger.close()


def test_a_proof_finds_any_changed_byte_and_any_missing_entry(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append([entry(step) for step in range(1, 6)])
    bound = [ledger.binding(step) for step in range(1, 6)]
    ledger.append([entry(6)])
    ledger.close()
    for count, sha256 in bound:
        assert holds(path, count, sha256)
    whole = path.read_bytes()
    third = ends(*range(1, 6))[2]
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert holds(path, *bound[2]) == (position >= third + len(b",\n"))
    path.write_bytes(file_of(1, 2))
    assert not holds(path, *bound[2])
    path.write_bytes(whole[:third])
    assert holds(path, *bound[2]), "only what stands behind the prefix is torn"
    path.write_bytes(whole[: third - 1])
    assert not holds(path, *bound[2])
