"""What --output does to what is there already."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from supervisor.output_file import writing


def write(path: Path, content: bytes = b"whole") -> None:
    with writing(path) as out:
        out.write(content)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("before")

    def write_half() -> None:
        with writing(path) as out:
            out.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "before"
    write(path)
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("old", "new"):
        link, target = tmp_path / f"link-{name}", tmp_path / "there" / name
        link.symlink_to(target)
        if name == "old":
            target.write_text("before")
        write(link)
        assert link.is_symlink()
        assert target.read_text() == "whole"
    assert len(list((tmp_path / "there").iterdir())) == 2


def test_what_is_for_its_owner_alone_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.touch(0o600)
    write(path)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("whole", 0o600)


def test_a_pipe_is_written_through_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write(path)
    reader.join()
    assert read == [b"whole"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_device_stays_a_device_and_says_that_it_is_full() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write(Path("/dev/full"))
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_standard_output_is_written_where_it_stands(tmp_path: Path) -> None:
    """Also where it was redirected to a file, whose inode the caller's shell has open."""
    log = tmp_path / "log"
    log.write_text("before\n")
    program = "from test_output_file import write, Path; write(Path('/dev/stdout'))"
    with log.open("ab") as out:
        subprocess.run(
            [sys.executable, "-c", program],
            stdout=out,
            timeout=60,
            check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    assert log.read_text() == "before\nwhole"


def test_an_error_names_the_path_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere" / "out.json", tmp_path / "file" / "out.json"):
        with pytest.raises(OSError, match=r"out\.json") as caught:
            write(path)
        assert caught.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        write(tmp_path)
