"""The trainer's command line: alone, for a supervisor, and its other commands.

Signals, kills, locks and limits are shown on real processes; what needs none of these runs the
same `main` in this one.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tomllib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import trainer_kit as kit

from supervisor import config, contract, journal, ledger
from supervisor.contract import EnvironmentLine
from supervisor.link import Link
from trainer import checkpoint, device, optimizer
from trainer.__main__ import _parser

pytestmark = pytest.mark.usefixtures("run_home")

ENDLESS = {"steps": 1_000_000, "schedule_steps": 1_000_000}


def alone(home: Path, *arguments: str, **options: Any) -> kit.Process:
    return kit.Process(home, "--config", str(home / "tiny.toml"), *arguments, **options)


def finished(home: Path, *arguments: str, code: int = 0) -> str:
    """A life alone to its end, in this process; what it said on stderr."""
    found, _, told = kit.command("--config", str(home / "tiny.toml"), *arguments)
    assert found == code, told
    return told


def environment_of(home: Path, attempt: int, resume_step: int, lock: int) -> dict[str, str]:
    """What a supervisor tells the trainer that it spawns."""
    return {
        contract.ENV_RUN_DIRECTORY: str(home / "run"),
        contract.ENV_ATTEMPT: str(attempt),
        contract.ENV_NONCE: kit.NONCE,
        contract.ENV_EPOCH: "1",
        contract.ENV_RESUME_STEP: str(resume_step),
        contract.ENV_LOCK_FD: str(lock),
    }


def checkpoints(home: Path) -> list[int]:
    directory = home / "run" / contract.CHECKPOINTS
    return checkpoint.steps(directory) if directory.exists() else []


def binary(home: Path, step: int) -> bytes:
    return (home / "run/checkpoints" / f"{contract.checkpoint_stem(step)}.bin").read_bytes()


def state_at(home: Path, step: int) -> contract.Json:
    return checkpoint.verify(home / "run" / contract.CHECKPOINTS, step).state


def trained(home: Path, steps: int, attempt: int = 1) -> bool:
    return len(kit.steps_of(home / "run", attempt)) >= steps


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.fault(
    "SV-23", phase="running", does="answers a signal with a whole checkpoint of the next boundary"
)
def test_sigusr1_writes_and_trains_on_and_sigterm_writes_and_exits(tmp_path: Path) -> None:
    kit.write_config(tmp_path, training=ENDLESS, checkpoint={"every": 1_000_000})
    run = tmp_path / "run"
    with alone(tmp_path) as process:
        process.until(lambda: trained(tmp_path, 3))
        process.send(signal.SIGUSR1)
        (first,) = process.until(lambda: checkpoints(tmp_path))
        process.until(lambda: trained(tmp_path, first + 5))
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    last = kit.steps_of(run)[-1]
    assert checkpoints(tmp_path) == [first, last]
    assert kit.steps_of(run) == list(range(1, last + 1))
    assert (kit.exit_of(run).why, kit.exit_of(run).step) == ("stopped", last)
    for step, reason in ((first, "sigusr1"), (last, "sigterm")):
        raw = binary(tmp_path, step)
        written, parameters = struct.unpack("<ii", raw[:8])
        assert (written, len(raw)) == (step, 8 + 12 * parameters)
        numbers = array("f", raw[8:])
        assert any(numbers[:parameters])
        assert min(numbers[2 * parameters :]) >= 0.0  # v is a mean of squares
        manifest = checkpoint.verify(run / contract.CHECKPOINTS, step)
        assert (manifest.reason, manifest.state["updates"]) == (reason, step)


def test_ctrl_c_asks_like_sigterm(tmp_path: Path) -> None:
    kit.write_config(tmp_path, training=ENDLESS)
    with alone(tmp_path) as process:
        process.until(lambda: trained(tmp_path, 3))
        process.send(signal.SIGINT)
        assert process.wait() == 0
    assert kit.exit_of(tmp_path / "run").why == "stopped"


@pytest.mark.fault("SV-24", phase="loading", does="obeys SIGTERM while torch is being imported")
def test_a_stop_while_torch_is_loading_is_obeyed_without_a_step(tmp_path: Path) -> None:
    kit.write_config(tmp_path)
    receipts = tmp_path / "run/receipts/attempt-0001.jsonl"
    with alone(tmp_path) as process:
        process.until(lambda: handles_sigterm(process.child.pid) and receipts.exists())
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    assert kit.steps_of(tmp_path / "run") == []
    assert (kit.exit_of(tmp_path / "run").why, kit.exit_of(tmp_path / "run").step) == ("stopped", 0)
    assert checkpoints(tmp_path) == []


def handles_sigterm(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


# --- exactness across processes -------------------------------------------------------------------

# As configs/lesson.toml, with a smaller model.
LESSON: dict[str, dict[str, Any]] = {
    "training": {"steps": 80, "learning_rate": 0.003},
    "checkpoint": {"every": 20},
}


def test_eighty_updates_stopped_at_37_are_eighty_updates(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The weights, m, v, every loss, and a random vector drawn after the last step."""
    whole, parts = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
    for home in (whole, parts):
        kit.write_config(home, **LESSON)
    with alone(whole) as process:
        assert process.wait() == 0, process.errors
    run_with_cue(parts, step=37, action="import signal; signal.raise_signal(signal.SIGTERM)")
    assert checkpoints(parts) == [20, 37]
    with alone(parts) as process:
        assert process.wait() == 0, process.errors
    assert checkpoints(parts) == [20, 37, 40, 60, 80]
    for step in (40, 60, 80):
        assert binary(parts, step) == binary(whole, step)
    entries = [
        {e.step: e for e in kit.receipts_of(home / "run", attempt) if isinstance(e, contract.Entry)}
        for home, attempt in ((whole, 1), (parts, 1), (parts, 2))
    ]
    assert list(entries[1]) == list(range(1, 38))
    assert list(entries[2]) == list(range(38, 81))
    for step, entry in (entries[1] | entries[2]).items():
        assert contract.differing_fields(entry, entries[0][step]) == ()
    vectors = [drawn_after(home) for home in (whole, parts)]
    assert torch.equal(*vectors)
    assert state_at(parts, 80)["targets_seen"] == state_at(whole, 80)["targets_seen"]


