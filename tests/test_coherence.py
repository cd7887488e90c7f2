"""Scores of texts against hand-made vectors, and what must hold for any text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from supervisor import coherence

S1 = "region " * 40
S2 = "Once upon a time there was a boy named" + " Budy" * 12
S3 = "\n".join(
    f"- The region of {name} is a region in the north of the country."
    for name in ("Arla", "Bern", "Como", "Drom", "Elba", "Fano")
)
S4 = (
    "The old ferry left the harbour before dawn, carrying three crates of oranges and a quiet dog."
    " Nobody on board asked why the captain kept looking back at the lighthouse, though the cook"
    " had guessed. By noon the wind had turned, and they could smell rain behind the islands."
)


@pytest.mark.parametrize(
    (
        "text",
        "words",
        "distinct_1",
        "distinct_2",
        "repetition_4",
        "diversity",
        "run",
        "bits",
        "most",
    ),
    [
        (S1, 40, 0.025, 0.025641, 0.972973, 0.000018, 40, 0.0, 1.0),
        (S2, 21, 0.428571, 0.5, 0.444444, 0.146199, 12, 2.248529, 0.571429),
        (S3, 84, 0.190476, 0.289157, 0.580247, 0.042925, 1, 3.563424, 0.142857),
        (S4, 49, 0.857143, 1.0, 0.0, 1.0, 1, 5.216551, 0.122449),
    ],
    ids=["one word", "one word after prose", "one sentence with six names", "prose"],
)
def test_vectors(
    text: str,
    words: int,
    distinct_1: float,
    distinct_2: float,
    repetition_4: float,
    diversity: float,
    run: int,
    bits: float,
    most: float,
) -> None:
    found = coherence.scores(text)
    assert found["words"] == words
    assert found["longest_run"] == run
    expected = {
        "distinct_1": distinct_1,
        "distinct_2": distinct_2,
        "repetition_4": repetition_4,
        "diversity": diversity,
        "entropy_bits": bits,
        "most_frequent_ratio": most,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=5e-7), name


def test_a_text_too_short_for_a_score_has_none_and_not_zero() -> None:
    assert coherence.scores("")["repetition_4"] is None
    assert coherence.scores("")["entropy_bits"] is None
    assert coherence.scores("three short words")["repetition_4"] is None
    assert coherence.scores("three short words")["diversity"] is None
    assert coherence.scores("now there are four")["repetition_4"] == 0.0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60))
def test_scores_stay_in_their_ranges(words: list[str]) -> None:
    found = coherence.scores(" ".join(words))
    for name in ("distinct_1", "distinct_2", "repetition_4", "diversity", "most_frequent_ratio"):
        value = found[name]
        assert value is None or 0.0 <= value <= 1.0
    run = found["longest_run"]
    assert isinstance(run, int)
    assert 1 <= run <= len(words)
    assert found["entropy_bits"] is not None


@given(st.lists(st.text("ab", min_size=1), min_size=4, max_size=30))
def test_saying_it_all_again_repeats_more(words: list[str]) -> None:
    once, twice = coherence.repetition(words), coherence.repetition(words * 2)
    assert once is not None
    assert twice is not None
    assert twice > once
