"""A folder of another program becomes a run of ours: all of it, and nothing of it changed."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import tomllib
from collections.abc import Iterator
from pathlib import Path

import checkpoint_kit
import pytest
import tomli_w
from checkpoint_kit import flip_bit
from ledger_kit import holds
from pivot_kit import OLD_ARMS, PivotRun
from runs_kit import PYTHON, SABOTEUR, Run

from supervisor import contract, import_run, ledger
from supervisor.config import ConfigError
from supervisor.contract import Json, checkpoint_stem
from supervisor.history import History, write_andrea
from supervisor.import_run import Imported
from supervisor.rundir import RunDirectory, RunError
from supervisor.sidecars import read_samples
from supervisor.verify import verify

PARAMETERS = 6


class Folder:
    """An ANDREA-style checkpoint folder. Losses are as Python's own json writes them."""

    def __init__(self, path: Path, model: str = "andrea-12m") -> None:
        self.path = path
        self.model = model
        path.mkdir(parents=True, exist_ok=True)

    def write_losses(self, rows: list[list[float]]) -> None:
        (self.path / f"{self.model}.loss.json").write_text(json.dumps(rows))

    def write_samples(self, rows: list[Json]) -> None:
        (self.path / f"{self.model}.samples.json").write_text(json.dumps(rows))

    def write_binary(self, step: int, name: str | None = None) -> Path:
        path = self.path / (name or f"{checkpoint_stem(step)}.bin")
        path.write_bytes(checkpoint_kit.binary(step, PARAMETERS))
        return path

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        return {
            path.name: (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(self.path.iterdir())
        }


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "source")
    made.write_losses([[step, 9.0 / step] for step in range(1, 31)])
    made.write_samples([{"step": 20, "loss": 2.5, "text": "region"}])
    for step in (10, 20, 30):
        made.write_binary(step)
    return made


def taken_in(folder: Folder, **more: str | None) -> Imported:
    return import_run.import_run(
        folder.path,
        more.get("name"),
        folder.path.parent / "runs",
        more.get("config_path"),
        lambda size_bytes: None,
    )


def directory_of(imported: Imported) -> RunDirectory:
    return RunDirectory(imported.directory, imported.run)


# --- all of it ------------------------------------------------------------------------------------


def test_an_imported_folder_is_a_run_that_verifies(folder: Folder) -> None:
    before = folder.snapshot()
    made = taken_in(folder)
    assert folder.snapshot() == before
    assert (made.run, made.entries, made.steps) == ("andrea-12m", 30, [10, 20, 30])
    assert made.left_out == []
    run = directory_of(made)
    report = verify(run)
    assert report.problems == []
    assert report.counts["ledger_entries_bound"] == 30
    assert report.counts["ledger_bindings"] == 4
    assert (report.counts["checkpoints"], report.counts["stored_files"]) == (3, 2)
    for step in made.steps:
        name = f"{checkpoint_stem(step)}.bin"
        assert (run.checkpoints / name).read_bytes() == (folder.path / name).read_bytes()


def test_two_hundred_thousand_rows_come_back_equal(tmp_path: Path) -> None:
    source = random.Random(5)
    rows = [[step, 2.0 + 7.0 / step + source.random()] for step in range(1, 200_001)]
    folder = Folder(tmp_path / "source")
    folder.write_losses(rows)
    made = taken_in(folder)
    assert made.entries == 200_000
    out = tmp_path / "out.json"
    with out.open("wb") as file:
        write_andrea(History(directory_of(made).ledger).canonical(), file)
    assert json.loads(out.read_bytes()) == rows


def test_losses_that_are_no_numbers_come_back_as_texts(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "source")
    folder.write_losses([[1, 2.5], [2, float("nan")], [3, float("inf")], [4, 2]])
    made = taken_in(folder)
    entries, torn = ledger.read_entries(directory_of(made).ledger)
    assert [contract.encode_number(one.loss) for one in entries] == [2.5, "nan", "inf", 2.0]
    assert torn is None


