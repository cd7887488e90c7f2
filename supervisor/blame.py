"""Whether a checkpoint is to blame for the deaths of those who resumed from it.

What may live here: the judgement of a row of deaths. Pure. What one death says is `causes`, what
follows from it `machine`.

A checkpoint that verifies can still kill: what it holds, or what comes right after it, makes every
trainer die. It is set aside when two have died that way, and the one before it is tried.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from supervisor.state import Durable

DEATHS: Final = 2
# Ends that say nothing of the checkpoint: somebody sent them. (SIGHUP, SIGINT, SIGKILL, SIGTERM)
SENT_SIGNALS: Final = (1, 2, 9, 15)
SUSPICIOUS: Final = ("signal", "crash", "unknown", "hang")


def blames(cause: str, signal: int | None, ready: bool) -> bool:
    """Whether such an end may be the fault of the checkpoint. A trainer that never said that it
    had loaded one may as well lack a library."""
    return ready and cause in SUSPICIOUS and not (cause == "signal" and signal in SENT_SIGNALS)


def verdict(durable: Durable, step: int) -> str:
    """Why the checkpoint of `step` is to be set aside; empty if it is not. It is, once DEATHS of
    those that began with it made no step beyond it, or one of them came to no other step than an
    earlier one had, wherever that one began."""
    ends = [died_at for resumed_from, died_at in durable.blamed if resumed_from == step]
    fruitless = sum(died_at <= step for died_at in ends)
    if fruitless >= DEATHS:
        return f"{fruitless} trainers that loaded it died before a new step"
    everywhere = Counter(died_at for _, died_at in durable.blamed)
    for died_at in sorted(ends):
        if everywhere[died_at] >= DEATHS and died_at > step:
            return f"{everywhere[died_at]} trainers died after step {died_at}, the last from here"
    return ""


def pattern(durable: Durable) -> str:
    """What the deaths since the last progress have in common, for the message of giving up."""
    ends = Counter(died_at for _, died_at in durable.blamed if died_at)
    died_at, count = max(ends.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
    if count < DEATHS:
        return ""
    return f"; {count} of them after step {died_at}: look at what comes in step {died_at + 1}"
