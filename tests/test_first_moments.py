"""What a life of the supervisor knows and says before it has done anything."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_kit import Run

from supervisor.recorder import LOSS_EMA_DECAY


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
