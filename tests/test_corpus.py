"""Arms: documents and their order, the held-out slice, windows, batches, and the token cache."""

from __future__ import annotations

import glob
import json
import math
import os
import random
import re
import subprocess
import sys
import sysconfig
from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from property_kit import cases

from trainer import corpus, documents, tokenizer
from trainer.corpus import IGNORED_TARGET, Arm, DataError, Windows, collate, load_arm
from trainer.tokenizer import Tokenizer

examples = cases(200)

BYTES = tokenizer.load("bytes")
SEPARATOR = 256


def arm(
    base: Path,
    *files: str,
    builtin: str | None = None,
    rule: Tokenizer = BYTES,
    context: int = 8,
    held: float = 0.0,
    cache: Path | None = None,
) -> Arm:
    return load_arm(
        "books",
        files=files,
        builtin=builtin,
        tokenizer=rule,
        context=context,
        holdout_fraction=held,
        base=base,
        cache=cache,
    )


def write(base: Path, **texts: str | bytes) -> Path:
    """Files named by keyword, `a__b_txt` for a/b.txt."""
    for name, text in texts.items():
        path = base / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return base


def texts(windows: Windows) -> list[bytes]:
    """The documents again, put together from their windows."""
    found: list[bytes] = []
    for number in range(windows.window_count):
        ids = windows.window(number).tolist()
        begins = ids[0] == SEPARATOR
        found += [b""] if begins else []
        found[-1] += bytes(i for i in ids[1:] if i != SEPARATOR)
    return found


def in_slice(document: bytes, fraction: float) -> bool:
    return int.from_bytes(sha256(document).digest()[:8], "big") / 2**64 < fraction


# --- documents ------------------------------------------------------------------------------------


def test_a_text_file_is_one_document_between_separators(tmp_path: Path) -> None:
    write(tmp_path, one_txt="ab", two_md="# c\n")
    found = arm(tmp_path, "*")
    assert [found.window(i).tolist() for i in range(found.window_count)] == [
        [256, 97, 98, 256],
        [256, 35, 32, 99, 10, 256],
    ]
    assert (found.name, found.document_count, found.token_count) == ("books", 2, 10)


def test_json_lines_hold_one_document_a_line(tmp_path: Path) -> None:
    lines = ['{"text": "é", "id": 1}', "", '{"text": ""}', '  {"text": "a\\nb"}\r']
    write(tmp_path, x_jsonl="\n".join(lines))
    assert texts(arm(tmp_path, "x.jsonl")) == ["é".encode(), b"a\nb"]


def test_documents_are_bytes_as_they_stand(tmp_path: Path) -> None:
    write(tmp_path, latin_txt="caf\xe9".encode("latin-1"))
    assert texts(arm(tmp_path, "latin.txt")) == [b"caf\xe9"]


def test_empty_files_are_no_documents(tmp_path: Path) -> None:
    write(tmp_path, a_txt="", b_txt="b", c_txt="")
    assert texts(arm(tmp_path, "*.txt")) == [b"b"]


def test_overlapping_globs_take_a_file_once(tmp_path: Path) -> None:
    write(tmp_path, a__x_txt="x", a__y_txt="y")
    found = arm(tmp_path, "a/*.txt", "**/*.txt", "a/../a/x.txt", str(tmp_path / "a" / "y.txt"))
    assert texts(found) == [b"x", b"y"]


def test_a_base_directory_may_have_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    assert texts(arm(write(tmp_path / "run [1]*", a_txt="x"), "*.txt")) == [b"x"]


def test_a_file_may_have_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    base = write(tmp_path, **{"notes [1]_txt": "one"})
    assert texts(arm(base, "notes [1].txt")) == [b"one"]
    write(tmp_path, **{"notes 1_txt": "what the pattern matches"})
    assert texts(arm(base, "notes [1].txt")) == [b"what the pattern matches"]


def test_order_is_by_relative_path_and_not_by_pattern(tmp_path: Path) -> None:
    write(tmp_path, b_txt="b", a_md="a", c__a_txt="ca")
    assert texts(arm(tmp_path, "**/*.txt", "*.md")) == [b"a", b"b", b"ca"]


