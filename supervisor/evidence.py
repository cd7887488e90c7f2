"""What there is to see of a death besides its status: counters of the kernel, the last output.

What may live here: reading it, in time. What it means is `causes`.

Invariant: counters are compared with those of a short while ago, not of the attempt's beginning: on
a machine that others use too, a long life has seen many deaths that were not its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from supervisor import causes, cgroup
from supervisor.events import Evidence
from supervisor.tail import printable

VMSTAT: Final = "/proc/vmstat"
INTERVAL_SECONDS: Final = 10.0
OUTPUT_BYTES: Final = 16 * 1024
WORDS_CHARACTERS: Final = 300


class Witness:
    """Of one attempt; `group` is its own control group, where it has one."""

    def __init__(self, group: cgroup.Cgroup | None = None) -> None:
        # The kernel counts the dead of a group in every group above it, so ours has them too; and
        # the attempt's has none of its own where memory is not controlled that far down.
        places = [place for place in (group, cgroup.of("self")) if place is not None]
        self._places = [(str(place.path), place.path / "memory.events") for place in places]
        self._places.append((causes.MACHINE, Path(VMSTAT)))
        self._earlier = self._newer = self._counts()
        self._looked_at: float | None = None

    def _counts(self) -> causes.Counts:
        found = []
        for name, path in self._places:
            try:
                count = causes.oom_kills(path.read_text(encoding="ascii"))
            except OSError:
                continue
            if count is not None:
                found.append((name, count))
        return tuple(found)

    def look(self, now: float) -> None:
        """Called while it lives. Two looks are remembered: a death may take longer to be seen than
        it takes until the next look."""
        if self._looked_at is None or now - self._looked_at >= INTERVAL_SECONDS:
            self._looked_at = now
            self._earlier, self._newer = self._newer, self._counts()

    def evidence(self, log: Path, lost: str) -> Evidence:
        """`lost` is what the driver says of a device that has gone."""
        words, certain = causes.out_of_memory(self._earlier, self._counts())
        return Evidence(words, certain, lost or causes.device_lost(_end_of(log)))

    def last_words(self, log: Path) -> str:
        """The last line of it that says something: harmless, as it is shown on terminals and sent
        away."""
        lines = (line.strip() for line in reversed(_end_of(log).splitlines()))
        return printable(next(filter(None, lines), ""))[:WORDS_CHARACTERS]


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_BYTES))
            return file.read(OUTPUT_BYTES).replace(b"\0", b"").decode("utf-8", "replace")
    except OSError:
        return ""  # no log, or none that can be read: there are no last words then
