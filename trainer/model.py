"""The decoder: what it is made of, where its tensors lie, and the loss of a batch.

What may live here: shapes and the forward pass. No files, no devices chosen, no update.

    hidden = token embedding + position embedding
    per layer:  hidden += output(attention(norm(hidden)))
                hidden += down(gelu(up(norm(hidden))))
    logits = head(norm(hidden))

The norm is the root mean square over the width and has nothing to learn; there are no biases and
the head is not tied to the embedding, so a model has 2*V*d + T*d + 12*L*d^2 parameters.

Invariants:
- Building a model draws nothing from the global generators: weights come from an own one, on the
  CPU and in the order of the table, so a seed gives the same weights on every device.
- In training, dropout is the only user of the global generator of the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from supervisor import contract
from trainer.corpus import IGNORED_TARGET
from trainer.flat import Flat

_INITIAL_DEVIATION: Final = 0.02
_RESIDUAL_OUTPUTS: Final = (".attention.output", ".mlp.down")
_MLP_RATIO: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a decoder. Raises ValueError with the field and what it must be."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    context: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "heads", "layers", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}, expected at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"model.width is {self.width}, expected a multiple of model.heads ({self.heads})"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}, expected 0 <= dropout < 1")

    @property
    def parameters(self) -> int:
        """2*V*d + T*d + 12*L*d^2, without allocating anything."""
        embeddings = (2 * self.vocabulary + self.context) * self.width
        return embeddings + 12 * self.layers * self.width**2


def tensor_table(shape: Shape) -> tuple[contract.Tensor, ...]:
    """Every tensor of the flat vector in its order: name, shape, orientation, offset.

    The order is the checkpoint's: token embedding, position embedding, per layer attention (query,
    key, value, output) then MLP (up, down), output head. Allocates nothing.
    """
    table: list[contract.Tensor] = []
    offset = 0
    for name, rows, columns, orientation in _matrices(shape):
        table.append(contract.Tensor(name, (rows, columns), orientation, offset))
        offset += rows * columns
    return tuple(table)


def _matrices(shape: Shape) -> Iterator[tuple[str, int, int, str]]:
    width, inner = shape.width, _MLP_RATIO * shape.width
    yield "token_embedding", shape.vocabulary, width, "token,width"
    yield "position_embedding", shape.context, width, "position,width"
    for layer in range(shape.layers):
        for part in ("query", "key", "value", "output"):
            yield f"layers.{layer}.attention.{part}", width, width, "out,in"
        yield f"layers.{layer}.mlp.up", inner, width, "out,in"
        yield f"layers.{layer}.mlp.down", width, inner, "out,in"
    yield "output_head", shape.vocabulary, width, "out,in"


def build(
    shape: Shape,
    device: torch.device,
    *,
    seed: int | None,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """A decoder on fresh buffers, its views proven.

    `seed` None leaves the weights zero, for a resume that loads them. Raises ContractError when
    the parameters do not fit a checkpoint.
    """
    flat = Flat(tensor_table(shape), device, dtype)
    if seed is not None:
        initialise(flat, shape, seed)
    decoder = Decoder(shape, flat)
    decoder.assert_views()
    return decoder


def initialise(flat: Flat, shape: Shape, seed: int) -> None:
    """Weights from N(0, 0.02); the two products that write into the residual stream are scaled by
    1/sqrt(2L) so that its variance does not grow with depth (GPT-2, section 2.3)."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in flat.tensors:
        residual = tensor.name.endswith(_RESIDUAL_OUTPUTS)
        deviation = _INITIAL_DEVIATION / (math.sqrt(2 * shape.layers) if residual else 1.0)
        drawn = torch.empty(tensor.shape, dtype=flat.dtype)
        drawn.normal_(0.0, deviation, generator=generator)
        flat.view(flat.weights, tensor.name).copy_(drawn)


class Decoder(nn.Module):
    """The model over the buffers `flat`; made by `build`."""

    def __init__(self, shape: Shape, flat: Flat) -> None:
        super().__init__()
        self.shape = shape
        self.flat = flat
        self.token_embedding = flat.bind("token_embedding")
        self.position_embedding = flat.bind("position_embedding")
        self.layers = nn.ModuleList(Layer(shape, flat, number) for number in range(shape.layers))
        self.output_head = flat.bind("output_head")

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed cross entropy of a batch, and how many targets it has.

        `tokens` and `targets` are int64 of shape (B, T) with T <= context; a target of -100 counts
        for nothing. Returns the sum in nats (float32, differentiable) and the count (int64), both
        of shape (); nothing waits for the device. The mean loss of an update is the sum over its
        micro-batches divided by their total count, however the targets are spread over them.
        """
        logits = F.linear(self._hidden(tokens), self.output_head).flatten(0, 1)
        # In float32 under autocast too: torch never computes a cross entropy in bfloat16.
        loss = F.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
        )
        return loss, (targets != IGNORED_TARGET).sum()

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token, for generation: (B, T, V) for `tokens` (B, T).

        With `positions` (int64, (B,)) only those of one position of each row: (B, V). Rows of
        different lengths are padded on the right; causal attention never looks at the padding.
        """
        hidden = self._hidden(tokens)
        if positions is not None:
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), positions]
        return F.linear(hidden, self.output_head).to(self.flat.dtype)

    def assert_views(self) -> None:
        """Prove that every parameter and gradient still lies in the flat buffers."""
        self.flat.assert_views(self.parameters())

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.shape.context:
            raise ValueError(
                f"a window of {length} tokens exceeds model.context ({self.shape.context})"
            )
        hidden = F.embedding(tokens, self.token_embedding) + self.position_embedding[:length]
        hidden = F.dropout(hidden, self.shape.dropout, self.training)
        for layer in self.layers:
            hidden = layer(hidden)
        return _norm(hidden)


class Layer(nn.Module):
    """Causal attention and an MLP, each added to the stream it reads; (B, T, d) to (B, T, d)."""

    def __init__(self, shape: Shape, flat: Flat, number: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        attention, mlp = f"layers.{number}.attention", f"layers.{number}.mlp"
        self.query_key_value = flat.bind(
            f"{attention}.query", f"{attention}.key", f"{attention}.value"
        )
        self.output = flat.bind(f"{attention}.output")
        self.up = flat.bind(f"{mlp}.up")
        self.down = flat.bind(f"{mlp}.down")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = F.linear(self._attend(_norm(hidden)), self.output)
        hidden = hidden + F.dropout(attended, self.dropout, self.training)
        inner = F.gelu(F.linear(_norm(hidden), self.up))
        return hidden + F.dropout(F.linear(inner, self.down), self.dropout, self.training)

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        joined = F.linear(hidden, self.query_key_value)
        heads = joined.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:])
