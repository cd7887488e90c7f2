"""A new run out of a checkpoint of another: what it has, what the parent keeps, what may fail."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpoint_kit
import pytest
import runs_kit
from exactness_kit import TrainedRun, content_of
from faults import Faults
from hypothesis import given, strategies as st
from ledger_kit import holds
from property_kit import cases, scratch

from supervisor import (
    checkpoints,
    client,
    config,
    contract,
    events as ev,
    fork as forking,
    journal,
    ledger,
    reexecution,
)
from supervisor.contract import Entry, Json
from supervisor.durable import copy_file
from supervisor.readback import Damaged, verify
from supervisor.rundir import RunError, list_runs, take_lock
from supervisor.state import Durable, fold


def durable_of(directory: Path) -> Durable:
    records, torn = journal.read(directory / contract.JOURNAL_FILE)
    assert torn is None
    return fold(filter(None, map(ev.record_from_json, records)))


def records_of(directory: Path, kind: str) -> list[Json]:
    records, _ = journal.read(directory / contract.JOURNAL_FILE)
    return [record for record in records if record["record"] == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> runs_kit.Run:
    """Thirty steps of the saboteur, with checkpoints at 10, 20 and 30."""
    run = runs_kit.Run(tmp_path_factory.mktemp("finished"), "parent")
    assert run.finish() == 0
    return run


@pytest.fixture
def parent(finished: runs_kit.Run, run_home: Path) -> runs_kit.Run:
    """A copy of the finished run that a test may work on."""
    run = runs_kit.Run(run_home, "parent")
    unseen = shutil.ignore_patterns("sockets")
    shutil.copytree(finished.directory, run.directory, ignore=unseen)
    (run.directory / "sockets").mkdir()
    return run


def by_name(parent: runs_kit.Run, *arguments: str) -> Any:
    return parent.supervisor("fork", *arguments)


# --- what a fork is -------------------------------------------------------------------------------


def test_a_fork_has_the_history_up_to_its_step_and_an_identity_of_its_own(
    parent: runs_kit.Run,
) -> None:
    done = by_name(parent, "parent", "child", "--at-step", "20", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    child = parent.home / "child"
    assert (told["run"], told["directory"], told["step"]) == ("child", str(child), 20)
    ours, theirs = (config.load(path / "run.toml") for path in (child, parent.directory))
    assert ours.run.id == told["run_id"] != theirs.run.id == told["parent_run_id"]
    changed = {change.key for change in config.compare(theirs, ours).identity}
    assert changed == {"run.name", "run.id"}
    entries = ledger.read_entries(child / "child.loss.json")[0]
    assert [entry.to_json() for entry in entries] == parent.rows()[:20]
    assert told["ledger_entries"] == 20
    assert holds(child / "child.loss.json", 20, told["ledger_sha256"])
    for ending in (".bin", ".json"):
        name = f"checkpoints/step_000020{ending}"
        assert (child / name).read_bytes() == (parent.directory / name).read_bytes()
        assert (child / name).stat().st_ino != (parent.directory / name).stat().st_ino
    assert [path.name for path in (child / "checkpoints").iterdir()] == [
        path.name for path in (child / "checkpoints").glob("step_000020.*")
    ]
    assert (child / "policies/0001.toml").read_bytes() == (
        parent.directory / "policies/0001.toml"
    ).read_bytes()


def test_its_journal_says_where_it_comes_from(parent: runs_kit.Run) -> None:
    forking.fork(parent.directory, 20, parent.home / "child")
    child = parent.home / "child"
    kinds = [record["record"] for record in journal.read(child / "journal.jsonl")[0]]
    assert kinds == [
        "run_created",
        "run_forked",
        "checkpoint_committed",
        *["file_stored"] * 2,
    ]
    origin = durable_of(parent.directory)
    (forked,) = records_of(child, "run_forked")
    assert forked["parent_directory"] == str(parent.directory)
    assert forked["lineage"] == [[origin.run_id, 20]]
    assert (forked["step"], forked["attempt"]) == (20, 1)
    (committed,) = records_of(child, "checkpoint_committed")
    (before,) = [r for r in parent.records("checkpoint_committed") if r["step"] == 20]
    for field in ("step", "attempt", "reason", "requests", "binary_digest"):
        assert committed[field] == before[field]
    assert committed["ledger_entries"] == forked["ledger_entries"] == 20
    assert committed["ledger_sha256"] == forked["ledger_sha256"]
    stored = {record["file"]: record["sha256"] for record in records_of(child, "file_stored")}
    assert stored == {
        name: contract.digest((child / name).read_bytes())
        for name in ("run.toml", "policies/0001.toml")
    }


def test_it_goes_on_after_its_step_and_repeats_what_the_parent_did(parent: runs_kit.Run) -> None:
    forking.fork(parent.directory, 20, parent.home / "child")
    done = parent.supervisor("start", "--config", str(parent.home / "child" / "run.toml"))
    assert done.returncode == 0, done.stderr
    rows: list[Json] = json.loads((parent.home / "child" / "child.loss.json").read_bytes())
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert [row["loss"] for row in rows] == [row["loss"] for row in parent.rows()]
    assert {row["attempt"] for row in rows[20:]} == {2}
    (started,) = records_of(parent.home / "child", "attempt_started")
    assert (started["attempt"], started["resume_step"]) == (2, 20)


def test_a_fork_of_a_trained_run_is_exact(run_home: Path) -> None:
    """The real trainer: receipts, weights, moments and the whole state at the end are those of the
    parent, from a checkpoint of the parent's own id."""
    run = TrainedRun(run_home, "parent").trained()
    forking.fork(run.directory, 8, run_home / "child")
    child = TrainedRun.__new__(TrainedRun)
    child.__dict__.update(run.__dict__)
    child.name, child.directory = "child", run_home / "child"
    done = run.supervisor("start", "--config", str(child.directory / "run.toml"))
    assert done.returncode == 0, done.stderr
    assert len(child.history()) == len(run.history()) == 12
    for ours, theirs in zip(child.history(), run.history(), strict=True):
        assert contract.differing_fields(ours, theirs) == ()
    assert [entry.attempt for entry in child.history()] == [1] * 8 + [2] * 4
    assert child.checkpoints() == [8, 12]
    assert child.member(12, ".bin").read_bytes() == run.member(12, ".bin").read_bytes()
    one, other = child.manifest(12), run.manifest(12)
    for component in contract.STATE_COMPONENTS:
        if component != "configuration":
            assert one.state[component] == other.state[component], component
    assert one.lineage == ((other.run_id, 8),)
    # What the copied steps ran on came along, so that a difference could be explained.
    training = json.loads((child.directory / "training.json").read_bytes())
    assert list(training) == ["attempt-0001", "attempt-0002"]


