"""Documents to token windows: what an arm trains on, and what it is held to.

What may live here: windows, the held-out slice, the cache of token arrays, and the batch made of
windows. torch is imported where a batch is made and nowhere else, so that a policy's arms can be
checked without it.

Invariants:
- The same documents, tokenizer and context give the same windows in the same order.
- A document is wholly held out or wholly trained on, by the digest of its bytes alone; two equal
  documents are never on both sides.
- Every token of a document but its first is a target exactly once.
- The cache can only save time: it is keyed by content and proven by its own digest.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import tempfile
import warnings
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from supervisor import coherence, contract
from trainer.documents import (
    BUILTINS,
    EXTRACTION_VERSION,
    DataError,
    Selection,
    Source,
    sources_digest,
)
from trainer.tokenizer import Tokenizer, typecode

if TYPE_CHECKING:
    import torch

__all__ = [
    "BUILTINS",
    "IGNORED_TARGET",
    "Arm",
    "DataError",
    "Windows",
    "cache_directory",
    "collate",
    "load_arm",
]

IGNORED_TARGET: Final = -100  # of a position that has none, such as padding
REPETITION_WORDS: Final = 200_000


# --- windows and arms -----------------------------------------------------------------------------


class Windows:
    """The windows of a series of documents: up to `context` + 1 tokens each, at least 2.

    Within a document windows start at 0, context, 2 * context, ... and overlap by one token, so
    that each token after the first is a target exactly once. Windows are numbered in document
    order and found by bisection, so that millions of them cost nothing to set up.
    """

    def __init__(self, tokens: memoryview, lengths: Sequence[int], context: int) -> None:
        self._tokens = tokens
        self._context = context
        self._starts = [0, *accumulate(lengths)]
        self._first_windows = [0, *accumulate(-(-(length - 1) // context) for length in lengths)]

    @property
    def window_count(self) -> int:
        return self._first_windows[-1]

    @property
    def document_count(self) -> int:
        return len(self._starts) - 1

    @property
    def token_count(self) -> int:
        return self._starts[-1]

    def window(self, number: int) -> memoryview:
        """Token ids of one window, without a copy. Raises IndexError outside the count."""
        start, end = self._extent(number)
        return self._tokens[start:end]

    def window_targets(self, number: int) -> int:
        """How many targets that window has: one less than its length."""
        start, end = self._extent(number)
        return end - start - 1

    def _extent(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self.window_count:
            raise IndexError(f"window {number} of {self.window_count}")
        document = bisect_right(self._first_windows, number) - 1
        within = number - self._first_windows[document]
        start = self._starts[document] + within * self._context
        return start, min(start + self._context + 1, self._starts[document + 1])


class Arm(Windows):
    """One named data source, ready to draw from: its training windows, and what is held out.

    `digest` is over the digests of all documents in order: it changes with any content, and with
    their order, and with nothing else. `heldout_byte_entropy` is the entropy of the held-out text's
    bytes taken singly, in nats per byte; None without held-out text. `repetition` is the rep-4 of
    the training text (see supervisor.coherence), from 0 to 1, over its first REPETITION_WORDS.
    """

    def __init__(self, name: str, prepared: _Prepared, context: int) -> None:
        super().__init__(prepared.tokens, prepared.lengths, context)
        self.name = name
        self.digest = prepared.digest
        self.heldout = Windows(prepared.heldout_tokens, prepared.heldout_lengths, context)
        self.heldout_byte_entropy = prepared.heldout_byte_entropy
        self.repetition = prepared.repetition


def load_arm(
    name: str,
    *,
    files: Sequence[str] = (),
    builtin: str | None = None,
    tokenizer: Tokenizer,
    context: int,
    holdout_fraction: float,
    base: Path,
    cache: Path | None,
) -> Arm:
    """The arm that `files` (globs relative to `base`) or `builtin` name.

    Files ending in .jsonl hold one document a line, in its field `text`; any other file is one
    document. `holdout_fraction` (0 to below 1) of the documents are held out: with at least two
    different documents and a fraction above 0, at least one is, and at least one is not. `cache`
    is the directory of token arrays, or None to prepare them each time. Raises DataError.
    """
    if context < 1 or not 0 <= holdout_fraction < 1:
        raise ValueError(f"context {context}, holdout_fraction {holdout_fraction}")
    selection = Selection(name, tuple(files), builtin, base)
    key: contract.Json = {
        "extraction": EXTRACTION_VERSION,
        "builtin": builtin,
        "sources": sources_digest(selection.sources()),
        "tokenizer": tokenizer.digest,
        "holdout_fraction": holdout_fraction,
        "byteorder": sys.byteorder,
    }
    if builtin == "python-docstrings":
        key["python"] = list(sys.version_info[:3])  # what `ast` and `inspect` make of a source
    path = None if cache is None else cache / f"{contract.digest(contract.canonical(key))}.tokens"
    prepared = None if path is None else _unpack(_read_cache(path), key)
    if prepared is None:
        content = _pack(key, *_prepare(selection, key["sources"], tokenizer, holdout_fraction))
        if path is not None:
            _write_cache(path, content)
        prepared = _unpack(content, key)
        assert prepared is not None, "a token array does not survive its own packing"
    return Arm(name, prepared, context)


def collate(windows: Sequence[memoryview]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """One batch: inputs and targets, int64 of shape [windows, longest - 1], and its target count.

    Targets are the inputs shifted by one. Shorter windows end in input 0 and IGNORED_TARGET; the
    model is causal, so what stands after a window's end cannot reach its targets.
    """
    import torch  # here only: see the top of the module

    longest = max(map(len, windows))
    inputs = torch.zeros((len(windows), longest - 1), dtype=torch.int64)
    targets = torch.full((len(windows), longest - 1), IGNORED_TARGET, dtype=torch.int64)
    for row, window in enumerate(windows):
        ids = torch.frombuffer(window, dtype=_torch_type(window)).to(torch.int64)
        inputs[row, : len(window) - 1] = ids[:-1]
        targets[row, : len(window) - 1] = ids[1:]
    return inputs, targets, sum(map(len, windows)) - len(windows)


def _torch_type(window: memoryview) -> torch.dtype:
    import torch

    return torch.uint16 if window.format == "H" else torch.int32  # ids stay far below 2^31


# --- preparation ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Tokens of an arm, independent of the context. `lengths` are tokens per document."""

    digest: str
    heldout_byte_entropy: float | None
    repetition: float
    lengths: Sequence[int]
    tokens: memoryview
    heldout_lengths: Sequence[int]
    heldout_tokens: memoryview