def test_fc59_a_shuffled_listing_gives_the_same_order_and_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a directory listing differs between machines and file systems, so a resumed
    run saw other data (huggingface/datasets #3857, pytorch/vision #192).
    """
    write(tmp_path, **{f"d{number}__f_txt": f"text {number}" for number in range(20)})
    straight = arm(tmp_path, "**/*.txt")
    shuffler, real_glob = random.Random(1), glob.glob
    orders = set()

    def shuffled(*arguments: Any, **options: Any) -> list[str]:
        found = real_glob(*arguments, **options)
        shuffler.shuffle(found)
        orders.add(tuple(found))
        return found

    monkeypatch.setattr(documents, "glob", shuffled)
    for _ in range(5):
        again = arm(tmp_path, "**/*.txt")
        assert (again.digest, texts(again)) == (straight.digest, texts(straight))
    assert len(orders) > 5  # the listings did differ


def test_fc59_changed_content_has_another_digest(tmp_path: Path) -> None:
    """The other half of huggingface/datasets #3857: data that did change must not pass as the
    same. Content, an added or removed document and another order each show in the digest.
    """
    before = arm(write(tmp_path / "0", a_txt="x", b_txt="y"), "*.txt").digest
    others = [
        arm(write(tmp_path / "1", a_txt="x", b_txt="z"), "*.txt").digest,
        arm(write(tmp_path / "2", a_txt="y", b_txt="x"), "*.txt").digest,
        arm(write(tmp_path / "3", a_txt="x", b_txt="y", c_txt="y"), "*.txt").digest,
        arm(write(tmp_path / "4", a_txt="xy"), "*.txt").digest,
    ]
    assert len({before, *others}) == 5


def test_the_digest_is_over_the_documents_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, a_txt="x", b_txt="y")
    found = arm(tmp_path, "*.txt")
    each = b"".join(sha256(text).digest() for text in (b"x", b"y"))
    assert found.digest == sha256(each).hexdigest()
    assert arm(tmp_path, "*.txt", context=3, held=0.5).digest == found.digest
    other = tokenizer.SegmentTokenizer([b"xy"], "")
    assert arm(tmp_path, "*.txt", rule=other).digest == found.digest


# --- errors ---------------------------------------------------------------------------------------


def test_a_pattern_without_a_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, a_txt="x")
    (tmp_path / "folder.md").mkdir()
    for pattern in ("*.md", "gone.txt"):
        with pytest.raises(
            DataError, match=re.escape(f"arm books: no file matches {pattern!r} in {tmp_path}")
        ):
            arm(tmp_path, "a.txt", pattern)


def test_an_arm_without_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, a_txt="", b_jsonl='{"text": ""}\n')
    with pytest.raises(DataError, match="arm books: no text in"):
        arm(tmp_path, "*")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"arm books: x\.jsonl:3: not JSON"),
        ('"text"', r"x\.jsonl:3: expected an object with a field text"),
        ('{"body": "a"}', r"x\.jsonl:3: expected an object with a field text"),
        ('{"text": null}', r"x\.jsonl:3: expected an object with a field text"),
        ('{"text": "\\ud800"}', r"x\.jsonl:3: not JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: str, message: str) -> None:
    write(tmp_path, x_jsonl='{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        arm(tmp_path, "x.jsonl")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: No such file"):
        arm(tmp_path, "*.txt")


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Reading one blocks until somebody writes, and a trainer that blocks obeys no stop."""
    write(tmp_path, a_txt="x")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"arm books: .*b\.txt is not a regular file"):
        arm(tmp_path, "*.txt")


def test_a_binary_file_is_not_taken_for_text(tmp_path: Path) -> None:
    write(tmp_path, a_gz=b"\x1f\x8b\x00\x00")
    with pytest.raises(DataError, match=r"a\.gz holds NUL bytes; expected text"):
        arm(tmp_path, "*")


def test_files_or_builtin_and_not_both(tmp_path: Path) -> None:
    for files, builtin in (((), None), (("*.txt",), "python-docs")):
        with pytest.raises(DataError, match="arm books: set either files or builtin"):
            arm(tmp_path, *files, builtin=builtin)
    with pytest.raises(DataError, match="builtin is 'linux', expected one of python-docs"):
        arm(tmp_path, builtin="linux")


