"""The flat buffers: layout, views, names, and what must be refused."""

from __future__ import annotations

import copy
import mmap
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from property_kit import cases

from supervisor import contract
from trainer.flat import Flat, Regions, StateError
from trainer.model import Decoder, Shape, build, tensor_table

CPU = torch.device("cpu")
TINY = Shape(vocabulary=11, width=8, heads=2, layers=2, context=6)
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
TARGETS = torch.tensor([[2, 3, 4, -100], [6, 7, 8, 9]])


def matrices(*shapes: tuple[int, int]) -> tuple[contract.Tensor, ...]:
    """A table of anonymous matrices that follow each other."""
    table = []
    offset = 0
    for number, shape in enumerate(shapes):
        tensor = contract.Tensor(f"matrix.{number}", shape, "out,in", offset)
        table.append(tensor)
        offset += tensor.size
    return tuple(table)


def numbered(flat: Flat) -> Regions:
    """Regions in which every element differs from every other."""
    count = flat.parameters
    return Regions(*torch.arange(3.0 * count).view(3, count).clone().unbind(0))


def backward(model: Decoder) -> None:
    loss, count = model(TOKENS, TARGETS)
    (loss / count).backward()


# --- layout ---------------------------------------------------------------------------------------


def test_the_image_has_the_layout_of_a_bin() -> None:
    flat = Flat(matrices((2, 3), (4, 1)), CPU)
    flat.load(flat.tensors, numbered(flat))
    flat.image[:8] = struct.pack("<ii", 7, 10)
    expected = struct.pack("<ii30f", 7, 10, *range(30))
    assert bytes(flat.image) == expected
    assert len(flat.image) == contract.checkpoint_size_bytes(10)


def test_the_image_is_page_aligned_and_live() -> None:
    flat = Flat(matrices((2, 3)), CPU)
    header = flat.weights.data_ptr() - contract.HEADER_BYTES
    assert header % mmap.PAGESIZE == 0
    assert flat.first_moments.data_ptr() == flat.weights.data_ptr() + 4 * 6
    assert flat.second_moments.data_ptr() == flat.weights.data_ptr() + 8 * 6
    flat.image[8:12] = struct.pack("<f", 2.5)
    assert flat.weights[0].item() == 2.5


def test_buffers_start_at_zero() -> None:
    flat = Flat(matrices((2, 3)), CPU)
    for buffer in (*flat.host_regions(), flat.gradients):
        assert buffer.dtype == torch.float32
        assert buffer.tolist() == [0.0] * 6


def test_on_a_cpu_the_host_regions_are_the_live_memory() -> None:
    flat = Flat(matrices((2, 3)), CPU)
    assert flat.host_regions().weights.data_ptr() == flat.weights.data_ptr()


@cases(50)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6))
def test_views_partition_every_buffer(shapes: list[tuple[int, int]]) -> None:
    flat = Flat(matrices(*shapes), CPU)
    flat.load(flat.tensors, numbered(flat))
    for region in flat.host_regions():
        views = [flat.view(region, tensor.name) for tensor in flat.tensors]
        assert [tuple(view.shape) for view in views] == shapes
        assert torch.equal(torch.cat([view.flatten() for view in views]), region)
    assert sum(view.numel() for view in flat.gradient_views) == flat.parameters


