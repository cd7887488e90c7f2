"""Commands that hand a run over to a service manager: unit.

What may live here: finding what a unit needs to know of a run, and where its text goes.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
from pathlib import Path

import click

from supervisor.contract import RUN_FILE, ExitCode
from supervisor.terminal import complain, exits, find, run_argument


@click.command(epilog=exits())
@run_argument
@click.option("--config", "config_path", type=click.Path(), help="Settings of a run yet to begin.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting.")
@click.option("--user", "of_user", is_flag=True, help="For `systemctl --user`.")
@click.option(
    "--on-stop",
    type=click.Choice(["end", "keep"]),
    default="end",
    show_default=True,
    help="Whether the trainer ends when the unit is stopped, or trains on.",
)
@click.option("--env", "variables", multiple=True, metavar="NAME", help="Write this variable too.")
@click.option("--output", type=click.Path(), help="Write a file (NAME.service), not to stdout.")
def unit(
    run: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    of_user: bool,
    on_stop: str,
    variables: tuple[str, ...],
    output: str | None,
) -> int:
    """Print a systemd unit that keeps a run going, across crashes and reboots.

    Run it where `start` would be run: relative paths begin there, and the variables that matter
    (paths, devices, threads, settings) are written down as they are now.
    """
    from supervisor import config
    from supervisor.output_file import writing
    from supervisor.unit import Service, Unwritable, choose_environment, render

    if run is not None and config_path is not None:
        return complain("give a RUN or --config FILE, not both", ExitCode.USAGE)
    if output is not None and not output.endswith(".service"):
        return complain(f"--output {output}: the name of a unit ends in .service", ExitCode.USAGE)
    if missing := [name for name in variables if name not in os.environ]:
        return complain(f"--env {missing[0]}: there is no such variable here", ExitCode.USAGE)
    file = Path(os.path.abspath(config_path if config_path is not None else find(run) / RUN_FILE))
    changes = list(overrides)
    try:
        settings = config.load(str(file), changes, os.environ)
        directory = settings.run.directory
        if config_path is None and not _is_same(directory, file.parent):  # it was renamed
            directory = str(file.parent)
            changes.append(f"run.directory={json.dumps(directory, ensure_ascii=False)}")
        environment, left_out = choose_environment(os.environ, variables)
        text = render(
            Service(
                run=settings.run.name,
                command=_command(file, changes),
                home=os.getcwd(),
                needs=[str(file), directory],
                environment=environment,
                grace_seconds=settings.stop.grace_seconds,
                keep=on_stop == "keep",
                user=None if of_user else getpass.getuser(),
            )
        )
        if output is not None:
            with writing(Path(output)) as file_out:
                file_out.write(text.encode())
    except (config.ConfigError, Unwritable) as error:
        return complain(str(error), ExitCode.USAGE)
    for name in left_out:
        click.echo(
            f"supervisor: {name} is not in the unit, which everybody can read; put it into a file"
            " with mode 0600 and add EnvironmentFile=",
            err=True,
        )
    if output is None:
        click.echo(text, nl=False)
    else:
        _say_how(Path(output), of_user)
    return 0


def _is_same(directory: str, other: Path) -> bool:
    return os.path.realpath(directory) == os.path.realpath(other)


def _command(file: Path, changes: list[str]) -> list[str]:
    words = [os.path.abspath(sys.executable), "-m", "supervisor", "start", "--as-recorded"]
    return [*words, "--config", str(file), *(word for c in changes for word in ("--set", c))]


def _say_how(unit_file: Path, of_user: bool) -> None:
    control = "systemctl --user" if of_user else "systemctl"
    place = "~/.config/systemd/user" if of_user else "/etc/systemd/system"
    click.echo(
        f"wrote {unit_file}; it belongs into {place}\n"
        f"then: {control} daemon-reload; {control} enable --now {unit_file.stem}"
    )
    if of_user:
        click.echo("to run without being logged in: loginctl enable-linger")
