"""Tokenizers: ids, losslessness, longest match, digests, and what is said of bad files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from property_kit import cases

from trainer import tokenizer
from trainer.tokenizer import SEGMENT_BYTES_MAX, Tokenizer, TokenizerError

examples = cases(200)


def segments_file(directory: Path, entries: Any, name: str = "segments.json") -> Path:
    path = directory / name
    path.write_text(json.dumps(entries))
    return path


def segments(directory: Path, *entries: str) -> Tokenizer:
    return tokenizer.load("segments", segments_file(directory, list(entries)))


def word_level(directory: Path, words: dict[str, int]) -> Path:
    """A Hugging Face file small enough to read: words split at white space."""
    path = directory / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
            }
        )
    )
    return path


# --- bytes ----------------------------------------------------------------------------------------


def test_bytes_are_their_own_ids() -> None:
    plain = tokenizer.load("bytes")
    assert plain.encode(b"\x00a\xff") == array("H", [0, 97, 255])
    assert (plain.vocabulary, plain.special) == (257, 256)
    assert plain.rule == {"kind": "bytes", "vocabulary": 257, "special": 256}


@examples
@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    plain = tokenizer.load("bytes")
    assert (
        plain.decode(list(plain.encode(text.encode(errors="replace"))))
        == text.encode(errors="replace").decode()
    )


def test_broken_utf8_shows_as_replacement_characters() -> None:
    assert tokenizer.load("bytes").decode([0xC3, 0xA9, 0xFF, 0x61]) == "é\ufffda"


def test_the_separator_has_no_text() -> None:
    assert tokenizer.load("bytes").decode([256, 104, 256, 105]) == "hi"


@pytest.mark.parametrize("bad", [257, -1])
def test_an_id_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(
        ValueError, match=f"id {bad} at position 1 is outside the vocabulary of 257"
    ):
        tokenizer.load("bytes").decode([104, bad])


def test_bytes_have_no_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.file is .*but kind 'bytes' has no file"):
        tokenizer.load("bytes", tmp_path / "x.json")


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'bpe', expected one of bytes, segments, json"):
        tokenizer.load("bpe")


# --- segments -------------------------------------------------------------------------------------


def test_segments_follow_the_bytes_and_the_separator(tmp_path: Path) -> None:
    found = segments(tmp_path, "ing", "the ", "né")
    assert (found.vocabulary, found.special) == (260, 256)
    assert list(found.encode("the thing né!".encode())) == [258, 116, 104, 257, 32, 259, 33]
    assert found.decode([258, 256, 116, 104, 257]) == "the thing"


def test_the_longest_segment_wins_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    for entries in (["a", "ab", "abcd"], ["abcd", "ab", "a"]):
        found = segments(tmp_path, *entries)
        texts = {number: text for number, text in enumerate(entries, start=257)}
        assert [texts.get(i, chr(i)) for i in found.encode(b"abcdabcab")] == [
            "abcd", "ab", "c", "ab",
        ]  # fmt: skip


def test_a_longer_match_that_fails_falls_back_to_the_last_that_held(tmp_path: Path) -> None:
    found = segments(tmp_path, "in", "international", "inter")
    assert list(found.encode(b"internat")) == [259, *b"nat"]
    assert list(found.encode(b"int")) == [257, *b"t"]


def test_characters_that_mean_something_in_patterns_are_only_characters(tmp_path: Path) -> None:
    found = segments(tmp_path, ".*", "(?:", "\n\n", "[a]", "\\d", "|", "a|b", "$")
    text = b"x.*(?:\n\n[a]\\d|a|b$\n."
    expected = [120, 257, 258, 259, 260, 261, 262, 263, 264, 10, 46]
    assert list(found.encode(text)) == expected
    assert found.decode(expected).encode() == text


def test_an_empty_list_of_segments_is_the_byte_tokenizer(tmp_path: Path) -> None:
    found = segments(tmp_path)
    assert found.vocabulary == 257
    assert list(found.encode(b"a\n\xff")) == [97, 10, 255]


def greedy(entries: list[bytes], text: bytes) -> list[int]:
    """Longest match, place by place: slow and obvious."""
    ids, place = [], 0
    while place < len(text):
        fitting = [e for e in entries if text.startswith(e, place)]
        best = max(fitting, key=len, default=b"")
        ids.append(257 + entries.index(best) if best else text[place])
        place += len(best) or 1
    return ids


small = st.text(alphabet="ab\n.é", min_size=1, max_size=8)


@examples
@given(st.lists(small, unique=True, max_size=12), st.text(alphabet="ab\n.éx", max_size=60))
def test_segments_equal_the_obvious_loop_and_lose_nothing(entries: list[str], text: str) -> None:
    encoded = [entry.encode() for entry in entries]
    found = tokenizer.SegmentTokenizer(encoded, "")
    ids = found.encode(text.encode())
    assert list(ids) == greedy(encoded, text.encode())
    assert found.decode(ids) == text


@examples
@given(st.binary(max_size=200))
def test_segments_take_any_bytes(text: bytes) -> None:
    found = tokenizer.SegmentTokenizer([b"ab", b"\xff\x00", b"\x80"], "")
    texts = [bytes([value]) for value in range(256)] + [b"", b"ab", b"\xff\x00", b"\x80"]
    assert b"".join(texts[i] for i in found.encode(text)) == text


def test_thousands_of_segments_and_the_deepest_nesting_compile(tmp_path: Path) -> None:
    many = [f"w{number}" for number in range(8192)]
    found = segments(tmp_path, *many)
    assert found.vocabulary == 8449
    assert list(found.encode(b"w8191w81 w9")) == [257 + 8191, 257 + 81, 32, 257 + 9]
    nested = segments(tmp_path, *("a" * length for length in range(1, SEGMENT_BYTES_MAX + 1)))
    assert list(nested.encode(b"a" * 70)) == [256 + SEGMENT_BYTES_MAX, 256 + 6]


def test_a_vocabulary_beyond_65536_gets_wider_ids() -> None:
    assert tokenizer.typecode(65_536) == "H"
    assert tokenizer.typecode(65_537) == "I"
    wide = tokenizer.SegmentTokenizer([b"%05d" % number for number in range(66_000)], "")
    assert wide.encode(b"65999a") == array("I", [257 + 65_999, 97])
    assert wide.encode(b"65999a").typecode == "I"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": 1}, r"expected a list of strings, got dict"),
        (["a", 7], r"entry 1: expected a non-empty string, got 7"),
        (["a", ""], r"entry 1: expected a non-empty string, got ''"),
        (["ab", "c", "ab"], r"entry 2: 'ab' is entry 0 too"),
        (["ok", "\ud800"], r"entry 1: .* has no UTF-8 form"),
        (["x" * (SEGMENT_BYTES_MAX + 1)], rf"entry 0: 65 bytes, more than .* {SEGMENT_BYTES_MAX}"),
    ],
)
def test_a_bad_segment_is_named_with_its_file(tmp_path: Path, entries: Any, message: str) -> None:
    path = segments_file(tmp_path, entries)
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizer.load("segments", path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"[", b"\xff\xfe[]", b"", b"[" * 100_000])
def test_a_segments_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "segments.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"segments\.json: not JSON"):
        tokenizer.load("segments", path)


@pytest.mark.parametrize("kind", ["segments", "json"])
def test_a_missing_file_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        TokenizerError, match=rf"tokenizer\.file is missing; kind '{kind}' needs one"
    ):
        tokenizer.load(kind)
    with pytest.raises(TokenizerError, match=r"gone\.json: No such file or directory"):
        tokenizer.load(kind, tmp_path / "gone.json")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["segments", "json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TokenizerError, match=r"pipe: not a regular file"):
        tokenizer.load(kind, tmp_path / "pipe")


# --- json -----------------------------------------------------------------------------------------


def test_json_puts_the_separator_after_all_of_its_own_ids(tmp_path: Path) -> None:
    path = word_level(tmp_path, {"[UNK]": 0, "the": 1, "cat": 2, "sat": 6})  # ids with holes
    found = tokenizer.load("json", path)
    assert (found.special, found.vocabulary) == (7, 8)
    assert found.encode(b"the cat sat down") == array("H", [1, 2, 6, 0])
    assert found.decode([7, 1, 2, 7]) == "the cat"
    with pytest.raises(ValueError, match="id 8 at position 0"):
        found.decode([8])


def test_json_replaces_what_is_not_utf8(tmp_path: Path) -> None:
    found = tokenizer.load("json", word_level(tmp_path, {"[UNK]": 0, "cat": 1}))
    assert list(found.encode(b"cat \xff cat")) == [1, 0, 1]


@pytest.mark.parametrize("content", ["{}", "[1, 2]", "nonsense"])
def test_json_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a Hugging Face tokenizer"):
        tokenizer.load("json", path)


def altered(path: Path, **parts: Any) -> Path:
    """The file of a tokenizer with other parts; those of the model are merged into it."""
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | parts | {"model": tree["model"] | parts.get("model", {})}))
    return path


def test_json_neither_cuts_nor_fills_up_a_text(tmp_path: Path) -> None:
    """Files made for a model of fixed length say how long a text may be; documents are longer."""
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    filled = {
        **{"strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"},
    }
    words = word_level(tmp_path, {"[UNK]": 0, "the": 1, "cat": 2})
    found = tokenizer.load("json", altered(words, truncation=cut, padding=filled))
    assert list(found.encode(b"the cat the cat the")) == [1, 2, 1, 2, 1]
    assert list(found.encode(b"cat")) == [2]


def test_json_draws_no_lots(tmp_path: Path) -> None:
    """A BPE file may ask for merges to be left out at random: equal digests, other tokens."""
    pairs = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    path = altered(word_level(tmp_path, {}), model=pairs | {"dropout": 1.0, "unk_token": None})
    assert list(tokenizer.load("json", path).encode(b"abab")) == [2, 2]


def test_json_that_its_package_panics_at_is_named(tmp_path: Path) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path = altered(word_level(tmp_path, {"[UNK]": 0}), normalizer=broken)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a Hugging Face tokenizer"):
        tokenizer.load("json", path)


def test_json_without_an_id_for_the_text_is_named(tmp_path: Path) -> None:
    found = tokenizer.load("json", word_level(tmp_path, {"cat": 0}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: it cannot encode .*\[UNK\]"):
        found.encode(b"a dog")


def test_json_with_no_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the vocabulary is empty"):
        tokenizer.load("json", word_level(tmp_path, {}))


def test_json_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = word_level(tmp_path, {"[UNK]": 0})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'trainer-supervisor\[tokenizers\]'"):
        tokenizer.load("json", path)


# --- what a checkpoint records --------------------------------------------------------------------


def test_equal_files_have_equal_digests_wherever_they_lie(tmp_path: Path) -> None:
    first = tokenizer.load("segments", segments_file(tmp_path, ["ab", "c"], "one.json"))
    second = tokenizer.load("segments", segments_file(tmp_path, ["ab", "c"], "two.json"))
    assert first.digest == second.digest
    assert first.rule == second.rule


def test_anything_that_changes_tokens_changes_the_digest(tmp_path: Path) -> None:
    digests = {
        tokenizer.load("bytes").digest,
        segments(tmp_path).digest,
        segments(tmp_path, "ab", "c").digest,
        segments(tmp_path, "c", "ab").digest,
        segments(tmp_path, "ab", "d").digest,
        tokenizer.load("json", word_level(tmp_path, {"[UNK]": 0, "ab": 1})).digest,
        tokenizer.load("json", word_level(tmp_path, {"[UNK]": 0, "ab": 2})).digest,
    }
    assert len(digests) == 7


def test_fc31_the_vocabulary_is_part_of_the_recorded_rule(tmp_path: Path) -> None:
    """A changed vocabulary crashed inside the optimizer instead of at load
    (OpenNMT/OpenNMT-py PR 2030, X-LANCE/text2sql-lgesql #18). The rule that a checkpoint records
    states the vocabulary, so a resume can compare it and show both before any tensor is touched.
    """
    before, after = segments(tmp_path, "ab"), segments(tmp_path, "ab", "cd")
    assert (before.rule["vocabulary"], after.rule["vocabulary"]) == (258, 259)
    assert before.rule["kind"] == after.rule["kind"] == "segments"
    assert before.digest != after.digest
    assert json.loads(json.dumps(before.rule)) == before.rule


def test_the_module_needs_neither_torch_nor_the_extra() -> None:
    code = "import sys, trainer.tokenizer as t; t.load('bytes'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    ).stdout.split()
    assert not {"torch", "numpy", "tokenizers"} & set(loaded)
