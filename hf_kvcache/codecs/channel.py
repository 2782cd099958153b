"""KIVI's layout (arXiv 2402.02750), as a baseline: keys per channel over a block's tokens, values per token.

Outliers of keys keep to their channels, so a zero point and a scale per channel hold them off the others. Values have
no such channels, and are stored as in `affine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .affine import Affine, range_of
from .codec import Codec, Fit, Part, check_bits
from .midpoints import code, code_parts, points
from .packing import pack


class ChannelKeys(Codec):
    """Keys in 2 to 8 bits per number, and 32 bits for each channel and block."""

    name = "channel"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, range(2, 9))
        self.bits = bits

    def __repr__(self) -> str:
        return f"per channel {self.bits}"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        scale = Part(1, width, torch.float16, is_scale=True)
        return [*code_parts(self.name, width, block_size, self.bits), scale, scale]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        middles, scales = range_of(states, 2, self.bits)
        return [*pack(code(states - middles.to(states.dtype), scales, self.bits), self.bits), scales, middles]

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, scales, middles = parts
        precise = torch.promote_types(dtype, torch.float32)
        states = points(planes, self.bits, precise)
        blocks = states.unflatten(1, (scales.shape[1], -1))
        blocks.mul_(scales.to(precise)[:, :, None]).add_(middles.to(precise)[:, :, None])
        return states.to(dtype)


class ChannelValues(Affine):
    """Values in 2 to 8 bits per number, and 32 bits for each token and group of channels."""

    name = "channel"

    def __repr__(self) -> str:
        return f"per token {self.bits}"
