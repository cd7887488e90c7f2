"""Every component of a saved state, altered alone: it is refused by name, or it shows.

The tables below are the audit. A component that a later version adds to the state, and that no row
speaks of, fails the test that compares the tables with a real checkpoint.
"""

from __future__ import annotations

import base64
import copy
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import checkpoint_kit
import pytest
import torch
import trainer_kit as kit

from supervisor import changes, config, contract, curriculum
from supervisor.contract import AuditLine, EvaluationLine, Json, Manifest
from trainer import checkpoint, data, device, model, recipe
from trainer.checkpoint import CheckpointDamaged, StateMismatch
from trainer.device import GeneratorError
from trainer.sampler import Sampler, SamplerError

STEPS = 24
REFUSALS = (StateMismatch, CheckpointDamaged, SamplerError, GeneratorError, curriculum.StateError)

# Where a component is altered: in the middle of a round, off the cadence; at a boundary of the
# cadence, after its audit; where the next draw begins a round.
MIDDLE, CADENCE = 7, 8
ROUND_END = "round end"


@dataclass(frozen=True)
class Refused:
    """The resume is refused, and the refusal says this (a pattern)."""

    says: str


@dataclass(frozen=True)
class Shows:
    """The next step differs, in a receipt or in the weights or moments after it."""


@dataclass(frozen=True)
class Case:
    change: Callable[[Any], Any]
    expected: Refused | Shows
    at: int | str = MIDDLE


def add(amount: float) -> Callable[[Any], Any]:
    return lambda value: value + amount


def put(other: Any) -> Callable[[Any], Any]:
    return lambda value: other


def other_hexadecimal(value: str) -> str:
    return ("1" if value[0] == "0" else "0") + value[1:]


def swapped(permutation: str) -> str:
    """The window that comes next changes places with the last one."""
    words = bytearray(base64.b64decode(permutation))
    place = 4 * NEXT_WINDOW
    words[place : place + 4], words[-4:] = words[-4:], words[place : place + 4]
    return base64.b64encode(words).decode()


def another_generator(state: str) -> str:
    generator = torch.Generator().manual_seed(99)
    assert len(base64.b64decode(state)) == generator.get_state().numel()
    return base64.b64encode(bytes(generator.get_state().tolist())).decode()


NEXT_WINDOW = 16  # the arm `code` has served four batches of four at MIDDLE

CONTRADICTION = "its parts contradict each other"

# By component; `*` stands for each arm (the one altered is `code`, which is drawn from next). What
# is inside the bandit has no rows: each of its figures is altered by a rule, see below.
STATE: dict[str, Case] = {
    "policy_digest": Case(other_hexadecimal, Refused("policy_digest: saved")),
    "tokenizer.rule.kind": Case(put("segments"), Refused("tokenizer rule: saved")),
    "tokenizer.rule.special": Case(add(1), Refused("tokenizer rule: saved")),
    "tokenizer.rule.vocabulary": Case(add(1), Refused("tokenizer rule: saved")),
    "tokenizer.digest": Case(other_hexadecimal, Refused("tokenizer digest: saved")),
    "arms.*.corpus_digest": Case(other_hexadecimal, Refused("arm code: corpus digest: saved")),
    "arms.*.windows": Case(add(1), Refused("arm code: windows: saved 25, now 24")),
    "arms.*.sampler.permutation": Case(swapped, Shows()),
    "arms.*.sampler.cursor": Case(add(4), Refused("arm code: batches pulled and drawn: 4 and 5")),
    "arms.*.sampler.round": Case(add(1), Refused("arm code: batches pulled and drawn: 4 and 10")),
    "arms.*.sampler.generator": Case(another_generator, Shows(), ROUND_END),
    "arms.*.sampler.windows": Case(add(1), Refused("arm code: sampler state was saved with win")),
    "arms.*.sampler.batch": Case(add(1), Refused("arm code: sampler state was saved with batch")),
    "retired": Case(put({"old": {"0" * 64: {}}}), Refused("retired arm old: None windows")),
    "rng.torch_cpu": Case(another_generator, Shows()),
    "bandit": Case(lambda bandit: bandit | {"seed": 8}, Refused("bandit seed: 8, this run has")),
    "updates": Case(add(1), Refused("8 updates in a checkpoint of step 7")),
    "targets_seen": Case(add(1), Refused("targets served by the samplers and targets_seen")),
    "detectors.audited_step": Case(put(4), Shows(), CADENCE),
    "detectors.evaluated_step": Case(put(4), Refused("best_evaluation.step is 8"), CADENCE),
    "detectors.best_evaluation.step": Case(add(1), Refused("best_evaluation.step is 5")),
    "detectors.best_evaluation.loss": Case(put("nan"), Refused("best_evaluation.loss is 'nan'")),
}

