"""A stretch of a run executed again: what is compared, what is said of a difference, what is left
behind (nothing)."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_kit
import pytest
import runs_kit
from exactness_kit import DEADLINE_SECONDS, TrainedRun, content_of
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor import comparison, contract, reexecution
from supervisor.contract import Entry, EnvironmentLine, ExitLine, Json, Manifest
from supervisor.reexecution import Comparison, Plan, Report, TrainerEnded
from supervisor.replay import environment_changes, likely_class
from supervisor.rundir import RunDirectory, RunError

ENVIRONMENT: Json = {
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "orjson": "3.10"},
    "git": {"commit": "a" * 40, "dirty": False},
    "device": "cpu",
    "threads": 2,
    "deterministic": True,
    "variables": {"OMP_NUM_THREADS": "2"},
    "settings_digest": "1" * 64,
}


# --- a run to look at -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Ten steps, then extended to fourteen: step 10 is a checkpoint off the cadence."""
    home = tmp_path_factory.mktemp("original")
    run = TrainedRun(home, training={"steps": 10})
    run.environment["XDG_CACHE_HOME"] = str(home / "cache")
    run.trained()
    assert run.start("--set", "training.steps=14").wait(DEADLINE_SECONDS) == 0
    assert run.checkpoints() == [4, 8, 10, 12, 14]
    return run


@pytest.fixture
def run(original: TrainedRun, tmp_path: Path) -> TrainedRun:
    """A copy that a test may damage. Its text stays where it was."""
    copy = TrainedRun.__new__(TrainedRun)
    copy.__dict__.update(original.__dict__)
    copy.home, copy.directory = tmp_path, tmp_path / "run"
    shutil.copytree(original.directory, copy.directory, ignore=shutil.ignore_patterns("sockets"))
    return copy


def execute(run: TrainedRun, start: int, stop: int | None = None, **more: Any) -> Report:
    before = content_of(run.directory)
    plan = reexecution.plan(run.directory, start, stop)
    try:
        return reexecution.execute(plan, run.variables(), **more)
    finally:
        after = content_of(run.directory)
        assert {name for name in before | after if before.get(name) != after.get(name)} == set()
        assert [path.name for path in run.home.glob(".replay-*")] == []


def forge(run: TrainedRun, step: int, change: Callable[[bytearray], None]) -> None:
    """Changes a `.bin` and seals it again, as a run that went another way would have written it."""
    binary = run.member(step, ".bin")
    content = bytearray(binary.read_bytes())
    change(content)
    binary.write_bytes(content)
    chunks = checkpoint_kit.chunk_digests(bytes(content))
    sealed = replace(
        run.manifest(step), chunks=chunks, binary_digest=contract.chunks_digest(chunks)
    )
    run.member(step, ".json").write_bytes(sealed.to_bytes())


# --- with the real trainer ------------------------------------------------------------------------


def test_a_whole_run_executed_again_is_equal_to_the_last_bit(run: TrainedRun) -> None:
    """From the beginning, over the end of the first target, with a checkpoint off the cadence."""
    steps: list[int] = []
    report = execute(run, 0, tick=steps.append)
    assert report.difference is None
    assert steps == list(range(1, 15))
    assert (report.steps_compared, report.checkpoints_compared) == (14, [4, 8, 10, 12, 14])
    assert report.environment_changes == {}


def test_a_stretch_begins_at_a_checkpoint_and_ends_anywhere(
    run: TrainedRun, tmp_path: Path
) -> None:
    scratch = tmp_path / "elsewhere"
    scratch.mkdir()
    shutil.rmtree(run.directory / "logs")  # not needed for it
    for ending in (".bin", ".json"):
        run.member(8, ending).unlink()  # retention may have been there
    report = execute(run, 4, 11, scratch=scratch)
    assert report.difference is None
    assert (report.steps_compared, report.checkpoints_compared) == (7, [10])
    assert list(scratch.iterdir()) == []


