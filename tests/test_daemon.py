"""The supervisor as a process, from a start to every kind of end, and a trainer that misbehaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tomli_w
import zmq
from ledger_kit import holds
from runs_kit import DEADLINE_SECONDS, Run, kill, wait_for_end, wait_until

from supervisor import client, contract, ledger, start
from supervisor.contract import Json
from supervisor.rundir import lock_holder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


# --- a run that nothing happens to ----------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path_factory.mktemp("finished"))) as made:
        made.set("training", steps=45)
        made.set("checkpoint", every=10, keep_last=2, keep_every=20)
        assert made.finish() == 0
        yield made


def test_the_ledger_has_every_step_once_and_any_json_reader_reads_it(finished: Run) -> None:
    rows = finished.rows()
    assert [row["step"] for row in rows] == list(range(1, 46))
    assert {(row["attempt"], row["epoch"], row["arm"]) for row in rows} == {(1, 1, "prose")}


def test_the_journal_tells_the_run_in_order(finished: Run) -> None:
    kinds = [record["record"] for record in finished.records()]
    milestones = [
        "supervisor_started",
        "run_created",
        "wished",
        "attempt_started",
        "attempt_spawned",
        "checkpoint_committed",
        "attempt_ended",
        "run_finished",
        "supervisor_ended",
    ]
    assert [kind for kind in dict.fromkeys(kinds) if kind in milestones] == milestones
    (ended,) = finished.records("attempt_ended")
    assert (ended["cause"], ended["code"], ended["step"], ended["counted"]) == (
        "finished",
        0,
        45,
        False,
    )


STATUS_FIELDS = {
    *("run", "directory", "phase", "wish", "step", "target_step", "attempt", "restarts", "epoch"),
    *("loss", "loss_ema", "steps_per_second", "checkpoint", "supervisor_pid", "trainer_pid"),
    *("replay", "last_exit", "alarms", "reason", "schema_version"),
}


def test_the_status_has_all_that_others_rely_on(finished: Run) -> None:
    status = json.loads(finished.supervisor("status", str(finished.directory), "--json").stdout)
    assert status.keys() >= STATUS_FIELDS
    checkpoint = status["checkpoint"]
    assert checkpoint.keys() == {"step", "path", "age_seconds", "verified"}
    assert (checkpoint["step"], checkpoint["verified"]) == (45, True)
    assert Path(checkpoint["path"]).is_file()
    assert checkpoint["age_seconds"] >= 0
    assert status["replay"] == {
        "verified_steps": 0,
        "diverged_steps": 0,
        "first_diverged_step": None,
    }
    last = {"cause": "finished", "code": 0, "signal": None, "message": None}
    assert status["last_exit"] == last
    assert (status["phase"], status["wish"], status["step"]) == ("finished", "run", 45)
    assert (status["supervisor_pid"], status["trainer_pid"]) == (None, None)
    assert (status["alarms"], status["restarts"]) == ([], 0)


def test_every_checkpoint_is_bound_to_the_history_before_it(finished: Run) -> None:
    committed = finished.records("checkpoint_committed")
    assert [(r["step"], r["ledger_entries"]) for r in committed] == [
        (step, step) for step in (10, 20, 30, 40, 45)
    ]
    assert finished.proofs() == [True] * 5
    assert {r["step"] for r in finished.records("checkpoint_verified")} == {10, 20, 30, 40, 45}


def test_a_checkpoint_is_bound_also_when_the_history_is_far_behind(run: Run) -> None:
    # A supervisor that takes in a few lines at a time, as one does that was away for a day.
    run.patch("recorder", "PUMP_BYTES", 500)
    run.set("training", steps=600)
    run.set("checkpoint", every=500)
    assert run.finish() == 0
    bound = [r["ledger_entries"] for r in run.records("checkpoint_committed")]
    assert bound == [500, 600]
    assert_exact(run, 600)


def test_a_binding_finds_a_changed_entry(finished: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(finished.ledger_path.read_bytes().replace(b'"step":7,', b'"step":8,'))
    (bound, *_) = finished.records("checkpoint_committed")
    assert not holds(copy, bound["ledger_entries"], bound["ledger_sha256"])


def test_retention_keeps_the_last_and_the_milestones(finished: Run) -> None:
    assert finished.checkpoints() == [20, 40, 45]
    removed = [step for r in finished.records("checkpoints_removed") for step in r["steps"]]
    assert sorted(removed) == [10, 30]


def test_the_sidecars_are_there(finished: Run) -> None:
    directory = finished.directory
    state = json.loads((directory / contract.state_name("run")).read_bytes())
    assert (state["step"], state["epoch"], state["targets_seen"]) == (45, 1, 450)
    samples = json.loads((directory / contract.samples_name("run")).read_bytes())
    assert [row["step"] for row in samples] == [10, 20, 30, 40, 45]
    assert samples[-1]["text"] == "step 45"
    training = json.loads((directory / contract.TRAINING_FILE).read_bytes())
    assert training == {"attempt-0001": {"saboteur": True}}
    assert [r["step"] for r in finished.records("evaluated")] == [10, 20, 30, 40, 45]


def test_nothing_is_left_that_belongs_to_a_living_run(finished: Run) -> None:
    directory = finished.directory
    assert list((directory / contract.RECEIPTS).iterdir()) == []
    assert list((directory / contract.SOCKETS).iterdir()) == []
    assert [p.name for p in directory.rglob(f"{contract.TEMPORARY_PREFIX}*")] == []
    assert lock_holder(directory / contract.LOCK_FILE) is None
    assert lock_holder(directory / contract.TRAINER_LOCK_FILE) is None


def test_the_end_says_where_it_stands_and_how_to_go_on(finished: Run) -> None:
    output = finished.output()
    assert f"run: finished at step 45 of 45, in {finished.directory}" in output
    assert "step 45 | The step 45" in output
    assert "--set training.steps=90" in output


def test_the_end_waits_only_for_what_is_under_way(run: Run) -> None:
    run.patch("daemon", "SETTLE_SECONDS", 1e9)
    assert run.finish() == 0
    assert run.file_status()["checkpoint"]["verified"] is True


# --- kills ----------------------------------------------------------------------------------------


def assert_exact(run: Run, steps: int) -> None:
    run.assert_exact(steps)
    assert run.file_status()["alarms"] == []


STAGES = ("json", "bin", "link json", "link bin", "unlink")


@pytest.mark.fault(
    "SV-36", phase="loading", does="sees the death of a trainer that loads at once, and tries again"
)
@pytest.mark.fault(
    "SV-79",
    phase="saving",
    does="has each step once after nine deaths, and proves the repeated ones",
)
def test_kills_at_every_stage_of_a_publication_and_of_a_start_cost_nothing(run: Run) -> None:
    torn = [f"torn:{stage}@10#{attempt}" for attempt, stage in enumerate(STAGES, start=1)]
    run.faults = ",".join([*torn, "kill@load#6", "kill@hello#7", "segv@15#8", "kill@exit#9"])
    run.set("restart", deaths=20)
    assert run.finish() == 0
    assert_exact(run, 30)
    status = run.file_status()
    assert (status["attempt"], status["restarts"]) == (9, 9)
    # Four attempts went from 0 to 10 again, and the ninth from 10 to where the eighth had died.
    assert status["replay"]["verified_steps"] == 4 * 10 + 4
    ends = run.records("attempt_ended")
    assert [end["signal"] for end in ends] == [9, 9, 9, 9, 9, 9, 9, 11, 9]
    assert [end["step"] for end in ends] == [10] * 7 + [14, 30]
    # The kill came after the last checkpoint: finished is deduced from it, without a spawn.
    assert (status["phase"], status["last_exit"]["cause"]) == ("finished", "signal")
    assert [p.name for p in run.directory.rglob(f"{contract.TEMPORARY_PREFIX}*")] == []


def test_a_kill_after_the_exit_line_is_a_death_of_a_finished_run(run: Run) -> None:
    run.faults = "kill@gone"
    assert run.finish() == 0
    assert_exact(run, 30)
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["signal"]) == ("signal", 9)
    assert run.file_status()["phase"] == "finished"


@pytest.mark.fault(
    "SV-79", phase="running", does="appends a step that differs, reports it, and rewrites nothing"
)
def test_a_step_that_comes_out_different_is_reported_and_recorded(run: Run) -> None:
    run.faults = "kill@16#1,wrong@13#2"
    assert run.finish() == 0
    status = run.file_status()
    assert status["replay"] == {
        "verified_steps": 2,
        "diverged_steps": 1,
        "first_diverged_step": 13,
    }
    (diverged,) = run.records("replay_diverged")
    assert (diverged["step"], diverged["attempt"], diverged["fields"]) == (13, 2, ["loss"])
    assert diverged["earlier"]["loss"] != diverged["later"]["loss"]
    assert [alarm["name"] for alarm in status["alarms"]] == ["replay_diverged"]
    assert "step 13" in status["alarms"][0]["detail"]
    # Nothing is rewritten: the new branch follows the old one and supersedes it.
    assert run.steps() == [*range(1, 16), *range(13, 31)]
    entries, _ = ledger.read_entries(run.ledger_path)
    assert [e.step for e in ledger.canonical(entries)] == list(range(1, 31))


@pytest.mark.fault(
    "SV-79", phase="starting", does="never changes a byte of what was recorded before a restart"
)
def test_fc93_the_history_before_a_restart_is_a_prefix_of_the_history_after(run: Run) -> None:
    """A logger that opened the metrics file of a resumed run deleted it first
    (roboflow/rf-detr #1321, Lightning-AI/pytorch-lightning #17886)."""
    supervisor = run.hold(14)
    wait_until(lambda: run.history_step() == 14, "fourteen entries")
    pid = run.status()["trainer_pid"]
    run.kill_supervisor(supervisor)
    kill(pid)
    wait_for_end(pid)
    before = run.ledger_path.read_bytes().removesuffix(b"\n]\n")
    assert b'"step":14' in before
    run.open_gate()
    assert run.finish() == 0
    assert run.ledger_path.read_bytes().startswith(before)
    assert_exact(run, 30)


@pytest.mark.fault(
    "SV-51", phase="running", does="has the last line that an attempt printed before it died"
)
@pytest.mark.fault(
    "FC-91", phase="running", does="keeps the log and the last words of every attempt"
)
def test_fc98_the_log_of_an_attempt_is_never_opened_again(run: Run) -> None:
    """A resumed run wrote over the console output of the run before it (wandb/wandb PR 12379)."""
    run.faults = "crash3@12#1,crash4@22#2"
    assert run.finish() == 0
    logs = run.directory / contract.LOGS
    assert [p.name for p in sorted(logs.iterdir())] == [
        "attempt-0001.log",
        "attempt-0002.log",
        "attempt-0003.log",
    ]
    assert (logs / "attempt-0001.log").read_text() == "the saboteur crashes\n"
    assert (logs / "attempt-0002.log").read_text() == "the saboteur crashes\n"
    ends = run.records("attempt_ended")
    assert [(e["cause"], e["code"], e["message"]) for e in ends[:2]] == [
        ("crash", 3, "the saboteur crashes"),
        ("crash", 4, "the saboteur crashes"),
    ]


@pytest.mark.fault(
    "SV-6", phase="backoff", does="ends what a killed trainer left behind, before the next attempt"
)
def test_a_process_that_the_trainer_left_behind_ends_before_the_next_attempt(run: Run) -> None:
    run.faults = "stray@5#1,kill@6#1"
    assert run.finish() == 0
    assert_exact(run, 30)
    assert run.file_status()["restarts"] == 1


def test_receipts_with_a_gap_end_the_attempt_and_not_the_run(run: Run) -> None:
    run.faults = "gap@15#1,deaf@17#1"
    assert run.finish() == 0
    assert run.steps() == list(range(1, 31))
    (alarm,) = run.records("alarmed")
    assert alarm["name"] == "contract_broken"
    assert "step 16, expected 15" in alarm["detail"]
    (ended, _) = run.records("attempt_ended")
    assert (ended["cause"], ended["step"]) == ("killed", 14)


def test_damaged_sidecars_keep_no_run_from_going_on(run: Run) -> None:
    supervisor = run.hold(15)
    assert run.ask("stop").outcome == "done"
    assert run.end(supervisor) == 0
    files = [run.directory / name("run") for name in (contract.samples_name, contract.state_name)]
    for path in files:
        path.write_bytes(path.read_bytes()[:-9])
    supervisor = run.hold(25)
    (alarm,) = run.status()["alarms"]
    assert alarm["name"] == "sidecars"
    for path in files:
        assert f"{path.name}: not JSON" in alarm["detail"]
        assert f"it is {path.name}.damaged now" in alarm["detail"]
    assert run.ask("stop", "s2").outcome == "done"
    assert run.end(supervisor) == 0
    run.open_gate()
    assert run.finish() == 0
    assert run.file_status()["alarms"] == []
    assert_exact(run, 30)


def test_old_receipts_that_stay_are_on_record_at_the_very_end(run: Run) -> None:
    supervisor = run.hold(15)
    stubborn = run.directory / contract.RECEIPTS / f"{contract.attempt_stem(0)}.jsonl"
    stubborn.mkdir()  # what unlink refuses, to whomever
    assert run.ask("stop").outcome == "done"
    assert run.end(supervisor) == 0
    (alarm,) = run.records("alarmed")
    assert alarm["name"] == "receipts"
    assert str(stubborn.name) in alarm["detail"]
    assert run.file_status()["alarms"] == [{"name": "receipts", "detail": alarm["detail"]}]
    stubborn.rmdir()
    run.open_gate()
    assert run.finish() == 0
    assert [one["name"] for one in run.records("alarm_cleared")] == ["receipts"]
    assert run.file_status()["alarms"] == []
    assert_exact(run, 30)


# --- what the trainer says of its own end ---------------------------------------------------------


@pytest.mark.fault(
    "SV-40", phase="running", does="does not try again what its exit code calls permanent"
)
@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        (65, "data", "the data, the tokenizer or the checkpoint does not match the run"),
        (78, "configuration", "the trainer refused its configuration"),
        (80, "non-finite", "the loss or a gradient is not finite"),
    ],
)
def test_a_permanent_end_is_not_tried_again(run: Run, code: int, cause: str, words: str) -> None:
    run.faults = f"exit{code}@15"
    assert run.finish() == 1
    status = run.file_status()
    assert (status["phase"], status["attempt"]) == ("failed", 1)
    assert (status["last_exit"]["cause"], status["last_exit"]["code"]) == (cause, code)
    assert words in status["reason"]
    assert f"the saboteur leaves with {code}" in status["reason"]
    assert f"FAILED: {words}" in run.output()


