"""The proof of a run: what is damaged is named with its place; what is whole is called whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoint_kit
import orjson
import pytest
from checkpoint_kit import RUN_ID, flip_bit, write_checkpoint
from hypothesis import given, strategies as st
from property_kit import cases, scratch
from runs_kit import DEADLINE_SECONDS, Run

from supervisor import contract, events as ev, ledger
from supervisor.contract import CHUNK_BYTES, Entry, Json, checkpoint_stem
from supervisor.durable import read_range
from supervisor.journal import Journal
from supervisor.ledger import Ledger
from supervisor.ledger_proof import Begin, Binding, LedgerProof, Problem, prove_ledger
from supervisor.readback import Found, verify as read_back
from supervisor.repair import repair
from supervisor.rundir import LockHeld, RunDirectory, RunError
from supervisor.verify import Report, verify

FLIPS = 40


# --- runs to look at ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that crashed once, went on and reached its end."""
    with contextlib.closing(Run(tmp_path_factory.mktemp("finished"))) as made:
        made.set("training", steps=45)
        made.set("checkpoint", every=10, keep_last=3, keep_every=20)
        made.faults = "kill@33#1"
        assert made.finish() == 0
        yield made


@pytest.fixture
def copy(finished: Run, tmp_path: Path) -> RunDirectory:
    """The finished run again, to be damaged, with an archive beside it."""
    path = tmp_path / "run"
    ignored = shutil.ignore_patterns("sockets")
    shutil.copytree(finished.directory, path, ignore=ignored)
    archive = path / "archive" / "pivot-0001-step_000040"
    archive.mkdir()
    for name in ("run.samples.json", "0001.toml"):
        (archive / name).write_text(f"what {name} said before the pivot\n" * 3)
    digests = {one.name: contract.digest(one.read_bytes()) for one in archive.iterdir()}
    (archive / "digests.json").write_text(json.dumps(digests))
    return RunDirectory(path, "run")


