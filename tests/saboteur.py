"""A trainer without torch, which can misbehave on command.

It speaks the link, writes receipts and small checkpoints, and resumes; a deterministic function of
the step stands in for training. Faults come by environment, SABOTEUR_FAULTS: a comma-separated
list of `name@step` or `name@step#attempt` (every attempt without `#`). The file SABOTEUR_GATE, if
named, holds training at a step until a test raises the number in it.

Run by the supervisor as `trainer.command`; the arguments are: steps, cadence.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import checkpoint_kit

from supervisor import contract
from supervisor.contract import Entry, EnvironmentLine
from supervisor.link import Link, life_from_environment

PARAMETERS = int(os.environ.get("SABOTEUR_PARAMETERS", "6"))


def loss_of(step: int) -> float:
    """A loss that looks random and depends on the step alone."""
    word = hashlib.sha256(str(step).encode()).digest()
    return 2.0 + int.from_bytes(word[:4], "little") / 2**32


def faults(attempt: int) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for item in filter(None, os.environ.get("SABOTEUR_FAULTS", "").split(",")):
        name, _, where = item.partition("@")
        step, _, only = where.partition("#")
        if not only or int(only) == attempt:
            found.setdefault(int(step), []).append(name)
    return found


def held(step: int) -> bool:
    gate = os.environ.get("SABOTEUR_GATE")
    return gate is not None and step >= int(Path(gate).read_text())


def commit_fault(name: str) -> None:
    match name:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            while True:
                signal.pause()
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(3600)
        case _ if name.startswith("exit"):
            print(f"the saboteur leaves with {name[4:]}", file=sys.stderr)
            sys.exit(int(name[4:]))


def main() -> int:
    target, cadence = int(sys.argv[1]), int(sys.argv[2])
    life = life_from_environment(os.environ)
    if life is None:
        print("the saboteur needs a supervisor", file=sys.stderr)
        return contract.ExitCode.CONFIGURATION
    planned = faults(life.attempt)
    run_id = os.environ.get("SABOTEUR_RUN_ID") or _run_id(life.run_directory)
    with Link(life) as link:
        link.install_signal_handlers()
        link.phase("load")
        for name in planned.get(-1, []):
            commit_fault(name)
        step = life.resume_step or 0
        link.record(EnvironmentLine(life.attempt, {"saboteur": True}))
        link.hello(step, PARAMETERS, "0" * 64)
        checkpoints = life.run_directory / contract.CHECKPOINTS
        while True:
            due = link.due(cadence=step > 0 and (step % cadence == 0 or step == target))
            if due.reason is not None and step > 0:
                save(link, checkpoints, step, due.reason, due.requests, run_id, planned)
            if due.stop or step >= target:
                why = "finished" if step >= target else "stopped"
                for name in planned.get(-2, []):
                    commit_fault(name)
                link.farewell(why, step, 0)
                for name in planned.get(-3, []):
                    commit_fault(name)
                return 0
            if held(step):
                link._socket and link._socket.poll(5)  # noqa: B018 - waits for a message or 5 ms
                continue
            step += 1
            for name in planned.get(step, []):
                commit_fault(name)
            loss = loss_of(step)
            if "wrong" in planned.get(step, []):
                loss += 1e-9
            link.record(
                Entry(step, loss, time.time(), life.attempt, life.epoch, "prose", 10 * step, 1e-3)
            )


def save(
    link: Link,
    checkpoints: Path,
    step: int,
    reason: str,
    requests: tuple[str, ...],
    run_id: str,
    planned: dict[int, list[str]],
) -> None:
    begin = time.monotonic()
    link.phase("save")
    link.sync()
    data = checkpoint_kit.binary(step, PARAMETERS)
    manifest = checkpoint_kit.manifest(
        data,
        step,
        PARAMETERS,
        run_id=run_id,
        attempt=link.life.attempt,
        reason=reason,
        requests=requests,
    )
    stop_before = next((n[5:].replace("_", " ") for n in planned.get(step, []) if n[:5] == "torn:"), None)
    if not (checkpoints / f"{contract.checkpoint_stem(step)}.bin").exists():
        checkpoint_kit.publish(
            checkpoints,
            step,
            data,
            manifest.to_bytes(),
            attempt=link.life.attempt,
            nonce=link.life.nonce,
            stop_before=stop_before,
        )
    if stop_before is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    link.saved(step, manifest.binary_digest, reason, requests, time.monotonic() - begin)


def _run_id(directory: Path) -> str:
    import tomllib

    with (directory / contract.RUN_FILE).open("rb") as file:
        return str(tomllib.load(file)["run"]["id"])


if __name__ == "__main__":
    sys.exit(main())