@pytest.mark.fault(
    "FC-89", phase="running", does="trains on after preemptions, with nothing charged"
)
def test_try_again_is_done_and_not_charged(run: Run) -> None:
    run.faults = "exit75@12#1,exit75@12#2,exit75@12#3"
    run.set("restart", deaths=1)
    assert run.finish() == 0
    assert_exact(run, 30)
    assert [e["counted"] for e in run.records("attempt_ended")] == [False] * 4


@pytest.mark.fault(
    "SV-37", phase="running", does="ends in failed after so many deaths without a new checkpoint"
)
@pytest.mark.fault("SV-39", phase="idle", does="begins anew when the operator starts a failed run")
@pytest.mark.fault(
    "FC-90", phase="running", does="gives up after so many deaths without a new checkpoint"
)
def test_fc90_deaths_without_progress_end_in_failed_and_a_start_begins_anew(run: Run) -> None:
    """A give-up counter that every successful respawn reset never gave up
    (bobmatnyc/trusty-tools #3631)."""
    run.faults = "crash3@5"
    run.set("restart", deaths=3)
    assert run.finish() == 1
    status = run.file_status()
    assert (status["phase"], status["attempt"], status["deaths_without_progress"]) == (
        "failed",
        3,
        3,
    )
    assert "3 deaths without a new checkpoint" in status["reason"]
    assert "the saboteur crashes" in status["reason"]
    run.faults = ""
    assert run.finish() == 0
    assert_exact(run, 30)


