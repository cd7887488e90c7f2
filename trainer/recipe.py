"""Settings to objects: model, optimizer, samplers, curriculum, fresh or from a checkpoint.

What may live here: `Training`, the whole of what a step changes, and its two directions: built
from settings (and the state of a checkpoint), and written out as such a state. The one place
where settings become objects.

Invariants:
- A resume is refused before anything is touched: settings, tokenizer and data first, then numbers.
- Order of a resume: model and optimizer, weights and moments, samplers and curriculum, and the
  global generators last, because building the others may draw from them.
- Every component is required. One that is missing stops the resume, and so does one that the
  others contradict: what was counted when it was trained on is counted again from the samplers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from supervisor import config, contract, curriculum
from supervisor.config import Settings
from supervisor.contract import Json, Manifest
from supervisor.link import Life
from trainer import checkpoint, device, model, plan
from trainer.checkpoint import StateMismatch
from trainer.data import Data
from trainer.optimizer import AdamW
from trainer.sampler import Sampler

AUDITED: Final = "audited_step"
EVALUATED: Final = "evaluated_step"
BEST_EVALUATION: Final = "best_evaluation"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out evaluation of the state after `step` updates; `loss` in nats per target."""

    step: int
    loss: float


@dataclass(slots=True)
class Training:
    """One training state between two steps, and what it trains on.

    `detectors` remembers the last step that was audited, and evaluated; `best_evaluation` the
    first of the lowest held-out losses. `lineage` lists the ancestors of the run as (run id, last
    step). `retired`, by arm and digest of its text, is where arms were left that a pivot left: one
    that comes back goes on from there.
    """

    settings: Settings
    data: Data
    place: torch.device
    environment: Json
    model: model.Decoder
    optimizer: AdamW
    samplers: dict[str, Sampler]
    retired: dict[tuple[str, str], Sampler]
    curriculum: curriculum.State
    targets_seen: int
    detectors: dict[str, int]
    best_evaluation: Evaluation | None
    lineage: tuple[tuple[str, int], ...]

    @property
    def step(self) -> int:
        """Completed updates."""
        return self.optimizer.updates

    def take_evaluation(self, loss: float) -> None:
        """Notes the held-out loss of this step: a worse one never becomes the best."""
        best = self.best_evaluation
        if math.isfinite(loss) and (best is None or loss < best.loss):
            self.best_evaluation = Evaluation(self.step, loss)

    def state(self) -> Json:
        """Every component of contract.STATE_COMPONENTS and STATE_LATER, as JSON."""
        retired: dict[str, Json] = {}
        for (name, digest), sampler in self.retired.items():
            retired.setdefault(name, {})[digest] = sampler.state()
        return {
            "configuration": self.settings.tree(),
            "policy_digest": config.policy_digest(self.settings),
            "tokenizer": {"rule": self.data.tokenizer.rule, "digest": self.data.tokenizer.digest},
            "arms": {
                name: {
                    "corpus_digest": arm.digest,
                    "windows": arm.window_count,
                    "sampler": self.samplers[name].state(),
                }
                for name, arm in self.data.arms.items()
            },
            "retired": retired,
            "bandit": curriculum.to_json(self.curriculum),
            "rng": device.rng_state(self.place),
            "updates": self.optimizer.updates,
            "targets_seen": self.targets_seen,
            "detectors": {
                **self.detectors,
                BEST_EVALUATION: asdict(self.best_evaluation) if self.best_evaluation else None,
            },
            "environment": self.environment,
        }

    def draft(self, life: Life, reason: str, requests: tuple[str, ...]) -> Manifest:
        """The manifest of a checkpoint taken now; `checkpoint.publish` adds the digests."""
        flat = self.model.flat
        return Manifest(
            run_id=run_id(self.settings),
            lineage=self.lineage,
            attempt=life.attempt,
            step=self.step,
            epoch=life.epoch,
            reason=reason,
            requests=requests,
            parameters=flat.parameters,
            size_bytes=contract.checkpoint_size_bytes(flat.parameters),
            chunks=(),
            binary_digest="",
            tensors=flat.tensors,
            state=self.state(),
        )


