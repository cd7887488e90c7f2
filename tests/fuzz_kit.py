"""Foreign bytes by the thousand: what a parser must take or refuse, and never stumble over.

What may live here: the generators of inputs, and the campaign that shows them to one parser. Which
parsers there are, and what each may raise, is in test_fuzz.py.

Every input follows from the seed of the campaign and its number, so a failure names both, and the
input itself. A parser that does not come back is ended by a limit on its CPU time.
"""

from __future__ import annotations

import json
import random
import signal
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

CPU_SECONDS_MAX = 30.0
SHOWN_BYTES = 2000

NASTY_TEXTS = (
    *("", "\0", "a\0b", "\ud800", "\udfff\ud800", "\U0001f600", "e\u0301", "\x1b[2J", "\\", '"'),
    *("NaN", "-0", "1e999", "null", "..", "../../etc/passwd", "/", "a" * 300, "A" * 5_000),
    *("__class__", "step", "True", "\r\n", "\u2028", "01", "0x10", "٣", " 1"),
)
NASTY_NUMBERS = (
    *("0", "-0", "-1", "1", "1.0", "1e0", "2147483647", "2147483648", "-2147483649", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "1e308", "1e309"),
    *(
        "-1e400",
        "5e-324",
        "NaN",
        "Infinity",
        "-Infinity",
        "nan",
        "1" * 400,
        "9" * 5_000,
        "0.1",
        "1.",
    ),
)


@dataclass
class Raw:
    """JSON text that stands for itself, well-formed or not."""

    text: str


@dataclass
class Pairs:
    """An object as a list of pairs, so that a key may come twice."""

    items: list[tuple[str, Any]] = field(default_factory=list)


