"""Why an attempt ended: from what the kernel saw, what the trainer wrote, and what lay around.

What may live here: judgement of evidence that others have gathered. Pure: no file, clock, process.

Invariants:
- What the kernel saw outranks what the trainer wrote about itself.
- A cause is named only with evidence, and the message carries it; what is merely likely says so.
"""

from __future__ import annotations

import re
from typing import Final

from supervisor.events import Evidence, Reaped
from supervisor.state import CAUSE_OF_CODE

_SIGKILL: Final = 9
MACHINE: Final = "/proc/vmstat"  # the counter that says nothing about who was meant

# A device that has gone, or that a restart alone does not bring back. Not here: an assert inside a
# kernel or an illegal address, which are faults of the program on a device that is well.
_LOST: Final = re.compile(
    r"fallen off the bus"
    r"|\bXid\b.*?: *(48|63|64|74|79|94|95|119|120|140)\b"
    r"|GPU is lost"
    r"|(uncorrectable|double bit) (ECC|NVLink) error"
    r"|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|no CUDA-capable device is detected"
    r"|CUDA error: (unknown error|hardware stack error|system not yet initialized)"
    r"|device (unavailable|disconnected|has been reset)"
    r"|invalid access of peer GPU memory over nvlink or a hardware error",
    re.IGNORECASE,
)
_LINE_CHARACTERS: Final = 300
_TOLD_CHARACTERS: Final = 1000

Counts = tuple[tuple[str, int], ...]


def device_lost(text: str) -> str:
    """The last line of an attempt's output that says so, or nothing."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line[-_LINE_CHARACTERS:] for line in lines if _LOST.search(line)), "")


def oom_kills(text: str) -> int | None:
    """The count in a memory.events or in /proc/vmstat; None where the kernel does not count."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdecimal():
            return int(value)
    return None


def out_of_memory(before: Counts, after: Counts) -> tuple[str, bool]:
    """(what the counters say, whether that is certain). `before` and `after` are (place, count),
    the place that tells most first."""
    earlier = dict(before)
    for place, count in after:
        new = count - earlier.get(place, count)
        if new <= 0:
            continue
        victims = "1 process" if new == 1 else f"{new} processes"
        if place != MACHINE:
            return f"the kernel ended {victims} in {place} for want of memory", True
        return f"probably: the kernel has just ended {victims} for want of memory", False
    return "", False


def judge(event: Reaped, asked_to_stop: bool, killed_by_us: bool, hung: bool = False) -> str:
    """The cause of death, one of CAUSES. A trainer that was ended because it `hung` has died of
    that, however it went."""
    if hung:
        return "hang"
    seen, line = event.evidence, event.exit_line
    if event.signal is not None:
        if killed_by_us:
            return "killed"
        if event.signal == _SIGKILL and seen.out_of_memory:
            return "out-of-memory"
        return "device-lost" if seen.device_lost else "signal"
    code = event.code if event.code is not None else line.code if line is not None else None
    if code is None:
        return "killed" if killed_by_us else _deduced(seen, "unknown")
    if code != 0:
        return CAUSE_OF_CODE.get(code) or _deduced(seen, "crash")
    if line is not None and line.why in ("finished", "stopped"):
        return line.why
    return "stopped" if asked_to_stop else "finished"


def _deduced(seen: Evidence, otherwise: str) -> str:
    """A main process that ends by itself may do so because one of its workers was ended."""
    if seen.out_of_memory and seen.certain:
        return "out-of-memory"
    return "device-lost" if seen.device_lost else otherwise


def explain(cause: str, event: Reaped, why: str) -> str:
    """The message of the record: the evidence first, then what we said, or the trainer in its exit
    record. The last line of its log, which may be the tail of a longer text, is the last resort."""
    line, seen = event.exit_line, event.evidence
    told = why or _on_one_line(line.message if line is not None else "") or event.message
    evidence = {"out-of-memory": seen.out_of_memory, "device-lost": seen.device_lost}.get(cause, "")
    return "; ".join(filter(None, (evidence, "" if told in evidence else told)))


def _on_one_line(message: str) -> str:
    """Harmless on a terminal, and cut at its end: the facts come first."""
    lines = filter(None, map(str.strip, message.splitlines()))
    text = "; ".join(lines).replace(":; ", ": ")
    return "".join(c if c.isprintable() else "\ufffd" for c in text)[:_TOLD_CHARACTERS]
