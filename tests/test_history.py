"""Exports of the history: one value a step, nothing lost that matters, the run untouched."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from property_kit import cases, scratch
from runs_kit import Run

from supervisor import contract, ledger
from supervisor.contract import Entry
from supervisor.history import COLUMNS, FORMATS, History, between, thin
from supervisor.ledger import Ledger
from supervisor.rows import LedgerDamaged

LOSSES = st.floats(allow_nan=True, allow_infinity=True)


def written(path: Path, entries: Iterable[Entry]) -> Path:
    writer = Ledger.open(path)
    writer.append(list(entries))
    writer.sync()
    writer.close()
    return path


def exported(entries: Iterable[Entry], form: str) -> bytes:
    out = io.BytesIO()
    FORMATS[form](entries, out)
    return out.getvalue()


def rows_of(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode())))


# --- which rows -----------------------------------------------------------------------------------


@cases(60)
@given(st.lists(st.integers(0, 9), max_size=25))
def test_the_canonical_view_is_that_of_the_ledger(steps: list[int]) -> None:
    """Two passes that remember only where the history was taken back, against the plain stack."""
    entries = [Entry(step, float(place), attempt=place) for place, step in enumerate(steps)]
    with scratch() as place:
        history = History(written(place / "run.loss.json", entries))
        assert list(history.raw()) == entries
        assert list(history.canonical()) == ledger.canonical(entries)
        assert (history.count, history.torn) == (len(entries), False)


def test_rows_that_are_appended_meanwhile_are_not_in_the_export(tmp_path: Path) -> None:
    path = written(tmp_path / "run.loss.json", [Entry(step, 1.0) for step in range(1, 11)])
    history = History(path)
    written(path, [Entry(4, 2.0), Entry(5, 2.0)])
    assert [entry.step for entry in history.raw()] == list(range(1, 11))
    assert [entry.step for entry in history.canonical()] == list(range(1, 11))
    assert [entry.loss for entry in History(path).canonical()] == [1.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("cut", [1, 2, 5, 20])
def test_a_torn_tail_is_left_out_and_said(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "run.loss.json", [Entry(step, 1.0 / step) for step in range(1, 6)])
    data = path.read_bytes()
    path.write_bytes(data[:-cut] + b"\0" * 50)
    history = History(path)
    kept = [entry.step for entry in history.canonical()]
    assert kept == list(range(1, 6 if cut < 4 else 5))
    assert history.torn


def test_damage_before_the_tail_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "run.loss.json", [Entry(step, 1.0) for step in range(1, 6)])
    path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":\0', 1))
    with pytest.raises(LedgerDamaged, match="entry 3 is damaged; `supervisor verify` says more"):
        History(path)


def test_a_history_of_another_program_is_sent_to_import(tmp_path: Path) -> None:
    path = tmp_path / "model.loss.json"
    path.write_text("[[1, 2.5], [2, 2.4]]")
    with pytest.raises(LedgerDamaged, match="`supervisor import` takes it in"):
        History(path)


def test_a_row_without_a_step_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.loss.json"
    path.write_text('[\n{"step":1,"loss":1},\n{"loss":1}\n]\n')
    with pytest.raises(LedgerDamaged, match="entry 2 has no step"):
        History(path)


def test_between_takes_both_ends() -> None:
    entries = [Entry(step, 1.0) for step in range(1, 11)]
    assert [one.step for one in between(entries, 3, 5)] == [3, 4, 5]
    assert [one.step for one in between(entries, None, 2)] == [1, 2]
    assert [one.step for one in between(entries, 9, None)] == [9, 10]


# --- which of them --------------------------------------------------------------------------------


def test_thinning_keeps_every_nth_and_the_extremes() -> None:
    losses = [5.0, 4.0, 9.0, 4.5, 4.4, 4.3, 1.0, 4.2, 4.1, 4.0, 3.9, 3.8]
    entries = [Entry(step, loss) for step, loss in enumerate(losses, start=1)]
    assert [one.step for one in thin(entries, 5)] == [1, 2, 3, 5, 6, 7, 10, 11, 12]


def test_a_loss_that_is_not_a_number_is_never_thinned_away() -> None:
    losses = [3.0, math.nan, math.inf, 2.0, 1.0, 1.5]
    entries = [Entry(step, loss) for step, loss in enumerate(losses, start=1)]
    assert [one.step for one in thin(entries, 6)] == [1, 2, 5, 6]


@given(st.lists(LOSSES, max_size=60), st.integers(2, 9))
def test_thinning_keeps_order_ends_and_bounds(losses: list[float], every: int) -> None:
    entries = [Entry(step, loss) for step, loss in enumerate(losses, start=1)]
    kept = list(thin(entries, every))
    steps = [one.step for one in kept]
    assert steps == sorted(set(steps))
    assert {step for step in range(every, len(entries) + 1, every)} <= set(steps)
    if entries:
        assert (kept[0], kept[-1]) == (entries[0], entries[-1])
    for start in range(0, len(entries), every):
        bucket = [e.loss for e in entries[start : start + every] if not math.isnan(e.loss)]
        inside = [e.loss for e in kept if start < e.step <= start + every]
        if bucket:
            assert min(bucket) in inside
        if len(bucket) == len(entries[start : start + every]):
            assert max(bucket) in inside
    assert len(kept) <= 3 * -(-len(entries) // every) + 1


# --- forms ----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            Entry,
            step=st.integers(1, 10**6),
            loss=LOSSES,
            time=st.none() | st.floats(0, 2e9),
            attempt=st.none() | st.integers(1, 99),
            epoch=st.none() | st.integers(1, 9),
            arm=st.none() | st.text(max_size=9),
            targets_seen=st.none() | st.integers(0, 2**40),
            learning_rate=st.none() | st.floats(0, 1),
            gradient_norm=st.none() | LOSSES,
            step_seconds=st.none() | st.floats(0, 9),
        ),
        max_size=8,
    )
)
def test_json_is_read_back_as_it_was(entries: list[Entry]) -> None:
    values = json.loads(exported(entries, "json"))
    again = [contract.parse_entry(value, "row") for value in values]
    assert [repr(one) for one in again] == [repr(one) for one in entries]  # NaN is not itself


def test_json_is_a_ledger_again(tmp_path: Path) -> None:
    entries = [Entry(1, 2.5, arm="prose"), Entry(2, math.inf)]
    path = tmp_path / "again.loss.json"
    path.write_bytes(exported(entries, "json"))
    assert ledger.read_entries(path) == (entries, None)
    assert list(History(path).raw()) == entries


def test_andrea_rows_are_step_and_loss() -> None:
    entries = [
        Entry(1, 2.5, attempt=1),
        Entry(2, math.nan),
        Entry(3, -math.inf),
        Entry(4, math.inf),
    ]
    assert json.loads(exported(entries, "andrea")) == [
        [1, 2.5],
        [2, "nan"],
        [3, "-inf"],
        [4, "inf"],
    ]


@pytest.mark.parametrize("form", ["json", "andrea"])
def test_an_empty_history_is_an_empty_array(form: str) -> None:
    assert exported([], form) == b"[\n]\n"


def test_csv_has_a_header_even_when_empty() -> None:
    assert exported([], "csv") == ",".join(COLUMNS).encode() + b"\n"


def test_csv_quotes_what_needs_it_and_floats_survive() -> None:
    loss = 0.1 + 0.2
    row = rows_of(exported([Entry(7, loss, arm='a "b",\nc', gradient_norm=math.nan)], "csv"))[0]
    assert float(row["loss"]) == loss
    assert row["arm"] == 'a "b",\nc'
    assert row["gradient_norm"] == "nan"
    assert row["time"] == ""


# --- troubles of others ---------------------------------------------------------------------------


def test_fc94_rows_of_all_ages_share_one_header_and_stay_valid(tmp_path: Path) -> None:
    """An append repeated the header, and a new column broke the old rows of a metrics file
    (DeepLabCut/DeepLabCut PR 3179). A row says by its keys what it has; the columns are fixed."""
    path = tmp_path / "run.loss.json"
    old = b'{"step":1,"loss":2.5}'
    now = b'{"step":2,"loss":2.25,"time":1.5,"attempt":1,"epoch":1,"arm":"prose","targets_seen":9}'
    later = b'{"step":3,"loss":2.125,"invented_later":{"deep":[1]},"attempt":2}'
    path.write_bytes(b"[\n" + b",\n".join([old, now, later]) + b"\n]\n")
    before = path.read_bytes()
    data = exported(History(path).canonical(), "csv")
    assert data.count(b"step,loss") == 1
    rows = rows_of(data)
    assert [set(row) for row in rows] == [set(COLUMNS)] * 3
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["attempt"] for row in rows] == ["", "1", "2"]
    assert path.read_bytes() == before
    written(path, [Entry(4, 2.0, step_seconds=0.5)])
    assert rows_of(exported(History(path).canonical(), "csv"))[:3] == rows


@pytest.fixture
def resumed_earlier(tmp_path: Path) -> Path:
    """Attempt 1 recorded to step 9, and attempt 2 went on from step 5 on another path to 12."""
    first = [Entry(step, 3.0, attempt=1, epoch=1) for step in range(1, 10)]
    second = [Entry(step, 2.0, attempt=2, epoch=1) for step in range(6, 13)]
    return written(tmp_path / "run.loss.json", first + second)


def test_fc95_rows_of_a_dead_future_are_in_the_raw_file_and_not_in_the_view(
    resumed_earlier: Path,
) -> None:
    """After resuming from an earlier checkpoint the rows of the dead future remained: steps twice
    and out of order (PaddlePaddle/PaddleFormers PR 4744)."""
    history = History(resumed_earlier)
    view = [(one.step, one.attempt) for one in history.canonical()]
    assert view == [(s, 1) for s in range(1, 6)] + [(s, 2) for s in range(6, 13)]
    raw = [(one.step, one.attempt) for one in history.raw()]
    assert raw == [(s, 1) for s in range(1, 10)] + [(s, 2) for s in range(6, 13)]


class MonotonicBackend:
    """A service that drops every step that is not above the highest it has seen."""

    def __init__(self) -> None:
        self.rows: list[Entry] = []

    def log(self, entry: Entry) -> None:
        if not self.rows or entry.step > self.rows[-1].step:
            self.rows.append(entry)


def test_fc96_a_backend_that_only_goes_forward_drops_nothing_and_our_rows_stay(
    resumed_earlier: Path,
) -> None:
    """Re-logged steps were dropped until the old maximum was passed (neptune-ai/neptune-client
    #1330; wandb/wandb #6728, #5632). The view goes only forward; the raw rows are ours to keep."""
    before = resumed_earlier.read_bytes()
    history = History(resumed_earlier)
    view, raw = MonotonicBackend(), MonotonicBackend()
    for entry in history.canonical():
        view.log(entry)
    for entry in history.raw():
        raw.log(entry)
    assert view.rows == list(history.canonical())
    assert [one.loss for one in raw.rows] == [3.0] * 9 + [2.0] * 3  # what the backend would show
    assert resumed_earlier.read_bytes() == before
    assert history.count == 16


@pytest.mark.fault(
    "SV-79", phase="idle", does="exports one value a step, in order, after any resume"
)
@pytest.mark.parametrize("form", ["json", "csv", "andrea"])
def test_fc97_the_exported_view_has_one_value_a_step(resumed_earlier: Path, form: str) -> None:
    """Curves jumped back and only some of the series were purged (tensorflow/tensorboard #3732,
    #1272; lanpa/tensorboardX #185)."""
    data = exported(History(resumed_earlier).canonical(), form)
    if form == "csv":
        steps = [int(row["step"]) for row in rows_of(data)]
    else:
        steps = [row[0] if form == "andrea" else row["step"] for row in json.loads(data)]
    assert steps == list(range(1, 13))


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path_factory.mktemp("finished"))) as made:
        made.faults = "kill@25#1,wrong@22#2"
        assert made.finish() == 0
        yield made