def test_a_recorded_loss_that_differs_by_one_bit_is_found_at_its_step(run: TrainedRun) -> None:
    entries = run.history()
    lowest = 2.0**-50
    entries[5] = replace(entries[5], loss=entries[5].loss + lowest)
    run.rewrite_ledger(entries)
    done = run.supervisor("replay", str(run.directory), "--from", "4", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["schema_version"], told["equal"], told["steps_compared"]) == (1, False, 1)
    assert (told["from_step"], told["to_step"], told["checkpoints_compared"]) == (4, 14, [])
    difference = told["difference"]
    assert (difference["step"], difference["where"]) == (6, "receipt")
    assert difference["likely"] == "unexplained"
    (part,) = difference["parts"]
    assert (part["name"], part["recorded"]) == ("loss", entries[5].loss)
    assert part["recorded"] - part["now"] == lowest


def test_another_weight_is_found_at_its_checkpoint_and_explained_by_the_threads(
    run: TrainedRun,
) -> None:
    """The recorded attempt says that it had two threads, and its checkpoint another moment."""
    element = 2000

    def change(content: bytearray) -> None:
        place = contract.HEADER_BYTES + 4 * (run.manifest(8).parameters + element)
        struct.pack_into("<f", content, place, 0.25)

    forge(run, 8, change)
    run.rewrite_training(threads=2)
    done = run.supervisor("replay", str(run.directory), "--from", "4", "--to", "10")
    assert done.returncode == 1, done.stderr
    assert "equal to the last bit; checkpoints equal: none" in done.stdout
    assert "step 8 DIFFERS in its checkpoint; likely cause: environment" in done.stdout
    tensor = next(t for t in reversed(run.manifest(8).tensors) if t.offset <= element)
    assert f"m at {tensor.name}[{element - tensor.offset}]: recorded 0.25, now " in done.stdout
    assert done.stderr == "exactness not claimed: threads: then 2, now 1\n"


