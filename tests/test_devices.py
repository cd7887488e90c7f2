"""Memory of a device that a dead attempt still has, with a driver that says what the test wants."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from runs_kit import DEADLINE_SECONDS, Run, wait_until

from supervisor import devices
from supervisor.contract import Json
from supervisor.devices import Gate, Question

GIB = 2**30

# The part of nvidia-ml-py that is used, and what it raises. What it answers is in FAKE_NVML: a list
# of devices, each {"used": bytes, "processes": [[pid, bytes]]}, {"lost": true} or {"odd": true};
# {"hangs": true} or {"fails": true} instead of the list.
FAKE = """
import json, os, signal
from types import SimpleNamespace

NVML_ERROR_GPU_IS_LOST = 15
_answer = None

class NVMLError(Exception):
    def __init__(self, value):
        self.value = value

    def __str__(self):
        return {15: "GPU is lost", 9: "Driver Not Loaded"}.get(self.value, "Unknown Error")

def nvmlInit():
    global _answer
    with open(os.environ["FAKE_NVML"]) as file:
        _answer = json.load(file)
    if isinstance(_answer, dict):
        if "hangs" in _answer:
            signal.pause()
        raise NVMLError(9)

def nvmlShutdown():
    pass

def nvmlDeviceGetCount():
    return len(_answer)

def nvmlDeviceGetHandleByIndex(index):
    if "lost" in _answer[index]:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    if "odd" in _answer[index]:
        raise NVMLError(999)
    return _answer[index]

def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=handle["used"], free=0, total=0)

