"""What a service manager hears, on a real datagram socket, and the stop that it carries out."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from runs_kit import DEADLINE_SECONDS, Run, kill, wait_for_end, wait_until

from supervisor import contract, parentage, sdnotify
from supervisor.contract import Json
from supervisor.rundir import lock_holder
from supervisor.sdnotify import EXTENSION_SECONDS, ServiceManager, ending, status_line
from supervisor.state import Durable, State

READY: Final = "READY=1"
BEAT: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"
EXTENSION: Final = f"EXTEND_TIMEOUT_USEC={EXTENSION_SECONDS}000000"


class Manager:
    """The service manager's end: a datagram socket, and everything that came to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[list[str]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind("\0" + name[1:] if name.startswith("@") else name)

    def environment(self, watchdog_seconds: float | None = None, **more: str) -> dict[str, str]:
        watched = {"WATCHDOG_USEC": str(int(watchdog_seconds * 1e6))} if watchdog_seconds else {}
        return {"NOTIFY_SOCKET": self.name, **watched, **more}

    def listen(self) -> list[list[str]]:
        """What is new, each message as its lines."""
        new = []
        with contextlib.suppress(BlockingIOError):
            while True:
                new.append(self.socket.recv(65536).decode().split("\n"))
        self.heard += new
        return new

    def lines(self) -> list[str]:
        self.listen()
        return [line for message in self.heard for line in message]

    def wait_for(self, start: str) -> str:
        """The first line, of all that ever came, with this beginning."""

        def found() -> str | None:
            return next((line for line in self.lines() if line.startswith(start)), None)

        return wait_until(found, f"{start} among {self.heard}")

    def wait_for_another(self, line: str) -> None:
        self.listen()
        before = self.lines().count(line)
        wait_until(lambda: self.lines().count(line) > before, f"one more {line}")

    def is_silent_for(self, milliseconds: int) -> bool:
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return not waiting.poll(milliseconds)

    def close(self) -> None:
        self.socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = str(tmp_path / "notify") if request.param == "file" else f"@{os.urandom(8).hex()}"
    with contextlib.closing(Manager(name)) as made:
        yield made


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Manager]:
    with contextlib.closing(Manager(str(tmp_path / "notify"))) as made:
        yield made


@pytest.fixture
def run(tmp_path: Path, systemd: Manager) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        made.environment |= systemd.environment()
        yield made


# --- messages -------------------------------------------------------------------------------------


def test_what_is_new_is_said_and_nothing_twice(manager: Manager) -> None:
    with contextlib.closing(ServiceManager(manager.environment())) as notifier:
        notifier.tell("loading", False)
        assert manager.listen() == [[READY, "STATUS=loading"]]
        notifier.tell("loading", False)
        assert manager.listen() == []
        notifier.tell("step 1", False)
        assert manager.listen() == [["STATUS=step 1"]]
        notifier.tell("stopping", True)
        assert manager.listen() == [["STATUS=stopping", STOPPING, EXTENSION]]
        # It is a wait of unknown length: as long as it goes on, so does the asking for more time.
        notifier.tell("stopping", True)
        assert manager.listen() == [[EXTENSION]]


@pytest.mark.fault("SV-47", phase="any", does="counts on the monotonic clock, and says it once")
def test_sv47_the_watchdog_is_fed_twice_an_interval_and_once_after_a_sleep(
    systemd: Manager,
) -> None:
    """A watchdog bit when a machine woke up, and a clock set back hung other supervisors
    (systemd #20284, #9538, Supervisor #1043, #802, #281)."""
    with contextlib.closing(ServiceManager(systemd.environment(120.0))) as notifier:
        now, beats = 1000.0, []
        for _ in range(10):
            notifier.beat(now)
            beats.append(len(systemd.listen()))
            assert notifier.due_at == now + 60.0
            now += 60.0
        assert beats == [1] * 10
        now += 8 * 3600.0
        notifier.beat(now)
        notifier.beat(now + 0.1)
        notifier.beat(now + 59.9)
        assert systemd.listen() == [[BEAT]], "no burst for what was slept through"
        assert notifier.due_at == now + 60.0


def test_the_loop_wakes_for_the_watchdog_no_more_often_than_needed(systemd: Manager) -> None:
    with contextlib.closing(ServiceManager(systemd.environment(120.0))) as notifier:
        now, wakes = 0.0, 0
        while now < 36_000.0:
            assert notifier.due_at is not None
            now = notifier.due_at
            notifier.beat(now)
            systemd.listen()
            wakes += 1
        assert wakes == 601


