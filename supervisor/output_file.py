"""The file that --output names: replaced whole, or written through where it is no file.

What may live here: where the bytes of an export go. Nothing is written to a run.

Invariants:
- A regular file is the old one or the new one whole, never a half; a link stays a link, and
  what only its owner may read stays so.
- A device, a pipe or our own standard output is written through and stays what it is.
- An error names the path that the operator gave.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from supervisor.contract import TEMPORARY_PREFIX
from supervisor.durable import fsync_directory

_STANDARD: Final = (1, 2)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Where the content of `path` is to be written. Raises OSError with that very path."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}-{target.name}")
    try:
        through = _through(path)
        with _replacing(target, temporary) if through is None else through as out:
            yield out
    except OSError as error:
        if error.filename in (None, str(temporary), str(target), str(target.parent)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _through(path: Path) -> BinaryIO | None:
    """A stream into what is there, where that must not be replaced."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    for descriptor in _STANDARD:  # /dev/stdout, and whatever it was redirected to
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return open(os.dup(descriptor), "wb")
    return None if stat.S_ISREG(found.st_mode) else path.open("wb")


@contextmanager
def _replacing(target: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `target` once all of it is written and on the device."""
    published = False
    try:
        with temporary.open("xb") as out:
            with suppress(FileNotFoundError):  # what was for its owner alone stays so
                os.fchmod(out.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, target)
        published = True
    finally:
        if not published:
            with suppress(OSError):  # the error that is on its way matters more
                temporary.unlink(missing_ok=True)
    fsync_directory(target.parent)
