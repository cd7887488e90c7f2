"""The update: learning rate, clipping by the global norm, AdamW.

What may live here: the arithmetic that turns a gradient into the next weights. It reads no clock
and draws nothing.

Invariants:
- A gradient or loss that is not finite stops before the update: weights, moments and the count of
  updates are as they were.
- The clip uses one norm over all tensors. That norm is the norm of the per-tensor norms: one
  float32 norm over the flat vector is off by 1% at 98.7M parameters.
- `updates` counts updates, never forward passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from trainer.flat import Flat

BETA1: Final = 0.9
BETA2: Final = 0.999
EPSILON: Final = 1e-8

# torch's guard in clip_grad_norm_ against a division by zero; the same, to get the same bits.
_CLIP_GUARD: Final = 1e-6

SCHEDULES: Final = ("constant", "cosine")


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    schedule: str,
    horizon_steps: int,
    minimum_ratio: float,
) -> float:
    """The rate of the update about to be made when `step` updates are done (t counts from 0).

        peak * min(1, (t + 1) / warmup_steps) * decay(min(1, t / horizon_steps))

    with decay(x) = 1 for "constant" and r + (1 - r) * (1 + cos(pi * x)) / 2 for "cosine", r being
    `minimum_ratio`. The horizon is measured from t = 0, the warm-up included (ANDREA's schedule: a
    warm-up multiplier times a cosine; the cosine is SGDR's, arXiv 1608.03983, without restarts).
    At t = horizon_steps the rate is r * peak, and it stays there: a run that is made longer under
    the same horizon goes on at the minimum, without a jump. Raises ValueError for values that
    define no schedule.
    """
    if step < 0 or warmup_steps < 0:
        raise ValueError(f"step {step} and warmup_steps {warmup_steps} must not be negative")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}, expected one of {SCHEDULES}")
    warmth = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    if schedule == "constant":
        return peak * warmth
    if horizon_steps < 1:
        raise ValueError(f"horizon_steps is {horizon_steps}, expected at least 1 for a cosine")
    if not 0.0 <= minimum_ratio <= 1.0:
        raise ValueError(f"minimum_ratio is {minimum_ratio}, expected 0 to 1")
    progress = min(1.0, step / horizon_steps)
    decay = minimum_ratio + (1.0 - minimum_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * warmth * decay


class NonFinite(ArithmeticError):
    """The loss or a gradient is not finite. Nothing was updated.

    `update` is the number of the update that was refused, `tensors` the names whose gradient norm
    is not finite (empty when only the loss is, or only the sum over finite norms overflows).
    """

    def __init__(self, update: int, loss: float, norm: float, tensors: tuple[str, ...]) -> None:
        where = f" in {', '.join(tensors)}" if tensors else ""
        super().__init__(
            f"update {update} refused before it changed anything: loss {loss}, gradient norm"
            f" {norm}{where}; expected finite values. The same settings come to the same update:"
            " go back to a checkpoint before it with a lower learning_rate (supervisor rollback"
            " --to-step STEP --policy FILE, where FILE has it in [training])"
        )
        self.update = update
        self.loss = loss
        self.norm = norm
        self.tensors = tensors


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Euclidean norms before clipping: of the whole gradient, and by tensor in table order."""

    total: float
    per_tensor: tuple[float, ...]


class AdamW:
    """AdamW over flat buffers (arXiv 1711.05101): beta 0.9 and 0.999, epsilon 1e-8.

        theta <- theta * (1 - rate * decay)
        theta <- theta - rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

    The decay is decoupled from the moments and applies to every parameter. The moments live in
    `flat`; `updates` (t) is the only other state and is set on resume.
    """

    def __init__(self, flat: Flat, updates: int = 0) -> None:
        self.flat = flat
        self.updates = updates
        self._state_step = torch.zeros((), dtype=torch.float32, device=flat.device)

    def update(
        self, *, learning_rate: float, weight_decay: float, clip_norm: float, loss: float
    ) -> GradientNorms:
        """Clip the gradient to `clip_norm` (infinity: never) and make one update with it.

        `loss` is the value that the gradient belongs to. Returns the norms before clipping; the
        gradients hold the clipped ones after. Raises NonFinite before anything has changed.
        """
        if not clip_norm > 0.0:
            raise ValueError(f"clip_norm is {clip_norm}, expected a positive number or infinity")
        norms, factor = self._measure(clip_norm)
        if not (math.isfinite(loss) and math.isfinite(norms.total)):
            names = (
                tensor.name
                for tensor, norm in zip(self.flat.tensors, norms.per_tensor, strict=True)
                if not math.isfinite(norm)
            )
            raise NonFinite(self.updates + 1, loss, norms.total, tuple(names))
        if factor < 1.0:
            self.flat.gradients.mul_(factor)
        self.updates += 1
        self._apply(learning_rate, weight_decay)
        return norms

    def _measure(self, clip_norm: float) -> tuple[GradientNorms, float]:
        """The norms and the clip's factor min(1, c / (norm + 1e-6)), in one transfer to the host.

        The factor is computed in the gradient's own precision: that gives clip_grad_norm_'s bits.
        """
        per_tensor = torch.stack(torch._foreach_norm(self.flat.gradient_views))
        total = torch.linalg.vector_norm(per_tensor)
        factor = torch.clamp(clip_norm / (total + _CLIP_GUARD), max=1.0)
        *parts, whole, scale = torch.cat((per_tensor, torch.stack((total, factor)))).tolist()
        return GradientNorms(whole, tuple(parts)), scale

    def _apply(self, learning_rate: float, weight_decay: float) -> None:
        # Filled from the exact integer: a float32 counter that is incremented sticks at 2^24.
        self._state_step.fill_(self.updates)
        torch._fused_adamw_(
            [self.flat.weights],
            [self.flat.gradients],
            [self.flat.first_moments],
            [self.flat.second_moments],
            [],
            [self._state_step],
            lr=learning_rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
