"""SIGTERM to the supervisor at any moment of its life, and the operator's stop without one.

The moment is a call that changes a file, a socket or a process, of the supervisor or of its
trainer, drawn by its number from the taking of the lock to the end. Whatever it hits, this life
ends on record and with exit code 0, nothing of the run is left running, the wish is what it was,
and the next start brings the run to the end that it would have had.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import checkpoint_kit
import pytest
from runs_kit import Run, kill, wait_for_end, wait_until
from saboteur import PARAMETERS, loss_of
from shim_kit import ARMED, ARMED_AT_LOCK, STEPS, Struck, check

from supervisor import child, cli, client, contract, verify
from supervisor.rundir import RunDirectory, lock_holder

HELD: Final = 6
AFTER: Final = 10
SEED: Final = 5
AT_ONCE: Final = 2

# --- where a stop strikes -------------------------------------------------------------------------


class Stratum(NamedTuple):
    """A stretch of a life, as the calls of one role: about how many there are, and its part of
    twenty draws."""

    name: str
    role: str
    calls: int
    draws: int


# The counts need not be exact: a strike that is not reached strikes nothing, and few may.
STRATA: Final = (
    Stratum("whole life", "supervisor", 180, 5),
    Stratum("whole life", "trainer", 80, 4),
    Stratum("deaths", "supervisor", 200, 2),
    Stratum("backoff", "supervisor", 12, 2),
    Stratum("adoption", "supervisor", 120, 3),
    Stratum("pivot", "supervisor", 170, 2),
    Stratum("pivot", "trainer", 80, 2),
)


class Strike(NamedTuple):
    """What came of one. `phase`: where the supervisor was when it heard of the stop."""

    stratum: Stratum
    number: int
    struck: bool
    phase: str

    def __str__(self) -> str:
        where = f"call {self.number} of the {self.stratum.role}"
        return f"{self.stratum.name}, {where}: {self.phase if self.struck else 'not reached'}"


def live_once(home: Path, shim: Path, stratum: Stratum, number: int) -> tuple[Struck, bool]:
    """A run of which one supervisor's life, now over, was struck at call `number`, and whether that
    was before the run could come to its end: training is held until then. The caller closes it."""
    home.mkdir(parents=True)
    run = Struck(home, shim)
    # Less to write, and the same calls each time.
    run.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        supervisor = live_until_there(run, stratum, number)
        early = bool(run.map["struck"])
        if not early:
            run.open_gate()
        code = run.end(supervisor)
        assert code == 0, (code, run.output())
    except BaseException:
        run.close()
        raise
    return run, early


def live_until_there(run: Struck, stratum: Stratum, number: int) -> subprocess.Popen[str]:
    """A supervisor that was struck, or has ended, or has come to where its training is held."""

    def come_to(there: Callable[[], object]) -> None:
        wait_until(
            lambda: supervisor.poll() is not None or run.map["struck"] or there(),
            "a strike, or an end, or the step where training is held",
        )

    run.gate(HELD)
    match stratum.name:
        case "whole life":
            run.arm(stratum.role, "stop", number, ARMED_AT_LOCK)
            supervisor = run.start()
            come_to(lambda: run.history_step() == HELD)
        case "deaths":
            run.faults = "crash1@load#1,crash1@5#2,crash1@7#3"
            run.arm(stratum.role, "stop", number, ARMED_AT_LOCK)
            supervisor = run.start()
            come_to(lambda: run.history_step() == HELD)
        case "backoff":
            run.faults = "crash1@5#1"
            run.set("restart", delay_seconds=60.0)
            supervisor = run.start()
            run.wait_for_status(phase="backoff", stage="")
            run.arm(stratum.role, "stop", number, ARMED)
            # Each answer is a call, and so is what it writes of itself about once a second.
            come_to(lambda: not answers(run))
        case "adoption":
            run.kill_supervisor(run.hold(HELD))
            run.arm(stratum.role, "stop", number, ARMED_AT_LOCK)
            supervisor = run.start()
            come_to(lambda: run.records("attempt_adopted"))
        case _:
            supervisor = pivot_once(run, stratum.role, number)
    return supervisor


def answers(run: Struck) -> bool:
    try:
        run.status()
    except client.NoSupervisor:
        return False
    return True


def pivot_once(run: Struck, role: str, number: int) -> subprocess.Popen[str]:
    """The supervisor of a run whose pivot is over, or which is over itself."""
    supervisor = run.hold(HELD)
    content = run.proposal()
    run.arm(role, "stop", number, ARMED)
    with run.asked("p1", **content) as reply:

        def over() -> bool:
            return supervisor.poll() is not None or bool(reply.poll(0))

        wait_until(lambda: over() or run.pauses("p1"), "a trainer that knows")
        run.gate(AFTER)
        wait_until(over, "a reply, or no supervisor")
    return supervisor


# --- what must hold -------------------------------------------------------------------------------


def check_stopped(run: Struck, early: bool) -> None:
    """The life that was struck has ended on record, and nothing of it is left."""
    records = run.records()
    started = [n for n, record in enumerate(records) if record["record"] == "supervisor_started"]
    life = records[started[-1] :]
    ended = [record for record in life if record["record"] == "supervisor_ended"]
    assert len(ended) == 1, life
    assert ended[0]["phase"] in (("stopped",) if early else ("stopped", "finished")), ended
    assert ended[0]["reason"], ended
    assert run.durable.wish == "run", "a signal is no wish"
    assert run.durable.open is None, "the attempt has its end on record"
    assert lock_holder(run.directory / contract.LOCK_FILE) is None
    assert child.holders(run.directory / contract.TRAINER_LOCK_FILE, "") == ()
    status = run.file_status()
    assert (status["phase"], status["wish"]) == (ended[0]["phase"], "run")
    check_proven(run)


def check_proven(run: Struck) -> None:
    report = verify.verify(RunDirectory(run.directory, run.name))
    assert report.problems == []


def check_finished(run: Struck) -> None:
    """It is the run that nobody ever stopped."""
    check(run)
    assert [entry.loss for entry in run.entries()] == [loss_of(n + 1) for n in range(STEPS)]
    last = run.directory / contract.CHECKPOINTS / f"{contract.checkpoint_stem(STEPS)}.bin"
    assert last.read_bytes() == checkpoint_kit.binary(STEPS, PARAMETERS)
    check_proven(run)


def phase_of(run: Struck) -> str:
    """Where the last life was when its end began, by its own log."""
    log = (run.directory / contract.SUPERVISOR_LOG_FILE).read_text()
    steps = re.findall(r"^\S+ \S+ (\w+) -> (\w+)", log, re.MULTILINE)
    last, end = steps[-1]
    if last == "stopping":
        return str([before for before, after in steps if after == "stopping"][-1])
    return str(last if end == "stopped" else end)


def strike(home: Path, shim: Path, stratum: Stratum, number: int) -> Strike:
    try:
        run, early = live_once(home, shim, stratum, number)
        with contextlib.closing(run):
            struck, phase = bool(run.map["struck"]), phase_of(run)
            check_stopped(run, early)
            run.heal()
            run.faults = ""
            run.open_gate()
            assert run.finish("--as-recorded") == 0, run.output()
            check_finished(run)
    except AssertionError as error:
        error.add_note(f"{stratum}, call {number}, in {home}")
        raise
    shutil.rmtree(home)
    return Strike(stratum, number, struck, phase)


def strike_everywhere(home: Path, shim: Path, times: int) -> list[Strike]:
    """`times` is by how much more than twenty."""
    chance = random.Random(SEED)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun: list[Future[Strike]] = []
        for stratum in STRATA:
            parts = stratum.draws * times
            for part in range(parts):
                # One from each of equal parts, so that no stretch of a life is left out.
                number = int((part + chance.random()) * stratum.calls / parts)
                place = home / f"{len(begun):04d}"
                begun.append(pool.submit(strike, place, shim, stratum, number))
        failed = [error for future in begun if (error := future.exception()) is not None]
        if failed:
            raise BaseExceptionGroup(f"{len(failed)} strikes of {len(begun)}", failed)
        return [future.result() for future in begun]


def assert_spread(strikes: list[Strike]) -> None:
    print("\n".join(map(str, strikes)))
    told = Counter(strike.phase for strike in strikes if strike.struck)
    assert set(told) >= {"starting", "running", "backoff"}, told
    reached = sum(strike.struck for strike in strikes)
    assert reached >= len(strikes) * 3 / 4, "are there fewer calls than STRATA says?"


@pytest.mark.fault("SV-5", phase="any", does="passes a stop on, and ends when the trainer has")
@pytest.mark.fault("SV-18", phase="starting", does="honours a stop at every moment of a start")
@pytest.mark.fault("FC-74", phase="any", does="ends every stop in a checkpoint or a reason")
@pytest.mark.timeout(600)
def test_a_stop_at_any_moment_is_a_clean_one(shim: Path, tmp_path: Path) -> None:
    """SIGTERM to a launcher was not passed on (foreman #628, honcho PR 32), or was ignored while
    it started, until an init script lost patience and its children were orphans (circus #935), or
    was passed by and nothing was saved (Lightning #20542, #6626)."""
    assert_spread(strike_everywhere(tmp_path, shim, 1))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_stop_at_two_hundred_moments_is_a_clean_one(shim: Path, tmp_path: Path) -> None:
    strikes = strike_everywhere(tmp_path, shim, 10)
    assert_spread(strikes)


# --- the operator's stop, with nobody there to hear it --------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


def orphan(run: Run, step: int) -> int:
    """A trainer held at `step`, also one without a link, whose supervisor was killed; its pid."""
    run.gate(step)
    supervisor = run.start()
    wait_until(lambda: run.history_step() == step, f"step {step}")
    pid: int = run.status()["trainer_pid"]
    run.kill_supervisor(supervisor)
    return pid


def stop(run: Run, *more: str) -> subprocess.CompletedProcess[str]:
    return run.supervisor("stop", str(run.directory), *more)


def assert_stopped(run: Run, cause: str) -> None:
    assert run.records("attempt_ended")[-1]["cause"] == cause
    assert run.records("wished")[-1]["wish"] == "stop"
    assert run.records("supervisor_ended")[-1]["phase"] == "stopped"
    assert run.file_status()["wish"] == "stop"
    assert child.holders(run.directory / contract.TRAINER_LOCK_FILE, "") == ()
    assert run.finish("--as-recorded") == 0
    assert len(run.records("attempt_started")) == 1, "the recorded wish is obeyed"


def assert_goes_on(run: Run) -> None:
    run.faults = ""
    run.environment.clear()
    run.open_gate()
    assert run.finish() == 0
    assert run.steps() == list(range(1, 31))
    assert all(run.proofs())
    assert verify.verify(RunDirectory(run.directory, run.name)).problems == []


def test_a_trainer_that_knows_only_signals_is_stopped_without_a_supervisor(run: Run) -> None:
    run.environment["SABOTEUR_MUTE"] = "1"
    pid = orphan(run, 12)
    stopped = stop(run)
    assert (stopped.returncode, run.checkpoints()) == (0, [10, 12])
    assert "run: stopped at step 12 of 30" in stopped.stdout
    wait_for_end(pid)
    assert_stopped(run, "stopped")
    assert_goes_on(run)


@pytest.mark.fault("SV-9", phase="stopping", does="kills what belongs to the trainer, and only it")
@pytest.mark.fault("SV-28", phase="stopping", does="kills at the limit who hears and does not end")
def test_sv9_a_trainer_that_hangs_is_killed_with_what_it_started(run: Run) -> None:
    """SIGTERM reached the direct child alone (pytorch PR 113231), or its handler returned and the
    process carried on for ever (IsaacLab #6530)."""
    run.faults = "stray@5,deaf@13"
    run.set("stop", grace_seconds=0.5, signal_after_seconds=0.1)
    pid = orphan(run, 12)
    stray = next(
        holder.pid
        for holder in child.holders(run.directory / contract.TRAINER_LOCK_FILE, "")
        if holder.pid != pid
    )
    run.gate(13)
    stopped = stop(run)
    assert stopped.returncode == 0, stopped.stderr
    assert "attempt 1 ended at step 12: killed" in stopped.stderr
    for one in (pid, stray):
        wait_for_end(one)
    assert_stopped(run, "killed")
    assert_goes_on(run)


def test_a_trainer_that_died_alone_is_put_on_record_by_the_stop(run: Run) -> None:
    pid = orphan(run, 12)
    kill(pid)
    wait_for_end(pid)
    assert stop(run).returncode == 0
    assert_stopped(run, "unknown")


def test_a_run_whose_first_moments_were_cut_short_is_stopped_too(run: Run) -> None:
    """run.toml is written from the journal, once that is durable; a kill may come between."""
    pid = orphan(run, 12)
    (run.directory / contract.RUN_FILE).unlink()
    assert stop(run).returncode == 0
    wait_for_end(pid)
    assert_stopped(run, "stopped")


def test_three_stops_at_once_are_one_stop(run: Run) -> None:
    """Each finds no supervisor; one becomes it, and the others ask that one."""
    held = run.home / "hold"
    run.environment["SABOTEUR_HOLD"] = str(held)
    orphan(run, 12)
    held.touch()
    with ThreadPoolExecutor(3) as pool:
        stops = [pool.submit(stop, run) for _ in range(3)]
        log = run.directory / contract.LOGS / "attempt-0001.log"
        wait_until(lambda: "held: saves step 12" in log.read_text(), "a stop that takes its time")
        held.unlink()
        found = [future.result() for future in stops]
    assert [one.returncode for one in found] == [0, 0, 0], [one.stderr for one in found]
    assert len(run.records("attempt_ended")) == 1
    assert_stopped(run, "stopped")


def test_a_stop_that_meets_an_end_is_asked_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A supervisor that is ending for a reason of its own takes no wish any more."""
    run.directory.mkdir()
    (run.directory / contract.JOURNAL_FILE).touch()
    ending = client.Answer("s1", "busy", "the supervisor is ending (stopped)", {})
    done = client.Answer("s1", "done", "", {"phase": "stopped", "step": 12})
    answers = iter([ending, ending, done])
    monkeypatch.setattr(client, "ask", lambda *_, **__: next(answers))
    monkeypatch.setattr("sys.argv", ["supervisor", "stop", str(run.directory)])
    assert cli.main() == 0
    assert capsys.readouterr().out == "stopped; the newest checkpoint is step 12\n"
    answers = iter([ending])
    monkeypatch.setattr("sys.argv", ["supervisor", "stop", str(run.directory), "--timeout", "0"])
    assert cli.main() == 1
    assert "busy: the supervisor is ending" in capsys.readouterr().err


def test_a_stop_that_leaves_somebody_at_work_is_not_done(run: Run, tmp_path: Path) -> None:
    run.patch("attendant", "LIMIT_SECONDS", 0.3)
    supervisor = run.hold(12)
    lock = run.directory / contract.TRAINER_LOCK_FILE
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        stopped = stop(run)
        assert stopped.returncode == 1
        assert f"stuck: processes {stranger.pid} of the dead attempt do not end" in stopped.stderr
        assert run.end(supervisor) == 1
        assert run.file_status()["phase"] == "stuck"
        # Without a supervisor it is the same, and said as plainly.
        stopped = stop(run)
        assert stopped.returncode == 1
        assert f"STUCK: trainer.lock is held by process {stranger.pid}" in stopped.stderr
        stranger.communicate()
    assert stop(run).returncode == 0
    assert run.file_status()["wish"] == "stop"
    outcomes = [reply["outcome"] for reply in run.records("replied") if reply["verb"] == "stop"]
    assert outcomes == ["refused", "refused", "done"]


_STRANGER: Final = """
import fcntl, sys
lock = open(sys.argv[1])
print("open", flush=True)
fcntl.flock(lock, fcntl.LOCK_EX)  # granted by the kernel when the trainer dies
sys.stdin.read()
"""


def test_a_stop_that_nobody_answers_in_time_says_how_to_ask_again(run: Run) -> None:
    held = run.home / "hold"
    run.environment["SABOTEUR_HOLD"] = str(held)
    supervisor = run.hold(12)
    held.touch()
    late = stop(run, "--timeout", "0.2", "--request-id", "s1")
    assert late.returncode == 124
    assert "--request-id s1" in late.stderr
    held.unlink()
    assert run.end(supervisor) == 0
    again = stop(run, "--request-id", "s1")
    assert again.returncode == 0
    assert [reply["outcome"] for reply in run.records("replied") if reply["id"] == "s1"] == ["done"]
