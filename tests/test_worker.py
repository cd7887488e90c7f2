"""The worker thread and what it is given: jobs in order, failures as answers, commits twice."""

from __future__ import annotations

import errno
import select
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from faults import Faults
from ledger_kit import holds
from runs_kit import wait_until

from supervisor import events as ev, journal
from supervisor.commit import RETRY_SECONDS, Commit, Pipeline
from supervisor.contract import Entry
from supervisor.journal import Journal
from supervisor.ledger import Ledger
from supervisor.worker import Outcome, Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def outcomes(worker: Worker, count: int) -> list[Outcome]:
    found: list[Outcome] = []

    def all_there() -> bool:
        found.extend(worker.outcomes())
        return len(found) >= count

    wait_until(all_there, f"{count} outcomes")
    return found


def test_jobs_are_done_in_order_by_another_thread(worker: Worker) -> None:
    def job(number: int) -> tuple[int, str]:
        return number, threading.current_thread().name

    tickets = [worker.submit(partial(job, number)) for number in range(50)]
    found = outcomes(worker, 50)
    assert [one.ticket for one in found] == tickets == list(range(1, 51))
    assert [one.result for one in found] == [(n, "sync-worker") for n in range(50)]
    assert worker.outcomes() == []


def test_the_loop_is_woken(worker: Worker) -> None:
    poller = select.poll()
    poller.register(worker.fileno(), select.POLLIN)
    assert poller.poll(0) == []
    worker.submit(lambda: None)
    assert poller.poll(5000)
    assert len(worker.outcomes()) == 1
    assert poller.poll(0) == []


def test_a_failure_of_the_machine_is_an_answer_and_the_next_job_is_done(worker: Worker) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "no space")

    worker.submit(full)
    worker.submit(lambda: "done")
    failed, done = outcomes(worker, 2)
    assert failed.error is not None
    assert failed.error.errno == errno.ENOSPC
    assert (done.result, done.error) == ("done", None)


def test_a_bug_ends_the_life_of_the_loop(worker: Worker) -> None:
    def bug() -> None:
        raise AssertionError("this cannot happen")

    worker.submit(bug)
    worker.submit(lambda: "never")

    with pytest.raises(AssertionError, match="this cannot happen"):
        wait_until(worker.outcomes, "the bug in the loop's own thread")
    assert worker.outcomes() == []


def test_of_the_hints_that_wait_only_the_newest_is_done(worker: Worker) -> None:
    """One a second while the disk syncs for an hour is no reason to write thousands."""
    begun, release = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert release.wait(60)

    done: list[int] = []
    worker.submit(slow)
    assert begun.wait(60)
    for number in range(1000):
        worker.submit_hint(partial(done.append, number))
    release.set()
    worker.submit(lambda: None)
    outcomes(worker, 2)
    assert done == [999]
    worker.submit_hint(partial(done.append, 1000))
    worker.submit(lambda: None)
    outcomes(worker, 1)
    assert done == [999, 1000]


def test_close_finishes_what_was_submitted() -> None:
    worker = Worker()
    done: list[int] = []
    gate = threading.Event()
    worker.submit(gate.wait)
    for number in range(20):
        worker.submit(partial(done.append, number))
    gate.set()
    worker.close()
    assert done == list(range(20))


# --- the commit, its chief job --------------------------------------------------------------------


class Files:
    def __init__(self, directory: Path) -> None:
        self.ledger = Ledger.open(directory / "run.loss.json")
        self.journal, _ = Journal.open(directory / "journal.jsonl")
        self.sidecar = directory / "run.samples.json"

    def commit(self, *records: ev.Record, recorded: tuple[int, int] | None = None) -> Commit:
        timed = [(record, 100.0 + number) for number, record in enumerate(records)]
        files = {self.sidecar: b"[]\n"}
        return Commit(1, self.ledger, self.journal, timed, files, recorded)

    def kinds(self) -> list[str]:
        records, torn = journal.read(self.journal.path)
        assert torn is None
        return [record["record"] for record in records]

    def close(self) -> None:
        self.ledger.close()
        self.journal.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    made.close()


SAVED = ev.CheckpointCommitted(2, 1, "cadence", [], "d")


