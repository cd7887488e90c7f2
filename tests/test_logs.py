"""What attempts print: kept whole where it matters, bounded, shown harmlessly, never in the way."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from property_kit import cases
from runs_kit import PYTHON, Run, wait_for_end, wait_until

from supervisor import attempt_logs, contract, events as ev, tail
from supervisor.attempt_logs import FAILURES_KEPT, TRACEBACK, AttemptLogs, LogRules, bound, surplus
from supervisor.contract import Json
from supervisor.log import Log
from supervisor.rundir import RunDirectory
from supervisor.tail import LINE_CHARACTERS, follow, last_lines, pieces
from supervisor.worker import Job, Outcome

KIB = 1024
SIZE_BYTES = 64 * KIB


def occupied(path: Path) -> int:
    return path.stat().st_blocks * 512


def allowed(size_bytes: int = SIZE_BYTES) -> int:
    """What a bounded log may take, with the blocks that describe its holes."""
    return size_bytes + 8 * KIB


# --- losing the middle ----------------------------------------------------------------------------


def numbered(start: int, stop: int) -> bytes:
    return b"".join(b"line %07d\n" % number for number in range(start, stop))


def test_a_log_that_is_small_enough_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(numbered(0, 4000))
    assert bound(path, SIZE_BYTES).dropped_bytes == 0
    assert path.read_bytes() == numbered(0, 4000)


def test_a_log_that_is_too_large_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = numbered(0, 100_000)
    path.write_bytes(whole)
    condition = bound(path, SIZE_BYTES)
    assert occupied(path) <= allowed()
    assert path.stat().st_size == len(whole), "offsets stay"
    found = path.read_bytes()
    assert found[: SIZE_BYTES // 4] == whole[: SIZE_BYTES // 4]
    assert found[-SIZE_BYTES // 2 :] == whole[-SIZE_BYTES // 2 :]
    assert condition.dropped_bytes == len(whole) - len(found.replace(b"\0", b""))
    assert condition.inode == path.stat().st_ino
    assert bound(path, SIZE_BYTES) == condition, "once is enough"


def test_the_first_traceback_is_kept_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    first, later = TRACEBACK + b": the first\n", TRACEBACK + b": a later one\n"
    for number in range(40):
        with path.open("ab") as log:
            log.write(numbered(0, 1000))
            log.write({7: first, 20: later}.get(number, b""))
            log.write(numbered(1000, 1500))
        bound(path, SIZE_BYTES)
        assert occupied(path) <= allowed(), number
    found = path.read_bytes()
    assert first in found
    assert later not in found
    assert found.endswith(b"line 0001499\n")
    with path.open("rb") as log:
        assert len(pieces(log.fileno())) == 3, "beginning, traceback, end"


def test_a_traceback_in_the_beginning_needs_no_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(TRACEBACK + numbered(0, 10_000) + TRACEBACK + numbered(0, 10_000))
    bound(path, SIZE_BYTES)
    with path.open("rb") as log:
        assert len(pieces(log.fileno())) == 2


def test_a_traceback_across_two_reads_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_logs, "_READ_BYTES", 100)
    path = tmp_path / "log"
    for shift in range(0, 120, 7):
        path.write_bytes(b"x" * (20 * KIB + shift) + TRACEBACK + b"y" * (200 * KIB))
        bound(path, SIZE_BYTES)
        assert TRACEBACK in path.read_bytes(), shift


WRITER = """\
import os, sys
out = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    os.write(out, b"line %07d\\n" % number)
"""


@pytest.mark.parametrize("lines", [60_000, pytest.param(10_000_000, marks=pytest.mark.soak)])
def test_a_writer_that_appends_meanwhile_loses_nothing_at_the_end(
    tmp_path: Path, lines: int
) -> None:
    path = tmp_path / "log"
    writer = subprocess.Popen(
        [PYTHON, "-c", WRITER, str(path), str(lines)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    with writer:
        writer.stdout.readline()
        while writer.poll() is None:
            bound(path, SIZE_BYTES)
    assert writer.returncode == 0
    assert path.stat().st_size == len(numbered(0, 1)) * lines
    bound(path, SIZE_BYTES)
    assert occupied(path) <= allowed()
    whole = [line for line in path.read_bytes().replace(b"\0", b"").split(b"\n") if line]
    end = SIZE_BYTES // 2 // len(numbered(0, 1))
    assert whole[-end:] == numbered(lines - end, lines).splitlines()


# --- which ones go --------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 300)), st.sets(st.integers(1, 300)), st.integers(1, 60))
def test_the_first_the_newest_and_the_newest_failures_stay(
    there: set[int], failed: set[int], keep: int
) -> None:
    gone = surplus(there, failed, keep)
    left = there - gone
    assert gone <= there
    assert set(sorted(there)[:1]) <= left
    assert set(sorted(there)[-keep:]) <= left
    assert set(sorted(there & failed)[-FAILURES_KEPT:]) <= left
    assert len(left) <= keep + FAILURES_KEPT + 1


class Hand:
    """`AttemptLogs` with a worker that works at once, or when it is told to."""

    def __init__(self, home: Path, rules: LogRules, *records: ev.Record) -> None:
        self.directory = RunDirectory(home, "run")
        self.directory.logs.mkdir()
        self.alarms: dict[str, str] = {}
        self.waiting: list[Callable[[], None]] = []
        self.logs = AttemptLogs(
            self.directory, rules, records, submit=self._submit, alarm=self.alarms.__setitem__
        )

    def _submit(self, job: Job, done: Callable[[Outcome], None]) -> None:
        def work() -> None:
            try:
                outcome = Outcome(1, job(), None)
            except OSError as error:
                outcome = Outcome(1, None, error)
            done(outcome)

        self.waiting.append(work)

    def look(self) -> str:
        """The alarm after one look."""
        self.logs.look()
        while self.waiting:
            self.waiting.pop(0)()
        return self.alarms.get("logs", "")

    def begin(self, attempt: int, content: bytes | None = b"words\n") -> Path:
        for record in begun(attempt):
            self.logs.remember(record)
        path = self.directory.log(attempt)
        if content is not None:
            path.write_bytes(content)
        return path

    def end(self, attempt: int, cause: str = "crash") -> None:
        self.logs.remember(ended(attempt, cause))

    def there(self) -> list[int]:
        return sorted(int(path.stem[-4:]) for path in self.directory.logs.glob("*.log"))


def begun(attempt: int) -> list[ev.Record]:
    return [ev.AttemptStarted(attempt, "n", 0, 1), ev.AttemptSpawned(attempt, 1, 1, "boot")]


def ended(attempt: int, cause: str) -> ev.AttemptEnded:
    return ev.AttemptEnded(attempt, cause, 1, None, 5, True, 0, "")


RULES = LogRules(SIZE_BYTES, 3)


def test_old_logs_go_when_an_attempt_ends(tmp_path: Path) -> None:
    hand = Hand(tmp_path, RULES)
    (tmp_path / "logs" / "notes.txt").write_text("not ours")
    for attempt in range(1, 10):
        hand.begin(attempt)
        hand.end(attempt, "crash" if attempt in (3, 5) else "stopped")
        assert hand.look() == ""
    assert hand.there() == [1, 3, 5, 7, 8, 9]
    assert (tmp_path / "logs" / "notes.txt").exists()


def test_what_ended_badly_is_known_from_the_journal_too(tmp_path: Path) -> None:
    records = [
        r for n in range(1, 9) for r in (*begun(n), ended(n, "data" if n == 2 else "stopped"))
    ]
    hand = Hand(tmp_path, RULES, *records)
    for attempt in range(1, 9):
        hand.directory.log(attempt).write_bytes(b"words\n")
    hand.look()
    assert hand.there() == [1, 2, 6, 7, 8]


def test_a_log_that_grew_at_the_last_moment_is_bounded_after_its_attempt(tmp_path: Path) -> None:
    hand = Hand(tmp_path, RULES)
    hand.begin(1)
    hand.look()
    path = hand.directory.log(1)
    path.write_bytes(b"x" * 1_000_000)
    output = hand.directory.logs / attempt_logs.DETACHED_OUTPUT
    output.write_bytes(b"y" * 1_000_000)
    hand.end(1)
    hand.look()
    assert (occupied(path) <= allowed(), occupied(output) <= allowed()) == (True, True)


def test_the_count_is_that_of_the_log_that_is_being_written(tmp_path: Path) -> None:
    hand = Hand(tmp_path, RULES)
    hand.begin(1, b"x" * 1_000_000)
    hand.look()
    assert hand.logs.counts()["dropped_bytes"] > 900_000
    hand.end(1)
    hand.begin(2)
    assert hand.logs.counts() == {"dropped_bytes": 0, "unlogged_attempts": 0}


def test_one_look_at_a_time_and_none_without_cause(tmp_path: Path) -> None:
    hand = Hand(tmp_path, RULES)
    hand.begin(1)
    hand.logs.look()
    hand.logs.look()
    assert len(hand.waiting) == 1
    hand.look()
    hand.end(1)
    hand.look()
    hand.logs.look()
    assert hand.waiting == [], "nobody prints and all is tidy"


def test_a_log_that_is_not_there_before_its_attempt_is_no_alarm(tmp_path: Path) -> None:
    hand = Hand(tmp_path, RULES)
    hand.logs.remember(begun(1)[0])
    assert hand.look() == ""


def test_what_one_look_finds_of_an_attempt_that_is_over_is_no_news(tmp_path: Path) -> None:
    hand = Hand(tmp_path, RULES)
    hand.begin(1, None)
    hand.logs.look()
    hand.end(1)
    hand.begin(2)
    assert hand.look() == ""


@pytest.mark.parametrize("how", ["deleted", "replaced", "a directory"])
def test_a_log_that_is_taken_away_is_an_alarm_until_the_next_attempt(
    tmp_path: Path, how: str
) -> None:
    hand = Hand(tmp_path, RULES)
    path = hand.begin(1)
    assert hand.look() == ""
    path.rename(path.with_suffix(".gone"))
    if how == "replaced":
        path.write_bytes(b"")
    elif how == "a directory":
        path.mkdir()
    expected = "Is a directory" if how == "a directory" else "deleted or moved away"
    assert expected in hand.look()
    assert str(path) in hand.look()
    hand.end(1)
    hand.begin(2)
    assert hand.look() == ""


def test_a_file_system_without_holes_is_an_alarm_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes here")

    hand = Hand(tmp_path, RULES)
    path = hand.begin(1, b"x" * 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(attempt_logs, "punch_hole", refuse)
        assert "cannot give back the middle" in hand.look()
        assert path.read_bytes() == b"x" * 100_000
    assert hand.look() == "", "the next look tries again"
    assert occupied(path) <= allowed()


# --- reading it -----------------------------------------------------------------------------------


@pytest.mark.fault("SV-49", phase="any", does="shows random bytes harmlessly")
@given(st.binary(max_size=3000), st.integers(1, 50))
@cases(60)
def test_random_bytes_are_shown_and_drive_nothing(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, count: int
) -> None:
    """Output that was no UTF-8 closed the channel, and then the child hung (Supervisor #638)."""
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(content)
    text = "".join(last_lines(path, count))
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_a_line_that_never_ends_is_shown_short_and_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        log.truncate(1 << 40)  # were it read, memory would not do
        log.seek(0, os.SEEK_END)
        log.write(b"x" * 10_000_000)
    (line,) = last_lines(path, 1)
    assert len(line) < LINE_CHARACTERS + 100
    assert line.startswith("xxx")
    assert "characters left out" in line


def test_what_was_dropped_is_said_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(numbered(0, 20_000))
    bound(path, SIZE_BYTES)
    shown = last_lines(path, 100_000)
    (gap,) = [line for line in shown if "are not kept here" in line]
    whole = [line for line in shown if line.startswith("line ") and len(line) == 13]
    assert whole[0] == "line 0000000\n"
    assert whole[-1] == "line 0019999\n"
    dropped = int(gap.split()[0].removeprefix("[").replace(",", ""))
    assert dropped + sum(map(len, shown)) - len(gap) - 1 == len(numbered(0, 20_000))
    assert last_lines(path, 3) == numbered(19_997, 20_000).decode().splitlines(keepends=True)


def test_a_copy_without_holes_is_shown_without_its_nuls(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"begin\n" + bytes(100_000) + b"end\n")
    assert last_lines(path, 5) == ["begin\n", "end\n"]


def test_a_progress_bar_is_shown_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"10%\r20%\r30%\r\ndone\n")
    assert last_lines(path, 3) == ["20%\n", "30%\n", "done\n"]