def run_id(settings: Settings) -> str:
    """The id that `config.resolve` gave; a run's name where nobody did."""
    return settings.run.id or settings.run.name


def seed_for(*parts: int | str) -> int:
    """A seed of its own for each purpose: 63 bits of the SHA-256 of the parts."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# --- building -------------------------------------------------------------------------------------


def prepare_device(settings: Settings, base: Manifest | None = None) -> torch.device:
    """The device, with every switch set, to go on from the checkpoint `base` or to begin on:
    before the first tensor. Raises device.DeviceError, or device.DeviceAway."""
    name = settings.trainer.device
    if base is None:
        place = device.resolve(name)
    else:
        place = device.resolve_again(name, base.state["environment"].get("device"), base.step)
    set_switches(settings, place)
    return place


def set_switches(settings: Settings, place: torch.device) -> None:
    """Before the first tensor. Raises device.DeviceError."""
    trainer = settings.trainer
    threads = trainer.threads
    if not isinstance(threads, int):
        raise device.DeviceError(
            f"trainer.threads is {threads!r}: the settings of a run hold a number, decided once"
        )
    device.prepare(place, threads=threads, deterministic=trainer.deterministic, tf32=trainer.tf32)


def shape_of(settings: Settings, vocabulary: int) -> model.Shape:
    ours = settings.model
    return model.Shape(
        vocabulary=vocabulary,
        width=ours.width,
        heads=ours.heads,
        layers=ours.layers,
        context=ours.context,
        dropout=ours.dropout,
    )


def fresh(settings: Settings, data: Data, place: torch.device, environment: Json) -> Training:
    """The state before the first step."""
    seed = settings.training.seed
    shape = shape_of(settings, data.tokenizer.vocabulary)
    decoder = model.build(shape, place, seed=seed_for(seed, "weights"))
    training = Training(
        settings=settings,
        data=data,
        place=place,
        environment=environment,
        model=decoder,
        optimizer=AdamW(decoder.flat),
        samplers=_samplers(settings, data),
        retired={},
        curriculum=plan.begun(settings, data, seed_for(seed, "curriculum")),
        targets_seen=0,
        detectors={AUDITED: 0, EVALUATED: 0},
        best_evaluation=None,
        lineage=(),
    )
    torch.manual_seed(seed_for(seed, "dropout"))
    return training


def resumed(
    settings: Settings,
    data: Data,
    place: torch.device,
    environment: Json,
    directory: Path,
    manifest: Manifest,
    epoch: int,
) -> Training:
    """The state that the checkpoint `manifest` in `directory` holds, exactly.

    Where it was written under an earlier epoch than `epoch`, a pivot lies between: the policy may
    differ, the bandit begins anew, and arms that stay or come back, by name and text, keep their
    cursors. All else runs through.

    Raises StateMismatch and its like (SamplerError, GeneratorError, curriculum.StateError), or
    CheckpointDamaged.
    """
    state = manifest.state
    pivoted = epoch > manifest.epoch
    check_fits(manifest, settings, data, pivoted=pivoted)
    shape = shape_of(settings, data.tokenizer.vocabulary)
    decoder = model.build(shape, place, seed=None)
    checkpoint.load(directory, manifest, decoder.flat)
    decoder.assert_views()
    samplers, retired = _restored_samplers(settings, data, state)
    training = Training(
        settings=settings,
        data=data,
        place=place,
        environment=environment,
        model=decoder,
        optimizer=AdamW(decoder.flat, updates=manifest.step),
        samplers=samplers,
        retired=retired,
        curriculum=plan.continued(settings, data, manifest, pivoted=pivoted),
        targets_seen=state["targets_seen"],
        detectors=_detectors(manifest),
        best_evaluation=_best_evaluation(manifest),
        lineage=_lineage(manifest, run_id(settings)),
    )
    check_counts(training, max(epoch, manifest.epoch))
    device.restore_rng(state["rng"], place)
    return training


def _samplers(settings: Settings, data: Data) -> dict[str, Sampler]:
    return {name: _sampler(settings, name, arm.window_count) for name, arm in data.arms.items()}


def _sampler(settings: Settings, arm: str, windows: int) -> Sampler:
    return Sampler(arm, windows, settings.training.batch_windows, settings.training.seed)


def _restored_samplers(
    settings: Settings, data: Data, state: Json
) -> tuple[dict[str, Sampler], dict[tuple[str, str], Sampler]]:
    """Those of the configured arms, each where its text was left, at the beginning of a text that
    is new to the run; and those of all others that the run has had."""
    samplers, retired = _samplers(settings, data), {}
    past = dict(_saved_samplers(state))
    for name, sampler in samplers.items():
        if (text := (name, data.arms[name].digest)) in past:
            sampler.restore(past.pop(text))
    for (name, digest), saved in past.items():
        windows = saved.get("windows") if isinstance(saved, dict) else None
        if not isinstance(windows, int) or isinstance(windows, bool) or windows < 1:
            raise StateMismatch(f"retired arm {name}: {windows!r} windows, expected some")
        retired[name, digest] = _sampler(settings, name, windows)
        retired[name, digest].restore(saved)
    return samplers, retired


def _saved_samplers(state: Json) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, texts in state.get("retired", {}).items():
        if not isinstance(texts, dict):
            raise StateMismatch(f"retired arm {name}: {texts!r}, expected samplers by text")
        for digest, saved in texts.items():
            yield (name, digest), saved
    for name in state["arms"]:
        digest, saved = (_part(state, "arms", name, key) for key in ("corpus_digest", "sampler"))
        yield (name, digest), saved


def _detectors(manifest: Manifest) -> dict[str, int]:
    found = {name: _part(manifest.state, "detectors", name) for name in (AUDITED, EVALUATED)}
    for name, step in found.items():
        _check_step(manifest, name, step, manifest.step)
    return found


def _best_evaluation(manifest: Manifest) -> Evaluation | None:
    saved = _part(manifest.state, "detectors", BEST_EVALUATION)
    if saved is None:
        return None
    step, loss = (_part(manifest.state, "detectors", BEST_EVALUATION, n) for n in ("step", "loss"))
    evaluated = _part(manifest.state, "detectors", EVALUATED)
    _check_step(manifest, f"{BEST_EVALUATION}.step", step, evaluated)
    if not isinstance(loss, int | float) or isinstance(loss, bool) or not 0 <= loss < math.inf:
        raise StateMismatch(
            f"checkpoint {manifest.step}: detectors.{BEST_EVALUATION}.loss is {loss!r}, expected"
            " nats, a finite number of at least 0"
        )
    return Evaluation(step, float(loss))


def _check_step(manifest: Manifest, name: str, step: object, last: int) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= last:
        raise StateMismatch(
            f"checkpoint {manifest.step}: detectors.{name} is {step!r}, expected a step from 0 to"
            f" {last}"
        )


def _lineage(manifest: Manifest, ours: str) -> tuple[tuple[str, int], ...]:
    """The manifest's own ancestors, and its run too where this run grew out of that."""
    if manifest.run_id == ours:
        return manifest.lineage
    return (*manifest.lineage, (manifest.run_id, manifest.step))


