"""Why an attempt ended, what there is to see of it, and a death that does not come."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from runs_kit import Run, kill, wait_for_end, wait_until
from tree_kit import run_of

from supervisor import causes, cgroup, contract, events as ev, evidence, proc, view_commands
from supervisor.causes import judge
from supervisor.contract import ExitLine
from supervisor.evidence import Witness

CGROUPS_OF_OLD: Final = Path("/sys/fs/cgroup")  # version 1: a hierarchy for each controller


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


# --- judgement ------------------------------------------------------------------------------------

MEMORY = ev.Evidence("the kernel ended 1 process in /x for want of memory", certain=True)
PROBABLY = ev.Evidence("probably: the kernel has just ended 1 process for want of memory")
DEVICE = ev.Evidence(device_lost="GPU 0: GPU is lost")


def reaped(code: int | None, number: int | None, seen: ev.Evidence, **more: str) -> ev.Reaped:
    words = more.pop("words", "")
    line = ExitLine(**more, step=5, code=code or 0, requests=[]) if "why" in more else None
    return ev.Reaped(0.0, code, number, line, 5, 0, (), words, seen)


@pytest.mark.parametrize(
    ("code", "number", "seen", "by_us", "cause"),
    [
        (None, 9, MEMORY, False, "out-of-memory"),
        (None, 9, PROBABLY, False, "out-of-memory"),
        (None, 9, ev.Evidence(), False, "signal"),
        # We have killed it ourselves; that memory was short too is somebody else's death.
        (None, 9, MEMORY, True, "killed"),
        (None, None, ev.Evidence(), True, "killed"),
        # The kernel ends with SIGKILL and with nothing else.
        (None, 11, PROBABLY, False, "signal"),
        (None, 11, DEVICE, False, "device-lost"),
        # Its worker was ended, and it has noticed.
        (1, None, MEMORY, False, "out-of-memory"),
        (1, None, PROBABLY, False, "crash"),
        (1, None, DEVICE, False, "device-lost"),
        (1, None, ev.Evidence(), False, "crash"),
        (None, None, MEMORY, False, "out-of-memory"),
        (None, None, DEVICE, False, "device-lost"),
        (None, None, PROBABLY, False, "unknown"),
        # What it says of itself with a code of the contract is more than what lies around.
        (65, None, DEVICE, False, "data"),
        (75, None, MEMORY, False, "again"),
        (0, None, DEVICE, False, "finished"),
    ],
)
def test_evidence_makes_a_cause(
    code: int | None, number: int | None, seen: ev.Evidence, by_us: bool, cause: str
) -> None:
    assert judge(reaped(code, number, seen), False, by_us) == cause


def test_the_message_begins_with_the_evidence() -> None:
    event = reaped(None, 9, MEMORY, words="step 12 loss 3.1")
    told = f"{MEMORY.out_of_memory}; step 12 loss 3.1"
    assert causes.explain("out-of-memory", event, "") == told
    assert causes.explain("signal", event, "") == "step 12 loss 3.1"
    assert causes.explain("killed", event, "no hello") == "no hello"
    same = reaped(1, None, ev.Evidence(device_lost="CUDA error: ECC"), words="CUDA error: ECC")
    assert causes.explain("device-lost", same, "") == "CUDA error: ECC"
    assert causes.explain("crash", reaped(1, None, MEMORY), "") == ""


def test_what_the_trainer_recorded_outranks_the_last_line_of_its_log() -> None:
    """Of a refusal in several lines only the last one was kept: the advice, without the facts."""
    refusal = "does not fit:\n  model.width: recorded 16, requested 32\n  arms: \x1b[31m\nPut back"
    event = reaped(65, None, ev.Evidence(), why="data", message=refusal, words="Put back")
    told = "does not fit: model.width: recorded 16, requested 32; arms: \ufffd[31m; Put back"
    assert causes.explain("data", event, "") == told
    assert causes.explain("data", event, "ours") == "ours"
    wordless = reaped(65, None, ev.Evidence(), why="data", message="", words="Put back")
    assert causes.explain("data", wordless, "") == "Put back"
    endless = reaped(65, None, ev.Evidence(), why="data", message="x" * 5000)
    assert causes.explain("data", endless, "") == "x" * 1000


@pytest.mark.parametrize(
    ("before", "after", "words", "certain"),
    [
        ((), (), "", False),
        ((("/x", 1),), (("/x", 1),), "", False),
        ((("/x", 1), (causes.MACHINE, 5)), (("/x", 2), (causes.MACHINE, 6)), "1 process in", True),
        ((("/x", 1), (causes.MACHINE, 5)), (("/x", 1), (causes.MACHINE, 8)), "3 processes", False),
        # A counter that was not there before says nothing.
        ((), (("/x", 7),), "", False),
    ],
)
def test_counters_are_compared(
    before: causes.Counts, after: causes.Counts, words: str, certain: bool
) -> None:
    found = causes.out_of_memory(before, after)
    assert found[1] == certain
    assert words in found[0]
    assert bool(found[0]) == bool(words)
    assert found[0].startswith("probably") == (bool(words) and not certain)


def test_a_counter_is_read_out_of_either_file() -> None:
    assert causes.oom_kills("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n") == 2
    assert causes.oom_kills("pgfault 7\noom_kill 14\n") == 14
    assert causes.oom_kills("low 0\n") is None
    assert causes.oom_kills("oom_kill many\n") is None


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: No CUDA-capable device is detected",
        "torch.AcceleratorError: CUDA error: unknown error",
        "CUDA error: hardware stack error",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00): 48, pid=1234, DBE (double bit error)",
        "pynvml.NVMLError_GpuIsLost: GPU is lost",
        "uncorrectable NVLink error detected during the execution",
    ],
)
def test_a_device_that_is_gone_is_told_by_its_words(line: str) -> None:
    text = f"step 11 loss 2.9\n  {line}\nCompile with TORCH_USE_CUDA_DSA\n"
    assert causes.device_lost(text) == line


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=1234, Graphics Exception",
        "RuntimeError: CUDA error: invalid device ordinal",
        "Xidian University, corpus of 1948: 79 files",
        "",
    ],
)
def test_a_fault_of_the_program_is_not_one_of_the_device(line: str) -> None:
    if "Xidian" in line:
        assert causes.device_lost("Xid") == ""
    assert causes.device_lost(f"{line}\n") == ""


# --- witnesses ------------------------------------------------------------------------------------


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[cgroup.Cgroup, Path]:
    """The group of an attempt without a counter, in ours with one, on a machine with one."""
    own = cgroup.Cgroup(tmp_path / "unit")
    attempt = cgroup.Cgroup(own.path / "attempt")
    attempt.path.mkdir(parents=True)
    vmstat = tmp_path / "vmstat"
    (own.path / "memory.events").write_text("oom 0\noom_kill 3\n")
    vmstat.write_text("oom_kill 40\n")
    monkeypatch.setattr(cgroup, "of", lambda pid: own)
    monkeypatch.setattr(evidence, "VMSTAT", str(vmstat))
    return attempt, vmstat


def test_a_kill_in_our_group_is_certain(
    counters: tuple[cgroup.Cgroup, Path], tmp_path: Path
) -> None:
    attempt, vmstat = counters
    witness = Witness(attempt)
    vmstat.write_text("oom_kill 41\n")
    assert witness.evidence(tmp_path / "log", "") == PROBABLY
    (attempt.path.parent / "memory.events").write_text("oom 1\noom_kill 4\n")
    seen = witness.evidence(tmp_path / "log", "")
    assert (str(attempt.path.parent) in seen.out_of_memory, seen.certain) == (True, True)


def test_the_deaths_of_others_long_ago_are_not_held_against_it(
    counters: tuple[cgroup.Cgroup, Path], tmp_path: Path
) -> None:
    attempt, vmstat = counters
    witness = Witness(attempt)
    vmstat.write_text("oom_kill 50\n")
    witness.look(100.0)
    # It was killed between two looks, and the kernel took longer than until the next one.
    witness.look(100.0 + evidence.INTERVAL_SECONDS)
    vmstat.write_text("oom_kill 51\n")
    witness.look(101.0 + evidence.INTERVAL_SECONDS)
    assert witness.evidence(tmp_path / "log", "").out_of_memory == PROBABLY.out_of_memory
    witness.look(100.0 + 2 * evidence.INTERVAL_SECONDS)
    assert witness.evidence(tmp_path / "log", "").out_of_memory == PROBABLY.out_of_memory
    witness.look(100.0 + 3 * evidence.INTERVAL_SECONDS)
    assert witness.evidence(tmp_path / "log", "") == ev.Evidence()


def test_a_machine_that_counts_nothing_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "of", lambda pid: None)
    monkeypatch.setattr(evidence, "VMSTAT", str(tmp_path / "nothing"))
    (tmp_path / "log").write_bytes(b"\xff GPU is lost\n" + b"x" * evidence.OUTPUT_BYTES)
    assert Witness().evidence(tmp_path / "log", "") == ev.Evidence()
    assert Witness().evidence(tmp_path / "log", "GPU 1 gone").device_lost == "GPU 1 gone"
    assert Witness().evidence(tmp_path / "no log", "") == ev.Evidence()


# --- whole runs -----------------------------------------------------------------------------------


def first_end(run: Run) -> contract.Json:
    ended = run.records("attempt_ended")[0]
    return {key: ended[key] for key in ("cause", "code", "signal", "counted", "message")}


@pytest.mark.parametrize(
    "number", [signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGKILL, signal.SIGHUP]
)
def test_a_death_by_a_signal_is_on_record_and_in_the_status(
    run: Run, number: signal.Signals
) -> None:
    run.faults = f"signal{int(number)}@6#1"
    run.gate(8)
    supervisor = run.start()
    last = run.wait_for_status(phase="running", attempt=2, step=8)["last_exit"]
    assert (last["cause"], last["code"], last["signal"]) == ("signal", None, number)
    run.open_gate()
    assert run.end(supervisor) == 0
    assert first_end(run)["counted"]


def test_a_broken_device_is_named_with_its_words(run: Run) -> None:
    run.faults = "ecc@6#1"
    assert run.finish() == 0
    ended = first_end(run)
    words = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert (ended["cause"], ended["code"], ended["message"]) == ("device-lost", 1, words)
    assert ended["counted"]
    assert run.file_status()["last_exit"]["message"] is None, "that of the newest attempt"


def test_too_little_address_space_is_a_crash_that_says_so(run: Run) -> None:
    """The kernel refuses, and kills nobody: the trainer's own words are all there is."""
    run.faults = "limit@6#1,grow@6#1"
    assert run.finish() == 0
    ended = first_end(run)
    assert (ended["cause"], ended["code"], ended["message"]) == ("crash", 1, "MemoryError")


