"""Commands that only look: status, list, logs, samples, checkpoints, doctor.

What may live here: reading a run directory and printing it. Nothing here can stop a run.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from supervisor.contract import (
    CHECKPOINTS,
    HEADER_BYTES,
    LOGS,
    RUN_FILE,
    SUPERVISOR_LOG_FILE,
    Json,
)
from supervisor.terminal import (
    complain,
    exits,
    find,
    json_option,
    opened,
    print_json,
    run_argument,
    runs,
)


@click.command(epilog=exits("0 running", "1 dead", "3 not running", "4 unknown"))
@run_argument
@json_option
@click.option("--config", "show_config", is_flag=True, help="Each setting and where it came from.")
def status(run: str | None, as_json: bool, show_config: bool) -> int:
    """Where a run stands."""
    from supervisor import status as view
    from supervisor.sidecars import unknown_status

    directory = find(run)
    if show_config:
        return _show_config(directory, as_json)
    found, code = view.observe(directory)
    if found is None:
        complain(f"{directory}: no status yet", code)
        if as_json:
            print_json(unknown_status(directory))
    elif as_json:
        print_json(found)
    else:
        click.echo(status_text(found, code))
    return code


def _show_config(directory: Path, as_json: bool) -> int:
    from supervisor import config

    settings = config.load(directory / RUN_FILE, (), os.environ)
    shown = {
        f"{section}.{key}": {
            "value": value,
            "origin": settings.origins.get(f"{section}.{key}", "default"),
        }
        for section, table in settings.tree().items()
        for key, value in table.items()
    }
    if as_json:
        print_json({"schema_version": 1, "settings": shown})
        return 0
    for name, one in shown.items():
        click.echo(f"{name} = {one['value']!r}  ({one['origin']})")
    return 0


_STATE_WORDS = {0: "running", 1: "DEAD", 3: "not running", 4: "unknown"}


def status_text(status: Json, code: int) -> str:
    """The status for a person: state and reason first, then where it stands."""
    from supervisor.progress import age, number
    from supervisor.tail import printable

    checkpoint = status["checkpoint"]
    replay = status["replay"]
    exit_record = status["last_exit"]
    lines = [
        f"{status['run']}: {_STATE_WORDS[code]}, phase {status['phase']}"
        + (f" ({status['reason']})" if status["reason"] else ""),
        f"  step        {status['step']} of {status['target_step']}",
        f"  loss        {number(status['loss'])}  average {number(status['loss_ema'])}",
        f"  attempt     {status['attempt']}, restarts {status['restarts']}, epoch"
        f" {status['epoch']}, wish {status['wish']}",
        f"  processes   supervisor {status['supervisor_pid'] or '-'}, trainer"
        f" {status['trainer_pid'] or '-'}",
    ]
    if checkpoint["step"] is not None:
        seconds = checkpoint.get("age_seconds")
        verified = "verified" if checkpoint["verified"] else "not verified yet"
        lines.append(
            f"  checkpoint  step {checkpoint['step']}, {verified}"
            + (f", {age(seconds)} old" if seconds is not None else "")
        )
    if status["grace_seconds"] is not None and code == 0:
        lines.append(
            f"  ending      {status['grace_seconds']:.0f} s left to save and end, then SIGKILL"
        )
    for request in status.get("requests", []):
        seen = "seen by the trainer" if request["seen"] else "not yet seen by the trainer"
        lines.append(f"  waiting     checkpoint {request['id']} at {request['at']}, {seen}")
    if exit_record["cause"]:
        how = [
            f"{key} {exit_record[key]}"
            for key in ("code", "signal")
            if exit_record[key] is not None
        ]
        lines.append(
            f"  last exit   {exit_record['cause']}"
            + (f" ({', '.join(how)})" if how else "")
            + (f": {printable(exit_record['message'])}" if exit_record.get("message") else "")
        )
    if replay["verified_steps"] or replay["diverged_steps"]:
        first = replay["first_diverged_step"]
        lines.append(
            f"  replay      {replay['verified_steps']} steps executed again and equal,"
            f" {replay['diverged_steps']} diverged" + (f" (first: {first})" if first else "")
        )
    lines.extend(f"  ALARM       {alarm['name']}: {alarm['detail']}" for alarm in status["alarms"])
    told = status.get("notifications") or {}
    if told.get("failed") or told.get("dropped"):
        lines.append(
            f"  notifier    {told['sent']} notifications delivered, {told['failed']} failed,"
            f" {told['dropped']} dropped: see supervisor.log"
        )
    logs = status.get("logs") or {}
    if logs.get("lost_lines") or logs.get("unlogged_attempts"):
        lines.append(
            f"  logs        {status['logs']['lost_lines']} lines of supervisor.log lost,"
            f" {status['logs']['unlogged_attempts']} attempts without a log"
        )
    return printable("\n".join(lines), keep="\n")


@click.command(epilog=exits(), name="list")
@json_option
def list_command(as_json: bool) -> int:
    """All runs in runs/, or where SUPERVISOR_RUNS says."""
    from supervisor import status as view
    from supervisor.progress import number
    from supervisor.rundir import RunError, list_runs

    rows = []
    for path in list_runs(runs(), _left_out):
        try:
            found, code = _observed(path, view)
        except (OSError, RunError) as error:
            _left_out(error)
            continue
        rows.append(
            {
                "run": path.name,
                "state": _STATE_WORDS[code],
                "phase": found["phase"] if found else None,
                "step": found["step"] if found else None,
                "target_step": found["target_step"] if found else None,
                "loss": found["loss"] if found else None,
            }
        )
    if as_json:
        print_json({"schema_version": 1, "runs": rows})
        return 0
    if not rows:
        click.echo(f"no runs in {runs()}; start one with: supervisor start --config FILE")
    for row in rows:
        step, target = ("-" if row[key] is None else row[key] for key in ("step", "target_step"))
        click.echo(
            f"{row['run']:<24} {row['state']:<12} {row['phase'] or '-':<10}"
            f" step {step}/{target}  loss {number(row['loss'])}"
        )
    return 0


def _left_out(error: Exception) -> None:
    words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    complain(f"left out: {words}", 0)


def _observed(path: Path, view: Any) -> tuple[Json | None, int]:
    """A run that is damaged hides no other; `status` says what is wrong with it."""
    from supervisor.journal import JournalDamaged
    from supervisor.records import RecordBroken
    from supervisor.rows import LedgerDamaged

    try:
        found: tuple[Json | None, int] = view.observe(path)
    except (JournalDamaged, RecordBroken, LedgerDamaged):
        return None, view.UNKNOWN
    return found


@click.command(epilog=exits())
@run_argument
@click.option(
    *("-n", "lines"),
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Lines from the end.",
)
@click.option(
    *("-f", "follow"),
    is_flag=True,
    help="Follow, also into the next attempt; Ctrl-C leaves the run alone.",
)
@click.option(
    "--attempt", type=click.IntRange(1), default=None, help="Which attempt; the newest by default."
)
@click.option("--supervisor", "own", is_flag=True, help="The supervisor's own log instead.")
def logs(run: str | None, lines: int, follow: bool, attempt: int | None, own: bool) -> int:
    """What the trainer printed."""
    from supervisor.tail import follow as follow_file, last_lines

    directory = find(run)
    path = _own_log(directory) if own else _log_of(directory, attempt)
    end = path.stat().st_size  # what is written from here on is the follower's
    if end == 0 and not own and sys.stderr.isatty():
        words = f"{path.name}: the trainer has printed nothing so far; its progress:"
        complain(f"{words} supervisor status {shlex.quote(str(directory))}", 0)
    _write("".join(last_lines(path, lines, end)))
    if follow:
        goes_on = attempt is None and not own
        for text in follow_file(path, end, _newest_log(path) if goes_on else None):
            _write(text)
    return 0


def _write(text: str) -> None:
    """As UTF-8, whatever the terminal's language: what is printed here may be in any."""
    click.echo(text.encode(), nl=False)


