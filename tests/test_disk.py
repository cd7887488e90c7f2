"""A disk that fills up or breaks in the middle of a run: training and history survive it."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from disk_kit import FULL, DiskRun, build, filled
from runs_kit import kill, wait_until

from supervisor import contract

STEPS: Final = 60
PARAMETERS: Final = 100_000  # a checkpoint of 1.2 MB


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("layer"))


@pytest.fixture
def make(run_home: Path, layer: Path) -> Iterator[Callable[..., DiskRun]]:
    made: list[DiskRun] = []

    def factory(**settings: Any) -> DiskRun:
        made.append(DiskRun(run_home, layer, **settings))
        return made[-1]

    yield factory
    for run in made:
        run.close()


def settings() -> dict[str, Any]:
    return {"training": {"steps": STEPS}}


def is_whole(run: DiskRun, attempts: int = 1) -> None:
    """One entry a step, every binding proven, no life too many, nothing half-made."""
    assert run.steps() == list(range(1, STEPS + 1))
    assert all(run.proofs())
    assert len(run.records("attempt_started")) == attempts
    assert not list((run.directory / contract.CHECKPOINTS).glob(".tmp-*"))
    assert run.file_status()["replay"]["diverged_steps"] == 0


# --- another program takes all the room -----------------------------------------------------------


def fill_and_free(run: DiskRun, full: AbstractContextManager[None]) -> None:
    """The whole story, whatever makes the disk full."""
    supervisor = run.hold(15)
    wait_until(lambda: run.status()["checkpoint"]["verified"], "a first checkpoint that is proven")
    with full:
        run.gate(45)
        wait_until(lambda: run.history_step() == 45, "steps go on and are on record")
        wait_until(lambda: {"disk", "unsaved"} <= run.alarms().keys(), "both alarms")
        seen = run.alarms()
        assert "bytes are free and the next checkpoint needs" in seen["disk"]
        assert "step 20 could not be saved" in seen["unsaved"]
        assert "No space left on device" in seen["unsaved"]
        answer = run.ask("checkpoint", "c1", at="now")
        assert answer.outcome == "refused"
        assert "step 45 could not be saved" in answer.why
        assert run.checkpoints() == [10], "what was there is as it was"
    wait_until(lambda: "disk" not in run.alarms(), "the alarm goes with its reason")
    assert run.ask("checkpoint", "c2", at="now").result["step"] == 45
    assert "unsaved" not in run.alarms()
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.file_status()["alarms"] == []
    assert run.checkpoints()[-2:] == [50, 60]
    is_whole(run)


@contextlib.contextmanager
def pretended(run: DiskRun) -> Iterator[None]:
    run.rule(f"{FULL}room 4096\n")
    yield
    run.heal()


def can_mount() -> bool:
    """Whether this machine lets us have a namespace with a tmpfs of our own."""
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.fault("FC-22", phase="running", does="trains on and saves once there is room again")
@pytest.mark.fault("SV-54", phase="running", does="goes on without log and room, and recovers")
@pytest.mark.parametrize("disk", ["layer", "tmpfs"] if can_mount() else ["layer"])
def test_a_disk_that_another_program_fills_and_frees(
    make: Callable[..., DiskRun], run_home: Path, disk: str
) -> None:
    """A disk that was full at a save ended a long training, and a full disk under the log ended the
    daemon that wrote to it (bghira/SimpleTuner #2353, open-mmlab/mmdetection #12069;
    Supervisor/supervisor #629, DataDog/dd-agent #2149)."""
    if disk == "layer":
        run = make(**settings())
        run.environment["SABOTEUR_PARAMETERS"] = str(PARAMETERS)
        fill_and_free(run, pretended(run))
        return
    (run_home / "run").mkdir()
    mount = 'mount -t tmpfs -o size=48m,mode=700 none "$1/run" && exec "$2" "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", str(run_home), sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def on_tmpfs(home: Path) -> None:
    """The same with the kernel's own answers, in a namespace that has a tmpfs at home/run."""
    run = DiskRun(home, None, **settings())
    run.environment["SABOTEUR_PARAMETERS"] = str(PARAMETERS)
    with contextlib.closing(run):
        fill_and_free(run, filled(run.directory))


# --- one call on one file -------------------------------------------------------------------------

CALLS: Final = (
    "checkpoints/.tmp- open",
    "checkpoints*.bin write",
    "checkpoints*.json write",
    "checkpoints*.bin fsync",
    "checkpoints/step link",
    "receipts/ fsync",
)
SAVES: Final = [
    f"{code} {call}" for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO) for call in CALLS
]