@pytest.mark.fault(
    "SV-42", phase="running", does="survives more deaths than the budget, each after a checkpoint"
)
def test_a_new_checkpoint_refills_the_budget(run: Run) -> None:
    run.faults = "kill@12#1,kill@22#2,kill@28#3"
    run.set("restart", deaths=3)
    run.set("checkpoint", every=5)
    assert run.finish() == 0
    assert run.file_status()["restarts"] == 3


@pytest.mark.fault("SV-40", phase="starting", does="names the program that cannot be started")
def test_a_command_that_does_not_exist_says_so(run: Run) -> None:
    run.set("trainer", command=["/no/such/program"])
    run.set("restart", deaths=2)
    assert run.finish() == 1
    assert "/no/such/program" in run.file_status()["reason"]


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.fault(
    "SV-22", phase="running", does="answers with step and path when the checkpoint is committed"
)
def test_a_checkpoint_is_answered_with_step_and_path_once_it_is_committed(run: Run) -> None:
    supervisor = run.hold(12)
    answer = run.ask("checkpoint", at="now")
    path = run.directory / "checkpoints" / "step_000012.bin"
    assert (answer.outcome, answer.result) == ("done", {"step": 12, "path": str(path)})
    assert path.is_file()
    (record,) = run.records("checkpoint_committed")[1:]
    assert (record["step"], record["reason"], record["requests"]) == (12, "operator", [answer.id])
    # A request for the next boundary waits for it.
    reply: list[client.Answer] = []
    asking = threading.Thread(target=lambda: reply.append(run.ask("checkpoint", at="boundary")))
    asking.start()
    run.ask("status")
    run.gate(19)
    run.wait_for_status(step=19)
    assert reply == []
    run.open_gate()
    asking.join(DEADLINE_SECONDS)
    assert reply[0].outcome == "done"
    assert reply[0].result["step"] in (20, 30)
    assert run.end(supervisor) == 0
    assert_exact(run, 30)