# A second way to be wrong for what one alteration does not exhaust.
MORE_STATE: list[tuple[str, Case]] = [
    ("arms.*.sampler.permutation", Case(put("AAAA"), Refused("does not hold each of 24 windows"))),
    ("arms.*.sampler.cursor", Case(add(1), Refused("sampler cursor is 17"))),
    ("arms.*.sampler.generator", Case(put("AAAA"), Refused("arm code: sampler generator"))),
    ("rng.torch_cpu", Case(put("AAAA"), Refused(r"rng\.torch_cpu"))),
    ("detectors.audited_step", Case(put(8), Refused("audited_step is 8, expected a step from 0"))),
    ("detectors.evaluated_step", Case(put(True), Refused("evaluated_step is True"))),
    ("detectors.best_evaluation.loss", Case(put(-1.0), Refused("best_evaluation.loss is -1.0"))),
]

# The members of a manifest beside `state`. A text says why one is no part of the step.
MANIFEST: dict[str, str | Case] = {
    "run_id": "selection refuses a stranger's; a fork rightly begins with its parent's",
    "lineage": "it is the new run's to state, from its journal",
    "attempt": "it tells who saved",
    "step": Case(add(1), Refused("7 updates in a checkpoint of step 8")),
    "epoch": "the supervisor says under which policy a life trains",
    "reason": "it tells why it was saved",
    "requests": "it tells who asked",
    "parameters": Case(add(1), Refused("but .* parameters make")),
    "size_bytes": Case(add(4), Refused("size_bytes")),
    "chunks": Case(lambda c: (other_hexadecimal(c[0]), *c[1:]), Refused("digest")),
    "binary_digest": Case(other_hexadecimal, Refused("not the digest of the chunk list")),
    "tensors": Case(
        lambda tensors: (replace(tensors[0], name="embedding"), *tensors[1:]),
        Refused("unknown tensors"),
    ),
    "state": "all of the above",
}


# --- a saved state to alter -----------------------------------------------------------------------


class Home:
    """One run with checkpoints at all the places, and resumes from an altered copy of one."""

    def __init__(self, home: Path) -> None:
        self.settings = kit.settings_of(
            home,
            model={"dropout": 0.1},
            training={"steps": STEPS},
            samples={"every": 4},
            evaluation={"every": 4},
            policy={
                "kind": "ducb",
                "window_pulls": 2,
                "arms": [
                    {"name": "prose", "files": [str(home / "prose.jsonl")], "weight": 2.0},
                    {"name": "code", "files": [str(home / "code" / "*.txt")]},
                ],
            },
        )
        self.directory = Path(self.settings.run.directory) / contract.CHECKPOINTS
        self.saved = home / "saved"
        self.round_end = self._find_round_end()
        kit.live(self.settings, script={MIDDLE: kit.usr1, self.round_end: kit.usr1})
        shutil.copytree(self.directory, self.saved)
        self._unaltered: dict[int, kit.Lived] = {}

    def _find_round_end(self) -> int:
        """The first step after which `code` is drawn from and begins a round."""
        begun: list[tuple[str, int]] = []
        drawn: list[str] = []

        class Watched(Sampler):
            def draw(self) -> list[int]:
                if self._cursor == self.windows:
                    begun.append((self.arm, len(drawn)))
                drawn.append(self.arm)
                return super().draw()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recipe, "Sampler", Watched)
            kit.live(self.settings)
        shutil.rmtree(self.settings.run.directory)
        return next(steps for arm, steps in begun if arm == "code")

    def step_of(self, place: int | str) -> int:
        return self.round_end if isinstance(place, str) else place

    def manifest(self, step: int) -> Manifest:
        return checkpoint.read_manifest(self.saved, step)

    def resume(
        self,
        step: int,
        manifest: Manifest | None,
        binary: bytes | None = None,
        epoch: int = 1,
    ) -> kit.Lived:
        """One step more from the checkpoint of `step`, whose members may be altered."""
        shutil.rmtree(self.settings.run.directory)
        self.directory.mkdir(parents=True)
        stem = contract.checkpoint_stem(step)
        for ending in (".bin", ".json"):
            shutil.copy(self.saved / (stem + ending), self.directory)
        if manifest is not None:
            (self.directory / f"{stem}.json").write_bytes(manifest.to_bytes())
        if binary is not None:
            (self.directory / f"{stem}.bin").write_bytes(binary)
        script = {step + 1: kit.term}
        return kit.live(self.settings, attempt=2, script=script, resume_step=step, epoch=epoch)

    def unaltered(self, step: int) -> kit.Lived:
        if step not in self._unaltered:
            self._unaltered[step] = self.resume(step, None)
        return self._unaltered[step]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with kit.switches_restored():
        yield Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _switches(run_home: Path) -> Iterator[None]:
    with kit.switches_restored():
        yield


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key in value:
            yield from leaves(value[key], (*path, key))
    else:
        yield path, value


