"""What all tests share: nothing may be left behind, and how long property tests look.

A test that leaves a process, a thread or a descriptor fails, even if it passed: the leftover would
be found by a later test, or by nobody.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_table import (
    pytest_addoption as pytest_addoption,
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from hypothesis import HealthCheck, settings
from property_kit import SOAK, SOAK_FACTOR
from shim_kit import build_shim

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "soak",
    max_examples=SOAK_FACTOR * settings().max_examples,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("soak" if SOAK else "ci")

# Inherited by everything that a test starts, so that an orphan is found too.
_MARK_NAME, _MARK_VALUE = "TESTS_STARTED_BY", f"{os.getpid()}-{os.urandom(8).hex()}"
_MARK = f"{_MARK_NAME}={_MARK_VALUE}".encode()
os.environ[_MARK_NAME] = _MARK_VALUE

# A shell starts background jobs with SIGINT ignored, and everything we start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long something that was told to end may take to be gone.
GRACE_SECONDS = 10.0


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that the tests of one session share, so that corpora are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/fault_shim.c, compiled."""
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def run_home(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for runs, with XDG_CACHE_HOME away from the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    processes, threads, descriptors = _processes(), set(threading.enumerate()), _descriptors()
    yield
    left = [
        *_left_processes(processes),
        *_left_threads(threads),
        *_left_descriptors(descriptors),
    ]
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def _processes() -> set[int]:
    """Children of this process, and all that carry the mark and are not this process."""
    found = set()
    for entry in Path("/proc").iterdir():
        # A process may end between the listing and the reading; then it is not left behind.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if entry.name.isdecimal() and int(entry.name) != os.getpid() and _is_ours(entry):
                found.add(int(entry.name))
    return found


def _is_ours(entry: Path) -> bool:
    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return parent == os.getpid() or _MARK in (entry / "environ").read_bytes().split(b"\0")


def _left_processes(before: set[int]) -> list[str]:
    for pid in _processes() - before:
        _wait_for_end(pid)
    left = sorted(_processes() - before)
    described = [f"process {pid}: {_command_of(pid)}" for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return described


def _wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            end.poll(GRACE_SECONDS * 1000)
        finally:
            os.close(descriptor)


def _command_of(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return "ended just now"
    return command or "a zombie; somebody has to wait for it"


def _left_threads(before: set[threading.Thread]) -> list[str]:
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        if not isinstance(thread, threading._DummyThread):
            thread.join(GRACE_SECONDS)
    return [f"thread {thread.name}" for thread in left if thread.is_alive()]


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        # The listing itself has a descriptor, closed by the time that it is looked at.
        with contextlib.suppress(FileNotFoundError):
            found[int(entry.name)] = os.readlink(entry)
    return found


def _left_descriptors(before: dict[int, str]) -> list[str]:
    def left() -> list[str]:
        now = _descriptors()
        return [f"descriptor {n}: {now[n]}" for n in sorted(now) if before.get(n) != now[n]]

    if left():
        gc.collect()  # a cycle may still hold an object that nobody can reach
    return left()
