"""What an attempt appends, what it proves, and where it left the recorded history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from property_kit import cases, scratch

from supervisor.contract import DETERMINISTIC_FIELDS, ContractError, Entry
from supervisor.ledger import Ledger, canonical, read_entries
from supervisor.replay import Merge, Outcome, Taken


def entry(step: int, attempt: int = 2, epoch: int = 1, shift: float = 0.0) -> Entry:
    return Entry(
        step=step,
        loss=5.0 / step + shift,
        time=1.7e9 + step + attempt,
        attempt=attempt,
        epoch=epoch,
        arm="books",
        targets_seen=step * 64,
        learning_rate=0.001,
        gradient_norm=1.25,
        step_seconds=0.01 * attempt,
    )


def history(first: int, last: int, attempt: int = 1, epoch: int = 1) -> dict[int, Entry]:
    return {step: entry(step, attempt, epoch) for step in range(first, last + 1)}


def nothing(step: int) -> None: ...


def outcomes(merge: Merge, *entries: Entry) -> str:
    """The initials of what became of each: a, v, d, r."""
    return "".join(merge.take(item).outcome[0] for item in entries)


def test_a_first_attempt_appends_everything() -> None:
    merge = Merge(1, 1, 0, nothing)
    assert outcomes(merge, *(entry(step, 1) for step in (1, 2, 3))) == "aaa"
    assert merge.last == 3
    assert merge.verified_steps == 0


def test_steps_executed_again_are_verified_and_new_ones_appended() -> None:
    merge = Merge(2, 1, 100, history(101, 103).get)
    assert outcomes(merge, *(entry(step) for step in range(101, 106))) == "vvvaa"
    assert merge.verified_steps == 3


@pytest.mark.parametrize("field", DETERMINISTIC_FIELDS)
def test_the_first_difference_is_reported_once_and_appended_from_there_on(field: str) -> None:
    merge = Merge(2, 1, 100, history(101, 110).get)
    assert outcomes(merge, entry(101), entry(102)) == "vv"
    changed = {"loss": 9.0, "arm": "code", "targets_seen": 1, "learning_rate": 0.5}
    later = replace(entry(103), **{field: changed.get(field)})  # type: ignore[arg-type]
    taken = merge.take(later)
    assert taken == Taken(Outcome.DIVERGED, later, (field,), entry(103, attempt=1))
    assert taken.append
    assert outcomes(merge, *(entry(step) for step in range(104, 112))) == "a" * 8
    assert merge.verified_steps == 2


def test_time_and_speed_are_not_compared_and_nan_equals_nan() -> None:
    nan = float("nan")
    merge = Merge(2, 1, 0, {1: replace(entry(1, 1), gradient_norm=nan, step_seconds=9.0)}.get)
    assert outcomes(merge, replace(entry(1), gradient_norm=nan)) == "v"


def test_the_last_bit_of_a_loss_counts() -> None:
    merge = Merge(2, 1, 2, {3: entry(3, 1)}.get)
    later = replace(entry(3), loss=5.0 / 3 + 2.0**-52)
    assert later.loss != 5.0 / 3
    assert merge.take(later).fields == ("loss",)


def test_another_epoch_is_appended_and_not_compared() -> None:
    merge = Merge(2, 2, 100, history(101, 110, epoch=1).get)
    assert outcomes(merge, *(entry(step, epoch=2) for step in (101, 102))) == "aa"


def test_a_step_below_a_pivot_is_compared_under_the_epoch_that_owned_it() -> None:
    """A fallback below the base of a pivot runs old steps under the old policy again."""
    earlier = history(101, 102, epoch=1) | history(103, 104, epoch=2)
    merge = Merge(2, 2, 100, earlier.get)
    steps = [entry(101), entry(102), entry(103, epoch=2), entry(104, epoch=2), entry(105, epoch=2)]
    assert outcomes(merge, *steps) == "vvvva"


def test_redelivered_lines_of_one_life_count_nothing() -> None:
    merge = Merge(2, 1, 100, history(101, 102).get)
    steps = [entry(step) for step in range(101, 105)]
    assert outcomes(merge, *steps, *steps, steps[-1], entry(105)) == "vvaarrrrra"
    assert (merge.verified_steps, merge.last) == (2, 105)


def test_lines_read_again_by_a_new_life_of_the_supervisor_change_nothing() -> None:
    """Steps 101 and 102 were verified, 103 diverged, 104 was appended; then the supervisor died."""
    merge = Merge(2, 1, 100, history(101, 110).get, own_first=103, own_last=104)
    steps = [entry(101), entry(102), entry(103, shift=1.0), entry(104), entry(105)]
    taken = [merge.take(item) for item in steps]
    assert "".join(item.outcome[0] for item in taken) == "vvrra"
    assert taken[2].fields == ("loss",), "the report may have been lost"
    assert taken[2].earlier == entry(103, attempt=1)
    assert merge.verified_steps == 2


def test_a_receipt_that_changed_since_it_was_merged_is_refused() -> None:
    merge = Merge(2, 1, 100, history(101, 110).get, own_first=103, own_last=104)
    with pytest.raises(ContractError, match="is not any more"):
        merge.take(entry(101, shift=1.0))
    assert merge.last == 100


@pytest.mark.parametrize(("steps", "expected"), [([102], 101), ([101, 103], 102), ([99], 101)])
def test_a_gap_is_refused(steps: list[int], expected: int) -> None:
    merge = Merge(2, 1, 100, nothing)
    *good, bad = steps
    for step in good:
        merge.take(entry(step))
    with pytest.raises(ContractError, match=f"step {bad}, expected {expected}"):
        merge.take(entry(bad))
    assert merge.last == expected - 1


def test_a_line_of_another_attempt_is_refused() -> None:
    merge = Merge(2, 1, 100, nothing)
    with pytest.raises(ContractError, match="hold step 101 of attempt 1"):
        merge.take(entry(101, attempt=1))


def test_a_trainer_that_knows_nothing_of_us_gets_attempt_and_epoch() -> None:
    merge = Merge(7, 3, 0, nothing)
    assert merge.take(Entry(1, 2.5)).entry == Entry(1, 2.5, attempt=7, epoch=3)
    assert merge.take(Entry(2, 2.5, epoch=4)).entry == Entry(2, 2.5, attempt=7, epoch=4)


# --- with the ledger ---


def merge_into(ledger: Ledger, attempt: int, base: int, epoch: int = 1) -> Merge:
    tail = ledger.tail(base, attempt)
    return Merge(attempt, epoch, base, tail.earlier, tail.own_first, tail.own_last)


def live(path: Path, attempt: int, base: int, steps: list[Entry], deaths: set[int]) -> int:
    """One attempt with its receipts; the supervisor dies and comes back before each line in
    `deaths`, reading the receipts from their start again. Returns the verified steps."""
    ledger = Ledger.open(path)
    done = 0
    while True:
        merge = merge_into(ledger, attempt, base)
        for position, item in enumerate(steps):
            if position in deaths and position >= done:
                done = position + 1
                ledger.close()
                ledger = Ledger.open(path)
                break
            taken = merge.take(item)
            if taken.append:
                ledger.append([taken.entry])
        else:
            ledger.close()
            return merge.verified_steps


lives = st.lists(
    st.tuples(
        st.integers(0, 8),  # steps from the base
        st.integers(0, 3),  # how far behind the newest step the base lies
        st.none() | st.integers(0, 8),  # where this attempt starts to differ
        st.sets(st.integers(0, 8), max_size=3),
    ),
    max_size=5,
)


@pytest.mark.fault(
    "SV-79", phase="any", does="has one row a step, that of its newest execution, in any order"
)
@cases(60)
@given(lives)
def test_history_is_what_the_newest_execution_of_each_step_said(
    plan: list[tuple[int, int, int | None, set[int]]],
) -> None:
    """The model: a table from step to deterministic fields, where a changed step wipes what lies
    beyond it. The ledger's canonical view must agree, with as few rows as possible."""
    with scratch() as place:
        path = place / "run.loss.json"
        model: dict[int, float] = {}
        appended = 0
        for attempt, (length, behind, differs, deaths) in enumerate(plan, start=1):
            base = max(0, len(model) - behind)
            steps = [
                entry(
                    base + k,
                    attempt,
                    shift=float(attempt) if differs is not None and k > differs else 0.0,
                )
                for k in range(1, length + 1)
            ]
            verified = 0
            appending = False
            for item in steps:
                appending = appending or model.get(item.step) != item.loss
                if appending:
                    model = {step: loss for step, loss in model.items() if step < item.step}
                    model[item.step] = item.loss
                appended += appending
                verified += not appending
            assert live(path, attempt, base, steps, deaths) == verified
        if plan:
            raw, torn = read_entries(path)
            assert torn is None
            assert {item.step: item.loss for item in canonical(raw)} == model
            assert len(raw) == appended


