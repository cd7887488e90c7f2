"""`supervisor import`: a run of another program becomes a run directory of ours.

What may live here: reading an ANDREA-style folder (`step_*.bin`, `<model>.loss.json` with rows
[step, loss], `<model>.samples.json`) and writing a run directory that `start` can take up.

Invariants:
- The source is only read.
- The run appears whole, by one rename, or not at all.
- What is taken in is proven first: a checkpoint that is not what its header says is left out by
  name, and what was copied was read back from the device before it goes on record.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
import tomli_w

from supervisor import config, contract, events as ev
from supervisor.checkpoints import BINARY
from supervisor.config import Settings
from supervisor.contract import ContractError, Entry, Json, checkpoint_stem
from supervisor.durable import copy_file, fsync_directory, replace_file
from supervisor.journal import Journal
from supervisor.ledger import Ledger, read_entries
from supervisor.ledger_proof import Advance
from supervisor.readback import Damaged, Found, Verified, verify
from supervisor.rundir import RunDirectory, RunError

LOSS_ENDING: Final = ".loss.json"
SAMPLES_ENDING: Final = ".samples.json"
CHUNK_ENTRIES: Final = 10_000
_TEXTS: Final = ("python-docs", "python-docstrings", "python-source")
_STEP_FILE: Final = re.compile(r"step_(\d+)\.bin")


@dataclass(frozen=True, slots=True)
class Source:
    """What was found in a folder. `model` names its files; `binaries` by step."""

    directory: Path
    model: str
    entries: Sequence[Entry]
    samples: Sequence[Json]
    binaries: dict[int, Path]


@dataclass(slots=True)
class Imported:
    """The run that was made. `left_out` says what of the source is not in it, and why; `beyond`
    are checkpoints above the last step of the history, from which no run goes on; `stranded` is a
    run whose trainer is ours, which goes on from nothing without a manifest."""

    directory: Path
    run: str
    entries: int = 0
    samples: int = 0
    steps: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    stranded: bool = False
    left_out: list[str] = field(default_factory=list)


# --- the source -----------------------------------------------------------------------------------


def find_model(directory: Path, wanted: str | None) -> str:
    """The model whose files lie in a folder. Raises RunError where that is not clear."""
    if not directory.is_dir():
        raise RunError(f"{directory}: not a directory; expected a folder with step_*.bin")
    models = sorted(
        path.name.removesuffix(LOSS_ENDING) for path in directory.glob(f"*{LOSS_ENDING}")
    )
    if wanted in models or len(models) == 1:
        return wanted if wanted is not None and wanted in models else models[0]
    if models:
        raise RunError(f"{directory}: files of {', '.join(models)}; choose one with --name")
    if not any(_STEP_FILE.fullmatch(path.name) for path in directory.iterdir()):
        raise RunError(f"{directory}: neither a *{LOSS_ENDING} nor a step_*.bin; nothing to import")
    return wanted or directory.resolve().name


def read_source(directory: Path, model: str, left_out: list[str]) -> Source:
    """Everything of a model but the content of its checkpoints. What is malformed is added to
    `left_out`; a loss file that is none raises RunError."""
    ledger, samples = directory / f"{model}{LOSS_ENDING}", directory / f"{model}{SAMPLES_ENDING}"
    entries: list[Entry] = []
    if ledger.exists():
        try:
            entries, torn = read_entries(ledger)
        except ContractError as error:
            raise RunError(f"{error}; expected an array of [step, loss]") from error
        if torn is not None:
            left_out.append(torn)
    else:
        left_out.append(f"{ledger.name}: not there, so the history begins empty")
    rows = list(_samples(samples, left_out)) if samples.exists() else []
    rows.sort(key=lambda row: row["step"])
    return Source(directory, model, entries, rows, _binaries(directory, left_out))


def _samples(path: Path, left_out: list[str]) -> Iterator[Json]:
    """Audits as we keep them. ANDREA has no prompt, and token ids where a text was not decoded."""
    try:
        rows = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        left_out.append(f"{path.name}: not JSON ({error})")
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        step = row.get("step") if isinstance(row, dict) else None
        text = row.get("text", "") if isinstance(row, dict) else None
        prompt = row.get("prompt", "") if isinstance(row, dict) else None
        known = isinstance(row, dict) and {"text", "ids"} & row.keys()
        if known and _is_step(step) and isinstance(text, str) and isinstance(prompt, str):
            yield {**row, "attempt": 0, "prompt": prompt, "text": text}
        else:
            left_out.append(f"{path.name} item {number}: expected step and text or ids")


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= contract.INT32_MAX


def _binaries(directory: Path, left_out: list[str]) -> dict[int, Path]:
    """The checkpoint files, by the number in their names, however it is padded."""
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        match = _STEP_FILE.fullmatch(path.name)
        if match is None:
            continue
        step = int(match.group(1))
        if step in found:
            left_out.append(f"{path.name}: the same step as {found[step].name}")
        elif step > contract.INT32_MAX:
            left_out.append(f"{path.name}: no header can hold step {step}")
        elif not path.is_file():
            left_out.append(f"{path.name}: not a regular file")
        else:
            found[step] = path
    return dict(sorted(found.items()))


def size_bytes(directory: Path) -> int:
    """About how much an import will copy, for a progress bar."""
    return sum(path.stat().st_size for path in directory.glob("step_*.bin") if path.is_file())


# --- the run --------------------------------------------------------------------------------------


def _settings(name: str, root: Path, newest_step: int) -> Settings:
    """The defaults, with a target that is not behind what the run has reached, and with the texts
    that every machine has."""
    tree = {
        "run": {"name": name, "directory": str(root / name)},
        "training": {"steps": max(newest_step, config.Training().steps)},
        "policy": {"arms": [{"name": text, "builtin": text} for text in _TEXTS]},
    }
    return config.parse(tree, "--name")


def import_run(
    directory: Path, name: str | None, root: Path, config_path: str | None, advance: Advance
) -> Imported:
    """Makes a run out of a folder. `name` None is the name in the configuration, or that of the
    model. `root` is where runs without a configuration live; `advance` gets the bytes copied.

    Raises RunError for a folder that is none, or a run that exists; ConfigError; OSError.
    """
    model = find_model(directory, name)
    left_out: list[str] = []
    source = read_source(directory, model, left_out)
    if config_path is not None:
        flags = [f"run.name={json.dumps(name)}"] if name is not None else []  # "2024" is a name
        settings = config.load(config_path, flags, os.environ)
    else:
        newest = max([*source.binaries, *(entry.step for entry in source.entries)], default=0)
        settings = _settings(name or model, root, newest)
    target = Path(settings.run.directory)
    imported = Imported(target, settings.run.name, left_out=left_out)
    if os.path.lexists(target):
        raise RunError(f"{target}: exists; {_way_out(settings)}, nothing was changed")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _appearing(target) as place:
        run = RunDirectory(place, settings.run.name)
        run.create()
        _fill(run, config.resolve(settings, uuid.uuid4().hex), source, imported, advance)
    return imported


def _way_out(settings: Settings) -> str:
    """What names the directory: a name alone does not move a run whose settings say where it is."""
    origin = settings.origins.get("run.directory", "default")
    if origin == "default":
        return "give the import another --name"
    return f"the settings say so (run.directory, from the {origin}); change that or leave it out"


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A directory that takes its name when it is complete, and is removed if it never is."""
    place = target.with_name(f"{contract.TEMPORARY_PREFIX}{uuid.uuid4().hex[:8]}-{target.name}")
    try:
        yield place
        os.rename(place, target)
    except BaseException:  # an interrupt too: nothing half-made stays, and it goes on its way
        shutil.rmtree(place, ignore_errors=True)  # what is raised again matters more
        raise
    fsync_directory(target.parent)


