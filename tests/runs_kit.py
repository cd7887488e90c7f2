"""Runs with real processes: a directory, the settings of the saboteur, a supervisor on it.

Nothing here waits for a time; it waits for a condition, until a deadline that only a broken
product reaches. What is started here is ended here, through a descriptor of the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from ledger_kit import holds

from supervisor import cgroup, child, client, contract, journal, ledger
from supervisor.attendant import group_name
from supervisor.contract import Json

T = TypeVar("T")

DEADLINE_SECONDS = 30.0
LOOK_MILLISECONDS = 10
SABOTEUR = Path(__file__).with_name("saboteur.py")
PYTHON = sys.executable


def wait_until(condition: Callable[[], T | None], what: str, looks: int = 3000) -> T:
    """The first true answer of `condition`; a failure that names `what` after DEADLINE_SECONDS."""
    pause = select.poll()
    for _ in range(looks):
        found = condition()
        if found:
            return found
        pause.poll(LOOK_MILLISECONDS)
    raise AssertionError(f"it never came to this: {what}")


def wait_for_end(pid: int) -> None:
    """Returns once the process is a zombie or gone."""
    with contextlib.suppress(ProcessLookupError), pidfd(pid) as descriptor:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        assert end.poll(1000 * DEADLINE_SECONDS), f"process {pid} did not end"


@contextlib.contextmanager
def pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """A signal to a process that the caller knows to be its own; gone is as good as killed."""
    with contextlib.suppress(ProcessLookupError), pidfd(pid) as descriptor:
        signal.pidfd_send_signal(descriptor, number)


class Run:
    """A run directory and who works on it. `settings` are tables over those of a quick run."""

    def __init__(self, home: Path, name: str = "run", **settings: Json) -> None:
        self.home = home
        self.name = name
        self.directory = home / name
        self.config = home / f"{name}.toml"
        self.gate_file = home / f"{name}.gate"
        self.faults = ""
        self.environment: dict[str, str] = {}
        self.settings: dict[str, Json] = {
            "run": {"name": name, "directory": str(self.directory)},
            "training": {"steps": 30},
            "trainer": {"command": [PYTHON, str(SABOTEUR)]},
            "checkpoint": {"every": 10},
            "restart": {"delay_seconds": 0.01},
            "stop": {"grace_seconds": 30.0, "signal_after_seconds": 10.0},
            "hang": {"step_seconds": 600.0},  # a trainer that a test holds does not hang
        }
        for section, table in settings.items():
            self.settings[section] = {**self.settings.get(section, {}), **table}
        self._started: list[subprocess.Popen[str]] = []
        self.write_config()

    def set(self, section: str, **table: Any) -> None:
        self.settings[section] = {**self.settings.get(section, {}), **table}
        self.write_config()

    def write_config(self) -> None:
        self.config.write_text(tomli_w.dumps(self.settings))

    def patch(self, module: str, name: str, value: object) -> None:
        """Gives a name in `supervisor.<module>` another value, in every process of this run."""
        with (self.home / "sitecustomize.py").open("a") as file:
            file.write(f"from supervisor import {module}\n{module}.{name} = {value!r}\n")
        if "PYTHONPATH" in self.environment:
            return
        rest = os.environ.get("PYTHONPATH", "")
        self.environment["PYTHONPATH"] = f"{self.home}{os.pathsep}{rest}".rstrip(os.pathsep)

    # --- processes ---

    def command(self, *arguments: str) -> list[str]:
        return [PYTHON, "-m", "supervisor", *arguments]

    def variables(self) -> dict[str, str]:
        own = {"SABOTEUR_FAULTS": self.faults, "SUPERVISOR_RUNS": str(self.home)}
        if self.gate_file.exists():
            own["SABOTEUR_GATE"] = str(self.gate_file)
        return {**os.environ, **own, **self.environment}

    def start(self, *more: str) -> subprocess.Popen[str]:
        """A supervisor in the foreground; what it prints goes to files beside the run."""
        number = len(self._started) + 1
        with (
            (self.home / f"{self.name}.out-{number}").open("w") as out,
            (self.home / f"{self.name}.err-{number}").open("w") as err,
        ):
            process = subprocess.Popen(
                self.command("start", "--config", str(self.config), *more),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.variables(),
                text=True,
            )
        self._started.append(process)
        return process

    def end(self, supervisor: subprocess.Popen[str]) -> int:
        """Its exit code, once it has ended by itself."""
        return supervisor.wait(DEADLINE_SECONDS)

    def finish(self, *more: str) -> int:
        """Starts a supervisor and waits until it ends; its exit code."""
        return self.end(self.start(*more))

    def output(self) -> str:
        """What the newest supervisor has printed, on both streams."""
        number = len(self._started)
        return "".join(
            (self.home / f"{self.name}.{stream}-{number}").read_text() for stream in ("out", "err")
        )

    def supervisor(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """One command to its end."""
        return subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.variables() | more,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    def kill_supervisor(self, supervisor: subprocess.Popen[str]) -> None:
        supervisor.kill()
        supervisor.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        """Ends whatever is left, supervisor first so that it restarts nothing."""
        for process in self._started:
            if process.poll() is None:
                self.kill_supervisor(process)
        for holder in child.holders(self.directory / contract.TRAINER_LOCK_FILE, ""):
            kill(holder.pid)
            wait_for_end(holder.pid)
        self._remove_groups()

    def _remove_groups(self) -> None:
        """What a supervisor that was killed has not come to remove, in a hierarchy that all tests
        on this machine share."""
        parent, journal_path = cgroup.delegated(), self.directory / contract.JOURNAL_FILE
        if parent is not None and journal_path.exists():
            for nonce in re.findall(rb'"nonce":"([0-9a-f]+)"', journal_path.read_bytes()):
                cgroup.Cgroup(parent.path / group_name(nonce.decode())).remove()

    # --- the gate ---

    def assert_exact(self, steps: int) -> None:
        """Every step once, every checkpoint bound to the history, nothing executed differently."""
        assert self.steps() == list(range(1, steps + 1))
        assert all(self.proofs())
        replay = self.file_status()["replay"]
        assert (replay["diverged_steps"], replay["first_diverged_step"]) == (0, None)

    def gate(self, step: int) -> None:
        """Holds training at `step` from now on."""
        temporary = self.gate_file.with_suffix(".new")
        temporary.write_text(str(step))
        temporary.rename(self.gate_file)

    def open_gate(self) -> None:
        self.gate(10**9)

    # --- what is on disk ---

    def file_status(self) -> Json:
        """status.json as it is, or an empty object."""
        try:
            found: Json = json.loads((self.directory / contract.STATUS_FILE).read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def records(self, *kinds: str) -> list[Json]:
        """The journal's records, or those of the given kinds."""
        path = self.directory / contract.JOURNAL_FILE
        if not path.exists():
            return []
        found, _ = journal.read(path)
        return [record for record in found if not kinds or record["record"] in kinds]

    def wait_for_record(self, kind: str, **fields: Any) -> Json:
        """The first journal record of this kind with these values."""

        def found() -> Json | None:
            fitting = [r for r in self.records(kind) if fields.items() <= r.items()]
            return fitting[0] if fitting else None

        return wait_until(found, f"a record {kind} with {fields} in {self.records()}")

    @property
    def ledger_path(self) -> Path:
        return self.directory / contract.ledger_name(self.name)

    def rows(self) -> list[Json]:
        """The ledger as any JSON reader gets it."""
        found: list[Json] = json.loads(self.ledger_path.read_bytes())
        return found

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows()]

    def history_step(self) -> int:
        """The last whole entry's step, also while somebody writes."""
        if not self.ledger_path.exists():
            return 0
        entries, _ = ledger.read_entries(self.ledger_path)
        return entries[-1].step if entries else 0

    def checkpoints(self) -> list[int]:
        directory = self.directory / contract.CHECKPOINTS
        stems = (contract.parse_checkpoint_stem(path.stem) for path in directory.glob("*.bin"))
        return sorted(step for step in stems if step is not None)

    def proofs(self) -> list[bool]:
        """Whether the ledger is what the journal says, for each binding in it."""
        return [
            holds(self.ledger_path, record["ledger_entries"], record["ledger_sha256"])
            for record in self.records("checkpoint_committed")
        ]

    # --- the operator's socket ---

    def ask(self, verb: str, id: str = "", **content: Any) -> client.Answer:
        return client.ask(
            self.directory,
            verb,
            id=id or client.new_request_id(),
            timeout_seconds=DEADLINE_SECONDS,
            **content,
        )

    def status(self) -> Json:
        return self.ask("status").result

    def wait_for_status(self, **fields: Any) -> Json:
        """The supervisor's own answer, once it has all these values."""
        seen: Json = {}

        def found() -> Json | None:
            nonlocal seen
            with contextlib.suppress(client.NoSupervisor, FileNotFoundError):
                seen = self.status()
            return seen if fields.items() <= seen.items() else None

        return wait_until(found, f"status with {fields}")

    def hold(self, step: int, *more: str) -> subprocess.Popen[str]:
        """Starts a supervisor whose trainer is held at `step`, and waits until it is there."""
        self.gate(step)
        supervisor = self.start(*more)
        self.wait_for_status(phase="running", step=step)
        return supervisor
