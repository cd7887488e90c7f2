"""Receipts into history: what is taken in, how often, and what happens when the disk refuses."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Faults

from supervisor import contract, events as ev, recorder
from supervisor.contract import (
    AuditLine,
    Entry,
    EnvironmentLine,
    EvaluationLine,
    ExitLine,
    Json,
    Receipt,
)
from supervisor.ledger import Ledger, read_entries
from supervisor.recorder import Gauge, Recorder
from supervisor.rundir import RunDirectory
from supervisor.state import fold


def entry(step: int, attempt: int = 1, loss: float | None = None, **more: Any) -> Entry:
    value = 1.0 + step / 8 if loss is None else loss
    return Entry(step, value, time=100.0 + step, attempt=attempt, epoch=1, **more)


class Desk:
    """A recorder with its ledger, and a pen that writes receipts as a trainer does."""

    def __init__(self, path: Path, samples_keep: int = 200) -> None:
        self.directory = RunDirectory(path, "run")
        self.directory.create()
        self.samples_keep = samples_keep
        self.open()

    def open(self) -> None:
        self.ledger = Ledger.open(self.directory.ledger)
        self.recorder = Recorder(self.directory, self.ledger, self.samples_keep)

    def reopen(self) -> None:
        """As after a death of the supervisor: what was not committed is forgotten."""
        self.close()
        self.open()

    def close(self) -> None:
        self.recorder.close()
        self.ledger.close()

    def path(self, attempt: int) -> Path:
        return self.directory.receipts / f"{contract.attempt_stem(attempt)}.jsonl"

    def write(self, attempt: int, *receipts: Receipt | bytes) -> None:
        with self.path(attempt).open("ab") as file:
            for one in receipts:
                file.write(one if isinstance(one, bytes) else contract.encode_receipt(one))

    def pump(self) -> str:
        """Takes in all there is; the first problem, or nothing."""
        for _ in range(100):
            problem = self.recorder.pump()
            if problem or not self.recorder.behind:
                return problem
        raise AssertionError("it never came to an end")

    def first_step(self) -> None:
        """Attempt 1 has executed step 1, which is in the ledger for good."""
        self.recorder.follow(1, 0, 1)
        self.write(1, entry(1))
        self.pump()
        self.commit()

    def commit(self) -> list[ev.Record]:
        """What the daemon's commit does; returns the records it journals."""
        if self.recorder.take_unsynced() is not None:
            self.ledger.sync()
        for path, content in self.recorder.take_files().items():
            path.write_bytes(content)
        return self.recorder.take_records()

    def unsynced(self) -> bool:
        return self.recorder.unsynced

    def idle(self) -> bool:
        return self.recorder.idle

    def steps(self) -> list[tuple[int, int | None]]:
        entries, torn = read_entries(self.directory.ledger)
        assert torn is None
        return [(one.step, one.attempt) for one in entries]

    def samples(self) -> list[Json]:
        found: list[Json] = json.loads(self.directory.samples.read_bytes())
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "run")
    yield made
    made.close()


# --- entries --------------------------------------------------------------------------------------


def test_steps_are_appended_as_they_come(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    assert desk.recorder.at_end(), "there is no file yet"
    assert desk.pump() == ""
    desk.write(1, entry(1), entry(2))
    assert not desk.recorder.at_end()
    assert desk.pump() == ""
    assert desk.unsynced()
    assert desk.recorder.take_unsynced() == (2, 0)
    assert desk.recorder.take_unsynced() is None
    assert not desk.unsynced()
    desk.write(1, entry(3))
    desk.pump()
    assert desk.steps() == [(1, 1), (2, 1), (3, 1)]


def test_a_line_may_arrive_in_pieces(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    line = contract.encode_receipt(entry(1))
    for position in range(len(line)):
        assert desk.steps() == []
        desk.write(1, line[position : position + 1])
        desk.pump()
    assert desk.steps() == [(1, 1)]


def test_a_torn_last_line_is_no_step(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), contract.encode_receipt(entry(2))[:-1])
    assert desk.pump() == ""
    assert desk.recorder.at_end()
    assert desk.steps() == [(1, 1)]
    desk.recorder.follow(2, 0, 1)
    desk.write(2, entry(1, 2), entry(2, 2))
    assert desk.pump() == ""
    assert desk.steps() == [(1, 1), (2, 2)]


def test_nuls_of_a_power_loss_are_passed_by(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), b"\0" * 100 + b"\n", entry(2))
    assert desk.pump() == ""
    assert desk.steps() == [(1, 1), (2, 1)]


