"""What goes when there is no room, in which order, and what never goes."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import NONCE, write_checkpoint

from supervisor import checkpoints
from supervisor.contract import temporary_name
from supervisor.readback import Found
from supervisor.reclaim import Reclaimed, Unfinished, reclaim, retain

EVERYTHING = 2**60
PARAMETERS = 1000  # three blocks of 4096 bytes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """100 to 500 in checkpoints/; 600 and 700 were left behind, 800 is damaged; leftovers."""
    directory = tmp_path / "checkpoints"
    for step in range(100, 900, 100):
        write_checkpoint(directory, step, PARAMETERS)
        for path in directory.glob(f"step_{step:06d}.*"):
            os.utime(path, (step, step))
    damaged = directory / "step_000800.bin"
    found = Found(800, damaged, damaged.with_suffix(".json"))
    checkpoints.quarantine(tmp_path, found, "a flipped bit", time=1.0)
    checkpoints.supersede(tmp_path, 500)
    for attempt in (1, 2):
        (directory / temporary_name(attempt, NONCE, "step_000900.bin")).write_bytes(bytes(4096))
    return tmp_path


def take(run: Path, wanted_bytes: int = EVERYTHING, **more: Any) -> Reclaimed:
    given = {"keep_every": 0, "pins": (), "verified_steps": range(100, 600, 100), **more}
    return reclaim(run, wanted_bytes, living=(2, NONCE), **given)


def keep_superseded(run: Path, keep: int, pins: Collection[int]) -> Reclaimed:
    """Retention without a checkpoint that is proven: nothing goes from checkpoints/."""
    return retain(
        run, keep_last=2, keep_every=0, keep_superseded=keep, pins=pins, verified_steps=()
    )


def there(run: Path, name: str) -> list[str]:
    return sorted(path.name for path in (run / name).iterdir() if not path.name.startswith("."))


def steps(run: Path) -> list[int]:
    return [found.step for found in checkpoints.find(run / "checkpoints")]


DEAD = f"checkpoints/{temporary_name(1, NONCE, 'step_000900.bin')}"


def test_everything_that_can_go_goes_the_least_needed_first(run: Path) -> None:
    done = take(run)
    assert done.names == [
        DEAD,
        "superseded/step_000600.bin",
        "superseded/step_000600.json",
        "superseded/step_000700.bin",
        "superseded/step_000700.json",
        "quarantine/step_000800.bin",
    ]
    assert done.steps == [100, 200, 300]
    assert steps(run) == [400, 500]
    assert there(run, "superseded") == []
    assert there(run, "quarantine") == ["step_000800.json", "step_000800.reason.json"]
    assert (run / f"checkpoints/{temporary_name(2, NONCE, 'step_000900.bin')}").exists()
    assert take(run) == Reclaimed()


def test_no_more_goes_than_is_wanted(run: Path) -> None:
    assert take(run, 1).names == [DEAD]
    assert take(run, 1).names == ["superseded/step_000600.bin", "superseded/step_000600.json"]
    first = run / "superseded/step_000700.bin"
    wanted_bytes = 512 * (first.stat().st_blocks + first.with_suffix(".json").stat().st_blocks) + 1
    done = take(run, wanted_bytes)
    assert done.names[2:] == ["quarantine/step_000800.bin"], "and what was left behind last"
    assert done.freed_bytes >= wanted_bytes
    assert take(run, 1).steps == [100]
    assert steps(run) == [200, 300, 400, 500]


def test_what_is_pinned_stays_wherever_it_is(run: Path) -> None:
    done = take(run, pins=(200, 600))
    assert done.steps == [100, 300]
    assert there(run, "superseded") == ["step_000600.bin", "step_000600.json"]


def test_milestones_go_last(run: Path) -> None:
    assert take(run, keep_every=200).steps == [100, 300, 200]


def test_nothing_but_temporaries_goes_before_two_checkpoints_are_proven(run: Path) -> None:
    """What was left behind, or condemned, may be all that there is."""
    for verified in ([], [500], [500, 900]):
        done = take(run, verified_steps=verified)
        assert set(done.names) <= {DEAD}
        assert done.steps == []
    assert len(there(run, "superseded")) == 4


def test_the_last_two_that_are_proven_stay_and_so_does_what_is_newer(run: Path) -> None:
    """500 and 300 were not read back: neither counts, neither goes."""
    assert take(run, verified_steps=[100, 200, 400]).steps == [100]
    assert steps(run) == [200, 300, 400, 500]


def test_a_file_with_another_name_frees_nothing(run: Path) -> None:
    os.link(run / "superseded/step_000600.bin", run / "copy")
    manifest_bytes = (run / "superseded/step_000600.json").stat().st_blocks * 512
    take(run, 1)
    done = take(run, manifest_bytes)
    assert done.freed_bytes == manifest_bytes


def test_of_what_was_left_behind_the_newest_stay(run: Path) -> None:
    """By when they were written: a branch that is left later has lower steps."""
    write_checkpoint(run / "checkpoints", 600, PARAMETERS, seed=1)
    checkpoints.supersede(run, 500)
    assert there(run, "superseded")[:2] == ["step_000600.2.bin", "step_000600.2.json"]
    assert keep_superseded(run, 3, ()) == Reclaimed()
    done = keep_superseded(run, 2, ())
    assert done.names == ["superseded/step_000600.bin", "superseded/step_000600.json"]
    assert keep_superseded(run, 0, (600,)).names == [
        "superseded/step_000700.bin",
        "superseded/step_000700.json",
    ]
    assert there(run, "superseded") == ["step_000600.2.bin", "step_000600.2.json"]


def test_what_is_not_ours_is_not_touched(run: Path) -> None:
    left = run / "superseded"
    (left / "notes.txt").write_text("keep")
    (left / "step_1.bin").write_text("keep")
    (left / "step_000650.bin").mkdir()
    (left / "step_000660.bin").symlink_to(run / "checkpoints/step_000500.bin")
    take(run)
    keep_superseded(run, 0, ())
    expected = ["notes.txt", "step_000650.bin", "step_000660.bin", "step_1.bin"]
    assert there(run, "superseded") == expected
    assert steps(run) == [400, 500]


def test_a_run_without_these_directories_has_nothing_to_give(tmp_path: Path) -> None:
    assert take(tmp_path) == Reclaimed()
    assert keep_superseded(tmp_path, 0, ()) == Reclaimed()


def test_what_the_living_trainer_removes_meanwhile_takes_no_room_and_breaks_nothing(
    run: Path,
) -> None:
    """A trainer that fails to save takes its temporary back at any moment. One that was listed and
    is gone when it is looked at: a name without a file."""
    vanishing = run / "checkpoints" / temporary_name(2, NONCE, "step_000901.bin")
    vanishing.symlink_to("nowhere")
    done = take(run, 1)
    assert done.names == [f"checkpoints/{temporary_name(1, NONCE, 'step_000900.bin')}"]
    assert done.freed_bytes == 4096
    assert vanishing.is_symlink(), "the living one's"


# --- what comes in between ------------------------------------------------------------------------


def retain_all(run: Path) -> Reclaimed:
    return retain(run, keep_last=2, keep_every=0, keep_superseded=0, pins=(), verified_steps=[500])


@pytest.mark.parametrize("name", ["superseded/step_000600.bin", "superseded"])
def test_what_an_operator_empties_meanwhile_is_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Listed, and gone when it is looked at."""

    def hide(call: str) -> None:
        real = getattr(Path, call)

        def vanished(path: Path, *more: Any, **options: Any) -> Any:
            if path == run / name:
                raise FileNotFoundError(str(path))
            return real(path, *more, **options)

        monkeypatch.setattr(Path, call, vanished)

    for call in ("stat", "lstat", "iterdir"):
        hide(call)
    done = retain_all(run)
    assert done.steps == [100, 200, 300]
    assert name not in done.names


@pytest.mark.parametrize(
    ("refused", "removed", "names"),
    [
        ("step_000200.bin", [100], []),
        ("step_000700.bin", [100, 200, 300], ["step_000600.bin", "step_000600.json"]),
    ],
)
def test_what_has_gone_is_told_though_an_error_ends_the_rest(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    removed: list[int],
    names: list[str],
) -> None:
    refuse_to_remove(monkeypatch, refused)
    with pytest.raises(Unfinished, match=f"Errno 30.*{refused}") as raised:
        retain_all(run)
    assert raised.value.done.steps == removed
    assert raised.value.done.names == [f"superseded/{name}" for name in names]


def test_what_has_gone_to_make_room_is_told_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_remove(monkeypatch, "step_000200.bin")
    with pytest.raises(Unfinished) as raised:
        take(run)
    done = raised.value.done
    assert done.steps == [100]
    assert done.names[0] == DEAD
    assert len(done.names) == 6


def refuse_to_remove(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == name:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
