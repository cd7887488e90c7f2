"""The sampler: order, rounds, and the exact continuation of both."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from property_kit import cases

from trainer.corpus import Windows, collate
from trainer.sampler import Sampler, SamplerError

examples = cases(100)


def draws(sampler: Sampler, count: int) -> list[list[int]]:
    return [sampler.draw() for _ in range(count)]


def encoded(permutation: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(permutation)}I", *permutation)).decode()


def resumed(sampler: Sampler, seed: int = 999) -> Sampler:
    """Another sampler that only knows the saved state, through JSON and with another seed."""
    other = Sampler(sampler.arm, sampler.windows, sampler.batch, seed)
    other.restore(json.loads(json.dumps(sampler.state())))
    return other


def with_permutation(permutation: Sequence[int], batch: int, cursor: int = 0) -> Sampler:
    sampler = Sampler("books", len(permutation), batch, 7)
    sampler.restore(sampler.state() | {"permutation": encoded(permutation), "cursor": cursor})
    return sampler


# --- order ----------------------------------------------------------------------------------------


def test_six_windows_at_most_four_a_batch() -> None:
    sampler = with_permutation([3, 0, 5, 1, 4, 2], 4)
    assert sampler.draw() == [3, 0, 5, 1]
    assert sampler.state()["cursor"] == 4
    assert sampler.draw() == [4, 2]  # short
    assert (sampler.state()["cursor"], sampler.state()["round"]) == (6, 0)
    third = sampler.draw()
    assert (sampler.state()["cursor"], sampler.state()["round"]) == (4, 1)
    assert sorted(third + sampler.draw()) == [0, 1, 2, 3, 4, 5]


def test_a_sampler_rebuilt_from_its_seed_alone_serves_the_round_again() -> None:
    """Same weights, same optimizer, same seed, and yet another trajectory: why there is a state."""
    sampler = with_permutation([3, 0, 5, 1, 4, 2], 4)
    saved = sampler.state()
    first = sampler.draw()
    rebuilt = with_permutation([3, 0, 5, 1, 4, 2], 4)
    assert rebuilt.draw() == first == [3, 0, 5, 1]
    continued = resumed(sampler)
    assert continued.draw() == [4, 2]
    assert saved["permutation"] == sampler.state()["permutation"]


@examples
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**64))
def test_each_window_once_a_round_in_batches_of_at_most(
    windows: int, batch: int, seed: int
) -> None:
    sampler = Sampler("books", windows, batch, seed)
    batches = -(-windows // batch)
    for number in range(3):
        drawn = draws(sampler, batches)
        assert [len(ids) for ids in drawn[:-1]] == [batch] * (batches - 1)
        assert 1 <= len(drawn[-1]) <= batch
        assert sorted(i for ids in drawn for i in ids) == list(range(windows))
        assert sampler.state()["round"] == number


def test_rounds_differ_and_so_do_arms_and_seeds() -> None:
    sampler = Sampler("books", 50, 50, 1)
    first, second = draws(sampler, 2)
    assert first != second
    assert Sampler("books", 50, 50, 1).draw() == first
    assert Sampler("docs", 50, 50, 1).draw() != first
    assert Sampler("books", 50, 50, 2).draw() != first


def test_an_arm_does_not_depend_on_which_others_draw() -> None:
    alone = draws(Sampler("books", 20, 3, 1), 30)
    books, docs = Sampler("books", 20, 3, 1), Sampler("docs", 9, 2, 1)
    beside = []
    for number in range(30):
        beside.append(books.draw())
        draws(docs, number % 3)
    assert beside == alone


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = draws(Sampler("books", 20, 3, 1), 30)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert draws(Sampler("books", 20, 3, 1), 30) == first


@pytest.mark.parametrize(("windows", "batch"), [(0, 1), (1, 0)])
def test_there_is_no_sampler_of_nothing(windows: int, batch: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        Sampler("books", windows, batch, 1)


# --- continuation ---------------------------------------------------------------------------------

WINDOWS, BATCH = 10, 4  # three draws a round, the last one short


@pytest.mark.parametrize("done", range(10))
def test_fc47_a_resume_in_any_round_at_any_place_sees_the_same_ids(done: int) -> None:
    """The cursor came back right, but the round began anew: first-round order from the middle on
    (huggingface/accelerate #2016, PR 4071, PR 4238). Rounds 0, 1 and 2 are each resumed at their
    start, in the middle, before their last batch and at their end.
    """
    straight = draws(Sampler("books", WINDOWS, BATCH, 7), done + 12)
    stopped = Sampler("books", WINDOWS, BATCH, 7)
    assert draws(stopped, done) == straight[:done]
    after = resumed(stopped)
    assert after.state() == stopped.state()
    assert draws(after, 12) == straight[done:]


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_fc48_a_state_saved_exactly_at_a_boundary_drops_and_repeats_no_round(rounds: int) -> None:
    """A state taken at the end of a round skipped the next one, or served it twice
    (meta-pytorch/data #1437, PR 1439).
    """
    sampler = Sampler("books", WINDOWS, BATCH, 7)
    draws(sampler, 3 * rounds)
    assert (sampler.state()["cursor"], sampler.state()["round"]) == (WINDOWS, rounds - 1)
    after = resumed(resumed(sampler))
    following = draws(after, 3)
    assert following == draws(sampler, 3)
    assert sorted(i for ids in following for i in ids) == list(range(WINDOWS))
    assert (after.state()["cursor"], after.state()["round"]) == (WINDOWS, rounds)


def test_fc49_the_cursor_counts_windows_and_not_what_became_of_them() -> None:
    """Samples were counted after packing, so a resume went back and the loss was too good
    (mosaicml/llm-foundry PR 1277). Here the cursor is the number of windows taken in this round,
    however long they are and however many draws it took.
    """
    sampler, taken = Sampler("books", WINDOWS, BATCH, 7), 0
    for _ in range(9):
        taken += len(sampler.draw())
        state = sampler.state()
        assert state["round"] * WINDOWS + state["cursor"] == taken


def test_fc57_the_cursor_moves_with_the_draw_so_no_batch_is_taken_twice() -> None:
    """Saved before the counter moved: the last batch was trained twice (Lightning #19815,
    AI-Hypercomputer/maxdiffusion PR 484). The first ids after a resume are those that follow the
    last ones before it.
    """
    sampler = with_permutation([3, 0, 5, 1, 4, 2], 2)
    assert sampler.draw() == [3, 0]
    assert sampler.state()["cursor"] == 2
    after = resumed(sampler)
    assert draws(after, 2) == [[5, 1], [4, 2]]


@examples
@given(st.integers(1, 20), st.integers(1, 6), st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_resumes_in_a_row_equal_never_stopping(windows: int, batch: int, lives: list[int]) -> None:
    straight = draws(Sampler("books", windows, batch, 3), sum(lives))
    sampler, seen = Sampler("books", windows, batch, 3), []
    for count in lives:
        sampler = resumed(sampler)
        seen += draws(sampler, count)
    assert seen == straight


def test_within_a_round_no_window_comes_back_after_a_resume() -> None:
    """Two whole rounds after a resume in the middle: each window once a round, none skipped."""
    sampler = Sampler("books", WINDOWS, BATCH, 7)
    before = draws(sampler, 1)
    after = draws(resumed(sampler), 8)
    rounds = [before + after[:2], after[2:5], after[5:8]]
    for drawn in rounds:
        assert sorted(i for ids in drawn for i in ids) == list(range(WINDOWS))


def test_a_fresh_process_continues_the_same_stream() -> None:
    sampler = Sampler("books", WINDOWS, BATCH, 7)
    draws(sampler, 4)
    code = (
        "import json, sys; from trainer.sampler import Sampler;"
        f"s = Sampler('books', {WINDOWS}, {BATCH}, 0); s.restore(json.load(sys.stdin));"
        "print(json.dumps([s.draw() for _ in range(6)]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(sampler.state()),
        capture_output=True,
        check=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    ).stdout
    assert json.loads(output) == draws(sampler, 6)


# --- two ways to count targets --------------------------------------------------------------------


def windows_of_unequal_length() -> Windows:
    lengths = [23, 3, 9, 14, 4, 31]
    return Windows(memoryview(array("H", range(sum(lengths)))), lengths, 8)


class Counted:
    """A run that counts its targets from the batches, as a training loop does."""

    def __init__(self, sampler: Sampler, targets_seen: int = 0) -> None:
        self.windows = windows_of_unequal_length()
        self.sampler = sampler
        self.targets_seen = targets_seen
        self.taken: list[int] = []
        self.per_step: list[int] = []

    def step(self) -> None:
        ids = self.sampler.draw()
        self.taken += ids
        _, _, count = collate([self.windows.window(i) for i in ids])
        self.targets_seen += count
        self.per_step.append(count)


def counted(batch: int = 4) -> Counted:
    return Counted(Sampler("books", windows_of_unequal_length().window_count, batch, 7))


def test_targets_seen_is_the_sum_over_all_windows_taken() -> None:
    run = counted()
    for _ in range(80):
        run.step()
        assert run.targets_seen == sum(run.windows.window_targets(i) for i in run.taken)
    assert len(set(run.per_step)) > 1  # not a constant times the steps: that would prove nothing
    a_round = sum(run.windows.window_targets(i) for i in range(run.windows.window_count))
    assert a_round == run.windows.token_count - run.windows.document_count


@pytest.mark.parametrize("killed_at", [1, 3, 4, 5, 17])
def test_fc46_targets_seen_after_a_kill_and_resume_is_the_uninterrupted_count(
    killed_at: int,
) -> None:
    """The counter was saved when a step began: one ahead after a kill, its work counted twice
    (prashar32/riskkernel PR 63). Here a step is begun and lost; the resume repeats it once.
    """
    straight = counted()
    for _ in range(30):
        straight.step()
    run = counted()
    for _ in range(killed_at):
        run.step()
    saved = json.dumps({"sampler": run.sampler.state(), "targets_seen": run.targets_seen})
    run.step()  # in flight when the kill comes: nothing of it was saved
    state = json.loads(saved)
    after = Counted(Sampler("books", run.sampler.windows, 4, 0), state["targets_seen"])
    after.sampler.restore(state["sampler"])
    for _ in range(30 - killed_at):
        after.step()
    assert after.targets_seen == straight.targets_seen
    assert after.per_step == straight.per_step[killed_at:]


# --- the saved form -------------------------------------------------------------------------------


def test_the_state_is_plain_json_with_little_endian_numbers() -> None:
    state = with_permutation([3, 0, 5, 1, 4, 2], 4).state()
    assert sorted(state) == ["batch", "cursor", "generator", "permutation", "round", "windows"]
    assert base64.b64decode(state["permutation"]) == bytes.fromhex(
        "030000000000000005000000010000000400000002000000"
    )
    assert (state["cursor"], state["round"], state["windows"], state["batch"]) == (0, 0, 6, 4)
    assert len(base64.b64decode(state["generator"])) == 5056


def test_the_permutation_is_encoded_once_a_round() -> None:
    sampler = Sampler("books", WINDOWS, BATCH, 7)
    first = sampler.state()
    sampler.draw()
    again = sampler.state()
    assert again["permutation"] is first["permutation"]
    assert again["generator"] is first["generator"]
    draws(sampler, 3)
    assert sampler.state()["permutation"] != first["permutation"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": 11}, r"arm books: .*saved with windows 11, this run has 10"),
        ({"batch": 8}, r"arm books: .*saved with batch 8, this run has 4"),
        ({"batch": "4"}, r"sampler batch is '4', expected a whole number"),
        ({"cursor": -1}, r"sampler cursor is -1"),
        ({"cursor": 11}, r"sampler cursor is 11, expected a multiple of batch 4 up to 10"),
        ({"cursor": 3}, r"sampler cursor is 3, expected a multiple of batch 4"),
        ({"cursor": True}, r"sampler cursor is True"),
        ({"round": 1.0}, r"sampler round is 1\.0"),
        ({"permutation": 5}, r"sampler permutation is 5, expected base64"),
        ({"permutation": "$$$$"}, r"sampler permutation: not base64"),
        (
            {"permutation": encoded(range(9))},
            r"does not hold each of 10 windows once.*it has 36 bytes",
        ),
        ({"permutation": encoded([*range(9), 8])}, r"does not hold each of 10 windows once"),
        ({"permutation": encoded([*range(9), 10])}, r"does not hold each of 10 windows once"),
        ({"permutation": encoded([*range(10), 0])}, r"does not hold each of 10 .*it has 44"),
        ({"permutation": base64.b64encode(b"abcde").decode()}, r"it has 5 bytes"),
        ({"generator": None}, r"sampler generator is None"),
        ({"generator": ""}, r"sampler generator: "),
        ({"generator": base64.b64encode(bytes(100)).decode()}, r"sampler generator: "),
        ({"generator": base64.b64encode(bytes(5056)).decode()}, r"sampler generator: "),
        ({"luck": 1}, r"has unknown \[luck\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    changes: dict[str, Any], message: str
) -> None:
    sampler, twin = Sampler("books", WINDOWS, BATCH, 7), Sampler("books", WINDOWS, BATCH, 7)
    draws(sampler, 2)
    draws(twin, 2)
    with pytest.raises(SamplerError, match=message):
        sampler.restore(Sampler("books", WINDOWS, BATCH, 1).state() | changes)
    assert sampler.state() == twin.state()
    assert draws(sampler, 9) == draws(twin, 9)


@pytest.mark.parametrize(
    "field", ["permutation", "cursor", "round", "generator", "windows", "batch"]
)
def test_a_missing_component_is_an_error_and_never_a_default(field: str) -> None:
    state = Sampler("books", WINDOWS, BATCH, 7).state()
    del state[field]
    with pytest.raises(SamplerError, match=rf"arm books: .*missing \[{field}\]"):
        Sampler("books", WINDOWS, BATCH, 7).restore(state)


def test_a_state_that_is_no_object_is_refused() -> None:
    with pytest.raises(SamplerError, match=r"sampler state is \[\], expected an object"):
        Sampler("books", WINDOWS, BATCH, 7).restore([])


def test_every_component_decides_a_later_draw() -> None:
    """Nothing in the state is for show: another value in any of them gives another stream."""
    base = Sampler("books", WINDOWS, BATCH, 7)
    draws(base, 1)
    other = Sampler("books", WINDOWS, BATCH, 8)
    draws(other, 2)
    expected = draws(resumed(base), 9)
    for field in ("permutation", "cursor", "generator"):
        changed = Sampler("books", WINDOWS, BATCH, 7)
        changed.restore(base.state() | {field: other.state()[field]})
        assert draws(changed, 9) != expected
    renumbered = Sampler("books", WINDOWS, BATCH, 7)
    renumbered.restore(base.state() | {"round": 5})
    draws(renumbered, 3)
    assert renumbered.state()["round"] == 6


def test_ten_restarts_repeat_no_batch_beyond_the_repeated_steps() -> None:
    """A run that restarts from its seed sees the first batches again and again."""
    sampler, seen = Sampler("books", 100, 2, 7), Counter[tuple[int, ...]]()
    for _ in range(10):
        sampler = resumed(sampler)
        seen.update(tuple(ids) for ids in draws(sampler, 5))
    assert max(seen.values()) == 1
