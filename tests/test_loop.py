"""Lives of the trainer inside this process: exactness, boundaries, audits, and what is refused."""

from __future__ import annotations

import base64
import math
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_kit as kit
from hypothesis import given, strategies as st
from property_kit import cases, scratch

from supervisor import config, contract, curriculum, link as link_module, pivot
from supervisor.contract import (
    AuditLine,
    Entry,
    EnvironmentLine,
    EvaluationLine,
    LoadedLine,
    Manifest,
)
from supervisor.link import Link
from trainer import checkpoint, corpus, data, device, generate, loop, recipe
from trainer.checkpoint import CheckpointDamaged, CheckpointNotWritten, StateMismatch
from trainer.corpus import DataError
from trainer.device import GeneratorError
from trainer.optimizer import NonFinite
from trainer.recipe import Training
from trainer.sampler import Sampler, SamplerError
from trainer.tokenizer import TokenizerError


@pytest.fixture(autouse=True)
def _switches(run_home: Path) -> Iterator[None]:
    with kit.switches_restored():
        yield


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("home")


def checkpoints_of(lived: kit.Lived) -> list[int]:
    return checkpoint.steps(lived.loop.directory)


def manifest_of(lived: kit.Lived, step: int) -> Manifest:
    return checkpoint.read_manifest(lived.loop.directory, step)


def rewritten(lived: kit.Lived, step: int, change: Callable[[Any], object]) -> None:
    """Changes the state in a manifest and seals it again, as a forger would."""
    manifest = manifest_of(lived, step)
    change(manifest.state)
    path = lived.loop.directory / f"{contract.checkpoint_stem(step)}.json"
    path.write_bytes(manifest.to_bytes())


# --- a resumed run is the run that never stopped --------------------------------------------------


def assert_same_run(whole: kit.Lived, *parts: kit.Lived) -> None:
    """Losses, every deterministic field, weights, m, v, and a vector drawn after the last step."""
    joined = [entry for part in parts for entry in part.entries]
    assert [entry.step for entry in joined] == [entry.step for entry in whole.entries]
    for ours, theirs in zip(joined, whole.entries, strict=True):
        assert contract.differing_fields(ours, theirs) == ()
    assert parts[-1].image == whole.image
    assert torch.equal(parts[-1].drawn, whole.drawn)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"dropout": 0.2}},
        {"training": {"accumulate": 3, "schedule": "cosine", "warmup_steps": 4}},
        {"trainer": {"precision": "bfloat16"}},
    ],
    ids=["plain", "fc36 dropout", "accumulated, scheduled", "bfloat16"],
)
def test_fc28_a_run_stopped_and_resumed_is_the_run_that_never_stopped(
    homes: Callable[[], Path], sections: dict[str, dict[str, Any]]
) -> None:
    """The first step after a resume matched and the second did not, because moments were rounded
    (KempnerInstitute/KempnerForge #114); the random state was back at its seed, so that dropout
    differed (ai2cm/ace #690, vllm-project/speculators #1027)."""
    whole = kit.live(kit.settings_of(homes(), **sections))
    ours = kit.settings_of(homes(), **sections)
    first = kit.live(ours, script={5: kit.term})
    second = kit.live(ours, attempt=2)
    assert (first.why, second.why) == (loop.STOPPED, loop.FINISHED)
    assert_same_run(whole, first, second)


@cases(8)
@given(stops=st.sets(st.integers(1, 11), min_size=1, max_size=4))
def test_any_number_of_stops_at_any_steps_changes_nothing(stops: set[int]) -> None:
    with scratch() as whole_home, scratch() as our_home:
        whole = kit.live(kit.settings_of(whole_home, model={"dropout": 0.1}))
        ours = kit.settings_of(our_home, model={"dropout": 0.1})
        lives = [
            kit.live(ours, attempt, script={step: kit.term} if step else {})
            for attempt, step in enumerate([*sorted(stops), None], start=1)
        ]
        assert [life.entries[-1].step for life in lives] == [*sorted(stops), 12]
        assert_same_run(whole, *lives)


def test_three_updates_then_the_fourth_equals_saved_and_reloaded_then_the_fourth(
    homes: Callable[[], Path],
) -> None:
    """The lesson's own test, with every component compared."""
    four = {"training": {"steps": 4}, "checkpoint": {"every": 100}}
    whole = kit.live(kit.settings_of(homes(), **four))
    ours = kit.settings_of(homes(), **four)
    first = kit.live(ours, script={3: kit.term})
    second = kit.live(ours, attempt=2)
    assert_same_run(whole, first, second)
    one, other = manifest_of(whole, 4).state, manifest_of(second, 4).state
    for component in contract.STATE_COMPONENTS:
        if component not in ("configuration", "policy_digest"):  # paths differ between homes
            assert one[component] == other[component], component


