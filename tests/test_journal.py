"""The journal: every fact once, every damage found, only a torn tail repaired."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from faults import Faults, states_of
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor.contract import Json
from supervisor.journal import (
    Journal,
    JournalDamaged,
    JournalFailure,
    decode_line,
    encode_line,
    read,
)

FACTS: list[Json] = [
    {"record": "attempt_started", "attempt": 1, "nonce": "a1"},
    {"record": "checkpoint_committed", "step": 100, "requests": ["r1", "r2"], "digest": "00ff"},
    {"record": "wished", "wish": "stop", "why": 'said "enough"\n é \u2028'},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open thousands of files and do not care about the device."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr("supervisor.durable.preallocate", lambda fd, offset, size: False)


def written(path: Path, facts: list[Json] = FACTS) -> bytes:
    """A journal with these facts, one append each, and its bytes."""
    journal, records = Journal.open(path)
    assert records == []
    for number, fact in enumerate(facts):
        journal.append([fact], 1.7e9 + number / 8)
    journal.close()
    return path.read_bytes()


def as_read(count: int) -> list[Json]:
    return [{"seq": n + 1, "time": 1.7e9 + n / 8, **fact} for n, fact in enumerate(FACTS[:count])]


# --- the line ---


def test_a_line_is_what_the_format_says() -> None:
    line, check = encode_line({"wish": "run", "record": "wished"}, 7, 1.5, "0123456789abcdef")
    assert line == (
        b'{"seq":7,"time":1.5,"record":"wished","wish":"run","check":"%s"}\n' % check.encode()
    )
    assert len(check) == 16
    assert decode_line(line[:-1], 7, "0123456789abcdef") == (
        {"seq": 7, "time": 1.5, "record": "wished", "wish": "run"},
        check,
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc:,"), inner),
    max_leaves=8,
)


@cases(200)
@given(
    st.dictionaries(st.text("abcdef", min_size=1), json_values, max_size=4),
    st.integers(1, 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_every_record_survives_exactly(fields: Json, seq: int, time: float) -> None:
    record = {"record": "anything", **fields}
    line, check = encode_line(record, seq, time, "f" * 16)
    assert line.count(b"\n") == 1
    found, found_check = decode_line(line[:-1], seq, "f" * 16)
    assert repr(found) == repr({"seq": seq, "time": time, **record})
    assert found_check == check
    assert json.loads(line) == found | {"check": check}, "any JSON reader can read it"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [1, {"a": math.nan}]])
def test_a_number_that_json_cannot_say_is_refused_and_never_becomes_null(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_line({"record": "evaluated", "loss": value}, 1, 1.5, "")


@pytest.mark.parametrize("name", ["seq", "time", "check"])
def test_the_journals_own_fields_are_reserved(name: str) -> None:
    with pytest.raises(ValueError, match="none of"):
        encode_line({"record": "wished", name: 1}, 1, 1.5, "")
    with pytest.raises(ValueError, match="needs 'record'"):
        encode_line({"wish": "run"}, 1, 1.5, "")


def test_a_line_is_good_only_at_its_place() -> None:
    line, check = encode_line({"record": "wished"}, 2, 1.5, "a" * 16)
    with pytest.raises(ValueError, match="its check is"):
        decode_line(line[:-1], 2, "b" * 16)
    with pytest.raises(ValueError, match="expected the record with seq 3"):
        decode_line(line[:-1], 3, "a" * 16)
    with pytest.raises(ValueError, match="does not end with a check"):
        decode_line(line[:-3], 2, "a" * 16)
    with pytest.raises(ValueError, match="does not end with a check"):
        decode_line(b"", 1, check)


# --- writing and reading ---


def test_records_come_back_over_many_lives(path: Path) -> None:
    before = b""
    for life in range(5):
        journal, records = Journal.open(path)
        assert [record["n"] for record in records] == list(range(life * 2))
        assert journal.repaired is None
        appended = journal.append(
            [{"record": "a", "n": life * 2}, {"record": "b", "n": life * 2 + 1}], float(life)
        )
        journal.sync()
        assert journal.seq == life * 2 + 2
        journal.close()
        found, torn = read(path)
        assert torn is None
        assert found == records + appended
        after = path.read_bytes()
        assert after.startswith(before)
        before = after
    assert [record["seq"] for record in found] == list(range(1, 11))


def test_what_append_returns_is_what_a_reader_gets(path: Path) -> None:
    """The code that runs live is the code that recovers, so it must see the same values."""
    journal, _ = Journal.open(path)
    given: Json = {"record": "evaluated", "pair": (1, 2.0), "names": {"b": 1, "a": -0.0}}
    returned = journal.append([given], 5.25)
    journal.close()
    assert repr(returned) == repr(read(path)[0])
    assert returned[0]["pair"] == [1, 2.0]


def test_several_records_are_one_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(path)
    faults = Faults(monkeypatch)
    journal.append(FACTS, 1.0)
    assert journal.append([], 1.0) == []
    assert [name for name, _ in faults.calls] == ["pwrite"]
    journal.sync()
    assert [name for name, _ in faults.calls] == ["pwrite", "fdatasync"]
    journal.close()


def test_a_record_that_is_no_json_adds_nothing(path: Path) -> None:
    journal, _ = Journal.open(path)
    journal.append(FACTS[:1], 1.0)
    with pytest.raises(TypeError):
        journal.append([FACTS[1], {"record": "x", "value": object()}], 2.0)
    journal.append(FACTS[1:2], 3.0)
    journal.close()
    assert [(r["seq"], r["time"]) for r in read(path)[0]] == [(1, 1.0), (2, 3.0)]


def test_a_new_journal_is_synced_with_its_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    Journal.open(path)[0].close()
    assert faults.calls == [("fsync", path.name), ("fsync", path.parent.name)]
    assert read(path) == ([], None)


# --- damage ---


def bits(content: bytes) -> list[tuple[int, bytes]]:
    return [
        (position, content[:position] + bytes([byte ^ 1 << bit]) + content[position + 1 :])
        for position, byte in enumerate(content)
        for bit in range(8)
    ]


def test_every_single_flipped_bit_is_found(path: Path) -> None:
    """A flipped bit is damage, at the line it is in. Only the last line break is special: with it
    gone the last line is whole all the same, and the bad byte behind it is a torn tail."""
    whole = written(path)
    starts = [0, *(at + 1 for at, byte in enumerate(whole) if byte == 10)]
    with path.open("r+b", buffering=0) as file:
        for position, content in bits(whole):
            os.pwrite(file.fileno(), content[position : position + 1], position)
            if position == len(whole) - 1:
                records, torn = read(path)
                assert records == as_read(3)
                assert torn is not None
            else:
                with pytest.raises(JournalDamaged) as raised:
                    read(path)
                assert raised.value.line == sum(start <= position for start in starts)
                assert f"{path}: line {raised.value.line}" in str(raised.value)
            os.pwrite(file.fileno(), whole[position : position + 1], position)


@pytest.mark.usefixtures("fast")
def test_damage_before_the_tail_is_never_repaired(path: Path) -> None:
    whole = written(path)
    for position, content in bits(whole)[::5]:
        if position < len(whole) - 1:
            path.write_bytes(content)
            with pytest.raises(JournalDamaged, match="Nothing was changed"):
                Journal.open(path)
            assert path.read_bytes() == content


def test_a_removed_swapped_repeated_or_foreign_line_is_found(path: Path, tmp_path: Path) -> None:
    one, two, three = written(path).splitlines(keepends=True)
    other = written(tmp_path / "other", FACTS[1:]).splitlines(keepends=True)
    for lines, line in [
        ([two, three], 1),
        ([one, three], 2),
        ([one, three, two], 2),
        ([one, one, two, three], 2),
        ([one, two, two, three], 3),
        ([one, other[1], three], 2),
        ([one, b"\n", two, three], 2),
        ([one, two, b"\0" * 20 + b"\n", three], 3),
    ]:
        path.write_bytes(b"".join(lines))
        with pytest.raises(JournalDamaged) as raised:
            read(path)
        assert raised.value.line == line


def open_and_check(path: Path, content: bytes, count: int) -> None:
    """Opens a journal with a torn tail: exactly the first `count` records are there, and appends
    go on behind them."""
    path.write_bytes(content)
    seen, torn = read(path)
    journal, records = Journal.open(path)
    assert seen == records == as_read(count)
    assert (torn is None) == (journal.repaired is None)
    if journal.repaired is not None:
        kept, dropped = journal.repaired.kept_bytes, journal.repaired.dropped_bytes
        assert kept + dropped == len(content)
    for number in range(count, 3):
        journal.append([FACTS[number]], 1.7e9 + number / 8)
    journal.close()
    assert read(path) == (as_read(3), None)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("tail", [b"", b"\0", b"\0" * 5000, b"garbage", b'\xff{"seq":2,"'])
def test_a_journal_cut_at_any_byte_keeps_every_record_before_the_cut(
    path: Path, tmp_path: Path, tail: bytes
) -> None:
    whole = written(tmp_path / "whole")
    record_ends = [at for at, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        open_and_check(path, whole[:cut] + tail, sum(end <= cut for end in record_ends))
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("fast")
def test_a_kill_after_any_byte_of_any_write_loses_no_earlier_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(path)
    with monkeypatch.context() as patch:
        faults = Faults(patch, ("pwrite", "ftruncate"))
        journal.append(FACTS[:1], 1.7e9)
        journal.append(FACTS[1:2], 1.7e9 + 1 / 8)
        journal.append(FACTS[2:], 1.7e9 + 2 / 8)
    journal.close()
    for done, content in states_of(faults.writes, b""):
        open_and_check(path, content, done + (not content.endswith(b"\n") and content[-1:] == b"}"))


def test_what_is_dropped_is_described(path: Path) -> None:
    whole = written(path)
    path.write_bytes(whole + b'{"seq":4,"time' + b"\0" * 9)
    journal, _ = Journal.open(path)
    journal.close()
    assert journal.repaired is not None
    assert journal.repaired.kept_bytes == len(whole)
    assert journal.repaired.dropped_bytes == 23
    assert journal.repaired.preview.startswith('{"seq":4')
    assert path.read_bytes() == whole


# --- a failing disk ---


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, "short"])
def test_whichever_call_fails_no_record_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | str
) -> None:
    number, failed = 0, -1
    while failed:
        path = tmp_path / f"{number}.jsonl"
        journal, _ = Journal.open(path)
        expected: list[Json] = []
        with monkeypatch.context() as patch:
            faults = Faults(patch, ("pwrite", "ftruncate", "fdatasync"))
            faults.fail_at(number, fault, "pwrite" if fault == "short" else None)
            for fact in FACTS:
                try:
                    expected += journal.append([fact], 1.0)
                    journal.sync()
                except JournalFailure:
                    pass
                assert read(path) == (expected, None)
            failed = faults.failed
        expected += journal.append(FACTS, 2.0)
        journal.sync()
        journal.close()
        assert read(path) == (expected, None)
        number += 1
    assert number >= (4 if fault == "short" else 7)


def test_a_failed_append_says_what_was_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(path)
    journal.append(FACTS[:1], 1.0)
    with monkeypatch.context() as patch:
        Faults(patch).fail_at(0, errno.ENOSPC)
        with pytest.raises(JournalFailure, match="2 records from seq 2 on") as raised:
            journal.append(FACTS[1:], 2.0)
    assert raised.value.errno == errno.ENOSPC
    assert journal.seq == 1
    journal.close()


def test_a_failed_sync_is_answered_by_writing_again_and_a_second_one_is_an_alarm(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(path)
    expected = journal.append(FACTS[:1], 1.0)
    journal.sync()
    durable = path.read_bytes()
    expected += journal.append(FACTS[1:2], 2.0)
    fdatasync, failures = os.fdatasync, [2]

    def lossy(fd: int) -> None:
        if failures[0]:
            failures[0] -= 1
            path.write_bytes(durable)
            raise OSError(errno.EIO, "lost")
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", lossy)
    with pytest.raises(JournalFailure, match="not durable, also after a second try"):
        journal.sync()
    expected += journal.append(FACTS[2:], 3.0)
    journal.sync()
    journal.close()
    assert read(path) == (expected, None)


def test_a_failed_opening_leaks_no_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(path)
    before = len(os.listdir("/proc/self/fd"))
    Faults(monkeypatch).fail_always(errno.EIO, only="fsync")
    with pytest.raises(OSError, match="EIO"):
        Journal.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_space_is_reserved_and_the_size_is_not_touched(path: Path) -> None:
    journal, _ = Journal.open(path)
    reserved: Any = journal.reserve_problem
    assert reserved is None
    journal.close()
    assert path.stat().st_size == 0