def test_another_device_is_staged_through_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a CUDA device, with ordinary memory in the place of the device's."""
    zeros = torch.zeros

    def on_the_cpu(*size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        assert device.type == "cuda"
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    flat = Flat(matrices((2, 3)), torch.device("cuda", 0))
    saved = numbered(flat)
    flat.load(flat.tensors, saved)
    assert bytes(flat.image[8:]) == bytes(72), "loading reaches the device, not the staging copy"
    for host, expected in zip(flat.host_regions(), saved, strict=True):
        assert torch.equal(host, expected)
        assert host.data_ptr() not in {flat.weights.data_ptr(), flat.first_moments.data_ptr()}
    flat.image[8:12] = struct.pack("<f", -1.0)
    assert flat.weights[0].item() == 0.0
    flat.upload()
    assert flat.weights.tolist() == [-1.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    flat.weights.fill_(9.0)
    flat.download()
    assert struct.unpack("<f", flat.image[8:12]) == (9.0,)


# --- parameters as views --------------------------------------------------------------------------


def test_backward_accumulates_into_the_flat_gradient() -> None:
    model = build(TINY, CPU, seed=1)
    backward(model)
    model.assert_views()
    assert model.flat.gradients.count_nonzero() > 0
    once = model.flat.gradients.clone()
    backward(model)
    assert torch.equal(model.flat.gradients, 2 * once)
    model.flat.zero_gradients()
    model.assert_views()
    assert model.flat.gradients.count_nonzero() == 0


def test_gradients_in_place_have_the_bits_of_fresh_ones() -> None:
    model = build(TINY, CPU, seed=1)
    backward(model)
    flat = model.flat.gradients.clone()
    for parameter in model.parameters():
        parameter.grad = None
    backward(model)
    fresh = [p.grad for p in model.parameters() if p.grad is not None]
    by_place = sorted(zip(model.parameters(), fresh, strict=True), key=lambda p: p[0].data_ptr())
    assert torch.equal(torch.cat([gradient.flatten() for _, gradient in by_place]), flat)


def test_a_write_to_the_weights_between_forward_and_backward_raises() -> None:
    model = build(TINY, CPU, seed=1)
    loss, _ = model(TOKENS, TARGETS)
    model.flat.weights.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def rebind_gradient(model: Decoder) -> None:
    model.zero_grad(set_to_none=True)
    backward(model)


def drop_gradient(model: Decoder) -> None:
    model.output_head.grad = None


def change_dtype(model: Decoder) -> None:
    model.to(torch.float64)


def assign_state(model: Decoder) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def rebind_data(model: Decoder) -> None:
    model.output_head.data = model.output_head.data.clone()


def transpose_data(model: Decoder) -> None:
    layer = model.layers[0]
    assert isinstance(layer.output, torch.nn.Parameter)
    layer.output.data = layer.output.data.t()


def flatten_data(model: Decoder) -> None:
    model.output_head.data = model.output_head.data.flatten()


def swap_data(model: Decoder) -> None:
    first, second = model.layers[0], model.layers[1]
    assert isinstance(first.up, torch.nn.Parameter)
    assert isinstance(second.up, torch.nn.Parameter)
    first.up.data, second.up.data = second.up.data, first.up.data


def add_parameter(model: Decoder) -> None:
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    "breakage",
    [
        rebind_gradient,
        drop_gradient,
        change_dtype,
        assign_state,
        rebind_data,
        transpose_data,
        flatten_data,
        swap_data,
        add_parameter,
    ],
)
def test_assert_views_sees_every_way_to_lose_a_view(breakage: Callable[[Decoder], None]) -> None:
    model = build(TINY, CPU, seed=1)
    model.assert_views()
    breakage(model)
    with pytest.raises(AssertionError, match=r"no view|not the ones bound"):
        model.assert_views()


def test_assert_views_sees_a_tensor_that_no_parameter_covers() -> None:
    flat = Flat(matrices((2, 3), (2, 3)), CPU)
    parameter = flat.bind("matrix.0")
    with pytest.raises(AssertionError, match="do not cover"):
        flat.assert_views([parameter])


def test_a_model_cannot_be_copied_by_accident() -> None:
    with pytest.raises(TypeError, match="mmap"):
        copy.deepcopy(build(TINY, CPU, seed=1))


def test_neighbours_join_into_one_parameter() -> None:
    flat = Flat(matrices((2, 3), (4, 3), (1, 3)), CPU)
    flat.load(flat.tensors, numbered(flat))
    joined = flat.bind("matrix.0", "matrix.1")
    assert joined.shape == (6, 3)
    assert joined.flatten().tolist() == list(map(float, range(18)))


@pytest.mark.parametrize("names", [("matrix.0", "matrix.2"), ("matrix.1", "matrix.0")])
def test_tensors_apart_are_not_joined(names: tuple[str, str]) -> None:
    flat = Flat(matrices((2, 3), (4, 3), (1, 3)), CPU)
    with pytest.raises(ValueError, match="cannot be joined"):
        flat.bind(*names)


def test_neighbours_of_another_width_are_not_joined() -> None:
    flat = Flat(matrices((2, 3), (2, 4)), CPU)
    with pytest.raises(ValueError, match=r"matrix\.1 does not continue matrix\.0"):
        flat.bind("matrix.0", "matrix.1")


# --- state by name --------------------------------------------------------------------------------


def reordered(tensors: tuple[contract.Tensor, ...], order: list[int]) -> list[contract.Tensor]:
    table = []
    offset = 0
    for index in order:
        table.append(replace(tensors[index], offset=offset))
        offset += tensors[index].size
    return table


@cases(30)
@given(st.permutations(range(len(tensor_table(TINY)))))
def test_fc30_state_is_bound_by_name(order: list[int]) -> None:
    """Moments were matched to parameters by position, so a model whose parameters came in another
    order trained each tensor with the moments of another one (pytorch/pytorch #1489,
    Lightning-AI/pytorch-lightning #17025). Here every tensor finds its own three parts by name."""
    flat = Flat(tensor_table(TINY), CPU)
    source = Flat(reordered(flat.tensors, order), CPU)
    saved = numbered(source)
    flat.load(source.tensors, saved)
    for live, region in zip(flat.host_regions(), saved, strict=True):
        for tensor in flat.tensors:
            assert torch.equal(flat.view(live, tensor.name), source.view(region, tensor.name))


def test_fc30_an_unknown_or_missing_name_is_refused_and_nothing_is_written() -> None:
    """The other half of the same trouble (pytorch/pytorch #1489): a state of another model that
    happens to have the same number of elements must not load at all."""
    flat = Flat(matrices((2, 3), (3, 2)), CPU)
    renamed = [replace(flat.tensors[0], name="stranger"), flat.tensors[1]]
    with pytest.raises(StateError, match=r"unknown tensors \['stranger'\], missing \['matrix.0'\]"):
        flat.load(renamed, numbered(flat))
    assert flat.weights.count_nonzero() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"shape": (3, 2)},
            r"matrix\.0 is \(3, 2\) \(out,in\), this model has \(2, 3\) \(out,in\)",
        ),
        ({"orientation": "in,out"}, r"matrix\.0 is \(2, 3\) \(in,out\)"),
    ],
)
def test_fc30_another_shape_or_orientation_is_refused_with_both_sides(
    change: dict[str, object], message: str
) -> None:
    """A transposed or reshaped tensor has the right size and the right name, and would load
    without a word by position (Lightning-AI/pytorch-lightning #17025)."""
    flat = Flat(matrices((2, 3), (3, 2)), CPU)
    changed = [replace(flat.tensors[0], **change), flat.tensors[1]]  # type: ignore[arg-type]
    with pytest.raises(StateError, match=message):
        flat.load(changed, numbered(flat))
    assert flat.weights.count_nonzero() == 0


