"""How many examples a property is tried with, and where.

Everything else that hypothesis is told is in the profiles of conftest.py: the same examples in each
run of the suite, and others in each soak.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import settings

SOAK = os.environ.get("SOAK") == "1"
SOAK_FACTOR = 20


def cases(count: int) -> settings:
    """So many in the suite, and twenty times as many in a soak."""
    return settings(max_examples=count * (SOAK_FACTOR if SOAK else 1))


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for one example of a property. All of them would share tmp_path, and what its
    factory makes stays, with the megabytes that a ledger reserves: a soak would fill the disk."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
