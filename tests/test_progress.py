"""What a person sees, and that nobody waits for a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import time
from collections.abc import Iterator
from typing import Any

import pytest
from runs_kit import wait_until

from supervisor import events as ev, progress
from supervisor.contract import Json
from supervisor.progress import Reporter, describe, duration, live_line, number, plain_line


def status(**changes: Any) -> Json:
    return {
        "run": "lesson",
        "phase": "running",
        "trainer_phase": "step",
        "step": 40,
        "target_step": 80,
        "loss": 2.34567,
        "loss_ema": 2.5,
        "steps_per_second": 4.0,
        "checkpoint": {"step": 20},
        "restarts": 0,
        "alarms": [],
    } | changes


def read_until(screen: int, *words: str) -> str:
    """What a terminal shows, which comes in pieces, once it has `words` one after another."""
    shown = ""

    def has_all() -> bool:
        place = 0
        for word in words:
            place = shown.find(word, place) + len(word)
            if place < len(word):
                return False
        return True

    while not has_all():
        shown += os.read(screen, 65536).decode()
    return shown


# --- lines ----------------------------------------------------------------------------------------


def test_the_live_line_has_a_bar_and_what_matters_most() -> None:
    assert live_line(status(), 120) == (
        "[##########..........]  50% step 40/80, loss 2.346, average 2.500,"
        " 4.0 steps/s, 0:10 left, checkpoint 20"
    )


def test_the_live_line_fits_its_terminal() -> None:
    for columns in (20, 40, 80, 99, 100, 200):
        line = live_line(status(alarms=[1], restarts=3), columns)
        assert len(line) <= max(20, columns - 1)
        assert "\n" not in line
    assert live_line(status(), 40).startswith("[#####.....]  50% step 40/80")


def test_a_short_line_has_whole_facts_and_keeps_the_time_left() -> None:
    full = status(step=123_456, target_step=200_000, alarms=[1], restarts=3)
    facts = live_line(full, 200).split("62% ")[1].split(", ")
    assert len(facts) == 8
    for columns in range(40, 200):
        shown = live_line(full, columns).split("% ")[1].split(", ")
        assert set(shown) <= set(facts)
        assert shown[0] == "step 123456/200000"
        assert any(fact.endswith(" left") for fact in shown)
    assert live_line(status(), 80).endswith("average 2.500, 4.0 steps/s, 0:10 left")
    assert live_line(status(), 20) == "50% step 40/80"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_control_characters_gets_plain_lines(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    reporter = Reporter(terminal[1])
    reporter.show(status())
    reporter.say("checkpoint at step 20")
    reporter.close()
    shown = read_until(terminal[0], "checkpoint at step 20\r\n")
    assert shown.startswith("lesson: running, step 40/80")
    assert "\x1b" not in shown
    assert "\r" not in shown.replace("\r\n", "")


@pytest.mark.parametrize(
    ("step", "target", "bar"),
    [(0, 80, "[..........]   0%"), (80, 80, "[##########] 100%"), (90, 80, "[##########] 100%")],
)
def test_the_bar_stays_in_its_frame(step: int, target: int, bar: str) -> None:
    assert live_line(status(step=step, target_step=target), 80).startswith(bar)
    assert live_line(status(step=0, target_step=0), 80).startswith("[..........]   0%")


def test_a_phase_that_is_not_training_is_named() -> None:
    assert " backoff: " in live_line(status(phase="backoff"), 80)
    assert " running: " in live_line(status(trainer_phase=""), 80)
    assert " save: " in live_line(status(trainer_phase="save"), 80)


def test_the_plain_line_leaves_out_what_is_not_known() -> None:
    unknown = status(loss=None, steps_per_second=None, checkpoint={"step": None})
    assert plain_line(unknown) == "lesson: running, step 40/80"
    assert plain_line(status(alarms=[1, 2], restarts=1)).endswith("restarts 1, ALARMS 2")


def test_numbers_and_durations() -> None:
    assert [number(value) for value in (1.23456, 2, None, "nan")] == ["1.235", "2.000", "-", "nan"]
    assert [duration(s) for s in (-1, 0, 59.9, 60, 3599, 3600, 86_399, 86_400, 1e6)] == [
        *("0:00", "0:00", "0:59", "1:00", "59:59", "1:00:00", "23:59:59", "1d 00:00:00"),
        "11d 13:46:40",
    ]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (ev.AttemptStarted(1, "n", 0, 1), "attempt 1 begins from the start"),
        (ev.AttemptStarted(2, "n", 40, 1), "attempt 2 begins from step 40"),
        (
            ev.AttemptEnded(2, "signal", None, 9, 57, True, 0, "bye"),
            "attempt 2 ended at step 57: signal (signal 9): bye",
        ),
        (
            ev.AttemptEnded(2, "finished", 0, None, 80, False, 0, "chatter"),
            "attempt 2 ended at step 80: finished (exit code 0)",
        ),
        (ev.CheckpointCommitted(20, 1, "cadence", [], "d"), "checkpoint at step 20 (cadence)"),
        (ev.Evaluated(20, 1.5, {}), "step 20: held-out loss 1.5000 nats"),
        (ev.Evaluated(20, "nan", {}), "step 20: held-out loss nan"),
        (
            ev.ReplayDiverged(7, 2, ["loss", "arm"], {}, {}, "code"),
            "REPLAY DIVERGED at step 7 in loss, arm",
        ),
        (ev.RunFailed("no luck"), "FAILED: no luck"),
        (ev.Wished("run", ""), ""),
    ],
)
def test_records_in_words(record: ev.Record, words: str) -> None:
    assert describe(record) == words


# --- the reporter ---------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


def test_on_a_terminal_a_line_lives_until_the_next(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen, keyboard = terminal
    reporter = Reporter(keyboard)
    reporter.show(status())
    reporter.say("checkpoint at step 20")
    reporter.show(status(step=41))
    reporter.close()
    shown = read_until(screen, "checkpoint at step 20\r\n", "step 41/", "\r\x1b[2K")
    assert shown.startswith("\r\x1b[2K[")
    assert "\r\x1b[2Kcheckpoint at step 20\r\n" in shown
    assert shown.index("checkpoint at") < shown.rindex("step 41/")
    assert shown.endswith("\r\x1b[2K"), "nothing of the live line is left"


def test_off_a_terminal_progress_is_a_line_from_time_to_time(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reporter = Reporter(pipe[1])
    reporter.show(status())
    reporter.show(status(step=41))
    now += progress.PLAIN_INTERVAL_SECONDS
    reporter.show(status())  # nothing has moved since: nothing to say
    reporter.show(status(step=42))
    reporter.close()
    lines = os.read(pipe[0], 65536).decode().splitlines()
    assert [line.split(",")[1] for line in lines] == [" step 40/80", " step 42/80"]
    assert "\x1b" not in "".join(lines)


def test_a_terminal_that_does_not_read_holds_nobody(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "CLOSE_SECONDS", 0.01)
    reader, writer = pipe
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)
    reporter = Reporter(writer)
    for line in range(10 * progress.MAILBOX_LINES):
        reporter.say(f"line {line}")
    reporter.close()
    # It reads again: what was still in the mailbox comes, the rest was dropped.
    os.set_blocking(reader, False)
    seen = b""

    def last_of_the_mailbox() -> bool:
        nonlocal seen
        try:
            seen += os.read(reader, 65536)
        except BlockingIOError:
            return False
        return b"line 200\n" in seen

    wait_until(last_of_the_mailbox, "the lines that had found room")
    assert b"line 2000\n" not in seen
    reporter.close()
    wait_until(lambda: not reporter._thread.is_alive(), "the end of the thread")


def test_a_terminal_that_is_gone_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    reporter = Reporter(writer)
    for _ in range(3):
        reporter.say("to nobody")
    reporter.close()
    os.close(writer)
    assert capfd.readouterr().err == ""
