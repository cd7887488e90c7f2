"""The daemon's errands to the helper process: select, verify, retain, reclaim.

What may live here: turning effects into requests to the helper and its replies into events. What
the helper does to files is `checkpoints`; what follows from it is the machine's decision.

Invariant: an errand that something waits for is tried again before it is given up: a helper may be
killed for want of memory, and a disk may fail for a moment. One that no start can do without ends
this life then; a checkpoint that was not read back waits for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from supervisor import events as ev
from supervisor.checkpoints import find
from supervisor.commit import Unwritable
from supervisor.contract import Json
from supervisor.options import Retention
from supervisor.recorder import Recorder
from supervisor.rundir import RunDirectory
from supervisor.state import Durable, State
from supervisor.verifier import Reply, Verifier

TRIES: Final = 5
RETRY_SECONDS: Final = 1.0
ALARM: Final = "helper"


class HelperFailed(RuntimeError):
    """The helper could not do what no start can do without; the text is its reason."""


class Housekeeper:
    """`emit` takes events, `alarm` a name and a detail (empty: all is well), `seen` the summary
    of a checkpoint that was read back and found good."""

    def __init__(
        self,
        directory: RunDirectory,
        run_id: str,
        lineage: Iterable[tuple[str, int]],
        bare_allowed: bool,
        *,
        emit: Callable[[ev.Event], None],
        alarm: Callable[[str, str], None],
        seen: Callable[[Json], None],
    ) -> None:
        self._identity: Json = {
            "run_id": run_id,
            "lineage": [list(item) for item in lineage],
            "bare_allowed": bare_allowed,
        }
        self._checkpoints = directory.checkpoints
        self._emit = emit
        self._alarm = alarm
        self._seen = seen
        self._seen_step = 0
        self._calls: dict[int, Callable[[Reply], None]] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._verifier = Verifier(directory.path)

    def fileno(self) -> int:
        """Readable when `receive` has something to do."""
        return self._verifier.fileno()

    @property
    def busy(self) -> bool:
        return bool(self._calls or self._later)

    def receive(self) -> None:
        """Called at every turn of the loop. Raises HelperFailed, or Unwritable."""
        for reply in self._verifier.receive():
            self._calls.pop(reply.id)(reply)
        now = time.monotonic()
        due = [again for at, again in self._later if at <= now]
        self._later = [(at, again) for at, again in self._later if at > now]
        for again in due:
            again()

    def close(self) -> None:
        self._verifier.close()

    def notice(self, state: State, recorder: Recorder, now: float) -> None:
        """Checkpoints that no message announced: signal-only trainers, a link that was away."""
        if state.phase in ("idle", "starting", "backoff"):
            return  # the selection is at work on them, or will be
        opened = state.durable.open
        if opened is not None and recorder.attempt != opened.attempt:
            return  # not adopted yet: nobody has looked at its receipts
        try:
            there = find(self._checkpoints)
        except OSError as error:
            self._alarm("checkpoints", f"they cannot be looked at: {error}")
            return
        self._alarm("checkpoints", "")
        if not recorder.at_end():
            return  # the entry that one of them is bound to may not be taken in yet
        known = state.durable.on_disk | state.verifying | state.unread
        for found in there:
            if found.manifest is not None and found.step not in known:
                self._emit(ev.Noticed(now, found.step))

    def select(self, ceiling: int) -> None:
        """The newest valid checkpoint at most at `ceiling`; a bad one is moved to quarantine."""

        def selected(result: Json) -> None:
            if result["chosen"] is not None:
                self._see(result["chosen"])
            self._emit(_selection(result))

        self._demand(selected, "select", ceiling=ceiling, time=time.time(), **self._identity)

    def clear(self, base_step: int) -> None:
        """Sets aside what stands above the base and sweeps away what dead attempts left behind."""

        def superseded(result: Json) -> None:
            moved = tuple(sorted({step for step, _ in result["moved"]}))

            def cleaned(result: Json) -> None:
                self._emit(ev.Cleared(time.monotonic(), base_step, moved))

            self._demand(cleaned, "clean")

        self._demand(superseded, "supersede", above_step=base_step)

    def verify(self, step: int) -> None:
        def verified(reply: Reply) -> None:
            if reply.ok:
                if step >= self._seen_step:  # not so where the selection was faster
                    self._see(reply.result)
                self._emit(_verification(reply.result))
            else:
                reason = reply.result["reason"]
                moved_to = str(reply.result.get("moved_to") or "")
                self._emit(ev.Verified(time.monotonic(), step, reason, moved_to=moved_to))

        def gave_up(reply: Reply) -> None:
            self._alarm("verification", f"step {step}, {TRIES} times: {reply.error}")
            self._emit(ev.Unverified(time.monotonic(), step))

        request = {"step": step, "set_aside": True, "time": time.time()}
        what = f"step {step}"
        self._insist(verified, gave_up, "verification", what, "verify", **request, **self._identity)

    def retain(self, keep: Retention, durable: Durable, newest_verified: int) -> None:
        """What retention lets go of goes, and what is behind the newest proven checkpoint only."""

        def retained(reply: Reply) -> None:
            self._alarm("retention", reply.error)
            self._tell_removed(reply)

        self._ask(
            retained,
            "retain",
            **keep._asdict(),
            pins=sorted(durable.kept),
            verified_steps=sorted(durable.verified | {newest_verified}),
        )

    def reclaim(
        self,
        wanted_bytes: int,
        keep: Retention,
        durable: Durable,
        done: Callable[[int | None], None],
    ) -> bool:
        """Makes room for a checkpoint; `done` gets the bytes that have come free, or None where it
        failed. Whether to try again is not decided here: the trainer may have gone meanwhile.
        False where no attempt is open: a selection may be looking at what would go."""
        if durable.open is None:
            return False

        def reclaimed(reply: Reply) -> None:
            self._alarm("retention", reply.error)
            self._tell_removed(reply)
            done(reply.result["freed_bytes"] if reply.ok else None)

        self._ask(
            reclaimed,
            "reclaim",
            wanted_bytes=wanted_bytes,
            keep_every=keep.keep_every,
            pins=sorted(durable.kept),
            verified_steps=sorted(durable.verified),
            attempt=durable.open.attempt,
            nonce=durable.open.nonce,
        )
        return True

    def _tell_removed(self, reply: Reply) -> None:
        """Also where it failed: what has gone by then has gone."""
        if "removed" in reply.result:
            self._emit(_removal(reply.result))

    def _see(self, checkpoint: Json) -> None:
        self._seen_step = checkpoint["step"]
        self._seen(checkpoint)

    def _ask(self, done: Callable[[Reply], None], do: str, **request: Any) -> None:
        self._calls[self._verifier.submit({"do": do, **request})] = done

    def _demand(self, done: Callable[[Json], None], do: str, **request: Any) -> None:
        def gave_up(reply: Reply) -> None:
            words = f"{do}, {TRIES} times: {reply.error}"
            if reply.kind == "os":  # the helper is well, and the disk is not
                advice = f"{words}. Nothing is lost: mend that, and start again"
                raise Unwritable(advice, OSError(reply.result.get("errno"), reply.error))
            raise HelperFailed(words)

        self._insist(lambda reply: done(reply.result), gave_up, ALARM, do, do, **request)

    def _insist(
        self,
        done: Callable[[Reply], None],
        gave_up: Callable[[Reply], None],
        alarm: str,
        what: str,
        do: str,
        **request: Any,
    ) -> None:
        """Asks again while the helper fails, but not for ever. A checkpoint that is damaged is no
        failure of the helper."""
        failures = 0

        def answered(reply: Reply) -> None:
            nonlocal failures
            if reply.ok or reply.kind == "damaged":
                self._alarm(alarm, "")
                done(reply)
                return
            failures += 1
            if failures == TRIES:
                gave_up(reply)
                return
            self._alarm(alarm, f"{what}: {reply.error}")
            self._later.append((time.monotonic() + RETRY_SECONDS, ask))

        def ask() -> None:
            self._ask(answered, do, **request)

        ask()


def _selection(result: Json) -> ev.Selected:
    now = time.monotonic()
    rejected = tuple((step, reason, str(moved)) for step, reason, moved in result["rejected"])
    present, chosen = tuple(result["present"]), result["chosen"]
    if chosen is None:
        return ev.Selected(now, None, present, rejected=rejected)
    return ev.Selected(
        now,
        chosen["step"],
        present,
        chosen["binary_digest"] or "",
        chosen["sha256"],
        chosen["attempt"],
        chosen["reason"],
        tuple(chosen["requests"]),
        rejected,
    )


def _removal(result: Json) -> ev.Removed:
    return ev.Removed(
        time.monotonic(), tuple(result["removed"]), tuple(result["names"]), result["freed_bytes"]
    )


def _verification(found: Json) -> ev.Verified:
    return ev.Verified(
        time.monotonic(),
        found["step"],
        "",
        found["sha256"],
        found["binary_digest"] or "",
        found["attempt"],
        found["reason"],
        tuple(found["requests"]),
    )