def test_the_journal_says_where_the_run_comes_from(folder: Folder) -> None:
    made = taken_in(folder)
    lines = directory_of(made).journal.read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    kinds = [record["record"] for record in records]
    assert kinds == [
        "run_created",
        "run_imported",
        *["checkpoint_committed", "checkpoint_verified"] * 3,
        "file_stored",
        "file_stored",
    ]
    assert records[1]["source"] == str(folder.path)
    assert (records[1]["ledger_entries"], records[1]["steps"]) == (30, [10, 20, 30])
    committed = [record for record in records if record["record"] == "checkpoint_committed"]
    assert [(one["step"], one["attempt"], one["reason"]) for one in committed] == [
        (10, 0, ""),
        (20, 0, ""),
        (30, 0, ""),
    ]
    path = directory_of(made).ledger
    for one in committed:
        assert one["ledger_entries"] == one["step"]
        assert holds(path, one["ledger_entries"], one["ledger_sha256"])


def test_a_history_that_was_taken_back_is_imported_as_it_is(tmp_path: Path) -> None:
    """Every row stays; each checkpoint is bound to the newest entry of its step."""
    folder = Folder(tmp_path / "source")
    steps = [*range(1, 26), *range(11, 31)]
    folder.write_losses([[step, 1.0 + place] for place, step in enumerate(steps)])
    for step in (10, 20):
        folder.write_binary(step)
    made = taken_in(folder)
    records = [json.loads(one) for one in directory_of(made).journal.read_bytes().splitlines()]
    bound = {r["step"]: r["ledger_entries"] for r in records if "reason" in r}
    assert bound == {10: 10, 20: 35}
    history = History(directory_of(made).ledger)
    assert [one.step for one in history.raw()] == steps
    assert [one.step for one in history.canonical()] == list(range(1, 31))
    assert verify(directory_of(made)).problems == []


def test_a_history_with_gaps_is_imported(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "source")
    folder.write_losses([[step, 2.0] for step in range(100, 1001, 100)])
    folder.write_binary(1000)
    folder.write_binary(950)
    made = taken_in(folder)
    assert verify(directory_of(made)).problems == []
    records = [json.loads(one) for one in directory_of(made).journal.read_bytes().splitlines()]
    bound = {r["step"]: r["ledger_entries"] for r in records if "reason" in r}
    assert bound == {950: None, 1000: 10}


def test_samples_are_audits_of_ours(folder: Folder) -> None:
    folder.write_samples(
        [
            {"step": 300, "loss": 2.5, "text": "region region"},
            {"step": 100, "loss": 3.5, "ids": [17, 4]},
            {"step": "x", "text": ""},
            {"loss": 2.5, "text": "no step"},
            {"step": 5},
        ]
    )
    made = taken_in(folder)
    rows = json.loads(directory_of(made).samples.read_bytes())
    assert [(row["step"], row["prompt"], row["text"]) for row in rows] == [
        (100, "", ""),
        (300, "", "region region"),
    ]
    assert rows[0]["ids"] == [17, 4]
    assert made.left_out == [
        f"andrea-12m.samples.json item {number}: expected step and text or ids"
        for number in (2, 3, 4)
    ]
    assert verify(directory_of(made)).problems == []


def test_of_many_samples_the_newest_are_taken(folder: Folder) -> None:
    """All of them, with their token ids, were a file that the next start refused to read."""
    many = [{"step": step, "ids": list(range(1000))} for step in range(100, 112_600, 100)]
    folder.write_samples(many)
    made = taken_in(folder)
    rows = read_samples(directory_of(made).samples)
    assert [row["step"] for row in rows] == [row["step"] for row in many[-200:]]
    assert made.samples == 200
    assert made.left_out == ["andrea-12m.samples.json: the 925 oldest audits; samples.keep is 200"]