@pytest.mark.parametrize("lost", ["sampler", "first_moments", "second_moments", "rng"])
def test_a_component_that_is_not_restored_shows(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """That the comparison above can fail: a fresh sampler of the same seed serves the first batches
    again, zeroed moments and another random state give other weights."""
    tiny = {"model": {"dropout": 0.1}}
    whole = kit.live(kit.settings_of(homes(), **tiny))
    ours = kit.settings_of(homes(), **tiny)
    kit.live(ours, script={5: kit.term})
    original = recipe.resumed

    def resumed(*arguments: Any) -> Training:
        training = original(*arguments)
        flat = training.model.flat
        if lost == "sampler":
            for name, used in training.samplers.items():
                training.samplers[name] = Sampler(name, used.windows, used.batch, 7)
        elif lost == "rng":
            torch.manual_seed(7)
        else:
            getattr(flat, lost).zero_()
        return training

    monkeypatch.setattr(recipe, "resumed", resumed)
    second = kit.live(ours, attempt=2)
    assert second.image != whole.image
    assert second.losses != whole.losses[5:]


def test_fc37_the_generators_are_restored_last(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random state was restored and then re-seeded by later set-up code
    (modelscope/ms-swift PR 9935)."""
    ours = kit.settings_of(homes(), model={"dropout": 0.1})
    first = kit.live(ours, script={5: kit.term})
    seen: list[dict[str, str]] = []
    original = loop.Loop._update

    def update(self: loop.Loop) -> None:
        seen.append(device.rng_state(self.training.place))
        original(self)

    monkeypatch.setattr(loop.Loop, "_update", update)
    kit.live(ours, attempt=2)
    assert seen[0] == manifest_of(first, 5).state["rng"]
    assert seen[1] != seen[0]


def test_fc34_random_states_are_plain_text(homes: Callable[[], Path]) -> None:
    """The file of the random states could not be read any more once the loader's default had become
    strict (huggingface/transformers #40500, #34631)."""
    lived = kit.live(kit.settings_of(homes()))
    states = manifest_of(lived, 12).state["rng"]
    assert list(states) == ["torch_cpu"]
    state = torch.tensor(list(base64.b64decode(states["torch_cpu"])), dtype=torch.uint8)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(8), lived.drawn)


@pytest.mark.parametrize("broken", ["missing", "not base64", "too short"])
def test_fc35_a_random_state_that_cannot_be_restored_stops_the_resume(
    homes: Callable[[], Path], broken: str
) -> None:
    """A broad except around it let training go on with other random streams
    (redai-studio/Relax PR 317 review)."""
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={5: kit.term})

    def change(state: Any) -> None:
        if broken == "missing":
            del state["rng"]["torch_cpu"]
        else:
            state["rng"]["torch_cpu"] = {"not base64": "%", "too short": "AAAA"}[broken]

    rewritten(first, 5, change)
    with pytest.raises(GeneratorError, match=r"rng\.torch_cpu") as caught:
        kit.live(ours, attempt=2)
    assert loop.verdict(caught.value) == (contract.ExitCode.DATA, "data")
    assert kit.steps_of(first.loop.life.run_directory, 2) == []


def test_fc20_a_resumed_run_never_writes_an_existing_checkpoint_again(
    homes: Callable[[], Path],
) -> None:
    """Numbering restarted at zero after a restore and overwrote older checkpoints
    (ray-project/ray #29947, PR 31423)."""
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={9: kit.term})
    assert checkpoints_of(first) == [4, 8, 9]
    before = kit.identities_of(first.loop.directory)
    second = kit.live(ours, attempt=2)
    assert checkpoints_of(second) == [4, 8, 9, 12]
    after = kit.identities_of(first.loop.directory)
    assert {name: after[name] for name in before} == before


# --- counting -------------------------------------------------------------------------------------


def targets_by_windows(training: Training, manifest: Manifest) -> int:
    """Targets of every window taken so far, from what the samplers say they have served."""
    total = 0
    for name, arm in training.data.arms.items():
        state = manifest.state["arms"][name]["sampler"]
        sampler = Sampler(name, arm.window_count, training.settings.training.batch_windows, 7)
        drawn = 0
        while sampler.state() != state:
            numbers = sampler.draw()
            drawn += len(numbers)
            total += sum(len(arm.window(number)) - 1 for number in numbers)
            assert drawn < 10_000, f"{name}: the saved state is not on the stream"
    return total


def test_fc46_targets_seen_counts_what_was_trained_on_and_nothing_twice(
    homes: Callable[[], Path],
) -> None:
    """A counter stored when a step began was one ahead after a kill, and work counted twice
    (prashar32/riskkernel PR 63)."""
    ours = kit.settings_of(homes())
    whole = kit.live(kit.settings_of(homes()))
    first = kit.live(ours, script={11: kit.term})
    # As after a kill at step 11: the newest checkpoint is that of step 8.
    for name in ("step_000011.bin", "step_000011.json"):
        (first.loop.directory / name).unlink()
    second = kit.live(ours, attempt=2)
    assert [entry.step for entry in second.entries] == [9, 10, 11, 12]
    counts = {entry.step: entry.targets_seen for entry in whole.entries}
    assert {e.step: e.targets_seen for e in (*first.entries, *second.entries)} == counts
    seen = [count or 0 for count in counts.values()]
    assert sorted(set(seen)) == seen
    for step in checkpoints_of(second):
        manifest = manifest_of(second, step)
        assert manifest.state["targets_seen"] == counts[step]
        assert targets_by_windows(second.loop.training, manifest) == counts[step]