@pytest.mark.parametrize(
    "environment",
    [
        {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {},
    ],
    ids=str,
)
def test_a_watchdog_that_is_not_ours_is_not_fed(
    systemd: Manager, environment: dict[str, str]
) -> None:
    with contextlib.closing(ServiceManager({**systemd.environment(), **environment})) as notifier:
        notifier.beat(1.0)
        assert notifier.due_at is None
        assert systemd.listen() == []


def test_our_own_watchdog_is_fed(systemd: Manager) -> None:
    ours = systemd.environment(1.0, WATCHDOG_PID=str(os.getpid()))
    with contextlib.closing(ServiceManager(ours)) as notifier:
        notifier.beat(1.0)
        assert systemd.listen() == [[BEAT]]


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "@"}, {"NOTIFY_SOCKET": "vsock:2:1"}],
    ids=str,
)
def test_without_a_service_manager_nothing_is_said(environment: dict[str, str]) -> None:
    notifier = ServiceManager({**environment, "WATCHDOG_USEC": "1000000"})
    notifier.tell("running", True)
    notifier.beat(1.0)
    assert notifier.due_at is None
    notifier.close()


def fill(manager: Manager) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler,
        contextlib.suppress(BlockingIOError),
    ):
        filler.setblocking(False)
        while True:
            filler.sendto(b"x", manager.name)


def test_a_service_manager_that_does_not_read_costs_nothing_and_hears_the_newest(
    systemd: Manager,
) -> None:
    with contextlib.closing(ServiceManager(systemd.environment(2.0))) as notifier:
        fill(systemd)
        notifier.tell("step 1", False)
        notifier.beat(5.0)
        assert notifier.due_at == 5.0 + sdnotify.RETRY_SECONDS
        systemd.listen()
        notifier.tell("step 2", False)
        notifier.beat(5.25)
        assert systemd.listen() == [[READY, "STATUS=step 2"], [BEAT]]


def test_a_service_manager_that_has_gone_costs_nothing(tmp_path: Path) -> None:
    gone = str(tmp_path / "notify")
    with contextlib.closing(Manager(gone)) as manager:
        notifier = ServiceManager(manager.environment(2.0))
        notifier.tell("step 1", False)
        assert manager.listen() == [[READY, "STATUS=step 1"]]
    os.unlink(gone)
    notifier.tell("step 2", False)
    notifier.beat(1.0)
    with contextlib.closing(Manager(gone)) as manager:
        notifier.tell("step 2", False)
        assert manager.listen() == [["STATUS=step 2"]]
    notifier.close()


STATUS: Final[Json] = {
    "phase": "running",
    "step": 12,
    "target_step": 30,
    "loss": 2.34567,
    "reason": None,
    "grace_seconds": None,
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "running: step 12 of 30, loss 2.3457"),
        ({"loss": None}, "running: step 12 of 30"),
        ({"loss": "nan"}, "running: step 12 of 30, loss nan"),
        (
            {"phase": "stopping", "loss": None, "grace_seconds": 118.4},
            "stopping: step 12 of 30, the trainer has 118 s left to save and end",
        ),
        (
            {"phase": "failed", "loss": None, "reason": "three\nlines\t of it"},
            "failed: step 12 of 30, three lines of it",
        ),
    ],
)
def test_the_status_is_one_line(changes: Json, line: str) -> None:
    assert status_line({**STATUS, **changes}) == line


def test_a_long_reason_is_cut() -> None:
    line = status_line({**STATUS, "phase": "stuck", "reason": "x" * 5000})
    assert len(line) == sdnotify.LINE_CHARACTERS


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        (State(phase="running"), False),
        (State(phase="stopping", intent="restart"), False),
        (State(phase="stopping", intent="pivot"), False),
        (State(phase="stopping", intent="stop"), True),
        (State(phase="starting", intent="stop"), True),
        (State(phase="stopping", durable=replace(Durable(), wish="stop")), True),
        (State(phase="finished"), True),
        (State(phase="failed"), True),
    ],
)
def test_only_the_end_of_this_life_is_an_end(state: State, ends: bool) -> None:
    assert ending(state) == ends


# --- a supervisor under a service manager ---------------------------------------------------------


