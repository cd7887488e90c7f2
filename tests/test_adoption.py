"""The supervisor dies, the trainer lives on: what happened meanwhile is history like any other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_kit import DEADLINE_SECONDS, Run, kill, wait_for_end, wait_until

from supervisor import contract, events as ev, journal, proc
from supervisor.child import holders
from supervisor.contract import Json
from supervisor.machine import decide
from supervisor.rundir import lock_holder
from supervisor.state import Pending, Rules, State


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


def orphan(run: Run, step: int) -> int:
    """A trainer held at `step` whose supervisor was killed; its pid."""
    supervisor = run.hold(step)
    pid: int = run.status()["trainer_pid"]
    run.kill_supervisor(supervisor)
    return pid


def receipts_reach(run: Run, step: int) -> bool:
    written = (run.directory / contract.RECEIPTS / "attempt-0001.jsonl").read_bytes()
    return b'{"step":%d,' % step in written


def assert_exact(run: Run, steps: int, verified: int) -> None:
    assert run.steps() == list(range(1, steps + 1))
    assert all(run.proofs())
    assert run.file_status()["replay"] == {
        "verified_steps": verified,
        "diverged_steps": 0,
        "first_diverged_step": None,
    }


@pytest.mark.fault("SV-75", phase="adoption", does="records an exit that nobody saw as unknown")
@pytest.mark.fault("SV-79", phase="adoption", does="takes in what was trained while it was dead")
def test_steps_and_checkpoints_of_a_trainer_that_was_alone_are_not_lost(run: Run) -> None:
    """Neither success nor failure may be invented for it (pitchfork PR 657)."""
    pid = orphan(run, 8)
    run.gate(25)
    wait_until(lambda: receipts_reach(run, 25), "receipts up to step 25")
    assert run.history_step() < 25
    kill(pid)
    wait_for_end(pid)
    run.open_gate()
    assert run.finish() == 0
    # From the checkpoint that was published while nobody looked: five steps are executed again.
    assert_exact(run, 30, verified=5)
    assert [r["resume_step"] for r in run.records("attempt_started")] == [0, 20]
    (unseen, _) = run.records("attempt_ended")
    assert (unseen["cause"], unseen["code"], unseen["signal"]) == ("unknown", None, None)


@pytest.mark.fault(
    "SV-3", phase="adoption", does="takes the living trainer over instead of killing it"
)
def test_a_start_adopts_the_trainer_that_lives(run: Run) -> None:
    pid = orphan(run, 8)
    run.gate(14)
    supervisor = run.start()
    status = run.wait_for_status(phase="running", step=14)
    assert (status["trainer_pid"], status["attempt"], status["restarts"]) == (pid, 1, 0)
    (adopted,) = run.records("attempt_adopted")
    assert (adopted["attempt"], adopted["pid"]) == (1, pid)
    answer = run.ask("checkpoint", at="now")
    assert (answer.outcome, answer.result["step"]) == ("done", 14)
    assert run.status()["checkpoint"]["step"] == 14
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30, verified=0)
    # Only a parent can wait for a status: its own exit line tells, and a kernel that is new enough.
    (ended,) = run.records("attempt_ended")
    assert ended["cause"] == "finished"
    assert ended["code"] in (0, None)
    assert {r["step"] for r in run.records("checkpoint_committed")} == {10, 14, 20, 30}


def test_a_checkpoint_of_the_time_alone_is_bound_to_the_entry_of_its_step(run: Run) -> None:
    """It is found at the first look, and verified before its receipts are read: of days alone there
    are many."""
    run.set("training", steps=2000)
    run.set("checkpoint", every=500)
    orphan(run, 8)
    run.gate(1900)
    wait_until(lambda: receipts_reach(run, 1900), "receipts up to step 1900")
    run.patch("recorder", "PUMP_BYTES", 20)
    supervisor = run.start()
    run.wait_for_status(phase="running", step=1900)
    run.open_gate()
    assert run.end(supervisor) == 0
    committed = run.records("checkpoint_committed")
    bound = {one["step"]: one["ledger_entries"] for one in committed}
    assert bound == {step: step for step in (500, 1000, 1500, 2000)}


@pytest.mark.parametrize(("reason", "answered"), [("cadence", False), ("sigusr1", True)])
def test_a_checkpoint_of_before_is_no_answer_to_a_request(reason: str, answered: bool) -> None:
    # It went out as a signal; the first that is heard of the trainer is what it did while alone.
    waiting = Pending("r", "now", operator=True, sent_at=1.0)
    state = State(phase="running", checkpoints=(waiting,))
    content: Json = {"step": 10, "digest": "d", "reason": reason, "requests": []}
    state, effects = decide(Rules(), state, ev.Heard(2.0, "saved", content))
    replies = [effect for effect in effects if isinstance(effect, ev.Reply)]
    assert [reply.id for reply in replies] == (["r"] if answered else [])
    assert (state.checkpoints == ()) == answered


def test_sigusr1_works_again_in_the_next_life(run: Run) -> None:
    supervisor = run.hold(8)
    supervisor.send_signal(signal.SIGUSR1)
    run.wait_for_record("checkpoint_committed", step=8)
    run.kill_supervisor(supervisor)
    run.gate(14)
    supervisor = run.start()
    run.wait_for_status(phase="running", step=14)
    supervisor.send_signal(signal.SIGUSR1)
    run.wait_for_record("checkpoint_committed", step=14)
    assert run.ask("stop").outcome == "done"
    assert run.end(supervisor) == 0


@pytest.mark.fault(
    "SV-12", phase="adoption", does="dies and comes back, and the trainer never notices"
)
def test_a_supervisor_that_is_killed_again_and_again_loses_nothing(run: Run) -> None:
    pid = orphan(run, 3)
    for step in (7, 11, 19):
        run.gate(step)
        supervisor = run.start()
        status = run.wait_for_status(phase="running", step=step)
        assert status["trainer_pid"] == pid
        run.kill_supervisor(supervisor)
    run.open_gate()
    assert run.finish() == 0
    assert_exact(run, 30, verified=0)
    assert run.file_status()["attempt"] == 1
    assert len(run.records("supervisor_started")) == 5


@pytest.mark.fault(
    "SV-75", phase="adoption", does="believes the exit record that the trainer wrote itself"
)
def test_a_trainer_that_finished_alone_is_deduced(run: Run) -> None:
    pid = orphan(run, 8)
    run.open_gate()
    wait_for_end(pid)
    assert run.finish() == 0
    assert "run: finished at step 30 of 30" in run.output()
    assert_exact(run, 30, verified=0)
    assert run.file_status()["attempt"] == 1
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["step"]) == ("finished", 30)
    assert run.file_status()["deaths_without_progress"] == 0
    # Every checkpoint that it made is on record, though nobody heard of it.
    assert {r["step"] for r in run.records("checkpoint_committed")} == {10, 20, 30}
    assert {r["step"] for r in run.records("checkpoint_verified")} == {10, 20, 30}


@pytest.mark.fault(
    "FC-77", phase="adoption", does="shows the run as dead at once; the next start records a cause"
)
@pytest.mark.fault("FC-77", phase="idle", does="ends every run in a cause, at the next start")
def test_fc77_a_run_whose_supervisor_died_is_dead_for_readers_and_ends_in_a_cause(run: Run) -> None:
    """The child of a stopped container was dead within a second, and the run was marked running
    for ever (unslothai/unsloth PR 11044)."""
    pid = orphan(run, 8)
    found = run.supervisor("status", str(run.directory), "--json")
    status = json.loads(found.stdout)
    assert (found.returncode, status["supervisor_pid"], status["trainer_pid"]) == (1, None, pid)
    assert "the trainer trains on without it" in status["reason"]
    kill(pid)
    wait_for_end(pid)
    found = run.supervisor("status", str(run.directory))
    assert found.returncode == 1
    assert "and so is the trainer" in found.stdout
    run.open_gate()
    assert run.finish() == 0
    assert run.records("attempt_ended")[0]["cause"] == "unknown"


def test_a_stop_without_a_supervisor_takes_over_and_stops(run: Run) -> None:
    pid = orphan(run, 12)
    stopped = run.supervisor("stop", str(run.directory))
    assert stopped.returncode == 0
    assert "run: stopped at step 12 of 30" in stopped.stdout
    wait_for_end(pid)
    assert lock_holder(run.directory / contract.TRAINER_LOCK_FILE) is None
    status = run.file_status()
    assert (status["phase"], status["wish"]) == ("stopped", "stop")
    assert run.checkpoints() == [10, 12]
    # The wish is on record: a service manager leaves the run alone, an operator does not.
    assert run.finish("--as-recorded") == 0
    assert run.file_status()["attempt"] == 1
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    run.open_gate()
    assert run.finish() == 0
    assert_exact(run, 30, verified=0)


@pytest.mark.fault(
    "SV-11", phase="starting", does="names a stranger that holds the lock, and signals nobody"
)
@pytest.mark.fault(
    "FC-79", phase="starting", does="never signals a process that is not proven to be its own"
)
@pytest.mark.fault("FC-79", phase="idle", does="names a stranger with the lock and lets it be")
def test_fc79_a_stranger_with_the_lock_is_named_and_left_alone(run: Run) -> None:
    """Killing a tree by its names reached processes that had nothing to do with it
    (NVIDIA/TensorRT-LLM PR 16404)."""
    run.directory.mkdir()
    decoy = subprocess.Popen(
        [sys.executable, "-c", _DECOY, str(run.directory / contract.TRAINER_LOCK_FILE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with decoy:
        assert decoy.stdin is not None
        assert decoy.stdout is not None
        decoy.stdout.readline()
        assert run.finish() == 1
        status = run.file_status()
        assert status["phase"] == "stuck"
        assert f"held by process {decoy.pid}" in status["reason"]
        stopped = run.supervisor("stop", str(run.directory))
        assert stopped.returncode == 1
        assert decoy.poll() is None
        decoy.stdin.close()
        # It was never signalled: it ends in its own way.
        assert decoy.wait(DEADLINE_SECONDS) == 17
    assert run.finish() == 0
    assert_exact(run, 30, verified=0)


_DECOY = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
sys.exit(17)
"""


