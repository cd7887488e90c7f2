"""The check that only a GPU can make: that it says nothing which it has not seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Lived
from trainer.loop import FINISHED, STOPPED


def test_a_single_step_cannot_be_stopped_half_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --steps 1 nothing was stopped and all was equal."""
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--steps", "1"])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 2
    assert "--steps 1: at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("why", "steps", "says"), [(STOPPED, 2, None), (FINISHED, 2, "ended"), (STOPPED, 1, "ended")]
)
def test_a_first_life_that_did_not_stop_half_way_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, steps: int, says: str | None
) -> None:
    losses = [3.0, 2.5, 2.0, 1.5]
    lives = [
        Lived(FINISHED, losses, "d", [0.5], 1.0),
        Lived(why, losses[:steps], "c", [0.1], 1.0),
        Lived(FINISHED, losses[2:], "d", [0.5], 1.0),
    ]
    monkeypatch.setattr(gpu_check, "live_afresh", lambda *_: lives.pop(0))
    if says is None:
        assert gpu_check.check(tmp_path, "cpu", "float32", 4)
        return
    with pytest.raises(SystemExit, match=says):
        gpu_check.check(tmp_path, "cpu", "float32", 4)