def _fill(
    run: RunDirectory, settings: Settings, source: Source, imported: Imported, advance: Advance
) -> None:
    assert settings.run.id is not None
    verified = list(_copy_checkpoints(run, settings.run.id, source, imported.left_out, advance))
    imported.steps = [one.step for one in verified]
    last_step = source.entries[-1].step if source.entries else 0
    imported.stranded = bool(verified) and settings.trainer.command is None
    imported.beyond = [step for step in imported.steps if step > last_step]
    keep = settings.samples.keep  # as a run of ours does
    kept = source.samples[-keep:]
    if len(kept) < len(source.samples):
        imported.left_out.append(
            f"{source.model}{SAMPLES_ENDING}: the {len(source.samples) - keep} oldest audits;"
            f" samples.keep is {keep}"
        )
    if kept:
        replace_file(run.samples, orjson.dumps(kept, option=orjson.OPT_INDENT_2) + b"\n")
        imported.samples = len(kept)
    replace_file(run.run_file, config.dump(settings).encode())
    policy = {"policy": settings.policy.model_dump(mode="json", exclude_none=True)}
    replace_file(run.policies / "0001.toml", tomli_w.dumps(policy).encode())
    ledger = Ledger.open(run.ledger)
    try:
        bindings = _append(ledger, source.entries, {one.step for one in verified})
        ledger.sync()
    finally:
        ledger.close()
    imported.entries = len(source.entries)
    records = list(_records(run, settings, source, verified, bindings))
    journal, _ = Journal.open(run.journal)
    try:
        journal.append(records, time.time())
        journal.sync()
    finally:
        journal.close()