def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a_txt="x")
    real_lookup = corpus._read_cache

    def changing(path: Path) -> bytearray | None:
        write(tmp_path, a_txt="y")
        return real_lookup(path)

    monkeypatch.setattr(corpus, "_read_cache", changing)
    with pytest.raises(DataError, match="arm books: a file changed while it was read"):
        arm(tmp_path, "*.txt", cache=tmp_path / "cache")


@pytest.mark.parametrize(("context", "held"), [(0, 0.1), (8, 1.0), (8, -0.1), (8, math.nan)])
def test_numbers_out_of_range_are_our_callers_fault(
    tmp_path: Path, context: int, held: float
) -> None:
    with pytest.raises(ValueError, match="context"):
        arm(write(tmp_path, a_txt="x"), "*.txt", context=context, held=held)


# --- builtin corpora ------------------------------------------------------------------------------


def test_python_docs_are_the_topics_in_their_order(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    found = arm(tmp_path, builtin="python-docs", context=64)
    assert texts(found) == [topics[name].encode() for name in sorted(topics)]


def test_python_source_is_the_top_level_library_sorted_by_name(tmp_path: Path) -> None:
    library = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda path: path.name)
    found = arm(tmp_path, builtin="python-source", context=4096)
    assert texts(found) == [content for path in library if (content := path.read_bytes())]


def test_docstrings_come_in_the_order_of_their_lines() -> None:
    source = b'''# -*- coding: latin-1 -*-
"""Module."""
class A:
    """Caf\xe9."""
    def inner(self):
        """Inner
           indented."""
        assert "x" is "x", "a syntax warning that is not ours"
async def b():
    """Async."""
def none(): return "not a docstring"
'''
    expected = "Module.\n\nCafé.\n\nInner\nindented.\n\nAsync."
    assert documents._docstrings(source).decode() == expected
    assert documents._docstrings(b"x = 1\n") == b""