def test_a_trainer_that_refuses_is_told_with_its_own_words(run: TrainedRun) -> None:
    """The checkpoint says that it was trained on other text: nothing can be executed again."""
    manifest = run.manifest(4)
    manifest.state["arms"]["prose"]["corpus_digest"] = "0" * 64
    run.member(4, ".json").write_bytes(manifest.to_bytes())
    with pytest.raises(TrainerEnded, match=r"(?s)data: .*arm prose: corpus digest: saved 000"):
        execute(run, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_interrupted_it_leaves_neither_a_process_nor_a_directory(
    run: TrainedRun, number: int
) -> None:
    """That no process is left is what every test here is checked for."""
    process = subprocess.Popen(
        run.command("replay", str(run.directory), "--from", "0"),
        env=run.variables(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    runs_kit.wait_until(lambda: list(run.home.glob(".replay-*/logs/*.log")), "a trainer")
    process.send_signal(number)
    assert process.wait(DEADLINE_SECONDS) == 130
    assert list(run.home.glob(".replay-*")) == []


# --- what cannot be executed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        (4, 4, r"--from 4 --to 4: expected two steps in ascending order .* from 0 to 14"),
        (8, 4, "ascending order"),
        (0, 15, "from 0 to 14"),
        (-1, 4, "ascending order"),
        (5, 9, r"no checkpoint of step 5 .* there are: 0 \(the beginning\), 4, 8, 10, 12, 14"),
    ],
)
def test_a_stretch_that_is_not_there_is_refused(
    original: TrainedRun, start: int, stop: int, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        reexecution.plan(original.directory, start, stop)


def test_the_command_refuses_with_the_code_of_usage(original: TrainedRun) -> None:
    done = original.supervisor("replay", str(original.directory), "--from", "5")
    assert done.returncode == 2
    assert "no checkpoint of step 5" in done.stderr
    assert done.stdout == ""


def test_a_damaged_base_is_refused(run: TrainedRun) -> None:
    checkpoint_kit.flip_bit(run.member(4, ".bin"), 1000)
    with pytest.raises(RunError, match=r"checkpoint 4 is damaged: .*weights"):
        reexecution.plan(run.directory, 4, None)


def test_a_stretch_over_a_change_of_policy_is_refused_in_two_halves(run: TrainedRun) -> None:
    run.rewrite_ledger([replace(e, epoch=1 if e.step <= 8 else 2) for e in run.history()])
    with pytest.raises(RunError, match=r"policy changed with step 9; execute --to 8 and --from 8"):
        reexecution.plan(run.directory, 4, 12)
    with pytest.raises(RunError, match=r"journal of run has no epoch 2, but the ledger has"):
        reexecution.plan(run.directory, 8, 12)


def test_a_gap_in_the_history_is_refused(run: TrainedRun) -> None:
    run.rewrite_ledger([entry for entry in run.history() if entry.step != 7])
    with pytest.raises(RunError, match="no entry of step 7"):
        reexecution.plan(run.directory, 4, 12)


def test_a_foreign_trainer_is_refused(run: TrainedRun) -> None:
    text = (run.directory / "run.toml").read_text()
    command = text.replace("[trainer]", '[trainer]\ncommand = ["./train_gpt2"]')
    (run.directory / "run.toml").write_text(command)
    with pytest.raises(RunError, match=r"its trainer is './train_gpt2'"):
        reexecution.plan(run.directory, 4, None)


# --- the comparison, with a trainer played by the test --------------------------------------------


class Stage:
    """A recorded run of 8 steps with a checkpoint at 4, and a scratch run that the test writes."""

    def __init__(self, home: Path, environment: Json = ENVIRONMENT) -> None:
        self.run = RunDirectory(home / "run", "run")
        self.scratch = RunDirectory(home / "scratch", "run")
        for directory in (self.run, self.scratch):
            directory.create()
        self.recorded = checkpoint_kit.write_checkpoint(self.run.checkpoints, 4, 600)
        self.entries = {step: self.entry(step) for step in range(1, 9)}
        self.plan = Plan(
            directory=self.run,
            settings=None,  # type: ignore[arg-type]
            start=0,
            stop=8,
            epoch=1,
            entries=self.entries,
            checkpoints=(4,),
            base=None,
            environments={"attempt-0003": environment},
        )
        self.report = Report("run", 0, 8)
        self.comparison = Comparison(self.plan, self.scratch, self.report, lambda step: None)

    def entry(self, step: int, **changes: Any) -> Entry:
        made = Entry(
            step,
            5.0 / step,
            time=1.7e9 + step,
            attempt=3,
            epoch=1,
            arm="prose",
            targets_seen=64 * step,
            learning_rate=0.01,
            gradient_norm=1.5,
            step_seconds=0.25,
        )
        return replace(made, **changes)

    def write(self, *receipts: contract.Receipt, torn: bytes = b"") -> bool:
        path = self.scratch.receipts / "attempt-0001.jsonl"
        with path.open("ab") as file:
            file.write(b"".join(map(contract.encode_receipt, receipts)) + torn)
        return self.comparison.differs()

    def write_environment(self, **changes: Any) -> bool:
        return self.write(EnvironmentLine(1, ENVIRONMENT | changes))

    def checkpoint(self, **overrides: Any) -> Manifest:
        return checkpoint_kit.write_checkpoint(self.scratch.checkpoints, 4, 600, **overrides)


def test_equal_receipts_and_checkpoints_are_counted_and_cleared_away(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert not stage.comparison.differs(), "nothing is written yet"
    assert not stage.write_environment()
    again = [
        replace(entry, attempt=1, time=9.9, step_seconds=9.9) for entry in stage.entries.values()
    ]
    assert not stage.write(*again[:4])
    half_way = stage.comparison.complete
    assert not half_way
    stage.checkpoint(attempt=1, run_id="run-b", requests=(), reason="sigusr1")
    assert not stage.write(*again[4:])
    assert stage.comparison.complete
    assert (stage.report.steps_compared, stage.report.checkpoints_compared) == (8, [4])
    assert list(stage.scratch.checkpoints.iterdir()) == []
    assert len(list(stage.run.checkpoints.iterdir())) == 2


def test_a_receipt_in_the_making_is_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    line = contract.encode_receipt(stage.entry(1, loss=7.0))
    assert not stage.write(torn=line[:20])
    assert stage.report.steps_compared == 0
    assert stage.write(torn=line[20:])
    assert stage.report.difference is not None


@pytest.mark.parametrize(
    ("field", "value", "likely"),
    [
        ("loss", 2.6, "unexplained"),
        ("loss", float("nan"), "unexplained"),
        ("gradient_norm", 1.25, "unexplained"),
        ("learning_rate", 0.02, "unexplained"),
        ("arm", "code", "data"),
        ("targets_seen", 127, "data"),
    ],
)
def test_each_deterministic_field_is_compared(
    tmp_path: Path, field: str, value: Any, likely: str
) -> None:
    stage = Stage(tmp_path)
    stage.write_environment()
    changed = stage.entry(2, attempt=1, **{field: value})
    assert stage.write(stage.entries[1], changed, stage.entry(3, loss=99.0))
    found = stage.report.difference
    assert found is not None
    assert (found.step, found.where, found.likely) == (2, "receipt", likely)
    (part,) = found.parts
    assert (part.name, part.recorded) == (field, getattr(stage.entries[2], field))
    assert part.now == ("nan" if value != value else value)
    assert stage.report.steps_compared == 1


def test_what_the_history_does_not_know_is_not_compared(tmp_path: Path) -> None:
    """Rows of another program have a step and a loss."""
    stage = Stage(tmp_path)
    stage.entries.update({1: Entry(1, 5.0), 2: Entry(2, 2.5)})
    assert not stage.write(stage.entry(1))
    assert stage.write(stage.entry(2, loss=2.75))


@pytest.mark.parametrize(
    ("changes", "parts", "likely"),
    [
        ({"seed": 1}, ["weights", "m", "v"], "unexplained"),
        ({"state": ("rng", {"torch": "AQ=="})}, ["rng.torch"], "unexplained"),
        ({"state": ("targets_seen", 41)}, ["targets_seen"], "data"),
        (
            {"state": ("bandit", {"kind": "ducb", "arms": {"prose": {"pulls": 3}}})},
            ["bandit.arms.prose.pulls"],
            "unexplained",
        ),
        ({"state": ("policy_digest", "3" * 64)}, ["policy_digest"], "unexplained"),
        ({"state": ("tokenizer", {"rule": "bytes"})}, ["tokenizer.digest"], "data"),
        ({"state": ("detectors", {"audited_step": 4})}, [], ""),
        ({"state": ("environment", {"threads": 9})}, [], ""),
        ({"state": ("configuration", {"run": {"name": "x"}})}, [], ""),
    ],
)
def test_each_component_of_a_checkpoint_is_compared(
    tmp_path: Path, changes: Json, parts: list[str], likely: str
) -> None:
    stage = Stage(tmp_path)
    stage.write_environment()
    assert not stage.write(*(stage.entries[step] for step in range(1, 5)))
    if "state" in changes:
        name, value = changes["state"]
        changes = {"state": checkpoint_kit.state(4) | {name: value}}
    stage.checkpoint(**changes)
    assert stage.comparison.differs() is bool(parts)
    found = stage.report.difference
    assert ([part.name for part in found.parts] if found else []) == parts
    assert (found.likely if found else "") == likely
    if found:
        assert (found.step, found.where) == (4, "checkpoint")
        assert len(list(stage.scratch.checkpoints.iterdir())) == 2, "kept until the end"


def test_a_sampler_that_differs_is_told_by_its_field_and_briefly(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    state = checkpoint_kit.state(4)
    state["arms"]["prose"]["sampler"] |= {"cursor": 5, "permutation": "A" * 5000}
    stage.checkpoint(state=state)
    assert stage.comparison.differs()
    assert stage.report.difference is not None
    cursor, permutation = stage.report.difference.parts
    assert (cursor.name, cursor.recorded, cursor.now) == ("arms.prose.sampler.cursor", 4, 5)
    assert permutation.name == "arms.prose.sampler.permutation"
    assert permutation.recorded == "AAAAAAEAAAA="
    assert permutation.now.startswith("AAAAAAAAAAAAAAAA… (5000 characters, SHA-256 ")
    assert stage.report.difference.likely == "data"


def test_an_evaluation_that_a_stop_put_off_is_no_difference(tmp_path: Path) -> None:
    """The bandit learns from evaluations; one that was left to the next life is not in yet."""
    stage = Stage(tmp_path)
    bandit = {"kind": "ducb", "arms": {"prose": {"pulls": 4, "gate": 0.5}}}
    looked = {"bandit": bandit, "detectors": {"evaluated_step": 4}}
    stage.checkpoint(state=checkpoint_kit.state(4) | looked)
    assert not stage.comparison.differs()
    assert stage.report.checkpoints_compared == [4]


def test_a_recorded_checkpoint_that_retention_removed_is_passed_by(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    shutil.rmtree(stage.run.checkpoints)
    stage.checkpoint()
    assert not stage.write(*stage.entries.values())
    assert stage.comparison.complete
    assert stage.report.checkpoints_compared == []


def test_a_recorded_manifest_that_is_damaged_stops_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    checkpoint_kit.flip_bit(stage.run.checkpoints / "step_000004.json", 500)
    stage.checkpoint()
    with pytest.raises(RunError, match=r"`supervisor verify` says what else is damaged"):
        stage.comparison.differs()


def test_a_file_that_is_not_what_its_manifest_says_is_told_as_that(tmp_path: Path) -> None:
    """The digests differ and the bytes do not: the recorded file has changed since."""
    stage = Stage(tmp_path)
    now = stage.checkpoint(seed=1)
    recorded = stage.run.checkpoints / "step_000004.bin"
    recorded.write_bytes((stage.scratch.checkpoints / "step_000004.bin").read_bytes())
    assert stage.comparison.differs()
    assert stage.report.difference is not None
    (part,) = stage.report.difference.parts
    assert (part.name, part.detail) == ("file", "not what its manifest says")
    assert part.now == now.binary_digest


def test_the_end_of_the_trainer_is_remembered(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert stage.comparison.last_words() == ""
    stage.write(ExitLine("data", 0, 65, [], "the text has changed"))
    assert stage.comparison.last_words() == "data: the text has changed"


def test_a_change_of_the_machine_is_told_even_where_all_is_equal(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write_environment(threads=4, variables={}, settings_digest="2" * 64)
    assert stage.report.environment_changes == {
        "threads": (2, 4),
        "variables.OMP_NUM_THREADS": ("2", None),
    }


# --- where two files differ -----------------------------------------------------------------------


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@cases(200)
@given(data=st.data(), length=st.integers(1, 40))
def test_the_first_number_that_differs_is_found(data: st.DataObject, length: int) -> None:
    one = floats(*(float(n) for n in range(length)))
    other = bytearray(one)
    places = data.draw(st.sets(st.integers(0, 4 * length - 1), max_size=5))
    for place in places:
        other[place] ^= 0x10
    found = comparison._first_difference(one, bytes(other))
    assert found == (min(places) // 4 * 4 if places else None)


@pytest.mark.parametrize("region", [0, 1, 2], ids=["weights", "m", "v"])
@pytest.mark.parametrize("element", [0, 1, 349, 350, 599])
def test_the_tensor_and_the_element_are_named(tmp_path: Path, region: int, element: int) -> None:
    tensors = (
        contract.Tensor("embedding", (35, 10), "row", 0),
        contract.Tensor("output", (250,), "row", 350),
    )
    stage = Stage(tmp_path)
    recorded = replace(stage.recorded, tensors=tensors)
    binary = stage.run.checkpoints / "step_000004.bin"
    content = bytearray(binary.read_bytes())
    struct.pack_into("<f", content, 8 + 4 * (600 * region + element), 3.5)
    (stage.scratch.checkpoints / "step_000004.bin").write_bytes(content)
    now = replace(recorded, chunks=("0" * 64,))
    directories = (stage.run.checkpoints, stage.scratch.checkpoints)
    (part,) = comparison.differing_parts(recorded, now, *directories)
    assert part.name == ("weights", "m", "v")[region]
    name, start = ("embedding", 0) if element < 350 else ("output", 350)
    assert part.detail == f"{name}[{element - start}]"
    assert part.now == 3.5


def test_only_chunks_that_differ_are_read_and_regions_may_share_one(tmp_path: Path) -> None:
    """1.2 million parameters: the first chunk of 4 MiB ends inside the weights."""
    parameters = 1_200_000
    directories = (tmp_path / "a", tmp_path / "b")
    made = []
    for directory in directories:
        made.append(checkpoint_kit.write_checkpoint(directory, 4, parameters))
    binary = directories[1] / "step_000004.bin"
    content = bytearray(binary.read_bytes())
    first_m = 8 + 4 * parameters
    struct.pack_into("<f", content, first_m - 4, 3.5)
    struct.pack_into("<f", content, first_m, 4.5)
    struct.pack_into("<f", content, 8, 9.5)  # in a chunk whose digest is not said to differ
    binary.write_bytes(content)
    chunks = list(made[0].chunks)
    chunks[1] = "0" * 64
    now = replace(made[1], chunks=tuple(chunks))
    parts = comparison.differing_parts(made[0], now, *directories)
    assert [(part.name, part.now) for part in parts] == [("weights", 3.5), ("m", 4.5)]
    assert [part.detail for part in parts] == [f"all[{parameters - 1}]", "all[0]"]


# --- why it may differ ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts", "likely"),
    [
        ({}, ["loss"], "unexplained"),
        ({"settings_digest": "2" * 64}, ["loss"], "unexplained"),
        ({"git": {"commit": "b" * 40, "dirty": False}}, ["loss"], "code"),
        ({"git": {"commit": "a" * 40, "dirty": True}}, ["loss"], "code"),
        ({"git": None}, ["loss"], "code"),
        ({"python": "3.12.1"}, ["loss"], "code"),
        ({"packages": {"torch": "2.13.0", "orjson": "3.11"}}, ["loss"], "code"),
        ({"packages": {"torch": "2.14.0", "orjson": "3.10"}}, ["loss"], "environment"),
        ({"threads": 1}, ["loss", "gradient_norm"], "environment"),
        ({"device": "cuda:0"}, ["weights"], "environment"),
        ({"deterministic": False}, ["loss"], "environment"),
        ({"variables": {"OMP_NUM_THREADS": "1"}}, ["loss"], "environment"),
        ({}, ["loss", "arm"], "data"),
        ({"threads": 1}, ["targets_seen"], "data"),
        ({}, ["arms.prose.corpus_digest"], "data"),
        ({}, ["arms.prose.sampler.cursor", "weights"], "data"),
        ({"git": None}, ["arm"], "code"),
    ],
)
def test_the_likely_class_of_a_difference(changes: Json, parts: list[str], likely: str) -> None:
    assert likely_class(ENVIRONMENT, ENVIRONMENT | changes, parts) == likely


def test_of_an_unknown_environment_nothing_is_concluded() -> None:
    for before, now in (({}, ENVIRONMENT), (ENVIRONMENT, {}), ({}, {})):
        assert environment_changes(before, now) == {}
        assert likely_class(before, now, ["loss"]) == "unexplained"
        assert likely_class(before, now, ["arm"]) == "data"


def test_fc27_the_supervisor_flags_the_first_step_that_differs_after_a_resume(
    run_home: Path,
) -> None:
    """A jump of the loss after a resume was noticed only by eye (The-School-of-AI/LLM PR 563):
    here steps executed again are compared with the recorded ones, bit by bit."""
    run = runs_kit.Run(run_home)
    run.faults = "kill@17#1,wrong@14#2"
    assert run.finish() == 0
    (diverged,) = run.records("replay_diverged")
    assert (diverged["step"], diverged["attempt"], diverged["fields"]) == (14, 2, ["loss"])
    assert diverged["earlier"]["loss"] != diverged["later"]["loss"]
    assert diverged["likely"] == "unexplained"
    status = run.file_status()["replay"]
    assert status == {"verified_steps": 3, "diverged_steps": 1, "first_diverged_step": 14}
    assert run.steps() == [*range(1, 17), *range(14, 31)]
