"""Runs of the saboteur that are pivoted, and requests that nobody waits for."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import tomli_w
import zmq
from runs_kit import DEADLINE_SECONDS, Run, wait_until

from supervisor import archive, client, contract, ledger, pivot
from supervisor.contract import Entry, Json
from supervisor.state import Durable

OLD_ARMS = ("prose", "code")
NEW_ARMS = ("prose", "notes")


def arms(*names: str, **more: Any) -> list[Json]:
    """`more` goes to the first of them."""
    tables: list[Json] = [{"name": name, "builtin": "python-docs"} for name in names]
    tables[0] |= more
    return tables


class PivotRun(Run):
    """A run of 400 steps with a checkpoint every 100, under a policy of two arms."""

    def __init__(self, home: Path, name: str = "run", **settings: Json) -> None:
        quick: dict[str, Json] = {
            "training": {"steps": 400},
            "checkpoint": {"every": 100, "keep_every": 1},
            "policy": {"kind": "static", "arms": arms(*OLD_ARMS)},
        }
        for section, table in settings.items():
            quick[section] = {**quick.get(section, {}), **table}
        super().__init__(home, name, **quick)
        self.policy_file = home / f"{name}.policy.toml"
        self.write_policy()

    def write_policy(self, *names: str, **sections: Any) -> Path:
        """A policy file with these arms; `sections` are other tables, or `policy` as a whole."""
        tree = {"policy": {"kind": "static", "arms": arms(*(names or NEW_ARMS))}, **sections}
        self.policy_file.write_text("# polish\n" + tomli_w.dumps(tree))
        return self.policy_file

    # --- requests ---

    def pivot(self, *more: str, gate: int | None = None) -> subprocess.CompletedProcess[str]:
        """The command, to its end; training is let go on to `gate` once its trainer knows."""
        place = ("pivot", str(self.directory), "--policy", str(self.policy_file))
        if gate is None:
            return self.supervisor(*place, *more)
        before = self.pauses()
        with subprocess.Popen(
            self.command(*place, *more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.variables(),
        ) as command:
            wait_until(lambda: self.pauses() > before, "a trainer that knows of it")
            self.gate(gate)
            output, errors = command.communicate(timeout=DEADLINE_SECONDS)
        return subprocess.CompletedProcess(command.args, command.returncode, output, errors)

    def pivoted(self, gate: int) -> str:
        """The same without the command, which takes its time: what came of it."""
        id = client.new_request_id()
        with self.asked(id, **self.proposal()) as reply:
            self.wait_for_pauses(id)
            self.gate(gate)
            assert reply.poll(int(1000 * DEADLINE_SECONDS)), "no reply"
            outcome: str = orjson.loads(reply.recv())["outcome"]
        return outcome

    def rollback(self, to_step: int, *more: str) -> subprocess.CompletedProcess[str]:
        return self.supervisor("rollback", str(self.directory), "--to-step", str(to_step), *more)

    def proposal(self, at: str = "boundary", to_step: int | None = None) -> Json:
        """What the command would ask for, checked."""
        file = self.policy_file if to_step is None else None
        found = pivot.propose(self.directory, file, at=at, reason="test", to_step=to_step)
        return found.content

    @contextlib.contextmanager
    def asked(self, id: str, **content: Any) -> Iterator[zmq.Socket[bytes]]:
        """A pivot has been asked for; the reply, if there ever is one, comes on the socket."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            socket = context.socket(zmq.DEALER)
            directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            place = f"/proc/self/fd/{directory}/{contract.SOCKETS}/{contract.OPERATOR_SOCKET}"
            socket.connect(f"ipc://{place}")
            socket.send(contract.encode_message("pivot", id=id, **content))
            yield socket
        finally:
            context.destroy(linger=0)
            os.close(directory)

    def pauses(self, id: str = "") -> int:
        """How often a trainer has heard that it is to pause."""
        logs = (self.directory / contract.LOGS).glob("attempt-*.log")
        return sum(path.read_text().count(f"asked to pause: {id}") for path in logs)

    def wait_for_pauses(self, id: str, count: int = 1) -> None:
        wait_until(lambda: self.pauses(id) >= count, f"{count} trainers that know of {id}")

    # --- what is on disk ---

    @property
    def durable(self) -> Durable:
        return pivot.durable_of(self.directory)

    def entries(self) -> list[Entry]:
        found, torn = ledger.read_entries(self.ledger_path)
        assert torn is None
        return found

    def epochs_of_steps(self) -> dict[int, int | None]:
        """Step -> epoch, in the canonical history."""
        return {entry.step: entry.epoch for entry in ledger.canonical(self.entries())}

    def archive(self, epoch: int, base_step: int) -> Path:
        return self.directory / contract.ARCHIVE / archive.archive_name(epoch, base_step)

    def archives(self) -> list[str]:
        return sorted(path.name for path in (self.directory / contract.ARCHIVE).iterdir())

    def policies(self) -> list[str]:
        return sorted(path.name for path in (self.directory / contract.POLICIES).iterdir())

    def sidecar(self, name: str) -> Any:
        return orjson.loads((self.directory / name).read_bytes())

    def manifest(self, step: int) -> contract.Manifest:
        path = self.directory / contract.CHECKPOINTS / f"{contract.checkpoint_stem(step)}.json"
        return contract.parse_manifest(path.read_bytes(), path.name)


def epochs(*stretches: tuple[int, int, int]) -> dict[int, int | None]:
    """(first step, last step, epoch) of each stretch, as `epochs_of_steps` tells them."""
    return {step: epoch for first, last, epoch in stretches for step in range(first, last + 1)}