@pytest.mark.fault("FC-08", phase="saving", does="leaves what was saved before as it was")
@pytest.mark.fault("FC-16", phase="saving", does="says every save that did not come about")
def test_whatever_call_of_a_save_fails_the_trainer_goes_on(make: Callable[..., DiskRun]) -> None:
    """A full disk cut the only good file; a save that had failed stayed on a list as if it were
    there, and later ones were left out without a word (NVIDIA/NVFlare PR 5011,
    AI-Hypercomputer/maxtext PR 5260)."""
    run = make(training={"steps": STEPS}, checkpoint={"every": 1000})
    supervisor = run.hold(5)
    for number, rule in enumerate(SAVES):
        run.rule(rule)
        answer = run.ask("checkpoint", f"bad-{number}", at="now")
        assert answer.outcome == "refused", rule
        assert f"Errno {rule.split()[0]}" in answer.why, rule
        run.heal()
        newest = [step for step in (3 + number, 4 + number) if step >= 5]
        assert run.checkpoints()[-2:] == newest, "the old ones, and nothing else"
        assert run.ask("checkpoint", f"good-{number}", at="now").outcome == "done"
        wait_until(lambda: "unsaved" not in run.alarms(), "the next save clears the alarm")
        run.gate(6 + number)
        run.wait_for_status(step=6 + number)
    run.rule("short checkpoints/ write")  # not a failure: the rest is written
    assert run.ask("checkpoint", "short", at="now").outcome == "done"
    run.heal()
    run.open_gate()
    assert run.end(supervisor) == 0
    assert len(run.records("checkpoint_verified")) == len(SAVES) + 2
    is_whole(run)


HISTORY: Final = ("run.loss.json", "journal.jsonl", "receipts/", "run.samples.json")


def test_history_waits_for_the_disk_and_loses_nothing(make: Callable[..., DiskRun]) -> None:
    run = make(training={"steps": STEPS}, checkpoint={"every": 4})
    supervisor = run.hold(9)
    for number, target in enumerate(HISTORY):
        step = 9 + 12 * number
        refuse(run, target, f"28 {target} write,open", step + 4)
        refuse(run, target, f"5 {target} write,fsync", step + 8)
        run.rule(f"short {target} write")  # refused only where it comes to no end
        run.gate(step + 12)
        wait_for_history_or_refusal(run, target, step + 12)
        run.heal()
        wait_for_history(run, step + 12)
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.file_status()["alarms"] == []
    is_whole(run)
    assert samples_end(run) == STEPS


def samples_end(run: DiskRun) -> int:
    rows = orjson.loads((run.directory / contract.samples_name(run.name)).read_bytes())
    return int(rows[-1]["step"])


def refuse(run: DiskRun, target: str, rule: str, step: int) -> None:
    """The disk refuses while training may go on to `step`; it is said, and caught up with."""
    run.rule(rule)
    run.gate(step)
    wait_until(lambda: waits(run, target), f"somebody says that {target} is refused")
    run.heal()
    wait_for_history(run, step)


def wait_for_history_or_refusal(run: DiskRun, target: str, step: int) -> None:
    wait_until(lambda: waits(run, target) or run.history_step() == step, f"a word about {target}")