def drawn_after(home: Path) -> torch.Tensor:
    """A vector from the global generator as the last checkpoint has it."""
    before = torch.get_rng_state()
    try:
        device.restore_rng(state_at(home, 80)["rng"], torch.device("cpu"))
        return torch.rand(16)
    finally:
        torch.set_rng_state(before)


def run_with_cue(home: Path, step: int, action: str) -> None:
    """A life in its own process that does `action` just after the receipt of a step."""
    program = f"""
import sys
from supervisor import link
from supervisor.contract import Entry

original = link.Link.record

def record(self, receipt):
    original(self, receipt)
    if isinstance(receipt, Entry) and receipt.step == {step}:
        {action}

link.Link.record = record
sys.argv = ["trainer", "--config", {str(home / "tiny.toml")!r}]
from trainer.__main__ import main
sys.exit(main())
"""
    run_program(program)


def run_program(program: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": str(kit.ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=kit.DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


# --- kill -9 --------------------------------------------------------------------------------------


def test_fc01_every_final_name_verifies_whenever_the_trainer_was_killed(
    tmp_path: Path,
) -> None:
    """A kill during a save left a short file at the final name, and loading it died with an
    unexpected end of file (Lightning-AI/pytorch-lightning #688)."""
    kit.write_config(
        tmp_path,
        training=ENDLESS,
        checkpoint={"every": 1},
        samples={"every": 1_000_000},
        evaluation={"every": 1_000_000},
    )
    directory, chance = tmp_path / "run/checkpoints", random.Random(1)
    reached = 0
    for attempt in range(1, 5):
        saves = chance.randrange(3, 20)
        with alone(tmp_path) as process:
            process.until(lambda: trained(tmp_path, saves, attempt))  # noqa: B023
            process.until(lambda: any(name.startswith(".tmp") for name in os.listdir(directory)))
            process.send(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        steps = kit.steps_of(tmp_path / "run", attempt)
        assert steps[0] == reached + 1
        committed = checkpoints(tmp_path)
        # No checkpoint outruns the history.
        assert reached < committed[-1] <= steps[-1]
        for step in committed:
            assert checkpoint.verify(directory, step).step == step
        reached = committed[-1]
    with alone(tmp_path) as process:
        process.until(lambda: trained(tmp_path, 2, attempt=5))
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    assert not [name for name in os.listdir(directory) if name.startswith(".tmp")]


def test_a_rejected_checkpoint_is_named_set_aside_and_the_one_before_it_used(
    tmp_path: Path,
) -> None:
    kit.write_config(tmp_path)
    finished(tmp_path)
    directory = tmp_path / "run/checkpoints"
    kept = binary(tmp_path, 12)
    with (directory / "step_000012.bin").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    (directory / "step_000008.json").unlink()
    told = finished(tmp_path)
    assert "checkpoint 12 was rejected: step_000012.bin: bytes 0 to" in told
    assert "checkpoint 8 was rejected: cannot be read" in told
    assert "resuming from checkpoint 4" in told
    assert kit.steps_of(tmp_path / "run", 2) == list(range(5, 13))
    assert binary(tmp_path, 12) == kept
    assert sorted(path.name for path in (tmp_path / "run/quarantine").iterdir()) == [
        "step_000008.bin",
        "step_000008.reason.json",
        "step_000012.bin",
        "step_000012.json",
        "step_000012.reason.json",
    ]


# --- the run directory of a trainer that is alone -------------------------------------------------


def test_a_run_directory_is_owner_only_and_holds_what_was_decided(tmp_path: Path) -> None:
    kit.write_config(tmp_path, trainer={"threads": "auto"})
    finished(tmp_path, "--set", "training.steps=3")
    run = tmp_path / "run"
    for path in (run, run / "checkpoints", run / "receipts", run / "logs"):
        assert path.stat().st_mode & 0o777 == 0o700
    recorded = config.load(run / "run.toml")
    assert recorded.training.steps == 3
    assert recorded.training.schedule_steps == 3
    assert recorded.trainer.threads == len(os.sched_getaffinity(0))
    assert recorded.run.id == checkpoint.verify(run / "checkpoints", 3).run_id
    first = kit.receipts_of(run)[0]
    assert isinstance(first, EnvironmentLine)
    assert first.environment["threads"] == recorded.trainer.threads


def test_another_identity_is_refused_with_both_values_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    kit.write_config(tmp_path)
    finished(tmp_path)
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    told = finished(
        tmp_path, "--set", "training.seed=8", "--set", "training.learning_rate=0.5", code=78
    )
    assert "training.seed = 8: expected 7 as recorded" in told
    assert "training.learning_rate = 0.5: expected 0.01 as recorded" in told
    assert "pivot" in told
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_longer_target_is_accepted_and_recorded(tmp_path: Path) -> None:
    kit.write_config(tmp_path, training={"schedule_steps": 12})
    finished(tmp_path)
    told = finished(tmp_path, "--set", "training.steps=14")
    assert "changed: training.steps: recorded 12, requested 14" in told
    assert tomllib.loads((tmp_path / "run/run.toml").read_text())["training"]["steps"] == 14
    assert kit.steps_of(tmp_path / "run", 2) == [13, 14]
    assert kit.exit_of(tmp_path / "run", 2).why == "finished"


def test_a_second_trainer_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    kit.write_config(tmp_path, training=ENDLESS)
    with alone(tmp_path) as process:
        process.until(lambda: trained(tmp_path, 2))
        other = tmp_path / "other"
        other.mkdir()
        arguments = ("--config", str(tmp_path / "tiny.toml"))
        with kit.Process(other, *arguments) as second:
            assert second.wait() == 1
            assert f"already trained by process {process.child.pid}" in second.errors
        before = len(kit.steps_of(tmp_path / "run"))
        process.until(lambda: trained(tmp_path, before + 2))
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    assert not (tmp_path / "run/receipts/attempt-0002.jsonl").exists()


def test_attempts_are_numbered_by_whatever_trace_is_left(tmp_path: Path) -> None:
    kit.write_config(tmp_path, training={"steps": 8, "schedule_steps": 12})
    finished(tmp_path)
    finished(tmp_path, "--set", "training.steps=10")
    assert kit.exit_of(tmp_path / "run", 2).step == 10
    for path in (tmp_path / "run/receipts").iterdir():  # as a supervisor does after merging them
        path.unlink()
    (tmp_path / "run/checkpoints/step_000004.json").write_bytes(b"damaged")
    finished(tmp_path, "--set", "training.steps=11")
    assert kit.exit_of(tmp_path / "run", 3).step == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "training.stepps=3"], "did you mean training.steps?"),
        (["--set", "trainer.device=cuda:7"], "cuda:7"),
    ],
)
def test_a_wrong_configuration_is_permanent(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    kit.write_config(tmp_path)
    assert message in finished(tmp_path, *arguments, code=78)


def test_missing_data_is_permanent_and_on_record(tmp_path: Path) -> None:
    kit.write_config(tmp_path)
    (tmp_path / "prose.jsonl").unlink()
    assert "no file matches" in finished(tmp_path, code=65)
    assert (kit.exit_of(tmp_path / "run").why, kit.exit_of(tmp_path / "run").code) == ("data", 65)
    assert "no file matches" in kit.exit_of(tmp_path / "run").message


def test_a_reason_that_quotes_what_is_no_text_is_on_record(tmp_path: Path) -> None:
    """A file name of any bytes, in a message of any length."""
    kit.write_config(tmp_path)
    (tmp_path / "code" / os.fsdecode(b"\xff.txt")).write_bytes(b"\0")
    finished(tmp_path, code=65)
    last = kit.exit_of(tmp_path / "run")
    assert (last.why, last.code) == ("data", 65)
    assert "code/?.txt holds NUL bytes" in last.message
    with Link(kit.life_of(kit.settings_of(tmp_path), 2)) as link:
        link.farewell("error", 0, 1, "\0" * contract.RECEIPT_BYTES_MAX)
    assert kit.exit_of(tmp_path / "run", 2).why == "error"


def test_fc101_a_loss_that_is_not_finite_ends_the_life_with_its_own_code(tmp_path: Path) -> None:
    """The loss was NaN and training went on (Nerogar/OneTrainer #1147, skinniderlab/CLM #284)."""
    kit.write_config(tmp_path, training={"learning_rate": 1e30}, checkpoint={"every": 1})
    told = finished(tmp_path, code=80)
    assert "non-finite at step" in told
    last = kit.exit_of(tmp_path / "run")
    assert (last.why, last.code) == ("non-finite", 80)
    assert checkpoints(tmp_path)[-1] == last.step
    raw = binary(tmp_path, last.step)
    assert torch.tensor(array("f", raw[8:])).isfinite().all()


def test_weights_that_are_not_finite_end_the_life_so_in_the_audit_too(tmp_path: Path) -> None:
    """The audit comes before the save that would find them: no crash that is tried again."""
    kit.write_config(tmp_path, training={"learning_rate": 1e39}, checkpoint={"every": 1})
    assert "non-finite at step 1" in finished(tmp_path, code=80)
    last = kit.exit_of(tmp_path / "run")
    assert (last.why, last.code, last.step) == ("non-finite", 80, 1)
    assert checkpoints(tmp_path) == []


def test_a_disk_that_takes_no_checkpoint_ends_nothing_but_a_stop(tmp_path: Path) -> None:
    """It trains to the end and waits there; who stops it is told by the exit code."""
    wide = {"width": 256, "heads": 2, "layers": 1, "context": 16}
    kit.write_config(tmp_path, model=wide, checkpoint={"every": 2})
    limit = 6 * 1024 * 1024  # the receipts fit, a checkpoint of 11 MB does not

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with alone(tmp_path, preexec_fn=limited) as process:
        process.until(lambda: "step 12 is not saved" in process.errors)
        process.send(signal.SIGTERM)
        assert process.wait() == 74
        assert "could not be written" in process.errors
    last = kit.exit_of(tmp_path / "run")
    assert (last.why, last.code, last.step) == ("checkpoint", 74, 12)
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    finished(tmp_path)
    assert kit.steps_of(tmp_path / "run", 2) == list(range(1, 13))


def test_output_that_nobody_takes_ends_nothing(tmp_path: Path) -> None:
    """As a log on a full disk, or a `tee` that was ended."""
    kit.write_config(tmp_path)
    command = [sys.executable, "-m", "trainer", "--config", "tiny.toml"]
    environment = os.environ | {"PYTHONPATH": str(kit.ROOT)}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=full, timeout=60)
    assert done.returncode == 0
    assert kit.exit_of(tmp_path / "run").why == "finished"


