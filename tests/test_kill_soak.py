"""The soak of kills: a short one with the real processes, and that its verdict can be a bad one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kill_soak
from benchmarks.kill_soak import Kill, Result, Run, Traces
from supervisor import contract, ledger
from supervisor.contract import AuditLine, Entry, EnvironmentLine, EvaluationLine, ExitLine

KILLS = 30


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_thirty_times_is_the_run_that_never_was(tmp_path: Path) -> None:
    """Trainer, supervisor or both, in every phase: no entry lost, none doubled, no bit different,
    and nobody had to help."""
    result = kill_soak.soak(tmp_path, KILLS, seed=20)
    told = json.dumps(result.to_json(), indent=2)
    assert result.clean, told
    assert len(result.kills) == KILLS, told
    assert {kill.target for kill in result.kills} == set(kill_soak.TARGETS)
    phases = {kill.phase for kill in result.kills}
    assert phases >= {"load", "step", "exit"}, told
    assert len(phases & set(kill_soak.SAVE_STAGES)) >= 2, told
    assert result.verified_steps > 0, told
    assert result.supervisor_starts > KILLS // 3


# --- the verdict ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of which nobody was killed."""
    home = tmp_path_factory.mktemp("quiet")
    result = kill_soak.soak(home, 0, seed=1)
    assert result.clean, result.to_json()
    assert (result.kills, result.attempts, result.supervisor_starts) == ([], 1, 1)
    return home


@pytest.fixture
def runs(quiet: Path, tmp_path: Path) -> tuple[Run, Run]:
    """Copies that a test may damage."""
    for name in ("killed", "alone"):
        unseen = shutil.ignore_patterns("sockets")
        shutil.copytree(quiet / name, tmp_path / name, ignore=unseen)
    return Run(tmp_path, "killed", 40), Run(tmp_path, "alone", 40)


def rewrite(run: Run, change: Callable[[list[Entry]], list[Entry]]) -> None:
    path = run.directory / contract.ledger_name(run.name)
    entries = change(run.entries())
    path.unlink()
    writer = ledger.Ledger.open(path)
    writer.append(entries)
    writer.close()


def judged(runs: tuple[Run, Run]) -> Result:
    result = Result(seed=0)
    kill_soak.judge(*runs, result)
    return result


def test_two_equal_runs_are_judged_clean(runs: tuple[Run, Run]) -> None:
    result = judged(runs)
    assert result.clean
    assert result.steps == 40


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (lambda e: [*e[:20], *e[21:]], "lost_entries", 1),
        (lambda e: [*e[:30], *e[28:]], "duplicate_entries", 2),
        (
            lambda e: [*e[:9], replace(e[9], loss=e[9].loss + 2.0**-50), *e[10:]],
            "differing_entries",
            1,
        ),
        (lambda e: [*e[:9], replace(e[9], arm="other"), *e[10:]], "differing_entries", 1),
    ],
)
def test_a_history_that_differs_is_not_clean(
    runs: tuple[Run, Run], change: Callable[[list[Entry]], list[Entry]], field: str, value: int
) -> None:
    rewrite(runs[0], change)
    result = judged(runs)
    assert not result.clean
    assert getattr(result, field) == value
    assert result.damaged_ledger, "the journal's bindings do not fit any more"


def test_one_bit_of_the_weights_is_seen(runs: tuple[Run, Run]) -> None:
    binary = runs[0].directory / "checkpoints" / "step_000040.bin"
    content = bytearray(binary.read_bytes())
    content[1000] ^= 0x04
    content[-1] ^= 0x11
    binary.write_bytes(content)
    result = judged(runs)
    assert result.differing_bits == 3
    assert not result.clean


@pytest.mark.parametrize(
    "component", [name for name in kill_soak.DETERMINISTIC_STATE if name != "updates"]
)
def test_each_component_of_the_state_is_compared(runs: tuple[Run, Run], component: str) -> None:
    path = runs[0].directory / "checkpoints" / "step_000040.json"
    manifest = contract.parse_manifest(path.read_bytes(), path.name)
    state: dict[str, Any] = manifest.state
    value = state[component]
    state = state | {component: value + 1 if isinstance(value, int) else value | {"more": 1}}
    path.write_bytes(replace(manifest, state=state).to_bytes())
    result = judged(runs)
    assert result.differing_state == [component]
    assert not result.clean


