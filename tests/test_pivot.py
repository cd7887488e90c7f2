"""Pivots and rollbacks of runs with real processes: what they leave, and what refuses them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import tomli_w
from checkpoint_kit import flip_bit
from exactness_kit import TrainedRun, content_of
from ledger_kit import holds
from pivot_kit import NEW_ARMS, OLD_ARMS, PivotRun, arms, epochs
from runs_kit import kill, wait_for_end, wait_until

from supervisor import config, contract, pivot
from supervisor.contract import Json
from supervisor.state import Durable, Epoch

FAR = 10**9  # beyond any gate


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PivotRun]:
    with contextlib.closing(PivotRun(tmp_path)) as made:
        yield made


def committed(run: PivotRun) -> list[tuple[int, int, int]]:
    """(epoch, base step, parent) of every pivot on record."""
    found = run.records("policy_switched")
    return [(r["epoch"], r["base_step"], r["parent"]) for r in found]


def assert_whole(run: PivotRun, steps: int = 400) -> None:
    """One entry a step, every binding good, and an archive for each pivot and for nothing else."""
    assert run.steps() == list(range(1, steps + 1))
    assert all(run.proofs())
    assert run.archives() == sorted(r["archive"] for r in run.records("policy_switched"))
    assert run.durable.pivot is None


# --- the story ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Story:
    """A pivot that was asked for at step 150 of a run with a checkpoint every 100."""

    run: PivotRun
    before: bytes  # the ledger at step 150
    inode: int
    answer: Json
    status: Json  # at step 230, before the first checkpoint of the new epoch
    state: Json
    samples: list[Json]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with contextlib.closing(PivotRun(tmp_path_factory.mktemp("story"))) as run:
        supervisor = run.hold(150)
        wait_until(lambda: run.history_step() == 150, "step 150 in the ledger")
        before, inode = run.ledger_path.read_bytes(), run.ledger_path.stat().st_ino
        told = ("--json", "--reason", "polish on prose", "--request-id", "p1")
        done = run.pivot(*told, gate=230)
        assert done.returncode == 0, done.stderr
        # The command has waited for this.
        status = run.status()
        assert (status["phase"], status["attempt"]) == ("running", 2)
        run.wait_for_status(step=230)
        wait_until(lambda: run.history_step() == 230, "step 230 in the ledger")
        state = run.sidecar(contract.state_name("run"))
        samples = run.sidecar(contract.samples_name("run"))
        run.open_gate()
        assert run.end(supervisor) == 0
        yield Story(run, before, inode, orjson.loads(done.stdout), status, state, samples)


def test_the_new_policy_begins_at_the_next_boundary(story: Story) -> None:
    assert story.answer == {
        "schema_version": 1,
        "id": "p1",
        "epoch": 2,
        "base_step": 200,
        "first_step": 201,
        "archive": "pivot-0001-step_000200",
    }
    assert_whole(story.run)
    assert story.run.epochs_of_steps() == epochs((1, 200, 1), (201, 400, 2))
    assert story.run.manifest(200).epoch == 1
    assert (story.run.manifest(200).reason, story.run.manifest(200).requests) == ("pivot", ("p1",))
    assert story.run.manifest(300).epoch == 2
    assert committed(story.run) == [(2, 200, 1)]


@pytest.mark.fault(
    "SV-79", phase="stopping", does="leaves every byte of the history where it was in a pivot"
)
def test_the_history_is_the_same_file_with_the_same_beginning(story: Story) -> None:
    after = story.run.ledger_path.read_bytes()
    entries = story.before.rindex(b"}") + 1
    assert after[:entries] == story.before[:entries]
    assert story.run.ledger_path.stat().st_ino == story.inode
    assert (story.run.directory / contract.ARCHIVE / story.run.ledger_path.name).exists() is False


def test_the_archive_holds_what_was_set_aside_and_says_why(story: Story) -> None:
    archive = story.run.archive(1, 200)
    names = {"run.samples.json", "run.state.json", "0001.toml", "pivot.json", "digests.json"}
    assert {path.name for path in archive.iterdir()} == names
    digests = orjson.loads((archive / "digests.json").read_bytes())
    assert digests == {
        name: hashlib.sha256((archive / name).read_bytes()).hexdigest()
        for name in names - {"digests.json"}
    }
    policy = story.run.directory / contract.POLICIES / "0001.toml"
    assert (archive / "0001.toml").read_bytes() == policy.read_bytes()
    state = orjson.loads((archive / "run.state.json").read_bytes())
    assert (state["step"], state["epoch"], set(state["arms"])) == (200, 1, set(OLD_ARMS))
    samples = orjson.loads((archive / "run.samples.json").read_bytes())
    assert [(row["step"], row["epoch"]) for row in samples] == [(100, 1), (200, 1)]
    told = orjson.loads((archive / "pivot.json").read_bytes())
    assert holds(story.run.ledger_path, 200, told.pop("ledger_sha256"))
    assert told == {
        "epoch": 1,
        "base_step": 200,
        "request": "p1",
        "reason": "polish on prose",
        "ledger_entries": 200,
    }


def test_samples_and_state_begin_anew(story: Story) -> None:
    assert story.samples == []
    assert story.state == {
        "step": 200,
        "epoch": 2,
        "policy_digest": story.run.durable.epochs[1].policy_digest,
        "targets_seen": None,
        "bandit": {},
        "arms": {},
    }
    state = story.run.sidecar(contract.state_name("run"))
    assert (state["step"], state["epoch"], set(state["arms"])) == (400, 2, set(NEW_ARMS))
    samples = story.run.sidecar(contract.samples_name("run"))
    assert [(row["step"], row["epoch"]) for row in samples] == [(300, 2), (400, 2)]


def test_status_and_journal_tell_the_story(story: Story) -> None:
    assert (story.status["epoch"], story.status["wish"], story.status["alarms"]) == (2, "run", [])
    kinds = (
        *("pivot_intended", "attempt_ended", "policy_switched"),
        *("attempt_started", "attempt_spawned", "replied"),
    )
    records = story.run.records(*kinds)
    begin = [r["record"] for r in records].index("pivot_intended")
    assert [r["record"] for r in records[begin:]] == [*kinds, "attempt_ended"]
    (intended,), (switched,) = (story.run.records(kind) for kind in (kinds[0], kinds[2]))
    submitted = story.run.policy_file.read_text()
    assert intended["policy"] == switched["policy"] == submitted
    assert intended["reason"] == switched["reason"] == "polish on prose"
    ended = records[begin + 1]
    assert (ended["cause"], ended["step"], ended["counted"]) == ("stopped", 200, False)
    output = story.run.output()
    assert "pivot p1 is wanted (at: boundary)" in output
    assert "epoch 2 begins with step 201" in output


def test_run_toml_and_policies_are_those_of_the_epochs(story: Story) -> None:
    directory = story.run.directory
    submitted = story.run.policy_file.read_bytes()
    assert (directory / contract.POLICIES / "0002.toml").read_bytes() == submitted
    names = [arm.name for arm in config.load(directory / contract.RUN_FILE).policy.arms]
    assert names == list(NEW_ARMS)
    assert story.run.policies() == ["0001.run.toml", "0001.toml", "0002.toml"]
    left = config.load(directory / contract.POLICIES / "0001.run.toml")
    assert [arm.name for arm in left.policy.arms] == list(OLD_ARMS)


def test_the_same_request_is_shown_again_and_not_carried_out_again(story: Story) -> None:
    before = content_of(story.run.directory)
    again = story.run.pivot("--json", "--request-id", "p1")
    assert (again.returncode, orjson.loads(again.stdout)) == (0, story.answer)
    assert content_of(story.run.directory) == before


def test_a_start_with_the_file_from_before_the_pivot_is_accepted(story: Story) -> None:
    assert story.run.finish() == 0
    assert story.run.durable.epoch == 2


def test_policies_are_shown_by_epoch(story: Story) -> None:
    place = str(story.run.directory)
    shown = orjson.loads(story.run.supervisor("policy", "show", place, "--json").stdout)
    assert shown["policy"] == story.run.policy_file.read_text()
    assert {key: shown[key] for key in ("epoch", "first_step", "parent", "archive")} == {
        "epoch": 2,
        "first_step": 201,
        "parent": 1,
        "archive": "pivot-0001-step_000200",
    }
    first = story.run.supervisor("policy", "show", place, "--epoch", "1")
    assert first.stdout.startswith("# epoch 1, from step 1 on\n[policy]\n")
    none = story.run.supervisor("policy", "show", place, "--epoch", "3")
    assert (none.returncode, "no epoch 3; there are [1, 2]" in none.stderr) == (2, True)


def test_a_policy_is_compared_and_tried_without_a_trace(story: Story) -> None:
    other = story.run.home / "other.toml"
    table = {"kind": "static", "arms": arms("prose", "songs", floor=0.6)}
    other.write_text(tomli_w.dumps({"policy": table}))
    before = content_of(story.run.directory)
    diff = story.run.supervisor("policy", "diff", str(other), str(story.run.directory))
    assert diff.returncode == 0
    assert "policy.arms.prose.floor: recorded 0.0, requested 0.6" in diff.stdout
    words = ("policy", "diff", str(other), str(story.run.directory), "--json")
    changes = orjson.loads(story.run.supervisor(*words).stdout)["changes"]
    assert {"key": "policy.arms.prose.floor", "recorded": 0.0, "requested": 0.6} in changes
    place = (str(other), str(story.run.directory), "--pulls", "100", "--json")
    rows = orjson.loads(story.run.supervisor("policy", "check", *place).stdout)["arms"]
    shares = {row["arm"]: row["share"] for row in rows}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["prose"] >= 0.6
    ruling = story.run.directory / contract.POLICIES / "0002.toml"
    looked = story.run.supervisor("policy", "check", str(ruling), str(story.run.directory))
    assert (looked.returncode, looked.stderr) == (0, "")
    file = ("--policy", str(other))
    dry = story.run.supervisor("pivot", str(story.run.directory), "--dry-run", *file)
    assert (dry.returncode, "nothing was changed" in dry.stdout) == (0, True)
    dry = story.run.supervisor("pivot", str(story.run.directory), "--dry-run", "--json", *file)
    plan = orjson.loads(dry.stdout)
    assert (dry.returncode, plan["schema_version"], plan["epoch"], plan["to_step"]) == (
        0,
        1,
        2,
        None,
    )
    assert {"key": "policy.arms.prose.floor", "recorded": 0.0, "requested": 0.6} in plan["changes"]
    back = ("rollback", str(story.run.directory), "--to-step", "200", "--dry-run", "--json")
    assert orjson.loads(story.run.supervisor(*back).stdout)["to_step"] == 200
    assert content_of(story.run.directory) == before


# --- when and how ---------------------------------------------------------------------------------


def test_at_now_means_the_next_step(run: PivotRun) -> None:
    supervisor = run.hold(150)
    done = run.pivot("--at", "now")
    assert "epoch 2 begins with step 151" in done.stdout
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_whole(run)
    assert committed(run) == [(2, 150, 1)]


def test_a_trainer_that_knows_only_signals(run: PivotRun) -> None:
    """SIGUSR1, so that a checkpoint is safe, and then SIGTERM; the base is what that one wrote."""
    run.environment["SABOTEUR_MUTE"] = "1"
    run.set("stop", signal_after_seconds=1.0)
    supervisor = run.hold(150)
    with run.asked("p1", **run.proposal()):
        wait_until(lambda: 150 in run.checkpoints(), "a checkpoint on SIGUSR1")
        run.gate(170)
        run.wait_for_record("policy_switched")
        run.open_gate()
        assert run.end(supervisor) == 0
    assert committed(run) == [(2, 170, 1)]
    assert (run.manifest(150).reason, run.manifest(170).reason) == ("sigusr1", "sigterm")
    assert_whole(run)


def test_a_trainer_whose_hello_comes_late_is_not_taken_for_one_without_a_link(
    run: PivotRun,
) -> None:
    supervisor = run.hold(150)
    run.kill_supervisor(supervisor)
    supervisor = run.start()
    run.wait_for_record("attempt_adopted")
    with run.asked("p1", **run.proposal()):
        run.wait_for_pauses("p1")
        run.open_gate()
        assert run.end(supervisor) == 0
    assert committed(run) == [(2, 200, 1)]
    assert_whole(run)


def test_a_second_request_replaces_the_first(run: PivotRun) -> None:
    supervisor = run.hold(150)
    first = run.proposal()
    run.write_policy("notes")
    with run.asked("p1", **first) as one, run.asked("p2", **run.proposal()):
        assert one.poll(10_000)
        refused = orjson.loads(one.recv())
        assert (refused["outcome"], "p2" in refused["why"]) == ("refused", True)
        run.wait_for_pauses("p2")
        run.open_gate()
        assert run.end(supervisor) == 0
    assert [r["request"] for r in run.records("policy_switched")] == ["p2"]
    assert {entry.arm for entry in run.entries() if entry.epoch == 2} == {"notes"}
    assert_whole(run)


def test_two_pivots_one_after_the_other(run: PivotRun) -> None:
    supervisor = run.hold(50)
    assert run.pivoted(150) == "done"
    run.write_policy("songs")
    assert run.pivoted(250) == "done"
    run.open_gate()
    assert run.end(supervisor) == 0
    assert committed(run) == [(2, 100, 1), (3, 200, 2)]
    assert run.epochs_of_steps() == epochs((1, 100, 1), (101, 200, 2), (201, 400, 3))
    assert_whole(run)


# --- runs that nobody trains ----------------------------------------------------------------------


def stopped(run: PivotRun) -> None:
    supervisor = run.hold(150)
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    assert run.end(supervisor) == 0
    run.open_gate()


def failed(run: PivotRun) -> None:
    run.faults = "exit80@150"
    assert run.finish() == 1
    run.faults = ""


def finished(run: PivotRun) -> None:
    assert run.finish() == 0


@pytest.mark.parametrize(
    ("ended", "base_step"),
    [(stopped, 150), (failed, 100), (finished, 400)],
    ids=["stopped", "failed", "finished"],
)
def test_a_run_that_has_ended_pivots_too(
    run: PivotRun, ended: Callable[[PivotRun], None], base_step: int
) -> None:
    ended(run)
    names = (contract.samples_name("run"), contract.state_name("run"))
    before = {name: (run.directory / name).read_bytes() for name in names}
    wish = run.durable.wish
    done = run.pivot("--json", "--request-id", "p1")
    assert done.returncode == 0, done.stderr
    answer = orjson.loads(done.stdout)
    assert (answer["base_step"], answer["epoch"]) == (base_step, 2)
    archive = run.archive(1, base_step)
    assert {name: (archive / name).read_bytes() for name in names} == before
    assert (run.durable.wish, run.file_status()["phase"]) == (wish, "stopped")
    assert run.records("attempt_started")[-1]["attempt"] == 1, "nothing was trained"
    assert run.finish("--set", "training.steps=500") == 0
    assert run.epochs_of_steps() == epochs((1, base_step, 1), (base_step + 1, 500, 2))


def test_a_run_whose_trainer_lives_alone_is_not_pivoted(run: PivotRun) -> None:
    supervisor = run.hold(150)
    run.kill_supervisor(supervisor)
    refused = run.pivot()
    assert refused.returncode == 1
    assert "`supervisor start` takes it over" in refused.stderr
    assert run.records("pivot_intended") == []


def test_what_a_start_sweeps_away_is_of_a_pivot_that_never_was(run: PivotRun) -> None:
    policies, archives = run.directory / "policies", run.directory / "archive"
    assert run.finish("--set", "training.steps=20") == 0
    theirs = [policies / "next-idea.toml", policies / "notes", policies / "0002.toml.bak"]
    left = [policies / "0002.toml", policies / "0003.run.toml", policies / ".tmp-1234-0001.toml"]
    for path in (*theirs, *left, archives / "notes"):
        path.write_text("x")
    (policies / "old").mkdir()
    (archives / "pivot-0001-step_000010").mkdir()
    assert run.finish("--set", "training.steps=30") == 0
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in theirs)
    assert (policies / "old").is_dir()
    assert [path.name for path in archives.iterdir()] == ["notes"]
    assert run.file_status()["alarms"] == []


def test_a_run_without_a_checkpoint_has_nothing_to_begin_from(run: PivotRun) -> None:
    run.faults = "exit80@50"
    assert run.finish() == 1
    refused = run.pivot()
    assert refused.returncode == 1
    assert "there is no valid checkpoint" in refused.stderr
    assert run.file_status()["phase"] == "failed", "it is what it was"
    assert run.policies() == ["0001.toml"]


# --- rollback -------------------------------------------------------------------------------------


def superseded(run: PivotRun) -> list[str]:
    return sorted(path.name for path in (run.directory / contract.SUPERSEDED).glob("*.bin"))


def test_a_rollback_of_a_living_run_leaves_a_branch_behind(run: PivotRun) -> None:
    supervisor = run.hold(250)
    done = run.rollback(100, "--reason", "it went wrong")
    assert done.returncode == 0, done.stderr
    assert "epoch 2 begins with step 101" in done.stdout
    run.open_gate()
    assert run.end(supervisor) == 0
    assert committed(run) == [(2, 100, 1)]
    assert superseded(run) == ["step_000200.bin", "step_000250.bin"]
    assert run.epochs_of_steps() == epochs((1, 100, 1), (101, 400, 2))
    rows = [(entry.step, entry.epoch) for entry in run.entries()]
    assert rows == [*((s, 1) for s in range(1, 251)), *((s, 2) for s in range(101, 401))]
    assert {entry.arm for entry in run.entries()} == set(OLD_ARMS), "the policy is the same"
    assert run.durable.epochs[1].policy_digest == run.durable.epochs[0].policy_digest


def test_a_rollback_with_a_policy(run: PivotRun) -> None:
    stopped(run)
    done = run.rollback(100, "--policy", str(run.policy_file))
    assert done.returncode == 0, done.stderr
    assert superseded(run) == ["step_000150.bin"], "at once, though nothing trains"
    assert run.finish() == 0
    assert run.epochs_of_steps() == epochs((1, 100, 1), (101, 400, 2))
    assert {entry.arm for entry in run.entries() if entry.epoch == 2} == set(NEW_ARMS)


def test_a_rollback_over_a_pivot_takes_the_policy_from_before_it(run: PivotRun) -> None:
    supervisor = run.hold(150)
    assert run.pivoted(250) == "done"
    run.wait_for_status(step=250)
    assert run.rollback(200).returncode == 0
    run.open_gate()
    assert run.end(supervisor) == 0
    assert committed(run) == [(2, 200, 1), (3, 200, 1)]
    assert run.epochs_of_steps() == epochs((1, 200, 1), (201, 400, 3))
    assert {entry.arm for entry in run.entries() if entry.epoch == 3} == set(OLD_ARMS)
    assert run.manifest(300).epoch == 3


@pytest.mark.parametrize("name", ["archive", "policies", "superseded"])
def test_a_directory_that_the_operator_removed_stops_no_rollback(run: PivotRun, name: str) -> None:
    """Each refusal had cost a save, an end and a start, until the next start made it again."""
    supervisor = run.hold(250)
    shutil.rmtree(run.directory / name)
    done = run.rollback(100)
    assert done.returncode == 0, done.stderr
    assert run.status()["alarms"] == []
    run.open_gate()
    assert run.end(supervisor) == 0
    done = run.supervisor("verify", str(run.directory))
    assert done.returncode == 0, done.stdout


def test_a_rollback_to_a_spoiled_checkpoint_goes_back_nowhere(run: PivotRun) -> None:
    supervisor = run.hold(250)
    spoil(run, 100)
    refused = run.rollback(100)
    assert refused.returncode == 1
    assert "the checkpoint of step 100 is not valid" in refused.stderr
    run.open_gate()
    assert run.end(supervisor) == 0
    assert committed(run) == []
    assert run.records("attempt_started")[-1]["resume_step"] == 250
    assert superseded(run) == []


def test_a_trainer_that_never_gets_ready_can_be_rolled_back(run: PivotRun) -> None:
    """It dies while loading, again and again; nobody has to wait until it is given up."""
    run.set("restart", deaths=50, delay_seconds=0.5)
    supervisor = run.hold(150)
    run.kill_supervisor(supervisor)
    run.faults = ",".join(f"crash3@load#{attempt}" for attempt in range(2, 30))
    (holder,) = [r["pid"] for r in run.records("attempt_spawned")]
    kill(holder)
    wait_for_end(holder)
    supervisor = run.start()
    run.wait_for_record("attempt_ended", cause="crash")
    with run.asked("p1", **run.proposal(to_step=100)):
        run.wait_for_record("policy_switched")
    assert committed(run) == [(2, 100, 1)]
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    assert run.end(supervisor) == 0


# --- refused, and nothing is touched --------------------------------------------------------------


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PivotRun]:
    """A living run at step 150, which every refusal must leave as it is."""
    with contextlib.closing(PivotRun(tmp_path_factory.mktemp("held"))) as run:
        run.hold(150)
        run.wait_for_record("checkpoint_committed", step=100)
        before = run.records()
        yield run
        status = run.status()
        assert (status["phase"], status["attempt"], status["step"]) == ("running", 1, 150)
        kinds = {record["record"] for record in run.records()[len(before) :]}
        assert kinds <= {"replied", "checkpoint_verified"}
        assert run.policies() == ["0001.toml"]
        assert run.archives() == []


def table(**more: Any) -> Json:
    return {"kind": "static", "arms": arms(*NEW_ARMS), **more}


REFUSED: dict[str, tuple[Json | bytes, str]] = {
    "floors above one": (
        {"policy": table(arms=[*arms("prose", floor=0.7), *arms("notes", floor=0.6)])},
        "floor",
    ),
    "an unknown key": ({"policy": table(shares="equal")}, "policy.shares"),
    "an unknown table": ({"policies": table()}, "policies"),
    "another width": ({"policy": table(), "model": {"width": 256}}, "only what a pivot may change"),
    "another batch": ({"training": {"batch_windows": 4}}, "training.batch_windows"),
    "a longer run": ({"training": {"steps": 800}}, "training.steps: recorded 400, requested 800"),
    "the same policy": ({"policy": table(arms=arms(*OLD_ARMS))}, "changes nothing"),
    "half a file": (b'[policy]\nkind = "sta', "expected TOML in UTF-8"),
    "no text at all": (b"\xff\xfe[policy]", "expected TOML in UTF-8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_rule_is_refused_before_anything_is_touched(
    held: PivotRun, what: str, tmp_path: Path
) -> None:
    submitted, told = REFUSED[what]
    file = tmp_path / "policy.toml"
    data = submitted if isinstance(submitted, bytes) else tomli_w.dumps(submitted).encode()
    file.write_bytes(data)
    with pytest.raises((pivot.PolicyRefused, config.ConfigError)) as refusal:
        pivot.propose(held.directory, file, at="boundary", reason="", to_step=None)
    assert told in str(refusal.value)
    assert str(file) in str(refusal.value)


def test_a_refusal_is_a_usage_error_and_names_the_file(held: PivotRun, tmp_path: Path) -> None:
    file = tmp_path / "none.toml"
    place = ("pivot", str(held.directory), "--policy", str(file))
    refused = held.supervisor(*place)
    assert (refused.returncode, f"{file}: expected" in refused.stderr) == (2, True)
    assert "No such file" in refused.stderr
    file.write_text(tomli_w.dumps(REFUSED["another width"][0]))  # type: ignore[arg-type]
    refused = held.supervisor(*place)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{file}: model" in refused.stderr


def test_a_proposal_for_another_epoch_is_refused_by_the_supervisor(held: PivotRun) -> None:
    answer = held.ask("pivot", **(held.proposal() | {"epoch": 2}))
    assert answer.outcome == "refused"
    assert "checked against epoch 2, but the run is at epoch 1" in answer.why


def test_a_run_file_edited_at_rest_is_not_undone_by_a_pivot(run: PivotRun) -> None:
    """Its target was on record and not in the settings that the trainer reads: each life of it
    finished too early, until the run had failed."""
    supervisor = run.hold(150)
    run.ask("stop")
    run.end(supervisor)
    file = run.directory / contract.RUN_FILE
    file.write_text(file.read_text().replace("\nsteps = 400", "\nsteps = 500"))
    first = run.pivot()
    assert (first.returncode, "ask again" in first.stderr) == (1, True)
    assert run.pivot().returncode == 0
    assert tomllib.loads(file.read_text())["training"]["steps"] == 500
    run.open_gate()
    assert run.finish() == 0
    assert run.history_step() == 500


def test_a_rollback_needs_a_checkpoint(held: PivotRun) -> None:
    refused = held.rollback(123)
    assert refused.returncode == 2
    assert "there is no checkpoint of step 123; there are [100]" in refused.stderr
    answer = held.ask("pivot", **(held.proposal() | {"to_step": 123}))
    assert (answer.outcome, "no checkpoint of step 123" in answer.why) == ("refused", True)


def test_fc64_a_policy_counts_only_once_it_is_submitted(held: PivotRun) -> None:
    """A mixture file was looked at in every step, by its time of change: half-written edits ruled,
    and so did files that nobody had meant (mlc-ai/pith-train PR 83)."""
    ruling = held.directory / contract.POLICIES / "0001.toml"
    assert held.durable.epochs[0].policy == ruling.read_text()
    status = held.status()
    recorded = held.records()
    held.write_policy("songs")
    os.utime(held.policy_file)
    os.utime(ruling)
    edited = held.home / "edited.toml"
    edited.write_text(tomli_w.dumps(held.settings | {"policy": table()}))
    os.utime(held.config)
    refused = held.supervisor("start", "--config", str(edited))
    assert refused.returncode == 2
    # Whole, validated, versioned: all of it goes on record with its digest, or none of it.
    held.write_policy()
    content = held.proposal()
    assert content["policy"] == held.policy_file.read_text()
    again = config.parse_toml(content["settings"], "settings")
    assert content["policy_digest"] == config.policy_digest(again)
    assert (content["epoch"], content["parent"]) == (1, 1)
    assert held.records() == recorded
    assert held.status()["epoch"] == status["epoch"] == 1


def test_fc40_another_horizon_is_a_pivot_and_shown_with_both_values(run: PivotRun) -> None:
    """A run was extended with a larger total, and its learning rate was silently bent or zero
    (huggingface/transformers #18070): a horizon changes by a pivot only."""
    assert run.finish() == 0
    place = run.directory / contract.RUN_FILE
    assert config.load(place).training.schedule_steps == 400
    assert run.finish("--set", "training.steps=500") == 0
    assert config.load(place).training.schedule_steps == 400, "a longer run keeps its schedule"
    assert run.finish("--set", "training.schedule_steps=500") == 2
    change = "training.schedule_steps: recorded 400, requested 500"
    assert change in run.output()
    assert "only a pivot may" in run.output()
    run.policy_file.write_text("[training]\nschedule_steps = 500\n")
    done = run.pivot()
    assert (done.returncode, change in done.stdout) == (0, True)
    assert run.finish("--set", "training.steps=600") == 0
    settings = config.load(place)
    assert (settings.training.steps, settings.training.schedule_steps) == (600, 500)
    assert run.epochs_of_steps() == epochs((1, 500, 1), (501, 600, 2))


# --- what goes wrong ------------------------------------------------------------------------------


def spoil(run: PivotRun, *steps: int) -> None:
    """After they were read back and found good, so that only who reads them again finds out."""
    for step in steps:
        run.wait_for_record("checkpoint_verified", step=step)
        stem = contract.checkpoint_stem(step)
        flip_bit(run.directory / contract.CHECKPOINTS / f"{stem}.bin", 8 * 40)


def test_a_trainer_that_does_not_hear_the_word_to_exit_is_killed(run: PivotRun) -> None:
    run.set("stop", grace_seconds=0.5, signal_after_seconds=0.1)
    run.faults = "deaf@paused#1"
    supervisor = run.hold(150)
    assert run.pivoted(FAR) == "done"
    assert run.end(supervisor) == 0
    assert committed(run) == [(2, 200, 1)]
    ended = run.records("attempt_ended")[0]
    assert (ended["cause"], ended["counted"]) == ("killed", False)
    assert_whole(run)


def test_a_trainer_that_trains_on_instead_of_waiting_is_stopped_where_it_is(run: PivotRun) -> None:
    run.faults = "restless@paused#1"
    supervisor = run.hold(150)
    assert run.pivoted(230) == "done"
    run.open_gate()
    assert run.end(supervisor) == 0
    ((_, base_step, _),) = committed(run)
    assert 200 <= base_step <= 230
    assert run.epochs_of_steps() == epochs((1, base_step, 1), (base_step + 1, 400, 2))
    assert_whole(run)


def test_a_trainer_that_is_killed_while_it_waits(run: PivotRun) -> None:
    run.faults = "kill@paused#1"
    run.set("training", steps=2000)  # it takes none the time that a hello takes to be heard
    supervisor = run.hold(150)
    assert run.pivoted(FAR) == "done"
    assert run.end(supervisor) == 0
    ((_, base_step, _),) = committed(run)
    assert base_step % 100 == 0
    assert_whole(run, 2000)


def test_a_trainer_that_is_killed_before_its_boundary_pivots_at_the_next(run: PivotRun) -> None:
    supervisor = run.hold(150)
    with run.asked("p1", **run.proposal()) as reply:
        run.wait_for_pauses("p1")
        (spawned,) = run.records("attempt_spawned")
        kill(spawned["pid"])
        run.wait_for_pauses("p1", 2)
        run.open_gate()
        assert reply.poll(30_000)
        assert orjson.loads(reply.recv())["result"]["base_step"] == 200
        assert run.end(supervisor) == 0
    assert committed(run) == [(2, 200, 1)]
    assert run.file_status()["replay"]["verified_steps"] == 50
    assert_whole(run)


def test_a_supervisor_that_is_killed_before_the_switch_has_changed_nothing(run: PivotRun) -> None:
    """And the trainer, which was told to pause, is not left waiting for its successor's word."""
    run.environment["SABOTEUR_PAUSE"] = "600"
    supervisor = run.hold(150)
    content = run.proposal()
    with run.asked("p1", **content):
        run.wait_for_pauses("p1")
        run.kill_supervisor(supervisor)
    supervisor = run.start()
    run.wait_for_record("attempt_adopted")
    aborted = run.wait_for_record("pivot_aborted", request="p1")
    assert "nothing was changed" in aborted["why"]
    answers = [run.ask("pivot", "p1", **content) for _ in range(2)]
    assert [answer.outcome for answer in answers] == ["refused"] * 2
    run.open_gate()
    assert run.end(supervisor) == 0
    assert committed(run) == []
    assert run.epochs_of_steps() == epochs((1, 400, 1))
    assert_whole(run)


def test_a_request_that_was_carried_out_is_never_carried_out_again(run: PivotRun) -> None:
    supervisor = run.hold(150)
    content = run.proposal()
    with run.asked("p1", **content) as reply:
        run.wait_for_pauses("p1")
        run.gate(230)
        assert reply.poll(30_000)
        first = orjson.loads(reply.recv())
    run.wait_for_status(step=230)
    run.kill_supervisor(supervisor)
    supervisor = run.start()
    run.wait_for_record("attempt_adopted")
    again = run.ask("pivot", "p1", **content)
    assert (again.outcome, again.result) == ("done", first["result"])
    run.open_gate()
    assert run.end(supervisor) == 0
    assert committed(run) == [(2, 200, 1)]
    assert_whole(run)


def test_a_new_policy_that_never_gets_going_fails_and_offers_the_way_back(run: PivotRun) -> None:
    run.faults = "exit78@load#2"
    supervisor = run.hold(150)
    pivoted = run.pivot(gate=FAR)
    assert run.end(supervisor) == 1
    assert "epoch 2 begins with step 201" in pivoted.stdout
    assert pivoted.returncode == 1
    status = run.file_status()
    assert status["phase"] == "failed"
    for told in (status["reason"], pivoted.stderr):
        assert "the trainer refused its configuration" in told
        assert "`supervisor rollback --to-step 200` goes back to the policy before it" in told
    assert run.rollback(200).returncode == 0
    assert run.finish() == 0
    assert run.epochs_of_steps() == epochs((1, 200, 1), (201, 400, 3))
    assert {entry.arm for entry in run.entries() if entry.epoch == 3} == set(OLD_ARMS)


def test_below_the_base_each_step_runs_under_the_epoch_that_owned_it(run: PivotRun) -> None:
    supervisor = run.hold(150)
    assert run.pivoted(350) == "done"
    run.wait_for_status(step=350)
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    assert run.end(supervisor) == 0
    before = run.ledger_path.read_bytes()
    spoil(run, 200, 300, 350)
    run.open_gate()
    assert run.finish() == 0
    started = [
        (r["resume_step"], r["epoch"], r["until_step"]) for r in run.records("attempt_started")
    ]
    assert started == [(0, 1, None), (200, 2, None), (100, 1, 200), (200, 2, None)]
    assert run.epochs_of_steps() == epochs((1, 200, 1), (201, 400, 2))
    status = run.file_status()
    assert status["replay"]["verified_steps"] == 250
    assert status["replay"]["diverged_steps"] == 0
    entries = before.rindex(b"}") + 1
    assert run.ledger_path.read_bytes()[:entries] == before[:entries]
    assert run.steps() == list(range(1, 401))
    assert run.manifest(200).epoch == 1
    state = run.sidecar(contract.state_name("run"))
    assert (state["step"], state["epoch"]) == (400, 2)


def test_the_owner_of_a_step_after_many_pivots() -> None:
    """Against the plain meaning: the newest epoch that is still on the way, branch by branch."""
    made = Durable(
        epoch=5,
        epochs=(
            Epoch(1, 0, 1, ""),
            Epoch(2, 200, 1, ""),
            Epoch(3, 300, 2, ""),
            Epoch(4, 100, 1, ""),  # a rollback: 2 and 3 are left behind
            Epoch(5, 50, 4, ""),  # and one from a checkpoint below its own parent's base
        ),
    )
    for step in range(400):
        number, until = (5, None) if step >= 50 else (1, 50)
        owner, found = made.owner(step)
        assert (owner.number, found) == (number, until), step


# --- with the real trainer ------------------------------------------------------------------------


@pytest.fixture
def trained(run_home: Path) -> Iterator[TrainedRun]:
    long = {"steps": 10**5, "schedule": "cosine"}
    with contextlib.closing(TrainedRun(run_home, training=long, checkpoint={"every": 20})) as run:
        yield run


def policy_of(run: TrainedRun, name: str, **tables: Any) -> Path:
    file = run.home / name
    file.write_text(tomli_w.dumps(tables))
    return file


def test_the_real_trainer_trains_on_under_another_policy(trained: TrainedRun) -> None:
    """A missing file is refused while it trains; then an arm leaves, and no step is lost."""
    run = trained
    supervisor = run.start()
    run.wait_for_record("checkpoint_verified", step=20)
    prose = str(run.home / "prose.jsonl")
    missing = {"arms": [{"name": "prose", "files": [str(run.home / "none.jsonl")]}]}
    place = ("pivot", str(run.directory), "--policy")
    refused = run.supervisor(*place, str(policy_of(run, "missing.toml", policy=missing)))
    assert refused.returncode == 2
    assert "none.jsonl" in refused.stderr
    assert run.records("pivot_intended") == []
    only = {"arms": [{"name": "prose", "files": [prose]}]}
    file = policy_of(run, "only.toml", policy=only, training={"learning_rate": 0.002})
    done = run.supervisor(*place, str(file), "--json")
    assert done.returncode == 0, done.stderr
    base_step = orjson.loads(done.stdout)["base_step"]
    assert run.status()["phase"] == "running"
    run.wait_for_record("checkpoint_verified", step=base_step + 20)
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    assert run.end(supervisor) == 0
    history = run.history()
    last = len(history)
    assert [entry.step for entry in history] == list(range(1, last + 1))
    assert base_step % 20 == 0
    assert last >= base_step + 20
    assert {entry.arm for entry in history if entry.epoch == 2} == {"prose"}
    assert {entry.epoch for entry in history[base_step:]} == {2}
    targets = [entry.targets_seen or 0 for entry in history]
    assert targets == sorted(targets), "what was trained on is counted through"
    manifest = run.manifest(last)
    assert list(manifest.state["arms"]) == ["prose"]
    assert manifest.state["updates"] == last
    ruling = [entry.learning_rate or 0.0 for entry in history]
    assert max(ruling[base_step:]) <= 0.002 < max(ruling[:base_step])
    proven = run.supervisor("verify", str(run.directory))
    assert proven.returncode == 0, proven.stdout
