"""The command line: arguments in, exit codes out.

What may live here: parsing, printing, exit codes. Heavy modules (pydantic, zmq) are imported by
the one command that needs them, because `status` runs in shell prompts.

Exit codes: 0 done, 1 failed, 2 usage or configuration or refused, 70 our own fault, 124 deadline
passed, 130 forced; `status`: 0 running, 1 dead, 3 not running, 4 unknown.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from supervisor import __version__
from supervisor.contract import CHECKPOINTS, LOGS, ExitCode, Json, parse_attempt_stem

RUNS_VARIABLE = "SUPERVISOR_RUNS"


def main() -> int:
    """Runs one command and returns its exit code."""
    from supervisor.rundir import RunError

    try:
        result = cli.main(standalone_mode=False)
        return int(result or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return int(ExitCode.USAGE)
    except click.Abort:
        return int(ExitCode.FORCED)
    except RunError as error:
        return _complain(str(error), ExitCode.USAGE)
    except BrokenPipeError:
        # Whoever read our output has gone; what was to be said is of no use to anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        # Whatever gets here is our mistake or a machine that fails us: say all we know, with the
        # one exit code that tells a service manager to start us again.
        traceback.print_exc()
        return int(ExitCode.OURS)


def _complain(text: str, code: int) -> int:
    for line in text.splitlines():
        click.echo(f"supervisor: {line}", err=True)
    return int(code)


def _runs() -> Path:
    return Path(os.environ.get(RUNS_VARIABLE, "runs"))


def _find(run: str | None) -> Path:
    from supervisor.rundir import find_run

    return find_run(run, _runs())


def _print_json(value: Any) -> None:
    import orjson

    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("run", required=False)(function)


def _json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")(
        function
    )


def _timeout_option(seconds: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--timeout",
        "timeout_seconds",
        type=float,
        default=seconds,
        show_default=True,
        help="Seconds to wait for the reply; exit code 124 when they pass.",
    )


_request_id_option = click.option(
    "--request-id", default=None, help="Repeat a request safely: the same id is carried out once."
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  supervisor start --config configs/quickstart.toml    train, with live progress
  supervisor start --config FILE --detach              the same in the background
  supervisor status --json                             where it stands, for scripts
  supervisor checkpoint                                save now and train on
  supervisor stop                                      finish the step, save, end

SIGTERM to the trainer means: finish the step, save, exit. SIGUSR1 means: save and carry on
(some other tools save and leave on SIGUSR1; this one stays).
A RUN is a name in runs/ or a run directory; without one, the run that ran last.""",
)
@click.version_option(__version__, prog_name="supervisor")
def cli() -> None:
    """Keeps a training run alive, exact and on record."""


@cli.command()
@click.option("--config", "config_path", required=True, type=click.Path(), help="Settings (TOML).")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting.")
@click.option("--detach", is_flag=True, help="Return once the supervisor runs in the background.")
@click.option("--as-recorded", is_flag=True, help="Obey a recorded stop (for service managers).")
@click.option("--from-scratch", is_flag=True, help="Allow step 0 when no checkpoint is left.")
def start(
    config_path: str,
    overrides: tuple[str, ...],
    detach: bool,
    as_recorded: bool,
    from_scratch: bool,
) -> int:
    """Start a run, or take it up again where its newest valid checkpoint left it.

    \b
    Exit code: 0 finished or cleanly stopped, 1 the run failed, 2 configuration or refused,
    70 our own fault, 130 forced.
    """
    from supervisor import start as starting

    request = starting.Request(None if as_recorded else "run", "", from_scratch)
    try:
        if detach:
            settings = starting.config.load(config_path, overrides, os.environ)
            arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
            return starting.detach(arguments, Path(settings.run.directory))
        return starting.start_from_file(config_path, overrides, os.environ, request)
    except starting.Refused as refusal:
        return _complain(str(refusal), refusal.code)
    except starting.ConfigError as error:
        return _complain(str(error), ExitCode.USAGE)


def _ask(run: str | None, verb: str, timeout: float, request_id: str | None, **content: Any) -> Any:
    """The answer of the run's supervisor; a failure is printed and becomes an exit code."""
    from supervisor import client

    directory = _find(run)
    id = request_id or client.new_request_id()
    try:
        answer = client.ask(directory, verb, id=id, timeout_seconds=timeout, **content)
    except client.NoSupervisor as error:
        raise click.exceptions.Exit(_complain(str(error), ExitCode.FAILED)) from error
    except client.DeadlinePassed as error:
        raise click.exceptions.Exit(_complain(str(error), ExitCode.DEADLINE)) from error
    if answer.outcome != "done":
        text = f"{answer.outcome}: {answer.why}"
        raise click.exceptions.Exit(_complain(text, ExitCode.FAILED))
    return answer