@pytest.mark.fault(
    "FC-78", phase="adoption", does="finds what a dead trainer left behind, and ends it"
)
@pytest.mark.fault("FC-78", phase="adoption", does="adopts the living and ends what is left over")
def test_fc78_what_a_dead_trainer_left_behind_is_ended_and_not_adopted(run: Run) -> None:
    """Children outlived their parent and kept the device (pytorch/pytorch #1223, #5736,
    Lightning-AI/pytorch-lightning #15008)."""
    run.faults = "stray@5"
    pid = orphan(run, 8)
    kill(pid)
    wait_for_end(pid)
    (stray,) = holders(run.directory / contract.TRAINER_LOCK_FILE, "")
    run.faults = ""
    run.open_gate()
    assert run.finish() == 0
    wait_for_end(stray.pid)
    assert run.records("attempt_adopted") == []
    assert_exact(run, 30, verified=8)


@pytest.mark.fault(
    "SV-56", phase="running", does="refuses a second supervisor, and names the first"
)
@pytest.mark.fault(
    "FC-81", phase="running", does="refuses a second supervisor on the same directory"
)
def test_two_supervisors_never_share_a_run(run: Run) -> None:
    supervisor = run.hold(8)
    assert run.start().wait(DEADLINE_SECONDS) == 2
    assert (
        f"already supervised by process {supervisor.pid} on {os.uname().nodename}" in run.output()
    )
    assert run.status()["supervisor_pid"] == supervisor.pid
    run.open_gate()
    assert run.end(supervisor) == 0