def test_following_keeps_characters_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "BLOCK_BYTES", 1)
    path = tmp_path / "log"
    path.write_text("aé\u20ac\U0001f600z")
    with contextlib.closing(follow(path, 0)) as following:
        assert "".join(itertools.islice(following, 5)) == "aé\u20ac\U0001f600z"


def test_following_skips_what_was_dropped_while_nobody_looked(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(numbered(0, 100))
    with contextlib.closing(follow(path, 0)) as following:
        next(following)
        with path.open("ab") as log:
            log.write(numbered(100, 100_000))
        bound(path, SIZE_BYTES)
        seen = ""
        while not seen.endswith("line 0099999\n"):
            seen += next(following)
    assert len(seen) < allowed()
    assert seen.count("are not kept here") == 1


def test_following_goes_on_with_a_new_file_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    with contextlib.closing(follow(path, 0)) as following:
        assert next(following) == "one\n"
        with path.open("ab") as old:
            path.rename(tmp_path / "log.1")
            path.write_bytes(b"three")
            old.write(b"two, to the old file")
            old.flush()
            assert next(following) == "two, to the old file"
            assert [next(following), next(following)] == ["\n", "three"]
        path.write_bytes(b"4\n")  # emptied in place
        assert [next(following), next(following)] == ["\n", "4\n"]


def test_following_misses_no_last_words_before_it_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"one\n")

    def newest() -> Path:
        if not second.exists():
            with first.open("ab") as log:
                log.write(b"last words")
            second.write_bytes(b"two\n")
        return second

    with contextlib.closing(follow(first, 0, newest)) as following:
        assert list(itertools.islice(following, 4)) == ["one\n", "last words", "\n", "two\n"]


