"""Bytes from somebody else: bounded before they are parsed, checked before they are believed.

What may live here: JSON out of foreign bytes, and the checks of single values that every shape of
`contract` is made of. Nothing here touches a file, a clock or a socket.

Invariants:
- Whatever the bytes are, what is raised is ContractError.
- Size, number of values and depth are bounded. So what was accepted can also be walked, copied,
  shown and written as JSON again, none of which Python promises for a thousand nested lists.
- A complaint shows the beginning of a wrong value, never all of it: it travels in a reply, into
  the journal and onto a terminal.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, Final

import orjson

VALUES_MAX: Final = 1_000_000
DEPTH_MAX: Final = 64
INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
IDENTIFIER_CHARACTERS_MAX: Final = 128

Json = dict[str, Any]


class ContractError(ValueError):
    """A peer (a trainer, a file, a message) broke the contract; the text says where and how."""


class OperatorError(ValueError):
    """What the operator gave cannot be used; the text says what and where, a line for each."""


_SHORTENED: Final = reprlib.Repr()
_SHORTENED.maxlevel = 2
_SHORTENED.maxstring = _SHORTENED.maxother = 80


def shown(value: object) -> str:
    """The beginning of a value, for a complaint."""
    return _SHORTENED.repr(value)


def names(found: Iterable[str]) -> str:
    """Some of the keys that somebody else chose, for a complaint."""
    return shown(sorted(found))


def parse_object(raw: bytes, where: str, size_max: int) -> Json:
    """A JSON object out of foreign bytes, or ContractError."""
    value = parse_json(raw, where, size_max)
    if not isinstance(value, dict):
        raise ContractError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def parse_json(raw: bytes, where: str, size_max: int) -> Any:
    """A JSON value out of foreign bytes, or ContractError."""
    if len(raw) > size_max:
        raise ContractError(f"{where}: {len(raw)} bytes, more than the limit of {size_max}")
    # A value takes up to a hundred times the memory of its text, so they are counted before.
    containers = raw.count(b"[") + raw.count(b"{")
    if containers + raw.count(b",") > VALUES_MAX:
        raise ContractError(f"{where}: more than {VALUES_MAX} values")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ContractError(f"{where}: not JSON ({error})") from error
    if containers > DEPTH_MAX:
        check_depth(value, where)
    return value


def check_depth(value: Any, where: str) -> None:
    """Raises ContractError for objects and arrays within each other beyond DEPTH_MAX."""
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return
    raise ContractError(f"{where}: nested deeper than {DEPTH_MAX} levels")


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# --- single values --------------------------------------------------------------------------------


def integer(value: Any, where: str, least: int = 0, most: int = INT64_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ContractError(f"{where}: expected an integer of at least {least}, got {shown(value)}")
    if value > most:
        raise ContractError(f"{where}: expected an integer of at most {most}, got {shown(value)}")
    return value


def count(value: Any, where: str) -> int:
    """A step, an attempt, a number of parameters: what fits the header of a checkpoint."""
    return integer(value, where, 0, INT32_MAX)


def positive(value: Any, where: str) -> int:
    """A count of which there is at least one."""
    return integer(value, where, 1, INT32_MAX)


def number(value: Any, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ContractError(f"{where}: expected a number, got {shown(value)}")
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ContractError(f"{where}: expected text, got {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ContractError(f"{where}: not Unicode text ({error.reason})") from error
    return value


def identifier(value: Any, where: str) -> str:
    """A name that is kept and compared, such as the id of a request."""
    if not 1 <= len(text(value, where)) <= IDENTIFIER_CHARACTERS_MAX:
        raise ContractError(
            f"{where}: expected a text of 1 to {IDENTIFIER_CHARACTERS_MAX} characters, got"
            f" {shown(value)}"
        )
    return str(value)


def texts(value: Any, where: str) -> list[str]:
    return [text(item, where) for item in array(value, where)]


def object_(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise ContractError(f"{where}: expected an object, got {shown(value)}")
    return value


def array(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ContractError(f"{where}: expected an array, got {shown(value)}")
    return value
