"""The least time a decode step takes: its bytes come through one memory bus, its operations through one processor."""

from __future__ import annotations

from typing import NamedTuple

from .compute import model_work, step_flops
from .formula import visible_bytes
from .gpus import Gpu
from .shapes import ModelShape
from .units import positive
from .weights import active_parameters, weight_bits


class Step(NamedTuple):
    """One decode step of a batch."""

    weight_bytes: float
    """Weights it reads: once for all rows."""
    cache_bytes: float
    """Keys, values and states it reads: every row its own."""
    flops: float
    """Operations of all rows."""

    @property
    def intensity(self) -> float:
        """Operations per byte. Below a GPU's flops / bandwidth, the bandwidth decides."""
        return self.flops / (self.weight_bytes + self.cache_bytes)

    def bound_seconds(self, gpu: Gpu) -> float | None:
        """No step on this GPU is faster; None for a GPU of unknown speed."""
        if gpu.bandwidth is None or gpu.flops is None:
            return None
        return max((self.weight_bytes + self.cache_bytes) / gpu.bandwidth, self.flops / gpu.flops)


def decode_step(shape: ModelShape, tokens: int, rows: int = 1, weights_dtype: str = "bfloat16") -> Step:
    """What the step at `tokens` tokens reads and computes, whichever exact cache is used."""
    positive(rows, "a batch size")
    return Step(
        active_parameters(shape, rows) * weight_bits(weights_dtype) / 8,
        visible_bytes(shape.config, shape.dtype, tokens, rows),
        rows * step_flops(model_work(shape), tokens),
    )


def cache_outweighs_weights(shape: ModelShape, rows: int = 1, weights_dtype: str = "bfloat16") -> int | None:
    """The length from which a step reads more cache than weights; None if it is beyond 2^30 tokens."""
    low, high = 1, 2**30
    if not _outweighs(decode_step(shape, high, rows, weights_dtype)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _outweighs(decode_step(shape, middle, rows, weights_dtype)) else (middle + 1, high)
    return low


def _outweighs(step: Step) -> bool:
    return step.cache_bytes > step.weight_bytes