def write(value: Any) -> str:
    """JSON of a tree of ours, with whatever is wrong in it."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{write(one)}" for key, one in value.items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write(one) for one in value) + "]"
    return json.dumps(value)


def read(document: bytes) -> Any:
    """A tree of ours out of a valid document."""
    return json.loads(document, object_pairs_hook=lambda pairs: Pairs(list(pairs)))


def _is_json(document: bytes) -> bool:
    try:
        return isinstance(json.loads(document), list | dict)
    except ValueError:
        return False


class Source:
    """Random inputs around some valid documents. `seal` makes a mutated tree into a document that
    carries the right checksum, where the format has one."""

    def __init__(
        self,
        seed: str,
        documents: Sequence[bytes],
        alphabet: str = '{}[]",:0123456789-+.eE truefalsnl\\u"\n',
        seal: Callable[[Any], bytes] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.documents = list(documents)
        self.alphabet = alphabet
        self.seal = seal
        self.trees = [document for document in self.documents if _is_json(document)]

    def draw(self) -> bytes:
        kinds = [self.noise, self.damaged, self.damaged]
        if self.trees:
            kinds += [self.structure, self.changed, self.changed, self.changed]
        made: bytes = self.random.choice(kinds)()
        return made

    def noise(self) -> bytes:
        size = self.random.choice((0, 1, 2, 3, 8, 40, 200))
        if self.random.random() < 0.5:
            return self.random.randbytes(size)
        return "".join(self.random.choices(self.alphabet, k=size)).encode()

    # --- bytes of a valid document ---

    def damaged(self) -> bytes:
        data = bytearray(self.random.choice(self.documents))
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            self._damage(data)
        return bytes(data)

    def _damage(self, data: bytearray) -> None:
        where = self.random.randrange(len(data) + 1)
        some = self.random.choice((1, 1, 2, 8, 64))
        match self.random.randrange(8):
            case 0 if where < len(data):
                data[where] ^= 1 << self.random.randrange(8)
            case 1:
                del data[where:]
            case 2:
                del data[where : where + some]
            case 3:
                data[where:where] = data[where : where + some]
            case 4:
                data[where : where + some] = bytes(some)
            case 5:
                data[where:where] = self.random.randbytes(some)
            case 6:
                other = self.random.choice(self.documents)
                begin = self.random.randrange(len(other) + 1)
                data[where:where] = other[begin : begin + 8 * some]
            case _:
                nasty = self.random.choice((*NASTY_TEXTS, *NASTY_NUMBERS))
                data[where:where] = nasty.encode("utf-8", "surrogatepass")

    # --- the tree of a valid document ---

    def structure(self) -> bytes:
        return self._written(self.value(0))

    def value(self, depth: int) -> Any:
        kind = self.random.randrange(7 if depth < 4 else 4)
        if kind == 0:
            return self.random.choice(NASTY_TEXTS)
        if kind == 1:
            return Raw(self.random.choice(NASTY_NUMBERS))
        if kind == 2:
            return self.random.choice((None, True, False, {}, [], self._deep()))
        if kind == 3:
            return self.random.randrange(-3, 100)
        size = self.random.randrange(4)
        if kind < 6:
            return Pairs([(self._key(), self.value(depth + 1)) for _ in range(size)])
        return [self.value(depth + 1) for _ in range(size)]

    def _key(self) -> str:
        found = self._keys() if self.random.random() < 0.7 else []
        return self.random.choice(found or NASTY_TEXTS)

    def _keys(self) -> list[str]:
        tree = self._tree()
        return [key for node in _nodes(tree) if isinstance(node, Pairs) for key, _ in node.items]

    def _deep(self) -> Raw:
        levels = self.random.choice((3, 63, 64, 65, 254, 900, 1024, 3_000))
        opening, closing = self.random.choice((("[", "]"), ('{"a":', "}")))
        inner = "0" if opening != "[" else ""
        return Raw(opening * levels + inner + closing * levels)

    def changed(self) -> bytes:
        tree = self._tree()
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            self._change(
                self.random.choice([n for n in _nodes(tree) if isinstance(n, Pairs | list)])
            )
        return self._written(tree)

    def _change(self, node: Any) -> None:
        if isinstance(node, list):
            if node and self.random.random() < 0.7:
                node[self.random.randrange(len(node))] = self.value(2)
            else:
                node.append(self.value(2))
            return
        at = self.random.randrange(len(node.items) + 1)
        if at == len(node.items):
            node.items.append((self._key(), self.value(2)))
            return
        key, value = node.items[at]
        match self.random.randrange(4):
            case 0:
                del node.items[at]
            case 1:
                node.items.append((key, self.random.choice((value, self.value(2)))))
            case 2:
                node.items[at] = (self._key(), value)
            case _:
                node.items[at] = (key, self.value(2))

    def _tree(self) -> Any:
        return read(self.random.choice(self.trees))

    def _written(self, tree: Any) -> bytes:
        if self.seal is not None and self.random.random() < 0.8:
            return self.seal(tree)
        return write(tree).encode("utf-8", "surrogatepass")


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    inner = tree if isinstance(tree, list) else ()
    if isinstance(tree, Pairs):
        inner = [value for _, value in tree.items]
    for one in inner:
        yield from _nodes(one)


# --- the campaign ---------------------------------------------------------------------------------


class Stuck(BaseException):
    """A parser has used more time than any input may cost."""


@contextmanager
def cpu_limit() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise Stuck(f"more than {CPU_SECONDS_MAX:g} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass
class Tally:
    accepted: int = 0
    refused: int = 0


def campaign(
    name: str,
    source: Source,
    parse: Callable[[bytes], object],
    refusals: tuple[type[Exception], ...],
    inputs: int,
) -> Tally:
    """Shows `inputs` inputs to a parser. Fails where it raises anything but `refusals`."""
    tally = Tally()
    for number in range(inputs):
        data = source.draw()
        try:
            with cpu_limit():
                parse(data)
            tally.accepted += 1
        except refusals:
            tally.refused += 1
        except BaseException as error:
            raise AssertionError(
                f"{name}: input {number} of its seed, {len(data)} bytes, made it raise"
                f" {type(error).__name__}: {str(error)[:500]}\n{data[:SHOWN_BYTES]!r}"
            ) from error
    return tally


TOML_ALPHABET = string.ascii_lowercase + string.digits + "[]{}=.\"'#\n\n, -_\\:T"