def test_python_docstrings_are_extracted_once_and_then_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    write(library, b_py='"""Second."""', a_py='"""First."""', c_py="x = 1", d__e_py='"""Deep."""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    options: dict[str, Any] = {"builtin": "python-docstrings", "cache": tmp_path / "cache"}
    first = arm(tmp_path, **options)
    assert texts(first) == [b"First.", b"Second."]

    def unexpected(source: bytes) -> bytes:
        raise AssertionError("extracted in spite of the cache")

    with monkeypatch.context() as patch:
        patch.setattr(documents, "_docstrings", unexpected)
        assert texts(arm(tmp_path, **options)) == [b"First.", b"Second."]
        patch.setattr(sys, "version_info", (3, 99, 0))
        with pytest.raises(AssertionError, match="in spite of the cache"):
            arm(tmp_path, **options)
    write(library, c_py='"""Third."""')
    assert texts(arm(tmp_path, **options)) == [b"First.", b"Second.", b"Third."]


# --- the held-out slice ---------------------------------------------------------------------------


def sides(tmp_path: Path, documents: Sequence[str], fraction: float) -> tuple[set[str], set[str]]:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    found = arm(write(tmp_path, x_jsonl=lines), "x.jsonl", held=fraction)
    trained, held = texts(found), texts(found.heldout)
    assert len(trained) + len(held) == len(documents)
    return {text.decode() for text in trained}, {text.decode() for text in held}


def test_documents_are_held_out_by_their_own_digest(tmp_path: Path) -> None:
    many = [f"document {number}" for number in range(400)]
    _, held = sides(tmp_path, many, 0.25)
    assert held == {text for text in many if in_slice(text.encode(), 0.25)}
    assert 70 <= len(held) <= 130
    # The same document is on the same side whatever stands beside it.
    assert sides(tmp_path, many[::-1][:200], 0.25)[1] == held & set(many[200:])


def test_a_larger_slice_only_adds(tmp_path: Path) -> None:
    many = [f"document {number}" for number in range(60)]
    assert sides(tmp_path, many, 0.1)[1] < sides(tmp_path, many, 0.4)[1]


def test_one_of_few_is_held_out_all_the_same(tmp_path: Path) -> None:
    few = ["one", "two", "three"]
    assert not any(in_slice(text.encode(), 1e-9) for text in few)
    trained, held = sides(tmp_path, few, 1e-9)
    assert held == {min(few, key=lambda text: sha256(text.encode()).digest())}
    assert trained == set(few) - held


def test_one_of_few_is_trained_on_all_the_same(tmp_path: Path) -> None:
    few = ["one", "two"]
    assert all(in_slice(text.encode(), 0.9999) for text in few)
    trained, held = sides(tmp_path, few, 0.9999)
    assert (len(trained), len(held)) == (1, 1)


def test_a_single_document_is_trained_on(tmp_path: Path) -> None:
    assert sides(tmp_path, ["alone"], 0.9999) == ({"alone"}, set())
    assert sides(tmp_path, ["same", "same", "same"], 0.9999) == ({"same"}, set())


def test_equal_documents_are_never_on_both_sides(tmp_path: Path) -> None:
    trained, held = sides(tmp_path, ["a", "b", "a", "b", "a", "c"], 1e-9)
    assert not trained & held
    assert held


def test_no_slice_means_nothing_held_out(tmp_path: Path) -> None:
    found = arm(write(tmp_path, a_txt="x", b_txt="y"), "*.txt", held=0.0)
    assert (found.heldout.window_count, found.heldout.token_count) == (0, 0)
    assert found.heldout_byte_entropy is None


def test_held_out_windows_have_the_same_interface(tmp_path: Path) -> None:
    found = arm(write(tmp_path, a_txt="x" * 20, b_txt="y" * 20), "*.txt", held=1e-9)
    assert found.heldout.document_count == found.document_count == 1
    assert found.heldout.window_count == found.window_count == 3
    assert [found.heldout.window_targets(i) for i in range(3)] == [8, 8, 5]


def test_entropy_of_held_out_bytes(tmp_path: Path) -> None:
    write(tmp_path, a_txt="aab", b_txt="aab")
    assert arm(tmp_path, "*.txt", held=0.5).heldout_byte_entropy is None  # equal: both trained on
    halves = arm(write(tmp_path / "2", a_txt="abab", b_txt="cdcd"), "*.txt", held=1e-9)
    assert halves.heldout_byte_entropy == pytest.approx(math.log(2))
    skewed = corpus._byte_entropy([b"aa", b"ab"])
    assert skewed == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


# --- windows --------------------------------------------------------------------------------------


def windows_of(lengths: Sequence[int], context: int) -> tuple[Windows, list[list[int]]]:
    """Windows over documents whose token ids count up, and those documents."""
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    contents = [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
    flat = memoryview(bytearray(2 * sum(lengths))).cast("H")
    flat[:] = memoryview(array("H", [i for content in contents for i in content]))
    return Windows(flat, lengths, context), contents


def test_windows_overlap_by_one_token_and_the_last_is_shorter() -> None:
    windows, _ = windows_of([10, 3, 5], 4)
    assert [windows.window(i).tolist() for i in range(windows.window_count)] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9],
        [10, 11, 12],
        [13, 14, 15, 16, 17],
    ]
    assert [windows.window_targets(i) for i in range(5)] == [4, 4, 1, 2, 4]


@examples
@given(st.lists(st.integers(3, 40), min_size=1, max_size=12), st.integers(1, 12))
def test_every_token_after_the_first_is_a_target_exactly_once(
    lengths: list[int], context: int
) -> None:
    windows, contents = windows_of(lengths, context)
    targets: Counter[int] = Counter()
    for number in range(windows.window_count):
        ids = windows.window(number).tolist()
        assert 2 <= len(ids) <= context + 1
        assert windows.window_targets(number) == len(ids) - 1
        assert all(later == earlier + 1 for earlier, later in pairwise(ids))
        targets.update(ids[1:])
    assert targets == Counter(i for content in contents for i in content[1:])
    assert windows.document_count == len(lengths)
    assert windows.token_count == sum(lengths)