def test_redelivery_changes_nothing(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, *(entry(step) for step in range(1, 6)))
    desk.pump()
    before = desk.directory.ledger.read_bytes()
    for _ in range(2):
        desk.reopen()
        desk.recorder.follow(1, 0, 1)
        assert desk.pump() == ""
        assert desk.commit() == []
        desk.recorder.follow(1, 0, 1)  # harmless where it is followed already
        assert desk.pump() == ""
        assert desk.directory.ledger.read_bytes() == before
    desk.write(1, entry(6))
    desk.pump()
    assert desk.steps()[-1] == (6, 1)


def test_a_step_executed_again_is_verified_and_adds_nothing(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, *(entry(step) for step in range(1, 6)))
    desk.pump()
    desk.commit()
    desk.recorder.follow(2, 3, 1)
    desk.write(2, *(entry(step, 2) for step in range(4, 8)))
    desk.pump()
    assert desk.recorder.verified_steps == 2
    assert desk.recorder.take_unsynced() == (7, 2)
    assert desk.steps() == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2)]


def test_a_step_that_differs_is_told_with_both_versions(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, EnvironmentLine(1, {"torch": "2.9"}), *(entry(step) for step in range(1, 5)))
    desk.pump()
    desk.commit()
    desk.recorder.follow(2, 2, 1)
    desk.write(2, EnvironmentLine(2, {"torch": "3.0"}), entry(3, 2, loss=9.0, learning_rate=0.5))
    desk.pump()
    diverged, alarmed = desk.commit()
    assert isinstance(diverged, ev.ReplayDiverged)
    assert (diverged.step, diverged.attempt, diverged.fields) == (3, 2, ["loss", "learning_rate"])
    assert (diverged.earlier["loss"], diverged.later["loss"]) == (1.375, 9.0)
    assert diverged.likely == "environment"
    assert isinstance(alarmed, ev.Alarmed)
    assert alarmed.name == "replay_diverged"
    assert "step 3 of attempt 2 differs in loss, learning_rate from attempt 1" in alarmed.detail
    assert desk.steps() == [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2)]


def test_a_divergence_whose_report_was_lost_is_told_again(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), entry(2))
    desk.recorder.pump()
    desk.recorder.follow(2, 0, 1)
    desk.write(2, entry(1, 2, loss=9.0))
    desk.pump()
    assert len(desk.commit()) == 2
    desk.reopen()
    desk.recorder.follow(2, 0, 1)
    desk.pump()
    # It is in the ledger; whether it is in the journal is for the journal to say.
    assert desk.steps() == [(1, 1), (2, 1), (1, 2)]


def test_a_gap_is_refused_and_nothing_after_it_is_believed(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), entry(3), entry(4))
    problem = desk.pump()
    assert "step 3, expected 2" in problem
    assert desk.steps() == [(1, 1)]
    assert desk.recorder.at_end(), "a refused file is done with"
    assert desk.pump() == "", "it is told once"
    desk.recorder.follow(2, 1, 1)
    desk.write(2, entry(2, 2))
    assert desk.pump() == ""
    assert desk.steps() == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not JSON\n", "attempt-0001.jsonl line 2: not JSON"),
        (b'{"kind": "dance"}\n', "unknown kind of receipt 'dance'"),
        (b'{"step": 2}\n', "a row needs step and loss"),
        (contract.encode_receipt(entry(2, attempt=7)), "step 2 of attempt 7"),
    ],
)
def test_a_line_that_is_no_receipt_is_refused_by_place(desk: Desk, line: bytes, words: str) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), line, entry(2))
    assert words in desk.pump()
    assert desk.steps() == [(1, 1)]