def _memory_groups() -> Iterator[str]:
    """Where this machine lets us limit memory: nowhere, or in a hierarchy of either version."""
    if os.access(CGROUPS_OF_OLD / "memory" / "memory.limit_in_bytes", os.R_OK):
        with contextlib.suppress(OSError):
            probe = CGROUPS_OF_OLD / "memory" / f"probe-{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
            yield "memory.limit_in_bytes"
    own = cgroup.delegated()
    if own is not None and "memory" in (own.path / "cgroup.subtree_control").read_text().split():
        yield "memory.max"


@pytest.mark.parametrize("how", ["counter", *_memory_groups()])
def test_a_trainer_that_the_kernel_ends_for_want_of_memory(
    run: Run, how: str, tmp_path: Path
) -> None:
    """In a group with a limit, where one can be made; with a counter that somebody else moves, on
    any machine."""
    with contextlib.ExitStack() as stack:
        if how == "counter":
            vmstat = tmp_path / "vmstat"
            vmstat.write_text("oom_kill 7\n")
            run.patch("evidence", "VMSTAT", str(vmstat))
            supervisor = run.hold(8)
            vmstat.write_text("oom_kill 8\n")
            kill(run.status()["trainer_pid"])
            run.open_gate()
        else:
            group = stack.enter_context(limited_group(how))
            run.environment["SABOTEUR_CGROUP"] = str(group / "cgroup.procs")
            run.faults = "grow@6#1"
            supervisor = run.start()
        assert run.end(supervisor) == 0
        # The group has to be empty before it can go; the supervisor was not in it.
        ended = first_end(run)
    assert (ended["cause"], ended["signal"]) == ("out-of-memory", signal.SIGKILL)
    assert "for want of memory" in ended["message"]
    assert ended["counted"]