def test_a_fork_of_a_fork_knows_all_its_ancestors(parent: runs_kit.Run) -> None:
    first = forking.fork(parent.directory, 20, parent.home / "first")
    assert parent.supervisor("start", "--config", f"{first.directory}/run.toml").returncode == 0
    origin = durable_of(parent.directory).run_id
    second = forking.fork(first.directory, 30, parent.home / "second")
    assert durable_of(second.directory).lineage == ((origin, 20), (first.run_id, 30))
    early = forking.fork(first.directory, 20, parent.home / "early")
    assert durable_of(early.directory).lineage == ((origin, 20), (first.run_id, 20))
    assert durable_of(early.directory).attempt == 2


POLICY = """
[training]
learning_rate = 0.02

[policy]
kind = "static"

[[policy.arms]]
name = "prose"
files = ["{home}/prose.jsonl"]

[[policy.arms]]
name = "code"
files = ["{home}/code/*.txt"]
weight = 3.0
"""


def test_forks_and_re_executions_know_which_policy_ruled_when(run_home: Path) -> None:
    """Epoch 2 begins with step 9. Each side of it is executed again under its own policy; a fork at
    the pivot goes on with the new one as the parent did, a fork before it with the old one."""
    run = TrainedRun(run_home, "parent", training={"steps": 8}).trained()
    policy = run_home / "policy.toml"
    policy.write_text(POLICY.format(home=run_home))
    assert run.supervisor("pivot", str(run.directory), "--policy", str(policy)).returncode == 0
    longer = ["--set", "training.steps=12"]
    started = run.supervisor("start", "--config", f"{run.directory}/run.toml", *longer)
    assert started.returncode == 0, started.stderr
    assert [entry.epoch for entry in run.history()] == [1] * 8 + [2] * 4
    for start, stop in ((4, 8), (8, 12)):
        report = reexecution.execute(reexecution.plan(run.directory, start, stop), run.variables())
        assert (report.difference, report.checkpoints_compared) == (None, [stop])

    early = forking.fork(run.directory, 4, run_home / "early")
    assert durable_of(early.directory).epoch == 1
    assert config.load(early.directory / "run.toml").training.learning_rate == 0.01
    made = forking.fork(run.directory, 8, run_home / "child")
    assert durable_of(made.directory).epoch == 2
    assert [one.base_step for one in durable_of(made.directory).epochs] == [0, 8]
    done = run.supervisor("start", "--config", f"{made.directory}/run.toml")
    assert done.returncode == 0, done.stderr
    rows = ledger.read_entries(made.directory / "child.loss.json")[0]
    for ours, theirs in zip(rows, run.history(), strict=True):
        assert contract.differing_fields(ours, theirs) == ()
        assert ours.epoch == theirs.epoch
    for place in (made.directory, early.directory):
        verified = run.supervisor("verify", str(place))
        assert verified.returncode == 0, verified.stdout


