"""How long training stands still for a pivot, beside a plain stop and start of the same run.

Both gaps are read from the history itself: from the time of the last step before to the time of
the first step after. One small run, both in turn, several times.

    python benchmarks/pivot_downtime.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from supervisor.history import History

ARMS = [{"name": name, "builtin": name} for name in ("python-docs", "python-source")]


def supervisor(*arguments: str) -> None:
    command = [sys.executable, "-m", "supervisor", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)


def write(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(tomli_w.dumps(tree))
    return path


def wait_for_step(run: Path, beyond: int) -> int:
    """The last step on record once it is beyond `beyond`."""
    while True:
        status = json.loads((run / "status.json").read_bytes())
        if status["step"] > beyond:
            return int(status["step"])
        if status["phase"] not in ("starting", "running"):
            raise RuntimeError(f"the run is {status['phase']}: {status['reason']}")
        time.sleep(0.1)


def gaps(ledger: Path) -> dict[tuple[int, int], float]:
    """Seconds between two neighbouring steps of different attempts, by the pair of attempts."""
    entries = History(ledger).canonical()
    found: dict[tuple[int, int], float] = {}
    before = None
    for entry in entries:
        if before is not None and before.attempt != entry.attempt:
            assert before.time is not None
            assert entry.time is not None
            found[before.attempt or 0, entry.attempt or 0] = entry.time - before.time
        before = entry
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        run = home / "run"
        tree = {
            "run": {"name": "run", "directory": str(run)},
            "model": {"width": 64, "heads": 4, "layers": 2, "context": 64},
            "training": {"steps": 1_000_000},
            "trainer": {"device": "cpu", "threads": 1},
            "checkpoint": {"every": 20},
            "samples": {"every": 1_000_000},
            "evaluation": {"every": 1_000_000},
            "policy": {"kind": "static", "arms": ARMS},
        }
        file = write(home / "run.toml", tree)
        supervisor("start", "--config", str(file), "--detach")
        attempt, kinds = 1, {}
        try:
            for number in range(arguments.rounds):
                wait_for_step(run, wait_for_step(run, 0) + 40)
                weights = [{**arm, "weight": 1.0 + number} for arm in ARMS[:1]] + ARMS[1:]
                arms = [{**arm, "cap": 0.9 - 0.01 * number} for arm in weights]
                policy = write(home / "policy.toml", {"policy": {"kind": "static", "arms": arms}})
                supervisor("pivot", str(run), "--policy", str(policy))
                kinds[attempt, attempt + 1] = "pivot"
                wait_for_step(run, wait_for_step(run, 0) + 40)
                supervisor("stop", str(run))
                supervisor("start", "--config", str(file), "--detach")
                kinds[attempt + 1, attempt + 2] = "stop and start"
                attempt += 2
            wait_for_step(run, wait_for_step(run, 0) + 20)
        finally:
            supervisor("stop", str(run))
        measured = gaps(run / "run.loss.json")
    for kind in ("pivot", "stop and start"):
        of = [measured[pair] for pair, found in kinds.items() if found == kind]
        seconds = ", ".join(f"{gap:.2f}" for gap in of)
        print(f"{kind:<16} median {statistics.median(of):.2f} s  ({seconds})")
    pivots = [measured[pair] for pair, found in kinds.items() if found == "pivot"]
    plain = [measured[pair] for pair, found in kinds.items() if found != "pivot"]
    print(f"ratio            {statistics.median(pivots) / statistics.median(plain):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