@contextlib.contextmanager
def limited_group(limit: str) -> Iterator[Path]:
    if limit == "memory.max":
        own = cgroup.delegated()
        assert own is not None
        path = own.path / f"limited-{os.getpid()}"
    else:
        path = CGROUPS_OF_OLD / "memory" / f"limited-{os.getpid()}"
    path.mkdir()
    try:
        (path / limit).write_text(str(160 * 2**20))
        yield path
    finally:
        wait_until(lambda: not (path / "cgroup.procs").read_text(), "an empty group")
        path.rmdir()


# --- a death that does not come -------------------------------------------------------------------

# What SIGKILL is to a process that waits in the kernel: nothing, for now.
DROPS_SIGKILL = """
import signal, sys
if "supervisor" in sys.orig_argv:
    sends = signal.pidfd_send_signal
    signal.pidfd_send_signal = lambda fd, number: number != 9 and sends(fd, number)
"""
FREEZER: Final = CGROUPS_OF_OLD / "freezer"


def _freezes() -> bool:
    """Whether a process can be frozen so that SIGKILL has to wait; version 2 lets it die."""
    with contextlib.suppress(OSError):
        probe = FREEZER / f"probe-{os.getpid()}"
        probe.mkdir()
        there = (probe / "freezer.state").exists()
        probe.rmdir()
        return there
    return False