def test_a_line_without_an_end_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "RECEIPT_BYTES_MAX", 1000)
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), b"x" * 1001)
    assert "line 2 does not end within 1000 bytes" in desk.pump()
    assert desk.steps() == [(1, 1)]


def test_a_foreign_trainers_steps_are_completed(desk: Desk) -> None:
    desk.recorder.follow(4, 0, 2)
    desk.write(4, b'{"step": 1, "loss": "nan"}\n')
    assert desk.pump() == ""
    (only,), _ = read_entries(desk.directory.ledger)
    assert (only.attempt, only.epoch, only.loss != only.loss) == (4, 2, True)


def test_one_pump_takes_a_bounded_piece(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PUMP_BYTES", 256)
    desk.recorder.follow(1, 0, 1)
    desk.write(1, *(entry(step) for step in range(1, 101)))
    assert desk.recorder.pump() == ""
    assert 0 < len(desk.steps()) < 6
    assert desk.recorder.behind
    desk.pump()
    assert len(desk.steps()) == 100


# --- files ----------------------------------------------------------------------------------------


def test_leftovers_are_merged_in_the_order_of_the_attempts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PUMP_BYTES", 100)
    desk.write(10, entry(5, 10), entry(6, 10))
    desk.write(9, *(entry(step, 9) for step in range(1, 5)))
    (desk.directory.receipts / "notes.jsonl").write_bytes(b"not ours\n")
    desk.recorder.merge_leftovers()
    assert not desk.idle()
    assert desk.pump() == ""
    assert desk.idle()
    assert desk.steps() == [(1, 9), (2, 9), (3, 9), (4, 9), (5, 10), (6, 10)]


def test_a_file_that_is_followed_is_no_leftover(desk: Desk) -> None:
    desk.write(1, entry(1))
    desk.recorder.follow(1, 0, 1)
    desk.recorder.merge_leftovers()
    desk.pump()
    assert desk.steps() == [(1, 1)]


def test_receipts_go_only_when_all_is_durable(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1))
    desk.pump()
    with pytest.raises(AssertionError):
        desk.recorder.forget_before(2)
    desk.commit()
    desk.write(2, entry(2, 2))
    desk.recorder.forget_before(2)
    assert [attempt for attempt, _ in desk.directory.receipt_files()] == [2]


def test_old_receipts_that_cannot_be_removed_stay_and_that_is_said(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.first_step()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert "Input/output error" in desk.recorder.forget_before(2)
    assert desk.recorder.forget_before(2) == ""
    assert list(desk.directory.receipt_files()) == []


def test_the_exit_line_is_that_of_the_attempt(desk: Desk) -> None:
    said = ExitLine("stopped", 1, 0, ["r"], "")
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), said)
    desk.pump()
    assert desk.recorder.exit_line == said
    desk.recorder.follow(2, 1, 1)
    assert desk.recorder.exit_line is None


# --- the disk refuses -----------------------------------------------------------------------------