@cli.command()
@_run_argument
@_timeout_option(300.0)
@_request_id_option
def stop(run: str | None, timeout_seconds: float, request_id: str | None) -> int:
    """Finish the step, save, end; returns when the trainer has said farewell.

    Without a living supervisor this takes the run over, stops what still trains, and records the
    wish, so that `start --as-recorded` leaves the run alone.
    """
    from supervisor import client

    directory = _find(run)
    id = request_id or client.new_request_id()
    try:
        answer = client.ask(directory, "stop", id=id, timeout_seconds=timeout_seconds)
    except client.NoSupervisor:
        from supervisor import start as starting

        try:
            return starting.resume_directory(
                directory, os.environ, starting.Request("stop", id, False)
            )
        except starting.Refused as refusal:
            return _complain(str(refusal), refusal.code)
    except client.DeadlinePassed as error:
        return _complain(str(error), ExitCode.DEADLINE)
    if answer.outcome != "done":
        return _complain(f"{answer.outcome}: {answer.why}", ExitCode.FAILED)
    step = answer.result.get("step")
    click.echo(f"{answer.result['phase']}; the newest checkpoint is step {step}")
    return 0


@cli.command()
@_run_argument
@_timeout_option(300.0)
@_request_id_option
def restart(run: str | None, timeout_seconds: float, request_id: str | None) -> int:
    """Save, end the trainer and start it again; returns when the new one is ready."""
    answer = _ask(run, "restart", timeout_seconds, request_id)
    click.echo(f"attempt {answer.result['attempt']} is running")
    return 0


@cli.command()
@_run_argument
@click.option("--at", type=click.Choice(["now", "boundary"]), default="now", show_default=True)
@_timeout_option(300.0)
@_request_id_option
@_json_option
def checkpoint(
    run: str | None, at: str, timeout_seconds: float, request_id: str | None, as_json: bool
) -> int:
    """Save and train on; returns when the checkpoint is committed."""
    answer = _ask(run, "checkpoint", timeout_seconds, request_id, at=at)
    if as_json:
        _print_json({"schema_version": 1, "id": answer.id, **answer.result})
    else:
        click.echo(f"step {answer.result['step']}: {answer.result['path']}")
    return 0


@cli.command()
@_run_argument
@_json_option
@click.option("--config", "show_config", is_flag=True, help="Each setting and where it came from.")
def status(run: str | None, as_json: bool, show_config: bool) -> int:
    """Where a run stands. Exit code: 0 running, 1 dead, 3 not running, 4 unknown."""
    from supervisor import status as view

    directory = _find(run)
    if show_config:
        return _show_config(directory)
    found, code = view.observe(directory)
    if found is None:
        _complain(f"{directory}: no status yet", code)
    elif as_json:
        _print_json(found)
    else:
        click.echo(status_text(found, code))
    return code


def _show_config(directory: Path) -> int:
    from supervisor import config

    settings = config.load(directory / "run.toml", (), os.environ)
    for section, table in settings.tree().items():
        for key, value in table.items():
            origin = settings.origins.get(f"{section}.{key}", "default")
            click.echo(f"{section}.{key} = {value!r}  ({origin})")
    return 0


_STATE_WORDS = {0: "running", 1: "DEAD", 3: "not running", 4: "unknown"}


def status_text(status: Json, code: int) -> str:
    """The status for a person: state and reason first, then where it stands."""
    from supervisor.progress import number

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
        age = checkpoint.get("age_seconds")
        verified = "verified" if checkpoint["verified"] else "not verified yet"
        lines.append(
            f"  checkpoint  step {checkpoint['step']}, {verified}"
            + (f", {age:.0f} s old" if age is not None else "")
        )
    if exit_record["cause"]:
        lines.append(
            f"  last exit   {exit_record['cause']} (code {exit_record['code']}, signal"
            f" {exit_record['signal']})"
        )
    if replay["verified_steps"] or replay["diverged_steps"]:
        first = replay["first_diverged_step"]
        lines.append(
            f"  replay      {replay['verified_steps']} steps executed again and equal,"
            f" {replay['diverged_steps']} diverged" + (f" (first: {first})" if first else "")
        )
    lines.extend(f"  ALARM       {alarm['name']}: {alarm['detail']}" for alarm in status["alarms"])
    return "\n".join(lines)


@cli.command(name="list")
@_json_option
def list_command(as_json: bool) -> int:
    """All runs in runs/."""
    from supervisor import status as view
    from supervisor.rundir import list_runs

    rows = []
    for path in list_runs(_runs()):
        found, code = view.observe(path)
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
        _print_json({"schema_version": 1, "runs": rows})
        return 0
    if not rows:
        click.echo(f"no runs in {_runs()}; start one with: supervisor start --config FILE")
    for row in rows:
        click.echo(
            f"{row['run']:<24} {row['state']:<12} {row['phase'] or '-':<10}"
            f" step {row['step']}/{row['target_step']}  loss {row['loss']}"
        )
    return 0