@contextlib.contextmanager
def unkillable(run: Run, how: str) -> Iterator[None]:
    """From inside this block on, until its end, SIGKILL does nothing to the trainer."""
    if how == "dropped":
        yield
        kill(run.file_status()["trainer_pid"])
        return
    group = FREEZER / f"frozen-{os.getpid()}"
    group.mkdir()
    pid = run.status()["trainer_pid"]
    (group / "cgroup.procs").write_text(str(pid))
    (group / "freezer.state").write_text("FROZEN")
    try:
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        wait_for_end(pid)
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "an empty group")
        group.rmdir()


@pytest.mark.fault(
    "SV-35", phase="stopping", does="ends in `stuck`, served until then, and bounded"
)
@pytest.mark.parametrize("how", ["dropped", *(["frozen"] if _freezes() else [])])
def test_a_trainer_that_cannot_be_killed_is_stuck_and_has_no_successor(
    tmp_path: Path, how: str
) -> None:
    """Who waits for a process in the kernel waits for ever (pytorch PR 185414, moby #22802)."""
    with run_of(tmp_path, "session") as (run, _):
        if how == "dropped":
            with (run.home / "sitecustomize.py").open("a") as file:
                file.write(DROPS_SIGKILL)
        run.faults = "native@9"
        run.set("stop", grace_seconds=0.5, signal_after_seconds=0.1, kill_seconds=1.0)
        supervisor = run.hold(8)
        pid = run.status()["trainer_pid"]
        run.gate(9)
        log = run.directory / contract.LOGS / "attempt-0001.log"
        wait_until(lambda: "the saboteur hangs" in log.read_text(), "a trainer that hangs")
        with unkillable(run, how):
            supervisor.send_signal(signal.SIGTERM)
            wait_until(lambda: run.status()["phase"] == "stopping", "a stop that is served")
            assert run.end(supervisor) == 1
            status = run.file_status()
            assert status["phase"] == "stuck"
            assert f"process {pid} does not end, 1 s after SIGKILL" in status["reason"]
            assert proc.start_ticks(pid) is not None
            # The next life sees that it was killed, waits as long, and starts no second trainer.
            again = run.start()
            if how == "dropped":  # of this one the kernel does not say that it was killed
                run.wait_for_status(phase="running", supervisor_pid=again.pid)
                again.send_signal(signal.SIGTERM)
            assert run.end(again) == 1
            assert run.file_status()["phase"] == "stuck"
            assert len(run.records("attempt_started")) == 1
        wait_for_end(pid)
        run.faults = ""
        (run.home / "sitecustomize.py").unlink()
        run.open_gate()
        assert run.finish() == 0
        assert run.steps() == list(range(1, 31))


def test_the_last_words_are_shown_with_their_control_characters_disarmed(run: Run) -> None:
    run.faults = "ecc@6"
    run.set("restart", deaths=1)
    assert run.finish() == 1
    shown = run.supervisor("status", str(run.directory)).stdout
    assert "last exit   device-lost (code 1): RuntimeError: CUDA error" in shown
    status = {**run.file_status(), "last_exit": {**LAST_EXIT, "message": "a\x1b[31mb"}}
    status["checkpoint"] = {**status["checkpoint"], "age_seconds": None}
    assert "): a\ufffd[31mb" in view_commands.status_text(status, 3)


LAST_EXIT: Final = {"cause": "crash", "code": 1, "signal": None}
