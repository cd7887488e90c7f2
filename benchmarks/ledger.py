"""The ledger against its budgets: python benchmarks/ledger.py [--json] [--directory DIR]

- cost of an append at 2,000,000 entries / at 1,000 (budget: at most 1.1)
- entries merged and appended a second (at least 50,000)
- the first entry that is merged after an adoption, and after a rollback, at 200,000 entries, and
  a binding of step 1,000 (each at most 50 ms; the first two hold up the loop). A binding hashes
  the file up to its step besides, which is what those of later steps take
- opening 200,000 entries, whole and with a torn tail / json.load of the same file (at most 0.1)

Ratios are taken in one run, measurements of both sides alternate, and medians are compared. Files
are synced before they are timed, as those of a run are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from supervisor.contract import Entry, parse_receipt
from supervisor.ledger import Ledger
from supervisor.replay import Merge
from supervisor.rows import CLOSING, SEPARATOR

SMALL, LARGE, OPENED, MERGED = 1_000, 2_000_000, 200_000, 200_000
APPENDS, ROUNDS = 5_000, 7


def entry(step: int) -> Entry:
    return Entry(
        step=step,
        loss=2.0 + 8.0 / (step + 1),
        time=1.7e9 + step / 97,
        attempt=3,
        epoch=2,
        arm="repo-docstrings",
        targets_seen=step * 16_384,
        learning_rate=3e-4 / (1 + step / 1e6),
        gradient_norm=0.9 + 1 / (step + 3),
        step_seconds=1 / (97 + step % 7),
    )


def write_ledger(path: Path, entries: int) -> None:
    """A synced ledger, written without the product to be quick."""
    example = json.dumps(entry(entries).to_json(), separators=(",", ":")).encode()
    row = example.replace(b'"step":%d' % entries, b'"step":%d', 1)
    with path.open("wb") as file:
        for step in range(1, entries + 1):
            file.write((b"[\n" if step == 1 else SEPARATOR) + row % step)
        file.write(CLOSING)
        file.flush()
        os.fsync(file.fileno())


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_append(directory: Path) -> dict[str, float]:
    ledgers = []
    for entries in (SMALL, LARGE):
        path = directory / f"append-{entries}.loss.json"
        write_ledger(path, entries)
        costs: list[float] = []
        ledgers.append((entries, Ledger.open(path), costs))
    for number in range(1, APPENDS + 1):
        for entries, ledger, costs in ledgers if number % 2 else ledgers[::-1]:
            item = [entry(entries + number)]
            costs.append(seconds(partial(ledger.append, item)))
    for _, ledger, _ in ledgers:
        ledger.close()
    small, large = (statistics.median(costs) for _, _, costs in ledgers)
    return {
        "append_small_microseconds": small * 1e6,
        "append_large_microseconds": large * 1e6,
        "append_ratio": large / small,
    }


def measure_merge(directory: Path) -> dict[str, float]:
    """From lines of a receipt file to a synced ledger, 250 lines a time."""
    lines = [json.dumps(entry(step).to_json()).encode() for step in range(1, MERGED + 1)]
    ledger = Ledger.open(directory / "merge.loss.json")
    merge = Merge(3, 2, 0, lambda step: None)

    def run() -> None:
        for first in range(0, MERGED, 250):
            taken = []
            for line in lines[first : first + 250]:
                receipt = parse_receipt(line, "receipts")
                assert isinstance(receipt, Entry)
                taken.append(merge.take(receipt))
            ledger.append([item.entry for item in taken if item.append])
        ledger.sync()

    elapsed = seconds(run)
    ledger.close()
    return {"merged_entries_per_second": MERGED / elapsed}


def measure_open(directory: Path) -> dict[str, float]:
    path = directory / "open.loss.json"
    write_ledger(path, OPENED)
    whole = path.read_bytes()
    loads, opens, repairs = [], [], []

    def load() -> None:
        with path.open("rb") as file:
            json.load(file)

    for _ in range(ROUNDS):
        loads.append(seconds(load))
        opens.append(seconds(lambda: Ledger.open(path).close()))
        with path.open("r+b") as file:
            file.seek(-40, os.SEEK_END)
            file.write(b"\0" * 4096)
            os.fsync(file.fileno())
        repairs.append(seconds(lambda: Ledger.open(path).close()))
        path.write_bytes(whole)
        os.sync()
    load_median = statistics.median(loads)
    return {
        "json_load_seconds": load_median,
        "open_ratio": statistics.median(opens) / load_median,
        "repair_ratio": statistics.median(repairs) / load_median,
    }


def measure_looks_back(directory: Path) -> dict[str, float]:
    path = directory / "back.loss.json"
    write_ledger(path, OPENED)
    ledger = Ledger.open(path)

    def first(attempt: int, base: int) -> None:
        tail = ledger.tail(base, attempt)
        merge = Merge(attempt, 2, base, tail.earlier, tail.own_first, tail.own_last)
        merge.take(replace(entry(base + 1), attempt=attempt))

    found = {
        "first_after_adoption_ms": statistics.median(
            seconds(partial(first, 3, 0)) for _ in range(ROUNDS)
        ),
        "first_after_rollback_ms": statistics.median(
            seconds(partial(first, 4, 1_000)) for _ in range(ROUNDS)
        ),
        "binding_newest_ms": seconds(partial(ledger.binding, OPENED)),
        "binding_old_step_ms": seconds(partial(ledger.binding, OPENED // 2)),
        "binding_early_step_ms": statistics.median(
            seconds(partial(ledger.binding, 1_000 + number)) for number in range(ROUNDS)
        ),
    }
    ledger.close()
    return {name: value * 1e3 for name, value in found.items()}


BUDGETS = {
    "first_after_adoption_ms": ("at most", 50.0),
    "first_after_rollback_ms": ("at most", 50.0),
    "binding_early_step_ms": ("at most", 50.0),
    "append_ratio": ("at most", 1.1),
    "merged_entries_per_second": ("at least", 50_000.0),
    "open_ratio": ("at most", 0.1),
    "repair_ratio": ("at most", 0.1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--directory", type=Path, help="where to write about 600 MB (a temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        found = (
            measure_merge(directory)
            | measure_looks_back(directory)
            | measure_open(directory)
            | measure_append(directory)
        )
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    for what, value in found.items():
        word, budget = BUDGETS.get(what, ("", 0.0))
        limit = f"{word} {budget:g}" if word else ""
        sys.stdout.write(f"{what:32} {value:12.4g}   {limit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
