"""How long an operator waits for a status while a large checkpoint is written and read back.

- round trips of `status` on the operator socket: idle, beside the writing of a checkpoint, beside
  its verification by the helper process; and each as a ratio to idle, in the same run
- the acknowledgement of a checkpoint: from its commit by the trainer to the operator's reply, with
  the journal's sync in between

By default the checkpoint has 100M parameters, 1.2 GB; four of them have to fit below --directory.

    python benchmarks/status_latency.py [--parameters N] [--round-trips N] [--json]

The trainer of this run is this file again, without torch. It writes a checkpoint as ours does: in
pieces of 4 MiB, digests beside the writing on two threads, synced, linked, with a manifest.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import tomli_w
import zmq

from supervisor import contract
from supervisor.contract import Entry, Manifest, Tensor
from supervisor.link import Link, life_from_environment

PARAMETERS: Final = 100_000_000
ROUND_TRIPS: Final = 200
BUDGET_SECONDS: Final = 0.005
PACE_SECONDS: Final = 0.01
STEP_SECONDS: Final = 0.01
DEADLINE_SECONDS: Final = 600.0
IDLE, WRITING, VERIFYING, ACKNOWLEDGED = "idle", "writing", "verifying", "acknowledgement"


# --- the trainer ----------------------------------------------------------------------------------


def train() -> int:
    """Steps without arithmetic; a checkpoint whenever one is asked for."""
    life = life_from_environment(os.environ)
    assert life is not None, "the trainer of this benchmark is started by a supervisor"
    settings = tomllib.loads((life.run_directory / contract.RUN_FILE).read_text())
    parameters = int(os.environ["BENCHMARK_PARAMETERS"])
    image = memoryview(mmap.mmap(-1, contract.checkpoint_size_bytes(parameters)))
    block = os.urandom(min(contract.CHUNK_BYTES, len(image)))
    for start in range(0, len(image), len(block)):
        piece = image[start : start + len(block)]
        piece[:] = block[: len(piece)]
    step = life.resume_step or 0
    with Link(life) as link:
        link.install_signal_handlers()
        link.hello(step, parameters, "0" * 64)
        while True:
            due = link.due(cadence=False)
            if due.reason is not None and step:
                link.phase("save")
                draft = _manifest(settings["run"]["id"], life.attempt, step, parameters, due.reason)
                digest = _publish(link, image, draft)
                Path(os.environ["BENCHMARK_COMMITTED"]).write_text(str(time.monotonic()))
                link.saved(step, digest, due.reason, due.requests, 0.0)
                link.phase("step")
            if due.stop:
                link.farewell("stopped", step, 0)
                return 0
            time.sleep(STEP_SECONDS)
            step += 1
            link.record(Entry(step, 1.0, time.time(), life.attempt, life.epoch, step_seconds=0.01))


def _manifest(run_id: str, attempt: int, step: int, parameters: int, reason: str) -> Manifest:
    state: dict[str, Any] = {name: kind() for name, kind in contract.STATE_COMPONENTS.items()}
    return Manifest(
        run_id=run_id,
        lineage=(),
        attempt=attempt,
        step=step,
        epoch=1,
        reason=reason,
        requests=(),
        parameters=parameters,
        size_bytes=contract.checkpoint_size_bytes(parameters),
        chunks=(),
        binary_digest="",
        tensors=(Tensor("all", (parameters,), "row", 0),),
        state=state | {"updates": step},
    )


def _publish(link: Link, image: memoryview, draft: Manifest) -> str:
    struct.pack_into("<ii", image, 0, draft.step, draft.parameters)
    size = contract.CHUNK_BYTES
    pieces = [image[start : start + size] for start in range(0, len(image), size)]
    directory = link.directory / contract.CHECKPOINTS
    stem = contract.checkpoint_stem(draft.step)
    temporaries = {
        ending: directory / contract.temporary_name(draft.attempt, link.life.nonce, stem + ending)
        for ending in (".json", ".bin")
    }
    with ThreadPoolExecutor(2) as pool, temporaries[".bin"].open("wb", buffering=0) as file:
        digests = pool.map(lambda piece: hashlib.sha256(piece).hexdigest(), pieces)
        for piece in pieces:
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
        chunks = tuple(digests)
    whole = Manifest(
        **{
            **{name: getattr(draft, name) for name in Manifest.__slots__},
            "chunks": chunks,
            "binary_digest": contract.chunks_digest(chunks),
        }
    )
    with temporaries[".json"].open("wb") as file:
        file.write(whole.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    link.sync()
    for ending, temporary in temporaries.items():
        os.link(temporary, directory / (stem + ending))
        temporary.unlink()
    return whole.binary_digest


# --- the operator ---------------------------------------------------------------------------------


class Operator:
    """One connection to the supervisor of a run, as a view holds it."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._numbers = itertools.count()
        place = f"/proc/self/fd/{self._descriptor}/{contract.SOCKETS}/{contract.OPERATOR_SOCKET}"
        self._socket.connect(f"ipc://{place}")
        self.replies: dict[str, float] = {}

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        os.close(self._descriptor)

    def ask(self, verb: str, **content: Any) -> str:
        id = f"{verb}-{next(self._numbers)}"
        self._socket.send(contract.encode_message(verb, id=id, **content))
        return id

    def wait(self, id: str) -> dict[str, Any]:
        """The reply to a request; the moments of others that come before it are kept."""
        while True:
            if not self._socket.poll(int(DEADLINE_SECONDS * 1000)):
                raise TimeoutError(f"no reply to {id}")
            _, reply = contract.parse_message(self._socket.recv(), contract.ANSWER, "reply")
            if reply["outcome"] != "done":
                raise RuntimeError(f"{reply['id']}: {reply['outcome']}: {reply.get('why')}")
            self.replies[reply["id"]] = time.monotonic()
            if reply["id"] == id:
                result: dict[str, Any] = reply["result"]
                return result

    def status(self) -> tuple[float, dict[str, Any]]:
        """Seconds of one round trip, and what it brought."""
        begin = time.monotonic()
        result = self.wait(self.ask("status"))
        return time.monotonic() - begin, result