def _copy_checkpoints(
    run: RunDirectory, run_id: str, source: Source, left_out: list[str], advance: Advance
) -> Iterator[Verified]:
    for step, path in source.binaries.items():
        copied = run.checkpoints / f"{checkpoint_stem(step)}{BINARY}"
        copy_file(path, copied)
        try:
            yield verify(Found(step, copied, None), run_id, bare_allowed=True)
        except Damaged as damage:
            copied.unlink()
            reason = damage.reason.removeprefix(f"{copied.name}: ")
            left_out.append(f"{path.name}: {reason}")
        advance(path.stat().st_size)
    fsync_directory(run.checkpoints)


Bindings = dict[int, tuple[int, str]]


def _append(ledger: Ledger, entries: Sequence[Entry], steps: Container[int]) -> Bindings:
    """Writes the history. By step, the binding (entries, SHA-256) of the newest entry of each of
    `steps`, of the last entry, and of some others; taken on the way, while the ledger knows where
    they end."""
    wanted = {entry.step: end for end, entry in enumerate(entries, 1) if entry.step in steps}
    if entries:
        wanted[entries[-1].step] = len(entries)
    bindings: Bindings = {}
    done = 0
    for end in sorted({*wanted.values(), *range(CHUNK_ENTRIES, len(entries), CHUNK_ENTRIES)}):
        ledger.append(entries[done:end])
        done, step = end, entries[end - 1].step
        bindings[step] = ledger.binding(step)
    return bindings


def _records(
    run: RunDirectory,
    settings: Settings,
    source: Source,
    verified: Sequence[Verified],
    bindings: Bindings,
) -> Iterator[Json]:
    """The journal of the new run. Each checkpoint, and the whole history, is bound to the ledger
    as those of a run that we recorded ourselves."""
    assert settings.run.id is not None
    digest = config.policy_digest(settings)
    yield ev.record_to_json(
        ev.RunCreated(settings.run.id, run.run, settings.training.steps, digest)
    )
    steps = [one.step for one in verified]
    record = ev.RunImported(str(source.directory.resolve()), len(source.entries), steps)
    whole = bindings[source.entries[-1].step] if source.entries else (0, None)
    yield ev.record_to_json(record) | {"ledger_sha256": whole[1]}
    for one in verified:
        committed = ev.CheckpointCommitted(one.step, 0, "", [], one.binary_digest)
        yield ev.record_to_json(committed) | _bound(bindings.get(one.step))
        yield ev.record_to_json(ev.CheckpointVerified(one.step, one.sha256))
    for path in (run.run_file, *sorted(run.policies.glob("*.toml"))):
        sha256 = contract.digest(path.read_bytes())
        yield ev.record_to_json(ev.FileStored(str(path.relative_to(run.path)), sha256))


def _bound(binding: tuple[int, str] | None) -> Json:
    """What a journal line says beside its record: nulls where no entry has the step."""
    entries, sha256 = binding or (None, None)
    return {"ledger_entries": entries, "ledger_sha256": sha256}
