"""The live figures of a run: loss, its average, the rate.

What may live here: what views show and nobody decides by. It is lost with this life, and begun
again from the newest entries of the ledger.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from pathlib import Path
from typing import Final

from supervisor.contract import Entry
from supervisor.ledger import iterate_backward
from supervisor.rows import LedgerDamaged

LOSS_EMA_DECAY: Final = 0.98
RATE_WINDOW_STEPS: Final = 50
AVERAGED_ENTRIES: Final = 500  # what is older weighs less than 1/20,000 in the average
LOOKED_ENTRIES: Final = 20_000


class Gauge:
    """Live figures of the run for status and views: not facts, and lost with this life."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: float | None = None
        self.loss_ema: float | None = None
        self.arm: str | None = None
        self.epoch: int | None = None
        self.time: float | None = None
        self._durations: deque[float] = deque(maxlen=RATE_WINDOW_STEPS)

    def take(self, entry: Entry) -> None:
        self.step, self.loss, self.arm = entry.step, entry.loss, entry.arm
        self.epoch, self.time = entry.epoch, entry.time
        if entry.loss == entry.loss and abs(entry.loss) != float("inf"):
            before = self.loss_ema
            self.loss_ema = (
                entry.loss
                if before is None
                else LOSS_EMA_DECAY * before + (1 - LOSS_EMA_DECAY) * entry.loss
            )
        if entry.step_seconds is not None:
            self._durations.append(entry.step_seconds)

    def go_on_from(self, ledger: Path, step: int) -> None:
        """The figures of a history that ends at `step`, as far as its newest entries tell them. The
        rate is that of a trainer which is gone."""
        newest: list[Entry] = []
        with contextlib.suppress(LedgerDamaged, OSError):  # for `verify` to find; these are hints
            for entry in itertools.islice(iterate_backward(ledger), LOOKED_ENTRIES):
                if entry.step <= step and (not newest or entry.step < newest[-1].step):
                    newest.append(entry)
                if len(newest) == AVERAGED_ENTRIES:
                    break
        for entry in reversed(newest):
            self.take(entry)
        self._durations.clear()

    @property
    def steps_per_second(self) -> float | None:
        total = sum(self._durations)
        return len(self._durations) / total if total > 0 else None
