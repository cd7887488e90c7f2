"""What a person at the terminal sees of a run in the foreground.

What may live here: turning status and events into lines, and the thread that writes them. A
terminal may stop reading (Ctrl-S, a full pipe); the loop must not, so it only drops lines into a
mailbox here.

Invariants:
- The thread owns nothing of the run. A line that finds the mailbox full is dropped, and so is
  everything once the terminal is gone.
- It writes past Python's own stream: a thread that is stuck in there makes the interpreter abort
  when it ends, which would turn a clean stop into a crash.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
import time
from typing import Final

from supervisor import events as ev
from supervisor.contract import Json

STANDARD_ERROR: Final = 2
CLEAR_LINE: Final = "\r\x1b[2K"
MAILBOX_LINES: Final = 256
PLAIN_INTERVAL_SECONDS: Final = 15.0
CLOSE_SECONDS: Final = 2.0
DURATION_SECONDS_MAX: Final = 1e10
VALUE_CHARACTERS: Final = 100


def has_controls() -> bool:
    """Whether a terminal here, if there is one, knows control characters."""
    return os.environ.get("TERM", "") not in ("", "dumb")


def is_live(descriptor: int) -> bool:
    """Whether a line there can be written over: not in a file, nor on a terminal that is none."""
    return os.isatty(descriptor) and has_controls()


class Reporter:
    """`say` prints a line that stays; `show` updates the live line (or, off a terminal, prints one
    from time to time)."""

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        self._descriptor = descriptor
        self._live = is_live(descriptor)
        self._mailbox: queue.Queue[tuple[str, str]] = queue.Queue(MAILBOX_LINES)
        self._last_plain = 0.0
        self._last_step: object = None
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        self._put("say", text)

    def show(self, status: Json) -> None:
        if self._live:
            self._put("show", live_line(status, shutil.get_terminal_size().columns))
            return
        now = time.monotonic()
        if now - self._last_plain >= PLAIN_INTERVAL_SECONDS and status["step"] != self._last_step:
            self._last_plain, self._last_step = now, status["step"]
            self._put("say", plain_line(status))

    def close(self) -> None:
        """Bounded: a terminal that does not read cannot hold the process."""
        self._put("end", "")
        self._thread.join(CLOSE_SECONDS)

    def _put(self, kind: str, text: str) -> None:
        try:
            self._mailbox.put_nowait((kind, text))
        except queue.Full:
            return

    def _write(self) -> None:
        shown, kind = False, ""
        while kind != "end":
            kind, text = self._mailbox.get()
            clear = CLEAR_LINE if shown else ""
            line = {"show": f"{CLEAR_LINE}{text}", "say": f"{clear}{text}\n"}.get(kind, clear)
            data = line.encode("utf-8", "replace")
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                return
            shown = kind == "show"


def number(value: object, form: str = ".3f") -> str:
    return format(value, form) if isinstance(value, int | float) else str(value or "-")


def duration(seconds: float) -> str:
    """`4:05` or `3:04:05`, or days in front where there are any."""
    minutes, second = divmod(int(min(max(0.0, seconds), DURATION_SECONDS_MAX)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def age(seconds: float) -> str:
    """`45 s`, `26 min`, `5 h`, `3 days`: what matters is the order of it."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# What matters more stays longer where a line is short. Nobody looks at a live line for anything
# more than for how far it is and how long it will take.
_STEP, _LEFT, _ALARMS, _LOSS, _RATE, _AVERAGE, _RESTARTS, _CHECKPOINT = range(8)


def _facts(status: Json) -> list[tuple[int, str]]:
    """(how soon it goes, text), in the order of the line."""
    facts = [(_STEP, f"step {status['step']}/{status['target_step']}")]
    if status["loss"] is not None:
        facts.append((_LOSS, f"loss {number(status['loss'])}"))
        facts.append((_AVERAGE, f"average {number(status['loss_ema'])}"))
    rate = status["steps_per_second"]
    if rate:
        left = (status["target_step"] - status["step"]) / rate
        facts.append((_RATE, f"{rate:.1f} steps/s"))
        facts.append((_LEFT, f"{duration(left)} left"))
    if status["checkpoint"]["step"] is not None:
        facts.append((_CHECKPOINT, f"checkpoint {status['checkpoint']['step']}"))
    if status["restarts"]:
        facts.append((_RESTARTS, f"restarts {status['restarts']}"))
    if status["alarms"]:
        facts.append((_ALARMS, f"ALARMS {len(status['alarms'])}"))
    return facts


