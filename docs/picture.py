"""The picture of the README: a real run that is killed, pivoted and killed again.

    python docs/picture.py [--steps N] [--output FILE]

Trains configs/quickstart.toml in a directory that is removed, kills the trainer with SIGKILL,
pivots to configs/polish.toml, kills supervisor and trainer together, starts again, and draws what
the history then holds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from supervisor import journal, ledger  # noqa: E402
from supervisor.contract import Entry, Json  # noqa: E402
from supervisor.state import TERMINAL  # noqa: E402

WIDTH, HEIGHT = 920, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 64, 44
SMOOTHING = 0.95
INK, GREY, LINE = "#1f2328", "#6e7781", "#d0d7de"
COLOURS = {1: "#0969da", 2: "#8250df"}


# --- the run --------------------------------------------------------------------------------------


def supervisor(*arguments: str) -> None:
    command = [sys.executable, "-m", "supervisor", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def wait(run: Path, condition: Callable[[Json], bool]) -> Json:
    """The first status for which it holds."""
    while True:
        try:
            status: Json = json.loads((run / "status.json").read_bytes())
        except FileNotFoundError:
            status = {}
        if status and condition(status):
            return status
        if status and status["phase"] in ("failed", "stuck"):
            raise RuntimeError(f"the run is {status['phase']}: {status['reason']}")
        time.sleep(0.05)


def kill(*pids: int) -> None:
    """Processes that the status of our own run has just named."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    for descriptor in descriptors:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def live(run: Path, steps: int) -> None:
    """All of it, to the last step."""
    start = ("start", "--config", "configs/quickstart.toml", "--detach")
    settings = {
        "run.directory": run,
        "training.steps": steps,
        "trainer.threads": 1,
        "checkpoint.every": steps // 12,
    }
    more = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    supervisor(*start, *more)
    first = wait(run, lambda status: status["step"] > steps * 0.31)
    kill(first["trainer_pid"])
    wait(run, lambda status: status["step"] > steps * 0.45)
    supervisor("pivot", str(run), "--policy", "configs/polish.toml", "--reason", "polish")
    second = wait(run, lambda status: status["epoch"] == 2 and status["step"] > steps * 0.78)
    kill(second["supervisor_pid"], second["trainer_pid"])
    supervisor(*start, *more)
    wait(run, lambda status: status["phase"] in TERMINAL)


@dataclass(frozen=True)
class Story:
    """What the files of the run say of it."""

    entries: Sequence[Entry]
    deaths: Sequence[tuple[int, str]]  # the last step on record, and how
    base_step: int
    verified_steps: int
    diverged_steps: int


def read(run: Path) -> Story:
    entries, torn = ledger.read_entries(run / "quickstart.loss.json")
    assert torn is None
    records, _ = journal.read(run / "journal.jsonl")
    ends = [record for record in records if record["record"] == "attempt_ended"]
    started = [record for record in records if record["record"] == "supervisor_started"]
    deaths = []
    for end in ends:
        if end["cause"] in ("finished", "stopped"):
            continue
        alone = end["time"] < started[1]["time"] if len(started) > 1 else True
        who = "trainer killed" if alone else "supervisor and trainer killed"
        deaths.append((end["step"], who))
    (base_step,) = [r["base_step"] for r in records if r["record"] == "policy_switched"]
    status: dict[str, Any] = json.loads((run / "status.json").read_bytes())
    replay = status["replay"]
    return Story(
        ledger.canonical(entries),
        deaths,
        base_step,
        replay["verified_steps"],
        replay["diverged_steps"],
    )


# --- the drawing ----------------------------------------------------------------------------------


def draw(story: Story) -> str:
    steps = len(story.entries)
    losses = [entry.loss for entry in story.entries]
    high, low = max(losses[5:]), min(losses)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return LEFT + inner_width * step / steps

    def y(loss: float) -> float:
        return TOP + inner_height * (high - min(loss, high)) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' font-family="ui-sans-serif, system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="{LINE}"/>',
    ]

    def text(
        at: tuple[float, float], words: str, fill: str = INK, anchor: str = "start", **more: str
    ) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" fill="{fill}" text-anchor="{anchor}"{extra}>'
            f"{escape(words)}</text>"
        )

    for tick in range(int(low) + 1, int(high) + 1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
            f' stroke="{LINE}" stroke-width="0.7"/>'
        )
        text((LEFT - 8, y(tick) + 4), str(tick), GREY, "end")
    for part in range(5):
        step = steps * part // 4
        text((x(step), HEIGHT - BOTTOM + 20), f"{step}", GREY, "middle")
    text((LEFT + inner_width / 2, HEIGHT - 8), "step", GREY, "middle")
    text((LEFT - 40, TOP - 12), "loss, nats", GREY)
    marks = [(step, who, "#cf222e") for step, who in story.deaths]
    marks.append((story.base_step, "pivot: polish.toml", COLOURS[2]))
    for step, words, colour in marks:
        parts.append(
            f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP - 4}" y2="{HEIGHT - BOTTOM}"'
            f' stroke="{colour}" stroke-width="1.2" stroke-dasharray="4 3"/>'
        )
        text((x(step), TOP - 12), words, colour, "middle")
    average = weight = 0.0
    points: dict[int, list[str]] = {}
    for entry in story.entries:
        colour = COLOURS[entry.epoch or 1]
        average = SMOOTHING * average + (1 - SMOOTHING) * entry.loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        points.setdefault(entry.epoch or 1, []).append(
            f"{x(entry.step):.1f},{y(average / weight):.1f}"
        )
        parts.append(
            f'<circle cx="{x(entry.step):.1f}" cy="{y(entry.loss):.1f}" r="1.1" fill="{colour}"'
            ' opacity="0.35"/>'
        )
    for epoch, line in points.items():
        parts.append(
            f'<polyline fill="none" stroke="{COLOURS[epoch]}" stroke-width="2"'
            f' points="{" ".join(line)}"/>'
        )
    outcome = (
        f"{steps} steps, {steps} entries; {story.verified_steps} steps executed again after the"
        f" kills, {story.diverged_steps} differ in any bit"
    )
    text((WIDTH / 2, 28), outcome, INK, "middle", font_size="16", font_weight="600")
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=720)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "run.svg")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="picture-") as home:
        run = Path(home) / "quickstart"
        live(run, arguments.steps)
        story = read(run)
    arguments.output.write_text(draw(story))
    print(f"{arguments.output}: {len(story.entries)} steps, deaths at {story.deaths}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
