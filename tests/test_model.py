"""The decoder: sizes, the table of its tensors, initialisation, forward pass, loss."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor import contract
from trainer.corpus import IGNORED_TARGET
from trainer.model import Decoder, Shape, build, initialise, tensor_table

CPU = torch.device("cpu")
TINY = Shape(vocabulary=11, width=8, heads=2, layers=2, context=6)
QUICKSTART = Shape(vocabulary=257, width=128, heads=4, layers=5, context=128)
ANDREA_12M = Shape(vocabulary=2_305, width=384, heads=12, layers=6, context=1_024)
ANDREA_120M = Shape(vocabulary=8_449, width=768, heads=12, layers=12, context=1_024)

SHAPES = st.builds(
    lambda vocabulary, head, heads, layers, context: Shape(
        vocabulary, head * heads, heads, layers, context
    ),
    vocabulary=st.integers(1, 10_000),
    head=st.integers(1, 128),
    heads=st.integers(1, 32),
    layers=st.integers(1, 40),
    context=st.integers(1, 4_096),
)


def tokens_of(shape: Shape, rows: int, length: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocabulary, (rows, length), generator=generator)


# --- sizes and names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "parameters", "size_bytes"),
    [
        (QUICKSTART, 1_065_216, 12_782_600),
        (ANDREA_12M, 12_780_288, 153_363_464),
        (ANDREA_120M, 98_698_752, 1_184_385_032),
    ],
    ids=["quickstart", "andrea-12m", "andrea-120m"],
)
def test_published_sizes(shape: Shape, parameters: int, size_bytes: int) -> None:
    assert shape.parameters == parameters
    assert sum(tensor.size for tensor in tensor_table(shape)) == parameters
    assert contract.checkpoint_size_bytes(parameters) == size_bytes


def test_the_built_model_has_the_size_of_its_table() -> None:
    model = build(QUICKSTART, CPU, seed=None)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_065_216
    assert len(model.flat.image) == 12_782_600


@cases(100)
@given(SHAPES)
def test_the_table_covers_the_formula_without_gap(shape: Shape) -> None:
    offset = 0
    for tensor in tensor_table(shape):
        assert tensor.offset == offset
        offset += tensor.size
    assert offset == shape.parameters
    assert len({tensor.name for tensor in tensor_table(shape)}) == 3 + 6 * shape.layers


def test_the_order_of_the_flat_vector() -> None:
    rows = [(t.name, t.shape, t.orientation) for t in tensor_table(replace(TINY, layers=1))]
    assert rows == [
        ("token_embedding", (11, 8), "token,width"),
        ("position_embedding", (6, 8), "position,width"),
        ("layers.0.attention.query", (8, 8), "out,in"),
        ("layers.0.attention.key", (8, 8), "out,in"),
        ("layers.0.attention.value", (8, 8), "out,in"),
        ("layers.0.attention.output", (8, 8), "out,in"),
        ("layers.0.mlp.up", (32, 8), "out,in"),
        ("layers.0.mlp.down", (8, 32), "out,in"),
        ("output_head", (11, 8), "out,in"),
    ]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocabulary", 0, r"model\.vocabulary is 0, expected at least 1"),
        ("layers", -1, r"model\.layers is -1, expected at least 1"),
        ("heads", 3, r"model\.width is 8, expected a multiple of model\.heads \(3\)"),
        ("dropout", 1.0, r"model\.dropout is 1\.0, expected 0 <= dropout < 1"),
        ("dropout", math.nan, r"model\.dropout is nan"),
    ],
)
def test_an_impossible_shape_is_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **{field: value})  # type: ignore[arg-type]


# --- initialisation -------------------------------------------------------------------------------


def test_building_draws_nothing_from_global_generators() -> None:
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    build(TINY, CPU, seed=1)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (build(TINY, CPU, seed=seed).flat.weights for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_seed_the_weights_wait_for_a_checkpoint() -> None:
    assert build(TINY, CPU, seed=None).flat.weights.count_nonzero() == 0


def test_initial_deviations() -> None:
    model = build(QUICKSTART, CPU, seed=3)
    for tensor in model.flat.tensors:
        weights = model.flat.view(model.flat.weights, tensor.name)
        residual = tensor.name.endswith(("attention.output", "mlp.down"))
        expected = 0.02 / math.sqrt(10) if residual else 0.02
        # Four standard errors of a deviation, and of a mean, over this many draws.
        tolerance = 4 * expected / math.sqrt(2 * tensor.size)
        assert weights.std().item() == pytest.approx(expected, abs=tolerance), tensor.name
        assert weights.mean().item() == pytest.approx(0.0, abs=2 * tolerance), tensor.name


def test_a_new_model_is_as_good_as_chance() -> None:
    model = build(QUICKSTART, CPU, seed=3)
    tokens = tokens_of(QUICKSTART, 2, 32)
    loss, count = model(tokens, tokens.roll(-1, 1))
    assert (loss / count).item() == pytest.approx(math.log(257), abs=0.1)


# --- forward pass ---------------------------------------------------------------------------------


def by_hand(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """The same decoder from the named tensors, one head and one position at a time."""
    flat, shape = model.flat, model.shape

    def weight(name: str) -> torch.Tensor:
        return flat.view(flat.weights, name)

    def norm(row: torch.Tensor) -> torch.Tensor:
        epsilon = torch.finfo(row.dtype).eps
        return row / torch.sqrt((row * row).mean(-1, keepdim=True) + epsilon)

    size = shape.width // shape.heads
    rows = []
    for line in tokens:
        x = weight("token_embedding")[line] + weight("position_embedding")[: len(line)]
        for layer in range(shape.layers):
            name = f"layers.{layer}"
            q, k, v = (
                norm(x) @ weight(f"{name}.attention.{part}").T for part in ("query", "key", "value")
            )
            mixed = torch.zeros_like(x)
            for head in range(shape.heads):
                span = slice(head * size, (head + 1) * size)
                for position in range(len(line)):
                    scores = k[: position + 1, span] @ q[position, span] / math.sqrt(size)
                    shares = torch.softmax(scores, 0)
                    mixed[position, span] = shares @ v[: position + 1, span]
            x = x + mixed @ weight(f"{name}.attention.output").T
            inner = norm(x) @ weight(f"{name}.mlp.up").T
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            x = x + inner @ weight(f"{name}.mlp.down").T
        rows.append(norm(x) @ weight("output_head").T)
    return torch.stack(rows)


def test_the_decoder_equals_one_written_out_by_hand() -> None:
    model = build(TINY, CPU, seed=2, dtype=torch.float64)
    model.flat.weights.mul_(20.0)  # far from the linear regime of small weights
    tokens = tokens_of(TINY, 2, 6)
    expected = by_hand(model, tokens)
    torch.testing.assert_close(model.logits(tokens).detach(), expected, rtol=1e-11, atol=1e-11)
    loss, count = model(tokens, tokens)
    by_target = torch.log_softmax(expected, -1).gather(2, tokens.unsqueeze(2))
    assert loss.item() == pytest.approx(-by_target.sum().item(), rel=1e-12)
    assert count.item() == 12


@pytest.mark.parametrize("name", [tensor.name for tensor in tensor_table(TINY)])
def test_every_gradient_is_the_slope_of_the_loss(name: str) -> None:
    model = build(TINY, CPU, seed=2, dtype=torch.float64)
    model.flat.weights.mul_(20.0)
    tokens, targets = tokens_of(TINY, 2, 6), tokens_of(TINY, 2, 6, seed=6)
    loss, _ = model(tokens, targets)
    loss.backward()
    generator = torch.Generator().manual_seed(1)
    weights = model.flat.view(model.flat.weights, name)
    direction = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    slope = (model.flat.view(model.flat.gradients, name) * direction).sum().item()
    with torch.no_grad():
        start = weights.clone()
        weights.copy_(start + 1e-6 * direction)
        ahead, _ = model(tokens, targets)
        weights.copy_(start - 1e-6 * direction)
        behind, _ = model(tokens, targets)
    assert slope == pytest.approx((ahead - behind).item() / 2e-6, rel=1e-6, abs=1e-7)


@cases(20)
@given(position=st.integers(0, 4), token=st.integers(0, 10))
def test_no_position_sees_a_later_token(position: int, token: int) -> None:
    model = build(TINY, CPU, seed=2)
    tokens = tokens_of(TINY, 1, 6)
    changed = tokens.clone()
    changed[0, position + 1] = token
    seen, other = model.logits(tokens), model.logits(changed)
    assert torch.equal(seen[:, : position + 1], other[:, : position + 1])


def test_positions_matter() -> None:
    model = build(TINY, CPU, seed=2)
    same = torch.full((1, 3), 4)
    logits = model.logits(same)
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_logits_of_one_position_a_row() -> None:
    model = build(TINY, CPU, seed=2)
    tokens = tokens_of(TINY, 3, 5)
    positions = torch.tensor([0, 4, 2])
    chosen = model.logits(tokens, positions)
    whole = model.logits(tokens)
    assert chosen.shape == (3, 11)
    torch.testing.assert_close(chosen, whole[torch.arange(3), positions])


def test_a_window_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"7 tokens exceeds model\.context \(6\)"):
        build(TINY, CPU, seed=2).logits(torch.zeros(1, 7, dtype=torch.int64))


# --- loss -----------------------------------------------------------------------------------------


def test_positions_without_target_count_for_nothing() -> None:
    model = build(TINY, CPU, seed=2)
    tokens = tokens_of(TINY, 2, 6)
    targets = tokens.roll(-1, 1)
    targets[:, 4:] = IGNORED_TARGET
    padded, count = model(tokens, targets)
    short, short_count = model(tokens[:, :4], targets[:, :4])
    assert count.item() == short_count.item() == 8
    assert padded.item() == pytest.approx(short.item(), rel=1e-6)


def test_a_batch_without_targets_has_loss_zero_and_count_zero() -> None:
    model = build(TINY, CPU, seed=2)
    loss, count = model(tokens_of(TINY, 1, 4), torch.full((1, 4), IGNORED_TARGET))
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert model.flat.gradients.count_nonzero() == 0


def test_micro_batches_of_different_lengths_weigh_by_their_targets() -> None:
    """The mean of the micro-batches' means would weigh a short one like a long one."""
    model = build(TINY, CPU, seed=2, dtype=torch.float64)
    tokens = tokens_of(TINY, 2, 6)
    targets = tokens.roll(-1, 1)
    targets[1, 2:] = IGNORED_TARGET
    loss, count = model(tokens, targets)
    (loss / count).backward()
    whole = model.flat.gradients.clone()
    model.flat.zero_gradients()
    for row in range(2):
        part, _ = model(tokens[row : row + 1], targets[row : row + 1])
        (part / count).backward()
    torch.testing.assert_close(model.flat.gradients, whole, rtol=1e-12, atol=1e-15)