# --- our own log ----------------------------------------------------------------------------------


def at_once(job: Job, done: Callable[[Outcome], None]) -> None:
    try:
        outcome = Outcome(1, job(), None)
    except OSError as error:
        outcome = Outcome(1, None, error)
    done(outcome)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with contextlib.closing(Log(tmp_path / "log", 1000)) as made:
        yield made


def test_our_own_log_is_rotated_and_one_older_is_kept(tmp_path: Path, log: Log) -> None:
    for number in range(100):
        log.write(f"fact {number}")
        log.look(at_once)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
    both = (tmp_path / "log.1").read_text() + (tmp_path / "log").read_text()
    kept = [int(line.split()[-1]) for line in both.splitlines()]
    assert kept == list(range(kept[0], 100)), "nothing is lost between the two"
    assert all(path.stat().st_size < 1100 for path in tmp_path.iterdir())


def test_our_own_log_comes_back_when_somebody_took_it_away(tmp_path: Path, log: Log) -> None:
    path = tmp_path / "log"
    log.write("before")
    path.unlink()
    log.write("into nothing")
    log.look(at_once)
    log.write("after")
    assert path.read_text().endswith("after\n")
    path.rename(tmp_path / "elsewhere")
    path.write_text("a new one\n")
    log.look(at_once)
    log.write("into the new one")
    assert path.read_text().count("\n") == 2