def test_the_command_exports_the_run(finished: Run) -> None:
    rows = json.loads(finished.supervisor("history", "run").stdout)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert {row["attempt"] for row in rows if row["step"] >= 22} == {2}
    raw = json.loads(finished.supervisor("history", "run", "--raw").stdout)
    assert raw == finished.rows()
    assert len(raw) > len(rows)


def test_the_command_takes_a_stretch_and_thins_it(finished: Run) -> None:
    arguments = ("--format", "andrea", "--from", "11", "--to", "30", "--every", "10")
    shown = json.loads(finished.supervisor("history", "run", *arguments).stdout)
    steps = [step for step, _ in shown]
    assert steps[0] == 11
    assert {20, 30} <= set(steps)
    assert len(steps) <= 7


def test_the_command_writes_a_file_and_says_nothing(finished: Run, tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    done = finished.supervisor("history", "run", "--format", "csv", "--output", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(rows_of(path.read_bytes())) == 30


def test_the_command_never_writes_into_the_run(finished: Run) -> None:
    before = finished.ledger_path.read_bytes()
    done = finished.supervisor("history", "run", "--output", str(finished.ledger_path))
    assert done.returncode == 2
    assert "is inside the run directory" in done.stderr
    assert finished.ledger_path.read_bytes() == before


def test_the_command_says_what_is_wrong_with_a_ledger(finished: Run) -> None:
    before = finished.ledger_path.read_bytes()
    finished.ledger_path.write_bytes(before[:-30])
    torn = finished.supervisor("history", "run")
    finished.ledger_path.write_bytes(before.replace(b'"step":3,', b'"step":,', 1))
    damaged = finished.supervisor("history", "run")
    finished.ledger_path.write_bytes(before)
    assert (torn.returncode, len(json.loads(torn.stdout))) == (0, 29)
    assert "a torn row at its end was left out" in torn.stderr
    assert damaged.returncode == 1
    assert damaged.stderr.endswith("entry 3 is damaged; `supervisor verify` says more\n")


def test_a_reader_that_goes_away_gets_no_traceback(finished: Run) -> None:
    with subprocess.Popen(
        finished.command("history", "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=finished.variables(),
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode in (0, 141)
