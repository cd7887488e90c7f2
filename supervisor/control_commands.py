"""Commands that change something: start, stop, restart, checkpoint.

What may live here: arguments, one request, its answer in words. What a request leads to is the
machine's decision.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from supervisor.contract import ExitCode
from supervisor.terminal import (
    complain,
    exits,
    find,
    json_option,
    print_json,
    request_id_option,
    run_argument,
    timeout_option,
)

ENDING_INTERVAL_SECONDS: Final = 0.1


@click.command(
    epilog=exits(
        "0 finished or cleanly stopped",
        "1 the run failed",
        "2 usage, settings, or refused",
        "124 no answer in time (--detach)",
        "130 forced",
    )
)
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
    """Start a run, or take it up again where its newest valid checkpoint left it."""
    from supervisor import config, start as starting
    from supervisor.output import forgiving

    request = starting.Request(None if as_recorded else "run", "", from_scratch)
    try:
        with forgiving("stdout"):  # the exit code is the run's, whoever reads
            if detach:
                settings = config.load(config_path, overrides, os.environ)
                arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
                return starting.detach(arguments, Path(settings.run.directory))
            return starting.start_from_file(config_path, overrides, os.environ, request)
    except starting.Refused as refusal:
        return complain(str(refusal), refusal.code)


def _ask(run: str | None, verb: str, timeout: float, request_id: str | None, **content: Any) -> Any:
    """The answer of the run's supervisor; a failure is printed and becomes an exit code."""
    from supervisor import client

    directory = find(run)
    id = request_id or client.new_request_id()
    try:
        answer = client.ask(directory, verb, id=id, timeout_seconds=timeout, **content)
    except client.NoSupervisor as error:
        raise click.exceptions.Exit(complain(str(error), ExitCode.FAILED)) from error
    except client.DeadlinePassed as error:
        raise click.exceptions.Exit(complain(str(error), ExitCode.DEADLINE)) from error
    if answer.outcome != "done":
        text = f"{answer.outcome}: {answer.why}"
        raise click.exceptions.Exit(complain(text, ExitCode.FAILED))
    return answer


@click.command(epilog=exits("1 refused, or the run failed", "124 no reply in time"))
@run_argument
@timeout_option(300.0)
@request_id_option
def stop(run: str | None, timeout_seconds: float, request_id: str | None) -> int:
    """Finish the step, save, end; returns when the trainer has said farewell.

    Without a living supervisor this takes the run over, stops what still trains, and records the
    wish, so that `start --as-recorded` leaves the run alone.
    """
    from supervisor import client

    directory = find(run)
    id = request_id or client.new_request_id()
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            left_seconds = max(0.0, deadline - time.monotonic())
            answer = client.ask(directory, "stop", id=id, timeout_seconds=left_seconds)
            if answer.outcome != "busy" or left_seconds == 0.0:
                break
            # That supervisor is ending for a reason of its own, and takes no wish any more.
            time.sleep(ENDING_INTERVAL_SECONDS)
        except client.DeadlinePassed as error:
            return complain(str(error), ExitCode.DEADLINE)
        except client.NoSupervisor:
            stopped = _stop_alone(directory, id)
            if stopped is not None:
                return stopped
    if answer.outcome != "done":
        return complain(f"{answer.outcome}: {answer.why}", ExitCode.FAILED)
    step = answer.result.get("step")
    click.echo(f"{answer.result['phase']}; the newest checkpoint is step {step}")
    return 0


def _stop_alone(directory: Path, id: str) -> int | None:
    """Takes over a run that nobody supervises, and stops it; None where somebody does by now."""
    from supervisor import start as starting

    try:
        request = starting.Request("stop", id)
        return starting.resume_directory(directory, os.environ, request)
    except starting.Owned:
        return None
    except starting.Refused as refusal:
        return complain(str(refusal), refusal.code)


@click.command(
    epilog=exits("1 refused, busy, or nobody supervises the run", "124 no reply in time")
)
@run_argument
@timeout_option(300.0)
@request_id_option
def restart(run: str | None, timeout_seconds: float, request_id: str | None) -> int:
    """Save, end the trainer and start it again; returns when the new one is ready."""
    answer = _ask(run, "restart", timeout_seconds, request_id)
    click.echo(f"attempt {answer.result['attempt']} is running")
    return 0


@click.command(
    epilog=exits("1 refused, busy, or nobody supervises the run", "124 no reply in time")
)
@run_argument
@click.option("--at", type=click.Choice(["now", "boundary"]), default="now", show_default=True)
@timeout_option(300.0)
@request_id_option
@json_option
def checkpoint(
    run: str | None, at: str, timeout_seconds: float, request_id: str | None, as_json: bool
) -> int:
    """Save and train on; returns when the checkpoint is committed."""
    answer = _ask(run, "checkpoint", timeout_seconds, request_id, at=at)
    if as_json:
        print_json({"schema_version": 1, "id": answer.id, **answer.result})
    else:
        click.echo(f"step {answer.result['step']}: {answer.result['path']}")
    return 0