@pytest.mark.fault(
    "SV-1", phase="stopping", does="ends after its trainer, when nobody holds the lock any more"
)
@pytest.mark.fault(
    "SV-21", phase="stopping", does="waits for the trainer's own end before it answers and leaves"
)
def test_a_stop_is_answered_when_all_is_over_and_a_start_goes_on(run: Run) -> None:
    supervisor = run.hold(12)
    trainer = run.status()["trainer_pid"]
    answer = run.ask("stop")
    assert lock_holder(run.directory / contract.TRAINER_LOCK_FILE) is None
    assert not Path(f"/proc/{trainer}").exists()
    assert (answer.outcome, answer.result["phase"], answer.result["step"]) == (
        "done",
        "stopped",
        12,
    )
    assert run.end(supervisor) == 0
    assert lock_holder(run.directory / contract.LOCK_FILE) is None
    status = run.file_status()
    assert (status["phase"], status["wish"], status["last_exit"]["cause"]) == (
        "stopped",
        "stop",
        "stopped",
    )
    assert run.checkpoints() == [10, 12]
    assert status["checkpoint"]["verified"] is True, "what was under way still got its moment"
    run.open_gate()
    assert run.finish() == 0
    assert_exact(run, 30)
    assert run.file_status()["replay"]["verified_steps"] == 0


@pytest.mark.fault(
    "SV-28", phase="stopping", does="kills a trainer that heard SIGTERM and went nowhere"
)
def test_a_stop_obeys_its_grace_and_then_kills(run: Run) -> None:
    run.set("stop", grace_seconds=0.4, signal_after_seconds=0.1)
    run.faults = "deaf@15"
    supervisor = run.start()
    run.wait_for_status(phase="running", step=14)
    # Two operators at once: both are answered.
    answers: list[client.Answer] = []
    operators = [threading.Thread(target=lambda: answers.append(run.ask("stop"))) for _ in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join(DEADLINE_SECONDS)
    assert [(a.outcome, a.result["phase"]) for a in answers] == [("done", "stopped")] * 2
    assert run.end(supervisor) == 0
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["signal"], ended["counted"]) == ("killed", 9, False)
    log = run.directory / contract.LOGS / "attempt-0001.log"
    assert log.read_text() == "SIGTERM, and no answer\n"


def test_a_restart_saves_and_is_answered_by_the_next_attempt(run: Run) -> None:
    supervisor = run.hold(12)
    answer = run.ask("restart")
    assert (answer.outcome, answer.result["attempt"]) == ("done", 2)
    status = run.wait_for_status(phase="running", step=12)
    assert (status["attempt"], status["restarts"], status["wish"]) == (2, 0, "run")
    assert status["checkpoint"]["step"] == 12
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30)


