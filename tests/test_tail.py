"""The end of somebody else's log, made harmless; and our own log, which may lose lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from supervisor import tail
from supervisor.log import Log
from supervisor.tail import follow, last_lines, printable


@given(st.text())
def test_nothing_printable_can_drive_a_terminal(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() for c in shown)
    assert len(shown) == len(text)


def test_line_breaks_are_shown_as_signs_unless_they_are_wanted() -> None:
    assert printable("a\nb\tc\x1b[2J") == "a⏎b�c�[2J"
    assert printable("a\nb\tc", keep="\n\t") == "a\nb\tc"


@given(
    st.lists(st.text(alphabet="ab é", max_size=30)),
    st.booleans(),
    st.integers(0, 40),
    st.integers(1, 50),
)
def test_last_lines_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ended: bool, count: int, block: int
) -> None:
    text = "\n".join(lines) + ("\n" if ended else "")
    path = tmp_path_factory.getbasetemp() / "log"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "BLOCK_BYTES", block)
        found = last_lines(path, count)
    whole = text.splitlines(keepends=True)
    assert found == (whole[-count:] if count else [])


def test_last_lines_end_where_they_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert last_lines(path, 5, end=8) == ["one\n", "two\n"]
    assert last_lines(path, 1, end=5) == ["t"]


@pytest.mark.fault(
    "SV-49", phase="any", does="shows the output of a program, whatever bytes it is made of"
)
def test_bytes_of_any_kind_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe ok\n\x07\r\n")
    assert last_lines(path, 9) == ["�� ok\n", "�\n"]


def test_following_begins_where_the_last_lines_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    end = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"two\n")
        file.flush()
        following = follow(path, end)
        assert next(following) == "two\n"
        file.write(b"three\x1b\n")
        file.flush()
        assert next(following) == "three�\n"
        following.close()


def test_a_log_line_says_when_and_who(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.write("hello")
    log.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.endswith(f"Z [{os.getpid()}] hello")


@pytest.mark.fault(
    "SV-54", phase="running", does="goes on without a log, counts what it lost, and says so later"
)
def test_lines_that_are_lost_are_counted(tmp_path: Path) -> None:
    log = Log(tmp_path / "later" / "log")
    for _ in range(3):
        log.write("lost")
    assert log.lost_lines == 3
    (tmp_path / "later").mkdir()
    log.write("found")
    log.close()
    text = (tmp_path / "later" / "log").read_text()
    assert text.endswith("found (3 lines before this one were lost)\n")
    assert log.lost_lines == 3, "the total stays"


def test_a_rotated_log_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    log.write("before")
    path.rename(tmp_path / "log.1")
    log.write("still there")
    log.reopen()
    log.write("after")
    log.close()
    assert "still there" in (tmp_path / "log.1").read_text()
    assert path.read_text().count("\n") == 1