def test_a_rotation_that_fails_is_said_once_and_the_log_goes_on(tmp_path: Path, log: Log) -> None:
    (tmp_path / "log.1").mkdir()
    (tmp_path / "log.1" / "full").touch()
    for number in range(50):
        log.write(f"fact {number}")
        log.look(at_once)
    text = (tmp_path / "log").read_text()
    assert text.count("cannot be rotated") == 1
    assert text.endswith("fact 49\n")


@pytest.mark.fault("SV-54", phase="any", does="counts lines that a full disk does not take")
def test_a_full_disk_costs_lines_that_are_counted(tmp_path: Path, log: Log) -> None:
    """Loggers ended daemons when the disk was full (Supervisor #629, dd-agent #2149)."""
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    for _ in range(3):
        log.write("lost")
    assert log.lost_lines == 3
    path.unlink()
    log.look(at_once)
    log.write("found")
    assert path.read_text().endswith("found (3 lines before this one were lost)\n")
    assert log.lost_lines == 3


def test_a_line_that_was_written_in_part_does_not_spoil_the_next(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.write("one")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:30]))
        log.write("two, in part")
    log.write("three")
    first, torn, last = (tmp_path / "log").read_text().splitlines()
    assert (first.split()[-1], len(torn)) == ("one", 30)
    assert last.endswith("three (1 lines before this one were lost)")


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        made.set("logs", size_bytes=SIZE_BYTES)
        yield made


