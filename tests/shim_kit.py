"""Runs whose processes carry tests/fault_shim.c, and what must hold of such a run in the end."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import orjson
import tomli_w
import trainer_kit
from pivot_kit import NEW_ARMS, OLD_ARMS, PivotRun

from supervisor import archive, config, contract
from supervisor.contract import Json, digest

SOURCE: Final = Path(__file__).with_name("fault_shim.c")
HELD_TRAINER: Final = Path(__file__).with_name("held_trainer.py")
# Both are numbered from 1, as in fault_shim.c.
ROLES: Final = ("supervisor", "trainer", "helper")
FAULTS: Final = ("kill it", "kill the other", "kill both", "ENOSPC", "EIO", "stop")
ARMED, ARMED_AT_LOCK = 1, 2

STEPS, CADENCE = 16, 4


def build_shim(place: Path) -> Path:
    built = place / "fault_shim.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "the faults need a C compiler"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", built, SOURCE, "-ldl"], check=True, timeout=60)
    return built


class Map:
    """`struct map` of the shim: what is struck, and what has been counted."""

    FIELDS: Final = ("armed", "role", "fault", "strike_at", "count", "struck")
    SIZE: Final = 8 * (len(FIELDS) + 1 + len(ROLES))

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(self.SIZE))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), self.SIZE)

    def __getitem__(self, field: str) -> int:
        (value,) = struct.unpack_from("q", self._bytes, 8 * self.FIELDS.index(field))
        return int(value)

    def __setitem__(self, field: str, value: int) -> None:
        struct.pack_into("q", self._bytes, 8 * self.FIELDS.index(field), value)

    def close(self) -> None:
        self._bytes.close()


class Call(NamedTuple):
    """A call that a run makes, by its number among those of one role."""

    role: str
    number: int
    name: str
    target: str
    can_fail: bool


class Struck(PivotRun):
    """A run whose processes all carry the shim, until `heal`."""

    def __init__(self, home: Path, shim: Path) -> None:
        super().__init__(
            home,
            training={"steps": STEPS},
            checkpoint={"every": CADENCE},
            stop={"grace_seconds": 5.0, "signal_after_seconds": 1.0},
        )
        self.map = Map(home / "map")
        self.log = home / "calls"
        self.log.touch()
        self.environment = {
            "LD_PRELOAD": str(shim),
            "FAULT_MAP": str(home / "map"),
            "FAULT_LOG": str(self.log),
            "SABOTEUR_PAUSE": "2",
        }

    def final_digest(self) -> str:
        """Of the weights, m and v after the last step."""
        return self.manifest(STEPS).binary_digest

    def arm(self, role: str, fault: str, strike_at: int, armed: int = ARMED) -> None:
        """`strike_at` -1 strikes nothing, and counts."""
        self.map["role"] = ROLES.index(role) + 1
        self.map["strike_at"] = strike_at
        self.map["fault"] = FAULTS.index(fault) + 1 if fault else 0
        self.map["armed"] = armed

    def heal(self) -> None:
        self.map["armed"] = 0
        self.environment.pop("LD_PRELOAD", None)  # it may be called again

    def close(self) -> None:
        super().close()
        self.map.close()

    def calls(self, role: str) -> list[Call]:
        found = []
        for line in self.log.read_text().splitlines():
            number, name, target = (line + " ").split(" ", 2)
            place = Path(target.strip().removeprefix(str(self.directory.resolve())))
            can_fail = not name.endswith("!")
            found.append(Call(role, int(number), name.rstrip("!"), _kind(place), can_fail))
        return found


class StruckTrainer(Struck):
    """The same with the real trainer on two tiny arms, of which the pivot keeps one."""

    def __init__(self, home: Path, shim: Path) -> None:
        super().__init__(home, shim)
        own = {**self.settings, "trainer": {"device": "cpu", "threads": 1}}
        own["trainer"]["command"] = [sys.executable, str(HELD_TRAINER)]
        own["model"] = {"width": 16, "heads": 2, "layers": 1, "context": 16, "dropout": 0.1}
        own["policy"] = self._policy(OLD_ARMS)
        self.settings = trainer_kit.tree(home, **own)
        self.environment |= {
            "FAULT_TRAINER": HELD_TRAINER.name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(trainer_kit.ROOT),
        }
        self.write_config()
        self.policy_file.write_text(tomli_w.dumps({"policy": self._policy(NEW_ARMS)}))

    def _policy(self, names: Sequence[str]) -> Json:
        prose, other = names
        places = {prose: "prose.jsonl", other: "code/*.txt"}
        arms = [{"name": name, "files": [str(self.home / at)]} for name, at in places.items()]
        return {"kind": "static", "arms": arms}


def _kind(place: Path) -> str:
    """The target without what differs from run to run."""
    name = place.name
    if name.startswith(contract.TEMPORARY_PREFIX):
        name = contract.TEMPORARY_PREFIX + "*-" + name.rpartition("-")[2]
    parent = place.parent.name
    return f"{parent}/{name}" if parent and parent != "run" else name


def check(run: PivotRun) -> str:
    """Everything that must hold once the run has come to its end; which policy rules."""
    assert run.file_status()["phase"] == "finished"
    assert run.steps() == list(range(1, STEPS + 1)), "one entry a step"
    assert all(run.proofs())
    durable = run.durable
    assert durable.pivot is None
    assert durable.diverged_steps == 0
    switched = run.records("policy_switched")
    assert len(switched) <= 1, "twice"
    base_step = switched[0]["base_step"] if switched else STEPS
    owners = {step: 1 if step <= base_step else 2 for step in range(1, STEPS + 1)}
    assert run.epochs_of_steps() == owners
    assert run.archives() == [record["archive"] for record in switched]
    if switched:
        check_archive(run.archive(1, base_step))
    epoch = 2 if switched else 1
    assert run.policies() == sorted(
        ["0001.toml", *(["0001.run.toml", "0002.toml"] if switched else [])]
    )
    arms = list(NEW_ARMS if switched else OLD_ARMS)
    ruling = config.load(run.directory / contract.RUN_FILE)
    assert [arm.name for arm in ruling.policy.arms] == arms
    assert {entry.arm for entry in run.entries() if entry.epoch == epoch} == set(arms)
    state = run.sidecar(contract.state_name("run"))
    assert (state["step"], state["epoch"], set(state["arms"])) == (STEPS, epoch, set(arms))
    samples = run.sidecar(contract.samples_name("run"))
    assert {row["epoch"] for row in samples} == {epoch}
    replies = [reply for reply in durable.replies if reply.id == "p1"]
    assert [reply.outcome for reply in replies] in ([], ["done" if switched else "refused"])
    left = [path for path in run.directory.rglob(f"{contract.TEMPORARY_PREFIX}*")]
    assert left == []
    assert list((run.directory / contract.RECEIPTS).iterdir()) == []
    return "new" if switched else "old"


def check_archive(place: Path) -> None:
    digests = orjson.loads((place / contract.DIGESTS_FILE).read_bytes())
    names = {path.name for path in place.iterdir()}
    assert names == {*digests, contract.DIGESTS_FILE}
    assert names >= {archive.PIVOT_FILE, "0001.toml", "run.state.json", "run.samples.json"}
    assert {name: digest((place / name).read_bytes()) for name in digests} == digests