def test_ready_does_not_wait_for_the_trainer(run: Run, systemd: Manager) -> None:
    run.faults = "deaf@load"
    run.set("stop", grace_seconds=0.3, signal_after_seconds=0.1)
    supervisor = run.start()
    systemd.wait_for(READY)
    # What it promises is there: the run is owned, the record open, a request answered.
    assert lock_holder(run.directory / contract.LOCK_FILE) == supervisor.pid
    assert run.ask("status").outcome == "done"
    run.wait_for_status(phase="starting", stage="loading")
    systemd.wait_for("STATUS=starting: step 0 of 30")
    supervisor.terminate()
    assert run.end(supervisor) == 0


@pytest.mark.fault("SV-77", phase="running", does="keeps the notify socket from every child")
def test_sv77_a_run_is_told_from_ready_to_its_end_and_no_child_can_speak(
    run: Run, systemd: Manager
) -> None:
    """The socket of a service leaked to what it started, which then spoke in its name
    (gpud PR 1232, systemd PR 27297)."""
    run.environment |= systemd.environment(0.2)
    supervisor = run.hold(12)
    systemd.wait_for("STATUS=running: step 12 of 30, loss ")
    for _ in range(3):
        systemd.wait_for_another(BEAT)
    children = children_of(supervisor.pid)
    assert len(children) == 2, "the trainer and the helper"
    for pid in children:
        names = {item.split(b"=")[0].decode() for item in environ(pid).split(b"\0")}
        assert not names & set(sdnotify.VARIABLES)
        assert "SUPERVISOR_RUNS" in names, "everything else is there"
    assert run.ask("restart").outcome == "done"
    assert STOPPING not in systemd.lines(), "a restart stops a trainer, and is not the end"
    assert run.ask("stop").outcome == "done"
    assert run.end(supervisor) == 0
    lines = systemd.lines()
    assert lines[0] == READY
    assert lines.count(READY) == lines.count(STOPPING) == 1
    assert lines.index(STOPPING) < lines.index(EXTENSION)
    last = [line for line in lines if line.startswith("STATUS=")][-1]
    assert last.startswith("STATUS=stopped: step 12 of 30, loss ")
    assert last.endswith(", stopped as asked")


def children_of(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(word) for word in words]


def environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_the_loop_wakes_for_the_watchdog_where_nothing_else_wakes_it(
    run: Run, systemd: Manager
) -> None:
    run.environment |= systemd.environment(0.1)
    run.faults = "crash1@load#1"
    run.set("restart", delay_seconds=60.0)
    supervisor = run.start()
    run.wait_for_status(phase="backoff", stage="")
    systemd.listen()
    systemd.heard.clear()
    written = set()

    def has_beaten() -> bool:
        written.add(run.file_status()["time"])  # about once a second: all else that happens now
        return systemd.lines().count(BEAT) >= 40

    wait_until(has_beaten, "forty beats")
    assert len(written) <= 20
    supervisor.terminate()
    assert run.end(supervisor) == 0


def test_a_stuck_loop_is_silent_though_its_threads_live(
    run: Run, systemd: Manager, tmp_path: Path
) -> None:
    run.environment |= systemd.environment(0.1)
    hole = tmp_path / "hole"
    os.mkfifo(hole)
    (tmp_path / "sitecustomize.py").write_text(_STUCK.format(flag=str(tmp_path / "stuck")))
    run.environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    supervisor = run.hold(3)
    systemd.wait_for_another(BEAT)
    (tmp_path / "stuck").write_text(str(hole))
    wait_until(lambda: not (tmp_path / "stuck").exists(), "a loop that has run into it")
    systemd.listen()
    assert systemd.is_silent_for(1000), "ten times what the watchdog allows"
    assert len(os.listdir(f"/proc/{supervisor.pid}/task")) > 1
    assert supervisor.poll() is None
    hole.write_bytes(b"")
    systemd.wait_for_another(BEAT)
    run.open_gate()
    assert run.end(supervisor) == 0


# The loop opens a pipe that nobody writes to.
_STUCK: Final = """
import os
from supervisor import wire
receive = wire.Wire.receive

def stuck(self):
    if os.path.exists({flag!r}):
        place = open({flag!r}).read()
        if place:
            os.unlink({flag!r})
            open(place).close()
    return receive(self)

wire.Wire.receive = stuck
"""


# --- the stop that a service manager carries out --------------------------------------------------


def hold_saves(run: Run) -> Path:
    place = run.home / "hold"
    run.environment["SABOTEUR_HOLD"] = str(place)
    return place