# --- trainers of every kind -----------------------------------------------------------------------


@pytest.mark.fault("SV-12", phase="adoption", does="takes over without disturbing a step")
@pytest.mark.fault("SV-15", phase="adoption", does="lets no trainer ask who its parent is")
def test_a_trainer_that_knows_only_signals_is_adopted(run: Run) -> None:
    """A restart of the manager interrupted a fine-tuning run each time (PortOS #1319); a child that
    looked for a parent of 1 ended itself, or never did (ipykernel #517)."""
    run.environment["SABOTEUR_MUTE"] = "1"
    run.gate(8)
    supervisor = run.start()
    run.wait_for_status(phase="running", step=8)
    pid = run.status()["trainer_pid"]
    run.kill_supervisor(supervisor)
    run.gate(14)
    wait_until(lambda: receipts_reach(run, 14), "receipts up to step 14")
    supervisor = run.start()
    status = run.wait_for_status(phase="running", step=14)
    assert (status["trainer_pid"], status["attempt"]) == (pid, 1)
    # What it saved while it was alone is on record, and it is heard by its files alone.
    run.wait_for_record("checkpoint_committed", step=10)
    assert run.ask("checkpoint", at="now").result["step"] == 14
    assert run.ask("stop").outcome == "done"
    assert run.end(supervisor) == 0
    assert run.checkpoints() == [10, 14]
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["step"]) == ("stopped", 14)


@pytest.mark.fault("SV-16", phase="adoption", does="needs no word of a trainer in native code")
@pytest.mark.fault("SV-3", phase="adoption", does="adopts what a killed supervisor has left")
def test_a_trainer_that_hangs_in_native_code_is_adopted_and_ended(run: Run) -> None:
    """KILL of the daemon left its programs running (Supervisor #168); a watcher in Python cannot
    run while native code holds the interpreter (TensorRT-LLM PR 18030). Here nothing in the trainer
    has to run: the next life finds it, asks it, and kills it."""
    run.faults = "native@9"
    run.set("stop", grace_seconds=0.5, signal_after_seconds=0.1)
    pid = orphan(run, 8)
    run.open_gate()
    log = run.directory / contract.LOGS / "attempt-0001.log"
    wait_until(lambda: "the saboteur hangs" in log.read_text(), "a trainer that hangs")
    supervisor = run.start()
    status = run.wait_for_status(phase="running", supervisor_pid=supervisor.pid)
    assert status["trainer_pid"] == pid
    assert run.ask("stop").outcome == "done"
    assert run.end(supervisor) == 0
    (ended,) = run.records("attempt_ended")
    assert ended["cause"] == "killed"
    assert ended["signal"] in (signal.SIGKILL, None)  # as the kernel can tell