@pytest.mark.fault("SV-65", phase="running", does="answers the same id twice and saves once")
@pytest.mark.fault("SV-65", phase="adoption", does="answers an id of before its own death")
@pytest.mark.fault("SV-65", phase="running", does="carries the same request out once")
def test_the_same_request_is_carried_out_once(run: Run) -> None:
    supervisor = run.hold(12)
    first = run.ask("checkpoint", id="once", at="now")
    run.gate(14)
    run.wait_for_status(step=14)
    assert run.ask("checkpoint", id="once", at="now") == first
    assert run.checkpoints() == [10, 12]
    # Another life of the supervisor knows it too.
    run.kill_supervisor(supervisor)
    supervisor = run.start()
    run.wait_for_status(phase="running", attempt=1)
    assert run.ask("checkpoint", id="once", at="now") == first
    run.open_gate()
    assert run.end(supervisor) == 0
    assert len(run.records("replied")) == 1
    assert_exact(run, 30)


@pytest.mark.fault(
    "SV-22", phase="running", does="tells who waits for a checkpoint that it will not come"
)
def test_a_request_that_cannot_be_served_is_refused_when_the_trainer_dies(run: Run) -> None:
    run.faults = "kill@17"
    run.set("restart", deaths=1)
    supervisor = run.hold(12)
    reply: list[client.Answer] = []
    asking = threading.Thread(target=lambda: reply.append(run.ask("checkpoint", at="boundary")))
    asking.start()
    run.ask("status")
    run.open_gate()
    asking.join(DEADLINE_SECONDS)
    assert run.end(supervisor) == 1
    assert reply[0].outcome in ("refused", "busy")
    assert "trainer" in reply[0].why


# --- signals to the supervisor --------------------------------------------------------------------


@pytest.mark.fault(
    "FC-74", phase="running", does="saves the step that SIGTERM met, and resumes from it"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_this_life_and_not_the_wish(run: Run, number: signal.Signals) -> None:
    supervisor = run.hold(12)
    supervisor.send_signal(number)
    assert run.end(supervisor) == 0
    status = run.file_status()
    assert (status["phase"], status["wish"]) == ("stopped", "run")
    assert run.checkpoints() == [10, 12]
    run.open_gate()
    assert run.finish("--as-recorded") == 0
    assert_exact(run, 30)


@pytest.mark.fault(
    "SV-18", phase="starting", does="obeys SIGTERM from the moment that it owns the run"
)
def test_a_stop_is_honoured_from_the_moment_the_lock_is_held(run: Run) -> None:
    supervisor = run.start()
    wait_until(lambda: lock_holder(run.directory / contract.LOCK_FILE), "an owner")
    supervisor.send_signal(signal.SIGTERM)
    assert run.end(supervisor) == 0
    assert run.file_status()["phase"] in ("stopped", "finished")
    assert run.finish() == 0
    assert_exact(run, 30)


def test_a_trainer_that_never_says_hello_is_ended_and_started_again(run: Run) -> None:
    run.faults = "deaf@load#1"
    run.set("hang", start_seconds=2.0, evidence_seconds=0.1)
    run.set("stop", grace_seconds=0.2, signal_after_seconds=0.1)
    supervisor = run.start()
    (ended,) = wait_until(lambda: run.records("attempt_ended"), "the end of the first attempt")
    assert (ended["cause"], ended["counted"]) == ("hang", True)
    assert ended["message"].startswith("no hello within 2 s; where it stood is in logs/attempt-00")
    assert run.end(supervisor) == 0
    assert_exact(run, 30)


@pytest.mark.fault(
    "FC-73", phase="stopping", does="saves and stops in its time, however many SIGTERMs come"
)
def test_fc73_more_sigterms_change_nothing(run: Run) -> None:
    """A second SIGTERM turned a graceful stop into a hard one (cockroachdb/cockroach #48070,
    HyperGAN/HyperGAN PR 341)."""
    run.faults = "deaf@exit"
    run.set("stop", grace_seconds=0.6, signal_after_seconds=0.1)
    supervisor = run.hold(12)
    for _ in range(3):
        supervisor.send_signal(signal.SIGTERM)
        run.wait_for_status(phase="stopping")
    assert run.end(supervisor) == 0
    # The trainer did save before it went deaf, and the grace was its own to use.
    assert run.checkpoints() == [10, 12]
    assert run.file_status()["phase"] == "stopped"


@pytest.mark.fault(
    "SV-20", phase="stopping", does="kills what is stopping when the operator insists"
)
def test_the_second_interrupt_shortens_the_grace_and_the_third_kills(run: Run) -> None:
    run.faults = "deaf@15"
    supervisor = run.start()
    run.wait_for_status(phase="running", step=14)
    supervisor.send_signal(signal.SIGINT)
    run.wait_for_status(phase="stopping")
    supervisor.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping sooner" in run.output(), "the answer to the second Ctrl-C")
    supervisor.send_signal(signal.SIGINT)
    assert run.end(supervisor) == 130
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["signal"]) == ("killed", 9)
    assert "killing the trainer" in run.output()


