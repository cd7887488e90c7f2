"""What a life of the supervisor takes of the settings: at its start, and again at SIGHUP.

What may live here: options out of settings, and what a run that goes on says to a file that has
changed meanwhile. Nothing is written here.

Invariant: a file is taken as a whole or not at all, and only for what a trainer that runs need not
know of. Everything else waits for a start, or for a pivot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from supervisor import config, events as ev
from supervisor.acceptance import Refused, accept, on_record
from supervisor.attempt_logs import LogRules
from supervisor.channels import ENV_WEBHOOK, Channel, ChannelError, channels, check
from supervisor.config import ConfigError, Settings
from supervisor.options import Options, Reread, Retention
from supervisor.patience import Limits
from supervisor.rundir import RunDirectory
from supervisor.sdnotify import without_variables
from supervisor.state import Durable, Rules

LIVE_SECTIONS: Final = frozenset({"restart", "hang", "stop", "alarms", "logs"})
LIVE_KEYS: Final = frozenset(
    {
        *("checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.keep_superseded"),
        *("checkpoint.when_full", "samples.keep"),
    }
)


def is_live(key: str) -> bool:
    """Whether a change of it takes effect in a life that has begun."""
    return key in LIVE_KEYS or key.partition(".")[0] in LIVE_SECTIONS


def options_of(
    settings: Settings, directory: RunDirectory, environment: Mapping[str, str], home: Path
) -> Options:
    """`home` is where the command runs. Raises Refused for a channel that could never deliver."""
    command = settings.trainer.command or (
        sys.executable,
        "-m",
        "trainer",
        "--run",
        str(directory.path.resolve()),
    )
    assert settings.run.id is not None
    return Options(
        rules=Rules(
            delay_seconds=settings.restart.delay_seconds,
            maximum_delay_seconds=settings.restart.maximum_delay_seconds,
            deaths=settings.restart.deaths,
            grace_seconds=settings.stop.grace_seconds,
            signal_after_seconds=settings.stop.signal_after_seconds,
            limits=Limits(
                start_seconds=settings.hang.start_seconds,
                step_seconds=settings.hang.step_seconds,
                save_seconds=settings.hang.save_seconds,
                factor=settings.hang.factor,
                evidence_seconds=settings.hang.evidence_seconds,
            ),
            kill_seconds=settings.stop.kill_seconds,
            stop_when_full=settings.checkpoint.when_full == "stop",
        ),
        run_id=settings.run.id,
        command=command,
        environment={
            name: value
            for name, value in without_variables(environment).items()
            if name != ENV_WEBHOOK
        },
        home=home,
        retention=Retention(
            settings.checkpoint.keep_last,
            settings.checkpoint.keep_every,
            settings.checkpoint.keep_superseded,
        ),
        samples_keep=settings.samples.keep,
        disk_headroom_bytes=settings.alarms.disk_headroom_bytes,
        logs=LogRules(settings.logs.size_bytes, settings.logs.keep),
        channels=channels_of(settings, environment, home),
    )


def channels_of(
    settings: Settings, environment: Mapping[str, str], home: Path
) -> tuple[Channel, ...]:
    """Raises Refused for one that could never deliver: now, and not when the run has failed and
    nobody hears of it."""
    alarms = settings.alarms
    configured = channels(alarms.notify, alarms.webhook, alarms.webhook_file, environment)
    try:
        check(configured, environment.get("PATH"), home)
    except ChannelError as error:
        raise Refused(str(error)) from error
    return configured


def reread(
    load: Callable[[], Settings],
    environment: Mapping[str, str],
    inside: RunDirectory,
    home: Path,
    durable: Durable,
) -> Reread:
    """What `load` brings to a life that goes on, against what is on record."""
    directory = RunDirectory(inside.path.resolve(), inside.run)  # a path that says something
    try:
        settings, records = accept(on_record(durable, directory), load(), durable, directory)
        later = [
            f"\n  {key}: recorded {config.show(old)}, requested {config.show(new)}"
            for record in records
            if isinstance(record, ev.SettingsChanged)
            for key, (old, new) in record.changes.items()
            if not is_live(key)
        ]
        if later:
            raise Refused(
                "the trainer that runs has these from its start; stop the run and start it with"
                f" the changed file:{''.join(later)}"
            )
        return Reread(options_of(settings, directory, environment, home), tuple(records))
    except (ConfigError, Refused) as error:
        return Reread(None, (), f"the settings stay as they are: {error}")
