"""The command line: one group, its commands, and the exit code of whatever happens.

What may live here: the group and `main`. Each command module imports what is heavy (pydantic, zmq)
inside the command that needs it, because `status` runs in shell prompts.

Exit codes: 0 done, 1 failed, 2 usage or configuration or refused or a file that cannot be used,
70 our own fault, 74 a disk that is full or broken, 124 deadline passed, 130 forced, 141 nobody read
the output; `status`: 0 running, 1 dead, 3 not running, 4 unknown.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Final

import click

from supervisor import (
    __version__,
    control_commands,
    exactness_commands,
    policy_commands,
    proof_commands,
    service_commands,
    view_commands,
)
from supervisor.contract import TEMPORARY_PREFIX, ExitCode
from supervisor.foreign import OperatorError
from supervisor.output import forgiving, occupy
from supervisor.progress import has_controls
from supervisor.terminal import OUTPUT_CLOSED, OUTPUT_FAILED, complain, mute

_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
_HINTS: Final = {
    errno.EACCES: "use a place that you may use, or be its owner",
    errno.EPERM: "use a place that you may use, or be its owner",
    errno.EROFS: "use a place that can be written",
    errno.ENOENT: "expected it to be there",
    errno.ENOTDIR: "expected a directory",
    errno.EEXIST: "expected a directory, or nothing yet",
    errno.EISDIR: "expected a file",
}


def main() -> int:
    """Runs one command and returns its exit code. A complaint that nobody reads changes none."""
    occupy()
    with forgiving("stderr"):
        return _main()


def _main() -> int:
    from supervisor.journal import JournalDamaged
    from supervisor.records import RecordBroken
    from supervisor.rows import LedgerDamaged
    from supervisor.rundir import RunError

    try:
        result = cli.main(standalone_mode=False, color=None if has_controls() else False)
        return int(result or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return int(ExitCode.USAGE)
    except click.Abort:
        return int(ExitCode.FORCED)
    except SystemExit:  # click's answer to a closed pipe, whatever the command
        return OUTPUT_CLOSED
    except (RunError, OperatorError) as error:
        return complain(str(error), ExitCode.USAGE)
    except (JournalDamaged, LedgerDamaged, RecordBroken) as error:
        return complain(str(error), ExitCode.FAILED)
    except OSError as error:
        mute(sys.stdout)
        return _file_trouble(error)
    except Exception:
        # Whatever gets here is our mistake or a machine that fails us: say all we know, with the
        # one exit code that tells a service manager to start us again.
        traceback.print_exc()
        return int(ExitCode.OURS)


def _file_trouble(error: OSError) -> int:
    """One line where it is the disk's or the operator's to mend, else all that we know."""
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    parent, name = os.path.split(place)
    if name.startswith((TEMPORARY_PREFIX, ".replay-")):  # ours, and of no meaning to anybody else
        place = parent or "."
    words = f"{place}: {error.strerror}" if place else str(error.strerror)
    if error.errno in _DISK:
        return complain(words, OUTPUT_FAILED)
    if place:
        hint = _HINTS.get(error.errno or 0)
        return complain(f"{words}; {hint}" if hint else words, ExitCode.USAGE)
    traceback.print_exception(error)
    return int(ExitCode.OURS)


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
A RUN is a name in runs/ or a run directory; without one, the run that ran last.
SUPERVISOR_RUNS=DIRECTORY in the environment stands for another place than runs/.""",
)
@click.version_option(__version__, prog_name="supervisor")
def cli() -> None:
    """Keeps a training run alive, exact and on record."""


for command in (
    control_commands.start,
    control_commands.stop,
    control_commands.restart,
    control_commands.checkpoint,
    policy_commands.pivot,
    policy_commands.rollback,
    policy_commands.policy,
    view_commands.status,
    view_commands.list_command,
    view_commands.logs,
    view_commands.samples,
    view_commands.checkpoints,
    view_commands.doctor,
    exactness_commands.replay,
    exactness_commands.fork,
    proof_commands.verify,
    proof_commands.history,
    proof_commands.import_command,
    service_commands.unit,
):
    cli.add_command(command)
