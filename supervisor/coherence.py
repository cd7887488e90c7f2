"""How a text repeats itself: scores of one text, pure.

What may live here: counts over words and n-grams. Whether a score is an alarm is decided elsewhere.

Words are split at white space, case kept; n-grams overlap. A text too short for a score has None,
not 0: nothing was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[start:] for start in range(n)), strict=False))


def distinct(words: Sequence[str], n: int) -> float | None:
    """Different n-grams over all n-grams, from above 0 to 1."""
    found = ngrams(words, n)
    return len(set(found)) / len(found) if found else None


def repetition(words: Sequence[str], n: int = 4) -> float | None:
    """rep-n = 1 - distinct-n: the share of n-grams that occurred before (seq-rep-n of Welleck et
    al., 2019)."""
    share = distinct(words, n)
    return None if share is None else 1.0 - share


def longest_run(words: Sequence[str]) -> int:
    """How often the same word follows itself, at most."""
    longest = run = 0
    previous: str | None = None
    for word in words:
        run = run + 1 if word == previous else 1
        previous = word
        longest = max(longest, run)
    return longest


def entropy_bits(words: Sequence[str]) -> float | None:
    """Shannon entropy of the words, in bits a word."""
    if not words:
        return None
    counts = Counter(words)
    return -math.fsum(c / len(words) * math.log2(c / len(words)) for c in counts.values()) or 0.0


def scores(text: str) -> dict[str, float | int | None]:
    """All scores of one text, for the record of a sample audit."""
    words = text.split()
    pairs = {n: repetition(words, n) for n in (2, 3, 4)}
    diversity = None
    if all(value is not None for value in pairs.values()):
        diversity = math.prod(1.0 - value for value in pairs.values() if value is not None)
    most = max(Counter(words).values(), default=0)
    return {
        "words": len(words),
        "distinct_1": distinct(words, 1),
        "distinct_2": distinct(words, 2),
        "repetition_4": pairs[4],
        "diversity": diversity,
        "longest_run": longest_run(words),
        "most_frequent_ratio": most / len(words) if words else None,
        "entropy_bits": entropy_bits(words),
    }