def _prepare(
    selection: Selection, expected_sources: str, tokenizer: Tokenizer, holdout_fraction: float
) -> tuple[contract.Json, list[array[int]]]:
    """What is cached: facts, and [lengths, held-out lengths, tokens, held-out tokens]."""
    documents: list[bytes] = []

    def kept() -> Iterator[Source]:
        for source in selection.sources():
            documents.extend(selection.documents(source))
            yield source

    if sources_digest(kept()) != expected_sources:
        raise DataError(f"arm {selection.arm}: a file changed while it was read; start again")
    if not documents:
        raise DataError(f"arm {selection.arm}: no text in {selection.builtin or selection.files}")
    digests = [hashlib.sha256(document).digest() for document in documents]
    held = _held_out(set(digests), holdout_fraction)
    sides: list[list[bytes]] = [[], []]
    for document, digest in zip(documents, digests, strict=True):
        sides[digest in held].append(document)
    (lengths, tokens), (heldout_lengths, heldout_tokens) = (
        _encode(side, tokenizer) for side in sides
    )
    facts: contract.Json = {
        "typecode": tokens.typecode,
        "digest": contract.digest(b"".join(digests)),
        "heldout_byte_entropy": _byte_entropy(sides[1]),
        "repetition": _repetition(sides[0]),
    }
    return facts, [lengths, heldout_lengths, tokens, heldout_tokens]


