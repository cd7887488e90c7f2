"""The examinations: what is seen is said, what is wrong comes with advice, and nothing stays."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor import cli, doctor
from supervisor.doctor import Finding, examine

NAMES = [
    *("python", "kernel", "torch", "disk space", "disk speed"),
    *("sockets", "signals", "containment", "memory"),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small probe of the disk, and a torch that answers at once."""
    monkeypatch.setattr(doctor, "PROBE_BYTES", 1024 * 1024)
    found = {"version": "9.9", "threads": 2, "capability": "AVX2", "devices": []}
    monkeypatch.setattr(doctor, "_TORCH_PROBE", f"print({json.dumps(found)!r})")


@pytest.mark.usefixtures("quick")
def test_a_machine_is_examined_and_left_as_it_was(tmp_path: Path) -> None:
    findings = examine(tmp_path / "runs" / "that" / "are" / "not" / "there")
    assert [finding.name for finding in findings] == NAMES
    by_name = {finding.name: finding for finding in findings}
    assert by_name["python"].detail.endswith(sys.executable)
    assert by_name["torch"].detail == (
        "9.9, 2 threads, AVX2, no CUDA device: runs train on the CPU"
    )
    assert str(tmp_path) in by_name["disk space"].detail
    assert "ipc works" in by_name["sockets"].detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_the_command_prints_findings_and_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["supervisor", "doctor", "--directory", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert cli.main() == 0
    assert capsys.readouterr().out.startswith("ok   python ")
    bad = Finding("disk speed", "bad", "it is on fire")
    monkeypatch.setattr(doctor, "_disk_speed", lambda place: bad)
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    assert cli.main() == 1
    found = json.loads(capsys.readouterr().out)
    assert bad.to_json() in found["findings"]
    assert bad.mark == "BAD "


def test_a_torch_that_cannot_be_imported_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "import a_torch_that_is_not_there")
    finding = doctor._torch()
    assert finding.verdict == "note"
    assert "No module named 'a_torch_that_is_not_there'" in finding.detail
    assert "pip install 'trainer-supervisor[trainer]'" in finding.detail


def test_a_torch_that_hangs_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TORCH_SECONDS", 0.05)
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "import signal; signal.pause()")
    finding = doctor._torch()
    assert (finding.verdict, "did not end within 0.05 s" in finding.detail) == ("bad", True)


def test_devices_are_named_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"name": "H200", "bytes": 139 * 2**30}
    found = {"version": "9.9", "threads": 2, "capability": "AVX2", "devices": [device]}
    monkeypatch.setattr(doctor, "_TORCH_PROBE", f"print({json.dumps(found)!r})")
    assert doctor._torch().detail.endswith("H200 (139 GiB)")


def test_little_space_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for available, verdict in ((10 * 2**20, "note"), (10 * 2**30, "good")):
        full = SimpleNamespace(f_bavail=available // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path, full=full: full)
        assert doctor._space(tmp_path).verdict == verdict


def test_a_network_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` refuses it."""
    monkeypatch.setattr(doctor, "file_system", lambda place: "nfs4")
    finding = doctor._space(tmp_path)
    assert (finding.verdict, "network disk (nfs4)" in finding.detail) == ("bad", True)


def test_a_disk_that_cannot_be_written_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**more: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    finding = doctor._disk_speed(Path("here"))
    assert (finding.verdict, "here cannot be written" in finding.detail) == ("bad", True)


def test_a_place_without_sockets_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> None:
        raise OSError(errno.EPERM, "no sockets here")

    monkeypatch.setattr(doctor, "_probe_sockets", refuse)
    finding = doctor._sockets(Path("here"))
    assert (finding.verdict, "use a local disk" in finding.detail) == ("bad", True)


def test_a_kernel_without_pidfd_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    finding = doctor._kernel()
    assert (finding.verdict, "Linux 5.3 needed" in finding.detail) == ("bad", True)


def test_ignored_signals_are_a_note() -> None:
    # As `nohup` and some job systems leave it.
    code = (
        "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "from supervisor import doctor\n"
        "finding = doctor._signals(); print(finding.verdict, finding.detail)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "note inherited as ignored: SIGUSR1\n"
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN


def test_memory_and_cpus_are_told() -> None:
    detail = doctor._memory().detail
    assert f"{len(os.sched_getaffinity(0))} CPUs to run on" in detail
