"""What only a GPU can show, in one script; it also runs on a CPU.

    python benchmarks/gpu_check.py [--device cuda] [--steps 20]

Trains a small model with dropout on the device, uninterrupted and stopped half-way and resumed, in
float32 and in bfloat16, and compares every loss, the weights, both moments and a vector drawn from
the device's generator after the last step. Each life is a process of its own, as it is in a run, so
that what a resume does not set again shows. Then says what the device is and how fast it trained.
Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from supervisor import config, contract
from supervisor.contract import Entry, Receipt
from supervisor.link import Life, Link
from trainer import device
from trainer.loop import FINISHED, STOPPED, Loop

ARMS = [{"name": "python-docs", "builtin": "python-docs"}]
LIFE_SECONDS = 600.0


class StoppingLink(Link):
    """Asks its own process to stop after one step."""

    def __init__(self, life: Life, stop_after: int | None) -> None:
        super().__init__(life)
        self._stop_after = stop_after

    def record(self, receipt: Receipt) -> None:
        super().record(receipt)
        if isinstance(receipt, Entry) and receipt.step == self._stop_after:
            signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Lived:
    """What a life left: `digest` is over weights, m and v."""

    why: str
    losses: list[float]
    digest: str
    drawn: list[float]
    seconds: float


def settings(home: Path, where: str, precision: str, steps: int) -> config.Settings:
    tree: dict[str, Any] = {
        "run": {"name": "check", "directory": str(home)},
        "model": {"width": 128, "heads": 4, "layers": 4, "context": 128, "dropout": 0.1},
        "training": {"steps": steps, "accumulate": 2},
        "trainer": {"device": where, "precision": precision},
        "checkpoint": {"every": steps},
        "samples": {"tokens": 8},
        "policy": {"kind": "static", "arms": ARMS},
    }
    return config.resolve(config.parse(tree, "gpu_check"), "gpu-check")


def live(chosen: config.Settings, attempt: int, stop_after: int | None) -> Lived:
    """One life in this process, which must not have had another."""
    directory = Path(chosen.run.directory)
    life = Life(directory, attempt, "0" * 16, 1, None, False)
    began = time.perf_counter()
    with StoppingLink(life, stop_after) as link:
        link.install_signal_handlers()
        loop = Loop(chosen, link)
        why = loop.run()
        training = loop.training
        drawn = torch.rand(8, device=training.place).tolist()
        training.model.flat.download()
        digest = contract.digest(bytes(training.model.flat.image[contract.HEADER_BYTES :]))
    path = directory / contract.RECEIPTS / f"{contract.attempt_stem(attempt)}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1]
    receipts = [contract.parse_receipt(line, path.name) for line in lines]
    losses = [one.loss for one in receipts if isinstance(one, Entry)]
    return Lived(why, losses, digest, drawn, time.perf_counter() - began)


def live_afresh(chosen: config.Settings, attempt: int, stop_after: int | None) -> Lived:
    """The same in a process of its own."""
    directory = Path(chosen.run.directory)
    for name in (contract.CHECKPOINTS, contract.RECEIPTS):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / contract.RUN_FILE).write_text(config.dump(chosen), encoding="utf-8")
    command = [sys.executable, __file__, "--life", str(directory), str(attempt)]
    done = subprocess.run(
        [*command, str(stop_after or 0)], stdout=subprocess.PIPE, timeout=LIFE_SECONDS, check=True
    )
    return Lived(**json.loads(done.stdout.splitlines()[-1]))


def check(home: Path, where: str, precision: str, steps: int) -> bool:
    half = steps // 2
    whole = live_afresh(settings(home / "whole", where, precision, steps), 1, None)
    parted = settings(home / "parted", where, precision, steps)
    first = live_afresh(parted, 1, half)
    second = live_afresh(parted, 2, None)
    ends = [(one.why, len(one.losses)) for one in (whole, first, second)]
    expected = [(FINISHED, steps), (STOPPED, half), (FINISHED, steps - half)]
    if ends != expected:
        raise SystemExit(f"{precision}: the lives ended {ends}, expected {expected}")
    verdicts = {
        "losses": first.losses + second.losses == whole.losses,
        "weights, m and v": second.digest == whole.digest,
        "generator": second.drawn == whole.drawn,
    }
    told = ", ".join(f"{name} {'equal' if same else 'DIFFER'}" for name, same in verdicts.items())
    print(f"{precision:<9} {told}; {steps / whole.seconds:.1f} steps/s with loading")
    return all(verdicts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=20, help="at least 2: one before the stop")
    parser.add_argument("--life", nargs=3, help=argparse.SUPPRESS)  # directory, attempt, stop after
    arguments = parser.parse_args()
    if arguments.life:
        directory, attempt, stop_after = arguments.life
        chosen = config.load(Path(directory) / contract.RUN_FILE)
        print(json.dumps(asdict(live(chosen, int(attempt), int(stop_after) or None))))
        return 0
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: at least 2, or there is nothing to stop half-way")
    place = device.resolve(arguments.device)
    print(f"device {place}, torch {torch.__version__}", end="")
    print(f", {torch.cuda.get_device_name(place)}" if place.type == "cuda" else "")
    exact = True
    with tempfile.TemporaryDirectory() as home:
        for precision in ("float32", "bfloat16"):
            folder = Path(home) / precision
            exact = check(folder, arguments.device, precision, arguments.steps) and exact
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
