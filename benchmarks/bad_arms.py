"""Does a bandit starve what is not worth reading? Three good arms, three bad ones.

The good arms are text that comes with Python. The bad ones: one line repeated, fifty lines shuffled
over and over, random bytes. Each policy kind trains a small model for some steps with each seed.
The table gives the share of pulls that each arm got in the second half of the run, how far the bad
ones are above their floor, and the held-out loss of the good arms. ANDREA's reward (ucb1) is
expected to chase noise or repetition; the default should stay within two points of the floor.

    python benchmarks/bad_arms.py --steps 800 --seeds 3
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor import config, contract
from supervisor.contract import Entry, EvaluationLine
from supervisor.link import Life, Link
from trainer.loop import Loop

BAD = ("one-line", "fifty-lines", "random-bytes")
GOOD = ("python-docs", "python-docstrings", "python-source")
FLOOR = 0.05
VARIANTS = (
    ("static", {"kind": "static"}),
    ("ucb1 (ANDREA)", {"kind": "ucb1"}),
    ("ducb, no text discount", {"kind": "ducb", "text_discount": False}),
    ("ducb (default)", {"kind": "ducb"}),
)


@dataclass(frozen=True)
class Row:
    """One variant and seed: shares by arm in the second half, mean held-out loss of good arms."""

    variant: str
    seed: int
    shares: dict[str, float]
    loss: float


def write_bad_arms(home: Path) -> None:
    dice = random.Random(7)
    line = "the region of the north is a region in the north\n"
    words = ["ferry", "harbour", "crate", "orange", "dog", "captain", "cook", "wind", "rain"]
    lines = [" ".join(dice.choices(words, k=9)) + "\n" for _ in range(50)]
    letters = [chr(code) for code in range(33, 127)] + [" "] * 12
    for number in range(20):
        (home / f"one-line-{number:02d}.txt").write_text(line * 300 + str(number))
        again = [text for _ in range(8) for text in dice.sample(lines, len(lines))]
        (home / f"fifty-lines-{number:02d}.txt").write_text("".join(again) + str(number))
        noise = "".join(dice.choices(letters, k=16_000))
        (home / f"random-bytes-{number:02d}.txt").write_text(noise)


def settings(home: Path, name: str, policy: dict[str, Any], seed: int, steps: int) -> Any:
    arms: list[dict[str, Any]] = [{"name": arm, "builtin": arm, "floor": FLOOR} for arm in GOOD]
    arms += [{"name": arm, "files": [str(home / f"{arm}-*.txt")], "floor": FLOOR} for arm in BAD]
    tree = {
        "run": {"name": name, "directory": str(home / name)},
        "model": {"width": 64, "heads": 4, "layers": 2, "context": 64},
        "training": {
            "steps": steps,
            "seed": seed,
            "batch_windows": 8,
            "learning_rate": 3e-3,
            "warmup_steps": 50,
        },
        "trainer": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": max(50, steps // 10)},
        "samples": {"tokens": 1, "prompts": ["The "]},
        "evaluation": {"windows": 16},
        "policy": {**policy, "arms": arms},
    }
    return config.resolve(config.parse(tree, name), name)


def run(home: Path, variant: str, policy: dict[str, Any], seed: int, steps: int) -> Row:
    name = f"{policy['kind']}-{len(policy)}-{seed}"
    chosen = settings(home, name, policy, seed, steps)
    directory = Path(chosen.run.directory)
    for folder in (contract.CHECKPOINTS, contract.RECEIPTS):
        (directory / folder).mkdir(parents=True)
    life = Life(directory, 1, "0" * 16, 1, None, False)
    with Link(life) as link:
        Loop(chosen, link).run()
    lines = (directory / contract.RECEIPTS / "attempt-0001.jsonl").read_bytes().split(b"\n")[:-1]
    receipts = [contract.parse_receipt(line, "receipts") for line in lines]
    late = [one.arm for one in receipts if isinstance(one, Entry) and one.step > steps // 2]
    counts = Counter(late)
    last = [one for one in receipts if isinstance(one, EvaluationLine)][-1]
    good = [last.arms[arm]["loss"] for arm in GOOD]
    shares = {arm: counts[arm] / len(late) for arm in (*GOOD, *BAD)}
    return Row(variant, seed, shares, math.fsum(good) / len(good))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="one variant, by the beginning of its name")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        write_bad_arms(home)
        for variant, policy in VARIANTS:
            if arguments.only and not variant.startswith(arguments.only):
                continue
            for seed in range(1, arguments.seeds + 1):
                print(f"{variant}, seed {seed}", file=sys.stderr)
                rows.append(run(home, variant, policy, seed, arguments.steps))
    if arguments.json:
        print(json.dumps([row.__dict__ for row in rows], indent=2))
        return 0
    header = "  ".join(f"{arm:>13}" for arm in (*GOOD, *BAD))
    print(f"{'variant':<24} seed  {header}  held-out loss of the good arms")
    for row in rows:
        cells = "  ".join(f"{row.shares[arm]:>13.1%}" for arm in (*GOOD, *BAD))
        print(f"{row.variant:<24} {row.seed:>4}  {cells}  {row.loss:.4f}")
    for variant, _ in VARIANTS:
        of = [row for row in rows if row.variant == variant]
        if not of:
            continue
        worst = {arm: max(row.shares[arm] for row in of) - FLOOR for arm in BAD}
        told = ", ".join(f"{arm} {100 * above:+.1f}" for arm, above in worst.items())
        print(f"{variant}: points above the floor, worst seed: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