# --- what is left out, and said -------------------------------------------------------------------


def test_a_bad_checkpoint_is_left_out_by_name(folder: Folder) -> None:
    folder.write_binary(40, "step_000041.bin")
    (folder.path / "step_000050.bin").write_bytes(checkpoint_kit.binary(50, PARAMETERS)[:-1])
    (folder.path / "step_000060.bin").write_bytes(b"")
    (folder.path / "step_000070.bin").write_bytes(struct.pack("<ii", 70, 0))
    (folder.path / "step_000080.bin").mkdir()
    folder.write_binary(30, "step_30.bin")
    folder.write_binary(1, f"step_{2**31}.bin")
    made = taken_in(folder)
    assert made.steps == [10, 20, 30]
    said = {line.partition(": ")[0]: line.partition(": ")[2] for line in made.left_out}
    assert said == {
        "step_000041.bin": "its header says step 40",
        "step_000050.bin": "79 bytes, but 6 parameters make 80",
        "step_000060.bin": "0 parameters do not fit the checkpoint header (1 to 2147483647)",
        "step_000070.bin": "0 parameters do not fit the checkpoint header (1 to 2147483647)",
        "step_000080.bin": "not a regular file",
        "step_30.bin": "the same step as step_000030.bin",
        f"step_{2**31}.bin": f"no header can hold step {2**31}",
    }
    present = sorted(path.name for path in directory_of(made).checkpoints.iterdir())
    assert present == [f"{checkpoint_stem(step)}.bin" for step in made.steps]


def test_names_are_padded_as_ours(folder: Folder) -> None:
    folder.write_binary(7, "step_7.bin")
    made = taken_in(folder)
    assert made.steps == [7, 10, 20, 30]
    assert (directory_of(made).checkpoints / "step_000007.bin").exists()


def test_a_torn_history_is_taken_up_to_the_tear(folder: Folder) -> None:
    path = folder.path / "andrea-12m.loss.json"
    path.write_bytes(path.read_bytes()[:-4])
    made = taken_in(folder)
    assert made.entries == 29
    assert "torn after entry 29" in made.left_out[0]


def test_a_folder_without_losses_is_a_run_without_history(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "early")
    folder.write_binary(10)
    made = taken_in(folder)
    assert (made.run, made.entries, made.steps, made.beyond) == ("early", 0, [10], [10])
    assert "so the history begins empty" in made.left_out[0]
    assert verify(directory_of(made)).problems == []


# --- what is refused ------------------------------------------------------------------------------


def test_an_existing_target_is_refused_and_untouched(folder: Folder) -> None:
    made = taken_in(folder)
    before = sorted(made.directory.rglob("*"))
    with pytest.raises(RunError, match="exists; give the import another --name"):
        taken_in(folder)
    assert sorted(made.directory.rglob("*")) == before
    assert taken_in(folder, name="second").directory.name == "second"


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    empty = Folder(tmp_path / "empty")
    with pytest.raises(RunError, match="nothing to import"):
        taken_in(empty)
    with pytest.raises(RunError, match="not a directory"):
        import_run.find_model(tmp_path / "nowhere", None)


def test_two_models_in_one_folder_need_a_name(folder: Folder) -> None:
    (folder.path / "other.loss.json").write_text("[[1, 2.0]]")
    with pytest.raises(RunError, match="files of andrea-12m, other; choose one with --name"):
        taken_in(folder)
    assert taken_in(folder, name="other").entries == 1


@pytest.mark.parametrize("content", ['{"a": 1}', "[[1]]", "[[1, 2, 3]]", '[["x", 2]]', "no"])
def test_a_loss_file_that_is_none_is_refused(folder: Folder, content: str) -> None:
    (folder.path / "andrea-12m.loss.json").write_text(content)
    with pytest.raises(RunError, match=r"expected an array of \[step, loss\]"):
        taken_in(folder)
    assert not (folder.path.parent / "runs").exists()