@pytest.mark.fault("SV-29", phase="starting", does="keeps SIGUSR1 for a trainer that can take it")
@pytest.mark.fault("FC-67", phase="starting", does="outlives SIGUSR1 from its first moment on")
@pytest.mark.fault("FC-67", phase="running", does="makes a checkpoint for SIGUSR1, and trains on")
def test_fc67_sigusr1_makes_a_checkpoint_and_never_ends_anything(run: Run) -> None:
    """A launcher without a handler died of the user signal that asked for a checkpoint
    (pytorch/pytorch #154849)."""
    run.gate(12)
    supervisor = run.start()
    wait_until(lambda: lock_holder(run.directory / contract.LOCK_FILE), "an owner")
    for _ in range(20):
        supervisor.send_signal(signal.SIGUSR1)  # while everything begins
    run.wait_for_status(phase="running", step=12)
    run.wait_for_record("checkpoint_committed", reason="operator")
    run.gate(13)
    run.wait_for_status(step=13)
    supervisor.send_signal(signal.SIGUSR1)
    run.wait_for_record("checkpoint_committed", step=13, reason="operator")
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30)


def test_sighup_follows_a_rotated_log(run: Run) -> None:
    supervisor = run.hold(12)
    log = run.directory / contract.SUPERVISOR_LOG_FILE
    log.rename(log.with_suffix(".1"))
    supervisor.send_signal(signal.SIGHUP)
    run.ask("checkpoint", at="now")
    wait_until(lambda: log.exists() and "checkpoint at step 12" in log.read_text(), "a new log")
    run.open_gate()
    assert run.end(supervisor) == 0


def test_the_status_follows_steps_that_are_executed_again(run: Run) -> None:
    """Without a link nothing tells of them, and the history does not grow."""
    run.environment["SABOTEUR_MUTE"] = "1"
    supervisor = run.hold(18)
    kill(run.status()["trainer_pid"])
    run.gate(13)
    run.wait_for_record("attempt_ended", attempt=1)
    run.wait_for_status(phase="running", attempt=2, step=13)
    assert run.history_step() == 18
    assert run.ask("checkpoint", at="now").outcome == "done", "it is asked, as any that trains"
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.file_status()["replay"]["verified_steps"] == 8
    assert_exact(run, 30)


# --- a second start -------------------------------------------------------------------------------


@pytest.mark.parametrize("detached", [(), ("--detach",)], ids=["foreground", "detached"])
def test_a_directory_in_which_others_may_write_is_the_operators_to_mend(
    run: Run, detached: tuple[str, ...]
) -> None:
    """No failure of the run, so that a service manager does not try again."""
    run.directory.mkdir()
    run.directory.chmod(0o777)
    done = run.supervisor("start", "--config", str(run.config), *detached)
    assert (done.returncode, done.stdout) == (contract.ExitCode.USAGE, "")
    assert f"chmod go-w {run.directory}" in done.stderr


def test_the_held_out_loss_outlives_the_supervisor_that_took_it_in(run: Run) -> None:
    supervisor = run.hold(25)
    run.wait_for_record("evaluated", step=20)
    seen = run.status()["evaluation"]
    assert (seen["step"], seen["loss"]) == (20, run.records("evaluated")[-1]["loss"])
    run.kill_supervisor(supervisor)
    supervisor = run.hold(25)
    assert run.status()["evaluation"] == seen
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.finish() == 0
    assert run.file_status()["evaluation"]["step"] == 30
    assert "held-out loss at step 30" in run.output()


@pytest.mark.fault(
    "FC-88", phase="idle", does="says that the run is finished; more steps are the operator's word"
)
def test_a_finished_run_says_so_and_trains_on_when_it_is_given_more_steps(run: Run) -> None:
    assert run.finish() == 0
    assert run.finish() == 0
    assert "run: finished at step 30 of 30" in run.output()
    assert run.file_status()["attempt"] == 1
    assert run.finish("--set", "training.steps=50") == 0
    assert "run: finished at step 50 of 50" in run.output()
    assert run.file_status()["target_step"] == 50
    assert_exact(run, 50)
    (changed,) = run.records("settings_changed")
    assert changed["changes"] == {"training.steps": [30, 50]}
    # The file still says 30; that is no wish to forget what was trained since.
    assert run.finish() == 0
    assert_exact(run, 50)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the owner's name in `lock`, which each start writes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != contract.LOCK_FILE
    }


def test_other_settings_are_refused_with_both_values_and_nothing_is_touched(run: Run) -> None:
    assert run.finish() == 0
    before = contents(run.directory)
    for change, words in (
        ("training.seed=5", "training.seed: recorded 0, requested 5"),
        (
            "training.learning_rate=0.5",
            "training.learning_rate: recorded 0.003, requested 0.5",
        ),
        ("training.steps=20", "training.steps: recorded 30, requested 20"),
    ):
        with pytest.raises(start.Refused) as refused:
            start.start_from_file(str(run.config), [change], {}, start.Request())
        assert refused.value.code == 2
        assert words in str(refused.value)
        assert contents(run.directory) == before
    # And by the command.
    assert run.finish("--set", "training.seed=5") == 2
    assert "supervisor:   training.seed: recorded 0, requested 5" in run.output()
    assert contents(run.directory) == before


