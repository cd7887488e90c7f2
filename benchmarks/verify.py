"""`supervisor verify` against sha256sum: python benchmarks/verify.py [--count N] [--json]

- proving a run / `sha256sum` of the same files, both from the device and not from the page cache

By default the run has 50 checkpoints of the 12.8M model: 7.7 GB of random bytes, made once in a
temporary directory. Both sides read everything; verifying hashes it twice (each chunk for the
manifest, the whole for the journal) and checks the journal and the ledger besides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from supervisor import events as ev
from supervisor.contract import (
    CHUNK_BYTES,
    Entry,
    Manifest,
    Tensor,
    checkpoint_size_bytes,
    checkpoint_stem,
    chunks_digest,
)
from supervisor.journal import Journal
from supervisor.ledger import Ledger
from supervisor.rundir import RunDirectory
from supervisor.verify import verify

PARAMETERS, COUNT, CADENCE, ROUNDS = 12_780_288, 50, 100, 1
RUN_ID = "benchmark"


def write_checkpoint(directory: Path, step: int, parameters: int) -> tuple[str, str]:
    """A pair of random weights; the digest over its chunks, and its plain SHA-256."""
    whole, chunks = hashlib.sha256(), []
    left = checkpoint_size_bytes(parameters)
    with (directory / f"{checkpoint_stem(step)}.bin").open("wb") as file:
        data = struct.pack("<ii", step, parameters)
        while left:
            data += os.urandom(min(CHUNK_BYTES, left) - len(data))
            file.write(data)
            whole.update(data)
            chunks.append(hashlib.sha256(data).hexdigest())
            left -= len(data)
            data = b""
        file.flush()
        os.fsync(file.fileno())
    state = {
        "configuration": {},
        "policy_digest": "",
        "tokenizer": {},
        "arms": {},
        "bandit": {},
        "rng": {},
        "updates": step,
        "targets_seen": step,
        "detectors": {},
        "environment": {},
    }
    manifest = Manifest(
        run_id=RUN_ID,
        lineage=(),
        attempt=1,
        step=step,
        epoch=1,
        reason="cadence",
        requests=(),
        parameters=parameters,
        size_bytes=checkpoint_size_bytes(parameters),
        chunks=tuple(chunks),
        binary_digest=chunks_digest(chunks),
        tensors=(Tensor("all", (parameters,), "row", 0),),
        state=state,
    )
    (directory / f"{checkpoint_stem(step)}.json").write_bytes(manifest.to_bytes())
    return manifest.binary_digest, whole.hexdigest()


def make_run(path: Path, count: int, parameters: int) -> RunDirectory:
    run = RunDirectory(path, "run")
    run.create()
    journal, _ = Journal.open(run.journal)
    ledger = Ledger.open(run.ledger)
    created = ev.RunCreated(RUN_ID, "run", count * CADENCE, "")
    journal.append([ev.record_to_json(created)], time.time())
    for step in range(CADENCE, count * CADENCE + 1, CADENCE):
        ledger.append([Entry(n, 2 + 1 / n) for n in range(step - CADENCE + 1, step + 1)])
        ledger.sync()
        entries, sha256 = ledger.binding(step)
        digest, plain = write_checkpoint(run.checkpoints, step, parameters)
        committed = ev.record_to_json(ev.CheckpointCommitted(step, 1, "cadence", [], digest))
        bound = {"ledger_entries": entries, "ledger_sha256": sha256}
        verified = ev.record_to_json(ev.CheckpointVerified(step, plain))
        journal.append([committed | bound, verified], time.time())
    journal.sync()
    journal.close()
    ledger.close()
    return run


def forget(run: RunDirectory) -> None:
    """Empties the page cache of the run's files, as far as the kernel does what it is asked."""
    os.sync()
    for path in run.path.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(run: RunDirectory, rounds: int) -> dict[str, float]:
    files = sorted(str(path) for path in run.checkpoints.iterdir())
    files += [str(run.ledger), str(run.journal)]
    size_bytes = sum(os.stat(path).st_size for path in files)

    def prove() -> None:
        problems = verify(run).problems
        if problems:
            raise SystemExit(f"the benchmark's own run does not verify: {problems[0]}")

    def hash_all() -> None:
        subprocess.run(["sha256sum", *files], stdout=subprocess.DEVNULL, check=True)

    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        for times, action in ((theirs, hash_all), (ours, prove)):
            forget(run)
            times.append(seconds(action))
    proved, hashed = statistics.median(ours), statistics.median(theirs)
    return {
        "size_bytes": size_bytes,
        "verify_megabytes_per_second": size_bytes / proved / 1e6,
        "sha256sum_megabytes_per_second": size_bytes / hashed / 1e6,
        "verify_speed_ratio": hashed / proved,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--count", type=int, default=COUNT, help="checkpoints (default 50)")
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="of the model")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="medians over this many")
    parser.add_argument("--directory", type=Path, help="where to write (a temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        run = make_run(Path(name) / "run", options.count, options.parameters)
        found = measure(run, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    for what, value in found.items():
        sys.stdout.write(f"{what:32} {value:16.6g}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