class Built:
    """A run directory made with plain Python: `records` and entries as the test wants them."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path, "run")
        self.directory.create()
        self.run_id = RUN_ID
        created = ev.RunCreated(RUN_ID, "run", 100, "0" * 64)
        self.record(created)

    def record(self, record: ev.Record, **more: object) -> None:
        journal, _ = Journal.open(self.directory.journal)
        journal.append([ev.record_to_json(record) | more], 1.7e9)
        journal.sync()
        journal.close()

    def enter(self, *steps: int, bind: bool = False) -> None:
        """Appends an entry for each step; `bind` journals a life that ended there."""
        writer = Ledger.open(self.directory.ledger)
        writer.append([Entry(step, 2.0 + 1 / (step + 1), attempt=1, epoch=1) for step in steps])
        writer.sync()
        if bind:
            entries, sha256 = writer.binding(steps[-1])
            ended = ev.SupervisorEnded("stopped", "")
            self.record(ended, ledger_entries=entries, ledger_sha256=sha256)
        writer.close()

    def commit(self, step: int, parameters: int = 6, **more: object) -> Path:
        """A checkpoint on disk and on record; the path of its `.bin`."""
        directory = self.directory.checkpoints
        manifest = write_checkpoint(directory, step, parameters, **more)  # type: ignore[arg-type]
        binary = directory / f"{checkpoint_stem(step)}.bin"
        digest = manifest.binary_digest
        self.record(ev.CheckpointCommitted(step, 1, "cadence", [], digest))
        self.record(ev.CheckpointVerified(step, contract.digest(binary.read_bytes())))
        return binary

    def problems(self) -> list[Problem]:
        return verify(self.directory).problems


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "run")


def covers(problem: Problem, offset: int) -> bool:
    """Whether the place of a problem is a stretch of bytes with this one in it."""
    found = re.search(r"bytes (\d+) to (\d+)", problem.place)
    return found is not None and int(found[1]) <= offset < int(found[2])


def files_of(report: Report) -> set[str]:
    return {problem.file for problem in report.problems}


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


# --- what is whole --------------------------------------------------------------------------------


def test_a_finished_run_is_proven_to_its_last_byte(finished: Run) -> None:
    shown = finished.supervisor("verify", "run", "--json")
    report = json.loads(shown.stdout)
    assert (shown.returncode, report["problems"], report["proven"]) == (0, [], True)
    counts = report["counts"]
    assert counts["ledger_entries"] == counts["ledger_entries_bound"] == 45
    assert counts["journal_records"] == len(finished.records())
    assert counts["checkpoints"] == len(finished.checkpoints()) == 4
    assert report["bytes"] > finished.ledger_path.stat().st_size
    assert report["schema_version"] == 1


def test_the_words_for_a_person_say_the_verdict(finished: Run, copy: RunDirectory) -> None:
    good = finished.supervisor("verify", "run")
    assert good.returncode == 0
    assert good.stdout.endswith("all proven\n")
    flip_bit(copy.checkpoints / "step_000040.bin", 300)
    bad = finished.supervisor("verify", str(copy.path))
    assert bad.returncode == 1
    assert bad.stdout.startswith(
        "checkpoints/step_000040.bin: chunk 0 of 1, bytes 0 to 80 (header, weights, m, v):"
    )
    assert bad.stdout.endswith("1 problem\n")


def test_verifying_changes_nothing(copy: RunDirectory) -> None:
    def snapshot() -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(copy.path.rglob("*"))
            if path.is_file()
        }

    flip_bit(copy.checkpoints / "step_000040.bin", 300)
    before = snapshot()
    assert verify(copy).problems
    assert snapshot() == before


def test_a_living_run_can_be_verified_and_not_repaired(tmp_path: Path) -> None:
    with contextlib.closing(Run(tmp_path)) as run:
        supervisor = run.hold(25)
        run.wait_for_record("checkpoint_verified", step=20)
        directory = RunDirectory(run.directory, "run")
        report = verify(directory)
        assert report.problems == []
        assert "the run is alive: what is half-written now is not judged" in report.notes
        assert any("are not bound yet" in note for note in report.notes)
        refused = run.supervisor("verify", "run", "--repair")
        assert refused.returncode == 2
        assert f"already supervised by process {supervisor.pid}" in refused.stderr
        with pytest.raises(LockHeld):
            repair(directory)
        run.open_gate()
        assert run.end(supervisor) == 0
        assert verify(directory).problems == []


def test_a_bar_shows_on_a_terminal_only(finished: Run) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            finished.command("verify", "run"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=follower,
            env=finished.variables() | {"TERM": "xterm"},
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        shown = os.read(leader, 65536)
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 0
    assert b"verifying" in shown
    assert finished.supervisor("verify", "run").stderr == ""


# --- one bit, anywhere ----------------------------------------------------------------------------


def flipped_bits(path: Path, seed: int, *ends: int) -> Iterator[int]:
    """FLIPS random bits of a file, and as many in each stretch of `ends` bytes before its end."""
    source, size = random.Random(seed), path.stat().st_size
    for stretch in (size, *ends):
        bits = range(8 * max(0, size - stretch), 8 * size)
        yield from source.sample(bits, min(FLIPS, len(bits)))


def assert_every_flip_is_found(
    directory: RunDirectory, file: str, *ends: int, seed: int = 1
) -> None:
    """Each flip is reported in this file, at a place with this byte in it, and nowhere else."""
    path = directory.path / file
    for bit in flipped_bits(path, seed, *ends):
        flip_bit(path, bit)
        report = verify(directory)
        flip_bit(path, bit)
        assert files_of(report) == {file}, (bit, report.problems)
        assert any(covers(one, bit // 8) for one in report.problems), (bit, report.problems)
    assert verify(directory).problems == []


def test_a_flipped_bit_in_the_ledger_is_found(copy: RunDirectory) -> None:
    last_entry = len(copy.ledger.read_bytes().splitlines()[-2])
    assert_every_flip_is_found(copy, "run.loss.json", last_entry + 4, 3)


def test_a_flipped_bit_in_a_binary_is_found(copy: RunDirectory) -> None:
    assert_every_flip_is_found(copy, "checkpoints/step_000020.bin")
    assert_every_flip_is_found(copy, "checkpoints/step_000045.bin", seed=2)


def test_a_flipped_bit_in_a_manifest_is_found(copy: RunDirectory) -> None:
    assert_every_flip_is_found(copy, "checkpoints/step_000040.json", 2)


def test_a_flipped_bit_in_the_journal_is_found(copy: RunDirectory) -> None:
    last_line = len(copy.journal.read_bytes().splitlines()[-1])
    assert_every_flip_is_found(copy, "journal.jsonl", last_line + 1, 1)


def test_a_flipped_bit_in_a_policy_is_found(copy: RunDirectory) -> None:
    assert_every_flip_is_found(copy, "policies/0001.toml")


def test_a_flipped_bit_in_the_settings_is_found(copy: RunDirectory) -> None:
    assert_every_flip_is_found(copy, "run.toml")


@pytest.mark.parametrize("name", ["run.samples.json", "0001.toml"])
def test_a_flipped_bit_in_an_archive_is_found(copy: RunDirectory, name: str) -> None:
    assert_every_flip_is_found(copy, f"archive/pivot-0001-step_000040/{name}")


def test_a_flipped_bit_in_the_digests_of_an_archive_is_found(copy: RunDirectory) -> None:
    """Which of the two is wrong nobody can say: the archive is named, and the file that differs."""
    path = copy.path / "archive/pivot-0001-step_000040/digests.json"
    for bit in flipped_bits(path, 3):
        flip_bit(path, bit)
        found = files_of(verify(copy))
        flip_bit(path, bit)
        assert found, bit
        assert all(name.startswith("archive/pivot-0001-step_000040/") for name in found)
    assert verify(copy).problems == []


def test_two_damages_are_both_named(copy: RunDirectory) -> None:
    flip_bit(copy.checkpoints / "step_000020.bin", 100)
    flip_bit(copy.checkpoints / "step_000040.json", 100)
    flip_bit(copy.ledger, 8 * 100)
    assert files_of(verify(copy)) == {
        "checkpoints/step_000020.bin",
        "checkpoints/step_000040.json",
        "run.loss.json",
    }


# --- the ledger -----------------------------------------------------------------------------------


def test_a_changed_entry_is_named_with_the_stretch_between_two_bindings(built: Built) -> None:
    built.enter(*range(1, 11), bind=True)
    built.enter(*range(11, 21), bind=True)
    built.enter(*range(21, 31), bind=True)
    data = built.directory.ledger.read_bytes()
    at = data.index(b'"step":15,') + len(b'"step":15,"loss":2.0')
    built.directory.ledger.write_bytes(data[:at] + b"7" + data[at + 1 :])
    problem = only(built.problems())
    assert problem.file == "run.loss.json"
    assert problem.place.startswith("entries 11 to 20, lines 12 to 21, bytes ")
    assert covers(problem, at)
    assert "a byte has changed" in problem.what
    report = verify(built.directory)
    assert report.counts["ledger_entries_bound"] == 10
    assert "run.loss.json: 2 bindings do not hold" in report.notes


def test_a_damage_that_a_later_life_built_on_is_still_found(built: Built) -> None:
    """A writer binds what it finds when it opens the ledger, so its own bindings hold; the older
    ones know better."""
    built.enter(*range(1, 11), bind=True)
    data = built.directory.ledger.read_bytes()
    built.directory.ledger.write_bytes(data.replace(b'"loss":2.25', b'"loss":2.35'))
    built.enter(*range(11, 21), bind=True)
    report = verify(built.directory)
    assert only(report.problems).place.startswith("entries 1 to 10,")
    assert report.counts["ledger_entries_bound"] == 0


def test_entries_behind_the_last_binding_are_said_to_be_unbound(built: Built) -> None:
    built.enter(*range(1, 11), bind=True)
    built.enter(*range(11, 14))
    report = verify(built.directory)
    assert report.problems == []
    assert [note for note in report.notes if "entries 11 to 13 are not bound yet" in note]


def test_a_row_that_is_being_written_now_is_not_judged(built: Built) -> None:
    built.enter(*range(1, 11), bind=True)
    built.enter(11, 12)
    data = built.directory.ledger.read_bytes()
    with built.directory.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built.directory.ledger.write_bytes(data[:-20])
        assert built.problems() == []
        built.directory.ledger.write_bytes(data.replace(b'"step":9', b'"step":x'))
        assert {one.place.partition(",")[0] for one in built.problems()} == {
            "entry 9",
            "entries 1 to 10",
        }
    built.directory.ledger.write_bytes(data[:-20])
    assert only(built.problems()[:1]).place.startswith("entry 12, ")


def test_a_history_that_lost_its_end_is_found(built: Built) -> None:
    """A whole ledger, only shorter: every reader of JSON would be content."""
    built.enter(*range(1, 11), bind=True)
    lines = built.directory.ledger.read_bytes().split(b"\n")
    built.directory.ledger.write_bytes(b"\n".join([*lines[:8], lines[8].rstrip(b","), b"]", b""]))
    assert len(ledger.read_entries(built.directory.ledger)[0]) == 8
    problem = only(built.problems())
    assert problem.place == "behind entry 8"
    assert "recorded 10: the end of the history is gone" in problem.what


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "no closing": (lambda d: d[:-3], "line 6, ", "expected the line ']'"),
    "torn row": (lambda d: d[:-20], "entry 5, line 6, ", "no whole entry"),
    "nuls": (lambda d: d[:-20] + bytes(64), "entry 5, line 6, ", "NUL bytes, as a power loss"),
    "more behind it": (lambda d: d + b"x", "entry 6, line 7, ", "no whole entry"),
    "lost comma": (lambda d: d.replace(b",\n", b"\n", 1), "entry 1, line 2, ", "no comma"),
    "comma too many": (lambda d: d[:-3] + b",\n]\n", "line 7, ", "a comma stands before"),
    "spaced out": (lambda d: d.replace(b"[\n", b"[ \n", 1), "line 1, ", "expected the line '['"),
    "another row form": (
        lambda d: d.replace(b"]\n", b",[7,2.5]\n]\n", 1).replace(b"\n,[", b",\n["),
        "entry 6, line 7, ",
        "expected an object",
    ),
    "no number": (lambda d: d.replace(b'"step":2', b'"stop":2'), "entry 2, line 3, ", "needs step"),
    "not ours": (lambda d: b"{}\n", "line 1, ", "expected the line '['"),
    "empty": (lambda d: b"", "the end", "holds no ledger"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_form_of_the_ledger_is_exact(built: Built, name: str) -> None:
    damage, place, what = DAMAGES[name]
    built.enter(1, 2, 3, 4, 5)
    built.directory.ledger.write_bytes(damage(built.directory.ledger.read_bytes()))
    found = built.problems()
    assert {problem.file for problem in found} == {"run.loss.json"}
    assert [p for p in found if p.place.startswith(place) and what in p.what], found


def test_a_missing_ledger_is_damage(built: Built) -> None:
    built.enter(1, 2, bind=True)
    built.directory.ledger.unlink()
    assert only(built.problems()).what == "missing; the journal binds it 1 times"


def test_a_ruined_ledger_does_not_flood_the_report(built: Built) -> None:
    built.directory.ledger.write_bytes(b"[\n" + b"?\n" * 5000 + b"]\n")
    found = built.problems()
    assert len(found) == 21
    assert found[-1].what.endswith("more problems like these")


@cases(60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_gaps_are_those_of_the_canonical_history(steps: list[int]) -> None:
    """Whatever was taken back and executed again: only the canonical history must have no gap."""
    with scratch() as place:
        path = place / "run.loss.json"
        writer = Ledger.open(path)
        writer.append([Entry(step, 1.0) for step in steps])
        writer.close()
        kept = [entry.step for entry in ledger.canonical(ledger.read_entries(path)[0])]
        missing = set(range(1, kept[-1] + 1)) - set(kept)
        found = prove(path).problems
        named = [re.fullmatch(r"steps (\d+) to (\d+)", problem.place) for problem in found]
        steps_named = [range(int(one[1]), int(one[2]) + 1) for one in named if one is not None]
        assert {step for stretch in steps_named for step in stretch} == missing
        assert len(steps_named) == len(found)
        assert all(steps_named)


def prove(path: Path, *bindings: Binding, begin: Begin | None = None) -> LedgerProof:
    return prove_ledger(
        path, bindings, begin or Begin(), writing=False, advance=lambda size_bytes: None
    )


def test_a_history_may_begin_at_the_fork_and_have_the_gaps_of_another_program(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.loss.json"
    writer = Ledger.open(path)
    writer.append([Entry(step, 1.0) for step in (10, 20, 30, 31, 32, 34)])
    writer.close()
    assert [one.place for one in prove(path).problems] == [
        "steps 1 to 9",
        "steps 11 to 19",
        "steps 21 to 29",
        "steps 33 to 33",
    ]
    forked = prove(path, begin=Begin(first_step=10)).problems
    assert forked[0].place == "steps 11 to 19"
    imported = prove(path, begin=Begin(imported=3)).problems
    assert [one.place for one in imported] == ["steps 33 to 33"]


@cases(40)
@given(bound=st.sets(st.integers(1, 12), min_size=1), changed=st.integers(1, 12))
def test_one_pass_finds_the_first_binding_that_does_not_hold(bound: set[int], changed: int) -> None:
    with scratch() as place:
        path = place / "run.loss.json"
        writer = Ledger.open(path)
        bindings = []
        for step in range(1, 13):
            writer.append([Entry(step, 1.0 + step / 13)])
            if step in bound:
                bindings.append(Binding(*writer.binding(step), seq=step))
        writer.close()
        assert prove(path, *bindings).problems == []
        row = b'{"step":%d,"loss":' % changed
        path.write_bytes(path.read_bytes().replace(row + b"1", row + b"9"))
        found = prove(path, *bindings).problems
        later = sorted(step for step in bound if step >= changed)
        if not later:
            assert found == []
            return
        first = max((step for step in bound if step < changed), default=0) + 1
        assert only(found).place.startswith(f"entries {first} to {later[0]}, ")


# --- the journal ----------------------------------------------------------------------------------


def lines_of(built: Built) -> list[bytes]:
    return built.directory.journal.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("change", ["removed", "swapped", "inserted"])
def test_a_journal_line_cannot_be_removed_swapped_or_inserted(built: Built, change: str) -> None:
    for step in (10, 20, 30):
        built.commit(step)
    lines = lines_of(built)
    if change == "removed":
        del lines[2]
    elif change == "swapped":
        lines[2], lines[3] = lines[3], lines[2]
    else:
        lines.insert(2, lines[2])
    built.directory.journal.write_bytes(b"".join(lines))
    problem = only(built.problems())
    assert problem.file == "journal.jsonl"
    assert problem.place.startswith("line 4, " if change == "inserted" else "line 3, ")


def test_a_history_without_a_witness_is_not_proven(built: Built) -> None:
    """It would be by no binding at all, and by nothing that says that there were some."""
    built.enter(1, 2, 3, bind=True)
    assert built.problems() == []
    built.directory.journal.write_bytes(b"")
    problem = only(built.problems())
    assert (problem.file, problem.place) == ("journal.jsonl", "the whole file")
    assert "none of the 3 ledger entries is proven" in problem.what


def test_a_torn_journal_is_damage_unless_somebody_writes_it_now(built: Built) -> None:
    built.commit(10)
    with built.directory.journal.open("ab") as file:
        file.write(b'{"seq":4,"time":1')
    problem = only(built.problems())
    assert problem.place.startswith("line 4, bytes ")
    assert "torn" in problem.what
    with built.directory.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert built.problems() == []


def test_a_record_of_a_newer_version_is_passed_over_and_its_binding_checked(built: Built) -> None:
    built.enter(1, 2, 3)
    writer, _ = Journal.open(built.directory.journal)
    line: Json = {"record": "invented_later", "ledger_entries": 2, "ledger_sha256": "0" * 64}
    writer.append([line], 1.7e9)
    writer.close()
    assert only(built.problems()).place.startswith("entries 1 to 2,")


# --- checkpoints ----------------------------------------------------------------------------------


def test_fc12_an_old_checkpoint_that_changed_on_the_disk_is_named(built: Built) -> None:
    """A failing disk changed stored weights, and they still loaded (huggingface/diffusers #11989):
    nothing but reading old checkpoints again and comparing them finds that."""
    parameters = 800_000
    for step in (10, 20, 30):
        built.commit(step, parameters)
    assert built.problems() == []
    weights, second_moment = 8 + 4 * 1000, 8 + 4 * (2 * parameters + 5)
    flip_bit(built.directory.checkpoints / "step_000010.bin", 8 * weights)
    flip_bit(built.directory.checkpoints / "step_000010.bin", 8 * second_moment)
    total = contract.checkpoint_size_bytes(parameters)
    assert built.problems() == [
        Problem(
            "checkpoints/step_000010.bin",
            f"chunk 0 of 3, bytes 0 to {CHUNK_BYTES} (header, weights, m)",
            "differs from its manifest",
        ),
        Problem(
            "checkpoints/step_000010.bin",
            f"chunk 1 of 3, bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES} (m, v)",
            "differs from its manifest",
        ),
    ]
    assert 2 * CHUNK_BYTES < total < 3 * CHUNK_BYTES


def test_fc26_checkpoints_deleted_by_hand_break_nothing_and_are_named(tmp_path: Path) -> None:
    """An operator rolled back by hand; the bookkeeping still listed the deleted files, and the next
    save failed on them (NVIDIA-NeMo/Speech PR 12804)."""
    with contextlib.closing(Run(tmp_path)) as run:
        run.set("checkpoint", every=10, keep_last=5)
        assert run.finish() == 0
        assert run.checkpoints() == [10, 20, 30]
        for step in (20, 30):
            for ending in (".bin", ".json"):
                (run.directory / "checkpoints" / f"{checkpoint_stem(step)}{ending}").unlink()
        directory = RunDirectory(run.directory, "run")
        missing = [one.file for one in verify(directory).problems]
        assert missing == ["checkpoints/step_000020.bin", "checkpoints/step_000030.bin"]
        run.set("training", steps=60)
        assert run.finish("--set", "training.steps=60") == 0
        assert run.history_step() == 60
        assert set(run.checkpoints()) >= {40, 50, 60}
        left = {one.file: one.what for one in verify(directory).problems}
        assert set(left) <= set(missing)
        assert set(left.values()) <= {"missing; the journal says it is here"}


def test_a_checkpoint_that_was_replaced_by_a_consistent_one_is_found(built: Built) -> None:
    """Its manifest fits; the journal remembers what was committed."""
    binary = built.commit(10)
    for ending in (".bin", ".json"):
        binary.with_suffix(ending).unlink()
    write_checkpoint(built.directory.checkpoints, 10, seed=99)
    problem = only(built.problems())
    assert problem.file == "checkpoints/step_000010.bin"
    assert "digest over its chunks" in problem.what


def test_a_checkpoint_that_is_not_what_was_read_back_is_found(built: Built) -> None:
    built.commit(10)
    built.record(ev.CheckpointVerified(10, "0" * 64))
    assert "its SHA-256 is" in only(built.problems()).what


@pytest.mark.parametrize(
    ("size", "place"),
    [(70, "bytes 70 to 80 are missing"), (93, "bytes 80 to 93 are too many"), (0, "bytes 0 to 80")],
)
def test_a_binary_of_another_size_is_found(built: Built, size: int, place: str) -> None:
    binary = built.commit(10)
    data = binary.read_bytes()
    binary.write_bytes((data + bytes(20))[:size])
    assert built.problems()[0].place.startswith(place)


def test_the_header_is_named(built: Built) -> None:
    binary = built.commit(10)
    flip_bit(binary, 8 * 5)
    assert only(built.problems()).place.endswith("header bytes 5")


def test_a_missing_manifest_is_named(built: Built) -> None:
    built.commit(10).with_suffix(".json").unlink()
    assert only(built.problems()) == Problem(
        "checkpoints/step_000010.json", "the whole file", "missing"
    )


def test_a_checkpoint_of_another_run_is_not_ours(built: Built) -> None:
    write_checkpoint(built.directory.checkpoints, 10, run_id="stranger")
    problem = only(built.problems())
    assert problem.file == "checkpoints/step_000010.json"
    assert "which is neither this run" in problem.what


def test_a_checkpoint_of_an_ancestor_is_ours_up_to_the_fork(built: Built) -> None:
    forked = ev.RunForked("/elsewhere", [["parent", 15]], 10, 1, 0, "")
    built.record(forked)
    built.enter()
    built.commit(10, run_id="parent")
    assert built.problems() == []
    built.commit(20, run_id="parent")
    assert only(built.problems()).file == "checkpoints/step_000020.json"


def test_what_the_journal_took_off_the_record_is_not_missed(built: Built) -> None:
    for step in (10, 20, 30, 40, 50):
        built.commit(step)
    for step in (10, 20, 30, 40):
        for ending in (".bin", ".json"):
            path = built.directory.checkpoints / f"{checkpoint_stem(step)}{ending}"
            if step == 30:
                path.rename(built.directory.path / "superseded" / path.name)
            else:
                path.unlink()
    built.record(ev.CheckpointsRemoved([10]))
    built.record(ev.CheckpointQuarantined(20, "bad", "quarantine/step_000020.bin"))
    built.record(ev.CheckpointsSuperseded(20, [30]))
    report = verify(built.directory)
    assert [one.file for one in report.problems] == ["checkpoints/step_000040.bin"]
    assert report.counts["superseded"] == 1
    assert "superseded/ holds step_000030.bin" in report.notes


def test_a_checkpoint_that_is_not_on_record_yet_is_proven_and_noted(built: Built) -> None:
    write_checkpoint(built.directory.checkpoints, 10)
    report = verify(built.directory)
    assert report.problems == []
    assert "checkpoints of steps [10] are not on record yet" in report.notes


def test_a_living_supervisor_may_remove_a_checkpoint_just_now(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes first and journals then: a missing file is looked up once more."""
    binary = built.commit(10)
    built.commit(20)
    binary.unlink()
    original = verify.__globals__["time"].sleep

    def journal_it(seconds: float) -> None:
        monkeypatch.setattr("supervisor.verify.time.sleep", original)
        built.record(ev.CheckpointsRemoved([10]))

    monkeypatch.setattr("supervisor.verify.time.sleep", journal_it)
    with built.directory.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert built.problems() == []


def test_a_bare_checkpoint_is_proven_by_the_journal(built: Built) -> None:
    data = checkpoint_kit.binary(10, 6)
    path = built.directory.checkpoints / "step_000010.bin"
    path.write_bytes(data)
    built.record(ev.RunImported("/elsewhere", 0, [10]))
    found = read_back(Found(10, path, None), RUN_ID, bare_allowed=True)
    built.record(ev.CheckpointCommitted(10, 0, "", [], found.binary_digest))
    assert built.problems() == []
    flip_bit(path, 8 * 20)
    assert only(built.problems()).file == "checkpoints/step_000010.bin"
    flip_bit(path, 8 * 20)
    flip_bit(path, 1)
    assert "its header says step 8" in only(built.problems()).what


def test_a_checkpoint_that_cannot_be_read_is_a_problem_and_stays(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No permission says nothing about the bytes: not proven, but nothing to set aside either."""
    binary = built.commit(10)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("supervisor.checkpoint_proof.readback.verify", refuse)
    report = repair(built.directory)
    assert "cannot be read" in only(report.problems).what
    assert report.moved == []
    assert binary.exists()


# --- the other files ------------------------------------------------------------------------------


def test_stored_files_that_are_gone_are_named(copy: RunDirectory) -> None:
    (copy.policies / "0001.toml").unlink()
    copy.run_file.unlink()
    found = {one.file: one.what for one in verify(copy).problems}
    assert found == {"policies/0001.toml": "missing", "run.toml": "missing"}


def test_a_living_supervisor_may_change_the_settings_meanwhile(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are read for minutes, and a pivot may rewrite files in that time; it is on
    record first and written then."""
    original = verify.__globals__["time"].sleep
    early, late = "early", "late"
    file = built.directory.policies / "0001.toml"

    def stored(text: str) -> None:
        built.record(ev.FileStored("policies/0001.toml", contract.digest(text.encode())))

    def write_it(seconds: float) -> None:
        monkeypatch.setattr("supervisor.verify.time.sleep", original)
        file.write_text(early + late)

    file.write_text(early)
    stored(early)
    stored(early + late)
    monkeypatch.setattr("supervisor.verify.time.sleep", write_it)
    with built.directory.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert built.problems() == []
        original_check = verify.__globals__["_Proof"]._check_checkpoints

        def pivot_meanwhile(*arguments: object) -> None:
            original_check(*arguments)
            file.write_text(early)
            stored(early)

        monkeypatch.setattr(verify.__globals__["_Proof"], "_check_checkpoints", pivot_meanwhile)
        assert built.problems() == []
        monkeypatch.setattr("supervisor.verify.time.sleep", lambda seconds: None)
        file.write_text(late)
        monkeypatch.setattr(verify.__globals__["_Proof"], "_check_checkpoints", original_check)
        assert {one.file for one in built.problems()} == {"policies/0001.toml"}, "and stays so"


def test_settings_that_do_not_parse_are_named_by_key(built: Built) -> None:
    text = '[run]\nname = "run"\n[training]\nsteps = "many"\n'
    built.directory.run_file.write_text(text)
    built.record(ev.FileStored("run.toml", contract.digest(text.encode())))
    assert "key training.steps" in {one.place for one in built.problems()}


SIDECARS: dict[str, tuple[str, str, str]] = {
    "samples: cut off": ("samples", "[{", "line 1, "),
    "samples: no array": ("samples", "{}", "the whole file"),
    "samples: no text": ("samples", '[{"step":1,"prompt":"","text":""},{"step":2}]', "item 1"),
    "samples: no object": ("samples", "[7]", "item 0"),
    "training: no object": ("training", "[]", "the whole file"),
    "training: no attempt": ("training", '{"attempt-1":{}}', "key 'attempt-1'"),
    "training: no environment": ("training", '{"attempt-0001":7}', "key 'attempt-0001'"),
    "state: no step": ("state", "{}", "key 'step'"),
    "state: no bandit": (
        "state",
        '{"step":10,"epoch":1,"policy_digest":"","targets_seen":1,"arms":{}}',
        "key 'bandit'",
    ),
}


@pytest.mark.parametrize("name", SIDECARS)
def test_a_sidecar_of_the_wrong_shape_is_named(built: Built, name: str) -> None:
    which, content, place = SIDECARS[name]
    path: Path = getattr(built.directory, which)
    path.write_text(content)
    problem = only(built.problems())
    assert problem.file == path.name
    assert problem.place.startswith(place)


def test_the_bandit_beside_a_checkpoint_is_that_of_its_manifest(copy: RunDirectory) -> None:
    state = orjson.loads(copy.state.read_bytes())
    assert state["step"] == 45
    state["bandit"]["arms"]["prose"]["pulls"] += 1
    copy.state.write_bytes(orjson.dumps(state))
    assert only(verify(copy).problems) == Problem(
        "run.state.json", "key 'bandit'", "differs from the manifest of checkpoint 45"
    )
    state["step"] = 44
    copy.state.write_bytes(orjson.dumps(state))
    report = verify(copy)
    assert report.problems == []
    assert [note for note in report.notes if "whose checkpoint is not here" in note]


def test_an_archive_is_its_digests(copy: RunDirectory) -> None:
    archive = copy.path / "archive" / "pivot-0001-step_000040"
    (archive / "0001.toml").rename(archive / "0002.toml")
    assert {one.file: one.what for one in verify(copy).problems} == {
        "archive/pivot-0001-step_000040/0001.toml": "missing",
        "archive/pivot-0001-step_000040/0002.toml": "digests.json does not list it",
    }
    (archive / "digests.json").write_text('{"../../run.toml": "x"}')
    assert "expected the name of a file" in {one.what for one in verify(copy).problems}
    (archive / "digests.json").unlink()
    report = verify(copy)
    assert report.problems == []
    assert "archive/pivot-0001-step_000040: no digests.json, not proven" in report.notes


# --- repair ---------------------------------------------------------------------------------------


def test_repair_moves_bad_checkpoints_and_nothing_else(finished: Run, copy: RunDirectory) -> None:
    flip_bit(copy.checkpoints / "step_000020.bin", 99)
    (copy.checkpoints / "step_000040.json").unlink()
    others = {
        path: path.read_bytes()
        for path in copy.path.rglob("*")
        if path.is_file() and path.name not in ("journal.jsonl", "lock", "trainer.lock")
        if not path.name.startswith(("step_000020", "step_000040"))
    }
    done = finished.supervisor("verify", str(copy.path), "--repair", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["moved_to"] == ["quarantine/step_000020.bin", "quarantine/step_000040.bin"]
    assert sorted(path.name for path in copy.quarantine.iterdir()) == [
        "step_000020.bin",
        "step_000020.json",
        "step_000020.reason.json",
        "step_000040.bin",
        "step_000040.reason.json",
    ]
    assert {path: path.read_bytes() for path in others} == others
    again = verify(copy)
    assert again.problems == []
    assert again.counts["quarantine"] == 2


def test_repair_of_a_whole_run_does_nothing(copy: RunDirectory) -> None:
    before = copy.journal.read_bytes()
    report = repair(copy)
    assert (report.problems, report.moved) == ([], [])
    assert copy.journal.read_bytes() == before


def test_repair_moves_nothing_where_the_move_cannot_be_recorded(copy: RunDirectory) -> None:
    flip_bit(copy.checkpoints / "step_000020.bin", 99)
    flip_bit(copy.journal, 8 * 30)
    with pytest.raises(RunError, match="no checkpoint was moved"):
        repair(copy)
    assert (copy.checkpoints / "step_000020.bin").exists()


def test_repair_waits_for_no_trainer(copy: RunDirectory) -> None:
    """A trainer whose supervisor died writes checkpoints as ever."""
    descriptor = os.open(copy.trainer_lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(RunError, match=f"its trainer lives \\(process {os.getpid()}\\)"):
            repair(copy)
    finally:
        os.close(descriptor)
    assert repair(copy).problems == []


def test_a_run_goes_on_from_what_repair_left(tmp_path: Path) -> None:
    with contextlib.closing(Run(tmp_path)) as run:
        assert run.finish() == 0
        flip_bit(run.directory / "checkpoints" / "step_000030.bin", 300)
        assert run.supervisor("verify", "run", "--repair").returncode == 1
        assert run.finish("--set", "training.steps=40") == 0
        started = run.records("attempt_started")[-1]
        assert (started["resume_step"], run.steps()) == (20, list(range(1, 41)))
        assert run.supervisor("verify", "run").returncode == 0


# --- a run that cannot be named by its files ------------------------------------------------------


def test_the_name_of_a_run_without_a_ledger_comes_from_its_journal(
    finished: Run, copy: RunDirectory
) -> None:
    copy.ledger.unlink()
    renamed = copy.path.rename(copy.path.with_name("elsewhere"))
    shown = json.loads(finished.supervisor("verify", str(renamed), "--json").stdout)
    assert shown["run"] == "run"
    assert [one["file"] for one in shown["problems"]] == ["run.loss.json"]


def test_the_pieces_of_a_place_are_where_they_say(copy: RunDirectory) -> None:
    """Line, entry and bytes of a problem name the same thing."""
    data = copy.ledger.read_bytes()
    at = data.index(b'"step":7,')
    flip_bit(copy.ledger, 8 * at)
    problem = next(one for one in verify(copy).problems if one.place.startswith("entry"))
    found = re.fullmatch(r"entry 7, line 8, bytes (\d+) to (\d+)", problem.place)
    assert found is not None
    with copy.ledger.open("rb") as file:
        row = read_range(file.fileno(), int(found[1]), int(found[2]))
    assert row == copy.ledger.read_bytes().splitlines(keepends=True)[7]
