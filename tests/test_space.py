"""The watch over free space: when it speaks, when it is silent again, and what it does first."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import write_checkpoint

from supervisor.rundir import RunDirectory
from supervisor.space import LOOK_INTERVAL_SECONDS, TRIES, Measured, Room, Watch, measure
from supervisor.worker import Job, Outcome

NEEDED = 1000


class Desk:
    """A watch and what it says; `look` is one look at a disk with so much free space."""

    def __init__(self, tmp_path: Path, headroom_bytes: int = 0) -> None:
        self.jobs: list[tuple[Job, Callable[[Outcome], None]]] = []
        self.alarm = ""
        self.words: list[str] = []
        self.wanted: list[int] = []
        self.fulls: list[str] = []
        self.running = True
        self.freed_bytes: int | str = 0  # or "failed", or "under way"
        self.now = 0.0
        self.watch = Watch(
            RunDirectory(tmp_path, "run"),
            headroom_bytes,
            submit=lambda job, done: self.jobs.append((job, done)),
            alarm=self._alarm,
            reclaim=self._reclaim,
            full=self.fulls.append,
        )

    def _alarm(self, name: str, detail: str) -> None:
        assert name == "disk"
        if detail != self.alarm:
            self.words.append(detail)
        self.alarm = detail

    def _reclaim(self, wanted_bytes: int, done: Callable[[int | None], None]) -> bool:
        if not self.running:
            return False
        self.wanted.append(wanted_bytes)
        self._done = done
        if self.freed_bytes != "under way":
            done(None if isinstance(self.freed_bytes, str) else self.freed_bytes)
        return True

    def look(self, free_bytes: int, checkpoint_bytes: int = NEEDED, history: int = 10**9) -> None:
        self.now += LOOK_INTERVAL_SECONDS
        self.watch.look(self.now)
        ((_, done),) = self.jobs
        self.jobs = []
        found = Measured(Room("/", history), Room("/disk", free_bytes), checkpoint_bytes)
        done(Outcome(1, found, None))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_what_is_measured(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "run")
    directory.create()
    empty = measure(directory)
    assert empty.checkpoint_bytes == 0
    status = os.statvfs(tmp_path)
    assert Path(empty.history.place).is_mount()
    assert empty.history.free_bytes <= status.f_blocks * status.f_frsize
    for step in (100, 1000):
        write_checkpoint(directory.checkpoints, step, step)
    names = ("step_001000.bin", "step_001000.json")
    sizes = [(directory.checkpoints / name).stat().st_size for name in names]
    assert measure(directory).checkpoint_bytes == sum(sizes)


def test_an_alarm_has_the_figures_and_does_not_flap(desk: Desk) -> None:
    desk.look(NEEDED)
    assert desk.alarm == ""
    for free_bytes in (NEEDED - 1, NEEDED - 100, NEEDED, NEEDED + 99):
        desk.look(free_bytes)
    assert desk.words == [
        "/disk: 999 bytes are free and the next checkpoint needs 1000; free some space"
    ]
    desk.look(NEEDED + 100)
    assert desk.alarm == ""


def test_little_headroom_is_an_alarm_of_its_own(tmp_path: Path) -> None:
    desk = Desk(tmp_path, headroom_bytes=5000)
    desk.look(4999)
    assert "/disk: 4999 bytes are free, less than alarms.disk_headroom_bytes = 5000" in desk.alarm
    desk.look(5400)
    desk.look(900)
    assert "the next checkpoint needs 1000; free" in desk.alarm
    desk.look(1100)
    assert "less than alarms.disk_headroom_bytes" in desk.alarm
    desk.look(5500, history=4000)
    assert "/disk" in desk.alarm, "the figures are those of the moment when it was raised"
    desk.look(5500, history=6000)
    desk.look(5500, history=4000)
    assert "/: 4000 bytes are free" in desk.alarm
    assert desk.wanted == [100], "headroom alone removes nothing"


def test_before_the_first_checkpoint_the_hello_says_how_large_it_will_be(desk: Desk) -> None:
    desk.look(10, checkpoint_bytes=0)
    assert desk.alarm == ""
    desk.watch.expect(100)
    desk.look(10, checkpoint_bytes=0)
    assert "the next checkpoint needs 1208" in desk.alarm


def test_it_looks_seldom_and_one_look_at_a_time(desk: Desk) -> None:
    desk.look(NEEDED)
    desk.watch.look(desk.now + LOOK_INTERVAL_SECONDS - 0.1)
    assert desk.jobs == []
    desk.watch.hasten()
    desk.watch.look(desk.now)
    desk.watch.hasten()
    desk.watch.look(desk.now)
    assert len(desk.jobs) == 1


def test_a_disk_that_cannot_be_measured_is_an_alarm(desk: Desk) -> None:
    desk.watch.look(desk.now)
    desk.jobs[0][1](Outcome(1, None, OSError(errno.EIO, "Input/output error")))
    assert "free space cannot be measured: [Errno 5]" in desk.alarm
    desk.jobs = []
    desk.look(NEEDED)
    assert desk.alarm == ""


def test_room_is_made_once_and_then_it_is_full(desk: Desk) -> None:
    desk.freed_bytes = 50
    desk.look(900)
    assert (desk.wanted, desk.fulls) == ([100], [])
    desk.look(950)
    assert (desk.wanted, desk.fulls) == ([100], [desk.alarm])
    desk.look(NEEDED)
    desk.look(900)
    assert desk.wanted == [100, 100], "a new shortage"


def test_nothing_that_could_go_is_full_at_once(desk: Desk) -> None:
    desk.look(900)
    assert desk.fulls == [desk.alarm]


def test_nothing_is_removed_while_no_trainer_runs(desk: Desk) -> None:
    desk.running = False
    desk.look(900)
    assert (desk.wanted, desk.fulls) == ([], [])
    desk.running = True
    desk.look(900)
    assert desk.wanted == [100]


def test_an_attempt_to_make_room_that_fails_is_no_lack_of_room(desk: Desk) -> None:
    """A helper that was killed has not said that nothing can go."""
    desk.freed_bytes = "failed"
    desk.look(900)
    desk.look(950)
    assert (desk.wanted, desk.fulls) == ([100, 50], []), "what is missing is measured anew"
    desk.freed_bytes = 50
    desk.look(950)
    assert (desk.wanted, desk.fulls) == ([100, 50, 50], [])
    desk.look(NEEDED + 100)
    assert desk.alarm == ""


def test_one_that_fails_again_and_again_is(desk: Desk) -> None:
    desk.freed_bytes = "failed"
    for _ in range(TRIES - 1):
        desk.look(900)
    assert desk.fulls == []
    desk.look(900)
    assert desk.fulls == [desk.alarm]
    assert len(desk.wanted) == TRIES
    desk.look(NEEDED + 100)
    desk.look(900)
    assert len(desk.wanted) == TRIES + 1, "a new shortage, with all its tries"
    assert len(desk.fulls) == 1


def test_a_refusal_is_not_forgotten_because_making_room_failed(desk: Desk) -> None:
    desk.freed_bytes = "failed"
    desk.watch.refused(errno.EDQUOT, "no room, says the kernel")
    desk.look(10**9)
    desk.freed_bytes = 0
    desk.look(10**9)
    assert (desk.wanted, desk.fulls) == ([NEEDED, NEEDED], ["no room, says the kernel"])


def test_while_room_is_made_it_does_not_look(desk: Desk) -> None:
    desk.freed_bytes = "under way"
    desk.look(900)
    desk.watch.look(desk.now + 100)
    assert desk.jobs == []
    desk._done(100)
    desk.look(NEEDED)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_shows_in_no_figure_but_in_a_refusal(desk: Desk, code: int) -> None:
    desk.freed_bytes = 4096
    desk.look(10**9)
    for _ in range(2):
        desk.watch.refused(code, "no room, says the kernel")
        desk.look(10**9)
    assert (desk.wanted, desk.fulls) == ([NEEDED, NEEDED], [])
    desk.freed_bytes = 0
    desk.watch.refused(code, "no room, says the kernel")
    desk.look(10**9)
    assert desk.fulls == ["no room, says the kernel"]
    desk.look(10**9)
    assert len(desk.wanted) == 3, "one refusal, one try"


def test_what_is_refused_while_room_is_made_says_nothing_about_that_room(desk: Desk) -> None:
    """A trainer that has nothing to train on to tries once a second, however long that takes."""
    desk.freed_bytes = "under way"
    desk.watch.refused(errno.ENOSPC, "no room, says the kernel")
    desk.look(10**9)
    desk.watch.refused(errno.ENOSPC, "no room, says the kernel")
    desk._done(4096)
    desk.look(10**9)
    assert (desk.wanted, desk.fulls) == ([NEEDED], []), "not full: there is room that nobody tried"
    desk.watch.refused(errno.ENOSPC, "no room, says the kernel")
    desk.look(10**9)
    desk._done(0)
    assert desk.wanted == [NEEDED, NEEDED]
    assert desk.fulls == ["no room, says the kernel"]


def test_what_is_not_a_lack_of_room_is_not_helped_by_making_some(desk: Desk) -> None:
    desk.watch.refused(errno.EIO, "a broken disk")
    desk.look(10**9)
    assert (desk.wanted, desk.fulls) == ([], ["a broken disk"])


def test_the_types_are_those_of_the_daemon(desk: Desk) -> None:
    job: Any = None
    desk.watch.look(1.0)
    job, _ = desk.jobs[0]
    with pytest.raises(FileNotFoundError):
        job()  # there is no directory of checkpoints