@pytest.mark.parametrize("number", [-1, 5])
def test_a_window_outside_the_count_is_an_error(number: int) -> None:
    windows, _ = windows_of([10, 3, 5], 4)
    with pytest.raises(IndexError, match=f"window {number} of 5"):
        windows.window(number)


def test_a_wide_vocabulary_is_read_back_whole(tmp_path: Path) -> None:
    wide = tokenizer.SegmentTokenizer([b"%05d" % number for number in range(66_000)], "")
    found = arm(write(tmp_path, a_txt="65999x"), "a.txt", rule=wide, cache=tmp_path / "cache")
    again = arm(tmp_path, "a.txt", rule=wide, cache=tmp_path / "cache")
    for side in (found, again):
        assert side.window(0).tolist() == [256, 257 + 65_999, 120, 256]
        inputs, targets, _ = collate([side.window(0)])
        assert inputs.tolist() == [[256, 66_256, 120]]
        assert targets.tolist() == [[66_256, 120, 256]]


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_is_padded_where_windows_are_shorter() -> None:
    windows, _ = windows_of([10, 3], 4)
    inputs, targets, count = collate([windows.window(i) for i in (0, 2, 3)])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[0, 1, 2, 3], [8, 0, 0, 0], [10, 11, 0, 0]]
    ignored = IGNORED_TARGET
    assert targets.tolist() == [
        [1, 2, 3, 4],
        [9, ignored, ignored, ignored],
        [11, 12, ignored, ignored],
    ]
    assert count == 7


@examples
@given(st.lists(st.integers(3, 30), min_size=1, max_size=6), st.integers(1, 9))
def test_a_batch_counts_its_targets(lengths: list[int], context: int) -> None:
    windows, _ = windows_of(lengths, context)
    numbers = range(windows.window_count)
    inputs, targets, count = collate([windows.window(i) for i in numbers])
    assert inputs.shape == targets.shape
    assert count == sum(windows.window_targets(i) for i in numbers)
    assert count == int((targets != IGNORED_TARGET).sum())


def test_a_batch_is_a_copy(tmp_path: Path) -> None:
    found = arm(write(tmp_path, a_txt="abc"), "a.txt")
    collate([found.window(0)])[0].zero_()
    assert found.window(0).tolist() == [256, 97, 98, 99, 256]


# --- the cache ------------------------------------------------------------------------------------


def same(first: Arm, second: Arm) -> bool:
    return (
        first.digest == second.digest
        and first.heldout_byte_entropy == second.heldout_byte_entropy
        and texts(first) == texts(second)
        and texts(first.heldout) == texts(second.heldout)
    )


class Encodings:
    """A tokenizer that counts how often it is asked."""

    def __init__(self) -> None:
        self.vocabulary, self.special = BYTES.vocabulary, BYTES.special
        self.rule, self.digest = BYTES.rule, BYTES.digest
        self.count = 0

    def encode(self, text: bytes) -> Any:
        self.count += 1
        return BYTES.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return BYTES.decode(ids)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data", a_txt="first text", b_txt="second", c_txt="third one")


def test_a_second_load_encodes_nothing_and_is_the_same(data: Path, tmp_path: Path) -> None:
    counting, cache = Encodings(), tmp_path / "cache"
    first = arm(data, "*.txt", rule=counting, held=0.3, cache=cache)
    assert counting.count == 3
    second = arm(data, "*.txt", rule=counting, held=0.3, cache=cache)
    assert counting.count == 3
    assert same(first, second)
    assert same(first, arm(data, "*.txt", held=0.3))
    assert [path.suffix for path in cache.iterdir()] == [".tokens"]


def test_one_cache_serves_every_context(data: Path, tmp_path: Path) -> None:
    arm(data, "*.txt", cache=tmp_path, context=8)
    counting = Encodings()
    assert arm(data, "*.txt", rule=counting, cache=tmp_path, context=2).window_count > 6
    assert counting.count == 0


