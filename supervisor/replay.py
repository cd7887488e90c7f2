"""What one attempt adds to the history, and what it only proves.

What may live here: the comparison of an attempt's steps with those recorded before, as a pure
fold over its entries, and the likely cause of a difference. Reading the ledger and appending to it
are the caller's part.

Invariants:
- A deterministic run ends with exactly one entry a step: a step executed again with equal
  deterministic fields adds nothing, and counts as verified.
- Once an attempt has appended a step, it appends every later one: its entry supersedes all that
  was recorded from there on, so nothing is left to compare with.
- Handing the lines of an attempt over again, after a restart of the supervisor, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from supervisor.contract import ContractError, Entry, Json, differing_fields


class Outcome(StrEnum):
    """What became of an entry. `APPENDED` and `DIVERGED` ones belong into the ledger."""

    APPENDED = "appended"
    VERIFIED = "verified"
    DIVERGED = "diverged"
    REDELIVERED = "redelivered"


@dataclass(frozen=True, slots=True)
class Taken:
    """The verdict on one entry. `entry` is complete: attempt and epoch are filled in.

    Where the step diverged, `fields` names what differs from `earlier`. Both are given once more
    when the diverged step is redelivered, in case the report of it was lost.
    """

    outcome: Outcome
    entry: Entry
    fields: tuple[str, ...] = ()
    earlier: Entry | None = None

    @property
    def append(self) -> bool:
        return self.outcome in (Outcome.APPENDED, Outcome.DIVERGED)


class Merge:
    """Merges the entries of one attempt, which resumed from the checkpoint of step `base`.

    `earlier`, `own_first` and `own_last` are the ledger's tail (`stretches.Tail`). Earlier entries
    are asked for in the order of their steps, and no more of them once the attempt appends.
    """

    def __init__(
        self,
        attempt: int,
        epoch: int,
        base: int,
        earlier: Callable[[int], Entry | None],
        own_first: int | None = None,
        own_last: int | None = None,
    ) -> None:
        self.attempt = attempt
        self.epoch = epoch
        self.base = base
        self.last = base
        self.verified_steps = 0
        self._earlier = earlier
        self._own_first = own_first
        self._own_last = own_last
        self._appending = False

    def take(self, entry: Entry) -> Taken:
        """The verdict on the attempt's next entry. Raises ContractError for an entry of another
        attempt, for a step that leaves a gap, and for one that contradicts what this attempt
        recorded before."""
        entry = self._complete(entry)
        if self.base < entry.step <= self.last:
            return Taken(Outcome.REDELIVERED, entry)
        if entry.step != self.last + 1:
            raise ContractError(
                f"attempt {self.attempt}: step {entry.step}, expected {self.last + 1} (it resumed"
                f" from step {self.base})"
            )
        taken = self._judge(entry)
        self.last = entry.step
        self._appending = self._appending or taken.append
        self.verified_steps += taken.outcome is Outcome.VERIFIED
        return taken

    def _complete(self, entry: Entry) -> Entry:
        """The entry with the attempt and epoch that a foreign trainer does not know."""
        attempt = self.attempt if entry.attempt is None else entry.attempt
        if attempt != self.attempt:
            raise ContractError(
                f"attempt {self.attempt}: its receipts hold step {entry.step} of attempt {attempt}"
            )
        if entry.attempt is None or entry.epoch is None:
            epoch = self.epoch if entry.epoch is None else entry.epoch
            return replace(entry, attempt=attempt, epoch=epoch)
        return entry

    def _judge(self, entry: Entry) -> Taken:
        if self._own_first is not None and self._own_last is not None:
            if entry.step < self._own_first:
                return self._judge_again(entry)
            if entry.step <= self._own_last:
                self._appending = True
                return self._judge_recorded(entry)
        earlier = None if self._appending else self._comparable(entry)
        if earlier is None:
            return Taken(Outcome.APPENDED, entry)
        fields = differing_fields(earlier, entry)
        if fields:
            return Taken(Outcome.DIVERGED, entry, fields, earlier)
        return Taken(Outcome.VERIFIED, entry, (), earlier)

    def _judge_again(self, entry: Entry) -> Taken:
        """A step before the first that this attempt appended: verified then, so it is now."""
        earlier = self._earlier(entry.step)
        if earlier is None or differing_fields(earlier, entry):
            raise ContractError(
                f"attempt {self.attempt}: step {entry.step} was equal to the recorded one when"
                f" step {self._own_first} was appended, and is not any more: the receipts or the"
                " ledger have changed since (`supervisor verify` says which)"
            )
        return Taken(Outcome.VERIFIED, entry, (), earlier)

    def _judge_recorded(self, entry: Entry) -> Taken:
        """A step that an earlier life of the supervisor appended for this attempt."""
        earlier = self._comparable(entry) if entry.step == self._own_first else None
        if earlier is not None:
            return Taken(Outcome.REDELIVERED, entry, differing_fields(earlier, entry), earlier)
        return Taken(Outcome.REDELIVERED, entry)

    def _comparable(self, entry: Entry) -> Entry | None:
        """What was recorded of the step before, in the same epoch and branch."""
        earlier = self._earlier(entry.step)
        return earlier if earlier is not None and earlier.epoch == entry.epoch else None


# --- why a step came out otherwise ----------------------------------------------------------------

CODE, DATA, ENVIRONMENT, UNEXPLAINED = "code", "data", "environment", "unexplained"

# What was executed, as an attempt read it back; everything else is what it was executed on. torch
# counts as the latter: it brings the kernels.
_CODE_KEYS: Final = ("git", "python", "packages")
# Operational settings and the place of the run are in it, which decide no bit; those that do are
# compared one by one before a resume.
_NO_CAUSE: Final = ("settings_digest",)
_DATA_PARTS: Final = ("arm", "arms", "targets_seen", "tokenizer")


def likely_class(before: Json, now: Json, parts: Iterable[str]) -> str:
    """Why two executions of one step may differ in `parts`: code, data, environment, unexplained.

    `before` and `now` are the environments that the two read back, empty where unknown. `parts`
    are fields of an entry or dotted components of a state. Other data is likelier than another
    machine where the choice or the count of what was trained on differs, since no machine decides
    that; other code may decide anything.
    """
    changed = environment_changes(before, now)
    if any(key.partition(".")[0] in _CODE_KEYS and key != "packages.torch" for key in changed):
        return CODE
    if any(part.partition(".")[0] in _DATA_PARTS for part in parts):
        return DATA
    return ENVIRONMENT if changed else UNEXPLAINED


def environment_changes(before: Json, now: Json) -> dict[str, tuple[object, object]]:
    """What differs between two environments, by dotted key: (before, now). Empty where one of the
    two is unknown: nothing is concluded from that."""
    if not before or not now:
        return {}
    flat_before, flat_now = dict(_leaves(before)), dict(_leaves(now))
    return {
        key: (flat_before.get(key), flat_now.get(key))
        for key in sorted(flat_before.keys() | flat_now.keys())
        if key not in _NO_CAUSE and flat_before.get(key) != flat_now.get(key)
    }


def _leaves(value: Json, prefix: str = "") -> Iterable[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
