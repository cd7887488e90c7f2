"""What all commands share: how a run is named, how results and complaints are printed.

What may live here: click decorators and small printers. Nothing heavy: every command imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

RUNS_VARIABLE: Final = "SUPERVISOR_RUNS"
PREFIX: Final = "supervisor: "

Command = Callable[..., Any]


def complain(text: str, code: int) -> int:
    for line in text.splitlines():
        click.echo(f"{PREFIX}{line}", err=True)
    return int(code)


def runs() -> Path:
    return Path(os.environ.get(RUNS_VARIABLE, "runs"))


def find(run: str | None) -> Path:
    from supervisor.rundir import find_run

    return find_run(run, runs())


def print_json(value: Any) -> None:
    import orjson

    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def run_argument(function: Command) -> Command:
    return click.argument("run", required=False)(function)


def json_option(function: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")(
        function
    )


def timeout_option(seconds: float) -> Callable[[Command], Command]:
    return click.option(
        "--timeout",
        "timeout_seconds",
        type=float,
        default=seconds,
        show_default=True,
        help="Seconds to wait for the reply; exit code 124 when they pass.",
    )


request_id_option = click.option(
    "--request-id", default=None, help="Repeat a request safely: the same id is carried out once."
)
