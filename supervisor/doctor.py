"""What this machine offers a run: examined, not assumed.

What may live here: short examinations, each ending in one finding with advice. Nothing here
changes the machine; what an examination writes, it removes.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import zmq

from supervisor import cgroup
from supervisor.contract import Json
from supervisor.rundir import NETWORK_FILE_SYSTEMS, file_system

PROBE_BYTES: Final = 32 * 1024 * 1024
TORCH_SECONDS: Final = 120.0
_MARKS: Final = {"good": "ok  ", "note": "note", "bad": "BAD "}

# In a child: importing torch takes seconds and must not stay in this process.
_TORCH_PROBE: Final = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "devices": [
        {"name": torch.cuda.get_device_name(i), "bytes": torch.cuda.mem_get_info(i)[1]}
        for i in range(torch.cuda.device_count())
    ] if cuda else [],
}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """`verdict` is good, note or bad; `detail` says what was seen and, if need be, what to do."""

    name: str
    verdict: str
    detail: str

    @property
    def mark(self) -> str:
        return _MARKS[self.verdict]

    def to_json(self) -> Json:
        return asdict(self)


def examine(runs: Path) -> list[Finding]:
    """Every finding, in the order in which a person would fix them."""
    place = runs
    while not place.exists():
        place = place.parent
    examinations: list[Callable[[], Finding]] = [
        _python,
        _kernel,
        _torch,
        lambda: _space(place),
        lambda: _disk_speed(place),
        lambda: _sockets(place),
        _signals,
        _containment,
        _memory,
    ]
    return [examination() for examination in examinations]


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", "good", f"{version} at {sys.executable}")


def _kernel() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "kernel", "bad", f"{platform.release()}: no pidfd ({error}); Linux 5.3 needed"
        )
    return Finding("kernel", "good", f"{platform.release()}, pidfd works")


def _torch() -> Finding:
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            timeout=TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("torch", "bad", f"import torch did not end within {TORCH_SECONDS:g} s")
    if probe.returncode != 0:
        last = probe.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return Finding(
            "torch",
            "note",
            f"not usable ({''.join(last)}); for our trainer: pip install"
            " 'trainer-supervisor[trainer]'",
        )
    import orjson

    found = orjson.loads(probe.stdout.splitlines()[-1])
    devices = ", ".join(f"{d['name']} ({d['bytes'] / 2**30:.0f} GiB)" for d in found["devices"])
    return Finding(
        "torch",
        "good",
        f"{found['version']}, {found['threads']} threads, {found['capability']},"
        f" {devices or 'no CUDA device: runs train on the CPU'}",
    )


def _space(place: Path) -> Finding:
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    kind = file_system(place)
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding("disk space", "bad", f"{place}: no run begins on a network disk ({kind})")
    verdict = "good" if free > 5 * 2**30 else "note"
    return Finding("disk space", verdict, f"{free / 2**30:.1f} GiB free in {place} ({kind})")


def _disk_speed(place: Path) -> Finding:
    data = os.urandom(1024 * 1024)
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            begin = time.perf_counter()
            for _ in range(PROBE_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
            begin = time.perf_counter()
            for number in range(20):
                os.pwrite(file.fileno(), b"x", number)
                os.fdatasync(file.fileno())
            sync_seconds = (time.perf_counter() - begin) / 20
    except OSError as error:
        return Finding("disk speed", "bad", f"{place} cannot be written: {error}")
    return Finding(
        "disk speed",
        "good" if sync_seconds < 0.1 else "note",
        f"{PROBE_BYTES / 2**20 / seconds:.0f} MiB/s written and synced,"
        f" {sync_seconds * 1000:.1f} ms a small sync",
    )


def _sockets(place: Path) -> Finding:
    try:
        with tempfile.TemporaryDirectory(dir=place) as directory:
            _probe_sockets(Path(directory))
    except (OSError, zmq.ZMQError) as error:
        return Finding("sockets", "bad", f"no ipc sockets in {place}: {error}; use a local disk")
    return Finding("sockets", "good", f"ipc works in {place}, zmq {zmq.zmq_version()}")


def _probe_sockets(directory: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
            for one in (server, client):
                one.set(zmq.LINGER, 0)
            server.bind(f"ipc:///proc/self/fd/{fd}/probe")
            client.connect(f"ipc:///proc/self/fd/{fd}/probe")
            client.send(b"probe")
            if not server.poll(2000):
                raise OSError("a message did not arrive within 2 s")
    finally:
        context.term()
        os.close(fd)


def _signals() -> Finding:
    ignored = [
        number.name
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    if ignored:
        return Finding("signals", "note", f"inherited as ignored: {', '.join(ignored)}")
    return Finding("signals", "good", "SIGTERM, SIGINT and SIGUSR1 arrive")


def _containment() -> Finding:
    parent = cgroup.delegated()
    made = cgroup.create(parent, f"doctor-{os.getpid()}") if parent is not None else None
    if made is not None and made.remove():
        detail = f"a control group for each attempt, below {made.path.parent}"
        return Finding("containment", "good", detail)
    return Finding(
        "containment",
        "good",
        "an attempt is held together by its session and the nonce in its environment (in a systemd"
        " unit with Delegate=yes, or a container with a writable /sys/fs/cgroup: by a control"
        " group)",
    )


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    return Finding(
        "memory",
        "good" if memory.available > 2 * 2**30 else "note",
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available,"
        f" {len(os.sched_getaffinity(0))} CPUs to run on",
    )
