"""How many examples a property is tried with.

Everything else that hypothesis is told is in the profiles of conftest.py: the same examples in each
run of the suite, and others in each soak.
"""

from __future__ import annotations

import os

from hypothesis import settings

SOAK = os.environ.get("SOAK") == "1"
SOAK_FACTOR = 20


def cases(count: int) -> settings:
    """So many in the suite, and twenty times as many in a soak."""
    return settings(max_examples=count * (SOAK_FACTOR if SOAK else 1))