def _own_log(directory: Path) -> Path:
    from supervisor.rundir import RunError

    path = directory / SUPERVISOR_LOG_FILE
    if not path.is_file():
        raise RunError(f"{path}: no such file; the supervisor writes it anew when it next runs")
    return path


def _log_of(directory: Path, attempt: int | None) -> Path:
    from supervisor.rundir import RunError, attempt_logs

    known = attempt_logs(directory / LOGS)
    if not known:
        raise RunError(f"{directory}: there is no log of an attempt")
    chosen = max(known) if attempt is None else attempt
    if chosen not in known:
        raise RunError(f"{directory}: no log of attempt {chosen}; there are {sorted(known)}")
    return known[chosen]


def _newest_log(shown: Path) -> Callable[[], Path]:
    """Which log to follow: a newer attempt's once there is one, which is said."""
    from supervisor.rundir import attempt_logs

    current = shown

    def newest() -> Path:
        nonlocal current
        logs = attempt_logs(shown.parent)
        wanted = logs[max(logs)] if logs else current
        if wanted != current:
            complain(f"attempt {max(logs)} begins", 0)
            current = wanted
        return wanted

    return newest


@click.command(epilog=exits())
@run_argument
@json_option
@click.option(
    *("-n", "count"),
    type=click.IntRange(0),
    default=6,
    show_default=True,
    help="How many, newest last.",
)
def samples(run: str | None, as_json: bool, count: int) -> int:
    """What the model writes: the newest sample audits."""
    from supervisor.sidecars import read_samples
    from supervisor.tail import printable

    rows = read_samples(opened(run).samples)[-count:] if count > 0 else []
    if as_json:
        print_json({"schema_version": 1, "samples": rows})
        return 0
    for row in rows:
        prompt, text = printable(row["prompt"]), printable(row["text"])
        click.echo(f"step {row['step']:>7} | {click.style(prompt, bold=True)}{text}")
    return 0


