"""The least time a decode step takes: its bytes come through one memory bus, its operations through one processor."""

from __future__ import annotations

from typing import NamedTuple

from ..units import positive
from .capacity import Planned, largest
from .compute import model_work, step_flops
from .gpus import Gpu
from .weights import step_weight_bytes


class Step(NamedTuple):
    """One decode step of a batch, on one rank."""

    weight_bytes: float
    """Weights it reads: once for all rows."""
    cache_bytes: int
    """Keys, values and states it reads: every row its own."""
    flops: float
    """Operations of all rows; of several ranks an equal part."""

    @property
    def read_bytes(self) -> float:
        """All that it reads."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte. Below a GPU's flops / bandwidth, the bandwidth decides."""
        return self.flops / self.read_bytes

    def bound_seconds(self, gpu: Gpu) -> float | None:
        """No step on this GPU is faster; None for a GPU of unknown speed."""
        if gpu.bandwidth is None or gpu.flops is None:
            return None
        return max(self.read_bytes / gpu.bandwidth, self.flops / gpu.flops)


def decode_step(planned: Planned, tokens: int, rows: int = 1) -> Step:
    """What the step that brings every text to `tokens` tokens reads and computes."""
    positive(rows, "a batch size")
    return Step(
        step_weight_bytes(planned.shape, planned.weights_dtype, rows, planned.ranks),
        rows * _row_bytes(planned, tokens),
        rows * step_flops(model_work(planned.shape), tokens) / planned.ranks,
    )


def cache_outweighs_weights(planned: Planned, rows: int = 1) -> int | None:
    """The length from which a step reads more cache than weights; None if it is beyond 2^24 tokens."""
    weights = step_weight_bytes(planned.shape, planned.weights_dtype, rows, planned.ranks)
    edge = largest(lambda tokens: rows * _row_bytes(planned, tokens) / weights, most=2**24)
    return None if edge == 2**24 else edge + 1


def _row_bytes(planned: Planned, tokens: int) -> int:
    return sum(group.layers * group.read_bytes for group in planned.groups(tokens))
