"""Rotated values in four bits that unpack by one shift and one mask.

A Hadamard rotation makes the channels of a token look normal (QuaRot, arXiv 2404.00456); they are rounded to the
uniform grid of 16 points that is best for the normal distribution (Max, IRE Transactions on Information Theory 6,
1960), under one 8-bit scale per token. Its squared error is a fifth above that of Lloyd-Max levels, which hardly shows
in values, and where those are looked up one by one, shifts and masks take many codes at a time: half the time.

The two halves of a token's coordinates lie in the low and the high halves of its bytes. The grid's offset and step,
the rotation and the scales are applied to the sums and the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from ..attention import matmul, rows
from ..attention.rows import Rows, nibbles, token_scales
from ..errors import ConfigError
from .codec import Codec, Fit, Part, check_bits
from .lloyd import token_logarithms
from .rotation import rotation

_HALF = 8
_STEP = 0.3352


class Nibble(Codec):
    """States in 4 bits per number, and one 8-bit scale per token."""

    name = "nibble"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, [4])

    def __repr__(self) -> str:
        return f"{self.name} 4"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        if width % 2:
            raise ConfigError(f"codec {self.name!r} needs an even width, got {width}")
        return [Part(block_size, width // 2, torch.int8), Part(block_size, 1, torch.int8, is_scale=True)]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        turned = states @ rotation(states.shape[-1], states.dtype, states.device)
        scales = token_logarithms(turned)
        turned.div_(token_scales(scales, turned.dtype)[..., None] * _STEP)
        low, high = turned.floor_().clamp_(-_HALF, _HALF - 1).to(torch.int8).chunk(2, -1)
        return [(low + _HALF) | (high << 4), scales[..., None]]

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        codes, scales = parts
        turned = rows.weighted_sum(weights.to(dtype), Nibbles(codes), scales)
        if turned is None:
            scaled = weights * token_scales(scales, weights.dtype).transpose(1, 2)
            halves = [matmul.weighted_sum(scaled.to(dtype), half) for half in _halves(codes, dtype)]
            turned = torch.cat(halves, -1).to(weights.dtype).add_(scaled.sum(-1, keepdim=True), alpha=0.5)
        turned = turned.to(weights.dtype)
        return turned @ (rotation(turned.shape[-1], turned.dtype, turned.device).T * _STEP)

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        codes, scales = parts
        precise = torch.promote_types(dtype, torch.float32)
        turned = Nibbles(codes).decode(precise).mul_(token_scales(scales, precise) * _STEP)
        return (turned @ rotation(turned.shape[-1], precise, turned.device).T).to(dtype)


class Nibbles(NamedTuple):
    """The points of the grid, -7.5 to 7.5, ``[heads, tokens, width]``; see `attention.rows.Packed`."""

    codes: Int8[Tensor, "heads tokens bytes"]

    def rows(self, _: torch.dtype) -> Rows:
        """See `attention.rows.Packed`."""
        return nibbles(self.codes)

    def decode(self, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        """See `attention.rows.Packed`."""
        return torch.cat(_halves(self.codes, dtype), -1).add_(0.5)


def _halves(codes: Int8[Tensor, "heads tokens bytes"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes, -8 to 7, of the first and the second half of the coordinates, ``[heads, tokens, width / 2]`` each."""
    return (codes & 15).sub_(_HALF).to(dtype), (codes >> 4).to(dtype)