def test_a_trainer_that_was_still_loading_has_a_deadline_as_any_other(run: Run) -> None:
    """Adopted, it would otherwise load for ever."""
    run.faults = "deaf@load#1"
    supervisor = run.start()
    wait_until(lambda: run.records("attempt_spawned"), "a trainer")
    run.kill_supervisor(supervisor)
    run.set("hang", start_seconds=2.0, evidence_seconds=0.1)
    run.set("stop", grace_seconds=0.2, signal_after_seconds=0.1)
    assert run.finish() == 0
    assert len(run.records("attempt_adopted")) == 1
    first, _ = run.records("attempt_ended")
    assert first["cause"] == "hang"
    assert first["message"].startswith("no hello within 2 s")
    assert_exact(run, 30, verified=0)


@pytest.mark.fault("SV-36", phase="adoption", does="sees a death at once, whoever the parent is")
def test_an_adopted_trainer_that_dies_is_restarted_at_once(run: Run) -> None:
    """A death went unnoticed until a timeout of half an hour (papermill #125, jupyter_client #7,
    TensorRT-LLM PR 17578)."""
    pid = orphan(run, 12)
    supervisor = run.start()
    run.wait_for_status(phase="running", supervisor_pid=supervisor.pid)
    kill(pid)
    run.wait_for_status(phase="running", attempt=2)
    first = run.records("attempt_ended")[0]
    known = (first["cause"], first["code"], first["signal"])
    assert known in (("signal", None, signal.SIGKILL), ("unknown", None, None))
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30, verified=2)


@pytest.mark.fault("SV-71", phase="adoption", does="signals nobody for a number on record alone")
@pytest.mark.fault("SV-72", phase="adoption", does="checks identity behind an open descriptor")
@pytest.mark.parametrize("other", ["start", "boot", "nothing"])
def test_a_number_on_record_that_somebody_else_has_now_is_not_signalled(
    run: Run, other: str
) -> None:
    """A bare pid was trusted, and a stop hit an unrelated program (pitchfork PR 878, PR 632). Even
    where every field of the record fits: it holds no lock of ours and carries no nonce."""
    pid = orphan(run, 8)
    kill(pid)
    wait_for_end(pid)
    waits = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(waits, start_new_session=True) as stranger:
        ticks, boot = proc.start_ticks(stranger.pid), proc.boot_id()
        assert ticks is not None
        record = ev.AttemptSpawned(
            1, stranger.pid, ticks - (other == "start"), "then" if other == "boot" else boot
        )
        opened, _ = journal.Journal.open(run.directory / contract.JOURNAL_FILE)
        opened.append([ev.record_to_json(record)], 0.0)
        opened.sync()
        opened.close()
        run.open_gate()
        assert run.finish() == 0
        assert stranger.poll() is None
        stranger.kill()
    assert run.records("attempt_adopted") == []
    assert_exact(run, 30, verified=8)


def test_a_newer_supervisor_takes_over_a_trainer_of_an_older_one(run: Run) -> None:
    pid = orphan(run, 8)
    run.patch("contract", "CONTRACT_VERSION", 2)
    supervisor = run.start()
    run.gate(14)
    wait_until(lambda: run.file_status().get("step") == 14, "a status")
    wait_until(lambda: run.file_status().get("trainer_phase"), "a link")
    done = run.supervisor("checkpoint", str(run.directory))
    assert done.returncode == 0, done.stderr
    assert run.file_status()["trainer_pid"] == pid
    # By the link and with its name, not as a signal that has none.
    saved = run.records("checkpoint_committed")[-1]
    assert (saved["step"], saved["reason"], len(saved["requests"])) == (14, "operator", 1)
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30, verified=0)


def test_requests_that_the_dead_supervisor_had_taken_are_carried_out_once(run: Run) -> None:
    supervisor = run.hold(8)
    assert run.ask("checkpoint", at="now", id="before").result["step"] == 8
    run.kill_supervisor(supervisor)
    run.gate(12)
    supervisor = run.start()
    run.wait_for_status(phase="running", step=12)
    # Answered before: the same words again. New: a new checkpoint.
    assert run.ask("checkpoint", at="now", id="before").result["step"] == 8
    assert run.ask("checkpoint", at="now", id="after").result["step"] == 12
    assert run.checkpoints() == [8, 10, 12]
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30, verified=0)