def test_no_ancestor_counts_beyond_the_fork() -> None:
    parent = Durable(run_id="parent", lineage=(("older", 10), ("grandparent", 40)))
    assert forking._lineage(parent, 20) == (("older", 10), ("grandparent", 20), ("parent", 20))


# --- the parent -----------------------------------------------------------------------------------


def test_the_parent_keeps_the_checkpoint_that_was_forked(parent: runs_kit.Run) -> None:
    before = content_of(parent.directory)
    made = forking.fork(parent.directory, 10, parent.home / "child")
    after = content_of(parent.directory)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"journal.jsonl", "lock"}
    (pinned,) = parent.records("checkpoint_pinned")
    assert (pinned["step"], pinned["why"]) == (10, f"fork child ({made.run_id})")
    forking.fork(parent.directory, 10, parent.home / "another")
    assert len(parent.records("checkpoint_pinned")) == 1
    pins = durable_of(parent.directory).pins
    assert checkpoints.retain(parent.directory, 2, 0, pins, [10, 20, 30]) == []
    assert checkpoints.retain(parent.directory, 2, 0, (), [10, 20, 30]) == [10]


def test_a_living_parent_is_asked_for_the_pin(run_home: Path) -> None:
    parent = runs_kit.Run(run_home, "parent", checkpoint={"keep_last": 2})
    try:
        supervisor = parent.hold(25)
        parent.wait_for_record("checkpoint_verified", step=20)
        done = by_name(parent, "child", "--at-step", "10")
        assert done.returncode == 0, done.stderr
        assert "to train on: supervisor start --config" in done.stdout
        parent.open_gate()
        assert parent.end(supervisor) == 0
    finally:
        parent.close()
    assert [record["step"] for record in parent.records("checkpoint_pinned")] == [10]
    assert parent.checkpoints() == [10, 20, 30]
    assert len(ledger.read_entries(run_home / "child" / "child.loss.json")[0]) == 10


