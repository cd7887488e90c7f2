"""The memory of GPUs, where NVML is installed: whether a dead attempt still has some.

What may live here: the helper that asks the driver, and the gate that waits for its answers. A
driver that hangs must not hang the loop, so it is asked in a process of its own.

`python -m supervisor.devices` prints one JSON object and ends.

Invariants:
- Nothing here waits but `close`. A question has a bounded time, after which it is given up.
- Only memory of processes that were the attempt's keeps a death from being complete. What cannot be
  told from the memory of somebody else (in a container the driver may name nobody) is waited for,
  and then only reported: a neighbour must not end a run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from supervisor.contract import Json
from supervisor.orphans import Owned

QUESTION_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 1.0
INTERVAL_SECONDS: Final = 1.0
LIMIT_SECONDS: Final = 60.0
SLACK_BYTES: Final = 512 * 1024 * 1024


# --- the helper -----------------------------------------------------------------------------------


def measure(nvml: Any) -> Json:
    """What the driver says of every device: {"devices": [...], "lost": text or empty}."""
    nvml.nvmlInit()
    try:
        devices = [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()
    lost = "; ".join(device["lost"] for device in devices if device["lost"])
    return {"devices": devices, "lost": lost}


def _device(nvml: Any, index: int) -> Json:
    found: Json = {"index": index, "used_bytes": 0, "processes": [], "lost": ""}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found["used_bytes"] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            found["processes"].append([int(process.pid), process.usedGpuMemory])
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            found["lost"] = f"the driver says of GPU {index}: {error}"
    return found


def main() -> int:
    nvml = importlib.import_module("pynvml")
    try:
        answer = measure(nvml)
    except nvml.NVMLError as error:
        print(f"the driver does not answer: {error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(orjson.dumps(answer))
    return 0


# --- the gate -------------------------------------------------------------------------------------


def held_by(answer: Json, pids: Iterable[int]) -> list[str]:
    """Who of these processes a driver still lists, in words."""
    ours = set(pids)
    return [
        f"process {pid} still holds {_size(used)} of GPU {device['index']}"
        for device in answer["devices"]
        for pid, used in device["processes"]
        if pid in ours
    ]


def grown(before: Json, answer: Json) -> list[str]:
    """Which devices have more memory in use than before, and no process listed that has it."""
    earlier = {device["index"]: device["used_bytes"] for device in before["devices"]}
    return [
        f"GPU {device['index']} has {_size(more)} more in use than before the attempt"
        for device in answer["devices"]
        if device["index"] in earlier
        and not device["processes"]
        and (more := device["used_bytes"] - earlier[device["index"]]) > SLACK_BYTES
    ]


def _size(size_bytes: int | None) -> str:
    return "memory" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


class Question:
    """One run of the helper."""

    def __init__(self, now: float) -> None:
        self._asked_at = now
        self._process = Owned(
            [sys.executable, "-P", "-m", "supervisor.devices"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def answer(self, now: float) -> Json | str | None:
        """The answer; why there is none; or None while it is not there yet."""
        code = self._process.poll()
        if code is None and now - self._asked_at < QUESTION_SECONDS:
            return None
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            if code is None:
                self._process.kill()  # in a driver that hangs it may stay; `reap` has it then
                return f"the driver does not answer within {QUESTION_SECONDS:g} s"
            if code != 0:
                return "the driver cannot be asked"
            answer: Json = orjson.loads(stream.read())
        return answer

    def close(self) -> None:
        """Ends it, and waits for that, but not for ever."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)


@dataclass(slots=True)
class Gate:
    """Open once the memory that an attempt had is free again. Without NVML it is always open.

    `held` is set when it opens because the time is over, to who still holds memory; `note` to what
    else there is to say; `lost` to what the driver says of a device that has gone.
    """

    held: str = ""
    note: str = ""
    lost: str = ""
    _baseline: Json | None = None
    _question: Question | None = None
    _since: float | None = None
    _next: float = 0.0
    _there: bool = field(default_factory=lambda: importlib.util.find_spec("pynvml") is not None)

    def measured(self, now: float) -> bool:
        """Whether what is in use before a spawn is known, as far as it can be."""
        if not self._there or self._baseline is not None:
            return True
        answer = self._ask(now)
        if answer is None:
            return False
        self._baseline = {"devices": []} if isinstance(answer, str) else answer
        return True

    def is_open(self, pids: Iterable[int], now: float) -> bool:
        """Called again and again after a death, with every process that the attempt had."""
        if not self._there:
            return True
        if self._since is None:
            self._since, self.held, self.note, self.lost = now, "", "", ""
        answer = self._ask(now) if now >= self._next else None
        if answer is None:
            return False
        self._next = now + INTERVAL_SECONDS
        if isinstance(answer, str):
            self.note = answer
            return self._opened(self._baseline)
        self.lost = answer["lost"]
        held, more = held_by(answer, pids), grown(self._baseline or answer, answer)
        if not (held or more):
            return self._opened(answer)
        if now - self._since < LIMIT_SECONDS:
            return False
        self.held, self.note = "; ".join(held), "; ".join(more)
        return self._opened(answer)

    def _opened(self, baseline: Json | None) -> bool:
        self._since, self._next, self._baseline = None, 0.0, baseline
        return True

    def _ask(self, now: float) -> Json | str | None:
        if self._question is None:
            try:
                self._question = Question(now)
            except OSError as error:
                return f"the driver cannot be asked: {error}"
        answer = self._question.answer(now)
        if answer is not None:
            self._question = None
        return answer

    def close(self) -> None:
        if self._question is not None:
            self._question.close()
            self._question = None


if __name__ == "__main__":
    sys.exit(main())