def component_of(path: tuple[str, ...]) -> str:
    """The row of the table: arms and phases by `*`."""
    names = list(path)
    if names[0] == "arms":
        names[1] = "*"
    return "bandit" if names[0] == "bandit" else ".".join(names)


def path_of(component: str) -> list[str]:
    """The place that is altered for a row of the table."""
    return ["code" if name == "*" else name for name in component.split(".")]


def altered(
    manifest: Manifest,
    path: Sequence[str],
    change: Callable[[Any], Any],
) -> Manifest:
    state = copy.deepcopy(manifest.state)
    *parents, name = path
    node: Any = state
    for key in parents:
        node = node[key]
    before = node[name]
    node[name] = change(before)
    assert node[name] != before, "the alteration alters nothing"
    return replace(manifest, state=state)


def next_step(lived: kit.Lived) -> list[Any]:
    """What one more step left in receipts and memory, less what a clock decided."""
    told: list[Any] = []
    for receipt in lived.receipts:
        match receipt:
            case contract.Entry():
                told.append([getattr(receipt, name) for name in contract.DETERMINISTIC_FIELDS])
            case EvaluationLine():
                told.append(("evaluation", receipt.step, receipt.loss))
            case AuditLine():
                told.append(("audit", receipt.step, [s["text"] for s in receipt.samples]))
    return [*told, lived.image]


def check(home: Home, step: int, manifest: Manifest, expected: object) -> None:
    match expected:
        case Refused(says):
            with pytest.raises(REFUSALS, match=says):
                home.resume(step, manifest)
            assert kit.steps_of(home.directory.parent, 2) == [], "a step was made"
        case Shows():
            assert next_step(home.resume(step, manifest)) != next_step(home.unaltered(step))


# --- the audit ------------------------------------------------------------------------------------


def test_the_comparison_finds_no_difference_where_there_is_none(home: Home) -> None:
    """Without this every row of the tables could pass by accident."""
    for step in (MIDDLE, CADENCE, home.round_end):
        again = home.resume(step, home.manifest(step))
        assert next_step(again) == next_step(home.unaltered(step))
        assert effect(home, step, home.manifest(step)) == "nothing"


def test_fc44_the_audit_speaks_of_every_component(home: Home) -> None:
    """A value that changes a step and that the checkpoint does not hold is lost at the next resume
    (huangzh13/StyleGAN.pytorch #10). What a checkpoint holds is audited, all of it."""
    state = home.manifest(MIDDLE).state
    assert set(state) == set(contract.STATE_COMPONENTS) | set(contract.STATE_LATER)
    found = {
        component_of(path)
        for path, _ in leaves(state)
        if path[0] not in ("configuration", "environment")
    }
    assert found - set(STATE) == set(), "a component that the audit does not know"
    assert set(STATE) - found == set(), "a component that no checkpoint has"
    assert set(MANIFEST) == {field.name for field in fields(Manifest)}


@pytest.mark.parametrize(
    ("component", "case"),
    [*STATE.items(), *MORE_STATE],
    ids=[component for component, _ in (*STATE.items(), *MORE_STATE)],
)
def test_fc44_a_component_altered_alone_is_refused_or_shows(
    home: Home, component: str, case: Case
) -> None:
    step = home.step_of(case.at)
    manifest = altered(home.manifest(step), path_of(component), case.change)
    check(home, step, manifest, case.expected)