def test_a_disk_that_cannot_be_read_for_a_moment_is_asked_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.first_step()
    desk.write(1, entry(2))

    def refuse(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        assert desk.recorder.pump() == "", "it is no fault of the trainer's"
        assert "Input/output error" in desk.recorder.trouble
        assert not desk.recorder.at_end(), "so no death is judged and nothing is started"
    assert desk.pump() == ""
    assert desk.recorder.trouble == ""
    desk.commit()
    assert desk.steps() == [(1, 1), (2, 1)]


def test_a_full_disk_keeps_the_steps_owed_and_loses_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.first_step()
    faults = Faults(monkeypatch, ("pwrite",))
    faults.fail_always(errno.ENOSPC)
    desk.write(1, entry(2), entry(3))
    assert desk.recorder.pump() == "", "it is no fault of the trainer's"
    assert "No space" in desk.recorder.trouble or "ENOSPC" in desk.recorder.trouble
    assert desk.unsynced()
    assert not desk.recorder.at_end(), "so no death is judged and nothing is started"
    assert not desk.recorder.behind, "so the loop does not spin"
    desk.write(1, entry(4))
    assert desk.recorder.pump() == ""
    assert desk.steps() == [(1, 1)]
    faults.heal()
    assert desk.pump() == ""
    assert desk.recorder.trouble == ""
    assert desk.recorder.take_unsynced() == (4, 0)
    assert desk.steps() == [(1, 1), (2, 1), (3, 1), (4, 1)]


def test_a_short_write_is_put_right(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.recorder.follow(1, 0, 1)
    faults = Faults(monkeypatch, ("pwrite",))
    faults.fail_at(0, "short")
    desk.write(1, entry(1), entry(2))
    desk.recorder.pump()
    faults.heal()
    desk.pump()
    assert desk.steps() == [(1, 1), (2, 1)]


# --- sidecars -------------------------------------------------------------------------------------


def audit(step: int, text: str, attempt: int = 1) -> AuditLine:
    return AuditLine(step, 1.0, attempt, 1, [{"prompt": "The ", "text": text}], {"prose": 1.0})


def test_audits_are_kept_newest_last_and_a_left_branch_is_superseded(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, audit(0, "zero"), *(entry(s) for s in range(1, 4)), audit(3, "three"))
    desk.write(1, *(entry(s) for s in range(4, 7)), audit(6, "six"))
    desk.pump()
    desk.commit()
    assert [row["step"] for row in desk.samples()] == [0, 3, 6]
    assert desk.samples()[0] == {
        "step": 0,
        "time": 1.0,
        "attempt": 1,
        "epoch": 1,
        "prompt": "The ",
        "text": "zero",
        "arm_shares": {"prose": 1.0},
    }
    desk.recorder.follow(2, 2, 1)
    desk.write(2, entry(3, 2), audit(3, "three again", 2))
    desk.pump()
    desk.commit()
    assert [row["text"] for row in desk.samples()] == ["zero", "three again"]
    # Another life of the supervisor reads the same receipts and comes to the same.
    desk.reopen()
    desk.recorder.follow(2, 2, 1)
    desk.pump()
    desk.commit()
    assert [row["text"] for row in desk.samples()] == ["zero", "three again"]


def test_only_the_newest_samples_are_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", samples_keep=2)
    desk.recorder.follow(1, 0, 1)
    desk.write(1, audit(0, "a"), entry(1), audit(1, "b"), entry(2), audit(2, "c"))
    desk.pump()
    desk.commit()
    assert [row["text"] for row in desk.samples()] == ["b", "c"]
    desk.close()


def test_a_sample_cannot_say_of_which_step_it_is(desk: Desk) -> None:
    """It is a peer's: the audit it came in says that."""
    desk.recorder.follow(1, 0, 1)
    sample = {"prompt": "The ", "text": "new", "step": "ten", "epoch": 9, "more": 1}
    desk.write(1, AuditLine(1, 1.0, 1, 1, [sample], {}), AuditLine(2, 1.0, 1, 1, [sample], {}))
    assert desk.pump() == ""
    desk.commit()
    assert [(row["step"], row["epoch"], row["more"]) for row in desk.samples()] == [
        (1, 1, 1),
        (2, 1, 1),
    ]


def test_an_arm_has_a_name_that_fits_into_the_history(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, Entry(1, 2.0, attempt=1, epoch=1, arm="prose" * 14_000))
    assert "arm: expected a text of 1 to" in desk.pump()


def test_an_evaluation_is_journalled_once(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    line = EvaluationLine(2, 1, 2.5, {"prose": {"loss": 2.5, "byte_entropy": 3.0}})
    desk.write(1, entry(1), entry(2), line)
    desk.pump()
    assert desk.commit() == [ev.Evaluated(2, 2.5, line.arms)]
    desk.reopen()
    desk.recorder.begin_epoch(1, 0, "d", 2)
    desk.recorder.follow(1, 0, 1)
    desk.pump()
    assert desk.commit() == []


def test_training_json_holds_what_each_attempt_ran_on(desk: Desk) -> None:
    for attempt in (1, 2):
        desk.recorder.follow(attempt, 0, 1)
        desk.write(attempt, EnvironmentLine(attempt, {"threads": attempt}))
        desk.pump()
        desk.commit()
        desk.reopen()
    assert json.loads(desk.directory.training.read_bytes()) == {
        "attempt-0001": {"threads": 1},
        "attempt-0002": {"threads": 2},
    }


def test_state_json_is_the_bandit_of_a_verified_checkpoint(desk: Desk) -> None:
    checkpoint = {
        "step": 20,
        "epoch": 1,
        "policy_digest": "d",
        "targets_seen": 200,
        "bandit": {"kind": "static"},
        "arms": {"prose": {}},
    }
    desk.recorder.remember_bandit({**checkpoint, "sha256": "not the operator's business"})
    assert desk.unsynced()
    desk.commit()
    assert json.loads(desk.directory.state.read_bytes()) == checkpoint


def test_what_a_commit_could_not_take_is_given_back_and_newer_content_wins(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, audit(0, "old"), entry(1))
    desk.pump()
    files = desk.recorder.take_files()
    desk.write(1, audit(1, "new"))
    desk.pump()
    desk.recorder.give_back(files)
    content = desk.recorder.take_files()[desk.directory.samples]
    assert [row["text"] for row in json.loads(content)] == ["old", "new"]


# --- figures --------------------------------------------------------------------------------------


def test_the_gauge_follows_the_run_and_survives_a_bad_loss() -> None:
    gauge = Gauge()
    assert (gauge.loss, gauge.loss_ema, gauge.steps_per_second) == (None, None, None)
    gauge.take(entry(1, loss=2.0, step_seconds=0.5, arm="prose"))
    gauge.take(entry(2, loss=4.0, step_seconds=0.25))
    assert gauge.loss_ema == pytest.approx(2.0 * 0.98 + 4.0 * 0.02)
    assert gauge.steps_per_second == pytest.approx(2 / 0.75)
    average = gauge.loss_ema
    for bad in (float("nan"), float("inf"), float("-inf")):
        gauge.take(entry(3, loss=bad))
    assert gauge.loss == float("-inf")
    assert gauge.loss_ema == average


def test_a_new_life_knows_the_last_entry(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), entry(2, loss=5.0))
    desk.pump()
    desk.reopen()
    assert (desk.recorder.history_step, desk.recorder.gauge.loss) == (2, 5.0)


def test_an_audit_of_a_policy_that_was_left_does_not_come_back(desk: Desk) -> None:
    """A supervisor killed just after a pivot reads the old receipts again: their audits are in the
    archive, and samples.json is of the ruling epoch alone."""
    desk.recorder.begin_epoch(2, 3, "d", 0)
    desk.recorder.follow(1, 0, 1)
    desk.write(1, AuditLine(3, 1.0, 1, 1, [{"prompt": "The ", "text": "old"}], {}))
    assert desk.pump() == ""
    desk.commit()
    assert not desk.directory.samples.exists()
    desk.write(1, AuditLine(4, 1.0, 1, 2, [{"prompt": "The ", "text": "new"}], {}))
    assert desk.pump() == ""
    desk.commit()
    assert [row["text"] for row in desk.samples()] == ["new"]


# --- epochs ---------------------------------------------------------------------------------------


def checkpoint_of(step: int, epoch: int | None) -> Json:
    """What the helper tells of a verified checkpoint."""
    return {
        "step": step,
        "epoch": epoch,
        "policy_digest": f"policy {epoch}",
        "targets_seen": 10 * step,
        "bandit": {"kind": "ducb", "pulls": step},
        "arms": {"prose": {"pulls": step}},
    }


def state_of(desk: Desk) -> Json:
    found: Json = json.loads(desk.directory.state.read_bytes())
    return found


def test_an_epoch_begins_with_empty_samples_and_a_fresh_state(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, audit(0, "old"), *(entry(step) for step in range(1, 5)), audit(4, "old too"))
    desk.pump()
    desk.recorder.remember_bandit(checkpoint_of(4, 1))
    desk.commit()
    desk.recorder.begin_epoch(2, 4, "d2", 0)
    assert desk.unsynced(), "to be written with the next commit"
    assert desk.recorder.epoch == 2
    desk.commit()
    assert desk.samples() == []
    assert state_of(desk) == {
        "step": 4,
        "epoch": 2,
        "policy_digest": "d2",
        "targets_seen": None,
        "bandit": {},
        "arms": {},
    }


def test_an_epoch_that_goes_on_loses_nothing(desk: Desk) -> None:
    """Every start of a supervisor begins the ruling epoch again."""
    desk.recorder.begin_epoch(2, 4, "d2", 0)
    desk.recorder.follow(2, 4, 2)
    new = AuditLine(5, 1.0, 2, 2, [{"prompt": "The ", "text": "new"}], {"prose": 1.0})
    desk.write(2, Entry(5, 2.0, attempt=2, epoch=2), new)
    desk.pump()
    desk.recorder.remember_bandit(checkpoint_of(5, 2))
    desk.commit()
    samples, state = desk.samples(), state_of(desk)
    assert (len(samples), state["bandit"]) == (1, {"kind": "ducb", "pulls": 5})
    desk.reopen()
    desk.recorder.begin_epoch(2, 4, "d2", 0)
    assert not desk.unsynced(), "there is nothing to write"
    desk.commit()
    assert (desk.samples(), state_of(desk)) == (samples, state)


def test_of_mixed_samples_those_of_the_ruling_epoch_stay(desk: Desk) -> None:
    rows = [
        {"step": 3, "epoch": 1, "prompt": "p", "text": "old"},
        {"step": 4, "prompt": "p", "text": "of a version that did not say so"},
        {"step": 5, "epoch": 2, "prompt": "p", "text": "new"},
    ]
    desk.directory.samples.write_text(json.dumps(rows))
    desk.reopen()
    desk.recorder.begin_epoch(2, 3, "d2", 0)
    desk.commit()
    assert [row["step"] for row in desk.samples()] == [4, 5]


def test_without_a_state_none_is_made_up(desk: Desk) -> None:
    desk.recorder.begin_epoch(2, 3, "d2", 0)
    assert not desk.unsynced()
    assert not desk.directory.state.exists()


def test_the_bandit_of_a_policy_that_was_left_is_not_shown(desk: Desk) -> None:
    """The base of a pivot is verified after the switch too: what it holds belongs to the epoch
    before, and must not come back as the state of the new one."""
    desk.recorder.begin_epoch(2, 4, "d2", 0)
    desk.recorder.remember_bandit(checkpoint_of(4, 1))
    assert not desk.unsynced()
    desk.recorder.remember_bandit(checkpoint_of(8, 2))
    desk.commit()
    assert (state_of(desk)["step"], state_of(desk)["epoch"]) == (8, 2)
    # A trainer that knows of no epochs has one bandit only.
    desk.recorder.remember_bandit(checkpoint_of(9, None))
    desk.commit()
    assert state_of(desk)["step"] == 9


def test_what_is_stored_waits_for_the_next_commit(desk: Desk) -> None:
    path = desk.directory.run_file
    desk.recorder.store(path, b"first\n")
    assert desk.unsynced()
    assert not path.exists()
    desk.recorder.store(path, b"second\n")
    desk.commit()
    assert path.read_bytes() == b"second\n"
    assert not desk.unsynced()


def test_the_history_ends_at_the_base_until_the_new_epoch_has_a_step(desk: Desk) -> None:
    """After a rollback the steps above the base are a branch that was left: no resume may count on
    them, and they stay in the file."""
    desk.recorder.follow(1, 0, 1)
    desk.write(1, *(entry(step) for step in range(1, 9)))
    desk.pump()
    desk.commit()
    assert desk.recorder.history_step == 8
    desk.recorder.begin_epoch(2, 5, "d2", 0)
    assert desk.recorder.history_step == 5
    desk.recorder.follow(2, 5, 2)
    desk.write(2, Entry(6, 9.0, attempt=2, epoch=2))
    desk.pump()
    assert desk.recorder.history_step == 6
    assert desk.recorder.verified_steps == 0, "another epoch is appended and not compared"
    assert desk.commit() == [], "and its first step is no divergence"
    assert desk.steps() == [*((step, 1) for step in range(1, 9)), (6, 2)]


def test_a_base_beyond_the_history_adds_no_step(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, entry(1), entry(2))
    desk.pump()
    desk.recorder.begin_epoch(2, 5, "d2", 0)
    assert desk.recorder.history_step == 2


def test_a_pivot_at_the_end_of_the_history_leaves_nothing_behind(desk: Desk) -> None:
    desk.recorder.follow(1, 0, 1)
    desk.write(1, *(entry(step) for step in range(1, 5)))
    desk.pump()
    desk.recorder.begin_epoch(2, 4, "d2", 0)
    assert desk.recorder.history_step == 4
    desk.reopen()
    assert desk.recorder.history_step == 4
    desk.recorder.begin_epoch(2, 4, "d2", 0)
    assert desk.recorder.history_step == 4


def test_an_empty_history_ends_at_zero_in_any_epoch(desk: Desk) -> None:
    assert desk.recorder.history_step == 0
    desk.recorder.begin_epoch(3, 7, "d3", 0)
    assert desk.recorder.history_step == 0


def test_a_branch_is_evaluated_anew_after_a_rollback(desk: Desk) -> None:
    """What was on record up to step 4 was the other branch's: the new one's own evaluations below
    that belong to history too, each once; receipts that are read again add none."""

    def evaluated(step: int, attempt: int) -> EvaluationLine:
        return EvaluationLine(step, attempt, 2.0 * attempt, {})

    branch = [(entry(step), evaluated(step, 1)) for step in range(1, 5)]
    desk.write(1, *(line for pair in branch for line in pair))
    desk.recorder.follow(1, 0, 1)
    desk.pump()
    rollback = ev.PolicySwitched("q", 2, 1, 2, "", "", "", "", "")
    durable = fold([*desk.commit(), rollback])
    assert (durable.evaluated_step, durable.evaluation) == (2, None)
    desk.reopen()
    desk.recorder.begin_epoch(2, 2, "d2", durable.evaluated_step)
    desk.recorder.follow(1, 0, 1)
    desk.pump()
    assert desk.commit() == [], "the left branch's, read again after a kill"
    desk.recorder.follow(2, 2, 2)
    for step in (3, 4, 5):
        desk.write(2, Entry(step, 9.0, attempt=2, epoch=2), evaluated(step, 2))
    desk.pump()
    assert desk.commit() == [ev.Evaluated(step, 4.0, {}) for step in (3, 4, 5)]


# --- damaged sidecars -----------------------------------------------------------------------------


DAMAGES = {
    "samples": [b'{"torn', b"{}", b"[1]", b'[{"step": 1, "prompt": "p"}]'],
    "training": [b'{"torn', b"[]", b'{"attempt-0001": 1}'],
    "state": [b'{"torn', b"[]", b"[" * 10_000],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, all_ in DAMAGES.items() for content in all_]
)
def test_a_damaged_sidecar_is_kept_and_begun_anew(desk: Desk, name: str, content: bytes) -> None:
    """They are views: none of them may keep a run from going on."""
    path: Path = getattr(desk.directory, name)
    for _ in range(2):
        path.write_bytes(content)
        desk.reopen()
        (told,) = desk.recorder.set_aside
        assert str(path) in told
        assert not path.exists()
    desk.reopen()
    assert desk.recorder.set_aside == []
    for ending in ("damaged", "damaged1"):
        assert path.with_name(f"{path.name}.{ending}").read_bytes() == content
    desk.recorder.begin_epoch(1, 0, "d", 0)
    desk.recorder.follow(1, 0, 1)
    desk.write(1, audit(0, "new"))
    desk.pump()
    desk.commit()
    assert [row["text"] for row in desk.samples()] == ["new"]