def wait_for_history(run: DiskRun, step: int) -> None:
    wait_until(lambda: run.history_step() == step, f"history comes to step {step}")


def waits(run: DiskRun, target: str) -> bool:
    """Whether status says what is refused, on the socket, with the figure of the kernel."""
    name = {"run.loss.json": "ledger", "receipts/": "unsaved"}.get(target, "durability")
    alarms = run.alarms()
    durable = alarms.get("durability", "")
    return "Errno" in alarms.get(name, "") or (target in durable and "Errno" in durable)


@pytest.mark.fault("SV-74", phase="running", does="keeps the status file whole on a full disk")
@pytest.mark.fault("SV-54", phase="running", does="counts the lines that a log could not take")
def test_hints_and_logs_may_fail(make: Callable[..., DiskRun]) -> None:
    """A state file was emptied when the disk filled up, and a log that could not be written ended
    the daemon (Unitech/pm2 #2827, #2971, #1035; Supervisor/supervisor #1648)."""
    run = make(**settings())
    supervisor = run.hold(15)
    before = run.file_status()
    run.rule("\n".join(f"28 {name} write,open" for name in ("status.json", ".log", "logs/")))
    run.gate(35)
    wait_until(lambda: run.history_step() == 35, "training does not print on the disk")
    run.wait_for_status(step=35)
    assert run.file_status().keys() == before.keys()
    assert run.file_status()["step"] < 35
    run.heal()
    wait_until(lambda: run.file_status()["step"] == 35, "the hint is up to date again")
    run.open_gate()
    assert run.end(supervisor) == 0
    log = (run.directory / contract.SUPERVISOR_LOG_FILE).read_text()
    assert "lines before this one were lost)" in log
    is_whole(run)


# --- beginnings and ends --------------------------------------------------------------------------


def test_a_trainer_that_dies_on_a_full_disk_is_replaced_there(make: Callable[..., DiskRun]) -> None:
    """The next attempt has no log and no receipt file yet: it waits for the latter."""
    run = make(**settings())
    supervisor = run.hold(15)
    run.rule(f"{FULL}\n28 receipts/ open\n")
    kill(run.status()["trainer_pid"])
    run.wait_for_record("attempt_spawned", attempt=2)
    wait_until(lambda: "unsaved" in run.alarms(), "it says that it waits")
    run.heal()
    run.open_gate()
    assert run.end(supervisor) == 0
    assert not (run.directory / contract.LOGS / "attempt-0002.log").exists()
    is_whole(run, attempts=2)


def test_a_damaged_checkpoint_on_a_full_disk_makes_way_for_the_one_before_it(
    make: Callable[..., DiskRun],
) -> None:
    run = make(**settings())
    supervisor = run.hold(25)
    assert run.ask("stop", "s1").outcome == "done"
    assert run.end(supervisor) == 0
    assert run.checkpoints() == [10, 20, 25]
    os.truncate(run.directory / contract.CHECKPOINTS / "step_000025.bin", 50)
    run.rule(f"{errno.ENOSPC} quarantine/ write,open")
    supervisor = run.start()
    started = run.wait_for_record("attempt_started", attempt=2)
    assert started["resume_step"] == 20
    (quarantined,) = run.records("checkpoint_quarantined")
    assert "50 bytes" in quarantined["reason"], "here, as there is no room for a file"
    there = sorted(path.name for path in (run.directory / contract.QUARANTINE).iterdir())
    assert there == ["step_000025.bin", "step_000025.json"]
    run.heal()
    run.open_gate()
    assert run.end(supervisor) == 0
    is_whole(run, attempts=2)


