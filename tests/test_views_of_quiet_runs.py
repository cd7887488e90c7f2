"""What is shown of a run that nobody supervises: not begun yet, repaired, rolled back."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from checkpoint_kit import flip_bit
from runs_kit import Run
from test_daemon import STATUS_FIELDS

from supervisor import contract, status as view
from supervisor.progress import age
from supervisor.rundir import RunDirectory, take_lock
from supervisor.sidecars import read_status


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        assert made.finish() == 0
        yield made


def test_a_fork_that_was_not_started_says_where_it_begins(run: Run) -> None:
    forked = run.supervisor("fork", "--at-step", "20", str(run.directory), "branch")
    assert forked.returncode == 0, forked.stderr
    done = run.supervisor("status", "branch")
    assert done.returncode == 3
    assert "not running, phase idle (not started yet, begins at step 20)" in done.stdout
    assert "step        20 of 30" in done.stdout
    assert "None" not in done.stdout
    status = json.loads(run.supervisor("status", "branch", "--json").stdout)
    assert status.keys() >= STATUS_FIELDS
    assert (status["run"], status["step"], status["checkpoint"]["step"]) == ("branch", 20, 20)
    assert status["loss"] == run.rows()[19]["loss"]

    (line,) = [one for one in run.supervisor("list").stdout.splitlines() if "branch" in one]
    assert "not running  idle       step 20/30" in line
    assert line.endswith(f"loss {status['loss']:.3f}")


def test_a_status_of_nothing_on_record_is_json_all_the_same(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "journal.jsonl").touch()
    done = run.supervisor("status", "empty", "--json")
    status = json.loads(done.stdout)
    assert (done.returncode, status["phase"], status["checkpoint"]["step"]) == (4, None, None)
    assert status.keys() >= STATUS_FIELDS
    assert "step -/-  loss -" in run.supervisor("list").stdout


def test_a_checkpoint_that_was_moved_away_is_not_the_newest_any_more(run: Run) -> None:
    flip_bit(run.directory / contract.CHECKPOINTS / "step_000030.bin", 100)
    assert run.supervisor("verify", str(run.directory), "--repair").returncode == 1
    checkpoint = json.loads(run.supervisor("status", str(run.directory), "--json").stdout)[
        "checkpoint"
    ]
    assert (checkpoint["step"], checkpoint["verified"]) == (20, True)
    assert Path(checkpoint["path"]).exists()
    assert checkpoint["age_seconds"] is not None


def test_a_run_that_was_moved_is_shown_where_it_is(run: Run, tmp_path: Path) -> None:
    moved = run.directory.rename(tmp_path / "moved")
    status = json.loads(run.supervisor("status", str(moved), "--json").stdout)
    assert status["directory"] == str(moved)
    assert status["checkpoint"]["path"] == str(moved / contract.CHECKPOINTS / "step_000030.bin")


def test_a_supervisor_that_ends_while_its_status_is_read_is_not_called_dead(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file still said that it ran, and by the next look its lock was free."""
    file = run.directory / contract.STATUS_FILE
    ended = file.read_bytes()
    file.write_bytes(orjson.dumps({**orjson.loads(ended), "phase": "running"}))
    lock_fd = take_lock(RunDirectory(run.directory, run.directory.name))

    def read(path: Path) -> contract.Json | None:
        nonlocal lock_fd
        found = read_status(path)
        if lock_fd >= 0:
            file.write_bytes(ended)
            os.close(lock_fd)
            lock_fd = -1
        return found

    monkeypatch.setattr(view, "read_status", read)
    status, code = view.observe(run.directory)
    assert status is not None
    assert (status["phase"], code) == ("finished", 3)


def test_a_rollback_of_a_run_at_rest_is_called_one_and_stands_at_its_base(run: Run) -> None:
    done = run.supervisor("rollback", str(run.directory), "--to-step", "20")
    assert done.returncode == 0, done.stderr
    assert "to step 20 is wanted" in done.stderr
    status = json.loads(run.supervisor("status", str(run.directory), "--json").stdout)
    assert (status["phase"], status["step"], status["epoch"]) == ("stopped", 20, 2)
    assert status["reason"].startswith("rolled back to step 20")
    assert status["loss"] == run.rows()[19]["loss"]
    again = run.supervisor("stop", str(run.directory))
    assert "stopped at step 20 of 30" in again.stdout


def test_ages_in_words() -> None:
    assert [age(seconds) for seconds in (-1, 45.2, 119, 1584, 9000, 300_000)] == [
        *("0 s", "45 s", "119 s", "26 min", "2 h", "3 days"),
    ]
