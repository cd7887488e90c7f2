"""A tiny run for tests of the trainer: text, settings, links that act on cue, real processes."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import tomli_w
import torch

from supervisor import config, contract
from supervisor.contract import AuditLine, Entry, EvaluationLine, ExitLine, Receipt
from supervisor.link import Life, Link
from trainer.__main__ import main
from trainer.loop import Loop

ROOT = Path(__file__).parent.parent
NONCE = secrets.token_hex(8)  # of no process that another test kills by it
DEADLINE_SECONDS = 60.0

PROSE = [
    f"The {thing} of the {place} was older than anyone who {act} there, and it knew {count} names."
    for count, (thing, place, act) in enumerate(
        (thing, place, act)
        for thing in ("bridge", "clock")
        for place in ("harbour", "valley", "town")
        for act in ("worked", "slept")
    )
]
CODE = [f"def f{n}(x):\n    return x * {n} + {n % 7}\n" for n in range(9)]


# --- settings -------------------------------------------------------------------------------------


def tree(home: Path, **sections: Any) -> dict[str, Any]:
    """The settings of a tiny run in `home`/run on two arms; `sections` are merged over it."""
    write_text(home)
    base: dict[str, Any] = {
        "run": {"name": "tiny", "directory": str(home / "run")},
        "model": {"width": 16, "heads": 2, "layers": 1, "context": 16},
        "training": {
            "steps": 12,
            "seed": 7,
            "batch_windows": 4,
            "learning_rate": 0.01,
            "schedule": "constant",
        },
        "trainer": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 4},
        "samples": {"prompts": ["The ", "def f"], "tokens": 3},
        "evaluation": {"fraction": 0.2, "windows": 4},
        "policy": {
            "arms": [
                {"name": "prose", "files": [str(home / "prose.jsonl")], "weight": 2.0},
                {"name": "code", "files": [str(home / "code" / "*.txt")]},
            ]
        },
    }
    return {
        name: base.get(name, {}) | sections.get(name, {}) for name in base.keys() | sections.keys()
    }


def write_text(home: Path) -> None:
    if (home / "code").exists():
        return
    lines = (orjson.dumps({"text": text}) + b"\n" for text in PROSE)
    (home / "prose.jsonl").write_bytes(b"".join(lines))
    (home / "code").mkdir()
    for number, text in enumerate(CODE):
        (home / "code" / f"{number}.txt").write_text(text)


def settings_of(home: Path, **sections: Any) -> config.Settings:
    return config.resolve(config.parse(tree(home, **sections), "test"), "run-tiny")


def write_config(home: Path, **sections: Any) -> Path:
    path = home / "tiny.toml"
    path.write_text(tomli_w.dumps(tree(home, **sections)))
    return path


# --- a life inside this process -------------------------------------------------------------------

Script = Mapping[int, Callable[[], None]]


class CuedLink(Link):
    """A link that does what a script says just after the receipt of a step."""

    def __init__(self, life: Life, script: Script | None = None) -> None:
        super().__init__(life)
        self.script = dict(script or {})

    def __enter__(self) -> CuedLink:
        return self

    def record(self, receipt: Receipt) -> None:
        super().record(receipt)
        if isinstance(receipt, Entry) and receipt.step in self.script:
            self.script.pop(receipt.step)()


def life_of(settings: config.Settings, attempt: int = 1, **fields: Any) -> Life:
    directory = Path(settings.run.directory)
    for name in (contract.CHECKPOINTS, contract.RECEIPTS):
        (directory / name).mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"nonce": NONCE, "epoch": 1, "resume_step": None, "supervised": False}
    return Life(run_directory=directory, attempt=attempt, **(values | fields))


@dataclass(frozen=True)
class Lived:
    """One life as it was: how it ended, what it left in memory, and a vector drawn after it."""

    why: str
    loop: Loop
    receipts: list[Receipt]
    drawn: torch.Tensor

    @property
    def entries(self) -> list[Entry]:
        return [receipt for receipt in self.receipts if isinstance(receipt, Entry)]

    @property
    def losses(self) -> list[float]:
        return [entry.loss for entry in self.entries]

    @property
    def image(self) -> bytes:
        """Weights, m and v."""
        return bytes(self.loop.training.model.flat.image[contract.HEADER_BYTES :])


def live(
    settings: config.Settings, attempt: int = 1, script: Script | None = None, **fields: Any
) -> Lived:
    """Runs one life to its end, with real signal handlers, in this process."""
    life = life_of(settings, attempt, **fields)
    with CuedLink(life, script) as link:
        link.install_signal_handlers()
        loop = Loop(settings, link)
        why = loop.run()
        drawn = torch.rand(8)
    return Lived(why, loop, receipts_of(life.run_directory, attempt), drawn)


def term() -> None:
    signal.raise_signal(signal.SIGTERM)


def usr1() -> None:
    signal.raise_signal(signal.SIGUSR1)


@contextlib.contextmanager
def switches_restored() -> Iterator[None]:
    """A trainer sets torch's process-wide switches; other tests must not inherit them."""
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        yield
    finally:
        torch.set_rng_state(random)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("default")
        torch.set_flush_denormal(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        if workspace is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


# --- what a run leaves on disk --------------------------------------------------------------------


def receipts_of(directory: Path, attempt: int = 1) -> list[Receipt]:
    """The whole lines of one attempt's receipts."""
    path = directory / contract.RECEIPTS / f"{contract.attempt_stem(attempt)}.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [contract.parse_receipt(line, path.name) for line in lines]


def steps_of(directory: Path, attempt: int = 1) -> list[int]:
    return [r.step for r in receipts_of(directory, attempt) if isinstance(r, Entry)]


def exit_of(directory: Path, attempt: int = 1) -> ExitLine:
    last = receipts_of(directory, attempt)[-1]
    assert isinstance(last, ExitLine)
    return last


def audits_of(lived: Lived) -> list[int]:
    return [receipt.step for receipt in lived.receipts if isinstance(receipt, AuditLine)]


def evaluations_of(lived: Lived) -> list[EvaluationLine]:
    return [receipt for receipt in lived.receipts if isinstance(receipt, EvaluationLine)]


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class Identity(NamedTuple):
    """Changes whenever a file is written, replaced or truncated."""

    inode: int
    modified: int
    size: int


def identities_of(directory: Path) -> dict[str, Identity]:
    stats = {path.name: path.stat() for path in directory.iterdir()}
    return {name: Identity(s.st_ino, s.st_mtime_ns, s.st_size) for name, s in stats.items()}


# --- the command line -----------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    """`python -m trainer ARGUMENTS` inside this process: exit status, stdout, stderr."""
    out, told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    before, sys.argv = sys.argv, ["trainer", *arguments]
    try:
        with (
            switches_restored(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(told),
        ):
            code = main()
    finally:
        sys.argv = before
    out.flush()
    return code, out.buffer.getvalue().decode(), told.getvalue()


# --- a real process -------------------------------------------------------------------------------


class Process:
    """`python -m trainer ARGUMENTS`, watched by events: growth of its files, and its end."""

    def __init__(self, home: Path, *arguments: str, **popen: Any) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | popen.pop("environment", {})
        self.errors_path = home / "stderr.txt"
        with self.errors_path.open("wb") as errors:
            self.child = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "trainer", *arguments],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                **popen,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.communicate()

    @property
    def errors(self) -> str:
        return self.errors_path.read_text()

    def send(self, number: int) -> None:
        self.child.send_signal(number)

    def wait(self) -> int:
        """The exit status, once the process has ended."""
        self.output = self.child.communicate(timeout=DEADLINE_SECONDS)[0].decode()
        return self.child.returncode

    def until(self, happened: Callable[[], Any]) -> Any:
        """Waits for something that the process does; fails if it ends without."""
        descriptor = os.pidfd_open(self.child.pid)
        try:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while True:
                ended = bool(end.poll(0))
                found = happened()
                if found:
                    return found
                assert not ended, f"the trainer ended first:\n{self.errors}"
                assert time.monotonic() < deadline, f"it never happened:\n{self.errors}"
                end.poll(5)
        finally:
            os.close(descriptor)