@pytest.mark.parametrize(
    "fault", ["lost_entries", "manual_steps", "diverged_steps", "differing_bits"]
)
def test_every_fault_makes_the_verdict_a_bad_one(fault: str) -> None:
    result = Result(seed=1)
    setattr(result, fault, 1)
    assert not result.clean
    assert "THE RUNS DIFFER" in kill_soak.table(result)
    assert result.to_json()["clean"] is False


def test_bits_are_counted() -> None:
    assert kill_soak.differing_bits(b"\x00\xff", b"\x00\xff") == 0
    assert kill_soak.differing_bits(b"\x00\xff", b"\x03\xfe") == 3
    assert kill_soak.differing_bits(b"\x00", b"\x00\x00") == 16


def test_the_table_counts_by_target_and_phase() -> None:
    kills = [
        Kill("trainer", "load", "load", 1, 0),
        Kill("trainer", "step", "load", 2, 0),
        Kill("both", "exit", "exit", 3, 40),
    ]
    result = Result(seed=1, kills=kills, verified_steps=17)
    lines = kill_soak.table(result).splitlines()
    assert lines[0].split() == ["killed", "in", "trainer", "supervisor", "both", "all"]
    assert lines[1].split() == ["load", "2", "0", "0", "2"]
    (exits,) = [line for line in lines if line.startswith("exit")]
    assert exits.split() == ["exit", "0", "0", "1", "1"]
    assert "the run is the run that was never killed" in lines[-1]
    body = result.to_json()
    assert body["kills"] == 3
    assert body["kills_by_phase"] == {"load": 2, "exit": 1}
    assert body["kills_by_target_and_phase"] == {"both, exit": 1, "trainer, load": 2}


# --- where a trainer was when it died -------------------------------------------------------------


def entry(step: int) -> Entry:
    return Entry(step, 2.0, attempt=3, epoch=1)


@pytest.mark.parametrize(
    ("receipts", "files", "phase"),
    [
        ([], [], ("load", 0)),
        ([EnvironmentLine(3, {})], [], ("load", 0)),
        ([entry(7)], [], ("step", 7)),
        ([entry(20)], [], ("evaluate", 20)),
        ([entry(20), EvaluationLine(20, 3, 2.0, {})], [], ("sample", 20)),
        ([AuditLine(20, 1.0, 3, 1, [], {})], [], ("step", 20)),
        ([AuditLine(20, 1.0, 3, 1, [], {})], [".tmp-0003-00000000-step_000020.bin"], "binary"),
        (
            [AuditLine(20, 1.0, 3, 1, [], {})],
            [".tmp-0003-00000000-step_000020.bin", ".tmp-0003-00000000-step_000020.json"],
            "manifest",
        ),
        (
            [entry(21)],
            [
                ".tmp-0003-00000000-step_000021.bin",
                ".tmp-0003-00000000-step_000021.json",
                "step_000021.json",
            ],
            "linking",
        ),
        (
            [entry(21)],
            [
                ".tmp-0003-00000000-step_000021.json",
                "step_000021.json",
                "step_000021.bin",
            ],
            "unlinking",
        ),
        ([entry(7)], [".tmp-0002-00000000-step_000006.bin"], ("step", 7)),
        ([entry(20)], ["step_000020.json", "step_000020.bin"], ("step", 20)),
        ([entry(7), ExitLine("stopped", 7, 0, [], "")], [], ("exit", 7)),
    ],
)
def test_the_files_say_where_a_trainer_was(
    tmp_path: Path, receipts: list[contract.Receipt], files: list[str], phase: Any
) -> None:
    run = Run(tmp_path, "killed", 40)
    for name in (contract.RECEIPTS, contract.CHECKPOINTS):
        (run.directory / name).mkdir(parents=True)
    lines = b"".join(map(contract.encode_receipt, receipts))
    (run.directory / contract.RECEIPTS / "attempt-0003.jsonl").write_bytes(lines + b'{"step"')
    for name in files:
        (run.directory / contract.CHECKPOINTS / name).touch()
    found = Traces(run, 3).phase()
    if isinstance(phase, str):
        phase = (f"save: {phase}", getattr(receipts[-1], "step", 0))
    assert found == phase


def test_a_trainer_without_a_receipt_file_is_loading(tmp_path: Path) -> None:
    assert Traces(Run(tmp_path, "killed", 40), 1).phase() == ("load", 0)


def test_the_soak_trains_what_it_says(tmp_path: Path) -> None:
    """Dropout, three arms and two micro-batches: what is easiest to resume wrongly."""
    tree = kill_soak.settings(tmp_path, "killed", 100)
    assert tree["model"]["dropout"] > 0
    assert tree["training"]["accumulate"] == 2
    assert len(tree["policy"]["arms"]) == 3
