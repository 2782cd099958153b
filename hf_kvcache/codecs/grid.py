"""Rotated states on a uniform grid, for 5 bits and more: close to exact, and cheap to read.

A Hadamard rotation spreads outliers over all channels (QuaRot, arXiv 2404.00456), so that one scale per token, and per
64 channels of a wide head, fits all of them. Keys are centred by the means of their blocks; values are not, because
the value of an attention sink is close to zero and carries the largest weights.

Queries are rotated instead of keys, the output instead of the values, and the scales are applied to scores and weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .codec import Codec, Fit, Part, check_bits
from .grouped import apply_scales, group_count, scaled_scores, scaled_sum
from .midpoints import best_scale, code, code_parts, points
from .packing import pack
from .rotation import rotation


class Grid(Codec):
    """States in 2 to 8 bits per number, and 16 bits for the scale of each token and group of channels."""

    name = "grid"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, range(2, 9))
        self.bits = bits

    def __repr__(self) -> str:
        return f"grid {self.bits}"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        return [
            *code_parts(self.name, width, block_size, self.bits),
            Part(block_size, group_count(width), torch.float16, is_scale=True),
        ]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        width = states.shape[-1]
        grouped = (states @ rotation(width, states.dtype, states.device)).unflatten(-1, (group_count(width), -1))
        scales = best_scale(grouped, self.bits)
        return [*pack(code(grouped, scales[..., None], self.bits).flatten(-2), self.bits), scales]

    def prepare(self, query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, ...]:
        precise = query.to(torch.promote_types(query.dtype, torch.float32))
        return ((precise @ rotation(query.shape[-1], precise.dtype, query.device)).to(query.dtype),)

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        (turned,) = prepared
        *planes, scales = parts
        return scaled_scores(turned, points(planes, self.bits, turned.dtype), scales)

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        *planes, scales = parts
        turned = scaled_sum(weights, points(planes, self.bits, dtype), scales)
        return turned @ rotation(turned.shape[-1], turned.dtype, turned.device).T

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, scales = parts
        precise = torch.promote_types(dtype, torch.float32)
        turned = apply_scales(points(planes, self.bits, precise), scales)
        return (turned @ rotation(turned.shape[-1], precise, turned.device).T).to(dtype)
