"""Where an arm's text comes from: files or what Python itself brings, as documents of bytes.

What may live here: finding, ordering, reading and splitting sources. Nothing here knows tokens.

Invariants:
- The same sources give the same documents in the same order on every machine: files are ordered
  by their path relative to the base directory, never by a listing.
- Documents are bytes as they stand on disk; text is decoded only where JSON or Python demands it.
- An error names the arm and the file or line.
"""

from __future__ import annotations

import ast
import hashlib
import os
import stat
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any, Final

import orjson

from supervisor import contract

BUILTINS: Final = ("python-docs", "python-source", "python-docstrings")
EXTRACTION_VERSION: Final = 3  # raise it when the same sources give other cached content

_BINARY_PROBE_BYTES: Final = 8192


class DataError(ValueError):
    """An arm's data cannot be used as configured; the text says which file or line, and why."""


Source = tuple[str, bytes]  # its name (relative path, file name or topic) and its content


@dataclass(frozen=True, slots=True)
class Selection:
    """What the policy says about an arm's data: globs relative to `base`, or a builtin."""

    arm: str
    files: tuple[str, ...]
    builtin: str | None
    base: Path

    def sources(self) -> Iterator[Source]:
        """Sources in their one order, read as they are asked for. Raises DataError."""
        if self.builtin is not None and self.builtin not in BUILTINS:
            raise DataError(
                f"arm {self.arm}: builtin is {self.builtin!r}, expected one of"
                f" {', '.join(BUILTINS)}"
            )
        if bool(self.files) == bool(self.builtin):
            raise DataError(f"arm {self.arm}: set either files or builtin")
        if self.builtin == "python-docs":
            yield from _topics(self.arm)
            return
        for label, path in self._stdlib() if self.builtin else self._matches():
            yield label, self._read(path)

    def documents(self, source: Source) -> Iterator[bytes]:
        """The documents of one source; those without a byte are no documents."""
        label, content = source
        if self.builtin == "python-docstrings":
            found: Iterator[bytes] = iter([_docstrings(content)])
        elif self.builtin is None and label.lower().endswith(".jsonl"):
            found = self._lines(label, content)
        else:
            found = iter([content])
        return (document for document in found if document)

    def _stdlib(self) -> list[tuple[str, Path]]:
        directory = Path(sysconfig.get_path("stdlib"))
        return [(path.name, path) for path in sorted(directory.glob("*.py"))]

    def _matches(self) -> list[tuple[str, Path]]:
        """Files by their normalised path relative to the base, each once, ordered by it. A pattern
        that matches nothing may be the very name of a file, such as `notes [1].txt`."""
        found: dict[str, Path] = {}
        for pattern in self.files:
            paths = glob(os.path.join(escape(str(self.base)), pattern), recursive=True)
            if not paths and (named := self.base / pattern).exists():
                paths = [str(named)]
            matches = [path for path in paths if not os.path.isdir(path)]
            if not matches:
                raise DataError(f"arm {self.arm}: no file matches {pattern!r} in {self.base}")
            for match in matches:
                found[os.path.relpath(match, self.base)] = Path(match)
        return sorted(found.items())

    def _read(self, path: Path) -> bytes:
        try:
            # A pipe would be waited for without end, and who wants to stop would wait with us.
            if not stat.S_ISREG(path.stat().st_mode):
                raise DataError(f"arm {self.arm}: {path} is not a regular file")
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"arm {self.arm}: cannot read {path}: {error.strerror}") from error
        if b"\0" in content[:_BINARY_PROBE_BYTES]:
            raise DataError(f"arm {self.arm}: {path} holds NUL bytes; expected text, not binary")
        return content

    def _lines(self, label: str, content: bytes) -> Iterator[bytes]:
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                yield _line_text(line, f"arm {self.arm}: {label}:{number}")


def _line_text(line: bytes, where: str) -> bytes:
    try:
        value: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise DataError(f"{where}: expected an object with a field text that holds a string")
    text: str = value["text"]
    return text.encode()


def _topics(arm: str) -> Iterator[Source]:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise DataError(f"arm {arm}: this Python comes without pydoc_data.topics") from error
    for topic in sorted(topics):
        yield topic, topics[topic].encode()


def _docstrings(source: bytes) -> bytes:
    """The docstrings of one Python file in the order of its lines, a blank line between them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stdlib's own syntax warnings are not ours to report
        tree = ast.parse(source)
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, holders)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    found = (ast.get_docstring(node) for node in nodes)
    return "\n\n".join(text for text in found if text).encode(errors="replace")


def sources_digest(sources: Iterator[Source]) -> str:
    """The digest of names and contents in order, reading one source at a time."""
    rolling = hashlib.sha256()
    for label, content in sources:
        rolling.update(contract.canonical([os.fsencode(label).hex(), contract.digest(content)]))
    return rolling.hexdigest()