def test_a_name_that_no_run_can_have_is_refused(folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        taken_in(folder, name="../elsewhere")


def test_an_import_that_fails_leaves_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("supervisor.import_run.Journal.open", full)
    with pytest.raises(OSError, match="No space left"):
        taken_in(folder)
    assert list((folder.path.parent / "runs").iterdir()) == []


# --- and on it goes -------------------------------------------------------------------------------


@pytest.fixture
def run(folder: Folder) -> Iterator[Run]:
    """The settings of a run that goes on from the folder with another trainer."""
    with contextlib.closing(Run(folder.path.parent, name="onward")) as made:
        made.set("training", steps=50)
        yield made


def test_a_run_goes_on_from_an_imported_checkpoint(folder: Folder, run: Run) -> None:
    done = run.supervisor("import", str(folder.path), "--config", str(run.config))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("onward: 30 entries, 3 checkpoints, 1 samples in ")
    imported = run.ledger_path.read_bytes()
    assert run.finish() == 0
    assert run.records("attempt_started")[0]["resume_step"] == 30
    assert run.steps() == list(range(1, 51))
    assert run.ledger_path.read_bytes().startswith(imported.removesuffix(b"\n]\n"))
    verified = run.supervisor("verify", "onward")
    assert (verified.returncode, verified.stdout.splitlines()[-1]) == (0, "all proven")


def test_a_damaged_imported_checkpoint_is_passed_over_for_an_older_one(
    folder: Folder, run: Run
) -> None:
    run.supervisor("import", str(folder.path), "--config", str(run.config))
    path = run.directory / "checkpoints" / "step_000030.bin"
    flip_bit(path, 2)
    assert run.supervisor("verify", "onward").returncode == 1
    assert run.finish() == 0
    assert run.records("attempt_started")[0]["resume_step"] == 20
    assert run.supervisor("verify", "onward").returncode == 0


def test_the_settings_of_an_import_without_a_configuration_fit_its_history(
    folder: Folder, run: Run
) -> None:
    folder.write_losses([[step, 2.0] for step in range(1, 1001)])
    done = run.supervisor("import", str(folder.path))
    assert done.returncode == 0
    directory = folder.path.parent / "andrea-12m"
    # The default trainer is ours, and would call each of these checkpoints damaged.
    assert "to go on" not in done.stdout
    assert "our own trainer cannot go on from checkpoints without a manifest" in done.stderr
    journal = (directory / "journal.jsonl").read_bytes()
    start = run.supervisor("start", "--config", str(directory / "run.toml"))
    assert start.returncode == 2
    assert "step_000030.bin: a checkpoint without a manifest" in start.stderr
    assert "--from-scratch" in start.stderr
    assert (directory / "journal.jsonl").read_bytes() == journal, "nobody died of it five times"
    shown = run.supervisor("status", str(directory), "--config").stdout
    assert "training.steps = 1000  (file)" in shown
    assert "run.name = 'andrea-12m'" in shown


def test_checkpoints_beyond_the_history_are_said(folder: Folder, run: Run) -> None:
    """A checkpoint is never ahead of the history that led to it."""
    folder.write_binary(40)
    done = run.supervisor("import", str(folder.path), "--config", str(run.config))
    assert done.returncode == 0
    assert "the checkpoints of steps [40] are beyond the history" in done.stderr
    assert "(not started yet, begins at step 30)" in run.supervisor("status", "onward").stdout
    assert run.finish() == 0
    assert run.records("attempt_started")[0]["resume_step"] == 30
    assert run.supervisor("verify", "onward").returncode == 0


def test_what_is_left_out_is_said_and_the_rest_imported(folder: Folder, run: Run) -> None:
    (folder.path / "step_000040.bin").write_bytes(b"short")
    (folder.path / "step_000050.bin").symlink_to("nowhere")
    done = run.supervisor("import", str(folder.path), "--name", "named")
    assert done.returncode == 0
    assert "supervisor: left out: step_000040.bin: " in done.stderr
    assert "supervisor: left out: step_000050.bin: not a regular file" in done.stderr
    again = run.supervisor("import", str(folder.path), "--name", "named")
    assert again.returncode == 2
    assert "exists; give the import another --name, nothing was changed" in again.stderr
    shown = run.supervisor("history", "named", "--format", "andrea").stdout
    assert json.loads(shown) == json.loads((folder.path / "andrea-12m.loss.json").read_text())


def test_an_import_goes_on_under_its_own_settings(folder: Folder, run: Run) -> None:
    done = run.supervisor("import", str(folder.path), "--config", str(run.config))
    line = f"to go on: supervisor start --config {run.directory / 'run.toml'}"
    assert done.stdout.splitlines()[-1] == line


def test_samples_are_those_of_the_run_whatever_its_directory_is_called(
    folder: Folder, run: Run
) -> None:
    words = ("import", str(folder.path), "--config", str(run.config), "--name", "another")
    assert run.supervisor(*words).returncode == 0
    done = run.supervisor("samples", str(run.directory))
    assert (done.returncode, done.stdout) == (0, "step      20 | region\n")


def test_the_settings_of_an_import_are_those_of_its_first_life(folder: Folder, run: Run) -> None:
    """They were nowhere but in run.toml, and whatever that said later was what they had been."""
    run.supervisor("import", str(folder.path), "--config", str(run.config))
    run.config = run.directory / contract.RUN_FILE
    run.config.write_text(run.config.read_text().replace("\nseed = 0", "\nseed = 5"))
    assert run.finish() == 0, "nothing has been trained with the other"
    trained = run.config.read_text()
    run.config.write_text(trained.replace("\nseed = 5", "\nseed = 6"))
    assert run.finish() == 2
    assert "training.seed: recorded 5, requested 6" in run.output()
    run.config.write_text(trained)
    assert run.finish() == 0
    assert run.supervisor("verify", str(run.directory)).returncode == 0


def test_an_import_that_is_pivoted_has_the_policy_from_before(folder: Folder) -> None:
    with contextlib.closing(PivotRun(folder.path.parent, "onward")) as run:
        run.supervisor("import", str(folder.path), "--config", str(run.config))
        assert run.pivot().returncode == 0
        run.gate(40)
        supervisor = run.start()  # with the file from before the pivot, as any run
        run.wait_for_status(step=40, epoch=2)
        assert run.rollback(20).returncode == 0
        tables = tomllib.loads((run.directory / contract.RUN_FILE).read_text())
        assert set(OLD_ARMS) == {arm["name"] for arm in tables["policy"]["arms"]}
        run.open_gate()
        assert run.end(supervisor) == 0
        assert run.supervisor("verify", str(run.directory)).returncode == 0


def test_a_name_does_not_move_an_import_whose_settings_say_where_it_is(
    folder: Folder, run: Run
) -> None:
    run.directory.mkdir()
    words = ("import", str(folder.path), "--config", str(run.config), "--name", "another")
    refused = run.supervisor(*words)
    assert refused.returncode == 2
    assert "the settings say so (run.directory, from the file)" in refused.stderr


def test_a_name_may_be_a_number(folder: Folder, run: Run) -> None:
    words = ("import", str(folder.path), "--config", str(run.config), "--name", "2024")
    assert run.supervisor(*words).stdout.startswith("2024: 30 entries, 3 checkpoints")


def test_a_configuration_that_is_wrong_is_told_before_anything_is_made(
    folder: Folder, run: Run
) -> None:
    run.config.write_text(tomli_w.dumps({"trainer": {"command": [PYTHON, str(SABOTEUR)]}, "x": 1}))
    done = run.supervisor("import", str(folder.path), "--config", str(run.config))
    assert done.returncode == 2
    assert "x = 1: expected a known key" in done.stderr
    assert not run.directory.exists()
