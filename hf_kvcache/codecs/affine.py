"""The layout of transformers' own quantized cache, as a baseline: per token, a zero point and a scale for 64 channels.

No rotation, nothing centred: one channel that sticks out takes the grid from the 63 others of its group. What is
stored for the zero point is the middle of the range, so that the grid lies around zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float16
from torch import Tensor

from .codec import Codec, Fit, Part, check_bits
from .grouped import apply_scales, group_count, scaled_scores, scaled_sum
from .midpoints import code, code_parts, points, scale_of, to_half
from .packing import pack


class Affine(Codec):
    """States in 2 to 8 bits per number, and 32 bits for each token and group of channels."""

    name = "affine"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, range(2, 9))
        self.bits = bits

    def __repr__(self) -> str:
        return f"{self.name} {self.bits}"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        groups = group_count(width)
        scale = Part(block_size, groups, torch.float16, is_scale=True)
        return [*code_parts(self.name, width, block_size, self.bits), scale, scale]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        grouped = states.unflatten(-1, (group_count(states.shape[-1]), -1))
        middles, scales = range_of(grouped, -1, self.bits)
        codes = code(grouped - middles.to(states.dtype), scales, self.bits)
        return [*pack(codes.flatten(-2), self.bits), scales.squeeze(-1), middles.squeeze(-1)]

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        (query,) = prepared
        *planes, scales, middles = parts
        products = scaled_scores(query, points(planes, self.bits, query.dtype), scales)
        sums = query.to(products.dtype).unflatten(-1, (middles.shape[-1], -1)).sum(-1)
        return torch.baddbmm(products, sums, middles.to(products.dtype).transpose(1, 2))

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        *planes, scales, middles = parts
        sums = scaled_sum(weights, points(planes, self.bits, dtype), scales)
        sums.unflatten(-1, (middles.shape[-1], -1)).add_((weights @ middles.to(weights.dtype))[..., None])
        return sums

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, scales, middles = parts
        precise = torch.promote_types(dtype, torch.float32)
        states = apply_scales(points(planes, self.bits, precise), scales)
        states.unflatten(-1, (middles.shape[-1], -1)).add_(middles.to(precise)[..., None])
        return states.to(dtype)


def range_of(
    states: Float[Tensor, "*shape"], axis: int, bits: int
) -> tuple[Float16[Tensor, "*reduced"], Float16[Tensor, "*reduced"]]:
    """The middles of the ranges along an axis, and the scales of a grid that reaches from end to end; axes are kept."""
    lowest, highest = states.aminmax(dim=axis, keepdim=True)
    middles = to_half((lowest + highest) / 2)
    return middles, scale_of((highest - lowest) / ((1 << bits) - 1), bits)