def test_the_last_checkpoint_waits_for_room(make: Callable[..., DiskRun]) -> None:
    run = make(**settings())
    run.rule("28 / fallocate")
    supervisor = run.hold(15)
    wait_until(lambda: "cannot reserve" in run.alarms().get("reserve", ""), "no room ahead")
    run.heal()
    run.gate(55)
    wait_until(lambda: "reserve" not in run.alarms(), "there is room ahead")
    wait_for_history(run, 55)
    run.rule(FULL)
    run.open_gate()
    wait_until(lambda: "step 60" in run.alarms().get("unsaved", ""), "the end is not saved")
    assert supervisor.poll() is None
    run.heal()
    assert run.end(supervisor) == 0
    assert run.checkpoints()[-1] == STEPS
    assert run.file_status()["alarms"] == []
    assert samples_end(run) == STEPS, "what was late has had its last chance"
    is_whole(run)


def test_a_trainer_that_cannot_say_that_it_waits_for_room_does_not_hang(
    make: Callable[..., DiskRun],
) -> None:
    run = make(**settings())
    run.environment["SABOTEUR_PARAMETERS"] = str(PARAMETERS)
    first = run.hold(15)
    assert run.ask("stop").outcome == "done"
    assert run.end(first) == 0
    run.set("hang", step_seconds=1.0, save_seconds=1.0, evidence_seconds=0.1)
    run.environment["SABOTEUR_MUTE"] = "1"
    run.rule("28 checkpoints/ write,open\nroom 4096\n")
    run.open_gate()
    second = run.start()
    wait_for_history(run, STEPS)
    written = run.status()["time"]
    wait_until(lambda: run.status()["time"] > written + 4, "a silence of four deadlines")
    assert second.poll() is None
    assert run.checkpoints() == [10, 15]
    run.heal()
    assert run.end(second) == 0
    assert run.checkpoints()[-1] == STEPS
    is_whole(run, attempts=2)


@pytest.mark.parametrize("target", ["checkpoints/", "receipts/"])
def test_a_stop_does_not_wait_for_ever(make: Callable[..., DiskRun], target: str) -> None:
    """It ends with 74 after some tries, uncounted; what was not saved is executed again."""
    run = make(**settings())
    supervisor = run.hold(15)
    run.rule(f"28 {target} write,open")
    run.gate(16)
    if target == "receipts/":
        wait_until(lambda: "unsaved" in run.alarms(), "it waits to record step 16")
    else:
        run.wait_for_status(step=16)
    answer = run.ask("stop", "s1")
    assert (answer.outcome, answer.result["phase"]) == ("done", "stopped")
    assert run.end(supervisor) == 0
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["code"], ended["counted"]) == ("checkpoint", 74, False)
    assert run.checkpoints() == [10]
    run.heal()
    run.open_gate()
    assert run.finish() == 0
    is_whole(run, attempts=2)


@pytest.mark.fault("FC-22", phase="saving", does="stops with the reason where that is configured")
def test_a_full_disk_stops_the_run_where_the_operator_wants_that(
    make: Callable[..., DiskRun],
) -> None:
    run = make(training={"steps": STEPS}, checkpoint={"when_full": "stop"})
    supervisor = run.hold(15)
    run.rule("room 16\n")
    assert run.end(supervisor) == 1
    status = run.file_status()
    assert (status["phase"], status["wish"]) == ("failed", "run")
    assert "checkpoint.when_full" in status["reason"]
    assert "16 bytes are free" not in status["reason"], "whole blocks are counted"
    assert "bytes are free and the next checkpoint needs" in status["reason"]
    (ended,) = run.records("attempt_ended")
    assert (ended["cause"], ended["counted"]) == ("stopped", False)
    assert run.checkpoints() == [10, 15], "the last save was tried, and it did fit"
    run.heal()
    run.open_gate()
    assert run.finish() == 0
    is_whole(run, attempts=2)


def test_a_broken_disk_stops_it_too(make: Callable[..., DiskRun]) -> None:
    run = make(training={"steps": STEPS}, checkpoint={"when_full": "stop"})
    supervisor = run.hold(15)
    run.rule("5 checkpoints/ fsync")
    run.gate(20)
    assert run.end(supervisor) == 1
    assert "Input/output error" in run.file_status()["reason"]
    assert [one["code"] for one in run.records("attempt_ended")] == [74]
    run.heal()
    run.open_gate()
    assert run.finish() == 0
    is_whole(run, attempts=2)