# --- what a checkpoint must agree with ------------------------------------------------------------


def check_fits(
    manifest: Manifest, settings: Settings, data: Data, *, pivoted: bool = False
) -> None:
    """Raises StateMismatch, with both values of everything that differs, unless the checkpoint
    was written under these settings and with this tokenizer and data. After a pivot the policy
    may differ, and arms may have come and gone, or have other text."""
    differences = [
        *_setting_differences(manifest, settings, pivoted),
        *_data_differences(manifest.state, data, pivoted),
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise StateMismatch(
            f"checkpoint {manifest.step} of attempt {manifest.attempt} does not fit:\n  {listed}\n"
            "Put back what the run began with, pivot to other text, or start another run"
        )


def _recorded(manifest: Manifest) -> Settings:
    try:
        return config.parse(
            manifest.state["configuration"], f"checkpoint {manifest.step} configuration"
        )
    except config.ConfigError as error:
        raise StateMismatch(str(error)) from error


def _setting_differences(manifest: Manifest, settings: Settings, pivoted: bool) -> Iterator[str]:
    comparison = config.compare(_recorded(manifest), settings)
    for change in (*comparison.identity, *([] if pivoted else comparison.policy)):
        # The name may be a fork's, and the target may have been another: neither is state.
        if not change.key.startswith("run.") and change.key != "training.steps":
            yield str(change)
    saved, now = manifest.state["policy_digest"], config.policy_digest(settings)
    if saved != now and not pivoted:
        yield f"policy_digest: saved {saved}, now {now}"


def _data_differences(state: Json, data: Data, pivoted: bool) -> Iterator[str]:
    pairs: list[tuple[str, object, object]] = [
        ("tokenizer rule", _part(state, "tokenizer", "rule"), data.tokenizer.rule),
        ("tokenizer digest", _part(state, "tokenizer", "digest"), data.tokenizer.digest),
    ]
    if not pivoted and state["arms"].keys() != data.arms.keys():
        yield f"arms: saved {sorted(state['arms'])}, now {sorted(data.arms)}"
        return
    for name, arm in data.arms.items():
        if name not in state["arms"]:
            continue
        digest, windows = (_part(state, "arms", name, key) for key in ("corpus_digest", "windows"))
        if pivoted and digest != arm.digest:
            continue  # other text makes it another arm, and the one of that name has left
        pairs += [
            (f"arm {name}: corpus digest", digest, arm.digest),
            (f"arm {name}: windows", windows, arm.window_count),
        ]
    for what, saved, now in pairs:
        if saved != now:
            yield f"{what}: saved {saved}, now {now}"


def check_counts(training: Training, epoch: int) -> None:
    """Raises StateMismatch where the parts of a state count differently what was trained on.

    Every update took `accumulate` batches of one arm, so pulls, draws and updates agree; and the
    targets counted update by update are those of all windows that the samplers have served. From
    the second epoch on these are upper bounds: a pivot begins the bandit afresh and may have left
    an arm behind, with the targets that were taken from it.
    """
    differences = [
        f"{what}: {left} and {right}"
        for what, left, right in _counts(training)
        if left != right and not (epoch > 1 and left < right)
    ]
    differences += [
        f"bandit phase {name}: {count.pulls} pulls and {count.steps} steps"
        for name, count in (
            (curriculum.WARM_UP, training.curriculum.warm_up),
            (curriculum.MAIN, training.curriculum.main),
        )
        if count.pulls != count.steps
    ]
    seed = seed_for(training.settings.training.seed, "curriculum")
    known = {(arm.name, arm.fingerprint) for arm in training.curriculum.retired}
    differences += [
        f"retired arm {name} with text {digest}: the bandit knows of none"
        for name, digest in training.retired
        if (name, digest) not in known
    ]
    if training.curriculum.seed != seed:
        differences.append(f"bandit seed: {training.curriculum.seed}, this run has {seed}")
    if differences:
        listed = "\n  ".join(differences)
        raise StateMismatch(
            f"checkpoint {training.step}: its parts contradict each other:\n  {listed}\nIt was not"
            " written by a trainer; take the checkpoint before it"
        )


def _counts(training: Training) -> Iterator[tuple[str, int, int]]:
    targets, accumulate = 0, training.settings.training.accumulate
    pulls = [arm.pulls for arm in training.curriculum.arms]
    yield "bandit pulls and updates", sum(pulls), training.step
    for name, count in zip(training.samplers, pulls, strict=True):
        sampler, arm = training.samplers[name], training.data.arms[name]
        yield f"arm {name}: batches pulled and drawn", count * accumulate, sampler.draws
        targets += sampler.rounds * (arm.token_count - arm.document_count)
        targets += sum(map(arm.window_targets, sampler.taken()))
    yield "targets served by the samplers and targets_seen", targets, training.targets_seen


def _part(state: Mapping[str, Any], *keys: str) -> Any:
    """The value under nested keys. Raises StateMismatch where one is missing."""
    value: Any = state
    for depth, key in enumerate(keys):
        if not isinstance(value, dict) or key not in value:
            path = ".".join(keys[: depth + 1])
            raise StateMismatch(f"the state in the manifest has no {path}; it cannot be resumed")
        value = value[key]
    return value
