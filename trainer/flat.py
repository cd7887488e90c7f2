"""The flat buffers: every weight, moment and gradient of a model, and the names inside them.

What may live here: how the numbers of one training state lie in memory, and how a named tensor is
found in them. Nothing here knows what a decoder is, how an update is made, or what a file is.

Invariants:
- On a CPU the weights and both moments lie in one page-aligned region that has the layout of a
  checkpoint `.bin`, header words included: `[int32 step][int32 n_params][weights | m | v]`. A
  writer needs no copy to put it on disk. On another device the region is a staging copy, filled
  by `download` and emptied by `upload`.
- A parameter of the model is a view of the weights, its gradient a view of the gradients. Nobody
  may rebind either: not `zero_grad(set_to_none=True)`, `.to(dtype)`, `deepcopy`, nor
  `load_state_dict(assign=True)`. `assert_views` proves it.
- State is bound by name, shape and orientation, never by position alone.
- Offsets and sizes are Python integers: they do not overflow.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from supervisor import contract


class StateError(ValueError):
    """A saved state does not fit this model; the text names the tensor and both sides."""


class Regions(NamedTuple):
    """Three flat tensors of `n_params` elements each, on the CPU."""

    weights: torch.Tensor
    first_moments: torch.Tensor
    second_moments: torch.Tensor


class Flat:
    """The buffers behind the named `tensors`, all zero at first.

    `weights`, `first_moments`, `second_moments` and `gradients` have shape `(parameters,)`.
    `dtype` is float32 for every real run; float64 serves to compare the update rule with exact
    arithmetic. Raises ContractError when the count does not fit the header of a checkpoint,
    before anything is allocated.
    """

    def __init__(
        self,
        tensors: Sequence[contract.Tensor],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tensors = tuple(tensors)
        self.device = device
        self.dtype = dtype
        self.parameters = sum(tensor.size for tensor in self.tensors)
        contract.checkpoint_size_bytes(self.parameters)
        self._by_name = {tensor.name: tensor for tensor in self.tensors}
        _check_table(self.tensors)

        self._image = _page_aligned(contract.HEADER_BYTES + 3 * self.parameters * dtype.itemsize)
        self._host = _regions_of(self._image, self.parameters, dtype)
        self.weights, self.first_moments, self.second_moments = (
            self._host
            if device.type == "cpu"
            else torch.zeros(3 * self.parameters, dtype=dtype, device=device).chunk(3)
        )
        self.gradients = torch.zeros(self.parameters, dtype=dtype, device=device)
        self.gradient_views = [self.view(self.gradients, tensor.name) for tensor in self.tensors]
        self._bound: list[tuple[nn.Parameter, contract.Tensor]] = []

    # --- names ---------------------------------------------------------------------------------

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor `name` inside one of the flat buffers, in its own shape."""
        tensor = self._by_name[name]
        return buffer[tensor.offset : tensor.offset + tensor.size].view(tensor.shape)

    def bind(self, *names: str) -> nn.Parameter:
        """A parameter over the weights of `names`, with its gradient already in place.

        Several names make one parameter, joined along the first dimension, so that a model can
        use one product where the table keeps separate tensors; they must be neighbours.
        """
        parts = [self._by_name[name] for name in names]
        joined = contract.Tensor(
            name=" + ".join(names),
            shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
            orientation=parts[0].orientation,
            offset=parts[0].offset,
        )
        for before, after in itertools.pairwise(parts):
            if after.offset != before.offset + before.size or after.shape[1:] != before.shape[1:]:
                raise ValueError(f"{after.name} does not continue {before.name}: cannot be joined")
        span = slice(joined.offset, joined.offset + joined.size)
        # A parameter made from the view shares its version counter: a write to the weights between
        # forward and backward raises. `parameter.data = view` would let it pass unseen.
        parameter = nn.Parameter(self.weights[span].view(joined.shape))
        parameter.grad = self.gradients[span].view(joined.shape)
        self._bound.append((parameter, joined))
        return parameter

    def assert_views(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prove that `parameters` are the bound ones, all of them, and still views of the buffers.

        Call it after building a model and after each resume. Raises AssertionError: a model that
        trains on other memory than the one that is saved is our own fault, never the user's.
        """
        bound = {id(parameter) for parameter, _ in self._bound}
        if {id(parameter) for parameter in parameters} != bound:
            raise AssertionError("the model's parameters are not the ones bound to the buffers")
        if sum(joined.size for _, joined in self._bound) != self.parameters:
            raise AssertionError("the bound parameters do not cover the flat vector once")
        for parameter, joined in self._bound:
            for what, view, buffer in (
                ("weight", parameter.data, self.weights),
                ("gradient", parameter.grad, self.gradients),
            ):
                if view is None or not _is_view(view, buffer, joined):
                    raise AssertionError(f"{what} of {joined.name} is no view of its flat buffer")

    def zero_gradients(self) -> None:
        """Forget the last update's gradient in place; the views stay."""
        self.gradients.zero_()

    # --- the state as the host sees it ----------------------------------------------------------

    @property
    def image(self) -> memoryview:
        """The writable bytes of a `.bin`: page-aligned, 8 header bytes (the writer's), regions.

        Live memory on a CPU; elsewhere a staging copy (see `download` and `upload`).
        """
        size = contract.HEADER_BYTES + 3 * self.parameters * self.dtype.itemsize
        return memoryview(self._image)[:size]

    def download(self) -> None:
        """Bring the image up to date with the device; nothing to do on a CPU."""
        if self.device.type != "cpu":
            for host, live in zip(self._host, self._live(), strict=True):
                host.copy_(live)

    def upload(self) -> None:
        """Bring the device up to date with the image; nothing to do on a CPU."""
        if self.device.type != "cpu":
            for host, live in zip(self._host, self._live(), strict=True):
                live.copy_(host)

    def host_regions(self) -> Regions:
        """Weights, m and v on the CPU: the live memory there, else a fresh copy of the device."""
        self.download()
        return self._host

    def check_table(self, tensors: Sequence[contract.Tensor]) -> None:
        """Raises StateError unless a state with the table `tensors` belongs to this model."""
        _check_table(tensors)
        names = {tensor.name for tensor in tensors}
        if names != self._by_name.keys():
            raise StateError(
                f"saved state: unknown tensors {sorted(names - self._by_name.keys())}, missing"
                f" {sorted(self._by_name.keys() - names)}; it belongs to another model"
            )
        for tensor in tensors:
            wanted = self._by_name[tensor.name]
            if (tensor.shape, tensor.orientation) != (wanted.shape, wanted.orientation):
                raise StateError(
                    f"saved state: {tensor.name} is {tensor.shape} ({tensor.orientation}), this"
                    f" model has {wanted.shape} ({wanted.orientation}); start a new run to change"
                    " the model"
                )

    def load(self, tensors: Sequence[contract.Tensor], saved: Regions) -> None:
        """Take over a saved state whose own table is `tensors`, tensor by tensor, by name.

        A model that orders its tensors otherwise gets each tensor's own weights and moments.
        Raises StateError, before anything is written, for a missing or unknown name, another
        shape or orientation, or regions of another length or dtype.
        """
        self._check_fits(tensors, saved)
        for source, live in zip(saved, self._live(), strict=True):
            for tensor in tensors:
                part = source[tensor.offset : tensor.offset + tensor.size]
                self.view(live, tensor.name).copy_(part.view(tensor.shape))

    def _live(self) -> Regions:
        return Regions(self.weights, self.first_moments, self.second_moments)

    def _check_fits(self, tensors: Sequence[contract.Tensor], saved: Regions) -> None:
        self.check_table(tensors)
        for name, region in zip(Regions._fields, saved, strict=True):
            if region.dtype != self.dtype or region.shape != (self.parameters,):
                raise StateError(
                    f"saved state: {name} is {region.dtype} {tuple(region.shape)}, expected"
                    f" {self.dtype} {(self.parameters,)}"
                )


def _check_table(tensors: Sequence[contract.Tensor]) -> None:
    """Names occur once and the tensors follow each other without gap or overlap."""
    offset = 0
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise StateError(f"tensor {tensor.name} occurs twice in the table")
        if tensor.offset != offset:
            raise StateError(f"tensor {tensor.name} starts at {tensor.offset}, expected {offset}")
        seen.add(tensor.name)
        offset += tensor.size


def _page_aligned(size_bytes: int) -> mmap.mmap:
    """Zeroed private memory of whole pages: what direct I/O wants, at no cost to torch."""
    pages = -(-size_bytes // mmap.PAGESIZE)
    return mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _regions_of(image: mmap.mmap, parameters: int, dtype: torch.dtype) -> Regions:
    flat = torch.frombuffer(image, dtype=dtype, count=3 * parameters, offset=contract.HEADER_BYTES)
    return Regions(*flat.chunk(3))


def _is_view(view: torch.Tensor, buffer: torch.Tensor, where: contract.Tensor) -> bool:
    return (
        view.data_ptr() == buffer.data_ptr() + where.offset * buffer.element_size()
        and view.shape == where.shape
        and view.is_contiguous()
    )
