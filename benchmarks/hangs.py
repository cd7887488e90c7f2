"""How soon a trainer that makes no progress is found and ended, and that a healthy one is not.

    python benchmarks/hangs.py [--hours N] [--seed S] [--json]

- one run with real processes for each way to hang: from the moment it hangs to the taking of the
  evidence, as seconds and as a multiple of the deadline; on to the end of the attempt (evidence,
  message, SIGTERM, SIGKILL); on to the first new step of its successor
- hours of a simulated healthy trainer (steps with a heavy tail, slow saves and evaluations,
  suspends, a supervisor that is starved) and how many alarms they raise

The trainer is the saboteur of the tests. Exit code 1 where a hang was not found or an alarm false.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs_kit import Run  # noqa: E402
from test_patience import false_alarms  # noqa: E402

from supervisor.patience import Limits  # noqa: E402

STEP_SECONDS, SAVE_SECONDS, START_SECONDS = 1.0, 2.0, 3.0
EVIDENCE_SECONDS, GRACE_SECONDS = 0.5, 0.5
LIMIT_SECONDS: Final = 60.0
HOURS_A_LIFE: Final = 100.0


@dataclass(frozen=True)
class Kind:
    what: str
    fault: str
    deadline_seconds: float = STEP_SECONDS
    mute: bool = False


KINDS: Final = (
    Kind("a loop in Python", "spin@15#1"),
    Kind("native code that keeps the interpreter lock", "native@15#1"),
    Kind("stuck, while a helper thread lives", "seeming@15#1"),
    Kind("a read that never returns", "block@15#1"),
    Kind("stopped (SIGSTOP)", "frozen@15#1"),
    Kind("a read, by a trainer that knows only signals", "block@15#1", mute=True),
    Kind("a save without an end", "stalled@20#1", SAVE_SECONDS),
    Kind("before its hello", "block@load#1", START_SECONDS),
    Kind("after its hello, before the first step", "block@hello#1", START_SECONDS),
)


@dataclass(frozen=True)
class Found:
    what: str
    deadline_seconds: float
    detected_seconds: float
    ended_seconds: float
    resumed_seconds: float

    @property
    def ratio(self) -> float:
        return self.detected_seconds / self.deadline_seconds


def wait(condition: Callable[[], bool], what: str) -> float:
    """When it was true. Raises TimeoutError."""
    limit, pause = time.monotonic() + LIMIT_SECONDS, select.poll()
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"this never came: {what}")
        pause.poll(2)
    return time.monotonic()


def measure(home: Path, kind: Kind) -> Found:
    """Raises RuntimeError where the attempt did not end as a hang, TimeoutError where nothing came
    of it."""
    run = Run(
        home,
        hang={
            "step_seconds": STEP_SECONDS,
            "save_seconds": SAVE_SECONDS,
            "start_seconds": START_SECONDS,
            "evidence_seconds": EVIDENCE_SECONDS,
        },
        stop={"grace_seconds": GRACE_SECONDS, "signal_after_seconds": 0.1},
    )
    run.faults = kind.fault
    if kind.mute:
        run.environment["SABOTEUR_MUTE"] = "1"
    log = run.directory / "logs" / "attempt-0001.log"

    def says(text: str) -> bool:
        ended = run.records("attempt_ended")
        if log.exists() and text in log.read_text(errors="replace"):
            return True
        if ended:
            cause = ended[0]["cause"]
            raise RuntimeError(f"{kind.what}: it ended before that, by {cause}: {run.output()}")
        return False

    try:
        supervisor = run.start()
        began = wait(lambda: says("the saboteur hangs"), f"{kind.what}: the hang")
        detected = wait(lambda: says("--- no progress"), f"{kind.what}: the evidence")
        ended = wait(lambda: bool(run.records("attempt_ended")), f"{kind.what}: its end")
        reached = run.history_step()
        resumed = wait(lambda: run.history_step() > reached, f"{kind.what}: a new step")
        causes = [record["cause"] for record in run.records("attempt_ended")[:1]]
        if run.end(supervisor) != 0 or causes != ["hang"]:
            raise RuntimeError(f"{kind.what}: {causes}, {run.output()}")
    finally:
        run.close()
    moments = (detected - began, ended - began, resumed - began)
    return Found(kind.what, kind.deadline_seconds, *moments)


def healthy(hours: float, first_seed: int) -> tuple[int, int]:
    """(alarms, steps) of lives of a hundred hours each, with the limits as they come."""
    lives = max(1, round(hours / HOURS_A_LIFE))
    found = [false_alarms(first_seed + n, hours / lives, Limits()) for n in range(lives)]
    return sum(alarms for alarms, _ in found), sum(steps for _, steps in found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    if not arguments.json:
        head = ("", "deadline s", "detected s", "/ deadline", "ended s", "new step s")
        print(f"{head[0]:<46}" + "".join(f"{cell:>12}" for cell in head[1:]), flush=True)
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="hangs-") as home:
            one = measure(Path(home), kind)
        rows.append(one)
        if not arguments.json:
            cells = (one.deadline_seconds, one.detected_seconds, one.ratio)
            more = (one.ended_seconds, one.resumed_seconds)
            line = "".join(f"{value:>12.2f}" for value in (*cells, *more))
            print(f"{one.what:<46}{line}", flush=True)
    alarms, steps = healthy(arguments.hours, arguments.seed)
    if arguments.json:
        found = [asdict(row) | {"ratio": row.ratio} for row in rows]
        print(json.dumps({"hangs": found, "hours": arguments.hours, "false_alarms": alarms}))
    else:
        print(f"\n{arguments.hours:,.0f} healthy hours, {steps:,} steps: {alarms} false alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