def test_windows_that_were_not_served_are_not_passed_off_as_such(home: Home) -> None:
    """A window that was taken changes places with one of another length that was not."""
    manifest = home.manifest(MIDDLE)
    loaded = data.load(home.settings)
    assert loaded is not None
    state = manifest.state["arms"]["code"]["sampler"]
    order = [n for (n,) in struct.iter_unpack("<I", base64.b64decode(state["permutation"]))]
    lengths = [loaded.arms["code"].window_targets(number) for number in order]
    cursor = state["cursor"]
    later = next(k for k in range(cursor, len(order)) if lengths[k] != lengths[0])
    order[0], order[later] = order[later], order[0]
    forged = base64.b64encode(struct.pack(f"<{len(order)}I", *order)).decode()
    path = ["arms", "code", "sampler", "permutation"]
    says = Refused("targets served by the samplers and targets_seen: ")
    check(home, MIDDLE, altered(manifest, path, put(forged)), says)


@pytest.mark.parametrize("component", sorted(set(STATE) - set(contract.STATE_LATER)))
def test_a_component_that_is_missing_is_refused(home: Home, component: str) -> None:
    """A component that is not there is an error, never a warning."""
    state = copy.deepcopy(home.manifest(MIDDLE).state)
    *parents, name = path_of(component)
    node: Any = state
    for key in parents:
        node = node[key]
    del node[name]
    manifest = replace(home.manifest(MIDDLE), state=state)
    with pytest.raises(REFUSALS, match=name):
        home.resume(MIDDLE, manifest)


def test_a_component_that_an_earlier_version_did_not_know_may_be_missing(home: Home) -> None:
    for name in contract.STATE_LATER:
        state = {key: value for key, value in home.manifest(MIDDLE).state.items() if key != name}
        older = replace(home.manifest(MIDDLE), state=state)
        assert next_step(home.resume(MIDDLE, older)) == next_step(home.unaltered(MIDDLE))


# --- an arm that is away --------------------------------------------------------------------------

# What is kept of the arm `code` while another policy rules, by field.
AWAY: list[tuple[str, Case]] = [
    ("permutation", Case(swapped, Shows())),
    ("permutation", Case(put("AAAA"), Refused("does not hold each of 24 windows"))),
    ("cursor", Case(add(4), Refused(CONTRADICTION))),
    ("cursor", Case(add(-4), Shows())),
    ("cursor", Case(add(1), Refused("sampler cursor is 17"))),
    ("round", Case(add(9), Refused(CONTRADICTION))),
    ("generator", Case(put("AAAA"), Refused("arm code: sampler generator"))),
    ("windows", Case(put(0), Refused("arm code: sampler state was saved with windows 0"))),
    ("windows", Case(add(1), Refused("arm code: sampler state was saved with windows 25"))),
    ("batch", Case(add(1), Refused("arm code: sampler state was saved with batch 5"))),
]


@dataclass(frozen=True)
class Away:
    """A checkpoint one step after a pivot without `code`, and lives that take it back."""

    home: Home
    manifest: Manifest
    saved: Path

    @property
    def digest(self) -> str:
        return str(*self.manifest.state["retired"]["code"])

    def back(self, manifest: Manifest) -> kit.Lived:
        return self._live(manifest, self.home.settings, epoch=3)

    def stays_away(self, manifest: Manifest) -> kit.Lived:
        return self._live(manifest, without_code(self.home.settings), epoch=2)

    def _live(self, manifest: Manifest, settings: config.Settings, epoch: int) -> kit.Lived:
        shutil.rmtree(settings.run.directory)
        shutil.copytree(self.saved, self.home.directory)
        name = f"{contract.checkpoint_stem(manifest.step)}.json"
        (self.home.directory / name).write_bytes(manifest.to_bytes())
        resume = {"resume_step": manifest.step, "epoch": epoch}
        return kit.live(settings, attempt=3, script={manifest.step + 3: kit.term}, **resume)


def without_code(settings: config.Settings) -> config.Settings:
    tree = settings.tree()
    tree["policy"]["arms"] = tree["policy"]["arms"][:1]
    return config.parse(tree, "test")