def test_operational_settings_are_taken_over_on_record(run: Run) -> None:
    assert run.finish() == 0
    assert run.finish("--set", "checkpoint.keep_last=4", "--set", "stop.grace_seconds=7.0") == 0
    (changed,) = run.records("settings_changed")
    assert changed["changes"] == {
        "checkpoint.keep_last": [5, 4],
        "stop.grace_seconds": [30.0, 7.0],
    }
    assert "keep_last = 4" in (run.directory / contract.RUN_FILE).read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("run.shared=true", "run.shared = true: a run directory on a network file system"),
        ("trainer.processes=2", "trainer.processes = 2: our trainer runs as one process"),
    ],
)
def test_what_cannot_be_carried_out_yet_is_refused_and_not_ignored(
    run: Run, change: str, words: str
) -> None:
    tree = tomllib.loads(run.config.read_text())
    if "processes" in change:
        del tree["trainer"]["command"]  # a launcher of one's own may start as many as it likes
        tree["policy"] = {"arms": [{"name": "docs", "builtin": "python-docs"}]}
    run.config.write_text(tomli_w.dumps(tree))
    with pytest.raises(start.Refused, match=words):
        start.start_from_file(str(run.config), [change], {}, start.Request())
    assert not run.directory.exists()


def test_run_toml_is_written_again_as_the_journal_has_it(run: Run) -> None:
    """It is a view of the record: a start that was killed before writing it, or a hand that
    changed it, alters nothing of what the run is."""
    assert run.finish() == 0
    file = run.directory / contract.RUN_FILE
    written = file.read_bytes()
    file.write_bytes(written.replace(b"\nsteps = 30\n", b"\nsteps = 40\n"))
    assert run.finish() == 0
    assert run.file_status()["target_step"] == 30
    assert file.read_bytes() == written


def test_no_valid_checkpoint_is_a_failure_that_names_the_ways_out(run: Run) -> None:
    run.faults = "crash3@25"
    run.set("restart", deaths=1)
    assert run.finish() == 1
    for path in (run.directory / contract.CHECKPOINTS).glob("*.bin"):
        path.write_bytes(path.read_bytes()[:-1])
    run.faults = ""
    assert run.finish() == 1
    status = run.file_status()
    assert "no valid checkpoint is left, though step 20 was saved" in status["reason"]
    assert {alarm["name"] for alarm in status["alarms"]} == {"checkpoint_quarantined"}
    assert sorted(r["step"] for r in run.records("checkpoint_quarantined")) == [10, 20]
    assert run.finish("--from-scratch") == 0
    assert run.steps() == list(range(1, 31))
    assert run.file_status()["replay"]["verified_steps"] == 24


@pytest.mark.fault(
    "SV-41", phase="starting", does="sets a damaged checkpoint aside and takes the one before it"
)
def test_fc03_a_damaged_newest_checkpoint_costs_one_cadence_and_no_manual_step(run: Run) -> None:
    """The machine died while saving; the newest checkpoint was bad and nothing fell back
    (allenai/allennlp #2129)."""
    run.faults = "crash3@25#1"
    run.set("restart", deaths=1)
    assert run.finish() == 1
    newest = run.directory / contract.CHECKPOINTS / "step_000020.bin"
    newest.write_bytes(newest.read_bytes()[:-4] + b"flip")
    assert run.finish() == 0
    assert run.steps() == list(range(1, 31))
    (quarantined,) = run.records("checkpoint_quarantined")
    assert quarantined["step"] == 20
    assert (run.directory / quarantined["moved_to"]).exists()
    assert run.records("attempt_started")[-1]["resume_step"] == 10


def test_a_helper_that_was_killed_while_it_retained_leaves_no_ghosts(run: Run) -> None:
    """Files go first and their record follows; a kill in between is the same as this."""
    run.set("training", steps=45)
    supervisor = run.hold(35)
    assert run.ask("stop", "s1").outcome == "done"
    assert run.end(supervisor) == 0
    assert run.checkpoints() == [10, 20, 30, 35]
    (run.directory / contract.CHECKPOINTS / "step_000010.bin").unlink()
    assert run.supervisor("verify", str(run.directory)).returncode == 1
    run.open_gate()
    assert run.finish() == 0
    assert [10] in [record["steps"] for record in run.records("checkpoints_removed")]
    proven = run.supervisor("verify", str(run.directory))
    assert proven.returncode == 0, proven.stdout


def test_a_helper_that_is_killed_while_it_reads_costs_a_moment(run: Run) -> None:
    """Of a trainer that knows only signals nobody else tells what it saved."""
    run.environment["SABOTEUR_MUTE"] = "1"
    supervisor = run.hold(8)
    (helper,) = helpers_of(supervisor.pid)
    os.kill(helper, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run.ask, "checkpoint", "c1", at="now")
        wait_until(lambda: run.checkpoints() == [8], "the checkpoint that was asked for")
        saved_at = time.time()
        wait_until(lambda: run.file_status()["time"] > saved_at + 2, "two looks around")
        os.kill(helper, signal.SIGKILL)
        assert answer.result().result["step"] == 8
    (alarm,) = [one for one in run.records("alarmed") if one["name"] == "verification"]
    assert "step 8: the verifier ended by signal 9 during verify" in alarm["detail"]
    assert run.status()["alarms"] == []
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30)


