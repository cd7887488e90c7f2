"""Reduced precision and wrapped models: what is saved does not depend on either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trainer_kit as kit
from exactness_kit import assert_same_run

from supervisor.contract import CHECKPOINTS
from trainer import checkpoint, model


@pytest.fixture(autouse=True)
def _switches(run_home: Path) -> Iterator[None]:
    with kit.switches_restored():
        yield


def test_fc33_bfloat16_has_no_scaler_to_lose_and_resumes_exactly(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The state of a loss scaler was lost, altered by loading, or empty so that the first step
    crashed (huggingface/accelerate #4289, ultralytics PR 22189, facebookresearch/fairseq2 #1346).
    Here nothing is scaled: bfloat16 has the range of float32, and masters are float32. So the
    state has no scaler, and a run in bfloat16 that is resumed is the one that never stopped."""
    sections = {"trainer": {"precision": "bfloat16"}, "training": {"steps": 12}}

    def home() -> Path:
        return tmp_path_factory.mktemp("home")

    whole = kit.live(kit.settings_of(home(), **sections))
    assert whole.loop.training.model.flat.dtype is torch.float32
    assert not any("scale" in name for name in whole.loop.training.state())
    halves = kit.settings_of(home(), **sections)
    first = kit.live(halves, script={5: kit.term})
    assert_same_run(whole, first, kit.live(halves, attempt=2))


def test_fc42_names_do_not_change_when_the_model_is_wrapped(run_home: Path) -> None:
    """A compiled wrapper put its own prefix before every name, and the next resume could not find
    one of them (pytorch/torchtitan #961, karpathy/nanoGPT #325). Names come from the tensor table
    of the shape, not from the modules, so a checkpoint of a wrapped model loads into a bare one."""
    settings = kit.settings_of(run_home, training={"steps": 4})
    lived = kit.live(settings)
    bare = lived.loop.training.model

    class Wrapped(torch.nn.Module):
        def __init__(self, inner: model.Decoder) -> None:
            super().__init__()
            self._orig_mod = inner

    wrapped = Wrapped(bare)
    assert all(name.startswith("_orig_mod.") for name, _ in wrapped.named_parameters())
    directory = Path(settings.run.directory) / CHECKPOINTS
    manifest = checkpoint.read_manifest(directory, 4)
    assert manifest.tensors == model.tensor_table(bare.shape)
    other = model.build(bare.shape, torch.device("cpu"), seed=None)
    checkpoint.load(directory, manifest, other.flat)
    inner = wrapped._orig_mod
    assert torch.equal(other.flat.weights, inner.flat.weights)