@contextmanager
def supervised(home: Path, parameters: int) -> Iterator[tuple[Operator, Path]]:
    """A run of this file's trainer, and the file where it says when it has committed."""
    run, committed = home / "run", home / "committed"
    tree = {
        "run": {"name": "run", "directory": str(run)},
        "training": {"steps": 10**9},
        "trainer": {"command": [sys.executable, str(Path(__file__).resolve()), "--trainer"]},
        "checkpoint": {"every": 10**9, "keep_last": 2},
        "stop": {"grace_seconds": DEADLINE_SECONDS},
    }
    (home / "run.toml").write_text(tomli_w.dumps(tree))
    own = {"BENCHMARK_PARAMETERS": str(parameters), "BENCHMARK_COMMITTED": str(committed)}
    with (home / "output").open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "supervisor", "start", "--config", str(home / "run.toml")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | own,
        )
    try:
        while not (run / contract.SOCKETS / contract.OPERATOR_SOCKET).exists():
            if supervisor.poll() is not None:
                raise RuntimeError((home / "output").read_text())
            time.sleep(PACE_SECONDS)
        operator = Operator(run)
        try:
            yield operator, committed
        finally:
            operator.close()
    finally:
        # SIGTERM would save once more; nobody needs that checkpoint.
        trainer = _trainer_of(run)
        supervisor.kill()
        supervisor.wait()
        if trainer is not None:
            os.kill(trainer, 9)


def _trainer_of(run: Path) -> int | None:
    status = run / contract.STATUS_FILE
    return json.loads(status.read_bytes())["trainer_pid"] if status.exists() else None


# --- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds. `ratio` is p99 to that of idle."""

    name: str
    count: int
    p50: float
    p99: float
    maximum: float
    ratio: float


def measure(home: Path, parameters: int, round_trips: int, pace_seconds: float) -> list[Row]:
    found: dict[str, list[float]] = {IDLE: [], WRITING: [], VERIFYING: [], ACKNOWLEDGED: []}
    with supervised(home, parameters) as (operator, committed):
        while _phase_of(operator.status()[1]) != IDLE:
            time.sleep(PACE_SECONDS)
        while len(found[IDLE]) < round_trips:
            found[IDLE].append(operator.status()[0])
            time.sleep(pace_seconds)
        while min(len(found[WRITING]), len(found[VERIFYING])) < round_trips:
            request = operator.ask("checkpoint", at="now")
            phase = ""
            while request not in operator.replies or phase != IDLE:
                seconds, status = operator.status()
                phase = _phase_of(status)
                if phase in (WRITING, VERIFYING):
                    found[phase].append(seconds)
                time.sleep(pace_seconds)
            found[ACKNOWLEDGED].append(operator.replies[request] - float(committed.read_text()))
    idle = _quantile(found[IDLE], 0.99)
    return [
        Row(
            name,
            len(seconds),
            _quantile(seconds, 0.5),
            _quantile(seconds, 0.99),
            max(seconds),
            _quantile(seconds, 0.99) / idle,
        )
        for name, seconds in found.items()
    ]


def _phase_of(status: dict[str, Any]) -> str:
    """What goes on beside this round trip."""
    if status["phase"] != "running" or status["step"] == 0:
        return "starting"
    if status["trainer_phase"] == "save":
        return WRITING
    return VERIFYING if status["checkpoint"]["verified"] is False else IDLE


def _quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def table(rows: list[Row]) -> str:
    lines = [f"{'status beside':<18}{'count':>7}{'p50':>10}{'p99':>10}{'max':>10}{'p99/idle':>10}"]
    for row in rows:
        times = "".join(f"{1000 * s:>7.2f} ms" for s in (row.p50, row.p99, row.maximum))
        lines.append(f"{row.name:<18}{row.count:>7}{times}{row.ratio:>10.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--round-trips", type=int, default=ROUND_TRIPS)
    parser.add_argument("--directory", help="where to work; a temporary directory without it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        return train()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        rows = measure(Path(place), arguments.parameters, arguments.round_trips, PACE_SECONDS)
    worst = max(row.p99 for row in rows if row.name in (WRITING, VERIFYING))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(table(rows))
        print(f"budget: p99 at most {1000 * BUDGET_SECONDS:g} ms; {1000 * worst:.2f} ms measured")
    return 0 if worst <= BUDGET_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
