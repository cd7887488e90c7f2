"""How long a trainer may make no progress before it counts as hung.

What may live here: deadlines for each phase of the trainer, learned from the run itself. Pure: time
arrives as an argument, in seconds of a clock that never goes back.

Invariants:
- A hang is the lack of progress, not the lack of life: only a new step or another phase counts.
- A deadline is never shorter than the configured floor, nor than what the trainer announced for the
  phase it is in.
- The first steps teach nothing: compilation, caches and first allocations make them slow.
- Time in which the supervisor itself could not look is not held against the trainer.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Final

from supervisor.contract import Json

DURATIONS_KEPT: Final = 64
WARM_UP_STEPS: Final = 5
LATE_SECONDS: Final = 5.0
STARTING: Final = ("", "load", "compile")  # phases that begin a life, until its first step


@dataclass(frozen=True, slots=True)
class Limits:
    """`start_seconds` to the hello, to the first step and through the warm-up; `step_seconds` the
    floor for a step, `save_seconds` that for every other phase; above the floors, `factor` times
    the rolling median. `evidence_seconds` for the stacks before anything is ended."""

    start_seconds: float = 1200.0
    step_seconds: float = 60.0
    save_seconds: float = 900.0
    factor: float = 10.0
    evidence_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """What was seen of one attempt. `since` is when it last made progress, `looked` when we last
    had a look; `durations` are seconds, newest last, by phase."""

    phase: str = ""
    since: float = 0.0
    looked: float = 0.0
    step: int = 0
    steps_seen: int = 0
    hint_seconds: float = 0.0
    durations: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def began(self, now: float, step: int) -> Patience:
        """A new attempt, or one that was adopted; what earlier ones taught of this run stays."""
        return Patience(since=now, looked=now, step=step, durations=self.durations)

    def entered(self, now: float, phase: str, step: int = 0, hint_seconds: float = 0.0) -> Patience:
        """The trainer says that it begins a phase, with `step` complete. To say so again is not
        progress, but may ask for more time."""
        if phase == self.phase and step <= self.step:
            return replace(self, hint_seconds=max(self.hint_seconds, hint_seconds))
        there = self.stepped(now, step)
        if there.phase not in (*STARTING, "step"):
            there = there._learned(there.phase, now - there.since)
        return replace(there, phase=phase, since=now, hint_seconds=hint_seconds)

    def stepped(self, now: float, step: int) -> Patience:
        """Step `step` is complete; only one beyond the last is progress. Steps come by two ways: as
        receipts, and with the phases, which say what steps were before them."""
        if step <= self.step:
            return self
        count = step - self.step
        seen = replace(self, since=now, step=step, steps_seen=self.steps_seen + count)
        if self.phase == "step" and self.steps_seen >= WARM_UP_STEPS:
            seen = seen._learned("step", (now - self.since) / count)
        return replace(seen, phase="step", hint_seconds=0.0)

    def looked_at(self, now: float, blind: bool) -> Patience:
        """We look. A long gap since the last look was our own: everything stood still, or we did.
        `blind`: progress could not be seen at all, because the disk takes no history."""
        gap = now - self.looked
        if blind:
            return replace(self, looked=now, since=now)
        late = gap if gap > LATE_SECONDS else 0.0
        return replace(self, looked=now, since=min(now, self.since + late))

    def deadline(self, limits: Limits) -> float:
        """The moment at which this silence becomes a hang."""
        return self.since + self.allowed_seconds(limits)

    def allowed_seconds(self, limits: Limits) -> float:
        if self.phase == "step":
            warm = self.steps_seen >= WARM_UP_STEPS
            floor = limits.step_seconds if warm else limits.start_seconds
        elif self.phase in STARTING:
            floor = limits.start_seconds
        else:
            floor = limits.save_seconds
        return max(floor, limits.factor * self._median(self.phase), self.hint_seconds)

    def to_json(self, limits: Limits, now: float) -> Json:
        """For the status: how long it has been silent, and how long it may be."""
        return {
            "phase": self.phase,
            "silent_seconds": round(max(0.0, now - self.since), 3),
            "allowed_seconds": round(self.allowed_seconds(limits), 3),
        }

    def _median(self, phase: str) -> float:
        seconds = dict(self.durations).get(phase, ())
        return statistics.median(seconds) if seconds else 0.0

    def _learned(self, phase: str, seconds: float) -> Patience:
        known = dict(self.durations)
        known[phase] = (*known.get(phase, ()), seconds)[-DURATIONS_KEPT:]
        return replace(self, durations=tuple(sorted(known.items())))
