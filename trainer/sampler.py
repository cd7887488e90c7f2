"""The order in which one arm's windows are taken: permutation, cursor, round, own generator.

What may live here: drawing window numbers, and the exact state of that. It never sees a token.

Invariants:
- Every window is taken exactly once a round, in batches of at most `batch`; the last one of a
  round may be short.
- The cursor counts windows, moves when they are drawn, and stays at the end of a finished round:
  the next permutation is made by the next draw, so a state saved in between loses and repeats
  nothing.
- Only the sampler's own generator is used, and only to make a permutation.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
from array import array
from typing import Any, Final

import torch

from supervisor.contract import Json

_FIELDS: Final = ("permutation", "cursor", "round", "generator", "windows", "batch")


class SamplerError(ValueError):
    """A saved sampler state that does not fit this sampler, or is damaged."""


class Sampler:
    """Draws batches of window numbers of one arm, for ever, round after round.

    The stream is a function of the seed, the arm's name and the number of windows alone. After
    `restore(state())` it continues with the draw that would have come next.
    """

    def __init__(self, arm: str, windows: int, batch: int, seed: int) -> None:
        if windows < 1 or batch < 1:
            raise ValueError(f"arm {arm}: {windows} windows, batch {batch}; expected at least 1")
        self.arm = arm
        self.windows = windows
        self.batch = batch
        self._generator = torch.Generator().manual_seed(_derived_seed(seed, arm))
        self._permutation = array("I")
        self._cursor = 0
        self._round = 0
        self._encoded: dict[str, str] | None = None
        self._begin_round(0)

    def draw(self) -> list[int]:
        """The next batch: 1 to `batch` window numbers."""
        if self._cursor == self.windows:
            self._begin_round(self._round + 1)
        drawn = self._permutation[self._cursor : self._cursor + self.batch].tolist()
        self._cursor += len(drawn)
        return drawn

    @property
    def draws(self) -> int:
        """Batches drawn since the first."""
        a_round = -(-self.windows // self.batch)
        return self._round * a_round + -(-self._cursor // self.batch)

    @property
    def rounds(self) -> int:
        """Rounds that were finished before this one."""
        return self._round

    def taken(self) -> list[int]:
        """The windows taken in this round, in the order in which they were."""
        return self._permutation[: self._cursor].tolist()

    def state(self) -> Json:
        """Everything that decides the next draw, as JSON values.

        `permutation` is base64 of little-endian uint32, `generator` of torch's generator state.
        Both change once a round, and are encoded once a round: a million windows take 50 ms.
        """
        if self._encoded is None:
            self._encoded = {
                "permutation": _encode_permutation(self._permutation),
                "generator": base64.b64encode(bytes(self._generator.get_state().tolist())).decode(),
            }
        return {
            **self._encoded,
            "cursor": self._cursor,
            "round": self._round,
            "windows": self.windows,
            "batch": self.batch,
        }

    def restore(self, state: Any) -> None:
        """Continue where `state` was taken. Raises SamplerError and then changes nothing."""
        body = self._checked(state)
        permutation = self._parse_permutation(body["permutation"])
        generator = self._parse_generator(body["generator"])
        cursor = self._whole(body["cursor"], "cursor")
        if cursor > self.windows or (cursor % self.batch and cursor != self.windows):
            raise SamplerError(
                f"arm {self.arm}: sampler cursor is {cursor}, expected a multiple of batch"
                f" {self.batch} up to {self.windows}, or {self.windows}"
            )
        self._round = self._whole(body["round"], "round")
        self._cursor = cursor
        self._permutation = permutation
        self._generator = generator
        self._encoded = None

    def _begin_round(self, number: int) -> None:
        order = torch.randperm(self.windows, generator=self._generator)
        self._permutation = array("I", order.tolist())
        self._round = number
        self._cursor = 0
        self._encoded = None

    def _checked(self, state: Any) -> Json:
        if not isinstance(state, dict):
            raise SamplerError(f"arm {self.arm}: sampler state is {state!r}, expected an object")
        missing = [name for name in _FIELDS if name not in state]
        unknown = sorted(str(name) for name in state if name not in _FIELDS)
        if missing or unknown:
            raise SamplerError(
                f"arm {self.arm}: sampler state is missing [{', '.join(missing)}],"
                f" has unknown [{', '.join(unknown)}]"
            )
        for name, ours in (("windows", self.windows), ("batch", self.batch)):
            if self._whole(state[name], name) != ours:
                raise SamplerError(
                    f"arm {self.arm}: sampler state was saved with {name} {state[name]}, this run"
                    f" has {ours}; a run continues only with the data and batch it began with"
                )
        return state

    def _parse_permutation(self, text: Any) -> array[int]:
        content = self._decode(text, "permutation")
        permutation = array("I", content[: len(content) // 4 * 4])
        if sys.byteorder == "big":
            permutation.byteswap()
        seen = bytearray(self.windows)
        for number in permutation:
            if number < self.windows:
                seen[number] = 1
        if len(content) != 4 * self.windows or not all(seen):
            raise SamplerError(
                f"arm {self.arm}: sampler permutation does not hold each of {self.windows} windows"
                f" once, 4 bytes each (it has {len(content)} bytes)"
            )
        return permutation

    def _parse_generator(self, text: Any) -> torch.Generator:
        content = self._decode(text, "generator")
        generator = torch.Generator()
        try:
            generator.set_state(torch.tensor(list(content), dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:  # torch's words for a wrong size or content
            raise SamplerError(f"arm {self.arm}: sampler generator: {error}") from error
        return generator

    def _decode(self, text: Any, field: str) -> bytes:
        if not isinstance(text, str):
            raise SamplerError(f"arm {self.arm}: sampler {field} is {text!r}, expected base64")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise SamplerError(f"arm {self.arm}: sampler {field}: not base64 ({error})") from error

    def _whole(self, value: Any, field: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SamplerError(
                f"arm {self.arm}: sampler {field} is {value!r}, expected a whole number"
            )
        return value


def _derived_seed(seed: int, arm: str) -> int:
    """A seed of its own for each arm, so that no arm's order depends on which others exist."""
    found = hashlib.sha256(f"{seed}:{arm}".encode()).digest()[:8]
    return int.from_bytes(found, "big") & (2**63 - 1)


def _encode_permutation(permutation: array[int]) -> str:
    if sys.byteorder == "big":
        permutation = permutation[:]
        permutation.byteswap()
    return base64.b64encode(permutation.tobytes()).decode()
