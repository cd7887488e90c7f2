"""Commands about exactness and its use: replay, fork.

What may live here: arguments, progress, and results in words. The work is done in `reexecution` and
`fork`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from supervisor.contract import RUN_FILE, ExitCode
from supervisor.terminal import (
    complain,
    exits,
    find,
    json_option,
    print_json,
    run_argument,
    runs,
    terminable,
)

if TYPE_CHECKING:
    from supervisor.reexecution import Report


@click.command(
    epilog=exits(
        "0 all equal",
        "1 something differs or the trainer failed",
        "2 usage, or it cannot be executed",
    )
)
@run_argument
@click.option(
    "--from",
    "start",
    type=click.IntRange(0),
    required=True,
    help="A checkpoint; 0 is the beginning.",
)
@click.option(
    "--to", "stop", type=click.IntRange(1), default=None, help="Default: the last recorded step."
)
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False),
    default=None,
    help="Where to work; default: beside the run.",
)
@json_option
def replay(
    run: str | None, start: int, stop: int | None, scratch: str | None, as_json: bool
) -> int:
    """Execute a stretch again and compare every receipt and every later checkpoint.

    The trainer runs in a scratch directory, which is removed. The run itself is only read, and may
    go on meanwhile. Steps already proven by a resume show in `status`.
    """
    from supervisor import reexecution

    plan = reexecution.plan(find(run), start, stop)
    try:
        with terminable(), _progress(plan.stop - plan.start) as tick:
            report = reexecution.execute(
                plan, os.environ, scratch=Path(scratch) if scratch else None, tick=tick
            )
    except reexecution.TrainerEnded as ended:
        return complain(f"the trainer ended before step {plan.stop}: {ended}", ExitCode.FAILED)
    for key, (then, now) in report.environment_changes.items():
        click.echo(f"exactness not claimed: {key}: then {then!r}, now {now!r}", err=True)
    if as_json:
        print_json({"schema_version": 1, **report.to_json()})
    else:
        click.echo(_report_text(report))
    return int(ExitCode.FAILED if report.difference is not None else ExitCode.OK)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[int], None]]:
    """What to call for each step: a bar for a terminal, nothing for a file."""
    from supervisor.progress import STANDARD_ERROR, is_live

    if not is_live(STANDARD_ERROR):
        yield lambda step: None
        return
    with click.progressbar(length=steps, label="replay", file=sys.stderr) as bar:
        yield lambda step: bar.update(1)


def _report_text(report: Report) -> str:
    compared = ", ".join(map(str, report.checkpoints_compared)) or "none"
    done = (
        f"{report.run}: {report.steps_compared} steps from {report.start} on executed again and"
        f" equal to the last bit; checkpoints equal: {compared} ({report.seconds:.1f} s)"
    )
    if report.difference is None:
        return done
    first = report.difference
    lines = [
        done,
        f"step {first.step} DIFFERS in its {first.where}; likely cause: {first.likely}",
    ]
    for part in first.parts:
        place = f" at {part.detail}" if part.detail else ""
        lines.append(f"  {part.name}{place}: recorded {part.recorded!r}, now {part.now!r}")
    return "\n".join(lines)


@click.command(epilog=exits("1 the record of the run is damaged"))
@click.argument("names", nargs=-1, required=True, metavar="[RUN] NEWRUN")
@click.option(
    "--at-step", "step", type=click.IntRange(1), required=True, help="A checkpoint of the run."
)
@json_option
def fork(names: tuple[str, ...], step: int, as_json: bool) -> int:
    """Make a new run from a checkpoint of another; start it with the command that is printed.

    NEWRUN is a name (below runs/) or a directory. The new run has the same settings, and a history
    that begins with that of the old one up to the checkpoint, which stays pinned there.
    """
    from supervisor import fork as forking

    if len(names) > 2:
        raise click.UsageError(f"expected [RUN] NEWRUN, got {len(names)} names")
    parent = find(names[0] if len(names) == 2 else None)
    named = Path(names[-1])
    target = named if os.sep in names[-1] else runs() / named
    with terminable():
        made = forking.fork(parent, step, target.absolute())
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "run": made.run,
                "run_id": made.run_id,
                "directory": str(made.directory),
                "parent_run_id": made.parent,
                "step": made.step,
                "ledger_entries": made.entries,
                "ledger_sha256": made.sha256,
            }
        )
    else:
        click.echo(
            f"{made.run}: forked at step {made.step}, with {made.entries} entries of history\n"
            f"to train on: supervisor start --config {shlex.quote(str(made.directory / RUN_FILE))}"
        )
    return 0