def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle["processes"]]
"""


class Driver:
    """What the fake driver says, from now on."""

    def __init__(self, home: Path) -> None:
        self.path = home / "nvml.json"
        (home / "pynvml.py").write_text(FAKE)
        self.says([device()])

    def says(self, answer: object) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(answer))
        temporary.rename(self.path)


def device(used: int = 0, *processes: tuple[int, int | None]) -> Json:
    return {"used": used, "processes": list(processes)}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(tmp_path)
    rest = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{rest}".rstrip(os.pathsep))
    monkeypatch.setenv("FAKE_NVML", str(made.path))
    monkeypatch.syspath_prepend(tmp_path)
    return made


def ask() -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "supervisor.devices"]
    return subprocess.run(command, capture_output=True, timeout=DEADLINE_SECONDS, check=False)


def answered(gate: Gate, pids: tuple[int, ...], now: float) -> bool:
    """Whether the gate is open, once it has its next answer."""

    def looked() -> list[bool] | None:
        open_now = gate.is_open(pids, now)
        return [open_now] if open_now or gate._question is None else None

    return wait_until(looked, "an answer of the driver")[0]


def measured(gate: Gate) -> None:
    wait_until(lambda: gate.measured(0.0), "a measurement before the spawn")


# --- the helper -----------------------------------------------------------------------------------


def test_the_helper_says_what_the_driver_says(driver: Driver) -> None:
    driver.says([device(3 * GIB, (41, GIB), (42, None)), {"lost": True}, {"odd": True}])
    done = ask()
    assert done.returncode == 0
    nothing = {"used_bytes": 0, "processes": []}
    lost = "the driver says of GPU 1: GPU is lost"
    assert orjson.loads(done.stdout) == {
        "devices": [
            {
                "index": 0,
                "used_bytes": 3 * GIB,
                "processes": [[41, GIB], [42, None]],
                "lost": "",
            },
            {"index": 1, **nothing, "lost": lost},
            {"index": 2, **nothing, "lost": ""},
        ],
        "lost": lost,
    }


def test_a_driver_that_is_not_there_is_said_so(driver: Driver) -> None:
    driver.says({"fails": True})
    done = ask()
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"the driver does not answer: Driver Not Loaded" in done.stderr


# --- the gate -------------------------------------------------------------------------------------


def test_without_nvml_the_gate_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gate = Gate()
    assert gate.measured(0.0)
    assert gate.is_open((41,), 0.0)
    gate.close()


@pytest.mark.fault("SV-8", phase="stopping", does="polls what is really in use, with a limit")
def test_the_gate_waits_until_the_dead_are_no_longer_listed(driver: Driver) -> None:
    """A worker that is stuck keeps descriptors of the device, so its memory is not reclaimed
    (Megatron-LM PR 3684)."""
    gate = Gate()
    measured(gate)
    driver.says([device(5 * GIB, (41, 5 * GIB))])
    assert not answered(gate, (41,), 100.0)
    assert not gate.is_open((41,), 100.0), "asked again only after a while"
    driver.says([device()])
    assert answered(gate, (41,), 100.0 + devices.INTERVAL_SECONDS)
    assert (gate.held, gate.note, gate.lost) == ("", "", "")


def test_a_neighbour_on_the_device_is_not_waited_for(driver: Driver) -> None:
    gate = Gate()
    measured(gate)
    driver.says([device(9 * GIB, (77, 9 * GIB))])
    assert answered(gate, (41,), 100.0)
    assert (gate.held, gate.note) == ("", "")


@pytest.mark.fault("SV-7", phase="starting", does="names who holds the memory, and how much")
def test_who_never_lets_go_is_named_with_the_memory(driver: Driver) -> None:
    """The port was free at once while the engine kept the device: the next start ran out of memory
    without a hint (vllm #55510)."""
    gate = Gate()
    measured(gate)
    driver.says([device(5 * GIB, (41, 5 * GIB), (42, None))])
    assert not answered(gate, (41, 42), 100.0)
    assert answered(gate, (41, 42), 100.0 + devices.LIMIT_SECONDS)
    assert (
        gate.held
        == "process 41 still holds 5.0 GiB of GPU 0; process 42 still holds memory of GPU 0"
    )


def test_memory_without_a_name_is_waited_for_and_then_only_reported(driver: Driver) -> None:
    """In a container the driver lists nobody."""
    driver.says([device(GIB), device(0)])
    gate = Gate()
    measured(gate)
    driver.says([device(6 * GIB), device(devices.SLACK_BYTES)])
    assert not answered(gate, (41,), 100.0)
    assert answered(gate, (41,), 100.0 + devices.LIMIT_SECONDS)
    note = "GPU 0 has 5.0 GiB more in use than before the attempt"
    assert (gate.held, gate.note) == ("", note)
    # What is in use now is what the next attempt is compared with.
    assert answered(gate, (41,), 200.0)
    assert gate.note == ""


def test_a_device_that_is_lost_holds_up_nothing_and_is_told(driver: Driver) -> None:
    gate = Gate()
    measured(gate)
    driver.says([{"lost": True}])
    assert answered(gate, (41,), 100.0)
    assert gate.lost == "the driver says of GPU 0: GPU is lost"


@pytest.mark.parametrize(
    ("says", "note"), [({"fails": True}, "cannot be asked"), ({"hangs": True}, "within 10 s")]
)
def test_a_driver_that_does_not_answer_is_given_up(driver: Driver, says: Json, note: str) -> None:
    gate = Gate()
    measured(gate)
    driver.says(says)
    assert not gate.is_open((41,), 100.0)
    question = gate._question
    assert question is not None
    if "fails" in says:
        question._process.wait()
    assert gate.is_open((41,), 100.0 + devices.QUESTION_SECONDS)
    assert note in gate.note
    question._process.wait()


def test_a_driver_that_nobody_can_be_started_to_ask_is_given_up(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is short of processes, or of memory, for a moment."""

    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(devices, "Owned", refuse)
    gate = Gate()
    assert gate.measured(0.0)
    assert gate.is_open((41,), 100.0)
    assert "cannot be asked: [Errno 11] Resource temporarily unavailable" in gate.note


def test_a_gate_that_is_closed_leaves_no_question_behind(driver: Driver) -> None:
    driver.says({"hangs": True})
    gate = Gate()
    assert not gate.measured(0.0)
    gate.close()
    gate.close()
    question: Any = Question(0.0)
    question.close()
    assert question._process.returncode is not None


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, driver: Driver) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        made.patch("devices", "INTERVAL_SECONDS", 0.05)
        made.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        yield made


def test_the_next_attempt_waits_for_the_memory_of_the_last(run: Run, driver: Driver) -> None:
    run.faults = "kill@9#1"
    supervisor = run.hold(8)
    driver.says([device(GIB, (run.status()["trainer_pid"], GIB))])
    run.open_gate()
    run.wait_for_status(phase="backoff", stage="reaping")
    assert len(run.records("attempt_started")) == 1
    assert run.ask("checkpoint", at="now").outcome == "busy", "it is served meanwhile"
    driver.says([device()])
    assert run.end(supervisor) == 0
    assert run.file_status()["attempt"] == 2
    assert run.steps() == list(range(1, 31))


def test_memory_that_is_never_released_is_stuck(run: Run, driver: Driver) -> None:
    run.patch("devices", "LIMIT_SECONDS", 0.2)
    run.faults = "kill@9#1"
    supervisor = run.hold(8)
    pid = run.status()["trainer_pid"]
    driver.says([device(3 * GIB, (pid, 3 * GIB))])
    run.open_gate()
    assert run.end(supervisor) == 1
    status = run.file_status()
    assert status["phase"] == "stuck"
    assert f"process {pid} still holds 3.0 GiB of GPU 0" in status["reason"]
    assert len(run.records("attempt_started")) == 1
    driver.says([device()])
    assert run.finish() == 0
    assert run.steps() == list(range(1, 31))
