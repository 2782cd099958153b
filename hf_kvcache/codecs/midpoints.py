"""The uniform grid without a zero: the odd multiples of ``2**-bits`` between -1 and 1, under a scale.

Up to 8 bits its points are exact in bfloat16 and float16, and within 1, so that no product of them overflows float16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float16, Int32
from torch import Tensor

from ..errors import ConfigError
from .codec import Part
from .packing import plane_bits, plane_shapes, unpack

# The step that codes a standard normal number with the least mean squared error (Max, IRE Transactions on Information
# Theory 6, 1960). With more bits than these nothing is gained by cutting off what is far out.
_NORMAL_STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352}
_LARGEST_HALF = torch.finfo(torch.float16).max
_SMALLEST_HALF = 2.0**-24


def code_parts(name: str, width: int, block_size: int, bits: int) -> list[Part]:
    """The arrays that hold the codes of a block.

    Raises:
        ConfigError: The codes of a token would not fill whole bytes.
    """
    if width % 8:
        raise ConfigError(f"codec {name!r} needs a width that is a multiple of 8, got {width}")
    return [Part(block_size, count, plane) for count, plane in plane_shapes(width, bits)]


def best_scale(states: Float[Tensor, "*groups width"], bits: int) -> Float16[Tensor, "*groups"]:
    """The scale of each group for a grid around zero: from 5 bits on the one that just reaches the largest number.

    With fewer bits it is the best one for a normal distribution where that is smaller, and then replaced by the one
    that fits the chosen points best (least squares).
    """
    half = _half(bits)
    step = states.abs().amax(-1) / half
    if bits in _NORMAL_STEP:
        step = torch.minimum(step, states.square().mean(-1).sqrt() * _NORMAL_STEP[bits]).clamp_min_(1e-30)
        points = (states / step[..., None]).add_(half).round_().clamp_(0, 2 * half).sub_(half)
        step = torch.linalg.vecdot(states, points) / points.square().sum(-1)
    return scale_of(step, bits)


def scale_of(step: Float[Tensor, "*shape"], bits: int) -> Float16[Tensor, "*shape"]:
    """The scale under which neighbouring points are a step apart, as it is stored."""
    return to_half(step / _unit(bits))


def to_half(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """Numbers in float16, the largest instead of infinity."""
    return numbers.clamp(-_LARGEST_HALF, _LARGEST_HALF).to(torch.float16)


def code(states: Float[Tensor, "*shape"], scale: Float16[Tensor, "*per_group"], bits: int) -> Int32[Tensor, "*shape"]:
    """The number of the nearest point for each state; `scale`, as it is stored, is broadcast."""
    half = _half(bits)
    step = scale.to(states.dtype).clamp_min_(_SMALLEST_HALF) * _unit(bits)
    return (states / step).add_(half).round_().clamp_(0, 2 * half).to(torch.int32)


def points(planes: Sequence[Tensor], bits: int, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
    """The points of packed codes."""
    width = planes[0].shape[-1] * 8 // plane_bits(bits)[0]
    numbers = (planes[0] if bits == 8 else unpack(planes, bits, width)).to(dtype)
    lowest = torch.full((), -_half(bits) * _unit(bits), dtype=dtype, device=numbers.device)
    return torch.add(lowest, numbers, alpha=_unit(bits), out=numbers)


def _half(bits: int) -> float:
    return ((1 << bits) - 1) / 2


def _unit(bits: int) -> float:
    """The distance of neighbouring points: a power of two."""
    return 2.0 ** (1 - bits)
