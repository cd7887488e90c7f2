"""The order of one update, the boundary after it, and what may happen there.

What may live here: the life of a trainer from loading to its last boundary. It says what happens
when; how is in the modules below.

    load -> [boundary -> update] -> [boundary -> update] -> ... -> boundary

Invariants:
- A boundary is the only place where a state is looked at, saved or left: all gradients of an
  update are in the weights, and nothing of the next one is drawn.
- One update: train mode, draw, zero gradients, forward, backward, norms, finite check, clip, step,
  count. A loss or gradient that is not finite ends the life before anything has changed.
- An audit or an evaluation changes no bit of the state but the note that it was done, and an
  evaluation of the cadence what the bandit knows. That of a last step off the cadence tells it
  nothing: a run that is made longer goes on as if it had always been so long.
- A checkpoint that the disk refuses is no end: the older ones stand, the loop trains on and tries
  again at a later boundary, of the cadence or not (see `Link.save`). Where there is nothing to
  train on to, it waits for room.
- An audit that is due comes before the checkpoint of its step; somebody who wants the trainer to
  stop does not wait for it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import torch

from supervisor import config, contract, curriculum
from supervisor.config import Settings
from supervisor.contract import AuditLine, Entry, EnvironmentLine, EvaluationLine, ExitCode, Json
from supervisor.link import Due, Link, ReceiptNotWritten
from trainer import checkpoint, corpus, data, device, recipe
from trainer.checkpoint import CheckpointNotWritten, NonFiniteState, StateMismatch
from trainer.corpus import DataError, Windows
from trainer.generate import continue_texts, looking_only
from trainer.optimizer import NonFinite, learning_rate
from trainer.recipe import AUDITED, EVALUATED, Training, seed_for
from trainer.sampler import SamplerError
from trainer.tokenizer import TokenizerError

PAUSE_SECONDS: Final = 30.0

FINISHED: Final = "finished"
STOPPED: Final = "stopped"

# What ends a life with a code of its own. Anything else is a crash.
EXIT_CODES: Final[tuple[tuple[type[Exception], ExitCode, str], ...]] = (
    (config.ConfigError, ExitCode.CONFIGURATION, "configuration"),
    (device.DeviceError, ExitCode.CONFIGURATION, "configuration"),
    (curriculum.PolicyError, ExitCode.CONFIGURATION, "configuration"),
    (curriculum.Infeasible, ExitCode.CONFIGURATION, "configuration"),
    (DataError, ExitCode.DATA, "data"),
    (TokenizerError, ExitCode.DATA, "data"),
    (StateMismatch, ExitCode.DATA, "data"),
    (curriculum.StateError, ExitCode.DATA, "data"),
    (SamplerError, ExitCode.DATA, "data"),
    (device.GeneratorError, ExitCode.DATA, "data"),
    (device.DeviceAway, ExitCode.AGAIN, "again"),
    (CheckpointNotWritten, ExitCode.CHECKPOINT, "checkpoint"),
    (ReceiptNotWritten, ExitCode.CHECKPOINT, "checkpoint"),
    (NonFinite, ExitCode.NON_FINITE, "non-finite"),
    (NonFiniteState, ExitCode.NON_FINITE, "non-finite"),
)


def verdict(error: Exception) -> tuple[ExitCode, str]:
    """The exit code, and the word for the exit record, of what ended a life."""
    for kind, code, why in EXIT_CODES:
        if isinstance(error, kind):
            return code, why
    return ExitCode.FAILED, "error"


class Loop:
    """One life of the trainer. `run` is all of it; `step` tells how far it came."""

    def __init__(self, settings: Settings, link: Link, save_at: Collection[int] = ()) -> None:
        """`save_at`: steps whose boundary saves as one of the cadence does, for whoever executes a
        stretch again and compares."""
        self.settings = settings
        self.link = link
        self._save_at = frozenset(save_at)
        self.life = link.life
        # Supervised, through the descriptor: the run directory may be renamed while we train.
        home = link.directory if link.life.supervised else link.life.run_directory
        self.directory = home / contract.CHECKPOINTS
        self._training: Training | None = None
        self._published: contract.Manifest | None = None
        self._progress = Progress(settings.training.steps, wanted=not link.life.supervised)

    @property
    def training(self) -> Training:
        assert self._training is not None, "nothing is loaded yet"
        return self._training

    @property
    def step(self) -> int:
        """Completed updates, as far as known: while loading, the step to resume from."""
        if self._training is not None:
            return self._training.step
        return self._published.step if self._published else self.life.resume_step or 0

    def run(self) -> str:
        """Trains until FINISHED or STOPPED. Raises what EXIT_CODES lists, and crashes."""
        self._training = self._load()
        if self._training is None:
            return STOPPED
        self.link.hello(
            self.step, self.training.model.flat.parameters, config.policy_digest(self.settings)
        )
        self.link.phase("step")
        while True:
            ended = self._boundary()
            if ended is not None:
                return ended
            self._update()

    # --- loading ----------------------------------------------------------------------------------

    def _load(self) -> Training | None:
        """The state to go on from; None where a stop was asked for meanwhile."""
        self._published = self._base()
        place = recipe.prepare_device(self.settings, self._published)
        environment = device.environment(place, Path(__file__).parent)
        settings_digest = contract.digest(contract.canonical(self.settings.tree()))
        self.link.record(
            EnvironmentLine(self.life.attempt, environment | {"settings_digest": settings_digest})
        )
        loaded = self._data()
        if loaded is None or self.link.stop_wanted():
            return None
        if self._published is None:
            return recipe.fresh(self.settings, loaded, place, environment)
        for difference in device.environment_differences(
            self._published.state["environment"], environment
        ):
            print(f"exactness not claimed: {difference}", file=sys.stderr)
        return recipe.resumed(
            self.settings,
            loaded,
            place,
            environment,
            self.directory,
            self._published,
            self.life.epoch,
        )

    def _data(self) -> data.Data | None:
        try:
            return data.load(self.settings, self.link.stop_wanted)
        except DataError as error:
            if self._published is None:
                raise
            # Training on without it would leave its pulls in every sum: a zombie arm.
            raise DataError(
                f"{error}. A run does not go on without an arm of its policy; put the text back, or"
                " drop the arm by a pivot: supervisor pivot --policy FILE, where FILE lacks it"
            ) from error

    def _base(self) -> contract.Manifest | None:
        """The checkpoint to resume from: the one we were told, or the newest that is proven."""
        if self.life.resume_step is not None:
            step = self.life.resume_step
            return checkpoint.read_manifest(self.directory, step) if step else None
        # Alone, we hold the lock that every other writer would have to hold.
        checkpoint.remove_leftovers(self.directory)
        selection = checkpoint.select(self.directory, recipe.run_id(self.settings))
        for step, reason in selection.rejected:
            # Its name lies ahead of us, and a published name is never written again.
            moved_to = checkpoint.set_aside(self.life.run_directory, step, reason, time.time())
            print(f"checkpoint {step} was rejected: {reason}; moved to {moved_to}", file=sys.stderr)
        if selection.chosen is not None:
            print(f"resuming from checkpoint {selection.chosen.step}", file=sys.stderr)
        return selection.chosen

    # --- one update -------------------------------------------------------------------------------

    def _update(self) -> None:
        training, settings = self.training, self.settings.training
        started = time.monotonic()
        training.model.train()
        arm, chosen = curriculum.next_arm(training.curriculum)
        batches = [self._draw(arm) for _ in range(settings.accumulate)]
        targets = sum(count for _, _, count in batches)
        training.model.flat.zero_gradients()
        sums = [self._backward(inputs, wanted, targets) for inputs, wanted, _ in batches]
        loss = math.fsum(one.item() for one in sums) / targets
        rate = learning_rate(
            training.step,
            peak=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            schedule=settings.schedule,
            horizon_steps=settings.schedule_steps or settings.steps,
            minimum_ratio=settings.minimum_rate_ratio,
        )
        norms = training.optimizer.update(
            learning_rate=rate,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
            loss=loss,
        )
        training.targets_seen += targets
        training.curriculum = curriculum.observe(chosen, arm, loss, targets)
        self.link.record(
            Entry(
                step=training.step,
                loss=loss,
                time=time.time(),
                attempt=self.life.attempt,
                epoch=self.life.epoch,
                arm=arm,
                targets_seen=training.targets_seen,
                learning_rate=rate,
                gradient_norm=norms.total,
                step_seconds=time.monotonic() - started,
            )
        )
        self._progress.show(training.step, loss, arm)

    def _draw(self, arm: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        """One batch of the arm: inputs and targets on the device, and how many targets count."""
        training = self.training
        windows = training.data.arms[arm]
        inputs, targets, count = corpus.collate(
            [windows.window(number) for number in training.samplers[arm].draw()]
        )
        return inputs.to(training.place), targets.to(training.place), count

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor, total: int) -> torch.Tensor:
        """Adds the gradient of one micro-batch's share of the mean; its summed loss, in nats."""
        training = self.training
        with device.autocast(training.place, self.settings.trainer.precision):
            loss, _ = training.model(inputs, targets)
        (loss / total).backward()
        detached: torch.Tensor = loss.detach()
        return detached

    # --- the boundary -----------------------------------------------------------------------------

    def _boundary(self) -> str | None:
        """Audits, saves, stops or pauses, whatever is due; how the life ended, or None: go on."""
        step, steps = self.step, self.settings.training.steps
        if step == 0:
            # Nothing is worth keeping yet: a request waits for the first step, a stop does not.
            return STOPPED if self.link.stop_wanted() else None
        final = step >= steps
        self._audit(final)
        until = self.life.until_step
        ended = until is not None and step >= until
        regular = step % self.settings.checkpoint.every == 0 or step in self._save_at
        cadence = final or ended or regular
        due = self.link.due(cadence=cadence)
        if due.reason is None:
            return None
        saved = self._save(due, must=final or ended or due.stop)
        if saved and due.pause is not None and not due.stop and not final:
            self.link.paused(step, due.pause)
            if self.link.wait_for_exit(PAUSE_SECONDS):
                return STOPPED
        if final:
            return FINISHED
        return STOPPED if due.stop or ended else None

    def _save(self, due: Due, *, must: bool) -> bool:
        """One checkpoint a step at most; a request for a step that has one is answered by it. False
        where the disk refuses it and training goes on; `must` waits for room instead."""
        assert due.reason is not None, "nothing is due"
        started = time.monotonic()
        if self._published is None or self._published.step != self.step:
            self.link.phase("save")
            draft = self.training.draft(self.life, due.reason, due.requests)
            made = self.link.save(lambda: self._publish(draft), self.step, due.requests, must=must)
            self.link.phase("step")
            if made is None:
                return False
            self._published = made
        elif due.reason == "cadence":
            return True  # resumed from this very step; nobody asked for anything
        self.link.saved(
            self.step,
            self._published.binary_digest,
            due.reason,
            due.requests,
            time.monotonic() - started,
        )
        return True

    def _publish(self, draft: contract.Manifest) -> contract.Manifest:
        return checkpoint.publish(
            self.directory,
            draft,
            self.training.model.flat,
            nonce=self.life.nonce,
            sync=self.link.sync,
        )

    # --- audit and evaluation ---------------------------------------------------------------------

    def _audit(self, final: bool) -> None:
        """Evaluation, then samples, where due and not done. Each gives up when a stop is wanted."""
        evaluating = self._is_due(self._evaluation_cadence, EVALUATED, final)
        sampling = self._is_due(
            self.settings.samples.every or self.settings.checkpoint.every, AUDITED, final
        )
        if evaluating:
            self.link.phase("evaluate")
            self._evaluate()
        if sampling:
            self.link.phase("sample")
            self._sample()
        if evaluating or sampling:
            self.link.phase("step")

    @property
    def _evaluation_cadence(self) -> int:
        return self.settings.evaluation.every or self.settings.checkpoint.every

    def _is_due(self, every: int, name: str, final: bool) -> bool:
        step = self.step
        return (final or step % every == 0) and self.training.detectors[name] < step

    def _evaluate(self) -> None:
        measured: dict[str, tuple[float, int]] = {}
        for name, arm in self.training.data.arms.items():
            found = self._heldout_loss(arm.heldout)
            if found is None:
                return
            if found[1]:
                measured[name] = found
        self.training.detectors[EVALUATED] = self.step
        if not measured:
            return  # nothing is held out
        nats = math.fsum(one for one, _ in measured.values())
        arms: Json = {
            name: {
                "loss": contract.encode_number(one / targets),
                "targets": targets,
                "byte_entropy": self.training.data.arms[name].heldout_byte_entropy,
            }
            for name, (one, targets) in measured.items()
        }
        loss = nats / sum(targets for _, targets in measured.values())
        self.training.take_evaluation(loss)
        if self.step % self._evaluation_cadence == 0:
            means = {name: one / targets for name, (one, targets) in measured.items()}
            self.training.curriculum = curriculum.evaluated(
                self.training.curriculum,
                {name: mean for name, mean in means.items() if math.isfinite(mean)},
            )
        self.link.record(EvaluationLine(self.step, self.life.attempt, loss, arms))

    def _heldout_loss(self, heldout: Windows) -> tuple[float, int] | None:
        """Summed loss (nats) and targets of the first windows; None where a stop is wanted."""
        training, batch = self.training, self.settings.training.batch_windows
        count = min(self.settings.evaluation.windows, heldout.window_count)
        nats, targets = 0.0, 0
        with looking_only(training.model):
            for start in range(0, count, batch):
                if self.link.stop_wanted():
                    return None
                numbers = range(start, min(start + batch, count))
                inputs, wanted, valid = corpus.collate([heldout.window(n) for n in numbers])
                with device.autocast(training.place, self.settings.trainer.precision):
                    loss, _ = training.model(inputs.to(training.place), wanted.to(training.place))
                nats += loss.item()
                targets += valid
        return nats, targets

    def _sample(self) -> None:
        settings, training = self.settings.samples, self.training
        seed = self.settings.training.seed
        texts = continue_texts(
            training.model,
            training.data.tokenizer,
            settings.prompts,
            tokens=settings.tokens,
            temperature=settings.temperature,
            seeds=[seed_for(seed, self.step, index) for index in range(len(settings.prompts))],
            precision=self.settings.trainer.precision,
            give_up=self.link.stop_wanted,
        )
        if texts is None:
            return
        pairs = zip(settings.prompts, texts, strict=True)
        # A character takes up to 6 bytes, and of a line that is too long none would be read, nor of
        # those after it.
        most = contract.RECEIPT_BYTES_MAX // (16 * len(texts))
        self.link.record(
            AuditLine(
                step=self.step,
                time=time.time(),
                attempt=self.life.attempt,
                epoch=self.life.epoch,
                samples=[{"prompt": prompt[:most], "text": text[:most]} for prompt, text in pairs],
                arm_shares=curriculum.shares(training.curriculum),
            )
        )
        training.detectors[AUDITED] = self.step


class Progress:
    """What a person sees of a trainer that runs alone: one line that changes, or a line now and
    then where nobody can see it change."""

    def __init__(self, steps: int, *, wanted: bool) -> None:
        self._steps = steps
        self._wanted = wanted
        self._live = sys.stderr.isatty()
        self._every = min(50, max(1, steps // 10))
        self._shown_at = -math.inf

    def show(self, step: int, loss: float, arm: str) -> None:
        if not self._wanted:
            return
        last = step >= self._steps
        line = f"step {step} of {self._steps}  loss {loss:.4f}  {arm}"
        if not self._live:
            if last or step % self._every == 0:
                print(line, file=sys.stderr)
        elif last or time.monotonic() - self._shown_at > 0.1:
            self._shown_at = time.monotonic()
            print(f"\r\x1b[K{line}", end="\n" if last else "", file=sys.stderr, flush=True)