@cli.command()
@_run_argument
@click.option("-n", "lines", type=int, default=20, show_default=True, help="Lines from the end.")
@click.option("-f", "follow", is_flag=True, help="Follow; Ctrl-C leaves the run alone.")
@click.option("--attempt", type=int, default=None, help="Which attempt; the newest by default.")
@click.option("--supervisor", "own", is_flag=True, help="The supervisor's own log instead.")
def logs(run: str | None, lines: int, follow: bool, attempt: int | None, own: bool) -> int:
    """What the trainer printed."""
    from supervisor.tail import follow as follow_file
    from supervisor.tail import last_lines

    directory = _find(run)
    path = directory / "supervisor.log" if own else _log_of(directory, attempt)
    click.echo("".join(last_lines(path, lines)), nl=False)
    if follow:
        for text in follow_file(path):
            click.echo(text, nl=False)
    return 0


def _log_of(directory: Path, attempt: int | None) -> Path:
    from supervisor.rundir import RunError

    known = {
        number: path
        for path in (directory / LOGS).glob("*.log")
        if (number := parse_attempt_stem(path.stem)) is not None
    }
    if not known:
        raise RunError(f"{directory}: no attempt has run yet")
    chosen = max(known) if attempt is None else attempt
    if chosen not in known:
        raise RunError(f"{directory}: no attempt {chosen}; there are {sorted(known)}")
    return known[chosen]


@cli.command()
@_run_argument
@_json_option
@click.option("-n", "count", type=int, default=6, show_default=True, help="How many, newest last.")
def samples(run: str | None, as_json: bool, count: int) -> int:
    """What the model writes: the newest sample audits."""
    from supervisor.contract import samples_name
    from supervisor.rundir import read_json
    from supervisor.tail import printable

    directory = _find(run)
    name = (_status_of(directory) or {}).get("run", directory.name)
    rows = (read_json(directory / samples_name(name)) or [])[-count:] if count > 0 else []
    if as_json:
        _print_json({"schema_version": 1, "samples": rows})
        return 0
    for row in rows:
        prompt, text = printable(row["prompt"]), printable(row["text"])
        click.echo(f"step {row['step']:>7} | {click.style(prompt, bold=True)}{text}")
    return 0


def _status_of(directory: Path) -> Json | None:
    from supervisor.rundir import read_status

    return read_status(directory)


@cli.group(invoke_without_command=True)
@click.pass_context
def checkpoints(context: click.Context) -> None:
    """The checkpoints of a run: `list` (default) and `show`."""
    if context.invoked_subcommand is None:
        context.invoke(checkpoints_list, run=None, as_json=False)


@checkpoints.command(name="list")
@_run_argument
@_json_option
def checkpoints_list(run: str | None, as_json: bool) -> int:
    """All checkpoints, oldest first."""
    rows = [_checkpoint_row(directory) for directory in _found_checkpoints(_find(run))]
    if as_json:
        _print_json({"schema_version": 1, "checkpoints": rows})
        return 0
    for row in rows:
        click.echo(
            f"step {row['step']:>9}  {row['size_bytes']:>14,} bytes  {row['reason']:<9}"
            f" attempt {row['attempt']}  {row['path']}"
        )
    return 0


@checkpoints.command(name="show")
@click.argument("step", type=int)
@_run_argument
@_json_option
def checkpoints_show(step: int, run: str | None, as_json: bool) -> int:
    """One checkpoint, with its digests and where its tensors are."""
    from supervisor.contract import checkpoint_stem, parse_manifest
    from supervisor.rundir import RunError

    path = _find(run) / CHECKPOINTS / f"{checkpoint_stem(step)}.json"
    if not path.is_file():
        raise RunError(f"no checkpoint of step {step}: {path} is not there")
    manifest = parse_manifest(path.read_bytes(), str(path))
    shown = {
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
        "tensors": [tensor.to_json() for tensor in manifest.tensors],
    }
    if as_json:
        _print_json(shown)
        return 0
    for key, value in shown.items():
        if key != "tensors":
            click.echo(f"{key:<14} {value}")
    for tensor in manifest.tensors:
        click.echo(f"  {tensor.offset:>12} {tensor.name:<32} {list(tensor.shape)}")
    return 0


def _found_checkpoints(directory: Path) -> list[Any]:
    from supervisor.checkpoints import find

    return find(directory / CHECKPOINTS)


def _checkpoint_row(found: Any) -> Json:
    from supervisor.contract import parse_manifest

    row: Json = {
        "step": found.step,
        "path": str(found.binary),
        "size_bytes": found.binary.stat().st_size,
        "reason": "bare",
        "attempt": None,
    }
    if found.manifest is not None:
        manifest = parse_manifest(found.manifest.read_bytes(), str(found.manifest))
        row |= {"reason": manifest.reason, "attempt": manifest.attempt}
    return row


@cli.command()
@_json_option
@click.option("--directory", type=click.Path(), default=None, help="Where runs would live.")
def doctor(as_json: bool, directory: str | None) -> int:
    """What this machine offers: PyTorch, devices, disk, sockets, signals."""
    from supervisor import doctor as examination

    findings = examination.examine(Path(directory) if directory else _runs())
    if as_json:
        _print_json({"schema_version": 1, "findings": [f.to_json() for f in findings]})
    else:
        for finding in findings:
            click.echo(f"{finding.mark} {finding.name:<16} {finding.detail}")
    return 1 if any(finding.verdict == "bad" for finding in findings) else 0