def test_the_order_of_durability(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.ledger.append([Entry(1, 1.0), Entry(2, 1.0)])
    faults = Faults(monkeypatch, ("fdatasync", "fsync", "rename"))
    files.commit(SAVED, ev.Wished("run", ""), recorded=(2, 0))()
    order = [name for _, name in faults.calls if not name.startswith(".tmp")]
    assert order[:3] == ["run.loss.json", "journal.jsonl", "run.samples.json"]
    assert files.kinds() == ["checkpoint_committed", "wished"]
    assert files.sidecar.read_bytes() == b"[]\n"


def test_a_checkpoint_is_bound_to_the_entry_of_its_step(files: Files) -> None:
    files.ledger.append([Entry(1, 1.0), Entry(2, 1.0), Entry(3, 1.0)])
    unbound = ev.CheckpointCommitted(0, 1, "operator", [], "d")
    files.commit(SAVED, unbound, recorded=(3, 0))()
    (bound, free), _ = journal.read(files.journal.path)
    assert bound["ledger_entries"] == 2
    assert holds(files.ledger.path, 2, bound["ledger_sha256"])
    assert (free["ledger_entries"], free["ledger_sha256"]) == (None, None)


@pytest.mark.parametrize("name", ["pwrite", "fdatasync", "fsync", "rename"])
def test_a_commit_that_failed_is_run_again_and_nothing_is_there_twice(
    files: Files, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever call the disk refuses, and however often."""
    files.ledger.append([Entry(1, 1.0), Entry(2, 1.0)])
    faults = Faults(monkeypatch)
    commit = files.commit(SAVED, ev.Wished("run", ""), ev.RunFinished(2), recorded=(2, 0))
    failures = 0
    for number in range(20):
        faults.fail_at(number % 4, errno.EIO, only=name)
        try:
            commit()
        except OSError:
            failures += 1
        else:
            break
    faults.heal()
    commit()
    assert failures > 0 or name == "fdatasync"  # a first failed sync is put right at once
    assert files.kinds() == ["checkpoint_committed", "wished", "run_finished"]
    assert files.sidecar.read_bytes() == b"[]\n"


def test_a_sidecar_that_a_full_disk_refuses_holds_up_no_record(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = files.sidecar.with_name("run.toml")
    content = {files.sidecar: b"[]\n", other: b"[run]\n"}
    timed: list[tuple[ev.Record, float]] = [(ev.Wished("stop", "r"), 1.0)]
    commit = Commit(1, files.ledger, files.journal, timed, content, None, [files.sidecar])
    faults = Faults(monkeypatch)
    faults.fail_always(errno.ENOSPC, only="rename")
    with pytest.raises(OSError, match="ENOSPC in rename"):
        commit()  # run.toml is read by the next trainer: it is no hint
    assert commit.late == {files.sidecar: b"[]\n"}
    assert "run.samples.json is out of date" in commit.problem
    assert files.kinds() == ["wished"]
    faults.heal()
    commit()
    assert other.read_bytes() == b"[run]\n"
    assert not files.sidecar.exists(), "the pipeline writes it with a later commit"


class Sidecars:
    """As much of a recorder as a pipeline needs."""

    unsynced = False

    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}

    def take_unsynced(self) -> None:
        return None

    def take_files(self) -> dict[Path, bytes]:
        files, self.files = self.files, {}
        return files


def test_a_late_sidecar_is_tried_again_and_newer_content_wins(
    files: Files, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Sidecars()
    other = files.sidecar.with_name("run.state.json")
    hints = (files.sidecar, other)
    pipeline = Pipeline(files.ledger, files.journal, worker, cast(Any, recorder), hints)

    def commit(now: float) -> None:
        pipeline.start(now)
        (outcome,) = outcomes(worker, 1)
        pipeline.ended(outcome.ticket, outcome.error, now)

    faults = Faults(monkeypatch)
    faults.fail_always(errno.ENOSPC, only="rename")
    recorder.files = {files.sidecar: b"old", other: b"state"}
    commit(10.0)
    assert pipeline.late == {files.sidecar: b"old", other: b"state"}
    assert pipeline.idle, "nothing waits for it"
    assert pipeline.retry_at == 10.0 + RETRY_SECONDS
    faults.heal()
    recorder.files = {files.sidecar: b"new"}
    commit(10.5)
    assert pipeline.late == {other: b"state"}
    assert "is out of date" in pipeline.trouble
    pipeline.try_late(10.6)
    (outcome,) = outcomes(worker, 1)
    pipeline.ended(outcome.ticket, outcome.error, 10.6)
    assert (pipeline.late, pipeline.trouble) == ({}, "")
    assert (files.sidecar.read_bytes(), other.read_bytes()) == (b"new", b"state")
    pipeline.start(99.0)
    assert pipeline.empty


def test_a_type_of_job(worker: Worker, files: Files) -> None:
    job: Callable[[], None] = files.commit(ev.Wished("stop", "r"))
    worker.submit(job)
    (outcome,) = outcomes(worker, 1)
    assert outcome.error is None
    assert files.kinds() == ["wished"]
