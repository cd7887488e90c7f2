"""What a life of the supervisor knows and says before it has done anything."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_kit import PYTHON, Run

from supervisor import config, contract
from supervisor.gauge import LOSS_EMA_DECAY
from supervisor.pivot import durable_of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


def average(losses: list[float]) -> float:
    value = losses[0]
    for loss in losses[1:]:
        value = LOSS_EMA_DECAY * value + (1 - LOSS_EMA_DECAY) * loss
    return value


# --- where the run stands -------------------------------------------------------------------------


def test_a_stopped_run_that_is_stopped_again_stands_where_it_stood(run: Run) -> None:
    process = run.hold(25)
    assert run.ask("stop").outcome == "done"
    assert run.end(process) == 0
    before = run.file_status()

    again = run.supervisor("stop", str(run.directory))
    assert again.returncode == 0
    assert "stopped at step 25 of 30" in again.stdout
    for arguments in ((), ("--as-recorded",)):
        status = run.file_status()
        assert (status["phase"], status["step"], status["reason"]) == (
            *("stopped", 25),
            "stopped as asked",
        )
        assert status["loss"] == before["loss"]
        assert status["loss_ema"] == pytest.approx(average([row["loss"] for row in run.rows()]))
        if not arguments:
            assert run.finish("--as-recorded") == 0
            assert "stopped at step 25 of 30" in run.output()


def test_a_finished_run_that_is_stopped_stays_finished(run: Run) -> None:
    assert run.finish() == 0
    stopped = run.supervisor("stop", str(run.directory))
    assert (stopped.returncode, run.file_status()["phase"]) == (0, "finished")
    assert "finished at step 30 of 30" in stopped.stdout
    assert run.file_status()["reason"] == "reached step 30"
    assert run.finish("--as-recorded") == 0
    assert "finished at step 30 of 30" in run.output()
    # The wish was recorded all the same.
    assert run.records("wished")[-1]["wish"] == "stop"


def test_a_resume_begins_with_the_step_it_resumes_from(run: Run) -> None:
    process = run.hold(20)
    assert run.ask("stop").outcome == "done"
    assert run.end(process) == 0
    run.open_gate()
    assert run.finish() == 0
    steps = [int(step) for step in re.findall(r"step (\d+)/30", run.output())]
    assert steps
    assert min(steps) >= 20


# --- a first start that went wrong ----------------------------------------------------------------


def test_a_run_without_a_step_takes_any_new_settings(run: Run) -> None:
    """A typo in a data path locked itself in: the corrected file was refused, and a pivot, too."""
    right = run.settings["trainer"]["command"]
    run.set("trainer", command=[PYTHON, "-c", "raise SystemExit(65)"])
    arm = {"name": "prose", "files": ["nowehre.txt"], "weight": 1.0}
    run.set("policy", arms=[arm])
    assert run.finish() == 1
    run_id = run.file_status()["run_id"]
    assert run.file_status()["phase"] == "failed"

    run.set("trainer", command=right)
    run.set("policy", arms=[arm | {"files": ["here.txt"]}])
    assert run.finish("--set", "training.seed=5", "--set", "training.steps=20") == 0
    assert "no step is on record yet, so the settings are those of now" in run.output()
    (changed,) = run.records("settings_changed")
    assert changed["changes"]["training.seed"] == [0, 5]
    assert changed["changes"]["training.steps"] == [30, 20]
    settings = config.load(run.directory / contract.RUN_FILE)
    assert (settings.run.id, settings.training.seed) == (run_id, 5)
    assert settings.training.schedule_steps == 20
    assert "here.txt" in (run.directory / contract.POLICIES / "0001.toml").read_text()
    (epoch,) = durable_of(run.directory).epochs
    assert epoch.policy_digest == config.policy_digest(settings)
    assert run.supervisor("verify", str(run.directory)).returncode == 0
    # From the first step on the settings are those of the run.
    assert run.finish("--set", "training.seed=6") == 2


@pytest.mark.parametrize("left", ["receipt", "checkpoint"])
def test_a_step_that_nobody_has_merged_yet_counts_as_one(run: Run, left: str) -> None:
    run.set("trainer", command=[PYTHON, "-c", "raise SystemExit(65)"])
    assert run.finish() == 1
    if left == "receipt":
        row = {"step": 1, "loss": 2.5, "time": 1.0, "attempt": 1, "epoch": 1}
        path = run.directory / contract.RECEIPTS / "attempt-0001.jsonl"
        path.write_text(json.dumps(row) + "\n")
    else:
        (run.directory / contract.CHECKPOINTS / "step_000010.bin").write_bytes(b"\n\0\0\0")
    assert run.finish("--set", "training.seed=6") == 2
    assert "training.seed: recorded 0, requested 6" in run.output()