def test_fc57_the_number_in_the_name_is_the_number_of_updates(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved before the counter moved, the last batch was trained on twice, or the file of step N
    held N + 1 updates (Lightning-AI/pytorch-lightning #19815, AI-Hypercomputer/maxdiffusion
    PR 484 review)."""
    drawn: list[tuple[str, int]] = []
    original = Sampler.draw

    def draw(self: Sampler) -> list[int]:
        numbers = original(self)
        drawn.append((self.arm, *numbers))  # type: ignore[arg-type]
        return numbers

    monkeypatch.setattr(Sampler, "draw", draw)
    kit.live(kit.settings_of(homes()))
    uninterrupted, drawn[:] = list(drawn), []
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={5: kit.usr1, 7: kit.term})
    for step in (4, 5, 7):
        manifest = manifest_of(first, step)
        raw = (first.loop.directory / f"step_{step:06d}.bin").read_bytes()
        assert struct.unpack_from("<i", raw)[0] == step
        assert manifest.state["updates"] == step
        pulls = sum(arm["pulls"] for arm in manifest.state["bandit"]["arms"].values())
        assert pulls == step
    second = kit.live(ours, attempt=2)
    assert second.entries[0].step == 8
    assert drawn == uninterrupted


def test_every_receipt_says_what_the_step_was(homes: Callable[[], Path]) -> None:
    ours = kit.settings_of(homes(), training={"schedule": "cosine", "warmup_steps": 5})
    lived = kit.live(ours, epoch=3)
    first, *_ = lived.receipts
    assert isinstance(first, EnvironmentLine)
    assert first.environment["settings_digest"] == contract.digest(contract.canonical(ours.tree()))
    assert first.environment["threads"] == 1
    rates = [entry.learning_rate for entry in lived.entries]
    assert rates[0] == pytest.approx(0.01 / 5)
    assert max(filter(None, rates)) <= 0.01
    times = [entry.time or 0.0 for entry in lived.entries]
    assert times == sorted(times)
    for entry in lived.entries:
        assert (entry.attempt, entry.epoch) == (1, 3)
        assert entry.arm in ("prose", "code")
        assert entry.gradient_norm is not None
        assert entry.step_seconds is not None
        assert math.isfinite(entry.loss)


def test_accumulated_micro_batches_are_one_mean_over_all_targets(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three micro-batches of up to 4 windows give the loss and the gradient of one of up to 12."""
    ours = kit.settings_of(homes(), training={"steps": 1, "accumulate": 3})
    taken: list[list[int]] = []
    original = Sampler.draw

    def draw(self: Sampler) -> list[int]:
        taken.append(original(self))
        return taken[-1]

    monkeypatch.setattr(Sampler, "draw", draw)
    lived = kit.live(ours)
    (entry,) = lived.entries
    assert len(taken) == 3
    training = lived.loop.training
    fresh = recipe.fresh(ours, training.data, training.place, {})
    arm = training.data.arms[str(entry.arm)]
    inputs, targets, count = corpus.collate([arm.window(n) for batch in taken for n in batch])
    loss, _ = fresh.model(inputs, targets)
    (loss / count).backward()
    assert entry.targets_seen == count
    assert entry.loss == pytest.approx(loss.item() / count, rel=1e-6)
    norm = torch.linalg.vector_norm(fresh.model.flat.gradients).item()
    assert entry.gradient_norm == pytest.approx(norm, rel=1e-5)


# --- boundaries -----------------------------------------------------------------------------------


@pytest.mark.fault(
    "SV-23", phase="running", does="saves after a whole update, wherever the signal met it"
)
@pytest.mark.fault("FC-70", phase="running", does="saves on the loop, at the boundary of an update")
def test_fc51_a_request_in_the_middle_of_an_accumulation_waits_for_the_boundary(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint in the middle of an accumulation lost the gradients so far
    (huggingface/transformers #22143)."""
    tiny = {"training": {"accumulate": 3}}
    whole = kit.live(kit.settings_of(homes(), **tiny))
    ours = kit.settings_of(homes(), **tiny)
    backwards = 0
    original = loop.Loop._backward

    def backward(self: loop.Loop, *arguments: Any) -> torch.Tensor:
        nonlocal backwards
        backwards += 1
        if backwards == 3 * 6 + 2:  # the second micro-batch of step 7
            kit.term()
        return original(self, *arguments)

    monkeypatch.setattr(loop.Loop, "_backward", backward)
    first = kit.live(ours)
    assert (first.why, first.entries[-1].step, backwards) == (loop.STOPPED, 7, 3 * 7)
    assert checkpoints_of(first) == [4, 7]
    second = kit.live(ours, attempt=2)
    assert_same_run(whole, first, second)


def test_sigusr1_saves_and_trains_on(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes()), script={3: kit.usr1, 6: kit.usr1, 8: kit.usr1})
    assert lived.why == loop.FINISHED
    reasons = {step: manifest_of(lived, step).reason for step in checkpoints_of(lived)}
    assert reasons == {3: "sigusr1", 4: "cadence", 6: "sigusr1", 8: "sigusr1", 12: "cadence"}


def test_sigterm_saves_and_stops(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes()), script={6: kit.term})
    assert (lived.why, lived.loop.step, checkpoints_of(lived)) == (loop.STOPPED, 6, [4, 6])
    assert manifest_of(lived, 6).reason == "sigterm"


def test_a_request_before_the_first_step_waits_for_it(homes: Callable[[], Path]) -> None:
    ours = kit.settings_of(homes())
    with kit.CuedLink(kit.life_of(ours)) as link:
        link.install_signal_handlers()
        kit.usr1()
        trainer = loop.Loop(ours, link)
        assert trainer.run() == loop.FINISHED
    assert checkpoint.steps(trainer.directory) == [1, 4, 8, 12]


@pytest.mark.fault(
    "SV-24", phase="loading", does="looks at requests while it loads, and makes no step"
)
def test_a_stop_while_loading_makes_no_step(homes: Callable[[], Path]) -> None:
    ours = kit.settings_of(homes())
    for attempt, expected in ((1, 0), (3, 5)):
        with kit.CuedLink(kit.life_of(ours, attempt)) as link:
            link.install_signal_handlers()
            kit.term()
            trainer = loop.Loop(ours, link)
            assert trainer.run() == loop.STOPPED
        assert trainer.step == expected
        assert kit.steps_of(trainer.life.run_directory, attempt) == []
        assert checkpoint.steps(trainer.directory) == ([5] if expected else [])
        if attempt == 1:
            kit.live(ours, attempt=2, script={2: kit.usr1, 5: kit.term})
            for ending in (".bin", ".json"):
                for step in (2, 4):
                    (trainer.directory / f"{contract.checkpoint_stem(step)}{ending}").unlink()


def test_a_run_at_its_target_is_finished_without_an_update(homes: Callable[[], Path]) -> None:
    ours = kit.settings_of(homes())
    first = kit.live(ours)
    before = kit.identities_of(first.loop.directory)
    second = kit.live(ours, attempt=2)
    assert (second.why, second.entries, kit.audits_of(second)) == (loop.FINISHED, [], [])
    assert kit.identities_of(first.loop.directory) == before


def test_a_resumed_checkpoint_is_not_announced_as_a_new_one(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = kit.settings_of(homes())
    kit.live(ours, script={8: kit.term})
    announced: list[int] = []
    monkeypatch.setattr(Link, "saved", lambda self, step, *_: announced.append(step))
    kit.live(ours, attempt=2)
    assert announced == [12]


def test_the_target_is_a_boundary_of_the_cadence(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes(), training={"steps": 10}))
    assert checkpoints_of(lived) == [4, 8, 10]
    assert kit.audits_of(lived) == [4, 8, 10]
    assert manifest_of(lived, 10).reason == "cadence"


def test_fc101_a_loss_that_is_not_finite_stops_before_the_update(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss was NaN and training went on (Nerogar/OneTrainer #1147, skinniderlab/CLM #284)."""
    ours = kit.settings_of(homes())
    images: list[bytes] = []
    original = loop.Loop._backward

    def backward(self: loop.Loop, *arguments: Any) -> torch.Tensor:
        loss = original(self, *arguments)
        if self.step == 6:
            images.append(bytes(self.training.model.flat.image))
            return loss * math.nan
        return loss

    monkeypatch.setattr(loop.Loop, "_backward", backward)
    with kit.CuedLink(kit.life_of(ours)) as link:
        trainer = loop.Loop(ours, link)
        with pytest.raises(NonFinite, match="update 7 refused") as caught:
            trainer.run()
    assert loop.verdict(caught.value) == (contract.ExitCode.NON_FINITE, "non-finite")
    assert trainer.step == 6
    assert bytes(trainer.training.model.flat.image) == images[0]
    assert kit.steps_of(trainer.life.run_directory) == [1, 2, 3, 4, 5, 6]
    assert checkpoint.steps(trainer.directory) == [4]
    made = checkpoint.verify(trainer.directory, 4)
    checkpoint.load(trainer.directory, made, trainer.training.model.flat)
    assert trainer.training.model.flat.weights.isfinite().all()


class FullDisk:
    """No link can be made from now on, until it is freed; after `tries`, `then` happens."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tries: int, then: Callable[[], object]
    ) -> None:
        self.tries, self._then, self._real = tries, then, os.link
        self.full = True
        monkeypatch.setattr(os, "link", self._link)
        monkeypatch.setattr(link_module, "RETRY_SECONDS", 0.01)

    def free(self) -> None:
        self.full = False

    def _link(self, *names: Any) -> None:
        if not self.full:
            return self._real(*names)
        self.tries -= 1
        if self.tries == 0:
            self._then()
        raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_is_left_out_and_the_next_one_is_made(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on without a new one; the weights are those of a run that met no full disk."""
    whole = kit.live(kit.settings_of(homes()))
    disk: list[FullDisk] = []
    lived = kit.live(
        kit.settings_of(homes()),
        script={
            3: lambda: disk.append(FullDisk(monkeypatch, 10**6, lambda: None)),
            9: lambda: disk[0].free(),
        },
    )
    assert checkpoints_of(lived) == [12]
    assert [entry.step for entry in lived.entries] == list(range(1, 13))
    assert manifest_of(lived, 12).binary_digest == manifest_of(whole, 12).binary_digest
    assert list(lived.loop.directory.glob(".tmp-*")) == []


@pytest.mark.parametrize(("asked", "reason"), [(None, "cadence"), (kit.usr1, "sigusr1")])
def test_a_save_that_the_disk_refused_is_made_up_for_before_the_next_cadence(
    homes: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    asked: Callable[[], None] | None,
    reason: str,
) -> None:
    """The run exposed a whole cadence to the next death, and a SIGUSR1 was forgotten. The weights
    are those of a run that met no full disk."""
    monkeypatch.setattr(link_module, "SAVE_AGAIN_SECONDS", 0.0)
    whole = kit.live(kit.settings_of(homes()))
    disk: list[FullDisk] = []

    def fill() -> None:
        disk.append(FullDisk(monkeypatch, 10**6, lambda: None))
        if asked is not None:
            asked()

    lived = kit.live(
        kit.settings_of(homes()),
        script={3 if asked else 4: fill, 6: lambda: disk[0].free()},
    )
    assert checkpoints_of(lived) == [6, 8, 12]
    assert manifest_of(lived, 6).reason == reason
    assert manifest_of(lived, 12).binary_digest == manifest_of(whole, 12).binary_digest


def test_the_last_checkpoint_waits_for_room(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk: list[FullDisk] = []

    def fill() -> None:
        disk.append(FullDisk(monkeypatch, 7, lambda: disk[0].free()))

    lived = kit.live(kit.settings_of(homes()), script={9: fill})
    assert disk[0].tries <= 0
    assert checkpoints_of(lived) == [4, 8, 12]
    assert lived.why == loop.FINISHED


def test_a_stop_that_cannot_be_saved_ends_with_its_own_code(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = kit.settings_of(homes())
    disk: list[FullDisk] = []

    def full_and_stopped() -> None:
        disk.append(FullDisk(monkeypatch, 10**6, lambda: None))
        signal.raise_signal(signal.SIGTERM)

    with kit.CuedLink(kit.life_of(ours), {6: full_and_stopped}) as link:
        link.install_signal_handlers()
        trainer = loop.Loop(ours, link)
        with pytest.raises(CheckpointNotWritten, match="No space left") as caught:
            trainer.run()
    assert disk[0].tries == 10**6 - link_module.LAST_TRIES
    assert loop.verdict(caught.value) == (contract.ExitCode.CHECKPOINT, "checkpoint")
    assert (trainer.step, checkpoint.steps(trainer.directory)) == (6, [4])
    monkeypatch.undo()
    assert kit.live(ours, attempt=2).entries[0].step == 5


def test_a_step_that_cannot_be_recorded_ends_a_stop_with_that_code_too() -> None:
    code = loop.verdict(link_module.ReceiptNotWritten(28, "No space left on device"))
    assert code == (contract.ExitCode.CHECKPOINT, "checkpoint")


# --- with a supervisor at the other end -----------------------------------------------------------


class Peer:
    """The supervisor's end of the link, just enough to ask and to listen."""

    def __init__(self, directory: Path) -> None:
        import zmq

        (directory / contract.SOCKETS).mkdir(parents=True, exist_ok=True)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(f"ipc://{directory}/{contract.SOCKETS}/{contract.TRAINER_SOCKET}")
        self.identity: bytes | None = None
        self.heard: list[tuple[str, contract.Json]] = []

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def listen(self, wait: int = 0) -> None:
        while self.socket.poll(wait):
            self.identity, frame = self.socket.recv_multipart()
            self.heard.append(contract.parse_message(frame, contract.UP, "test"))

    def verbs(self, *names: str) -> list[contract.Json]:
        self.listen(100)
        return [content for verb, content in self.heard if verb in names]

    def ask(self, link: kit.CuedLink, verb: str, **content: Any) -> None:
        """Sends a request and sees to it that the trainer has taken it in."""
        while self.identity is None:
            link.poll()
            self.listen(10)
        self.socket.send_multipart([self.identity, contract.encode_message(verb, **content)])
        while content and {"id": content["id"]} not in self._seen():
            link.poll()
            self.listen(10)

    def _seen(self) -> list[contract.Json]:
        return [{"id": content["id"]} for verb, content in self.heard if verb == "seen"]


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a supervised life; `script(peer, link)` gives what to do after which step."""
    peers: list[Peer] = []

    def run(script: Callable[[Peer, kit.CuedLink], kit.Script], **sections: Any) -> Any:
        ours = kit.settings_of(tmp_path, **sections)
        directory = Path(ours.run.directory)
        peers.append(Peer(directory))
        life = kit.life_of(ours, supervised=True, resume_step=0)
        with kit.CuedLink(life) as link:
            link.script |= script(peers[0], link)
            trainer = loop.Loop(ours, link)
            why = trainer.run()
            link.farewell(why, trainer.step, 0)
        return why, trainer, peers[0]

    yield run
    for peer in peers:
        peer.close()


def test_a_request_is_answered_by_the_boundary_it_asked_for(supervised: Callable[..., Any]) -> None:
    why, trainer, peer = supervised(
        lambda peer, link: {
            2: lambda: peer.ask(link, "checkpoint", id="soon", at="now"),
            5: lambda: peer.ask(link, "checkpoint", id="later", at="boundary"),
            10: lambda: peer.ask(link, "stop", id="enough", at="now"),
        }
    )
    assert (why, trainer.step) == (loop.STOPPED, 10)
    saved = {m["step"]: (m["reason"], m["requests"]) for m in peer.verbs("saved")}
    assert saved == {
        2: ("operator", ["soon"]),
        4: ("cadence", []),
        8: ("operator", ["later"]),
        10: ("operator", ["enough"]),
    }
    for message in peer.verbs("saved"):
        manifest = checkpoint.verify(
            trainer.life.run_directory / contract.CHECKPOINTS, message["step"]
        )
        assert message["digest"] == manifest.binary_digest
        assert list(manifest.requests) == message["requests"]
    (hello,) = {m["parameters"]: m for m in peer.verbs("hello")}.values()
    assert hello["parameters"] == trainer.training.model.flat.parameters
    assert hello["policy_digest"] == config.policy_digest(trainer.settings)
    assert kit.exit_of(trainer.life.run_directory).requests == ["soon", "later", "enough"]
    phases = [m["phase"] for m in peer.verbs("phase")]
    assert phases[:8] == ["step", "save", "step", "evaluate", "sample", "step", "save", "step"]


def test_a_pause_is_saved_and_left_when_told_to_exit(supervised: Callable[..., Any]) -> None:
    def script(peer: Peer, link: kit.CuedLink) -> kit.Script:
        original = link.paused

        def paused(step: int, request: str) -> None:
            original(step, request)
            peer.ask(link, "exit")

        link.paused = paused  # type: ignore[method-assign]
        return {5: lambda: peer.ask(link, "pause", id="pivot-1")}

    why, trainer, peer = supervised(script)
    assert (why, trainer.step) == (loop.STOPPED, 8)
    assert manifest_at(trainer, 8).reason == "pivot"
    assert manifest_at(trainer, 8).requests == ("pivot-1",)
    assert [(m["step"], m["id"]) for m in peer.verbs("paused")] == [(8, "pivot-1")]


def test_a_pause_whose_checkpoint_the_disk_refuses_waits_for_the_next_boundary(
    supervised: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk: list[FullDisk] = []

    def script(peer: Peer, link: kit.CuedLink) -> kit.Script:
        original = link.paused

        def paused(step: int, request: str) -> None:
            original(step, request)
            peer.ask(link, "exit")

        def ask() -> None:
            peer.ask(link, "pause", id="pivot-1")
            disk.append(FullDisk(monkeypatch, 10**6, lambda: None))

        link.paused = paused  # type: ignore[method-assign]
        return {5: ask, 9: lambda: disk[0].free()}

    why, trainer, peer = supervised(script, training={"steps": 16})
    assert (why, trainer.step) == (loop.STOPPED, 12)
    (told,) = peer.verbs("unsaved")
    assert (told["step"], told["errno"], told["requests"]) == (8, 28, [])
    assert [m["step"] for m in peer.verbs("paused")] == [12]


def manifest_at(trainer: loop.Loop, step: int) -> Manifest:
    return checkpoint.read_manifest(trainer.life.run_directory / contract.CHECKPOINTS, step)


def test_a_pause_that_nobody_ends_is_over_after_its_time(
    supervised: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PAUSE_SECONDS", 0.05)
    why, trainer, peer = supervised(
        lambda peer, link: {5: lambda: peer.ask(link, "pause", id="pivot-1")}
    )
    assert (why, trainer.step) == (loop.FINISHED, 12)
    assert [m["step"] for m in peer.verbs("paused")] == [8]
    assert manifest_at(trainer, 8).requests == ("pivot-1",)


def test_a_request_for_a_step_that_has_a_checkpoint_is_answered_by_that(
    homes: Callable[[], Path], tmp_path: Path
) -> None:
    ours = kit.settings_of(tmp_path)
    first = kit.live(ours, script={5: kit.term})
    before = kit.identities_of(first.loop.directory)
    peer = Peer(Path(ours.run.directory))
    try:
        with kit.CuedLink(kit.life_of(ours, 2, supervised=True, resume_step=5)) as link:
            original = link.hello

            def hello(step: int, parameters: int, policy_digest: str) -> None:
                original(step, parameters, policy_digest)
                peer.ask(link, "stop", id="enough", at="now")

            link.hello = hello  # type: ignore[method-assign]
            trainer = loop.Loop(ours, link)
            assert trainer.run() == loop.STOPPED
        (saved,) = peer.verbs("saved")
    finally:
        peer.close()
    assert (saved["step"], saved["requests"]) == (5, ["enough"])
    assert saved["digest"] == manifest_of(first, 5).binary_digest
    assert kit.identities_of(first.loop.directory) == before


@pytest.mark.parametrize("step", [4, 8])
def test_a_supervisor_names_the_step_to_resume_from(homes: Callable[[], Path], step: int) -> None:
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={9: kit.term})
    for later in checkpoints_of(first):
        if later > step:
            for ending in (".bin", ".json"):
                (first.loop.directory / f"step_{later:06d}{ending}").unlink()
    second = kit.live(ours, attempt=2, resume_step=step)
    assert second.entries[0].step == step + 1


def test_a_named_step_that_is_damaged_is_never_replaced_by_another(
    homes: Callable[[], Path],
) -> None:
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={9: kit.term})
    os.truncate(first.loop.directory / "step_000009.bin", 100)
    with pytest.raises(CheckpointDamaged) as caught:
        kit.live(ours, attempt=2, resume_step=9)
    assert loop.verdict(caught.value) == (contract.ExitCode.FAILED, "error")


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "was", "now"),
    [
        ("training.seed", 7, 8),
        ("training.batch_windows", 4, 5),
        ("training.learning_rate", 0.01, 0.02),
        ("model.context", 16, 12),
        ("model.width", 16, 32),
        ("evaluation.fraction", 0.2, 0.3),
        ("trainer.precision", "float32", "bfloat16"),
    ],
)
def test_a_setting_that_is_part_of_the_state_is_refused_with_both_values(
    homes: Callable[[], Path], key: str, was: Any, now: Any
) -> None:
    home = homes()
    kit.live(kit.settings_of(home), script={5: kit.term})
    section, name = key.split(".")
    changed = kit.settings_of(home, **{section: {name: now}})
    with pytest.raises(StateMismatch) as caught:
        kit.live(changed, attempt=2)
    text = str(caught.value)
    assert f"{key}: recorded " in text
    assert str(was) in text
    assert str(now) in text


def test_a_longer_target_and_another_directory_are_no_part_of_the_state(
    homes: Callable[[], Path],
) -> None:
    home = homes()
    first = kit.live(kit.settings_of(home, training={"schedule_steps": 12}))
    longer = kit.settings_of(home, training={"steps": 14, "schedule_steps": 12})
    second = kit.live(longer, attempt=2)
    assert (first.why, second.why) == (loop.FINISHED, loop.FINISHED)
    assert [entry.step for entry in second.entries] == [13, 14]
    assert kit.audits_of(second) == [14]


def test_audits_and_evaluations_follow_a_pivot_of_the_cadence(
    homes: Callable[[], Path],
) -> None:
    home = homes()
    first = kit.settings_of(home, training={"steps": 20})
    kit.live(first, script={8: kit.term})
    file = home / "often.toml"
    file.write_text("[checkpoint]\nevery = 3\n")
    _, often = pivot._submitted(first, file)
    second = kit.live(often, attempt=2, epoch=2)
    assert checkpoints_of(second)[-5:] == [9, 12, 15, 18, 20]
    assert kit.audits_of(second) == [9, 12, 15, 18, 20]
    assert [line.step for line in kit.evaluations_of(second)] == [9, 12, 15, 18, 20]


def test_fc59_changed_content_is_refused_with_both_digests(homes: Callable[[], Path]) -> None:
    """The order of a file listing differs from machine to machine (huggingface/datasets #3857,
    pytorch/vision #192): here order is by name, and content is what a run is bound to."""
    home = homes()
    ours = kit.settings_of(home)
    first = kit.live(ours, script={5: kit.term})
    saved = manifest_of(first, 5).state["arms"]["code"]["corpus_digest"]
    file = home / "code" / "3.txt"
    text = file.read_text()
    file.write_text(text.replace("return", "yield "))
    with pytest.raises(StateMismatch) as caught:
        kit.live(ours, attempt=2)
    loaded = data.load(ours)
    assert loaded is not None
    now = loaded.arms["code"].digest
    assert f"arm code: corpus digest: saved {saved}, now {now}" in str(caught.value)
    assert now != saved
    # The same names, created in another order, are the same data.
    for path in sorted((home / "code").iterdir(), reverse=True):
        content = text if path == file else path.read_text()
        path.unlink()
        path.write_text(content)
    assert kit.live(ours, attempt=3).why == loop.FINISHED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["tokenizer"].update(digest="0" * 64), "tokenizer digest: saved 000"),
        (lambda state: state["tokenizer"].pop("digest"), r"has no tokenizer\.digest"),
        (
            lambda state: state["arms"].pop("code"),
            r"arms: saved \['prose'\], now \['code'",
        ),
        (lambda state: state["arms"]["code"].update(windows=1), "arm code: windows: saved 1, now"),
        (lambda state: state["arms"]["code"].pop("sampler"), r"has no arms\.code\.sampler"),
        (lambda state: state["detectors"].pop("audited_step"), r"has no detectors\.audited_step"),
        (lambda state: state["configuration"].update(model=3), r"configuration: model = 3"),
    ],
    ids=["tokenizer", "no digest", "arm", "windows", "no sampler", "no detector", "configuration"],
)
def test_a_state_that_does_not_fit_is_refused(
    homes: Callable[[], Path], change: Callable[[Any], object], message: str
) -> None:
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={5: kit.term})
    rewritten(first, 5, change)
    with pytest.raises(StateMismatch, match=message):
        kit.live(ours, attempt=2)


def test_a_damaged_sampler_or_bandit_state_is_a_data_error(homes: Callable[[], Path]) -> None:
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={5: kit.term})
    rewritten(first, 5, lambda state: state["bandit"]["arms"]["code"].update(pulls=99))
    with pytest.raises(curriculum.StateError) as caught:
        kit.live(ours, attempt=2)
    assert loop.verdict(caught.value)[0] == contract.ExitCode.DATA
    rewritten(first, 5, lambda state: state["arms"]["code"]["sampler"].update(cursor=3))
    with pytest.raises(SamplerError) as failed:
        kit.live(ours, attempt=3)
    assert loop.verdict(failed.value)[0] == contract.ExitCode.DATA


def test_what_the_bits_depend_on_is_compared_and_a_difference_is_told(
    homes: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={5: kit.term})
    capsys.readouterr()
    rewritten(first, 5, lambda state: state["environment"].update(cpu_capability="ABACUS"))
    kit.live(ours, attempt=2)
    told = capsys.readouterr().err
    assert "exactness not claimed: cpu_capability: then 'ABACUS', now '" in told
    assert told.count("not claimed") == 1


def a_run_on(home: Path, trained_on: str) -> config.Settings:
    """A run of device "auto" whose newest checkpoint, 5, says that it was trained there."""
    ours = kit.settings_of(home, trainer={"device": "auto"})
    first = kit.live(ours, script={5: kit.term})
    rewritten(first, 5, lambda state: state["environment"].update(device=trained_on))
    return ours


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_run_begun_on_cuda_never_goes_on_elsewhere_and_is_tried_again_where_there_is_none(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A restart before the driver was up trained on the CPU; its checkpoints had no state of the
    CUDA generator, so that no later resume on the GPU could succeed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ours = a_run_on(homes(), "cuda:0")
    tree = ours.tree()
    tree["trainer"]["device"] = name
    ours = config.parse(tree, "test")
    told = r"checkpoint 5 was trained on cuda:0.*no CUDA"
    with pytest.raises(device.DeviceAway, match=told) as caught:
        kit.live(ours, attempt=2)
    assert loop.verdict(caught.value) == (contract.ExitCode.AGAIN, "again")
    assert kit.receipts_of(Path(ours.run.directory), 2) == []


@pytest.mark.parametrize(("trained_on", "now"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_a_device_of_another_type_is_refused_before_training_with_both(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, trained_on: str, now: str
) -> None:
    ours = a_run_on(homes(), trained_on)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if now == "cpu":
        tree = ours.tree()
        tree["trainer"]["device"] = "cpu"
        ours = config.parse(tree, "test")
    told = rf"checkpoint 5 was trained on {trained_on}.* means {now} now.*--set trainer\.device="
    with pytest.raises(device.DeviceError, match=told) as caught:
        kit.live(ours, attempt=2)
    assert loop.verdict(caught.value) == (contract.ExitCode.CONFIGURATION, "configuration")
    assert kit.receipts_of(Path(ours.run.directory), 2) == []


def test_a_run_that_always_was_on_the_cpu_may_be_told_to_stay_there(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = a_run_on(homes(), "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tree = ours.tree()
    tree["trainer"]["device"] = "cpu"
    assert kit.live(config.parse(tree, "test"), attempt=2).entries[0].step == 6


def test_a_checkpoint_that_does_not_say_where_it_was_trained_is_gone_on_from(
    homes: Callable[[], Path],
) -> None:
    ours = kit.settings_of(homes())
    first = kit.live(ours, script={5: kit.term})
    rewritten(first, 5, lambda state: state["environment"].clear())
    assert kit.live(ours, attempt=2).entries[0].step == 6


def test_an_unresolved_thread_count_is_refused(homes: Callable[[], Path]) -> None:
    unresolved = config.parse(kit.tree(homes(), trainer={"threads": "auto"}), "test")
    with pytest.raises(device.DeviceError, match=r"trainer\.threads is 'auto'"):
        recipe.prepare_device(unresolved)


def test_a_run_grown_from_another_carries_its_lineage(homes: Callable[[], Path]) -> None:
    ours = kit.settings_of(homes())
    kit.live(ours, script={5: kit.term})
    tree = ours.tree()
    tree["run"] |= {"id": "run-fork", "name": "fork"}
    fork = kit.live(config.parse(tree, "fork"), attempt=2, resume_step=5)
    assert manifest_of(fork, 12).run_id == "run-fork"
    assert manifest_of(fork, 12).lineage == (("run-tiny", 5),)


# --- audits change nothing ------------------------------------------------------------------------


def test_fc103_audits_and_evaluations_change_no_bit(homes: Callable[[], Path]) -> None:
    """Sampling during training used other modes and re-seeded the global generator
    (jsboige/CoursIA PR 12720, huggingface/diffusers #175)."""
    often = {"model": {"dropout": 0.1}, "samples": {"every": 1}}
    rarely = {"model": {"dropout": 0.1}, "samples": {"every": 1000}}
    one = kit.live(kit.settings_of(homes(), **often, evaluation={"every": 1}))
    other = kit.live(kit.settings_of(homes(), **rarely, evaluation={"every": 1000}))
    assert kit.audits_of(one) == list(range(1, 13))
    assert kit.audits_of(other) == [12]
    assert_same_run(one, other)
    assert one.loop.training.model.training


def test_the_same_prompt_and_step_give_the_same_text(homes: Callable[[], Path]) -> None:
    def samples(lived: kit.Lived) -> list[Any]:
        return [line.samples for line in lived.receipts if isinstance(line, AuditLine)]

    one = kit.live(kit.settings_of(homes()))
    other = kit.live(kit.settings_of(homes()))
    assert samples(one) == samples(other)
    assert [item["prompt"] for item in samples(one)[0]] == ["The ", "def f"]
    assert len({str(item) for item in samples(one)}) == 3


def test_an_audit_fits_in_its_line_however_long_its_texts_are(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a longer line nothing would be read, nor of the steps after it."""
    most = contract.RECEIPT_BYTES_MAX
    monkeypatch.setattr(loop, "continue_texts", lambda *_, **__: ["\0" * most, "\u2028" * most])
    lived = kit.live(kit.settings_of(homes(), samples={"prompts": ["The " * most, "def f"]}))
    audit = next(receipt for receipt in lived.receipts if isinstance(receipt, contract.AuditLine))
    assert [len(one["text"]) for one in audit.samples] == [most // 32] * 2
    assert audit.samples[1]["prompt"] == "def f"
    assert lived.entries[-1].step == 12


def test_an_audit_comes_before_the_checkpoint_of_its_step(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes()))
    losses = {line.step: line.loss for line in kit.evaluations_of(lived)}
    assert losses[4] > losses[8] > losses[12]
    for step in (4, 8, 12):
        assert manifest_of(lived, step).state["detectors"] == {
            "audited_step": step,
            "evaluated_step": step,
            "best_evaluation": {"step": step, "loss": losses[step]},
        }
    kinds = [type(receipt) for receipt in lived.receipts[:9]]
    assert kinds == [EnvironmentLine, LoadedLine, *[Entry] * 4, EvaluationLine, AuditLine, Entry]


@pytest.mark.fault(
    "SV-24", phase="saving", does="gives up a sample audit for a stop, between two tokens"
)
def test_an_audit_that_nobody_waits_for_is_given_up_and_done_after_the_resume(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kit.live(kit.settings_of(homes()))
    ours = kit.settings_of(homes())
    chosen = 0
    original = generate._choose

    def choose(*arguments: Any) -> int:
        nonlocal chosen
        chosen += 1
        if chosen == 8:  # an audit is two prompts of three tokens: this is in that of step 8
            kit.term()
        return original(*arguments)

    monkeypatch.setattr(generate, "_choose", choose)
    first = kit.live(ours)
    assert (first.why, first.loop.step, kit.audits_of(first)) == (loop.STOPPED, 8, [4])
    assert [line.step for line in kit.evaluations_of(first)] == [4, 8]
    assert manifest_of(first, 8).state["detectors"]["audited_step"] == 4
    second = kit.live(ours, attempt=2)
    assert kit.audits_of(second) == [8, 12]
    assert [line.step for line in kit.evaluations_of(second)] == [12]
    assert_same_run(whole, first, second)


@pytest.mark.fault("SV-24", phase="running", does="gives up an evaluation for a stop, and saves")
def test_an_evaluation_is_given_up_too(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = kit.settings_of(homes())
    original = loop.Loop._heldout_loss

    def heldout_loss(self: loop.Loop, heldout: corpus.Windows) -> Any:
        if self.step == 8:
            kit.term()
        return original(self, heldout)

    monkeypatch.setattr(loop.Loop, "_heldout_loss", heldout_loss)
    lived = kit.live(ours)
    assert (lived.why, lived.loop.step) == (loop.STOPPED, 8)
    assert [line.step for line in kit.evaluations_of(lived)] == [4]
    assert kit.audits_of(lived) == [4]
    assert manifest_of(lived, 8).state["detectors"]["evaluated_step"] == 4


def test_an_evaluation_is_the_mean_loss_of_what_was_held_out(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes()))
    *_, last = kit.evaluations_of(lived)
    training = lived.loop.training
    nats = targets = 0.0
    for name, arm in training.data.arms.items():
        windows = [arm.heldout.window(n) for n in range(min(4, arm.heldout.window_count))]
        inputs, wanted, count = corpus.collate(windows)
        with torch.no_grad():
            training.model.eval()
            loss, _ = training.model(inputs, wanted)
        assert last.arms[name]["targets"] == count
        assert last.arms[name]["loss"] == pytest.approx(loss.item() / count, rel=1e-6)
        assert last.arms[name]["byte_entropy"] == arm.heldout_byte_entropy
        nats, targets = nats + loss.item(), targets + count
    assert last.loss == pytest.approx(nats / targets, rel=1e-6)


def test_without_held_out_text_there_is_no_evaluation(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes(), evaluation={"fraction": 0.0}))
    assert kit.evaluations_of(lived) == []
    assert lived.why == loop.FINISHED


# --- text from the model --------------------------------------------------------------------------


def texts_of(lived: kit.Lived, prompts: list[str], **options: Any) -> list[str] | None:
    training = lived.loop.training
    fixed: dict[str, Any] = {"tokens": 6, "temperature": 1.0, "seeds": range(len(prompts))}
    return generate.continue_texts(
        training.model, training.data.tokenizer, prompts, **(fixed | options)
    )


def test_generation_draws_from_its_own_generators_only(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes(), training={"steps": 1}))
    before = torch.get_rng_state()
    one = texts_of(lived, ["The ", "def f"])
    assert one == texts_of(lived, ["The ", "def f"])
    assert one != texts_of(lived, ["The ", "def f"], seeds=[5, 6])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("training", [True, False])
def test_generation_puts_the_mode_back_also_after_a_failure(
    homes: Callable[[], Path], training: bool
) -> None:
    lived = kit.live(kit.settings_of(homes(), training={"steps": 1}))
    model = lived.loop.training.model.train(training)
    texts_of(lived, ["x"])
    assert model.training is training
    with pytest.raises(IndexError):
        texts_of(lived, ["x"], seeds=[])
    assert model.training is training


def test_temperature_zero_takes_the_likeliest_whatever_the_seed(
    homes: Callable[[], Path],
) -> None:
    lived = kit.live(kit.settings_of(homes(), training={"steps": 1}))
    greedy = texts_of(lived, ["The "], temperature=0)
    assert greedy == texts_of(lived, ["The "], temperature=0, seeds=[99])


def test_a_text_longer_than_the_window_goes_on(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes(), training={"steps": 1}))
    (text,) = texts_of(lived, ["a" * 40], tokens=1, temperature=0) or []
    model = lived.loop.training.model
    last = torch.tensor([[ord("a")] * model.shape.context])
    likeliest = model.logits(last)[0, -1].argmax().item()
    assert text == lived.loop.training.data.tokenizer.decode([int(likeliest)])
    assert texts_of(lived, ["a" * 40, "b"], tokens=30) is not None


def test_a_text_ends_at_the_separator_and_the_others_go_on(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lived = kit.live(kit.settings_of(homes(), training={"steps": 1}))
    calls = 0

    def choose(score: torch.Tensor, *_: Any) -> int:
        nonlocal calls
        calls += 1
        return 256 if calls == 3 else ord("a")

    monkeypatch.setattr(generate, "_choose", choose)
    assert texts_of(lived, ["x", "y"], tokens=4) == ["a", "aaaa"]


def test_generation_is_given_up_between_tokens(homes: Callable[[], Path]) -> None:
    lived = kit.live(kit.settings_of(homes(), training={"steps": 1}))
    answers = iter([False, False, True])
    assert texts_of(lived, ["x"], give_up=lambda: next(answers)) is None
    assert next(answers, None) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n\tb é", "a\n\tb é"), ("\x1b[2J", "\ufffd[2J"), ("a\rb\x07\x9b", "a\ufffdb\ufffd\ufffd")],
)
def test_text_for_a_terminal_cannot_steer_it(text: str, shown: str) -> None:
    assert generate.neutralised(text) == shown


# --- the rest -------------------------------------------------------------------------------------


def test_every_refusal_has_a_code_and_anything_else_is_a_crash() -> None:
    assert loop.verdict(config.ConfigError([])) == (78, "configuration")
    assert loop.verdict(curriculum.Infeasible("", "caps", 0.5)) == (78, "configuration")
    assert loop.verdict(corpus.DataError("x")) == (65, "data")
    assert loop.verdict(KeyError("x")) == (1, "error")
    assert loop.verdict(OSError(28, "full")) == (1, "error")


def test_progress_is_one_line_for_a_terminal_and_few_for_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = loop.Progress(40, wanted=True)
    for step in range(1, 41):
        progress.show(step, 2.5, "prose")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 4 of 40  loss 2.5000  prose"
    assert len(lines) == 10
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    live = loop.Progress(2, wanted=True)
    live.show(1, 2.5, "prose")
    live.show(2, 2.4, "prose")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.endswith("step 2 of 2  loss 2.4000  prose\n")
    loop.Progress(2, wanted=False).show(2, 2.4, "prose")
    assert capsys.readouterr().err == ""


def test_what_is_left_to_train_on_must_be_something(homes: Callable[[], Path]) -> None:
    home = homes()
    tiny = kit.tree(home)
    (home / "empty.txt").write_text("")
    tiny["policy"] = {"arms": [{"name": "void", "files": [str(home / "empty.txt")]}]}
    with pytest.raises(corpus.DataError, match="arm void"):
        data.load(config.resolve(config.parse(tiny, "test"), "run"))


def test_more_windows_than_a_checkpoint_can_list_are_refused_before_training(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest would be too long to be read back, each time, and the run without a way back."""
    ours = kit.settings_of(homes())
    loaded = data.load(ours)
    assert loaded is not None
    windows = sum(arm.window_count for arm in loaded.arms.values())
    monkeypatch.setattr(data, "WINDOWS_MAX", windows)
    data.load(ours)
    monkeypatch.setattr(data, "WINDOWS_MAX", windows - 1)
    with pytest.raises(DataError, match=f"the arms have {windows} windows, more than"):
        data.load(ours)


def test_a_vocabulary_that_the_tokenizer_does_not_have_is_refused(
    homes: Callable[[], Path],
) -> None:
    home = homes()
    (home / "segments.json").write_text('["the", "def"]')
    segments = {"kind": "segments", "file": str(home / "segments.json")}
    ours = kit.settings_of(home, tokenizer=segments, model={"vocabulary": 300})
    with pytest.raises(TokenizerError, match=r"model\.vocabulary is 300.* has 259 ids"):
        data.load(ours)
    fitting = kit.settings_of(home, tokenizer=segments)
    lived = kit.live(replace_steps(fitting, 2))
    assert lived.loop.training.model.shape.vocabulary == 259


def replace_steps(settings: config.Settings, steps: int) -> config.Settings:
    tree = settings.tree()
    tree["training"]["steps"] = steps
    return config.parse(tree, "test")


@pytest.mark.fault(
    "FC-75", phase="stopping", does="leaves no handler behind when the training is over"
)
def test_signals_of_before_are_back_after_a_life(homes: Callable[[], Path]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    kit.live(kit.settings_of(homes(), training={"steps": 1}))
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_manifest_replaced_is_not_the_one_published(homes: Callable[[], Path]) -> None:
    """A draft has no digests yet, so it cannot be taken for a published manifest."""
    lived = kit.live(kit.settings_of(homes(), training={"steps": 1}))
    draft = lived.loop.training.draft(lived.loop.life, "cadence", ())
    with pytest.raises(contract.ContractError, match="chunks"):
        contract.parse_manifest(draft.to_bytes(), "draft")
    assert replace(manifest_of(lived, 1), chunks=(), binary_digest="", state={}) == replace(
        draft, state={}
    )