class _ListFirst(click.Group):
    """`checkpoints RUN --json` is `checkpoints list RUN --json`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *context.help_option_names}
        if not args or args[0] not in known:
            args = ["list", *args]
        return super().parse_args(context, args)


@click.group(cls=_ListFirst, epilog=exits(), subcommand_metavar="[list] [RUN] | show STEP [RUN]")
def checkpoints() -> None:
    """The checkpoints of a run: `list` (also without the word) and `show`."""


@checkpoints.command(epilog=exits(), name="list")
@run_argument
@json_option
def checkpoints_list(run: str | None, as_json: bool) -> int:
    """All checkpoints, oldest first."""
    rows = list(filter(None, map(_checkpoint_row, _found_checkpoints(find(run)))))
    if as_json:
        print_json({"schema_version": 1, "checkpoints": rows})
        return 0
    for row in rows:
        click.echo(
            f"step {row['step']:>9}  {row['size_bytes']:>14,} bytes  {row['reason']:<9}"
            f" attempt {'-' if row['attempt'] is None else row['attempt']}  {row['path']}"
        )
    return 0


@checkpoints.command(epilog=exits(), name="show")
@click.argument("step", type=click.IntRange(0))
@run_argument
@json_option
def checkpoints_show(step: int, run: str | None, as_json: bool) -> int:
    """One checkpoint, with its digests and where its tensors are."""
    from supervisor.rundir import RunError

    place = find(run)
    found = next((one for one in _found_checkpoints(place) if one.step == step), None)
    if found is None:
        raise RunError(f"{place / CHECKPOINTS}: no checkpoint of step {step}")
    manifest = None if found.manifest is None else _manifest(found.manifest)
    shown = _of_bare(found) if manifest is None else _of_manifest(manifest)
    tensors = () if manifest is None else manifest.tensors
    if as_json:
        print_json(shown | {"tensors": [tensor.to_json() for tensor in tensors]})
        return 0
    for key, value in shown.items():
        click.echo(f"{key:<14} {'-' if value is None else value}")
    for tensor in tensors:
        click.echo(f"  {tensor.offset:>12} {tensor.name:<32} {list(tensor.shape)}")
    return 0


def _of_manifest(manifest: Any) -> Json:
    return {
        "schema_version": 1,
        "step": manifest.step,
        "run_id": manifest.run_id,
        "attempt": manifest.attempt,
        "epoch": manifest.epoch,
        "reason": manifest.reason,
        "parameters": manifest.parameters,
        "size_bytes": manifest.size_bytes,
        "binary_digest": manifest.binary_digest,
        "targets_seen": manifest.state["targets_seen"],
    }


def _of_bare(found: Any) -> Json:
    """The same of a checkpoint without a manifest, as another program writes it: it says no more
    than its header."""
    with found.binary.open("rb") as file:
        header, size_bytes = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    return {
        "schema_version": 1,
        "step": found.step,
        **dict.fromkeys(("run_id", "attempt", "epoch")),
        "reason": "bare",
        "parameters": int.from_bytes(header[4:], "little", signed=True),
        "size_bytes": size_bytes,
        **dict.fromkeys(("binary_digest", "targets_seen")),
    }


def _found_checkpoints(directory: Path) -> list[Any]:
    from supervisor.checkpoints import find

    return find(directory / CHECKPOINTS)


def _manifest(path: Path) -> Any:
    from supervisor.contract import ContractError
    from supervisor.readback import read_manifest
    from supervisor.rundir import RunError

    try:
        return read_manifest(path, cold=False)
    except ContractError as error:
        raise RunError(f"{error}; `supervisor verify` says what else is damaged") from error


def _checkpoint_row(found: Any) -> Json | None:
    """None where the run has removed it since it was found. One that is damaged hides no other."""
    from supervisor.rundir import RunError

    row: Json = {"step": found.step, "path": str(found.binary), "reason": "bare", "attempt": None}
    try:
        row["size_bytes"] = found.binary.stat().st_size
        if found.manifest is not None:
            manifest = _manifest(found.manifest)
            row |= {"reason": manifest.reason, "attempt": manifest.attempt}
    except FileNotFoundError:
        return None
    except RunError as error:
        complain(str(error), 0)
        row["reason"] = "damaged"
    return row


@click.command(epilog=exits("1 something here would get in the way of a run"))
@json_option
@click.option("--directory", type=click.Path(), default=None, help="Where runs would live.")
def doctor(as_json: bool, directory: str | None) -> int:
    """What this machine offers: PyTorch, devices, disk, sockets, signals."""
    from supervisor import doctor as examination

    findings = examination.examine(Path(directory) if directory else runs())
    if as_json:
        print_json({"schema_version": 1, "findings": [f.to_json() for f in findings]})
    else:
        for finding in findings:
            click.echo(f"{finding.mark} {finding.name:<16} {finding.detail}")
    return 1 if any(finding.verdict == "bad" for finding in findings) else 0
