"""The update: AdamW against a table and against torch, clipping, the schedule, what stops it."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, strategies as st
from property_kit import cases
from torch.func import functional_call

from supervisor import contract
from trainer.device import autocast
from trainer.flat import Flat
from trainer.model import Decoder, Shape, build
from trainer.optimizer import AdamW, GradientNorms, NonFinite, learning_rate

CPU = torch.device("cpu")
TINY = Shape(vocabulary=11, width=8, heads=2, layers=2, context=6)
QUICKSTART = Shape(vocabulary=257, width=128, heads=4, layers=5, context=128)

Batch = tuple[torch.Tensor, torch.Tensor]
Update = Callable[[Decoder, AdamW, Batch], GradientNorms]

RATE, DECAY, CLIP = 0.003, 0.01, 0.5


def batches(shape: Shape, count: int, rows: int = 2, length: int = 32) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(
        shape.vocabulary, (count, rows, min(length, shape.context)), generator=generator
    )
    return [(part, part.roll(-1, 1)) for part in tokens]


def one_update(model: Decoder, optimizer: AdamW, batch: Batch) -> GradientNorms:
    """The order of an update: forget the old gradient, forward, backward, clip and step."""
    model.flat.zero_gradients()
    loss, count = model(*batch)
    mean = loss / count
    mean.backward()
    return optimizer.update(
        learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, loss=mean.item()
    )


def scalar(value: float, m: float = 0.0, v: float = 0.0) -> Flat:
    """One parameter in float64, for numbers worked out by hand."""
    flat = Flat([contract.Tensor("theta", (1,), "one", 0)], CPU, torch.float64)
    for buffer, number in zip(flat.host_regions(), (value, m, v), strict=True):
        buffer.fill_(number)
    return flat


def scalar_update(optimizer: AdamW, gradient: float) -> None:
    optimizer.flat.gradients.fill_(gradient)
    optimizer.update(learning_rate=0.1, weight_decay=0.01, clip_norm=1.0, loss=0.0)


def bits(flat: Flat) -> tuple[bytes, ...]:
    return tuple(bytes(region.view(torch.uint8).tolist()) for region in flat.host_regions())


# --- AdamW by the table ---------------------------------------------------------------------------

GRADIENTS = (0.5, -0.25, 0.1)
TABLE = (
    (1.8980000020, 0.05, 0.00025),
    (1.8694682987, 0.02, 0.00031225),
    (1.8360744747, 0.028, 0.00032193775),
)


def test_adamw_gives_the_table() -> None:
    optimizer = AdamW(scalar(2.0))
    for gradient, (theta, m, v) in zip(GRADIENTS, TABLE, strict=True):
        scalar_update(optimizer, gradient)
        assert optimizer.flat.weights.item() == pytest.approx(theta, abs=5.1e-11)
        assert optimizer.flat.first_moments.item() == pytest.approx(m, abs=1e-15)
        assert optimizer.flat.second_moments.item() == pytest.approx(v, abs=1e-15)
    assert optimizer.updates == 3


def after_two() -> AdamW:
    optimizer = AdamW(scalar(2.0))
    for gradient in GRADIENTS[:2]:
        scalar_update(optimizer, gradient)
    return optimizer


def test_continued_with_the_whole_state_the_third_step_is_equal_to_the_last_bit() -> None:
    continuous = after_two()
    saved = json.loads(
        json.dumps([*(region.item() for region in continuous.flat.host_regions()), 2])
    )
    scalar_update(continuous, GRADIENTS[2])
    resumed = AdamW(scalar(*saved[:3]), updates=saved[3])
    scalar_update(resumed, GRADIENTS[2])
    assert bits(resumed.flat) == bits(continuous.flat)


def test_continued_with_the_weight_alone_the_third_step_is_off_by_0_068() -> None:
    continuous = after_two()
    weight = continuous.flat.weights.item()
    scalar_update(continuous, GRADIENTS[2])
    alone = AdamW(scalar(weight))
    scalar_update(alone, GRADIENTS[2])
    assert alone.flat.weights.item() == pytest.approx(1.7675988404, abs=5.1e-11)
    difference = continuous.flat.weights.item() - alone.flat.weights.item()
    assert difference == pytest.approx(0.068, abs=0.0005)


@pytest.mark.parametrize("part", ["first_moments", "second_moments", "updates"])
def test_each_part_of_the_state_changes_the_third_step(part: str) -> None:
    continuous, damaged = after_two(), after_two()
    if part == "updates":
        damaged.updates = 0
    else:
        getattr(damaged.flat, part).zero_()
    scalar_update(continuous, GRADIENTS[2])
    scalar_update(damaged, GRADIENTS[2])
    difference = continuous.flat.weights.item() - damaged.flat.weights.item()
    assert abs(difference) > 1e-3


def test_the_table_tells_decoupled_decay_from_decay_in_the_gradient() -> None:
    optimizer = AdamW(scalar(2.0))
    expected = (1.9000000019, 1.8689922487, 1.8324731354)
    for gradient, theta, (decoupled, _, _) in zip(GRADIENTS, expected, TABLE, strict=True):
        optimizer.flat.gradients.fill_(gradient + 0.01 * optimizer.flat.weights.item())
        optimizer.update(learning_rate=0.1, weight_decay=0.0, clip_norm=1.0, loss=0.0)
        assert optimizer.flat.weights.item() == pytest.approx(theta, abs=5.1e-11)
        assert abs(optimizer.flat.weights.item() - decoupled) > 4e-4


def test_decay_applies_to_every_parameter() -> None:
    model = build(TINY, CPU, seed=1)
    before = model.flat.weights.clone()
    optimizer = AdamW(model.flat)
    optimizer.update(learning_rate=0.5, weight_decay=0.5, clip_norm=1.0, loss=0.0)
    torch.testing.assert_close(model.flat.weights, before * 0.75)


def test_the_count_is_of_updates_and_not_of_forward_passes() -> None:
    model = build(TINY, CPU, seed=1)
    optimizer = AdamW(model.flat)
    batch = batches(TINY, 1)[0]
    one_update(model, optimizer, batch)
    before = bits(model.flat)
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            model(*batch)
    assert optimizer.updates == 1
    assert bits(model.flat) == before


def test_the_count_stays_exact_above_two_to_the_24() -> None:
    optimizer = AdamW(scalar(2.0), updates=2**24)
    for _ in range(3):
        scalar_update(optimizer, 0.5)
    assert optimizer.updates == 2**24 + 3


# --- against torch --------------------------------------------------------------------------------


class Reference:
    """The usual loop over separate parameters: torch.optim.AdamW, clip_grad_norm_, zero_grad."""

    def __init__(
        self, model: Decoder, *, fused: bool | None = None, foreach: bool | None = None
    ) -> None:
        self.model = model
        self.leaves = {
            tensor.name: torch.nn.Parameter(
                model.flat.view(model.flat.weights, tensor.name).detach().clone()
            )
            for tensor in model.flat.tensors
        }
        self.optimizer = torch.optim.AdamW(
            self.leaves.values(), lr=RATE, weight_decay=DECAY, fused=fused, foreach=foreach
        )

    def update(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss, count = functional_call(self.model, dict(self._parameters()), batch)
        (loss / count).backward()
        return self.step()

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.leaves.values(), CLIP)
        self.optimizer.step()
        return norm.item()

    def regions(self) -> tuple[torch.Tensor, ...]:
        def joined(values: Iterator[torch.Tensor]) -> torch.Tensor:
            return torch.cat([value.detach().flatten() for value in values])

        states = [self.optimizer.state[leaf] for leaf in self.leaves.values()]
        return (
            joined(iter(self.leaves.values())),
            joined(state["exp_avg"] for state in states),
            joined(state["exp_avg_sq"] for state in states),
        )

    def take_over(self, flat: Flat, updates: int) -> None:
        """Continue from the state of `flat`, its gradients included."""
        for name, leaf in self.leaves.items():
            leaf.data.copy_(flat.view(flat.weights, name))
            leaf.grad = flat.view(flat.gradients, name).clone()
            self.optimizer.state[leaf] = {
                "step": torch.tensor(float(updates)),
                "exp_avg": flat.view(flat.first_moments, name).clone(),
                "exp_avg_sq": flat.view(flat.second_moments, name).clone(),
            }

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("token_embedding", "position_embedding", "output_head"):
            yield name, self.leaves[name]
        for layer in range(self.model.shape.layers):
            name = f"layers.{layer}"
            parts = (self.leaves[f"{name}.attention.{part}"] for part in ("query", "key", "value"))
            yield f"{name}.query_key_value", torch.cat(tuple(parts))
            yield f"{name}.output", self.leaves[f"{name}.attention.output"]
            yield f"{name}.up", self.leaves[f"{name}.mlp.up"]
            yield f"{name}.down", self.leaves[f"{name}.mlp.down"]


def same_bits(flat: Flat, reference: Reference) -> bool:
    pairs = zip(flat.host_regions(), reference.regions(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """The distance from each magnitude to the next larger float32."""
    magnitude = values.abs()
    return torch.nextafter(magnitude, torch.tensor(math.inf)) - magnitude


def test_equal_bits_with_torch_fused_adamw_and_clip_grad_norm() -> None:
    model = build(QUICKSTART, CPU, seed=1)
    optimizer = AdamW(model.flat)
    reference = Reference(model, fused=True)
    clipped = 0
    for batch in batches(QUICKSTART, 6):
        norms = one_update(model, optimizer, batch)
        assert norms.total == reference.update(batch)
        assert same_bits(model.flat, reference)
        clipped += norms.total > CLIP
    assert clipped == 6, "the comparison must exercise the clip"


@pytest.mark.parametrize("foreach", [False, True])
def test_one_rounding_from_torch_single_and_foreach_adamw(foreach: bool) -> None:
    """Update by update from the same state and gradient, because differences accumulate.

    The moments are equal. The kernels multiply and divide in another order, so the change of a
    weight may be a few of its own units apart, and the sum rounds once more: one unit of the
    weight, except where weight and change cancel.
    """
    model = build(QUICKSTART, CPU, seed=1)
    optimizer = AdamW(model.flat)
    reference = Reference(model, foreach=foreach)
    for batch in batches(QUICKSTART, 4):
        model.flat.zero_gradients()
        loss, count = model(*batch)
        (loss / count).backward()
        reference.take_over(model.flat, optimizer.updates)
        before = model.flat.weights.clone()
        optimizer.update(learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, loss=0.0)
        reference.step()
        weights, *moments = zip(model.flat.host_regions(), reference.regions(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in moments)
        ours, theirs = weights
        largest = torch.maximum(ours.abs(), before.abs())
        assert ((ours - theirs).abs() <= ulp(largest) + 4 * ulp(ours - before)).all()


class ClipsEachTensor(AdamW):
    """A mutant: every tensor is clipped on its own."""

    def update(
        self, *, learning_rate: float, weight_decay: float, clip_norm: float, loss: float
    ) -> GradientNorms:
        for gradient in self.flat.gradient_views:
            gradient.mul_(torch.clamp(clip_norm / (gradient.norm() + 1e-6), max=1.0))
        return super().update(
            learning_rate=learning_rate, weight_decay=weight_decay, clip_norm=math.inf, loss=loss
        )


def without_zeroing(model: Decoder, optimizer: AdamW, batch: Batch) -> GradientNorms:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flat, "zero_gradients", lambda self: None)
        return one_update(model, optimizer, batch)


def step_before_backward(model: Decoder, optimizer: AdamW, batch: Batch) -> GradientNorms:
    norms = optimizer.update(learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, loss=0.0)
    model.flat.zero_gradients()
    loss, count = model(*batch)
    (loss / count).backward()
    return norms


def agrees_with_reference(update: Update, kind: type[AdamW] = AdamW) -> bool:
    """Whether three updates on the quickstart shape give the bits of the usual loop."""
    model = build(QUICKSTART, CPU, seed=1)
    optimizer = kind(model.flat)
    reference = Reference(model, fused=True)
    for batch in batches(QUICKSTART, 3):
        update(model, optimizer, batch)
        reference.update(batch)
    return same_bits(model.flat, reference)


@pytest.mark.parametrize(
    ("update", "kind", "agrees"),
    [
        (one_update, AdamW, True),
        (without_zeroing, AdamW, False),
        (step_before_backward, AdamW, False),
        (one_update, ClipsEachTensor, False),
    ],
    ids=["right", "without-zeroing", "step-before-backward", "clip-each-tensor"],
)
def test_the_reference_tells_a_wrong_order_from_the_right_one(
    update: Update, kind: type[AdamW], agrees: bool
) -> None:
    assert agrees_with_reference(update, kind) is agrees


# --- clipping -------------------------------------------------------------------------------------


def clipped(
    gradients: list[float], *, tensors: int, clip_norm: float
) -> tuple[Flat, GradientNorms]:
    """The gradients after the clip, spread over one tensor or over one tensor for each."""
    size = len(gradients) // tensors
    table = [contract.Tensor(f"part.{n}", (size,), "one", n * size) for n in range(tensors)]
    flat = Flat(table, CPU, torch.float64)
    flat.gradients.copy_(torch.tensor(gradients, dtype=torch.float64))
    norms = AdamW(flat).update(learning_rate=0.1, weight_decay=0.0, clip_norm=clip_norm, loss=0.0)
    return flat, norms


@pytest.mark.parametrize("tensors", [1, 2])
def test_clipping_by_hand(tensors: int) -> None:
    flat, norms = clipped([3.0, 4.0], tensors=tensors, clip_norm=1.0)
    assert norms.total == 5.0
    assert norms.per_tensor == ((5.0,) if tensors == 1 else (3.0, 4.0))
    assert flat.gradients.tolist() == pytest.approx([0.6, 0.8], abs=1e-6)
    assert flat.gradients.tolist() == pytest.approx([0.59999988, 0.79999984], abs=5e-9)


def test_a_norm_within_the_threshold_changes_no_bit() -> None:
    flat, norms = clipped([3.0, 4.0], tensors=2, clip_norm=5.1)
    assert (flat.gradients.tolist(), norms.total) == ([3.0, 4.0], 5.0)


def test_an_infinite_threshold_never_clips() -> None:
    flat, _ = clipped([3e100, 4e100], tensors=2, clip_norm=math.inf)
    assert flat.gradients.tolist() == [3e100, 4e100]


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan])
def test_a_threshold_that_would_erase_the_gradient_is_refused(clip_norm: float) -> None:
    with pytest.raises(ValueError, match="expected a positive number or infinity"):
        clipped([3.0, 4.0], tensors=1, clip_norm=clip_norm)


@cases(100)
@given(
    st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8).filter(any),
    st.floats(0.01, 100.0),
)
def test_the_clip_keeps_the_direction_and_bounds_the_norm(
    gradients: list[float], clip_norm: float
) -> None:
    flat, norms = clipped(gradients, tensors=len(gradients), clip_norm=clip_norm)
    assert norms.total == pytest.approx(math.hypot(*gradients), rel=1e-12)
    after = flat.gradients.tolist()
    assert math.hypot(*after) <= clip_norm
    scale = min(1.0, clip_norm / (norms.total + 1e-6))
    assert after == pytest.approx([scale * value for value in gradients], rel=1e-12)


def test_norms_are_those_of_the_named_tensors() -> None:
    model = build(QUICKSTART, CPU, seed=1)
    norms = one_update(model, AdamW(model.flat), batches(QUICKSTART, 1)[0])
    assert len(norms.per_tensor) == len(model.flat.tensors) == 33
    factor = CLIP / (norms.total + 1e-6)
    for tensor, norm in zip(model.flat.tensors, norms.per_tensor, strict=True):
        after = model.flat.view(model.flat.gradients, tensor.name).double().norm().item()
        assert norm == pytest.approx(after / factor, rel=1e-4), tensor.name
    assert norms.total == pytest.approx(math.hypot(*norms.per_tensor), rel=1e-6)


# --- what stops an update -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "layers.1.mlp.up"])
def test_fc101_a_non_finite_value_stops_before_the_update(value: float, where: str) -> None:
    """The loss became NaN and training went on, so the last good state was soon overwritten
    (Nerogar/OneTrainer #1147, skinniderlab/CLM #284). Here the first loss or gradient that is not
    finite raises, and weights, moments and count are what they were before it."""
    model = build(TINY, CPU, seed=1)
    optimizer = AdamW(model.flat)
    one_update(model, optimizer, batches(TINY, 1)[0])
    before = bits(model.flat)
    loss = 1.0
    if where == "loss":
        loss = value
    else:
        model.flat.view(model.flat.gradients, where)[3, 5] = value
    with pytest.raises(NonFinite, match="update 2 refused") as caught:
        optimizer.update(learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, loss=loss)
    assert bits(model.flat) == before
    assert optimizer.updates == 1
    assert caught.value.tensors == (() if where == "loss" else (where,))
    assert str(caught.value).count(where) >= 1


def test_fc101_a_norm_that_overflows_stops_before_the_update() -> None:
    """Every element may be finite while the norm is not: scaling by 1/inf would erase the update
    and hide the explosion (skinniderlab/CLM #284)."""
    model = build(TINY, CPU, seed=1)
    model.flat.gradients.fill_(3e38)
    before = bits(model.flat)
    optimizer = AdamW(model.flat)
    with pytest.raises(NonFinite):
        optimizer.update(learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, loss=1.0)
    assert (bits(model.flat), optimizer.updates) == (before, 0)


def test_after_a_refusal_the_same_optimizer_goes_on_exactly() -> None:
    first, second = build(TINY, CPU, seed=1), build(TINY, CPU, seed=1)
    interrupted, plain = AdamW(first.flat), AdamW(second.flat)
    one, two = batches(TINY, 2)
    one_update(first, interrupted, one)
    first.flat.gradients.fill_(math.nan)
    with pytest.raises(NonFinite):
        interrupted.update(learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, loss=1.0)
    one_update(first, interrupted, two)
    for batch in (one, two):
        one_update(second, plain, batch)
    assert bits(first.flat) == bits(second.flat)


# --- resume ---------------------------------------------------------------------------------------


def restored(image: bytes, seed: int | None = None) -> Decoder:
    """A new model over the bytes of a saved image."""
    model = build(TINY, CPU, seed=seed)
    model.flat.image[:] = image
    model.flat.upload()
    model.assert_views()
    return model


def test_fc28_five_updates_after_a_restore_are_equal_bit_for_bit() -> None:
    """The first loss after a resume matched and the second did not, because the moments had been
    rounded: the weights, hence the first loss, show nothing (KempnerInstitute/KempnerForge #114).
    Five updates are compared over weights, m and v, and the same comparison sees rounded
    moments only in the second loss."""
    model = build(TINY, CPU, seed=1)
    optimizer = AdamW(model.flat)
    stream = batches(TINY, 8)
    for batch in stream[:3]:
        one_update(model, optimizer, batch)
    image, updates = bytes(model.flat.image), optimizer.updates

    resumed = restored(image)
    rounded = restored(image)
    rounded.flat.first_moments.copy_(rounded.flat.first_moments.bfloat16())
    again, damaged = AdamW(resumed.flat, updates), AdamW(rounded.flat, updates)
    rounded_losses_equal = []
    for batch in stream[3:]:
        losses = [each(*batch)[0].item() for each in (model, resumed, rounded)]
        assert losses[0] == losses[1]
        rounded_losses_equal.append(losses[0] == losses[2])
        for each, its in ((model, optimizer), (resumed, again), (rounded, damaged)):
            one_update(each, its, batch)
        assert bits(resumed.flat) == bits(model.flat)
        assert bits(rounded.flat) != bits(model.flat)
    assert rounded_losses_equal[:2] == [True, False]


def bfloat16_update(model: Decoder, optimizer: AdamW, batch: Batch) -> None:
    model.flat.zero_gradients()
    with autocast(CPU, "bfloat16"):
        loss, count = model(*batch)
    (loss / count).backward()
    optimizer.update(learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, loss=loss.item())


def test_fc32_twenty_resumes_in_low_precision_equal_none() -> None:
    """The low-precision copy was saved and the float32 masters were rebuilt from it, so every
    resume drifted (TensorAuto/OpenTau #185, karpathy/llm.c PR 702). Here the buffers that the
    optimizer updates are the saved ones, in bfloat16 runs too."""
    straight = build(TINY, CPU, seed=1)
    optimizer = AdamW(straight.flat)
    resumed = build(TINY, CPU, seed=1)
    for number, batch in enumerate(batches(TINY, 20)):
        bfloat16_update(straight, optimizer, batch)
        bfloat16_update(resumed, AdamW(resumed.flat, updates=number), batch)
        resumed = restored(bytes(resumed.flat.image))
    assert bits(resumed.flat) == bits(straight.flat)
    rounded = straight.flat.weights.bfloat16().float()
    assert not torch.equal(rounded, straight.flat.weights), "masters must hold more than bfloat16"


# --- denormals ------------------------------------------------------------------------------------

DENORMALS = """
    import sys
    import torch
    from trainer import device, flat, optimizer
    from supervisor import contract

    cpu = torch.device("cpu")
    if sys.argv[1] == "prepared":
        device.prepare(cpu, threads=2, deterministic=True)
    buffers = flat.Flat([contract.Tensor("rows", (1 << 20,), "one", 0)], cpu)
    buffers.first_moments.fill_(1e-37)
    buffers.second_moments.fill_(1.2e-38)
    adamw = optimizer.AdamW(buffers)
    for _ in range(40):
        adamw.update(learning_rate=0.1, weight_decay=0.0, clip_norm=1.0, loss=0.0)
    for moments in (buffers.first_moments, buffers.second_moments):
        raw = moments.view(torch.int32)
        print(int(((raw != 0) & (raw < 0x00800000)).sum()))
"""


@pytest.mark.parametrize(("mode", "subnormal"), [("prepared", 0), ("bare", 1 << 20)])
def test_moments_without_gradient_sink_to_zero_and_not_to_denormals(
    mode: str, subnormal: int
) -> None:
    """On every thread of a prepared process. The bare process shows what is being prevented."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(DENORMALS), mode],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.stdout.split(), done.stderr) == ([str(subnormal)] * 2, "")


# --- learning rate --------------------------------------------------------------------------------


def rate(step: int, **changes: float | str) -> float:
    values = {
        "peak": 1.0,
        "warmup_steps": 2000,
        "schedule": "cosine",
        "horizon_steps": 10_000,
        "minimum_ratio": 0.1,
    } | changes
    return learning_rate(step, **values)  # type: ignore[arg-type]


def test_the_first_factor_of_a_warmup_of_2000_steps_is_0_0005() -> None:
    assert rate(0, schedule="constant") == 0.0005
    assert rate(0) == 0.0005
    assert rate(999, schedule="constant") == 0.5
    assert rate(1999, schedule="constant") == rate(50_000, schedule="constant") == 1.0


def test_the_cosine_at_its_landmarks() -> None:
    assert rate(5_000) == pytest.approx(0.55, rel=1e-15)
    assert rate(10_000) == 0.1
    assert rate(2_500) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, rel=1e-15)
    assert rate(1_000) == pytest.approx(
        1001 / 2000 * (0.1 + 0.45 * (1 + math.cos(math.pi / 10))), rel=1e-15
    )


@pytest.mark.parametrize("step", [10_001, 10_500, 2**31 - 1])
def test_beyond_the_horizon_the_rate_stays_at_its_minimum(step: int) -> None:
    assert rate(step) == 0.1


def test_without_warmup_the_first_update_runs_at_the_peak() -> None:
    assert rate(0, warmup_steps=0, peak=3e-4) == 3e-4
    assert rate(0, warmup_steps=1, peak=3e-4) == 3e-4


def test_the_rate_depends_on_nothing_but_the_step() -> None:
    assert [rate(step) for step in range(50)] == [rate(step) for step in reversed(range(50))][::-1]


@cases(200)
@given(
    step=st.integers(0, 20_000),
    warmup_steps=st.integers(0, 5_000),
    horizon_steps=st.integers(1, 10_000),
    minimum_ratio=st.floats(0.0, 1.0),
    schedule=st.sampled_from(["constant", "cosine"]),
)
def test_the_rate_is_bounded_smooth_and_falls_after_the_warmup(
    step: int, warmup_steps: int, horizon_steps: int, minimum_ratio: float, schedule: str
) -> None:
    here, ahead = (
        learning_rate(
            at,
            peak=2.0,
            warmup_steps=warmup_steps,
            schedule=schedule,
            horizon_steps=horizon_steps,
            minimum_ratio=minimum_ratio,
        )
        for at in (step, step + 1)
    )
    assert 0.0 <= here <= 2.0
    warmth = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    assert here >= 2.0 * warmth * minimum_ratio * (1 - 1e-12)
    if step + 1 >= warmup_steps:
        assert ahead <= here
    steepest = 2.0 * (math.pi / 2 / horizon_steps + 1 / max(1, warmup_steps))
    assert abs(ahead - here) <= steepest * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "linear"}, r"schedule is 'linear', expected one of \('constant', 'cosine'\)"),
        ({"horizon_steps": 0}, "horizon_steps is 0, expected at least 1"),
        ({"minimum_ratio": 1.5}, r"minimum_ratio is 1\.5, expected 0 to 1"),
        ({"warmup_steps": -1}, "warmup_steps -1 must not be negative"),
    ],
)
def test_values_that_define_no_schedule_are_refused(
    changes: dict[str, float | str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rate(5, **changes)


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="step -1"):
        rate(-1)


def test_the_image_after_an_update_is_what_was_computed() -> None:
    """No copy stands between the optimizer and the bytes that are saved."""
    flat = Flat([contract.Tensor("theta", (1,), "one", 0)], CPU)
    flat.gradients.fill_(0.5)
    AdamW(flat).update(learning_rate=0.1, weight_decay=0.0, clip_norm=1.0, loss=0.0)
    weight, m, v = struct.unpack("<fff", flat.image[8:])
    assert weight == pytest.approx(-0.1, rel=1e-6)
    assert (m, v) == (pytest.approx(0.05), pytest.approx(0.00025))
