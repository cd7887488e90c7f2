"""The targets of the lesson's run, counted two ways: python benchmarks/lesson_counts.py [--json]

- by update: what the trainer added up, as its checkpoints hold it
- by window: the lengths of all windows that the samplers have served, each less one
- in the ledger: what the receipt of the checkpoint's step says

Trains configs/lesson.toml (80 updates on one thread) in a directory that is removed. Exit code 1
where the counts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from supervisor import config, contract
from supervisor.contract import Entry, Manifest
from trainer import data
from trainer.sampler import Sampler

ROOT = Path(__file__).resolve().parent.parent


def train(directory: Path) -> None:
    """One life of the trainer, alone."""
    command = [sys.executable, "-m", "trainer", "--config", str(ROOT / "configs" / "lesson.toml")]
    subprocess.run(
        [*command, "--set", f"run.directory={directory}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


def by_window(manifest: Manifest, settings: config.Settings, loaded: data.Data) -> int:
    """The sum over all windows taken so far, round by round."""
    total = 0
    for name, arm in loaded.arms.items():
        training = settings.training
        sampler = Sampler(name, arm.window_count, training.batch_windows, training.seed)
        sampler.restore(manifest.state["arms"][name]["sampler"])
        a_round = sum(arm.window_targets(number) for number in range(arm.window_count))
        total += sampler.rounds * a_round + sum(map(arm.window_targets, sampler.taken()))
    return total


def counts(directory: Path) -> list[dict[str, int]]:
    settings = config.load(directory / contract.RUN_FILE)
    loaded = data.load(settings)
    assert loaded is not None
    receipts = directory / contract.RECEIPTS / "attempt-0001.jsonl"
    entries = {}
    for line in receipts.read_bytes().splitlines():
        receipt = contract.parse_receipt(line, receipts.name)
        if isinstance(receipt, Entry):
            entries[receipt.step] = receipt
    rows = []
    for path in sorted((directory / contract.CHECKPOINTS).glob("*.json")):
        manifest = contract.parse_manifest(path.read_bytes(), path.name)
        rows.append(
            {
                "step": manifest.step,
                "by_update": manifest.state["targets_seen"],
                "by_window": by_window(manifest, settings, loaded),
                "in_ledger": entries[manifest.step].targets_seen or 0,
            }
        )
    return sorted(rows, key=lambda row: row["step"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Targets of the lesson's run, counted two ways.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "lesson"
        train(directory)
        rows = counts(directory)
    agree = all(row["by_update"] == row["by_window"] == row["in_ledger"] for row in rows)
    if arguments.json:
        print(json.dumps({"agree": agree, "checkpoints": rows}, indent=2))
    else:
        print(f"{'step':>6} {'by update':>12} {'by window':>12} {'in ledger':>12}")
        for row in rows:
            print(
                f"{row['step']:>6} {row['by_update']:>12,} {row['by_window']:>12,}"
                f" {row['in_ledger']:>12,}"
            )
        print("they agree" if agree else "THEY DIFFER")
    return 0 if agree and rows else 1


if __name__ == "__main__":
    sys.exit(main())
