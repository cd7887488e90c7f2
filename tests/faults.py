"""A layer between the product and the kernel that records system calls and makes some fail.

It replaces functions of `os` for the time of a test. Calls are counted over the names it watches,
so that a test can fail the first call, the second, and so on until nothing is left to fail.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WRITING = ("pwrite", "ftruncate", "fsync", "fdatasync", "rename", "link")


class Faults:
    """`calls` lists (name, path, size or offset data) of every watched call, failed ones too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = WRITING) -> None:
        self.calls: list[tuple[str, str]] = []
        self.writes: list[tuple[str, int, bytes]] = []
        self.failed = 0
        self._decide: Callable[[int, str], str | int | None] = lambda number, name: None
        for name in names:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def fail_at(self, number: int, fault: int | str, only: str | None = None) -> None:
        """Fails call `number` (from 0, counted from now) with an errno or a `short` write."""
        seen = -1

        def decide(_: int, name: str) -> str | int | None:
            nonlocal seen
            if only is not None and name != only:
                return None
            seen += 1
            return fault if seen == number else None

        self._decide = decide

    def fail_always(self, fault: int | str, only: str | None = None) -> None:
        self._decide = lambda number, name: fault if only in (None, name) else None

    def heal(self) -> None:
        self._decide = lambda number, name: None

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            fault = self._decide(len(self.calls), name)
            self.calls.append((name, _target(arguments)))
            if fault == "short" and name == "pwrite":
                self.failed += 1
                descriptor, data, offset = arguments
                return original(descriptor, bytes(data)[: len(data) // 2], offset)
            if isinstance(fault, int):
                self.failed += 1
                raise OSError(fault, f"injected {errno.errorcode[fault]} in {name}")
            if name == "pwrite":
                self.writes.append(("pwrite", arguments[2], bytes(arguments[1])))
            elif name == "ftruncate":
                self.writes.append(("ftruncate", arguments[1], b""))
            return original(*arguments)

        return call


def _target(arguments: tuple[Any, ...]) -> str:
    """The file or directory that a call is about: by its last path, else by its descriptor."""
    if isinstance(arguments[0], int):
        return Path(f"/proc/self/fd/{arguments[0]}").readlink().name
    return Path(arguments[-1]).name


def states_of(writes: list[tuple[str, int, bytes]], before: bytes) -> list[tuple[int, bytes]]:
    """Every content that a kill can leave: after each byte of each write. With each comes the
    number of writes that are complete in it."""
    states = [(0, before)]
    content = bytearray(before)
    for done, (name, offset, data) in enumerate(writes):
        if name == "ftruncate":
            del content[offset:]
        for length in range(1, len(data)):
            torn = content.copy()
            torn[offset : offset + length] = data[:length]
            states.append((done, bytes(torn)))
        content[offset : offset + len(data)] = data
        states.append((done + 1, bytes(content)))
    return states
