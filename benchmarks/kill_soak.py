"""SIGKILL at random moments of a real run: python benchmarks/kill_soak.py --kills 300 --seed 1

Two supervised runs with the same settings: one is left alone, in the other the trainer, the
supervisor or both are killed, in every phase of a life (load, step, evaluate, sample, the stages
of a save, exit), and the supervisor is started again where it was killed. In the end both must
hold the same history, weights, moments, samplers, bandit and generators, to the last bit.

    --kills N   how many kills           --json      the result as JSON
    --seed S    which moments            --keep DIR  where to work, and leave it for a look

What may be killed: the supervisor that this program started, and the holder of trainer.lock in
its own directory, through a pidfd. A phase is aimed at by the files that a trainer writes, and
recorded as the files say after its death. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from supervisor import child, contract, events, journal, ledger
from supervisor.contract import AuditLine, Entry, EvaluationLine, ExitLine, Manifest
from supervisor.ledger_proof import Begin, bindings_of, prove_ledger
from supervisor.state import Durable, fold

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("trainer", "supervisor", "both")
SAVE_STAGES = ("save: binary", "save: manifest", "save: linking", "save: unlinking")
PHASES = ("load", "step", "evaluate", "sample", *SAVE_STAGES, "exit")
CADENCE = 20
STEPS_A_KILL = 3 * CADENCE
LOAD_SECONDS = 1.5
AIM_SECONDS = 20.0
RUN_SECONDS = 3600.0  # after the last kill thousands of steps may be left
LOOK_SECONDS = 0.0003  # a stage of a save takes a few milliseconds
TAIL_BYTES = 8192
DETERMINISTIC_STATE = ("arms", "bandit", "rng", "targets_seen", "updates", "tokenizer")


# --- a run ----------------------------------------------------------------------------------------


def write_text(home: Path) -> None:
    """Three arms of invented text, the same each time."""
    source = random.Random(7)
    words = ["".join(source.choices("aeioulnrst", k=source.randint(2, 8))) for _ in range(300)]
    for arm in ("letters", "notes", "code"):
        lines = (
            json.dumps({"text": " ".join(source.choices(words, k=source.randint(8, 40)))})
            for _ in range(60)
        )
        (home / f"{arm}.jsonl").write_text("\n".join(lines))


def settings(home: Path, name: str, steps: int) -> dict[str, Any]:
    """The lesson's model made smaller: dropout on, three arms, two micro-batches an update."""
    return {
        "run": {"name": name, "directory": str(home / name)},
        "model": {"width": 16, "heads": 2, "layers": 1, "context": 32, "dropout": 0.1},
        "training": {
            "steps": steps,
            "seed": 7,
            "batch_windows": 4,
            "accumulate": 2,
            "learning_rate": 0.003,
            "warmup_steps": 10,
            "schedule": "cosine",
        },
        "trainer": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": CADENCE, "keep_last": 3},
        "samples": {"prompts": ["the "], "tokens": 8},
        "evaluation": {"fraction": 0.1, "windows": 8},
        "policy": {
            "warmup_steps": 15,
            "warmup_arms": ["letters"],
            "arms": [
                {"name": arm, "files": [str(home / f"{arm}.jsonl")], "weight": weight}
                for arm, weight in (("letters", 2.0), ("notes", 1.0), ("code", 1.5))
            ],
        },
        # A soak is no crash loop: it may kill as often as it likes.
        "restart": {"delay_seconds": 0.01, "maximum_delay_seconds": 0.02, "deaths": 1_000_000},
    }


