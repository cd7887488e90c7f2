"""Runs of the real trainer under the real supervisor, small enough for a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import runs_kit
import trainer_kit

from supervisor import contract, ledger
from supervisor.contract import Entry, Json, Manifest

DEADLINE_SECONDS = 90.0


class TrainedRun(runs_kit.Run):
    """A run of our own trainer on two tiny arms: 12 steps, a checkpoint every 4."""

    def __init__(self, home: Path, name: str = "run", **sections: Any) -> None:
        super().__init__(home, name)
        quick: dict[str, Any] = {
            "run": {"name": name, "directory": str(self.directory)},
            "model": {"width": 16, "heads": 2, "layers": 1, "context": 16, "dropout": 0.1},
            "restart": {"delay_seconds": 0.01, "maximum_delay_seconds": 0.02},
            "evaluation": {"fraction": 0.2, "windows": 4},
            "checkpoint": {"every": 4, "keep_every": 1},
        }
        for section, table in sections.items():
            quick[section] = quick.get(section, {}) | table
        self.settings = trainer_kit.tree(home, **quick)
        self.environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(trainer_kit.ROOT)}
        self.write_config()

    def trained(self) -> TrainedRun:
        """Runs it to its end."""
        supervisor = self.start()
        assert supervisor.wait(DEADLINE_SECONDS) == 0, self.output()
        return self

    def history(self) -> list[Entry]:
        """The canonical history."""
        entries, torn = ledger.read_entries(self.ledger_path)
        assert torn is None
        return ledger.canonical(entries)

    def manifest(self, step: int) -> Manifest:
        path = self.member(step, ".json")
        return contract.parse_manifest(path.read_bytes(), path.name)

    def member(self, step: int, ending: str) -> Path:
        return self.directory / contract.CHECKPOINTS / (contract.checkpoint_stem(step) + ending)

    def rewrite_ledger(self, entries: list[Entry]) -> None:
        """Puts other entries in the ledger's place, as nobody but a test may."""
        self.ledger_path.unlink()
        writer = ledger.Ledger.open(self.ledger_path)
        writer.append(entries)
        writer.sync()
        writer.close()

    def rewrite_training(self, **changes: Any) -> None:
        """Changes what the first attempt read back of its environment."""
        path = self.directory / contract.TRAINING_FILE
        training: Json = orjson.loads(path.read_bytes())
        training["attempt-0001"] |= changes
        path.write_bytes(orjson.dumps(training))


def content_of(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of change of everything below a directory, to see that nobody wrote."""
    found = {}
    for path in sorted(directory.rglob("*")):
        stat = os.lstat(path)
        found[str(path.relative_to(directory))] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def assert_same_run(whole: trainer_kit.Lived, *parts: trainer_kit.Lived) -> None:
    """Losses, every deterministic field, weights, m, v, and a vector drawn after the last step."""
    joined = [entry for part in parts for entry in part.entries]
    assert [entry.step for entry in joined] == [entry.step for entry in whole.entries]
    for ours, theirs in zip(joined, whole.entries, strict=True):
        assert contract.differing_fields(ours, theirs) == ()
    assert parts[-1].image == whole.image
    assert parts[-1].drawn.tolist() == whole.drawn.tolist()