def attempt_log(run: Run, attempt: int = 1) -> str:
    path = run.directory / contract.LOGS / f"{contract.attempt_stem(attempt)}.log"
    return path.read_text() if path.exists() else ""


def everybody(supervisor: int) -> list[int]:
    """What a service manager finds in the group of the service."""
    found = [supervisor]
    for pid in found:
        found += children_of(pid)
    return found


def assert_whole(run: Run, steps: int = 30) -> None:
    assert run.steps() == list(range(1, steps + 1))
    assert all(run.proofs())
    assert run.file_status()["replay"]["diverged_steps"] == 0


@pytest.mark.fault("FC-66", phase="saving", does="waits for the save and asks for more time")
@pytest.mark.fault("FC-74", phase="saving", does="ends in a checkpoint that is verified")
@pytest.mark.parametrize("mode", ["mixed", "control-group"])
def test_fc66_a_save_that_is_slow_is_waited_for_and_told_of(
    run: Run, systemd: Manager, mode: str
) -> None:
    """A launcher turned SIGTERM into SIGKILL after thirty seconds, in the middle of a save
    (pytorch/pytorch #119856, #68258); elsewhere it was passed by and nothing was saved
    (Lightning #20542, #6626)."""
    run.set("stop", grace_seconds=900.0)
    held = hold_saves(run)
    supervisor = run.hold(12)
    held.touch()
    for pid in [supervisor.pid] if mode == "mixed" else everybody(supervisor.pid):
        kill(pid, signal.SIGTERM)
    wait_until(lambda: "held: saves step 12" in attempt_log(run), "a save that takes its time")
    systemd.wait_for(STOPPING)
    told = systemd.wait_for("STATUS=stopping: step 12 of 30, loss ")
    assert told.endswith(" s left to save and end")
    status = run.status()
    assert 0.0 < status["grace_seconds"] <= 900.0
    shown = run.supervisor("status", str(run.directory)).stdout
    assert " s left to save and end, then SIGKILL" in shown
    for _ in range(2):
        systemd.wait_for_another(EXTENSION)
    assert run.checkpoints() == [10]
    assert supervisor.poll() is None
    held.unlink()
    assert run.end(supervisor) == 0
    assert run.checkpoints() == [10, 12]
    assert run.records("checkpoint_verified")[-1]["step"] == 12
    assert run.records("attempt_ended")[-1]["cause"] == "stopped"
    run.open_gate()
    assert run.finish("--as-recorded") == 0
    assert_whole(run)


@pytest.mark.fault("FC-71", phase="stopping", does="saves although the whole group is signalled")
@pytest.mark.fault("SV-25", phase="stopping", does="saves although the data workers are gone")
def test_fc71_a_signal_to_the_whole_group_still_ends_in_a_checkpoint(run: Run) -> None:
    """SIGTERM to the group ended the data workers, and the loop failed before it could save
    (allenai/olmoearth_pretrain PR 604, KempnerInstitute/KempnerForge #177)."""
    run.faults = "workers@load#1"
    supervisor = run.hold(12)
    group = everybody(supervisor.pid)
    assert len(group) == 5, "supervisor, helper, trainer and two workers"
    for pid in group:
        kill(pid, signal.SIGTERM)
    assert run.end(supervisor) == 0
    assert run.checkpoints() == [10, 12]
    assert run.records("checkpoint_verified")[-1]["step"] == 12, "the helper did its work"
    assert run.records("attempt_ended")[-1]["cause"] == "stopped"
    run.open_gate()
    assert run.finish() == 0
    assert_whole(run)