def helpers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    named = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, command in named.items() if b"supervisor.verifier" in command]


# --- hostile surroundings -------------------------------------------------------------------------


def shout(run: Run, socket_name: str, frames: list[list[bytes]]) -> None:
    """Sends frames to one of the run's sockets and waits until the connection took them."""
    directory = os.open(run.directory, os.O_RDONLY | os.O_DIRECTORY)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as peer:
            peer.set(zmq.LINGER, 2000)
            peer.connect(f"ipc:///proc/self/fd/{directory}/{contract.SOCKETS}/{socket_name}")
            for parts in frames:
                peer.send_multipart(parts)
    finally:
        context.term()
        os.close(directory)


@pytest.mark.fault(
    "SV-67", phase="running", does="drops all that is not a valid message, and trains on"
)
@pytest.mark.fault("SV-67", phase="running", does="runs nothing that a message says")
def test_garbage_on_the_sockets_disturbs_nobody(run: Run) -> None:
    supervisor = run.hold(12)
    valid: Json = {"attempt": 1, "nonce": "0" * 16}
    hello = contract.encode_message(
        "hello", pid=1, step=29, parameters=6, policy_digest="", capabilities=[], **valid
    )
    frames = [
        [b""],
        [b"\xff\xfe\x00"],
        [b"{}"],
        [b"[1, 2]"],
        [b"null", b"two", b"frames"],
        [contract.encode_message("dance", id="x")],
        [contract.encode_message("stop")],
        [contract.encode_message("checkpoint", id="x", at="noon")],
        [contract.encode_message("status", id=7)],
        [b'{"version": 99, "verb": "stop", "id": "x"}'],
        [b"[" * 100_000],
        [hello],
        [contract.encode_message("farewell", why="finished", step=30, **valid)],
    ]
    for socket_name in (contract.TRAINER_SOCKET, contract.OPERATOR_SOCKET):
        shout(run, socket_name, frames)
        # Larger than any message may be: the connection goes, nothing else does.
        shout(run, socket_name, [[b"x" * (contract.MESSAGE_BYTES_MAX + 1)]])
    status = run.status()
    assert (status["phase"], status["step"], status["wish"]) == ("running", 12, "run")
    assert run.records("replied") == []
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_exact(run, 30)


@pytest.mark.fault("SV-58", phase="running", does="has working sockets under a path of any length")
@pytest.mark.fault("SV-58", phase="any", does="works in a directory with a path of any length")
def test_a_path_of_200_characters_works(tmp_path: Path) -> None:
    """A path of more than 107 bytes fits no socket address (LMCache PR 3530, libzmq PR 1176)."""
    deep = tmp_path / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)
    with contextlib.closing(Run(deep)) as run:
        supervisor = run.hold(12)
        assert run.ask("checkpoint", at="now").result["step"] == 12
        assert run.supervisor("stop", str(run.directory)).returncode == 0
        assert run.end(supervisor) == 0
        assert run.file_status()["phase"] == "stopped"


def test_a_run_directory_that_is_renamed_goes_on(run: Run) -> None:
    supervisor = run.hold(12)
    run.directory = run.directory.rename(run.home / "moved")
    found = run.supervisor("status", str(run.directory), "--json")
    assert (found.returncode, json.loads(found.stdout)["phase"]) == (0, "running")
    answer = run.ask("checkpoint", at="now")
    assert answer.result["path"] == str(run.directory / "checkpoints" / "step_000012.bin")
    # A restart works from the new place too: its log, its receipts, its checkpoints.
    assert run.ask("restart").outcome == "done"
    run.gate(25)
    run.wait_for_status(step=25)
    stopped = run.supervisor("stop", str(run.directory))
    assert (stopped.returncode, "step 25" in stopped.stdout) == (0, True)
    assert run.end(supervisor) == 0
    assert run.steps() == list(range(1, 26))
    assert run.checkpoints()[-1] == 25
    assert run.file_status()["phase"] == "stopped"
    assert run.file_status()["checkpoint"]["verified"] is True
    assert not (run.home / "run").exists()


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_the_file_of_a_run_means_the_run_that_it_is_in(run: Run, how: str) -> None:
    """It names the place where the run was begun: a start with it began there from step 0, or took
    what is there by now for the copy."""
    supervisor = run.hold(12)
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    assert run.end(supervisor) == 0  # it has answered before it writes its last
    there = run.home / how
    if how == "moved":
        run.directory.rename(there)
    else:
        shutil.copytree(run.directory, there)
    run.config = there / contract.RUN_FILE
    run.open_gate()
    assert run.finish() == 0
    assert run.directory.exists() == (how == "copied")
    assert how == "moved" or run.history_step() == 12
    run.directory = there
    run.assert_exact(30)
    assert run.finish("--set", f"run.directory={run.home / 'new'}") == 0
    assert (run.home / "new").exists(), "but what is asked for by name is what is meant"


def test_a_supervisor_whose_terminal_is_gone_trains_on(run: Run) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        run.command("start", "--config", str(run.config)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=writer,
        env=run.variables(),
    )
    os.close(writer)
    os.close(reader)
    assert process.wait(DEADLINE_SECONDS) == 0
    assert_exact(run, 30)