def test_the_loss_is_summed_in_float32_under_autocast() -> None:
    model = build(TINY, CPU, seed=2)
    tokens = tokens_of(TINY, 2, 6)
    exact, _ = model(tokens, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model(tokens, tokens)
        logits = model.logits(tokens)
    assert loss.dtype == logits.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    assert loss.item() != exact.item()


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_follows_the_global_generator_in_training_only() -> None:
    model = build(replace(TINY, dropout=0.5), CPU, seed=2)
    tokens = tokens_of(TINY, 2, 6)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first, second = model(tokens, tokens)[0], model(tokens, tokens)[0]
    torch.set_rng_state(state)
    assert model(tokens, tokens)[0].item() == first.item()
    assert first.item() != second.item()

    model.eval()
    state = torch.get_rng_state()
    plain = build(TINY, CPU, seed=2)
    assert model(tokens, tokens)[0].item() == plain(tokens, tokens)[0].item()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("branch", ["attention.output", "mlp.down"])
def test_dropout_acts_on_each_branch_of_a_layer(branch: str) -> None:
    model = build(replace(TINY, layers=1, dropout=0.5), CPU, seed=2)
    other = {"attention.output": "mlp.down", "mlp.down": "attention.output"}[branch]
    model.flat.view(model.flat.weights, f"layers.0.{other}").zero_()
    hidden = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(4)
    with torch.no_grad():
        noisy = model.layers[0](hidden) - hidden
        exact = model.layers[0].eval()(hidden) - hidden
    dropped = noisy.abs() < 1e-6
    assert 0.3 < dropped.double().mean().item() < 0.7
    torch.testing.assert_close(noisy[~dropped], 2 * exact[~dropped], rtol=1e-4, atol=1e-6)


def test_dropout_acts_on_the_embeddings() -> None:
    model = build(replace(TINY, dropout=0.5), CPU, seed=2)
    for tensor in model.flat.tensors:
        if tensor.name.endswith(("attention.output", "mlp.down")):
            model.flat.view(model.flat.weights, tensor.name).zero_()
    tokens = tokens_of(TINY, 3, 6)
    torch.manual_seed(4)
    noisy = model.logits(tokens)
    assert not torch.allclose(noisy, model.eval().logits(tokens))


def test_without_dropout_training_draws_nothing() -> None:
    model = build(TINY, CPU, seed=2)
    tokens = tokens_of(TINY, 2, 6)
    state = torch.get_rng_state()
    model(tokens, tokens)[0].backward()
    assert torch.equal(torch.get_rng_state(), state)


# --- start-up -------------------------------------------------------------------------------------


def test_a_whole_update_never_loads_the_compiler() -> None:
    """torch's compiler stack costs two seconds of every restart, and half a dozen harmless calls
    load it: the first optimizer object, use_deterministic_algorithms, skip_init."""
    script = """
        import sys
        from pathlib import Path
        import torch
        from trainer import device, model, optimizer

        cpu = device.resolve("cpu")
        device.prepare(cpu, threads=1, deterministic=True)
        decoder = model.build(model.Shape(11, 8, 2, 2, 6, 0.1), cpu, seed=1)
        adamw = optimizer.AdamW(decoder.flat)
        tokens = torch.tensor([[1, 2, 3, 4]])
        with device.autocast(cpu, "bfloat16"):
            loss, count = decoder(tokens, tokens)
        (loss / count).backward()
        adamw.update(learning_rate=0.1, weight_decay=0.0, clip_norm=1.0, loss=loss.item())
        decoder.eval().logits(tokens)
        device.restore_rng(device.rng_state(cpu), cpu)
        device.environment(cpu, Path("/"))
        loaded = {"torch._dynamo", "torch._inductor"}
        print(adamw.updates, sorted(loaded & sys.modules.keys()))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("1 []\n", "")


def test_initialise_overwrites_every_weight() -> None:
    model = build(TINY, CPU, seed=None)
    model.flat.weights.fill_(math.nan)
    initialise(model.flat, TINY, 1)
    assert torch.equal(model.flat.weights, build(TINY, CPU, seed=1).flat.weights)
