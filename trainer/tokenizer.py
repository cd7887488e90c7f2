"""Bytes to token ids and back. No torch here, so that a policy can be checked without it.

What may live here: the tokenizer kinds and their files.

Invariants:
- Ids run from 0 to `vocabulary` - 1, and `special`, the document separator, is never produced by
  `encode`: only the corpus puts it between documents.
- `encode` takes bytes and loses none of them for the kinds "bytes" and "segments".
- Equal digests mean equal tokens: the digest covers the rule and the exact content of the file.
"""

from __future__ import annotations

import contextlib
import json
import re
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from supervisor import contract

if TYPE_CHECKING:
    import tokenizers

KINDS: Final = ("bytes", "segments", "json")

BYTES: Final = 256
SPECIAL: Final = 256
SEGMENT_BYTES_MAX: Final = 64  # keeps the nesting of the compiled pattern far from re's limits

_NARROW_VOCABULARY_MAX: Final = 1 << 16


class TokenizerError(ValueError):
    """The operator's tokenizer settings or file cannot be used; the text says where and why."""


class Tokenizer(Protocol):
    """What the corpus, the model and the samples need of a tokenizer.

    `rule` is what a checkpoint records of it, as JSON: the kind, the vocabulary and the digest of
    its file.
    """

    vocabulary: int
    special: int
    rule: dict[str, Any]
    digest: str

    def encode(self, text: bytes) -> array[int]:
        """Ids of `text`: an array of typecode "H" (vocabulary up to 65,536) or "I"."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without the separator; bytes that are not UTF-8 show as U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        ...


def load(kind: str, file: Path | None = None) -> Tokenizer:
    """The tokenizer that the settings `tokenizer.kind` and `tokenizer.file` name.

    Raises TokenizerError, naming the setting, or the file and its entry.
    """
    if kind not in KINDS:
        raise TokenizerError(f"tokenizer.kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if kind == "bytes":
        if file is not None:
            raise TokenizerError(
                f"tokenizer.file is {file}, but kind 'bytes' has no file; remove it"
            )
        return ByteTokenizer()
    if file is None:
        raise TokenizerError(f"tokenizer.file is missing; kind {kind!r} needs one")
    try:
        # A pipe would be waited for without end, and who wants to stop would wait with us.
        if not stat.S_ISREG(file.stat().st_mode):
            raise TokenizerError(f"tokenizer.file {file}: not a regular file")
        content = file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"tokenizer.file {file}: {error.strerror}") from error
    if kind == "segments":
        return SegmentTokenizer(parse_segments(content, str(file)), contract.digest(content))
    return JsonTokenizer(content, str(file))


def typecode(vocabulary: int) -> str:
    """The array typecode that holds every id of a vocabulary: "H" (2 bytes) or "I" (4)."""
    return "H" if vocabulary <= _NARROW_VOCABULARY_MAX else "I"


class ByteTokenizer:
    """One id a byte, and the separator: 257 ids."""

    def __init__(self) -> None:
        self.vocabulary = BYTES + 1
        self.special = SPECIAL
        self.rule = _rule("bytes", self.vocabulary, self.special, None)
        self.digest = _digest(self.rule)

    def encode(self, text: bytes) -> array[int]:
        ids = array("H")
        ids.extend(text)  # array("H", text) would take two bytes for one id
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(_without(self.special, ids, self.vocabulary)).decode(errors="replace")


class SegmentTokenizer:
    """Bytes, the separator, and listed segments of text; the longest match wins.

    Ids: 0 to 255 the bytes, 256 the separator, 257 on the segments in the order of the file.
    """

    def __init__(self, segments: Sequence[bytes], file_digest: str) -> None:
        self.vocabulary = BYTES + 1 + len(segments)
        self.special = SPECIAL
        self.rule = _rule("segments", self.vocabulary, self.special, file_digest)
        self.digest = _digest(self.rule)
        self._texts = [bytes([value]) for value in range(BYTES)] + [b""] + list(segments)
        self._ids = {text: number for number, text in enumerate(self._texts)}
        self._typecode = typecode(self.vocabulary)
        self._matches = re.compile(_longest_match(segments), re.DOTALL).findall

    def encode(self, text: bytes) -> array[int]:
        return array(self._typecode, map(self._ids.__getitem__, self._matches(text)))

    def decode(self, ids: Sequence[int]) -> str:
        known = _without(self.special, ids, self.vocabulary)
        return b"".join(map(self._texts.__getitem__, known)).decode(errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`. The separator is one more id after all of the file's own.

    That vocabulary is for text: bytes that are not UTF-8 are replaced before they are encoded.
    """

    def __init__(self, content: bytes, where: str) -> None:
        self._where = where
        self._tokenizer = _hugging_face(content, where)
        # Ids may have holes, so the largest counts and not the number of entries.
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.special = max(ids, default=-1) + 1
        if self.special == 0:
            raise TokenizerError(f"tokenizer.file {where}: the vocabulary is empty")
        self.vocabulary = self.special + 1
        self.rule = _rule("json", self.vocabulary, self.special, contract.digest(content))
        self.digest = _digest(self.rule)
        self._typecode = typecode(self.vocabulary)

    def encode(self, text: bytes) -> array[int]:
        decoded = text.decode(errors="replace")
        with _refused_by_the_package(self._where, "it cannot encode the text"):
            encoding = self._tokenizer.encode(decoded, add_special_tokens=False)
        return array(self._typecode, encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        known = list(_without(self.special, ids, self.vocabulary))
        text: str = self._tokenizer.decode(known, skip_special_tokens=False)
        return text


def _hugging_face(content: bytes, where: str) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise TokenizerError(
            "tokenizer.kind 'json' needs the package tokenizers:"
            " pip install 'trainer-supervisor[tokenizers]'"
        ) from error
    with _refused_by_the_package(where, "not a Hugging Face tokenizer.json"):
        ours = tokenizers.Tokenizer.from_buffer(content)
    # What a file may ask for beside its vocabulary: documents cut or filled up to the length of the
    # model that it was made for, and merges that are left out at random.
    ours.no_truncation()
    ours.no_padding()
    if getattr(ours.model, "dropout", None) is not None:
        ours.model.dropout = None
    return ours


@contextlib.contextmanager
def _refused_by_the_package(where: str, what: str) -> Iterator[None]:
    """It answers with a ValueError, a bare Exception, or a panic, which is not even an Exception
    and has no name that could be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"tokenizer.file {where}: {what} ({error})") from error


def _rule(kind: str, vocabulary: int, special: int, file_digest: str | None) -> dict[str, Any]:
    rule: dict[str, Any] = {"kind": kind, "vocabulary": vocabulary, "special": special}
    return rule if file_digest is None else rule | {"file_digest": file_digest}


def _digest(rule: dict[str, Any]) -> str:
    return contract.digest(contract.canonical(rule))


def _without(special: int, ids: Sequence[int], vocabulary: int) -> Iterable[int]:
    for position, number in enumerate(ids):
        if not 0 <= number < vocabulary:
            raise ValueError(
                f"id {number} at position {position} is outside the vocabulary of {vocabulary}"
            )
        if number != special:
            yield number


# --- segments -------------------------------------------------------------------------------------


def parse_segments(content: bytes, where: str) -> list[bytes]:
    """The segments in a JSON list of strings, in order, as UTF-8. Raises TokenizerError."""
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise TokenizerError(f"tokenizer.file {where}: not JSON ({error})") from error
    if not isinstance(entries, list):
        raise TokenizerError(
            f"tokenizer.file {where}: expected a list of strings, got {type(entries).__name__}"
        )
    places: dict[bytes, int] = {}
    for number, entry in enumerate(entries):
        segment = _segment(entry, f"tokenizer.file {where} entry {number}")
        if segment in places:
            raise TokenizerError(
                f"tokenizer.file {where} entry {number}: {entry!r} is entry {places[segment]} too;"
                " remove one"
            )
        places[segment] = number
    return list(places)


def _segment(entry: Any, where: str) -> bytes:
    if not isinstance(entry, str) or not entry:
        raise TokenizerError(f"{where}: expected a non-empty string, got {entry!r}")
    try:
        segment = entry.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"{where}: {entry!r} has no UTF-8 form ({error.reason})") from error
    if len(segment) > SEGMENT_BYTES_MAX:
        raise TokenizerError(
            f"{where}: {len(segment)} bytes, more than the limit of {SEGMENT_BYTES_MAX}"
        )
    return segment


_Trie = dict[int, "_Trie"]
_END: Final = -1


def _longest_match(segments: Sequence[bytes]) -> bytes:
    """A pattern whose every match is the longest segment at that place, or one byte.

    Branches of a trie start with different bytes, so the engine never has two to try; a plain
    alternation of 8,192 segments would be tried one by one.
    """
    root: _Trie = {}
    for segment in segments:
        node = root
        for byte in segment:
            node = node.setdefault(byte, {})
        node[_END] = {}
    return b"(?:" + _branches(root) + b")|." if root else b"."


def _branches(node: _Trie) -> bytes:
    return b"|".join(_edge(byte, child) for byte, child in sorted(node.items()) if byte != _END)


def _edge(byte: int, node: _Trie) -> bytes:
    """The pattern of one branch: bytes up to the next fork or end, then what may follow."""
    label = bytes([byte])
    while len(node) == 1 and _END not in node:
        ((following, node),) = node.items()
        label += bytes([following])
    if len(node) == 1 and _END in node:
        return re.escape(label)
    optional = b"?" if _END in node else b""
    return re.escape(label) + b"(?:" + _branches(node) + b")" + optional