class Run:
    """One supervised run. Whatever it started is ended by `close`."""

    def __init__(self, home: Path, name: str, steps: int) -> None:
        self.name = name
        self.directory = home / name
        self.config = home / f"{name}.toml"
        self.config.write_text(tomli_w.dumps(settings(home, name, steps)))
        self.output = home / f"{name}.out"
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        with self.output.open("ab") as output:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-m", "supervisor", "start", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=self.environment,
            )

    def ended(self) -> int | None:
        assert self.supervisor is not None
        return self.supervisor.poll()

    def wait(self, seconds: float) -> int:
        assert self.supervisor is not None
        return self.supervisor.wait(seconds)

    def kill_supervisor(self) -> None:
        assert self.supervisor is not None
        self.supervisor.kill()
        self.supervisor.wait()

    def trainer(self) -> int | None:
        """The process that holds trainer.lock of this directory and leads its session."""
        holders = child.holders(self.directory / contract.TRAINER_LOCK_FILE, "")
        return next((holder.pid for holder in holders if holder.leader), None)

    def close(self) -> None:
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.kill_supervisor()
        while (pid := self.trainer()) is not None:
            with contextlib.suppress(ProcessLookupError), pidfd_of(pid) as descriptor:
                kill(descriptor)

    # --- what its files say ---

    def entries(self) -> list[Entry]:
        return ledger.read_entries(self.directory / contract.ledger_name(self.name))[0]

    def durable(self) -> Durable:
        records, _ = journal.read(self.directory / contract.JOURNAL_FILE)
        return fold(filter(None, map(events.record_from_json, records)))

    def final(self) -> tuple[Manifest, bytes]:
        """The last checkpoint: its manifest and its weights, m and v."""
        paths = (self.directory / contract.CHECKPOINTS).glob("*.bin")
        newest = max(paths, key=lambda path: int(path.stem.removeprefix("step_")))
        manifest = newest.with_suffix(".json")
        return (
            contract.parse_manifest(manifest.read_bytes(), manifest.name),
            newest.read_bytes()[contract.HEADER_BYTES :],
        )