def test_lines_of_an_attempt_that_later_ones_followed_change_nothing_either(tmp_path: Path) -> None:
    """Three attempts of a trainer that was alone: the second diverged from the first, the third
    fell back below the base of the second. The supervisor dies before it says so, and reads all
    three again."""
    attempts = [
        (1, 0, [entry(step, 1) for step in range(1, 11)]),
        (2, 5, [entry(step, 2, shift=1.0) for step in range(6, 13)]),
        (3, 2, [entry(step, 3, shift=2.0 * (step > 3)) for step in range(3, 9)]),
    ]
    path = tmp_path / "run.loss.json"
    verified = [live(path, attempt, base, steps, set()) for attempt, base, steps in attempts]
    assert verified == [0, 0, 1]
    before = path.read_bytes()
    assert [
        live(path, attempt, base, steps, set()) for attempt, base, steps in attempts
    ] == verified
    assert path.read_bytes() == before


@pytest.mark.fault(
    "SV-79", phase="running", does="adds nothing for a step that comes out the same again"
)
def test_a_deterministic_run_has_exactly_one_entry_a_step(tmp_path: Path) -> None:
    path = tmp_path / "run.loss.json"
    for attempt, (base, last) in enumerate([(0, 120), (100, 150), (100, 180), (150, 200)], start=1):
        steps = [entry(step, attempt) for step in range(base + 1, last + 1)]
        live(path, attempt, base, steps, set())
    raw, _ = read_entries(path)
    assert [item.step for item in raw] == list(range(1, 201))
