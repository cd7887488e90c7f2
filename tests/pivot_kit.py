"""Runs of the saboteur that are pivoted, and requests that nobody waits for."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import tomli_w
import zmq
from runs_kit import Run

from supervisor import archive, contract, ledger, pivot
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

    def pivot(self, *more: str) -> subprocess.CompletedProcess[str]:
        """The command, to its end."""
        return self.supervisor(
            "pivot", str(self.directory), "--policy", str(self.policy_file), *more
        )

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
        with contextlib.closing(context.socket(zmq.DEALER)) as socket:
            socket.set(zmq.LINGER, 0)
            place = self.directory / contract.SOCKETS / contract.OPERATOR_SOCKET
            socket.connect(f"ipc://{place}")
            socket.send(contract.encode_message("pivot", id=id, **content))
            yield socket
        context.term()

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