@contextlib.contextmanager
def pidfd_of(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def kill(descriptor: int) -> bool:
    """SIGKILL to that process, and its end awaited; False where it had ended by itself."""
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    gone = select.poll()
    gone.register(descriptor, select.POLLIN)
    if not gone.poll(10_000):
        raise TimeoutError("a killed process did not end")
    return True


# --- where a trainer is, by what it has written ---------------------------------------------------


class Traces:
    """The files of one attempt: its receipts, and its half-made checkpoint."""

    def __init__(self, run: Run, attempt: int) -> None:
        self.attempt = attempt
        self._checkpoints = run.directory / contract.CHECKPOINTS
        self._receipts = (
            run.directory / contract.RECEIPTS / f"{contract.attempt_stem(attempt)}.jsonl"
        )

    def last(self) -> contract.Receipt | None:
        """The last whole receipt."""
        try:
            with self._receipts.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        return contract.parse_receipt(lines[-1], "receipts") if lines else None

    def half_made(self) -> set[str]:
        """Which of `.bin` and `.json` exist under temporary names of this attempt."""
        prefix = f"{contract.TEMPORARY_PREFIX}{self.attempt:04d}-"
        names = os.listdir(self._checkpoints) if self._checkpoints.exists() else []
        return {name[name.rindex(".") :] for name in names if name.startswith(prefix)}

    def published(self, step: int, ending: str) -> bool:
        return (self._checkpoints / (contract.checkpoint_stem(step) + ending)).exists()

    def phase(self) -> tuple[str, int]:
        """Where it is, or was when it died, and its step."""
        last = self.last()
        step = getattr(last, "step", 0)
        half = self.half_made()
        if half:
            if self.published(step, ".bin"):
                return "save: unlinking", step
            if self.published(step, ".json") and ".json" in half:
                return "save: linking", step
            return ("save: manifest" if ".json" in half else "save: binary"), step
        match last:
            case Entry() if step % CADENCE == 0 and not self.published(step, ".bin"):
                return "evaluate", step
            case EvaluationLine():
                return "sample", step
            case Entry() | AuditLine():
                return "step", step
            case ExitLine():
                return "exit", step
        return "load", 0


@dataclass(frozen=True)
class Kill:
    target: str
    aimed: str
    phase: str
    attempt: int
    step: int


class Marksman:
    """Kills in a run, one after the other, in the phases of a shuffled list."""

    def __init__(self, run: Run, kills: int, seed: int) -> None:
        self.run = run
        self.kills: list[Kill] = []
        self._chance = random.Random(seed)
        aims = list(itertools.product(TARGETS, PHASES))
        rounds = -(-kills // len(aims))
        plan = [aim for _ in range(rounds) for aim in self._chance.sample(aims, len(aims))]
        self._plan = deque(plan[:kills])
        self._killed = 0  # the trainer that was killed last
        self._died_at = 0

    def work(self) -> None:
        """All kills, unless the run comes to its end before."""
        while self._plan and self.run.ended() is None:
            target, phase = self._plan.popleft()
            if not self._shoot(target, phase):
                self._plan.append((target, phase))  # it ended by itself first

    def _shoot(self, target: str, phase: str) -> bool:
        pid = self._living()
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError), pidfd_of(pid) as descriptor:
            traces = Traces(self.run, self._attempt())
            if not self._aim(traces, descriptor, phase):
                return False
            found, step = traces.phase()
            if target != "trainer":
                self.run.kill_supervisor()
            if target != "supervisor":
                if not kill(descriptor) and target == "trainer":
                    return False
                found, step = traces.phase()  # nothing moves any more
                self._killed, self._died_at = pid, max(step, self._died_at)
            self.kills.append(Kill(target, phase, found, traces.attempt, step))
            if target != "trainer":
                self.run.start()
            return True
        return False

    def _living(self) -> int | None:
        """The trainer, once there is one that was not killed; None when the run has ended."""

        def found() -> int | None:
            pid = self.run.trainer()
            return pid if pid != self._killed else None

        living: int | None = self._until(found)
        return living

    def _attempt(self) -> int:
        opened = self._until(lambda: self.run.durable().open)
        return opened.attempt if opened is not None else 0

    def _aim(self, traces: Traces, descriptor: int, phase: str) -> bool:
        """Waits for the moment; False where the trainer or the run ended first."""
        if phase == "load":
            # From its first instruction to its first steps.
            time.sleep(self._chance.uniform(0.0, LOAD_SECONDS))
            return True
        # Beyond the place of the last death: a run that dies at one place again and again is
        # another experiment.
        wanted = self._died_at + self._chance.randint(1, CADENCE)
        if phase == "exit":
            if not self._watch(descriptor, lambda: traces.phase()[1] >= wanted):
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            return self._watch(descriptor, lambda: traces.phase()[0] == phase)

        def there() -> bool:
            found, step = traces.phase()
            # A stage of a millisecond may be missed a few times; the run must not end meanwhile.
            return step >= wanted and (found in (phase, "exit") or step >= wanted + 2 * CADENCE)

        return self._watch(descriptor, there)

    def _watch(self, descriptor: int, happened: Callable[[], bool]) -> bool:
        """Waits until it happened; False where the trainer ended first, or it took too long."""
        limit = time.monotonic() + AIM_SECONDS
        while time.monotonic() < limit:
            if happened():
                return True
            if select.select([descriptor], [], [], LOOK_SECONDS)[0]:
                return False
        return False

    def _until(self, happened: Callable[[], Any]) -> Any:
        """What happened, once it is true; None where the run ended first, or it took too long."""
        limit = time.monotonic() + AIM_SECONDS
        while time.monotonic() < limit:
            found = happened()
            if found or self.run.ended() is not None:
                return found
            time.sleep(0.01)
        return None


# --- the verdict ----------------------------------------------------------------------------------


@dataclass
class Result:
    seed: int
    kills: list[Kill] = field(default_factory=list)
    steps: int = 0
    lost_entries: int = 0
    duplicate_entries: int = 0
    differing_entries: int = 0
    differing_bits: int = 0
    differing_state: list[str] = field(default_factory=list)
    damaged_ledger: list[str] = field(default_factory=list)
    manual_steps: int = 0
    verified_steps: int = 0
    diverged_steps: int = 0
    attempts: int = 0
    supervisor_starts: int = 0
    wall_seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (
            self.lost_entries
            or self.duplicate_entries
            or self.differing_entries
            or self.differing_bits
            or self.differing_state
            or self.damaged_ledger
            or self.manual_steps
            or self.diverged_steps
        )

    def to_json(self) -> dict[str, Any]:
        by = Counter((kill.target, kill.phase) for kill in self.kills)
        return {
            "clean": self.clean,
            "kills": len(self.kills),
            "kills_by_target": dict(Counter(kill.target for kill in self.kills)),
            "kills_by_phase": dict(Counter(kill.phase for kill in self.kills)),
            "kills_by_target_and_phase": {f"{t}, {p}": n for (t, p), n in sorted(by.items())},
            **{name: value for name, value in vars(self).items() if name != "kills"},
        }


def judge(killed: Run, alone: Run, result: Result) -> None:
    """Everything that both runs recorded, and the state that both came to."""
    entries, reference = killed.entries(), alone.entries()
    history = {entry.step: entry for entry in ledger.canonical(entries)}
    result.lost_entries = sum(entry.step not in history for entry in reference)
    result.duplicate_entries = len(entries) - len(history)
    result.differing_entries = sum(
        bool(contract.differing_fields(entry, history[entry.step]))
        for entry in reference
        if entry.step in history
    )
    (manifest, state), (other_manifest, other_state) = killed.final(), alone.final()
    result.differing_bits = differing_bits(state, other_state)
    result.differing_state = [
        name for name in DETERMINISTIC_STATE if manifest.state[name] != other_manifest.state[name]
    ]
    result.damaged_ledger = proofs(killed)
    durable = killed.durable()
    result.steps = len(reference)
    result.verified_steps = durable.verified_steps
    result.diverged_steps = durable.diverged_steps
    result.attempts = durable.attempt
    result.supervisor_starts = killed.starts


def differing_bits(one: bytes, other: bytes) -> int:
    if len(one) != len(other):
        return 8 * max(len(one), len(other))
    if one == other:
        return 0
    return (int.from_bytes(one) ^ int.from_bytes(other)).bit_count()


def proofs(run: Run) -> list[str]:
    """What is wrong with the ledger, against each binding that the journal holds."""
    path = run.directory / contract.ledger_name(run.name)
    records, _ = journal.read(run.directory / contract.JOURNAL_FILE)
    bindings = bindings_of(records)
    proof = prove_ledger(path, bindings, Begin(), writing=False, advance=lambda size_bytes: None)
    return [str(problem) for problem in proof.problems]


def soak(home: Path, kills: int, seed: int) -> Result:
    write_text(home)
    began = time.monotonic()
    result = Result(seed)
    steps = max(2 * CADENCE, kills * STEPS_A_KILL)
    killed, alone = Run(home, "killed", steps), Run(home, "alone", steps)
    try:
        alone.start()
        killed.start()
        marksman = Marksman(killed, kills, seed)
        marksman.work()
        result.kills = marksman.kills
        for run in (killed, alone):
            if run.wait(RUN_SECONDS) != 0:
                # Somebody would have to look at it: that is what must never be needed.
                result.manual_steps += 1
                sys.stderr.write(run.output.read_text()[-4000:])
        judge(killed, alone, result)
    finally:
        killed.close()
        alone.close()
    result.wall_seconds = round(time.monotonic() - began, 1)
    return result


def table(result: Result) -> str:
    counts = Counter((kill.target, kill.phase) for kill in result.kills)
    head = f"{'killed in':<18}" + "".join(f"{target:>12}" for target in TARGETS) + f"{'all':>8}"
    rows = [
        f"{phase:<18}"
        + "".join(f"{counts[target, phase]:>12}" for target in TARGETS)
        + f"{sum(counts[target, phase] for target in TARGETS):>8}"
        for phase in PHASES
    ]
    facts = {
        "kills": len(result.kills),
        "steps": result.steps,
        "attempts": result.attempts,
        "supervisor starts": result.supervisor_starts,
        "lost entries": result.lost_entries,
        "duplicate entries": result.duplicate_entries,
        "differing entries": result.differing_entries,
        "differing bits of weights, m, v": result.differing_bits,
        "differing state": ", ".join(result.differing_state) or "none",
        "ledger proofs failed": len(result.damaged_ledger),
        "manual steps": result.manual_steps,
        "steps executed again and verified": result.verified_steps,
        "diverged": result.diverged_steps,
        "wall seconds": result.wall_seconds,
    }
    listed = [f"{name:<36}{value}" for name, value in facts.items()]
    verdict = "the run is the run that was never killed" if result.clean else "THE RUNS DIFFER"
    return "\n".join([head, *rows, "", *listed, "", verdict])


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGKILL at random moments of a real run.")
    parser.add_argument("--kills", type=int, default=30, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as undo:
        if arguments.keep is not None:
            home = arguments.keep.resolve()
            home.mkdir(parents=True)
        else:
            home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kill-soak-")))
        result = soak(home, arguments.kills, arguments.seed)
    print(json.dumps(result.to_json(), indent=2) if arguments.json else table(result))
    return 0 if result.clean else 1


if __name__ == "__main__":
    sys.exit(main())