def log_of(run: Run, attempt: int = 1) -> Path:
    return run.directory / contract.LOGS / f"{contract.attempt_stem(attempt)}.log"


def shown(run: Run, *arguments: str) -> str:
    done = run.supervisor("logs", str(run.directory), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.fault("SV-49", phase="running", does="takes bytes of any kind as they are")
@pytest.mark.fault(
    "SV-51", phase="running", does="has the last line before the end, flushed or not"
)
@pytest.mark.fault("SV-52", phase="running", does="gives the child an unbuffered output")
@pytest.mark.fault(
    "FC-91", phase="any", does="keeps first exception and last lines of each attempt"
)
def test_what_every_attempt_printed_is_kept_bounded_and_shown(run: Run) -> None:
    """Supervisors lost what was still in a pipe at the end (circus #557), showed output minutes
    late (Supervisor #803, #1394), closed the channel on a byte that was no text (#638), and kept
    only the useless tail of a job that had failed for another reason (LLMKube #1856)."""
    run.environment["PYTHONUNBUFFERED"] = ""
    run.faults = "trace@2,flood@4,flood@6,noise@7,words@8,crash3@9#1,crash3@9#2"
    supervisor = run.hold(8)  # the words are there, though nobody flushed them
    assert run.wait_for_status(attempt=1)["phase"] == "running"
    wait_until(lambda: log_of(run).read_bytes().endswith(b"words that nobody flushed\n"), "words")
    wait_until(lambda: occupied(log_of(run)) <= allowed(), "a bounded log")
    run.wait_for_status(attempt=1, logs={**NO_LOSS, "dropped_bytes": dropped_of(log_of(run))})
    run.open_gate()
    assert run.end(supervisor) == 0
    for attempt in (1, 2, 3):
        content = log_of(run, attempt).read_bytes()
        assert b"ValueError: the first of all troubles" in content, attempt
        last = ["words that nobody flushed", *(["the saboteur crashes"] if attempt < 3 else [])]
        assert content.endswith("".join(f"{line}\n" for line in last).encode()), attempt
        assert occupied(log_of(run, attempt)) <= allowed(), attempt
        text = shown(run, "-n", "2", "--attempt", str(attempt))
        assert text.endswith(f"{last[-1]}\n")
        assert all(c.isprintable() or c in "\n\t" for c in text)
    messages = [record["message"] for record in run.records("attempt_ended")]
    assert messages[:2] == ["the saboteur crashes"] * 2
    assert len(shown(run, "-n", "5")) < 6 * LINE_CHARACTERS


NO_LOSS: Json = {"lost_lines": 0, "unlogged_attempts": 0}


def dropped_of(path: Path) -> int:
    with path.open("rb") as log:
        kept = sum(stop - start for start, stop in pieces(log.fileno()))
    return path.stat().st_size - kept


@pytest.mark.fault("SV-50", phase="running", does="is not between the child and its log")
def test_a_child_prints_on_when_the_supervisor_is_killed(run: Run) -> None:
    """The pipe broke with the supervisor, and the next line ended the child (pitchfork PR #661)."""
    run.faults = "words@8"
    supervisor = run.hold(5)
    trainer = run.status()["trainer_pid"]
    run.kill_supervisor(supervisor)
    run.open_gate()
    wait_until(lambda: b"nobody flushed" in log_of(run).read_bytes(), "words without a supervisor")
    wait_for_end(trainer)
    assert run.finish() == 0
    assert [record["attempt"] for record in run.records("attempt_started")] == [1]


@pytest.mark.fault("SV-53", phase="any", does="has as many descriptors after many lives as before")
@pytest.mark.parametrize("attempts", [40, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_attempts_and_rotations_leave_no_descriptor(run: Run, attempts: int) -> None:
    """Handles leaked with each rotation and each restart, until none was left (Supervisor #1440,
    #184, #1003), and above number 1023 a select crashed (#26, #489)."""
    run.patch("daemon", "STATUS_INTERVAL_SECONDS", 0.01)
    run.set("trainer", command=["/bin/sh", "-c", "echo dead; exit 3"])
    run.set("logs", keep=5)
    run.set("restart", deaths=attempts, delay_seconds=0.001, maximum_delay_seconds=0.001)
    log = run.directory / contract.SUPERVISOR_LOG_FILE
    supervisor = run.start()
    seen = set()

    def grown() -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(log, 2 * SIZE_BYTES)  # makes a rotation due
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            seen.add(len(os.listdir(f"/proc/{supervisor.pid}/fd")))
        return supervisor.poll() is not None

    wait_until(grown, "its end", looks=3000 * attempts // 40)
    assert run.end(supervisor) == 1
    assert run.file_status()["attempt"] == attempts
    assert max(seen) < 40
    logs = sorted(path.name for path in (run.directory / contract.LOGS).glob("*.log"))
    # The newest, all of them failures, and the first.
    assert len(logs) <= 1 + FAILURES_KEPT + 1
    assert logs[0] == "attempt-0001.log"
    assert log.with_name("supervisor.log.1").exists()


@pytest.mark.fault("SV-54", phase="any", does="trains on without a log, says so, and recovers")
def test_a_log_that_cannot_be_written_stops_no_run(run: Run) -> None:
    """A log file that was missing, unwritable or on a full disk ended the daemon (Supervisor #629,
    #1648, PR #402; dd-agent #2149)."""
    run.faults = "trace@hello"
    logs = log_of(run).parent
    logs.mkdir(parents=True, mode=0o700)
    log_of(run, 1).mkdir()
    supervisor = run.hold(5)
    status = wait_until(lambda: alarmed(run, "goes nowhere"), "an alarm")
    assert status["logs"]["unlogged_attempts"] == 1
    assert run.ask("restart").outcome == "done"
    wait_until(lambda: not run.status()["alarms"], "its end, with the next attempt")
    assert b"the first of all troubles" in log_of(run, 2).read_bytes()
    log_of(run, 1).rmdir()
    log_of(run, 2).unlink()
    logs.rmdir()
    wait_until(lambda: alarmed(run, "deleted or moved away"), "an alarm again")
    assert run.ask("restart").outcome == "done"
    wait_until(lambda: not run.status()["alarms"], "its end again")
    assert b"the first of all troubles" in log_of(run, 3).read_bytes()
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.steps() == list(range(1, 31))
    assert run.file_status()["restarts"] == 0, "nothing died of it"


@pytest.mark.fault("SV-54", phase="any", does="has a trainer that outlives its log's full disk")
def test_our_trainer_says_how_it_ended_though_its_log_takes_no_line(tmp_path: Path) -> None:
    """A full disk must not turn an end with a reason into a crash without one (dd-agent #2149)."""
    (tmp_path / contract.RECEIPTS).mkdir()
    (tmp_path / contract.RUN_FILE).write_text("[run]\nnonsense = 1\n")
    life = {
        contract.ENV_RUN_DIRECTORY: str(tmp_path),
        contract.ENV_ATTEMPT: "1",
        contract.ENV_NONCE: "nonce",
        contract.ENV_EPOCH: "1",
        contract.ENV_RESUME_STEP: "0",
        contract.ENV_LOCK_FD: "0",
        "PYTHONUNBUFFERED": "1",
    }
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [PYTHON, "-m", "trainer", "--run", str(tmp_path)],
            env=os.environ | life,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            timeout=30,
            check=False,
        )
    assert done.returncode == contract.ExitCode.CONFIGURATION
    (receipts,) = (tmp_path / contract.RECEIPTS).iterdir()
    assert b"run.nonsense" in receipts.read_bytes()


def alarmed(run: Run, words: str) -> Json | None:
    status = run.status()
    details = [alarm["detail"] for alarm in status["alarms"] if alarm["name"] == "logs"]
    return status if any(words in detail for detail in details) else None


@pytest.mark.fault("SV-54", phase="any", does="supervises on without its own log, and counts")
def test_the_supervisor_outlives_its_own_log(run: Run) -> None:
    """Deleting the log file of a supervisor ended it (Supervisor #1648)."""
    own = run.directory / contract.SUPERVISOR_LOG_FILE
    run.directory.mkdir(mode=0o700)
    own.symlink_to("/dev/full")
    supervisor = run.hold(5)
    status = wait_until(
        lambda: run.status() if run.status()["logs"]["lost_lines"] else None, "loss"
    )
    assert status["phase"] == "running"
    own.unlink()
    run.open_gate()
    assert run.end(supervisor) == 0
    assert "lines before this one were lost)" in own.read_text()
    assert "lines of supervisor.log lost" in run.supervisor("status", str(run.directory)).stdout


def test_a_signal_has_the_log_begun_anew(run: Run) -> None:
    run.patch("daemon", "STATUS_INTERVAL_SECONDS", 1000.0)  # no look of our own meanwhile
    own = run.directory / contract.SUPERVISOR_LOG_FILE
    supervisor = run.hold(5)
    own.rename(own.with_name("moved"))
    supervisor.send_signal(signal.SIGHUP)
    reply = run.ask("checkpoint", at="now")
    assert reply.outcome == "done", reply.why
    wait_until(own.exists, "a log with the new fact")
    assert "checkpoint at step 5 (operator)" in own.read_text()
    run.open_gate()
    assert run.end(supervisor) == 0


def test_following_goes_on_into_the_next_attempt(run: Run) -> None:
    run.faults = "words@hello#1,trace@hello#2"
    supervisor = run.hold(5)
    output = run.home / "followed"
    with output.open("wb") as stream:
        following = subprocess.Popen(
            run.command("logs", str(run.directory), "-f", "-n", "1"),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=run.variables(),
        )
    try:
        wait_until(lambda: b"nobody flushed" in output.read_bytes(), "the first attempt's words")
        assert run.ask("restart").outcome == "done"
        wait_until(lambda: b"of all troubles" in output.read_bytes(), "the second attempt's words")
    finally:
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == contract.ExitCode.FORCED
    assert b"supervisor: attempt 2 begins\n" in output.read_bytes()
    run.open_gate()
    assert run.end(supervisor) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--attempt", "7"], "no log of attempt 7; there are [1]"),
        (["-n", "-1"], "is not in the range x>=0"),
    ],
)
def test_a_log_that_is_not_there_is_no_crash(run: Run, arguments: list[str], expected: str) -> None:
    log_of(run).parent.mkdir(parents=True)
    log_of(run).write_bytes(b"words\n")
    (run.directory / contract.JOURNAL_FILE).touch()
    done = run.supervisor("logs", str(run.directory), *arguments)
    assert done.returncode == contract.ExitCode.USAGE
    assert expected in done.stderr
    done = run.supervisor("logs", str(run.directory), "--supervisor")
    assert done.returncode == contract.ExitCode.USAGE
    assert "the supervisor writes it anew" in done.stderr