def test_a_grown_vocabulary_is_refused_with_both_shapes() -> None:
    flat = Flat(tensor_table(TINY), CPU)
    grown = Flat(tensor_table(replace(TINY, vocabulary=12)), CPU)
    with pytest.raises(StateError, match=r"token_embedding is \(12, 8\).*model has \(11, 8\)"):
        flat.load(grown.tensors, numbered(grown))


@pytest.mark.parametrize("region", Regions._fields)
def test_a_region_of_another_length_or_precision_is_refused(region: str) -> None:
    flat = Flat(matrices((2, 3)), CPU)
    saved = numbered(flat)
    good = getattr(saved, region)
    for wrong in (good[:-1], good.double(), good.bfloat16()):
        with pytest.raises(StateError, match=rf"{region} is torch\.\w+ \(\d,\), expected"):
            flat.load(flat.tensors, saved._replace(**{region: wrong}))
    assert flat.weights.count_nonzero() == 0


def test_a_table_with_a_gap_or_a_double_name_is_refused() -> None:
    first, second = matrices((2, 3), (2, 3))
    with pytest.raises(StateError, match=r"matrix\.1 starts at 7, expected 6"):
        Flat([first, replace(second, offset=7)], CPU)
    with pytest.raises(StateError, match=r"matrix\.0 occurs twice"):
        Flat([first, replace(second, name="matrix.0")], CPU)


# --- sizes ----------------------------------------------------------------------------------------

STATE: contract.Json = {
    "configuration": {},
    "policy_digest": "",
    "tokenizer": {},
    "arms": {},
    "bandit": {},
    "rng": {},
    "updates": 3,
    "targets_seen": 0,
    "detectors": {},
    "environment": {},
}


def test_fc24_byte_sizes_above_32_bits_round_trip_through_header_and_manifest() -> None:
    """A byte count kept in 32 bits overflowed for larger models (karpathy/llm.c PR 700). The
    largest table that a checkpoint can hold has 2^31 - 1 elements and 25.8 GB."""
    table = matrices((65_536, 32_767), (65_535, 1))
    count = sum(tensor.size for tensor in table)
    assert count == contract.INT32_MAX
    size = contract.checkpoint_size_bytes(count)
    assert size == 25_769_803_772
    chunks = (contract.digest(b""),) * -(-size // contract.CHUNK_BYTES)
    manifest = contract.Manifest(
        run_id="large",
        lineage=(),
        attempt=1,
        step=3,
        epoch=1,
        reason="cadence",
        requests=(),
        parameters=count,
        size_bytes=size,
        chunks=chunks,
        binary_digest=contract.chunks_digest(chunks),
        tensors=table,
        state=STATE,
    )
    parsed = contract.parse_manifest(manifest.to_bytes(), "large")
    assert parsed.tensors == table
    assert parsed.size_bytes == size
    contract.check_header(struct.pack("<ii", 3, count), parsed, "large")


def test_fc24_element_offsets_above_32_bits_are_exact() -> None:
    """The same overflow (karpathy/llm.c PR 700) one level down: the offsets of the tensors of a
    model too large for any machine here, by arithmetic alone."""
    shape = Shape(vocabulary=1_000_003, width=16_384, heads=128, layers=120, context=8_192)
    table = tensor_table(shape)
    head = table[-1]
    assert head.offset + head.size == shape.parameters > 2**38
    assert head.offset == shape.parameters - 1_000_003 * 16_384
    assert contract.Tensor(**{**head.to_json(), "shape": head.shape}) == head


def test_fc24_a_model_too_large_for_the_header_is_refused_before_it_is_allocated() -> None:
    """An overflowing count must not wrap into a small valid one (karpathy/llm.c PR 700): one
    element more than the header can say is an error that names the number."""
    too_many = matrices((65_536, 32_768))
    with pytest.raises(contract.ContractError, match=r"2147483648 parameters do not fit"):
        contract.checkpoint_size_bytes(too_many[0].size)
    with pytest.raises(contract.ContractError, match=r"2147483648 parameters do not fit"):
        Flat(too_many, CPU)
