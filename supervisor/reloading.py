"""SIGHUP: the settings are read again while the trainer works on.

What may live here: when that may happen, and what is said of it. How a file is judged is `reread`;
what a change touches is the daemon's.

Invariants:
- The loop reads no file: the worker does, and answers.
- Nothing changes while a pivot is under way, whose settings were made of those before it, nor once
  the run has ended. A signal of such a time is served after the pivot.
- What is refused is an alarm until a later reading, or a start, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from supervisor.options import Options, Reread
from supervisor.records import Record
from supervisor.state import Durable
from supervisor.worker import Job, Outcome

ALARM: Final = "settings"
UNCHANGED: Final = "the settings were read again, and are what they were"


class Reloader:
    """`reread` judges the file against what is on record, in the worker; `ruling` is that record,
    or None while nothing may change; `take` gets the options and records of a change."""

    def __init__(
        self,
        reread: Callable[[Durable], Reread],
        *,
        ruling: Callable[[], Durable | None],
        submit: Callable[[Job, Callable[[Outcome], None]], None],
        take: Callable[[Options, tuple[Record, ...]], None],
        alarm: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        self._reread = reread
        self._ruling = ruling
        self._submit = submit
        self._take = take
        self._alarm = alarm
        self._say = say
        self._asked = self._busy = False

    def ask(self) -> None:
        self._asked = True

    def look(self) -> None:
        """Called at every turn of the loop."""
        durable = self._ruling()
        if not self._asked or self._busy or durable is None:
            return
        self._asked, self._busy = False, True
        self._submit(partial(self._reread, durable), partial(self._done, durable))

    def _done(self, judged_by: Durable, outcome: Outcome) -> None:
        self._busy = False
        durable = self._ruling()
        if durable is None or durable.epochs != judged_by.epochs:
            self._asked = True  # a pivot has begun, or is through, meanwhile
            return
        found: Reread = outcome.result or Reread(None, (), str(outcome.error))
        self._alarm(ALARM, found.refused)
        if found.options is not None:
            self._take(found.options, found.records)
            if not found.records:
                self._say(UNCHANGED)
