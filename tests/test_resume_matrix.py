"""Resumes from every kind of place: the same windows, the same bits, as if nothing had happened.

A life here is one trainer in this process. What it draws is recorded, window by window.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_kit as kit
from exactness_kit import assert_same_run

from supervisor import contract
from supervisor.contract import EvaluationLine, Manifest
from trainer import checkpoint, corpus, data, loop, recipe
from trainer.recipe import Evaluation
from trainer.sampler import Sampler

STEPS = 30


@pytest.fixture(autouse=True)
def _switches(run_home: Path) -> Iterator[None]:
    with kit.switches_restored():
        yield


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("home")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """(arm, windows) of every batch that any life draws from now on."""
    served: list[tuple[str, list[int]]] = []
    original = Sampler.draw

    def draw(self: Sampler) -> list[int]:
        numbers = original(self)
        served.append((self.arm, numbers))
        return numbers

    monkeypatch.setattr(Sampler, "draw", draw)
    return served


def taken(drawn: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """What was drawn since the last time; begins a new list."""
    found = list(drawn)
    drawn.clear()
    return found


def settings(homes: Callable[[], Path], **sections: Any) -> Any:
    base: dict[str, dict[str, Any]] = {
        "model": {"dropout": 0.1},
        "training": {"steps": STEPS},
        "checkpoint": {"every": 10},
        "policy": {"kind": "static"},
    }
    for name, table in sections.items():
        base[name] = base.get(name, {}) | table
    home = homes()
    if "policy" in base:
        arms = kit.tree(home)["policy"]["arms"]
        base["policy"] = {"arms": arms} | base["policy"]
    return kit.settings_of(home, **base)


def manifest_of(lived: kit.Lived, step: int) -> Manifest:
    return checkpoint.read_manifest(lived.loop.directory, step)


def lives(ours: Any, *stops: int) -> list[kit.Lived]:
    """One life for each stop, and one to the end."""
    return [
        kit.live(ours, attempt, script={step: kit.term} if step else {})
        for attempt, step in enumerate([*stops, 0], start=1)
    ]


# --- the matrix -----------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Sampler, bool], bool]] = {
    "the round has just begun": lambda sampler, began: began and sampler.rounds > 0,
    "one batch of the round is left": lambda sampler, began: (
        sampler._cursor < sampler.windows <= sampler._cursor + sampler.batch
    ),
    "exactly the end of the round": lambda sampler, began: sampler._cursor == sampler.windows,
}


def steps_at(monkeypatch: pytest.MonkeyPatch, ours: Any) -> tuple[kit.Lived, dict[str, int]]:
    """An uninterrupted life, and the first step after which an arm is at each of the places."""
    found: dict[str, int] = {}
    rounds: dict[str, int] = {}
    original = loop.Loop._update

    def update(self: loop.Loop) -> None:
        original(self)
        for name, sampler in self.training.samplers.items():
            began = sampler.rounds != rounds.get(name, 0)
            rounds[name] = sampler.rounds
            for place, fits in PLACES.items():
                if fits(sampler, began):
                    found.setdefault(place, self.step)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_update", update)
        whole = kit.live(ours)
    return whole, found


@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_fc50_identical_windows_and_bits_from_every_place_of_a_round(
    homes: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[tuple[str, list[int]]],
    accumulate: int,
) -> None:
    """The accumulation factor was left out, or applied twice, when batches were skipped
    (huggingface/transformers #5605, EleutherAI/gpt-neox PR 308, kohya-ss/sd-scripts PR 2425).
    Nothing is skipped here: the place in the data is part of the state."""
    sections = {"training": {"steps": STEPS, "accumulate": accumulate, "batch_windows": 5}}
    whole, places = steps_at(monkeypatch, settings(homes, **sections))
    uninterrupted = taken(drawn)
    assert len(uninterrupted) == STEPS * accumulate
    assert set(places) == set(PLACES)
    for stop in {*places.values(), 1, STEPS - 1, STEPS}:
        assert_same_run(whole, *lives(settings(homes, **sections), stop))
        assert taken(drawn) == uninterrupted


@pytest.mark.parametrize("accumulate", [1, 3])
def test_three_resumes_in_a_row_inside_one_round(
    homes: Callable[[], Path], drawn: list[tuple[str, list[int]]], accumulate: int
) -> None:
    sections = {"training": {"steps": STEPS, "accumulate": accumulate}}
    whole = kit.live(settings(homes, **sections))
    uninterrupted = taken(drawn)
    assert_same_run(whole, *lives(settings(homes, **sections), 11, 12, 13))
    assert taken(drawn) == uninterrupted


def test_fc45_every_boundary_is_a_state_to_resume_from(homes: Callable[[], Path]) -> None:
    """A checkpoint that was taken in a passing state of diagnosis could not be resumed
    (NVIDIA/Megatron-LM #3884). Here over a warm-up of the policy and of the rate, windows of the
    bandit and audits at every other step."""
    sections: dict[str, dict[str, Any]] = {
        "training": {"steps": 14, "schedule": "cosine", "warmup_steps": 3},
        "samples": {"every": 2},
        "evaluation": {"every": 3},
        "policy": {
            "kind": "ducb",
            "window_pulls": 3,
            "warmup_steps": 5,
            "warmup_arms": ["code"],
        },
    }
    whole = kit.live(settings(homes, **sections))
    assert {entry.arm for entry in whole.entries[:5]} == {"code"}
    for stop in range(1, 15):
        assert_same_run(whole, *lives(settings(homes, **sections), stop))
    assert_same_run(whole, *lives(settings(homes, **sections), *range(1, 14)))


def test_fc32_twenty_resumes_equal_none(homes: Callable[[], Path]) -> None:
    """Weights were saved in low precision and the masters rebuilt from them, a little further off
    with each resume (TensorAuto/OpenTau #185, karpathy/llm.c PR 702)."""
    sections = {"trainer": {"precision": "bfloat16"}, "training": {"steps": 22}}
    whole = kit.live(settings(homes, **sections))
    assert_same_run(whole, *lives(settings(homes, **sections), *range(1, 21)))


def test_fc39_the_learning_rate_of_each_step_does_not_know_of_resumes(
    homes: Callable[[], Path],
) -> None:
    """The schedule lagged by one after a resume, or warmed up again (Lightning-AI/pytorch-lightning
    #4655, vllm-project/speculators PR 900)."""
    sections = {"training": {"steps": 20, "schedule": "cosine", "warmup_steps": 6}}
    whole = kit.live(settings(homes, **sections))
    parts = lives(settings(homes, **sections), 1, 5, 6, 13)
    rates = [entry.learning_rate for part in parts for entry in part.entries]
    assert rates == [entry.learning_rate for entry in whole.entries]
    assert rates[:6] == sorted(set(rates[:6]))  # type: ignore[type-var]
    assert len(set(rates)) == 20


# --- which windows --------------------------------------------------------------------------------


def of_arm(served: list[tuple[str, list[int]]], arm: str) -> list[int]:
    return [number for name, numbers in served if name == arm for number in numbers]


def rounds_of(windows: list[int], size: int) -> list[list[int]]:
    return [windows[start : start + size] for start in range(0, len(windows) - size + 1, size)]


def test_fc52_each_window_once_a_round_in_the_rounds_after_a_resume(
    homes: Callable[[], Path], drawn: list[tuple[str, list[int]]]
) -> None:
    """The skip of a resume was applied again in every later epoch, or a tail was replayed
    (allenai/open-instruct PR 681, NVIDIA-NeMo/Megatron-Bridge PR 4601)."""
    sections = {"training": {"steps": 66, "accumulate": 1}}
    lives(settings(homes, **sections), 10)
    served = of_arm(drawn, "code")
    rounds = rounds_of(served, 24)
    assert len(rounds) >= 3
    assert [sorted(one) for one in rounds] == [list(range(24))] * len(rounds)
    assert len({tuple(one) for one in rounds}) == len(rounds), "each round has its own order"


def test_fc53_what_was_consumed_is_not_served_again_in_its_round(
    homes: Callable[[], Path], drawn: list[tuple[str, list[int]]]
) -> None:
    """The loader began again with the first shard: validation looked better, then collapsed
    (paiml/entrenar #294)."""
    ours = settings(homes)
    kit.live(ours, script={8: kit.term})
    before = {arm: set(of_arm(drawn, arm)) for arm in ("prose", "code")}
    drawn.clear()
    second = kit.live(ours, attempt=2)
    for arm, windows in before.items():
        left = second.loop.training.samplers[arm].windows - len(windows)
        after = of_arm(drawn, arm)[:left]
        assert windows
        assert windows.isdisjoint(after)
        assert len(windows | set(after)) == len(windows) + len(after)


def test_fc54_the_first_batch_after_a_resume_is_made_of_the_right_text(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor was restored, but the old shard stayed loaded (karpathy/llm.c commit 0bc24c3).
    An arm of many files: what is compared is the text of the batches, not their numbers."""
    seen: list[bytes] = []
    original = corpus.collate

    def collate(windows: Any) -> Any:
        seen.append(b"|".join(bytes(window.tobytes()) for window in windows))
        return original(windows)

    monkeypatch.setattr(corpus, "collate", collate)
    quiet = {"samples": {"every": 1000}, "evaluation": {"every": 1000}}
    kit.live(settings(homes, **quiet))
    whole, seen[:] = list(seen), []
    ours = settings(homes, **quiet)
    kit.live(ours, script={9: kit.term})
    first, seen[:] = list(seen), []
    kit.live(ours, attempt=2)
    assert len(first) == 9
    assert seen[0] == whole[9]
    assert first + seen == whole


def test_fc55_ten_restarts_never_draw_a_batch_again(
    homes: Callable[[], Path], drawn: list[tuple[str, list[int]]]
) -> None:
    """The same seed at each start: every restart drew the same batches (karpathy/nanoGPT #467)."""
    ours = settings(homes, training={"steps": 12})
    lives(ours, *range(1, 11))
    digests = [hashlib.sha256(repr(batch).encode()).hexdigest() for batch in drawn]
    assert len(digests) == 12
    assert len(set(digests)) == 12


def test_fc56_a_checkpoint_inside_a_round_knows_its_place_to_the_window(
    homes: Callable[[], Path], drawn: list[tuple[str, list[int]]]
) -> None:
    """A checkpoint from the middle of an epoch was resumed at the epoch's start
    (Lightning-AI/pytorch-lightning #1182, #18780)."""
    ours = settings(homes)
    first = kit.live(ours, script={7: kit.term})
    for arm in ("prose", "code"):
        saved = manifest_of(first, 7).state["arms"][arm]["sampler"]
        served = of_arm(drawn, arm)
        assert (saved["round"], saved["cursor"]) == (0, len(served))
        assert 0 < saved["cursor"] < saved["windows"]
        assert first.loop.training.samplers[arm].taken() == served


def test_fc65_a_new_round_begins_at_its_first_window(
    homes: Callable[[], Path], drawn: list[tuple[str, list[int]]]
) -> None:
    """A position of the sampler that was not zero leaked into a fresh iteration
    (NovaSky-AI/SkyRL PR 1842 review)."""
    ours = settings(homes, training={"steps": 40})
    parts = lives(ours, 9)
    sampler = parts[1].loop.training.samplers["code"]
    assert sampler.rounds >= 1
    served = of_arm(taken(drawn), "code")
    assert served[24 * sampler.rounds :] == sampler.taken()
    kit.live(settings(homes, training={"steps": 40}))
    assert of_arm(drawn, "code") == served, "a fresh run begins at the beginning"


def test_fc62_nothing_is_drawn_before_everything_is_restored(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer of the data was started before its state was restored
    (allenai/open-instruct PR 1523). However long a restore takes, the first draw comes after it."""
    ours = settings(homes)
    kit.live(ours, script={7: kit.term})
    happened: list[str] = []
    restore, draw, restore_rng = Sampler.restore, Sampler.draw, recipe.device.restore_rng  # type: ignore[attr-defined]

    def slow(self: Sampler, state: Any) -> None:
        happened.append(f"restore {self.arm} begins")
        for _ in range(50):  # whatever could run meanwhile has the chance to
            os.sched_yield()
        restore(self, state)
        happened.append(f"restore {self.arm} ends")

    def drew(self: Sampler) -> list[int]:
        happened.append("draw")
        return draw(self)

    def generators(*arguments: Any) -> None:
        restore_rng(*arguments)
        happened.append("generators restored")

    monkeypatch.setattr(Sampler, "restore", slow)
    monkeypatch.setattr(Sampler, "draw", drew)
    monkeypatch.setattr(recipe.device, "restore_rng", generators)  # type: ignore[attr-defined]
    kit.live(ours, attempt=2)
    assert happened[:6] == [
        "restore prose begins",
        "restore prose ends",
        "restore code begins",
        "restore code ends",
        "generators restored",
        "draw",
    ]


def test_fc60_random_streams_go_on_and_differ_from_arm_to_arm(homes: Callable[[], Path]) -> None:
    """Workers had the same seed at each start, or all of them the same one
    (fangchangma/sparse-to-dense.pytorch #19, pytorch/pytorch #5059)."""

    def masks(lived: kit.Lived) -> list[float]:
        return lived.drawn.tolist()

    whole = kit.live(settings(homes))
    first, second = lives(settings(homes), 11)
    assert masks(second) == masks(whole)
    assert masks(first) != masks(second)
    arms = [Sampler(name, 50, 4, seed=7) for name in ("prose", "code", "notes")]
    assert len({tuple(arm.draw()) for arm in arms}) == 3
    assert Sampler("prose", 50, 4, seed=8).draw() != Sampler("prose", 50, 4, seed=7).draw()


# --- what is saved --------------------------------------------------------------------------------


def test_fc14_a_checkpoint_is_of_its_boundary_whatever_happens_to_the_weights_then(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous save wrote live tensors, and the file mixed two steps
    (Lightning-AI/pytorch-lightning PR 21079, #20953)."""
    at_boundary: dict[int, str] = {}
    original = loop.Loop._save

    def save(self: loop.Loop, due: Any, *, must: bool) -> bool:
        flat = self.training.model.flat
        before = bytes(flat.image[contract.HEADER_BYTES :])
        saved = original(self, due, must=must)
        at_boundary[self.step] = hashlib.sha256(before).hexdigest()
        for buffer in (flat.weights, flat.first_moments, flat.second_moments):
            buffer.add_(1.0)  # an update could not do worse
        return saved

    monkeypatch.setattr(loop.Loop, "_save", save)
    lived = kit.live(settings(homes))
    assert sorted(at_boundary) == [10, 20, 30]
    for step, digest in at_boundary.items():
        raw = (lived.loop.directory / f"{contract.checkpoint_stem(step)}.bin").read_bytes()
        assert hashlib.sha256(raw[contract.HEADER_BYTES :]).hexdigest() == digest
        assert checkpoint.verify(lived.loop.directory, step).step == step


def test_fc25_ten_save_and_resume_cycles_keep_the_size(homes: Callable[[], Path]) -> None:
    """The checkpoint grew by 80% with every resume (facebookresearch/fairseq #51)."""
    parts = lives(settings(homes), *range(11, 21))
    directory = parts[-1].loop.directory
    sizes = {
        ending: [
            (directory / f"{contract.checkpoint_stem(step)}{ending}").stat().st_size
            for step in range(11, 21)
        ]
        for ending in (".bin", ".json")
    }
    assert len(set(sizes[".bin"])) == 1
    # The digits of a count may become more, and a loss may have fewer.
    assert max(sizes[".json"]) - min(sizes[".json"]) < 300
    assert manifest_of(parts[-1], 20).lineage == ()


MEASURE = """
import json, resource, sys
sys.path[:0] = {paths!r}
import trainer_kit as kit
from pathlib import Path
shape = dict(width=256, heads=4, layers=4, context=64)
ours = kit.settings_of(
    Path({home!r}), model=shape, training=dict(steps=2, batch_windows=1),
    samples=dict(every=1000), evaluation=dict(every=1000, fraction=0.2),
)
script = {{1: kit.term}} if {attempt} == 1 else {{}}
lived = kit.live(ours, attempt={attempt}, script=script)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps(dict(
    steps=[entry.step for entry in lived.entries],
    peak=int(status["VmHWM"].split()[0]) * 1024,
    rest=int(status["VmRSS"].split()[0]) * 1024,
    size=(lived.loop.directory / "step_000001.bin").stat().st_size,
)))
"""


def test_fc43_a_resume_takes_no_more_memory_than_a_start_and_a_checkpoint(run_home: Path) -> None:
    """Memory ran out only when resuming: the loaded dictionary stayed alive
    (karpathy/nanoGPT #158, PR 236). Peaks of two processes that make one step each."""

    def measured(attempt: int) -> dict[str, Any]:
        paths = [str(kit.ROOT), str(kit.ROOT / "tests")]
        code = MEASURE.format(paths=paths, home=str(run_home), attempt=attempt)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, timeout=60
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    fresh, resumed = measured(1), measured(2)
    assert (fresh["steps"], resumed["steps"]) == ([1], [2])
    size = fresh["size"]
    assert size > 30_000_000
    assert resumed["peak"] <= fresh["peak"] + size
    assert resumed["rest"] <= fresh["rest"] + size / 4


# --- looking at the model -------------------------------------------------------------------------


def evaluation_at(lived: kit.Lived, step: int) -> EvaluationLine:
    return next(line for line in kit.evaluations_of(lived) if line.step == step)


def test_fc100_an_evaluation_after_a_resume_covers_the_whole_set(homes: Callable[[], Path]) -> None:
    """The first validation after a resume from the middle of an epoch ran one batch
    (Lightning-AI/pytorch-lightning #19549)."""
    sections = {"evaluation": {"fraction": 0.3, "windows": 9, "every": 10}}
    whole = kit.live(settings(homes, **sections))
    _, second = lives(settings(homes, **sections), 7)
    counts = []
    for step in (10, 20, 30):
        ours, theirs = evaluation_at(second, step), evaluation_at(whole, step)
        assert (ours.loss, ours.arms) == (theirs.loss, theirs.arms)
        for name, arm in second.loop.training.data.arms.items():
            count = min(9, arm.heldout.window_count)
            targets = sum(arm.heldout.window_targets(number) for number in range(count))
            assert ours.arms[name]["targets"] == targets
            counts.append(count)
    assert max(counts) > 4, "more than one batch"


def test_evaluations_and_samples_change_no_bit_and_no_count(homes: Callable[[], Path]) -> None:
    often = {"evaluation": {"every": 1}, "samples": {"every": 1}}
    never = {"evaluation": {"every": 1000}, "samples": {"every": 1000}}
    looked = kit.live(settings(homes, **often))
    left_alone = kit.live(settings(homes, **never))
    assert len(kit.evaluations_of(looked)) == STEPS
    assert len(kit.evaluations_of(left_alone)) == 1
    assert_same_run(left_alone, looked)
    for step in (10, 20, 30):
        one, other = (manifest_of(lived, step).state for lived in (looked, left_alone))
        assert one["updates"] == other["updates"] == step
        for component in ("arms", "rng", "targets_seen"):
            assert one[component] == other[component]


def test_fc103_an_audit_leaves_modes_and_generators_as_they_were(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling during training was degenerate because mode or cache flags differed, or it seeded
    the global generator again (jsboige/CoursIA PR 12720, huggingface/diffusers #175)."""
    texts: list[Any] = []
    original = loop.Loop._sample

    def sample(self: loop.Loop) -> None:
        model = self.training.model
        before = torch.get_rng_state(), model.training, torch.is_grad_enabled()
        recorded: list[Any] = []
        monkeypatch.setattr(self.link, "record", recorded.append)
        original(self)
        original(self)
        monkeypatch.undo()
        monkeypatch.setattr(loop.Loop, "_sample", sample)
        texts.append([line.samples for line in recorded])
        after = torch.get_rng_state(), model.training, torch.is_grad_enabled()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:] == (True, True)
        assert not any(module.training is False for module in model.modules())

    monkeypatch.setattr(loop.Loop, "_sample", sample)
    kit.live(settings(homes))
    assert len(texts) == 3
    for once, again in texts:
        assert once == again
    assert texts[0][0] != texts[1][0]


def test_a_run_that_is_made_longer_is_the_run_that_always_was(homes: Callable[[], Path]) -> None:
    """The first target, off every cadence, was evaluated and sampled as a last step; the bandit,
    which learns from evaluations, does not know of that."""
    adaptive = {"policy": {"kind": "ducb", "window_pulls": 9}, "evaluation": {"every": 4}}
    long = {"training": {"steps": STEPS, "schedule_steps": STEPS}}
    short = {"training": {"steps": 10, "schedule_steps": STEPS}}
    whole = kit.live(settings(homes, **adaptive, **long), script={10: kit.usr1})
    home = homes()
    first = kit.live(settings(lambda: home, **adaptive, **short))
    assert [line.step for line in kit.evaluations_of(first)] == [4, 8, 10]
    second = kit.live(settings(lambda: home, **adaptive, **long), attempt=2)
    assert_same_run(whole, first, second)
    for step in (10, STEPS):
        one, other = manifest_of(whole, step).state, manifest_of(second, step).state
        for component in ("arms", "bandit", "rng", "targets_seen"):
            assert one[component] == other[component], component


class Scripted:
    """Held-out losses by step, in place of measured ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
        def heldout_loss(life: loop.Loop, heldout: corpus.Windows) -> tuple[float, int]:
            return losses[life.step], 1

        monkeypatch.setattr(loop.Loop, "_heldout_loss", heldout_loss)


def test_fc41_the_best_evaluation_survives_a_resume_and_a_worse_one_does_not_replace_it(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best value was not restored, so that the first result after a resume became the best
    (MIC-DKFZ/nnUNet PR 401, Lightning-AI/pytorch-lightning #18727, karpathy/nanochat commit
    2fd0440)."""
    Scripted(monkeypatch, {5: 3.0, 10: 2.0, 15: 2.5, 20: math.nan, 25: 2.0, 30: 1.5})
    ours = settings(homes, evaluation={"every": 5})
    first, second = lives(ours, 12)
    assert manifest_of(first, 12).state["detectors"]["best_evaluation"] == {"step": 10, "loss": 2.0}
    at_twenty = manifest_of(second, 20).state["detectors"]
    assert at_twenty["best_evaluation"] == {"step": 10, "loss": 2.0}
    assert at_twenty["evaluated_step"] == 20
    assert second.loop.training.best_evaluation == Evaluation(30, 1.5)


def test_without_an_evaluation_there_is_no_best(homes: Callable[[], Path]) -> None:
    ours = settings(homes, evaluation={"fraction": 0.0})
    first, second = lives(ours, 12)
    assert manifest_of(first, 12).state["detectors"]["best_evaluation"] is None
    assert second.loop.training.best_evaluation is None


# --- saving at steps that somebody names ----------------------------------------------------------


def test_steps_to_save_at_are_saved_beside_the_cadence_and_change_no_bit(
    homes: Callable[[], Path],
) -> None:
    """As `supervisor replay` asks for it, to compare a checkpoint off the cadence."""
    whole = kit.live(settings(homes))
    ours = settings(homes)
    with kit.CuedLink(kit.life_of(ours)) as link:
        trainer = loop.Loop(ours, link, save_at=[3, 10, 17, 99])
        assert trainer.run() == loop.FINISHED
    assert checkpoint.steps(trainer.directory) == [3, 10, 17, 20, 30]
    assert checkpoint.read_manifest(trainer.directory, 17).reason == "cadence"
    assert bytes(trainer.training.model.flat.image[8:]) == whole.image


# --- two ways to count ----------------------------------------------------------------------------


def test_the_lesson_counts_its_targets_both_ways_and_they_agree(run_home: Path) -> None:
    """The script prints both counts at the four checkpoints of the lesson's run."""
    script = kit.ROOT / "benchmarks" / "lesson_counts.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json"],
        env=os.environ | {"PYTHONPATH": str(kit.ROOT)},
        capture_output=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr.decode()
    rows = json.loads(done.stdout)["checkpoints"]
    assert [row["step"] for row in rows] == [20, 40, 60, 80]
    counts = [row["by_update"] for row in rows]
    assert counts == [row["by_window"] for row in rows] == [row["in_ledger"] for row in rows]
    assert counts == sorted(set(counts))


def test_two_ways_to_count_agree_at_every_checkpoint(homes: Callable[[], Path]) -> None:
    """targets_seen is the sum over updates, and the sum over all windows taken of their targets."""
    ours = settings(homes, training={"steps": STEPS, "accumulate": 2})
    parts = lives(ours, 11)
    loaded = data.load(ours)
    assert loaded is not None
    for step in checkpoint.steps(parts[1].loop.directory):
        state = manifest_of(parts[1], step).state
        total = 0
        for name, arm in loaded.arms.items():
            sampler = Sampler(name, arm.window_count, 4, 7)
            sampler.restore(state["arms"][name]["sampler"])
            whole = sum(arm.window_targets(number) for number in range(arm.window_count))
            assert whole == arm.token_count - arm.document_count
            total += sampler.rounds * whole + sum(map(arm.window_targets, sampler.taken()))
        assert total == state["targets_seen"]