@pytest.mark.fault("SV-25", phase="running", does="signals the main process and not its workers")
def test_sv25_a_stop_by_the_supervisor_leaves_the_workers_to_the_trainer(run: Run) -> None:
    """SIGTERM to the whole group took the loader workers away first, the emergency save was lost
    and the resume then chose half a checkpoint (KempnerForge #177)."""
    run.faults = "workers@load#1"
    held = hold_saves(run)
    run.environment["SABOTEUR_MUTE"] = "1"  # so that it is a signal
    run.gate(12)
    supervisor = run.start()
    wait_until(lambda: run.history_step() == 12, "step 12")
    (trainer,) = [pid for pid in children_of(supervisor.pid) if len(children_of(pid)) == 2]
    held.touch()
    supervisor.terminate()
    wait_until(lambda: "held: saves step 12" in attempt_log(run), "a save under way")
    assert len(children_of(trainer)) == 2
    assert all(state_of(worker) == "S" for worker in children_of(trainer))
    held.unlink()
    assert run.end(supervisor) == 0
    assert run.checkpoints() == [10, 12]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_kill_of_everything_after_the_time_out_loses_nothing_on_record(run: Run) -> None:
    held = hold_saves(run)
    supervisor = run.hold(12)
    held.touch()
    group = everybody(supervisor.pid)
    for pid in group:  # KillMode=control-group
        kill(pid, signal.SIGTERM)
    wait_until(lambda: "held: saves step 12" in attempt_log(run), "a save that is too slow")
    for pid in group:
        kill(pid)
    for pid in group:
        wait_for_end(pid)
    supervisor.wait(DEADLINE_SECONDS)
    assert run.history_step() == 12, "the history needs no checkpoint"
    held.unlink()
    run.open_gate()
    assert run.finish("--as-recorded") == 0
    assert_whole(run)
    assert [r["resume_step"] for r in run.records("attempt_started")] == [0, 10]
    assert run.file_status()["replay"]["verified_steps"] == 2


def test_the_helper_outlives_signals_from_its_first_moment(run: Run) -> None:
    """A signal to the whole service must not take away what the supervisor ends with."""
    supervisor = run.start()
    wait_until(lambda: lock_holder(run.directory / contract.LOCK_FILE), "an owner")
    while supervisor.poll() is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in children_of(supervisor.pid):
                if b"supervisor.verifier" in command_of(pid):
                    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                        kill(pid, number)
    assert run.end(supervisor) == 0
    assert len(run.records("attempt_started")) == 1
    assert_whole(run)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")


@pytest.mark.fault("SV-12", phase="any", does="a restart of the supervisor leaves the trainer be")
def test_sv12_a_restart_of_the_service_that_keeps_its_trainer_disturbs_nothing(
    run: Run, systemd: Manager
) -> None:
    """Each restart of an outer manager interrupted a fine-tuning run (PortOS #1319). This is
    `supervisor unit --on-stop keep`: SIGKILL to the main process, then the start command."""
    supervisor = run.hold(8)
    trainer: int = run.status()["trainer_pid"]
    run.kill_supervisor(supervisor)
    run.gate(14)
    systemd.listen()
    systemd.heard.clear()
    supervisor = run.start("--as-recorded")
    systemd.wait_for(READY)
    status = run.wait_for_status(phase="running", step=14)
    assert (status["trainer_pid"], status["attempt"]) == (trainer, 1)
    run.open_gate()
    assert run.end(supervisor) == 0
    assert len(run.records("attempt_started")) == 1
    assert_whole(run)


# --- a shell in the way ---------------------------------------------------------------------------


@pytest.mark.fault("FC-72", phase="starting", does="warns of the shell that would swallow SIGTERM")
@pytest.mark.parametrize(("word", "warned"), [("", True), ("exec ", False)])
def test_fc72_a_shell_that_gets_the_signals_in_our_place_is_told_of(
    run: Run, word: str, warned: bool
) -> None:
    """A shell script as the first process kept SIGTERM to itself (petuum/adaptdl #105,
    aws/deep-learning-containers #632, aws/sagemaker-training-toolkit #125)."""
    run.set("training", steps=4)
    # What systemd tells its main process about itself, told by that process.
    script = f'export SYSTEMD_EXEC_PID=$$; {word}"$@"; exit $?'
    whole = ["/bin/sh", "-c", script, "sh", *run.command("start", "--config", str(run.config))]
    found = run_to_end(run, whole)
    log = (run.directory / contract.SUPERVISOR_LOG_FILE).read_text()
    assert ("without exec" in found) == warned
    assert ("without exec" in log) == warned


def run_to_end(run: Run, command: list[str]) -> str:
    """Its standard error."""
    found = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=run.variables(),
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    return found.stderr


@pytest.mark.parametrize(
    ("parent", "name", "main", "warned"),
    [
        (1, "sh", "", True),
        (1, "bash", "", True),
        (1, "tini", "", False),
        (1, "systemd", "", False),
        (700, "bash", "", False),
        (700, "bash", "701", False),
        (700, "bash", "700", True),
        (700, "python3", "700", False),
    ],
)
def test_only_a_shell_in_the_way_is_warned_of(
    parent: int, name: str, main: str, warned: bool
) -> None:
    text = parentage.warning(parent, name, main)
    assert bool(text) == warned
    assert not warned or f"{name} (process {parent})" in text