def test_a_crash_is_on_record_and_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.write_config(tmp_path)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(optimizer.AdamW, "update", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        finished(tmp_path)
    last = kit.exit_of(tmp_path / "run")
    assert (last.why, last.code, last.message) == ("error", 1, "RuntimeError: a bug")


def test_a_disk_too_full_for_the_exit_record_does_not_hide_how_the_life_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.write_config(tmp_path)
    (tmp_path / "prose.jsonl").unlink()

    def full(self: Link, *_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Link, "farewell", full)
    told = finished(tmp_path, code=65)
    assert "no file matches" in told
    assert "the exit record could not be written" in told


def test_a_supervisor_counts_on_from_the_lives_that_were_alone(tmp_path: Path) -> None:
    """Two attempts with one number would write one receipt file, and the second would be taken for
    a trainer that executes what nobody asked for, and killed."""
    ours = kit.settings_of(tmp_path)
    with kit.switches_restored():
        kit.live(ours, script={3: kit.term})
        kit.live(ours, 2, script={6: kit.term})
    (tmp_path / "run" / contract.RUN_FILE).write_text(config.dump(ours))
    arguments = ("supervisor", "start", "--config", kit.write_config(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(kit.ROOT)},
        capture_output=True,
        text=True,
        timeout=kit.DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records, _ = journal.read(tmp_path / "run" / contract.JOURNAL_FILE)
    started = [one for one in records if one["record"] == "attempt_started"]
    assert [(one["attempt"], one["resume_step"]) for one in started] == [(3, 6)]
    assert not [one for one in records if one["record"] == "alarmed"]
    entries, _ = ledger.read_entries(tmp_path / "run" / contract.ledger_name("tiny"))
    assert [(one.step, one.attempt) for one in entries] == [
        (step, (step + 2) // 3 if step <= 6 else 3) for step in range(1, 13)
    ]


# --- for a supervisor -----------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run directory as a supervisor leaves it: run.toml resolved, one life of the past."""
    ours = kit.settings_of(tmp_path)
    with kit.switches_restored():
        kit.live(ours, script={9: kit.term})
    (tmp_path / "run/run.toml").write_text(config.dump(ours))
    return tmp_path


@pytest.fixture
def supervised(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Attempt 2, from the given step, in this process; its exit status."""

    def run(resume_step: int) -> int:
        for name, value in environment_of(home, 2, resume_step, lock=0).items():
            monkeypatch.setenv(name, value)
        return kit.command("--run", str(home / "run"))[0]

    return run


def test_a_supervised_process_resumes_from_the_step_it_was_given(home: Path) -> None:
    for name in ("step_000009.bin", "step_000009.json"):
        (home / "run/checkpoints" / name).unlink()  # superseded
    path = home / "run" / contract.TRAINER_LOCK_FILE
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        told = environment_of(home, 2, 8, lock)
        arguments = ("--run", str(home / "run"))
        process = kit.Process(home, *arguments, environment=told, pass_fds=[lock])
    finally:
        os.close(lock)
    with process:
        assert process.wait() == 0, process.errors
    assert kit.steps_of(home / "run", 2) == [9, 10, 11, 12]
    assert kit.exit_of(home / "run", 2).why == "finished"


def test_a_supervised_life_from_zero_is_fresh(home: Path, supervised: Callable[[int], int]) -> None:
    for path in (home / "run/checkpoints").iterdir():
        path.unlink()
    assert supervised(0) == 0
    assert kit.steps_of(home / "run", 2) == list(range(1, 13))


def test_fc59_a_supervised_life_with_other_data_is_refused_for_good(
    home: Path, supervised: Callable[[int], int]
) -> None:
    """Changed content under a resumed run (huggingface/datasets #3857, pytorch/vision #192)."""
    with (home / "prose.jsonl").open("ab") as file:
        file.write(b'{"text": "One more line."}\n')
    assert supervised(9) == 65
    last = kit.exit_of(home / "run", 2)
    assert (last.why, last.code, last.step) == ("data", 65, 9)
    assert "arm prose: corpus digest: saved" in last.message


def test_a_damaged_checkpoint_is_a_crash_so_that_another_is_selected(
    home: Path, supervised: Callable[[int], int]
) -> None:
    os.truncate(home / "run/checkpoints/step_000009.bin", 100)
    with pytest.raises(checkpoint.CheckpointDamaged, match="checkpoint 9 is damaged"):
        supervised(9)
    last = kit.exit_of(home / "run", 2)
    assert (last.why, last.code, last.step) == ("error", 1, 9)
    assert checkpoints(home) == [4, 8, 9]


def test_a_broken_run_file_is_a_configuration_error_on_record(
    home: Path, supervised: Callable[[int], int]
) -> None:
    (home / "run/run.toml").write_text("[training]\nsteps = 0\n")
    assert supervised(9) == 78
    assert kit.exit_of(home / "run", 2).why == "configuration"
    assert "training.steps = 0" in kit.exit_of(home / "run", 2).message


def test_wrong_usage_is_said_in_one_line(tmp_path: Path) -> None:
    for arguments in (["--run", "."], [], ["generate", "nowhere", "--prompt", "x"]):
        with pytest.raises(SystemExit) as caught:
            kit.command(*arguments)
        assert caught.value.code == 2


# --- the other commands ---------------------------------------------------------------------------


def test_generate_prints_text_while_the_run_trains(tmp_path: Path) -> None:
    kit.write_config(tmp_path, training=ENDLESS)
    command = ("generate", str(tmp_path / "run"), "--prompt", "The ", "--tokens", "8")
    with alone(tmp_path) as process:
        process.until(lambda: checkpoints(tmp_path))
        code, text, told = kit.command(*command, "--step", "4", "--seed", "3")
        assert code == 0, told
        before = len(kit.steps_of(tmp_path / "run"))
        process.until(lambda: trained(tmp_path, before + 2))
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    assert text.startswith("The ")
    assert text != "The \n"
    assert kit.command(*command, "--step", "4", "--seed", "3") == (0, text, "")
    newest = checkpoints(tmp_path)[-1]
    os.truncate(tmp_path / "run/checkpoints" / f"step_{newest:06d}.bin", 8)
    code, _, told = kit.command(*command)
    assert (code, f"checkpoint {newest} was passed over" in told) == (0, True)


def test_generate_says_why_there_is_no_text(tmp_path: Path) -> None:
    kit.write_config(tmp_path)
    finished(tmp_path)
    command = ("generate", str(tmp_path / "run"), "--prompt", "The ")
    code, _, told = kit.command(*command, "--step", "5")
    assert (code, "checkpoint 5 is damaged: cannot be read" in told) == (1, True)
    for step in (4, 8, 12):
        os.truncate(tmp_path / "run/checkpoints" / f"step_{step:06d}.bin", 8)
    code, _, told = kit.command(*command)
    assert (code, "holds no valid checkpoint" in told) == (1, True)


def test_generate_says_by_its_status_that_its_text_was_not_taken(tmp_path: Path) -> None:
    kit.write_config(tmp_path)
    finished(tmp_path)
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for output, code, told in ((pipe, 141, b""), (full, 74, b"standard output: No space")):
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "generate", "run", "--prompt", "The "],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(kit.ROOT)},
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=60,
        )
        os.close(output)
        assert (done.returncode, done.stderr[: len(told) or None]) == (code, told)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--temperature", "nan", "'nan' is not 0 or a number of at least 0.001"),
        ("--temperature", "-1", "'-1' is not 0 or"),
        ("--temperature", "inf", "'inf' is not 0 or"),
        ("--temperature", "1e-40", "'1e-40' is not 0 or"),
        ("--temperature", "warm", "'warm' is not 0 or"),
        ("--tokens", "0", "'0' is not a whole number from 1 to 1000000"),
        ("--tokens", "-5", "'-5' is not a whole number from 1"),
        ("--seed", "-1", "'-1' is not a whole number from 0 to 9223372036854775807"),
        ("--seed", str(2**64), "is not a whole number from 0"),
        ("--step", "0", "'0' is not a whole number from 1"),
        ("--device", "gpu", "'gpu' is not auto, cpu, cuda or cuda:N"),
        ("--prompt", "caf\udce9", "'caf\\udce9' is not UTF-8"),
    ],
)
def test_generate_refuses_what_no_text_can_be_drawn_with(
    capsys: pytest.CaptureFixture[str], option: str, value: str, told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(["generate", "run", "--prompt", "x", f"{option}={value}"])
    assert ended.value.code == contract.ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"error: argument {option}: " in error
    assert told in error


def test_generate_goes_to_the_cpu_where_the_device_of_the_training_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.write_config(tmp_path)
    finished(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ("generate", str(tmp_path / "run"), "--prompt", "The ", "--tokens", "4")
    code, text, told = kit.command(*command)
    assert (code, told) == (0, "")
    directory = tmp_path / "run" / contract.CHECKPOINTS
    manifest = checkpoint.read_manifest(directory, 12)
    manifest.state["environment"]["device"] = "cuda:1"
    (directory / "step_000012.json").write_bytes(manifest.to_bytes())
    told = "trained on cuda:1, which is not here: this is from the CPU\n"
    assert kit.command(*command) == (0, text, told)
    assert kit.command(*command, "--device", "cpu") == (0, text, "")
    code, _, told = kit.command(*command, "--device", "cuda")
    assert code == contract.ExitCode.CONFIGURATION
    assert "finds no CUDA device" in told


def test_check_describes_the_data_without_torch(tmp_path: Path) -> None:
    path = kit.write_config(tmp_path)
    program = f"""
import sys
sys.argv = ["trainer", "check", "--config", {str(path)!r}]
from trainer.__main__ import main
code = main()
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""
    done = run_program(program)
    assert done.stderr.strip() == "False"
    found = orjson.loads(done.stdout)
    assert list(found["arms"]) == ["prose", "code"]
    code = found["arms"]["code"]
    assert code["documents"] + code["heldout_documents"] == len(kit.CODE)
    tokens = sum(len(text) + 2 for text in kit.CODE)
    assert 0 < code["tokens"] < tokens
    assert code["windows"] >= code["documents"]
    assert found["parameters"] == (2 * 257 + 16) * 16 + 12 * 16**2
    assert found["policy_digest"] == config.policy_digest(config.load(path))
    assert len(code["corpus_digest"]) == len(found["tokenizer"]["digest"]) == 64


def test_check_says_what_is_wrong_with_the_data(tmp_path: Path) -> None:
    path = kit.write_config(tmp_path)
    with (tmp_path / "prose.jsonl").open("ab") as file:
        file.write(b'{"words": "x"}\n')
    code, _, told = kit.command("check", "--config", str(path))
    assert code == 65
    assert "arm prose" in told
    assert "prose.jsonl:13" in told
    assert kit.command("check", "--config", str(tmp_path / "nothing.toml"))[0] == 78


def test_a_model_that_the_tokenizer_makes_too_large_is_a_wrong_configuration(
    tmp_path: Path,
) -> None:
    """It passed the check of a policy and ended as a crash, which is tried again."""
    (tmp_path / "segments.json").write_bytes(orjson.dumps([f"word{n}" for n in range(40)]))
    width = 13_000
    sizes = {"width": width, "heads": 1, "layers": 1, "context": 8_677}
    path = kit.write_config(
        tmp_path,
        tokenizer={"kind": "segments", "file": str(tmp_path / "segments.json")},
        model=sizes,
    )
    told = "model.width = 13000: expected a model of at most 2147483647 parameters; with the 297"
    for command in (("check", "--config", str(path)), ("--config", str(path))):
        code, _, error = kit.command(*command)
        assert code == contract.ExitCode.CONFIGURATION, error
        assert told in error


def test_a_life_never_loads_the_compiler_of_torch(tmp_path: Path) -> None:
    path = kit.write_config(tmp_path)
    program = f"""
import sys
sys.argv = ["trainer", "--config", {str(path)!r}]
from trainer.__main__ import main
main()
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""
    assert run_program(program).stdout == "True False\n"
