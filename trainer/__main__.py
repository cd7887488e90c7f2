"""The command line of the trainer, and how a life begins and ends.

    python -m trainer --config FILE [--set key=value]...   alone, in its own run directory
    python -m trainer --run DIRECTORY                      for a supervisor, which says which life
    python -m trainer generate RUN --prompt TEXT           text from a checkpoint
    python -m trainer check --config FILE                  a policy's data and plan, as JSON

What may live here: arguments, the run directory of a trainer that is alone, the first and the last
thing that every life does. torch is imported as late as possible: by then signals are handled and
the supervisor knows that we load.

Invariants:
- A life that began ends with an exit record, wherever receipts can be written.
- Alone, the trainer holds trainer.lock as it would from a supervisor; a second one is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import math
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, TextIO

import orjson

from supervisor import contract
from supervisor.contract import ContractError, ExitCode
from supervisor.link import Life, Link, life_from_environment

if TYPE_CHECKING:
    from supervisor.config import Settings

_TEMPERATURE_MIN: Final = 1e-3  # as for samples.temperature
_OUTPUT_CLOSED: Final = 141  # 128 + SIGPIPE
_DIRECTORIES: Final = (contract.CHECKPOINTS, contract.RECEIPTS, contract.LOGS)


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    match arguments.command:
        case "generate":
            return _generate(parser, arguments)
        case "check":
            return _check(arguments)
    if arguments.run is not None:
        return _supervised(parser, arguments.run, arguments.save_at)
    if arguments.config is not None:
        return _alone(arguments)
    parser.error("one of --config and --run is needed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="Trains a language model.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--config", metavar="FILE", type=Path, help="train alone, as FILE says")
    mode.add_argument("--run", metavar="DIRECTORY", type=Path, help="train for a supervisor")
    parser.add_argument(
        "--save-at",
        action="append",
        default=[],
        type=int,
        metavar="STEP",
        help="with --run: save at this step too, to compare it (for `supervisor replay`)",
    )
    _add_overrides(parser)
    commands = parser.add_subparsers(dest="command")
    generate = commands.add_parser("generate", help="text from a checkpoint of a run")
    generate.add_argument("run", metavar="RUN", help="a run directory, or its name below runs/")
    generate.add_argument("--prompt", required=True, type=_text, metavar="TEXT")
    generate.add_argument("--tokens", type=_whole(1, 1_000_000), default=120, metavar="N")
    generate.add_argument(
        "--temperature", type=_temperature, default=0.8, metavar="T", help="0: the likeliest token"
    )
    generate.add_argument("--seed", type=_whole(0, 2**63 - 1), default=0, metavar="S")
    generate.add_argument(
        "--step", type=_whole(1, contract.INT32_MAX), metavar="N", help="default: the newest valid"
    )
    generate.add_argument(
        "--device",
        type=_device,
        metavar="D",
        help="auto, cpu or cuda:N; default: that of the training if it is here, else the CPU",
    )
    check = commands.add_parser("check", help="load the data that FILE names; prints JSON")
    check.add_argument("--config", required=True, metavar="FILE", type=Path)
    check.add_argument(
        "--base", metavar="MANIFEST", type=Path, help="as after this checkpoint, not from scratch"
    )
    check.add_argument("--epoch", type=int, default=1, metavar="N", help="as a life of this epoch")
    _add_overrides(check)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrides one setting"
    )


def _whole(lowest: int, highest: int) -> Callable[[str], int]:
    """For argparse: a whole number within bounds. What it raises is said behind the option."""

    def parsed(text: str) -> int:
        with contextlib.suppress(ValueError):
            if lowest <= int(text) <= highest:
                return int(text)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {lowest} to {highest}"
        )

    return parsed


def _text(text: str) -> str:
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8")


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        temperature = float(text)
        if temperature == 0 or _TEMPERATURE_MIN <= temperature < math.inf:
            return temperature
    raise argparse.ArgumentTypeError(
        f"{text!r} is not 0 or a number of at least {_TEMPERATURE_MIN}"
    )


def _device(text: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:N")


# --- the two ways to live -------------------------------------------------------------------------


def _supervised(parser: argparse.ArgumentParser, directory: Path, save_at: Collection[int]) -> int:
    life = life_from_environment(os.environ)
    if life is None:
        parser.error("--run is for a trainer that a supervisor started; alone, use --config")

    def settings() -> Settings:
        from supervisor import config

        return config.load(life.settings_file or directory / contract.RUN_FILE)

    with contextlib.redirect_stderr(_Heedless(sys.stderr)):
        return _live(life, settings, save_at)


class _Heedless(io.TextIOBase):
    """A stream into a log on a disk that may be full: a line that it does not take is lost, which
    is no reason to lose the life that wanted to say it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _alone(arguments: argparse.Namespace) -> int:
    from supervisor import config

    try:
        requested = config.load(arguments.config, arguments.set, os.environ)
        directory = Path(requested.run.directory)
        for path in (directory, *(directory / name for name in _DIRECTORIES)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _trainer_lock(directory) as lock:
            settings = _recorded(directory, requested, str(arguments.config))
            life = _next_life(directory, lock)
            before = signal.signal(signal.SIGINT, _interrupted)
            try:
                return _live(life, lambda: settings)
            finally:
                signal.signal(signal.SIGINT, before)
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIGURATION
    except RunTaken as error:
        print(error, file=sys.stderr)
        return ExitCode.FAILED


def _interrupted(number: int, frame: FrameType | None) -> None:
    """The first Ctrl-C asks like SIGTERM does; the second is no longer a question."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _live(life: Life, read_settings: Callable[[], Settings], save_at: Collection[int] = ()) -> int:
    """One life from its first to its last act; the exit status."""
    with Link(life) as link:
        link.forgive_output()
        warning = link.install_signal_handlers()
        if warning is not None:
            print(warning, file=sys.stderr)
        link.phase("load")
        from supervisor import config

        try:
            settings = read_settings()
        except config.ConfigError as error:
            step = life.resume_step or 0
            return _end(link, "configuration", step, ExitCode.CONFIGURATION, str(error))
        return _train(link, settings, save_at)


def _train(link: Link, settings: Settings, save_at: Collection[int]) -> int:
    trainer = None
    try:
        from trainer import loop

        trainer = loop.Loop(settings, link, save_at)
        why = trainer.run()
    except Exception as error:
        code, why = loop.verdict(error) if trainer else (ExitCode.FAILED, "error")
        step = trainer.step if trainer else link.life.resume_step or 0
        message = f"{type(error).__name__}: {error}" if code is ExitCode.FAILED else str(error)
        _end(link, why, step, code, message)
        if code is ExitCode.FAILED:
            raise
        return code
    return _end(link, why, trainer.step, ExitCode.OK, "")


def _end(link: Link, why: str, step: int, code: ExitCode, message: str) -> int:
    """Writes the exit record; tells a person too."""
    told = f": {message}" if message else ""
    print(f"trainer: {why} at step {step}{told}", file=sys.stderr)
    try:
        link.farewell(why, step, code, message)
    except OSError as error:
        print(f"trainer: the exit record could not be written: {error}", file=sys.stderr)
    return code


# --- a run directory without a supervisor ---------------------------------------------------------


class RunTaken(Exception):
    """Another trainer lives on this run directory."""


@contextlib.contextmanager
def _trainer_lock(directory: Path) -> Iterator[int]:
    """The descriptor that holds trainer.lock. Raises RunTaken, which names the holder."""
    path = directory / contract.TRAINER_LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunTaken(f"{directory}: already trained by {_holder(descriptor)}") from error
        yield descriptor
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Who holds a lock on the file, as /proc/locks has it: the process that took it."""
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == place:
            return f"process {fields[4]}"
    return "a process that cannot be seen from here"


def _recorded(directory: Path, requested: Settings, file: str) -> Settings:
    """The settings of the run: those on record with operational changes, or the requested ones,
    which are then on record. Raises ConfigError for a change that would be another run."""
    from supervisor import config

    path = directory / contract.RUN_FILE
    if not path.exists():
        settings = config.resolve(requested, secrets.token_hex(8))
        _write(path, config.dump(settings))
        return settings
    recorded = config.load(path)
    comparison = config.compare(recorded, requested)
    refused = [(change, "another value makes another run") for change in comparison.identity]
    refused += [(change, "a pivot changes it") for change in comparison.policy]
    if refused:
        raise config.ConfigError(
            [
                config.Problem(
                    file,
                    change.key,
                    change.requested,
                    f"{change.recorded!r} as recorded in {path}; {reason}",
                )
                for change, reason in refused
            ]
        )
    settings = config.accept(recorded, comparison.operational)
    if comparison.operational:
        for change in comparison.operational:
            print(f"changed: {change}", file=sys.stderr)
        _write(path, config.dump(settings))
    return settings


def _write(path: Path, text: str) -> None:
    """Replaces the file atomically and durably."""
    temporary = path.with_name(f"{contract.TEMPORARY_PREFIX}{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _next_life(directory: Path, lock: int) -> Life:
    attempt, epoch = _latest(directory)
    return Life(
        run_directory=directory,
        attempt=attempt + 1,
        nonce=secrets.token_hex(8),
        epoch=max(1, epoch),
        resume_step=None,
        supervised=False,
        lock_fd=lock,
    )


def _latest(directory: Path) -> tuple[int, int]:
    """The highest attempt and epoch that left a trace: in receipts, logs and manifests."""
    attempts, epochs = [0], [0]
    for name in (contract.RECEIPTS, contract.LOGS):
        stems = (path.stem for path in (directory / name).iterdir())
        attempts += [number for number in map(contract.parse_attempt_stem, stems) if number]
    for path in (directory / contract.CHECKPOINTS).glob("step_*.json"):
        try:
            manifest = contract.parse_manifest(path.read_bytes(), path.name)
        except ContractError:
            continue  # whoever selects a checkpoint says what is wrong with it
        attempts.append(manifest.attempt)
        epochs.append(manifest.epoch)
    return max(attempts), max(epochs)


# --- commands that only read ----------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    from supervisor import config, curriculum
    from trainer import data, plan
    from trainer.corpus import DataError
    from trainer.tokenizer import TokenizerError

    try:
        settings = config.load(arguments.config, arguments.set, os.environ)
        base = arguments.base and contract.parse_manifest(
            arguments.base.read_bytes(), str(arguments.base)
        )
        loaded = data.load(settings)
        assert loaded is not None, "nobody asked to give up"
        found = plan.describe(settings, loaded, base, arguments.epoch)
    except (config.ConfigError, curriculum.PolicyError, curriculum.Infeasible) as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIGURATION
    except (DataError, TokenizerError, curriculum.StateError, ContractError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.DATA
    sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    return ExitCode.OK


def _generate(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    places = [Path(arguments.run), Path(contract.runs_directory(os.environ)) / arguments.run]
    directory = next((path for path in places if (path / contract.CHECKPOINTS).is_dir()), None)
    if directory is None:
        parser.error(f"no run {arguments.run!r}: neither {places[0]} nor {places[1]} is one")
    from trainer import generate, loop
    from trainer.checkpoint import CheckpointDamaged

    expected: tuple[type[Exception], ...] = (
        *(kind for kind, _, _ in loop.EXIT_CODES),
        LookupError,
        CheckpointDamaged,
    )
    try:
        text = generate.generate(
            directory,
            arguments.prompt,
            tokens=arguments.tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            step=arguments.step,
            where=arguments.device,
        )
    except expected as error:
        print(error, file=sys.stderr)
        return loop.verdict(error)[0]
    return _printed(generate.neutralised(text) if sys.stdout.isatty() else text)


def _printed(text: str) -> int:
    """The exit status, of the meaning that it has for the supervisor's commands."""
    try:
        print(text, flush=True)
        return ExitCode.OK
    except OSError as error:
        # What is left of it would fail at the interpreter's end once more, and change the status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _OUTPUT_CLOSED
        print(f"standard output: {error.strerror}", file=sys.stderr)
        return ExitCode.CHECKPOINT


if __name__ == "__main__":
    sys.exit(main())