def test_a_parent_whose_lock_somebody_holds_without_a_socket_is_not_written(
    parent: runs_kit.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question that nobody answered and the lock, a supervisor may have started."""
    directory = forking._read_parent(parent.directory).directory
    lock_fd = take_lock(directory)
    before = content_of(parent.directory)
    try:
        with pytest.raises(RunError, match=r"already supervised by process \d+ .*ask again"):
            forking._pin_unsupervised(directory, 10, "why")
    finally:
        os.close(lock_fd)
    assert content_of(parent.directory) == before


def test_a_refused_pin_stops_the_fork(
    parent: runs_kit.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, id: str, **__: Any) -> client.Answer:
        return client.Answer(id, "refused", "no checkpoint of step 10", {})

    monkeypatch.setattr(client, "ask", refuse)
    with pytest.raises(RunError, match=r"could not be pinned: no checkpoint of step 10"):
        forking.fork(parent.directory, 10, parent.home / "child")
    assert not (parent.home / "child").exists()


@pytest.mark.parametrize("limit", [2, 3, 5, 11])
def test_fc19_whatever_is_pinned_the_newest_verified_stays(limit: int) -> None:
    """A limit of one deleted all, and swapping the best with the last made the last the victim
    (huggingface/transformers PR 25136, PR 11748)."""
    steps = range(100, 1200, 100)
    for pinned in steps:
        for newest in steps:
            removed = checkpoints.plan_retention(steps, limit, 0, {pinned}, newest)
            assert newest not in removed
            assert pinned not in removed
            assert all(step < newest for step in removed)
            kept = [step for step in steps if step <= newest and step not in removed]
            assert len(set(kept) - {pinned}) >= min(limit, len(kept)) - 1


# --- selection follows lineage --------------------------------------------------------------------


@cases(150)
@given(
    step=st.integers(0, 60),
    owner=st.sampled_from(["run-a", "parent", "grandparent", "stranger"]),
)
def test_a_checkpoint_counts_only_up_to_where_its_run_was_left(step: int, owner: str) -> None:
    with scratch() as directory:
        checkpoint_kit.write_checkpoint(directory, step, run_id=owner)
        (found,) = checkpoints.find(directory)
        limits = {"run-a": 60, "parent": 40, "grandparent": 20, "stranger": -1}
        lineage = (("grandparent", 20), ("parent", 40))
        if step <= limits[owner]:
            assert verify(found, "run-a", lineage).step == step
        else:
            with pytest.raises(Damaged, match=f"step {step} of run {owner}, which is neither this"):
                verify(found, "run-a", lineage)


def test_a_checkpoint_of_a_left_branch_is_set_aside_even_if_its_number_is_larger(
    parent: runs_kit.Run,
) -> None:
    """The parent's step 30, and step 25 of a stranger, find their way into the fork's directory."""
    child = forking.fork(parent.directory, 20, parent.home / "child").directory
    for ending in (".bin", ".json"):
        name = f"checkpoints/step_000030{ending}"
        shutil.copy(parent.directory / name, child / name)
    checkpoint_kit.write_checkpoint(child / "checkpoints", 25, run_id="stranger")
    durable = durable_of(child)
    selection = checkpoints.select(child, durable.run_id, durable.lineage, time=1.0)
    assert selection.chosen is not None
    assert selection.chosen.step == 20
    assert [rejected.step for rejected in selection.rejected] == [30, 25]
    assert "nor a step of an ancestor" in selection.rejected[0].reason
    done = parent.supervisor("start", "--config", str(child / "run.toml"))
    assert done.returncode == 0, done.stderr
    (started,) = records_of(child, "attempt_started")
    assert started["resume_step"] == 20


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parent", "child", "--at-step", "15"], "no checkpoint of step 15; there are: 10, 20, 30"),
        (["nobody", "child", "--at-step", "20"], "no run 'nobody'"),
        (["parent", "parent", "--at-step", "20"], "exists already"),
        (["parent", "not a name", "--at-step", "20"], "run.name = "),
        (["parent", "child", "more", "--at-step", "20"], "expected [RUN] NEWRUN, got 3 names"),
        (["parent", "child"], "Missing option '--at-step'"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_before_anything_is_written(
    parent: runs_kit.Run, arguments: list[str], message: str
) -> None:
    before = content_of(parent.home)
    done = by_name(parent, *arguments)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert content_of(parent.home) == before


def test_a_damaged_checkpoint_is_not_forked(parent: runs_kit.Run) -> None:
    checkpoint_kit.flip_bit(parent.directory / "checkpoints/step_000020.bin", 100)
    with pytest.raises(RunError, match="checkpoint 20 is damaged"):
        forking.fork(parent.directory, 20, parent.home / "child")
    assert parent.records("checkpoint_pinned") == []


def test_a_history_with_a_hole_is_not_forked(parent: runs_kit.Run) -> None:
    entries = [Entry(row["step"], row["loss"]) for row in parent.rows() if row["step"] != 7]
    parent.ledger_path.unlink()
    writer = ledger.Ledger.open(parent.ledger_path)
    writer.append(entries)
    writer.close()
    with pytest.raises(RunError, match=r"no unbroken history up to step 20; it has 19 entries"):
        forking.fork(parent.directory, 20, parent.home / "child")


def test_superseded_entries_are_left_behind(parent: runs_kit.Run) -> None:
    """Steps 15 to 20 were executed twice: only what counts comes along."""
    entries = [Entry(row["step"], row["loss"], attempt=1) for row in parent.rows()]
    again = [Entry(step, 9.0 + step, attempt=2) for step in range(15, 31)]
    parent.ledger_path.unlink()
    writer = ledger.Ledger.open(parent.ledger_path)
    writer.append([*entries, *again])
    writer.close()
    made = forking.fork(parent.directory, 20, parent.home / "child")
    copied = ledger.read_entries(made.directory / "child.loss.json")[0]
    assert copied == [*entries[:14], *again[:6]]


# --- what a kill or a full disk leaves ------------------------------------------------------------


def test_a_directory_is_a_place_too_and_its_name_the_run(
    parent: runs_kit.Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("far") / "deep" / "other"
    done = by_name(parent, str(parent.directory), str(place), "--at-step", "30")
    assert done.returncode == 0, done.stderr
    assert config.load(place / "run.toml").run.name == "other"
    assert (place / "other.loss.json").exists()


def test_a_fork_exists_as_a_whole_or_not_at_all(
    parent: runs_kit.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each system call that writes fails once; each time the parent's names are as they were, but
    for the pin, and nothing of the child is there. In the end nothing is left to fail."""
    child = parent.home / "child"

    def nobody(*_: Any, **__: Any) -> client.Answer:
        raise client.NoSupervisor("nobody")

    monkeypatch.setattr(client, "ask", nobody)  # which would wait a moment for somebody
    faults = Faults(monkeypatch)
    for number in range(200):
        faults.failed = 0
        faults.fail_at(number, 28)
        with suppress(OSError):
            forking.fork(parent.directory, 20, child)
        if faults.failed == 0:
            break
        if child.exists():
            # Only the last sync can fail after the rename: the run is whole then.
            assert len(ledger.read_entries(child / "child.loss.json")[0]) == 20
            shutil.rmtree(child)
        assert list_runs(parent.home) == [parent.directory]
        assert list(parent.home.glob(".tmp-fork-*")) == []
    else:
        pytest.fail("it never came to an end")
    faults.heal()
    assert number > 15
    assert durable_of(child).lineage == ((durable_of(parent.directory).run_id, 20),)


def test_the_copy_is_proven_before_the_run_exists(
    parent: runs_kit.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = copy_file

    def copy(source: Path, target: Path) -> None:
        original(source, target)
        if target.suffix == ".bin":
            checkpoint_kit.flip_bit(target, 200)

    monkeypatch.setattr(forking, "copy_file", copy)
    with pytest.raises(RunError, match="checkpoint 20 is damaged"):
        forking.fork(parent.directory, 20, parent.home / "child")
    assert list_runs(parent.home) == [parent.directory]
    assert list(parent.home.glob(".tmp-fork-*")) == []


def test_a_name_that_is_taken_meanwhile_is_left_alone(
    parent: runs_kit.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = parent.home / "child"
    original = forking._write_journal

    def write(*arguments: Any) -> None:
        original(*arguments)
        child.mkdir()

    monkeypatch.setattr(forking, "_write_journal", write)
    with pytest.raises(RunError, match="somebody else has made it meanwhile"):
        forking.fork(parent.directory, 20, child)
    assert list(child.iterdir()) == []