@pytest.fixture(scope="module")
def away(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Away:
    shutil.rmtree(home.settings.run.directory)
    home.directory.mkdir(parents=True)
    for path in home.saved.glob(f"{contract.checkpoint_stem(MIDDLE)}.*"):
        shutil.copy(path, home.directory)
    pivot = {"resume_step": MIDDLE, "epoch": 2}
    kit.live(without_code(home.settings), attempt=2, script={MIDDLE + 2: kit.term}, **pivot)
    saved = tmp_path_factory.mktemp("away") / "checkpoints"
    shutil.copytree(home.directory, saved)
    return Away(home, checkpoint.read_manifest(saved, MIDDLE + 2), saved)


def test_all_that_is_kept_of_an_arm_that_is_away_is_audited(away: Away) -> None:
    kept = away.manifest.state["retired"]["code"][away.digest]
    assert set(kept) == {field for field, _ in AWAY}
    assert kept == away.home.manifest(MIDDLE).state["arms"]["code"]["sampler"]


@pytest.mark.parametrize(("field", "case"), AWAY, ids=[field for field, _ in AWAY])
def test_what_is_kept_of_an_arm_that_is_away_is_refused_or_shows(
    away: Away, field: str, case: Case
) -> None:
    manifest = altered(away.manifest, ["retired", "code", away.digest, field], case.change)
    if isinstance(case.expected, Refused):
        with pytest.raises(REFUSALS, match=case.expected.says):
            away.back(manifest)
    else:
        assert next_step(away.back(manifest)) != next_step(away.back(away.manifest))


def test_what_is_kept_of_an_arm_that_never_was_is_refused(away: Away) -> None:
    kept = away.manifest.state["retired"]["code"][away.digest]
    for name, digest in (("code", "0" * 64), ("songs", away.digest)):
        state = away.manifest.state | {"retired": {name: {digest: kept}}}
        with pytest.raises(StateMismatch, match=f"retired arm {name} with text {digest}"):
            away.stays_away(replace(away.manifest, state=state))
    for damaged, says in (("x", "expected samplers by text"), ({away.digest: "x"}, "None windows")):
        state = away.manifest.state | {"retired": {"code": damaged}}
        with pytest.raises(StateMismatch, match=says):
            away.stays_away(replace(away.manifest, state=state))
    assert away.stays_away(away.manifest).loop.step == away.manifest.step + 3


def others(value: Any) -> list[Any]:
    """Other values of the kind; of a value that is not known yet, some of each kind."""
    match value:
        case None:
            return [1, 0.25, "1" * 64, "code"]
        case bool():
            return [not value]
        case int():
            return [value + 1]
        case float():
            return [value + 0.5, value / 2 if value else 0.25]
        case str():
            return ["static" if value in curriculum.KINDS else "prose", other_hexadecimal(value)]
        case list():
            return [[0.5, *value], [{"name": "old", "fingerprint": None, "pulls": 1, "targets": 2}]]
    raise AssertionError(f"the audit does not know another value for {value!r}")


def figures(home: Home) -> list[tuple[str, ...]]:
    return [path for path, _ in leaves({"bandit": home.manifest(MIDDLE).state["bandit"]})]


def effect(home: Home, step: int, manifest: Manifest) -> str:
    """What an altered figure of the bandit comes to: refused, shown by the next step, carried on in
    the state (it decides when a window closes or a run ends, or is for people), or nothing."""
    try:
        lived = home.resume(step, manifest)
    except REFUSALS:
        return "refused"
    if next_step(lived) != next_step(home.unaltered(step)):
        return "shows"
    states = (one.loop.training.curriculum for one in (lived, home.unaltered(step)))
    saved, usual = map(curriculum.to_json, states)
    return "carried" if saved != usual else "nothing"


def test_fc44_every_figure_of_the_bandit_is_refused_or_has_an_effect(home: Home) -> None:
    """The state of a mixture that was missing from the checkpoint, or half of it (eth-easl/mixtera
    PR 183, foundation-model-stack/fms-acceleration PR 155)."""
    effects: dict[str, set[str]] = {}
    for path in figures(home):
        effects[".".join(path)] = set()
        for step in (MIDDLE, CADENCE):
            manifest = home.manifest(step)
            value = dict(leaves({"bandit": manifest.state["bandit"]}))[path]
            for other in others(value):
                found = effect(home, step, altered(manifest, path, put(other)))
                effects[".".join(path)].add(found)
    without = [name for name, found in effects.items() if found == {"nothing"}]
    assert without == []
    assert len(effects) > 40
    assert set.union(*effects.values()) >= {"refused", "carried"}


@pytest.mark.parametrize("region", ["weights", "m", "v"])
def test_one_altered_number_of_a_region_shows(home: Home, region: str) -> None:
    """Sealed again with fitting digests; unsealed, it is refused."""
    manifest = home.manifest(MIDDLE)
    content = bytearray((home.saved / "step_000007.bin").read_bytes())
    place = 8 + 4 * (manifest.parameters * ("weights", "m", "v").index(region) + 4113)
    struct.pack_into("<f", content, place, 0.125)
    chunks = checkpoint_kit.chunk_digests(bytes(content))
    sealed = replace(manifest, chunks=chunks, binary_digest=contract.chunks_digest(chunks))
    shown = home.resume(MIDDLE, sealed, bytes(content))
    assert next_step(shown) != next_step(home.unaltered(MIDDLE))
    with pytest.raises(CheckpointDamaged, match="its manifest says"):
        home.resume(MIDDLE, manifest, bytes(content))


@pytest.mark.parametrize("name", sorted(name for name, case in MANIFEST.items() if case))
def test_a_member_of_the_manifest_is_refused_or_no_part_of_a_step(home: Home, name: str) -> None:
    case, manifest = MANIFEST[name], home.manifest(MIDDLE)
    if isinstance(case, Case):
        value = case.change(getattr(manifest, name))
        check(home, MIDDLE, replace(manifest, **{name: value}), case.expected)
        return
    others: Json = {
        "run_id": "run-parent",
        "lineage": (("run-older", 3),),
        "attempt": 9,
        "epoch": 2,
        "reason": "operator",
        "requests": ("r-1",),
        "state": manifest.state,
    }
    lived = home.resume(MIDDLE, replace(manifest, **{name: others[name]}))
    assert next_step(lived) == next_step(home.unaltered(MIDDLE))


# --- configuration and environment ----------------------------------------------------------------

# For keys whose value says too little about another value of the kind.
OTHER_SETTINGS: Json = {
    "tokenizer.kind": "segments",
    "tokenizer.file": "/tmp/other.json",
    "trainer.device": "cuda:0",
    "trainer.precision": "bfloat16",
    "trainer.command": ["./train"],
    "model.preset": "andrea-12m",
    "alarms.webhook": "https://example.org/other",
    "alarms.webhook_file": None,  # there is one of the two, or none
    "checkpoint.when_full": "stop",
    "model.vocabulary": 256,
    "model.width": 32,
    "training.schedule": "cosine",
    "samples.prompts": ["Else "],
    "policy.kind": "static",
    "policy.bounds": "weight",
    "policy.warmup_arms": ["prose"],
    "policy.confidence": 0.5,
    "policy.run_steps_minimum": 2,
    "policy.run_steps_maximum": 9,
    "policy.maximum_epochs": 2.0,
    "policy.arms.prose.builtin": "python-docs",
    "policy.arms.code.builtin": "python-docs",
}


def other_value(key: str, value: Any) -> Any:
    if key in OTHER_SETTINGS:
        return OTHER_SETTINGS[key]
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 + 0.01
        case list():
            return [*value, "other"] if value else ["other"]
        case str():
            return f"{value}-other"
    raise AssertionError(f"the audit does not know another value for {key} = {value!r}")


def with_setting(tree: Json, key: str, value: Any) -> Json:
    """The configuration with one key of `changes._flatten` altered."""
    tree = copy.deepcopy(tree)
    section, *names = key.split(".")
    node = tree[section]
    if names[0] == "arms" and len(names) > 1:
        node = next(arm for arm in node["arms"] if arm["name"] == names[1])
        names = names[2:]
    elif names == ["arms"]:
        node["arms"] = [arm for arm in node["arms"] if arm["name"] in value[:1]]
        return tree
    node[names[0]] = value
    return tree


def test_every_setting_that_is_part_of_a_step_is_refused_by_name(home: Home) -> None:
    """Each key that only another run or a pivot may change, altered in the checkpoint alone."""
    manifest = home.manifest(MIDDLE)
    settings = home.settings
    loaded = data.load(settings)
    assert loaded is not None
    refused = []
    for key, value in changes._flatten(settings).items():
        if changes.class_of(key) == changes.OPERATIONAL or key.startswith("run."):
            continue
        tree = with_setting(manifest.state["configuration"], key, other_value(key, value))
        forged = replace(manifest, state=manifest.state | {"configuration": tree})
        with pytest.raises(StateMismatch) as caught:
            recipe.check_fits(forged, settings, loaded)
        named = key.replace("policy.arms.", "").split(".")[-1]
        assert named in str(caught.value), f"{key}: {caught.value}"
        refused.append(key)
    assert {"training.seed", "training.batch_windows", "model.context"} <= set(refused)
    assert {"training.accumulate", "trainer.threads", "trainer.processes"} <= set(refused)
    assert len(refused) > 40


def test_settings_that_are_no_part_of_a_step_change_no_bit(home: Home) -> None:
    manifest = home.manifest(MIDDLE)
    tree = manifest.state["configuration"]
    for key, value in changes._flatten(home.settings).items():
        if changes.class_of(key) == changes.OPERATIONAL and key != "training.steps":
            tree = with_setting(tree, key, other_value(key, value))
    assert tree != manifest.state["configuration"]
    forged = replace(manifest, state=manifest.state | {"configuration": tree})
    assert next_step(home.resume(MIDDLE, forged)) == next_step(home.unaltered(MIDDLE))


def test_every_part_of_the_environment_is_told_when_it_differs(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine is no part of the state: another one is allowed and never hidden. Only its type of
    device is (see test_loop)."""
    manifest = home.manifest(MIDDLE)
    recorded = manifest.state["environment"]
    environment = {key: "another" for key in recorded if key != "device"}
    forged = replace(manifest, state=manifest.state | {"environment": recorded | environment})
    capsys.readouterr()
    lived = home.resume(MIDDLE, forged)
    told = capsys.readouterr().err
    for key in environment:
        assert f"exactness not claimed: {key}: then 'another', now " in told
    assert next_step(lived) == next_step(home.unaltered(MIDDLE))


def test_from_a_second_epoch_on_counts_are_bounds(home: Home) -> None:
    """A pivot begins the bandit afresh and may leave an arm behind: fewer pulls than draws are
    right then, more never are."""
    for change, allowed in ((add(1), True), (add(-1), False)):
        manifest = altered(home.manifest(MIDDLE), ["targets_seen"], change)
        with pytest.raises(StateMismatch, match=CONTRADICTION):
            home.resume(MIDDLE, manifest)
        later = replace(manifest, epoch=2)
        if allowed:
            assert home.resume(MIDDLE, later, epoch=2).entries[0].step == MIDDLE + 1
        else:
            with pytest.raises(StateMismatch, match=CONTRADICTION):
                home.resume(MIDDLE, later, epoch=2)


def test_fc58_another_number_of_processes_is_refused(home: Home) -> None:
    """With fewer workers than before some cursors were dropped without a word
    (pytorch/torchtitan PR 816)."""
    home.resume(MIDDLE, None)
    tree = home.settings.tree()
    tree["trainer"]["processes"] = 2
    two = config.parse(tree, "test")
    with pytest.raises(StateMismatch, match=r"trainer\.processes: recorded 1, requested 2"):
        kit.live(two, attempt=3, resume_step=MIDDLE)


def test_fc61_another_batch_size_is_refused_before_any_state_is_touched(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of the sampler that was saved with another batch size (bghira/SimpleTuner PR 3093):
    no model is built and no generator restored before it is refused."""
    home.resume(MIDDLE, None)
    tree = home.settings.tree()
    tree["training"]["batch_windows"] = 5
    other = config.parse(tree, "test")
    touched: list[str] = []
    monkeypatch.setattr(model, "build", lambda *a, **k: touched.append("model"))
    monkeypatch.setattr(device, "restore_rng", lambda *a: touched.append("rng"))
    with pytest.raises(StateMismatch, match=r"training\.batch_windows: recorded 4, requested 5"):
        kit.live(other, attempt=3, resume_step=MIDDLE)
    assert touched == []