def test_whatever_changes_tokens_misses_the_cache(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    arm(data, "*.txt", cache=cache)
    arm(data, "*.txt", cache=cache, held=0.5)
    arm(data, "*.txt", cache=cache, rule=tokenizer.SegmentTokenizer([b"ir"], ""))
    monkeypatch.setattr(corpus, "EXTRACTION_VERSION", documents.EXTRACTION_VERSION + 1)
    arm(data, "*.txt", cache=cache)
    write(data, a_txt="First text")
    changed = arm(data, "*.txt", cache=cache)
    assert texts(changed)[0] == b"First text"
    assert len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow", "foreign"])
def test_a_damaged_cache_is_built_anew(data: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    first = arm(data, "*.txt", held=0.3, cache=cache)
    (path,) = cache.iterdir()
    good = path.read_bytes()
    place = len(good) // 2
    if damage == "foreign":
        arm(data, "a.txt", cache=tmp_path / "other")
        ((other),) = (tmp_path / "other").iterdir()
        bad = other.read_bytes()
    else:
        bad = {
            "flip": good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :],
            "cut": good[:-3],
            "empty": b"",
            "grow": good + b"\0",
        }[damage]
    path.write_bytes(bad)
    assert same(first, arm(data, "*.txt", held=0.3, cache=cache))
    assert path.read_bytes() == good


def test_one_flipped_bit_anywhere_is_noticed(data: Path, tmp_path: Path) -> None:
    arm(data, "*.txt", held=0.3, cache=tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    good = path.read_bytes()
    key = json.loads(good.split(b"\n")[1])["key"]
    assert corpus._unpack(bytearray(good), key) is not None
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        assert corpus._unpack(bad, key) is None


def test_a_cache_that_cannot_be_written_warns_and_goes_on(data: Path, tmp_path: Path) -> None:
    blocked = write(tmp_path, file_txt="in the way") / "file.txt"
    with pytest.warns(RuntimeWarning, match=r"token cache .*file\.txt"):
        found = arm(data, "*.txt", cache=blocked)
    assert same(found, arm(data, "*.txt"))


def test_a_failed_write_leaves_nothing_behind(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        arm(data, "*.txt", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_cache_nothing_is_written(data: Path, tmp_path: Path) -> None:
    arm(data, "*.txt")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "a.txt", "b.txt", "c.txt",
    ]  # fmt: skip


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert corpus.cache_directory() == Path("/somewhere/trainer-supervisor")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/users/one")
    assert corpus.cache_directory() == Path("/users/one/.cache/trainer-supervisor")


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert corpus.cache_directory() is None


# --- across processes -----------------------------------------------------------------------------

CHECK = """
import sys
from pathlib import Path
from trainer import corpus, tokenizer
base, cache = map(Path, sys.argv[1:])
found = corpus.load_arm("books", files=["*.txt"], tokenizer=tokenizer.load("bytes"), context=8,
                        holdout_fraction=0.3, base=base, cache=cache)
assert not {"torch", "numpy"} & set(sys.modules), "arms must be checkable without torch"
print(found.digest, found.window_count, found.heldout.window_count, found.window(0).tolist())
"""


def test_another_process_sees_the_same_arm_without_torch(data: Path, tmp_path: Path) -> None:
    found = arm(data, "*.txt", held=0.3)
    expected = f"{found.digest} {found.window_count} {found.heldout.window_count}"
    for seed in ("1", "2"):  # the second one meets the first one's cache
        output = subprocess.run(
            [sys.executable, "-W", "error", "-c", CHECK, str(data), str(tmp_path / "cache")],
            capture_output=True,
            check=True,
            text=True,
            cwd=Path(__file__).parent.parent,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        assert output.strip() == f"{expected} {found.window(0).tolist()}"


def test_the_repetition_of_an_arm_is_that_of_its_training_text(tmp_path: Path) -> None:
    (tmp_path / "again.txt").write_text("the same line of words once more\n" * 50)
    (tmp_path / "prose.txt").write_text(" ".join(f"word{number}" for number in range(400)))
    words = tokenizer.load("bytes")

    def repetition(name: str) -> float:
        return load_arm(
            name,
            files=(f"{name}.txt",),
            tokenizer=words,
            context=16,
            holdout_fraction=0.0,
            base=tmp_path,
            cache=None,
        ).repetition

    assert repetition("again") > 0.95
    assert repetition("prose") == 0.0
