"""What all commands share: how a run is named, how results and complaints are printed.

What may live here: click decorators and small printers. Nothing heavy: every command imports it.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import click

from supervisor.contract import JOURNAL_FILE, ledger_name, runs_directory

if TYPE_CHECKING:
    from supervisor.rundir import RunDirectory

PREFIX: Final = "supervisor: "

Command = Callable[..., Any]


OUTPUT_CLOSED: Final = 141  # 128 + SIGPIPE, as a shell says it of other programs
OUTPUT_FAILED: Final = 74  # EX_IOERR: the output, or a file, on a disk that is full or broken


_EVERYWHERE: Final = {
    2: "usage, settings, or a file that cannot be used",
    70: "our own fault",
    OUTPUT_FAILED: "a disk that is full or broken",
    130: "interrupted",
    OUTPUT_CLOSED: "nobody read the output",
}


def exits(*own: str) -> str:
    """The end of a command's help: what its exit codes mean, its own ("1 the run failed") over
    those that all commands share."""
    words = {int(code): text for code, _, text in (one.partition(" ") for one in own)}
    meanings = {0: "done"} | _EVERYWHERE | words
    return "Exit code: " + ", ".join(f"{code} {meanings[code]}" for code in sorted(meanings)) + "."


def mute(stream: TextIO) -> None:
    """Drops what a stream could not write, so that it does not fail again when Python ends."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def complain(text: str, code: int) -> int:
    for line in text.splitlines():
        click.echo(f"{PREFIX}{line}", err=True)
    return int(code)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends this like Ctrl-C does, so that what is half done goes too: a process, a
    directory."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def runs() -> Path:
    return Path(runs_directory(os.environ))


def find(run: str | None) -> Path:
    from supervisor.rundir import find_run

    return find_run(run, runs())


def opened(run: str | None) -> RunDirectory:
    """The run and its name: that of its one ledger, else what its journal says."""
    import orjson

    from supervisor.rundir import RunDirectory

    path, ending = find(run), ledger_name("")
    ledgers = sorted(path.glob(f"*{ending}"))
    if len(ledgers) == 1:
        return RunDirectory(path, ledgers[0].name.removesuffix(ending))
    with (path / JOURNAL_FILE).open("rb") as lines:
        for line in lines:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                break
            if isinstance(record, dict) and record.get("record") == "run_created":
                return RunDirectory(path, str(record.get("run")))
    return RunDirectory(path, path.resolve().name)


def print_json(value: Any) -> None:
    import orjson

    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def run_argument(function: Command) -> Command:
    return click.argument("run", required=False)(function)


def json_option(function: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")(
        function
    )


class Seconds(click.FloatRange):
    """How long to wait; "nan" is a float too, and no deadline."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        seconds = super().convert(value, parameter, context)
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds.", parameter, context)
        return seconds


def timeout_option(seconds: float) -> Callable[[Command], Command]:
    return click.option(
        "--timeout",
        "timeout_seconds",
        type=Seconds(min=0),
        default=seconds,
        show_default=True,
        help="Seconds to wait for the reply; exit code 124 when they pass.",
    )


request_id_option = click.option(
    "--request-id", default=None, help="Repeat a request safely: the same id is carried out once."
)