def _held_out(digests: set[bytes], fraction: float) -> set[bytes]:
    """Those whose first 8 bytes, as a fraction of 2^64, are below `fraction`.

    Where that leaves nothing on one side of two or more, the smallest is held out, or the largest
    is not.
    """
    if fraction == 0 or len(digests) < 2:
        return set()
    held = {digest for digest in digests if int.from_bytes(digest[:8], "big") / 2**64 < fraction}
    return (held or {min(digests)}) - ({max(digests)} if held == digests else set())


def _encode(documents: Sequence[bytes], tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    """Lengths and tokens of [separator] + text + [separator], document after document."""
    lengths, tokens = array("Q"), array(typecode(tokenizer.vocabulary))
    for document in documents:
        before = len(tokens)
        tokens.append(tokenizer.special)
        tokens.extend(tokenizer.encode(document))
        tokens.append(tokenizer.special)
        lengths.append(len(tokens) - before)
    return lengths, tokens


def _repetition(documents: Sequence[bytes]) -> float:
    """rep-4 of the text that training will see: what memorising it would pay."""
    words: list[str] = []
    for document in documents:
        words.extend(document.decode("utf-8", "replace").split())
        if len(words) >= REPETITION_WORDS:
            break
    return coherence.repetition(words[:REPETITION_WORDS]) or 0.0


def _byte_entropy(documents: Sequence[bytes]) -> float | None:
    """-sum p ln p over the bytes of all documents: nats per byte of a model without context."""
    counts: Counter[int] = Counter()
    for document in documents:
        counts.update(document)
    total = counts.total()
    if not total:
        return None
    return math.fsum(-n / total * math.log(n / total) for n in counts.values())


# --- the cache of token arrays --------------------------------------------------------------------
#
# A file is: the SHA-256 of all that follows, in hexadecimal, and a newline; a JSON line with the
# key and the facts, padded with spaces to a multiple of 8 bytes; four arrays in native byte order.

_SEAL_BYTES: Final = 65


def cache_directory() -> Path | None:
    """Where token arrays are kept unless the caller says otherwise: the user's cache. None for a
    user who has no home, as in a container that runs under a number nobody has given a name."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "trainer-supervisor"
    except RuntimeError:  # pathlib's word for it
        return None


def _pack(key: contract.Json, facts: contract.Json, arrays: Sequence[array[int]]) -> bytearray:
    line = contract.canonical({"key": key, "facts": facts, "counts": [len(a) for a in arrays]})
    line += b" " * (-(_SEAL_BYTES + len(line) + 1) % 8) + b"\n"
    body = b"".join([line, *arrays])
    return bytearray(contract.digest(body).encode() + b"\n" + body)


def _unpack(content: bytearray | None, key: contract.Json) -> _Prepared | None:
    """The arrays over `content` without a copy; None if it is absent, damaged, or another's."""
    if content is None:
        return None
    view = memoryview(content)
    if hashlib.sha256(view[_SEAL_BYTES:]).hexdigest().encode() + b"\n" != content[:_SEAL_BYTES]:
        return None
    line_end = content.index(b"\n", _SEAL_BYTES)
    header = orjson.loads(view[_SEAL_BYTES:line_end])
    if header["key"] != key:
        return None
    facts, counts = header["facts"], header["counts"]
    parts: list[memoryview] = []
    start = line_end + 1
    for code, count in zip(("Q", "Q", facts["typecode"], facts["typecode"]), counts, strict=True):
        end = start + count * array(code).itemsize
        parts.append(view[start:end].cast(code))
        start = end
    return _Prepared(
        digest=facts["digest"],
        heldout_byte_entropy=facts["heldout_byte_entropy"],
        repetition=facts["repetition"],
        lengths=parts[0].tolist(),
        heldout_lengths=parts[1].tolist(),
        tokens=parts[2],
        heldout_tokens=parts[3],
    )


def _read_cache(path: Path) -> bytearray | None:
    try:
        return bytearray(path.read_bytes())
    except OSError:  # not there, or not readable: either way it is built anew
        return None


def _write_cache(path: Path, content: bytearray) -> None:
    """A cache that cannot be written costs time at the next start, so it warns and goes on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=contract.TEMPORARY_PREFIX, dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(f"token cache {path}: {error.strerror}", RuntimeWarning, stacklevel=2)
