"""Commands about what is on record: verify, history, import.

What may live here: arguments, progress bars, printing. What is read and how is in `verify`,
`history` and `import_run`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from supervisor.contract import RUN_FILE, ExitCode
from supervisor.terminal import (
    complain,
    exits,
    json_option,
    opened,
    print_json,
    run_argument,
    runs,
    terminable,
)

if TYPE_CHECKING:
    from supervisor.verify import Report

_BAR_BYTES = 4 * 1024 * 1024  # a bar that moves more often costs more than it shows


@contextmanager
def _progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, in bytes, where somebody looks at it."""
    from supervisor.progress import STANDARD_ERROR, is_live

    if not is_live(STANDARD_ERROR):
        yield lambda _: None
        return
    with click.progressbar(
        length=total_bytes, label=label, file=sys.stderr, update_min_steps=_BAR_BYTES
    ) as bar:
        yield bar.update


@click.command(
    epilog=exits("0 all proven", "1 something is damaged or missing (each with file and place)")
)
@run_argument
@click.option("--repair", is_flag=True, help="Move bad checkpoints to quarantine/; nothing else.")
@json_option
def verify(run: str | None, repair: bool, as_json: bool) -> int:
    """Read everything back from the device and compare it with what was recorded.

    The journal's chain, every byte of the ledger that a checkpoint or the end of a life has bound,
    every checkpoint against its manifest and the journal, stored settings and policies, archives.
    Takes no lock, so it may run beside training.
    """
    from supervisor import repair as repairing, verify as proof

    directory = opened(run)
    examine = repairing.repair if repair else proof.verify
    with _progress("verifying", proof.size_bytes(directory)) as advance:
        report = examine(directory, advance)
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)
    return int(ExitCode.FAILED if report.problems else ExitCode.OK)


def _print_report(report: Report) -> None:
    count = report.counts
    for problem in report.problems:
        click.echo(str(problem))
    for note in report.notes:
        click.echo(f"note: {note}")
    for place in report.moved:
        click.echo(f"moved to {place}")
    click.echo(
        f"{report.run}: read {count['journal_records']} journal records,"
        f" {count['ledger_entries']} ledger entries ({count['ledger_entries_bound']} proven by"
        f" {count['ledger_bindings']} bindings), {count['checkpoints']} checkpoints,"
        f" {count['stored_files']} stored files, {count['archives']} archives"
    )
    speed = report.bytes / max(report.seconds, 1e-9) / 1e6
    click.echo(f"{report.bytes:,} bytes in {report.seconds:.1f} s ({speed:,.0f} MB/s)")
    found = len(report.problems)
    verdict = f"{found} problem{'s' if found > 1 else ''}" if found else "all proven"
    click.echo(click.style(verdict, fg="red" if found else "green", bold=True))


@click.command(epilog=exits("1 the history is damaged or not there"))
@run_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "csv", "andrea"]),
    default="json",
    show_default=True,
    help="andrea: an array of [step, loss].",
)
@click.option("--raw", is_flag=True, help="Every row of every attempt, in the order of the file.")
@click.option("--from", "first", type=click.IntRange(0), default=None, help="First step.")
@click.option("--to", "last", type=click.IntRange(0), default=None, help="Last step.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1,
    help="Of each N entries keep the last, the lowest and the highest loss.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None)
def history(
    run: str | None,
    form: str,
    raw: bool,
    first: int | None,
    last: int | None,
    every: int,
    output: Path | None,
) -> int:
    """Export the history: one entry a step, whatever was executed twice or left behind.

    A loss that is not finite is the text "nan", "inf" or "-inf" in every format.
    """
    from supervisor import history as exports
    from supervisor.rows import LedgerDamaged

    directory = opened(run)
    _check_output(output, directory.path)
    try:
        found = exports.History(directory.ledger)
    except FileNotFoundError:
        return complain(f"{directory.ledger}: not there", ExitCode.FAILED)
    except LedgerDamaged as damage:
        return complain(str(damage), ExitCode.FAILED)
    try:
        entries = exports.between(found.raw() if raw else found.canonical(), first, last)
        thinned = exports.thin(entries, every) if every > 1 else entries
        with _opened(output) as out:
            exports.FORMATS[form](thinned, out)
            out.flush()
    except LedgerDamaged as damage:
        return complain(str(damage), ExitCode.FAILED)
    if found.torn:
        complain(f"{directory.ledger}: a torn row at its end was left out", ExitCode.OK)
    return int(ExitCode.OK)


def _opened(output: Path | None) -> AbstractContextManager[BinaryIO]:
    from supervisor.output_file import writing

    return nullcontext(sys.stdout.buffer) if output is None else writing(output)


def _check_output(output: Path | None, run: Path) -> None:
    if output is not None and output.resolve().is_relative_to(run.resolve()):
        raise click.UsageError(f"--output {output} is inside the run directory, which is the run's")


@click.command(epilog=exits(), name="import")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--name", default=None, help="Name of the new run, else the model's.")
@click.option("--config", "config_path", type=click.Path(), default=None, help="Settings (TOML).")
def import_command(directory: Path, name: str | None, config_path: str | None) -> int:
    """Make a run out of another program's folder, which stays as it is.

    DIRECTORY holds step_*.bin files, <model>.loss.json (rows of [step, loss]) and perhaps
    <model>.samples.json. Without --config the run has default settings: give the model and the
    trainer that fit the checkpoints.
    """
    from supervisor import import_run as importing
    from supervisor.config import ConfigError

    try:
        with terminable(), _progress("importing", importing.size_bytes(directory)) as advance:
            made = importing.import_run(directory, name, runs(), config_path, advance)
    except ConfigError as error:
        return complain(str(error), ExitCode.USAGE)
    for left_out in made.left_out:
        complain(f"left out: {left_out}", ExitCode.OK)
    if made.beyond:
        text = (
            f"the checkpoints of steps {made.beyond} are beyond the history; `start` will set them"
        )
        complain(f"{text} aside and go on from an older one", ExitCode.OK)
    click.echo(
        f"{made.run}: {made.entries} entries, {len(made.steps)} checkpoints, {made.samples}"
        f" samples in {made.directory}"
    )
    if made.stranded:
        text = "our own trainer cannot go on from checkpoints without a manifest, as these are"
        complain(f"{text}: to train on, import with --config and a trainer.command", ExitCode.OK)
    else:
        file = shlex.quote(str(made.directory / RUN_FILE))
        click.echo(f"to go on: supervisor start --config {file}")
    return int(ExitCode.OK)
