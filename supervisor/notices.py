"""Which facts of a run are worth waking somebody for, and what he is told.

What may live here: the judgement over journal records, and the shape of a notification. Pure: who
delivers it is `notifier`.

Invariants:
- The judgement is a fold over the journal, so a life that is begun again knows what the earlier
  ones have told already.
- A stretch of deaths without a new checkpoint, and an alarm that lasts, is told once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from supervisor import events as ev
from supervisor.contract import Json

SCHEMA_VERSION: Final = 1
RESTARTS_TOLD: Final = 3
REASON_CHARACTERS: Final = 2000

# Each of these is news whenever it is raised; a lasting one only until it is cleared.
ALARMS: Final = frozenset({"disk", "replay_diverged", "checkpoint_quarantined"})
LASTING: Final = frozenset({"disk"})


@dataclass(frozen=True, slots=True)
class Notice:
    """`event` is failed, finished, stuck, restarting or alarm; `alarm` names the alarm."""

    event: str
    reason: str
    alarm: str | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """What has to be remembered from one record to the next."""

    best_checkpoint: int = -1
    deaths: int = 0  # unplanned ends since the last progress
    raised: frozenset[str] = frozenset()


def judge(watch: Watch, record: ev.Record) -> tuple[Watch, Notice | None]:
    """What there is to remember of a record, and what to tell because of it."""
    match record:
        case ev.RunFailed():
            return watch, Notice("failed", record.reason)
        case ev.RunFinished():
            return watch, Notice("finished", f"reached step {record.step}")
        case ev.SupervisorEnded(phase="stuck"):
            return watch, Notice("stuck", record.reason)
        case ev.AttemptEnded(counted=True) | ev.AttemptEnded(cause="again"):
            return replace(watch, deaths=watch.deaths + 1), None
        case ev.AttemptStarted() if watch.deaths == RESTARTS_TOLD:
            # One more than the deaths, so that the next restart of this stretch is not told again
            # though it need not come from a death that counts.
            return replace(watch, deaths=watch.deaths + 1), _restarting(record)
        case ev.CheckpointCommitted() if record.step > watch.best_checkpoint:
            return replace(watch, best_checkpoint=record.step, deaths=0), None
        case ev.PolicySwitched():
            return replace(watch, best_checkpoint=record.base_step, deaths=0), None
        case ev.Wished(wish="run"):
            return replace(watch, deaths=0), None
        case ev.Alarmed() if record.name in ALARMS and record.name not in watch.raised:
            raised = watch.raised | (LASTING & {record.name})
            return replace(watch, raised=raised), Notice("alarm", record.detail, record.name)
        case ev.AlarmCleared():
            return replace(watch, raised=watch.raised - {record.name}), None
        case _:
            return watch, None


def _restarting(record: ev.AttemptStarted) -> Notice:
    where = f"from step {record.resume_step}" if record.resume_step else "from the start"
    return Notice(
        "restarting",
        f"attempt {record.attempt} begins {where}: restart {RESTARTS_TOLD} without a new"
        " checkpoint in between",
    )


def watch_of(records: Iterable[ev.Record]) -> Watch:
    """What is to be remembered of a journal. Nothing in it is told again."""
    watch = Watch()
    for record in records:
        watch, _ = judge(watch, record)
    return watch


def compose(notice: Notice, status: Json, time: float) -> Json:
    """The notification as it leaves; `status` is that of the run, as `supervisor status` has it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": status["run"],
        "run_id": status["run_id"],
        "directory": status["directory"],
        "event": notice.event,
        "alarm": notice.alarm,
        "reason": notice.reason[:REASON_CHARACTERS],
        "step": status["step"],
        "target_step": status["target_step"],
        "attempt": status["attempt"],
        "time": time,
    }