def _joined(facts: list[tuple[int, str]], last: int = _CHECKPOINT) -> str:
    return ", ".join(text for rank, text in facts if rank <= last)


def live_line(status: Json, columns: int) -> str:
    """One line that fits the terminal: a bar, and whole facts, those that matter most."""
    done = min(1.0, status["step"] / status["target_step"]) if status["target_step"] else 0.0
    width = 20 if columns >= 100 else 10
    filled = round(done * width)
    bar = f"[{'#' * filled}{'.' * (width - filled)}] {done:4.0%}"
    phase = (
        status["phase"] if status["phase"] != "running" else status["trainer_phase"] or "running"
    )
    doing = "" if phase == "step" else f" {phase}:"
    facts, room = _facts(status), max(20, columns - 1)
    line = ""
    for last in range(_CHECKPOINT, _STEP, -1):
        line = f"{bar}{doing} {_joined(facts, last)}"
        if len(line) <= room:
            return line
    for last in (_LEFT, _STEP):
        line = f"{done:.0%}{doing} {_joined(facts, last)}"
        if len(line) <= room:
            break
    return line[:room]


def plain_line(status: Json) -> str:
    return f"{status['run']}: {status['phase']}, {_joined(_facts(status))}"


def _short(value: object) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[: VALUE_CHARACTERS - 1]}…"


def describe(record: ev.Record) -> str:
    """One sentence about a record, or an empty one for what nobody needs to see."""
    match record:
        case ev.AttemptStarted():
            start = f"from step {record.resume_step}" if record.resume_step else "from the start"
            return f"attempt {record.attempt} begins {start}"
        case ev.AttemptAdopted():
            return f"attempt {record.attempt} is alive (process {record.pid}) and was taken over"
        case ev.AttemptEnded():
            how = f"signal {record.signal}" if record.signal else f"exit code {record.code}"
            tail = f": {record.message}" if record.message and record.cause != "finished" else ""
            where = f"attempt {record.attempt} ended at step {record.step}"
            return f"{where}: {record.cause} ({how}){tail}"
        case ev.CheckpointCommitted():
            return f"checkpoint at step {record.step} ({record.reason})"
        case ev.CheckpointQuarantined():
            return f"checkpoint at step {record.step} set aside: {record.reason}"
        case ev.LeftoversRemoved():
            return f"{len(record.names)} leftover files removed, {record.freed_bytes} bytes"
        case ev.SettingsChanged():
            changes = "; ".join(
                f"{key} from {_short(old)} to {_short(new)}"
                for key, (old, new) in record.changes.items()
            )
            if not changes:
                return ""  # an import's first settings
            if record.policy_digest:
                return f"no step is on record yet, so the settings are those of now: {changes}"
            return f"settings changed: {changes}"
        case ev.PivotIntended():
            if record.to_step is not None:
                return f"rollback {record.request} to step {record.to_step} is wanted"
            return f"pivot {record.request} is wanted (at: {record.at})"
        case ev.PivotAborted():
            return f"pivot {record.request} given up, the old policy stays: {record.why}"
        case ev.PolicySwitched():
            return f"epoch {record.epoch} begins with step {record.base_step + 1}"
        case ev.Evaluated():
            return (
                f"step {record.step}: held-out loss {record.loss:.4f} nats"
                if isinstance(record.loss, float)
                else f"step {record.step}: held-out loss {record.loss}"
            )
        case ev.ReplayDiverged():
            names = ", ".join(record.fields)
            return f"REPLAY DIVERGED at step {record.step} in {names}"
        case ev.RunFinished():
            return f"finished at step {record.step}"
        case ev.RunFailed():
            return f"FAILED: {record.reason}"
        case ev.SupervisorEnded(phase="stuck"):
            return f"STUCK: {record.reason}"
        case _:
            return ""