# --- making room ----------------------------------------------------------------------------------


def test_room_is_made_before_anybody_is_told_that_there_is_none(
    make: Callable[..., DiskRun],
) -> None:
    run = make(training={"steps": STEPS}, checkpoint={"keep_last": 5, "when_full": "stop"})
    supervisor = run.hold(45)
    wait_until(lambda: len(run.records("checkpoint_verified")) == 4, "four proven checkpoints")
    assert run.ask("pin", "p1", step=20, why="a test").outcome == "done"
    left = run.directory / contract.SUPERSEDED
    left.mkdir(exist_ok=True)
    (left / "step_000070.bin").write_bytes(bytes(8192))
    (left / "step_000020.2.bin").write_bytes(bytes(8192))
    dead = run.directory / contract.CHECKPOINTS / contract.temporary_name(0, "dead", "x.bin")
    dead.write_bytes(bytes(8192))
    run.rule("122 checkpoints/.tmp- write")  # a quota: no figure says that there is no room
    run.ask("checkpoint", "c1", at="now")
    (gone,) = wait_until(lambda: run.records("leftovers_removed"), "leftovers are removed")
    assert gone["names"] == [f"checkpoints/{dead.name}"], "no more than is needed"
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run.end, supervisor)
        number = 1
        while not ended.done():
            number += 1
            with contextlib.suppress(Exception):
                run.ask("checkpoint", f"c{number}", at="now")
        assert ended.result() == 1, "nothing is left that could go"
    names = [name for record in run.records("leftovers_removed") for name in record["names"]]
    assert names == [f"checkpoints/{dead.name}", "superseded/step_000070.bin"]
    removed = [step for record in run.records("checkpoints_removed") for step in record["steps"]]
    assert removed == [10], "pinned: 20; the last two: 30 and 40"
    assert run.checkpoints() == [20, 30, 40]
    assert (left / "step_000020.2.bin").exists()
    run.heal()
    run.open_gate()
    assert run.finish() == 0
    is_whole(run, attempts=2)


if __name__ == "__main__":
    on_tmpfs(Path(sys.argv[1]))


# --- a run directory that takes nothing -----------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "target", "code"),
    [(13, ".tmp-", 2), (30, "journal.jsonl", 2), (5, "journal.jsonl", 70)],
)
def test_a_start_that_can_write_nothing_says_so_and_ends(
    make: Callable[..., DiskRun], number: int, target: str, code: int
) -> None:
    """It hung without a word, and no signal ended it."""
    run = make(**settings())
    run.rule(f"{number} {target} write,open")
    with (run.home / "sitecustomize.py").open("a") as file:
        file.write('if "start" in sys.orig_argv: commit.UNWRITABLE_SECONDS = 0.3\n')
    assert run.finish() == code
    name = (
        f"{run.directory}/policies/0001.toml cannot be written"
        if target == ".tmp-"
        else f"{run.directory}/{target}"
    )
    assert name in run.output()
    assert os.strerror(number) in run.output()
    run.heal()
    assert run.finish() == 0
    is_whole(run)


def test_a_stop_of_a_start_that_can_write_nothing_is_obeyed(make: Callable[..., DiskRun]) -> None:
    run = make(**settings())
    with (run.home / "sitecustomize.py").open("a") as file:
        file.write('if "start" in sys.orig_argv: commit.UNWRITABLE_SECONDS = 1e6\n')
    run.rule("13 .tmp- write,open")
    supervisor = run.start()
    wait_until(lambda: "it is tried again" in run.output(), "a word about what is refused")
    supervisor.terminate()
    assert run.end(supervisor) == 2
    assert "no trainer lives, so this ends here" in run.output()
