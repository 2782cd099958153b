"""No encoding: states as they are. For layers that must not lose anything, and to prove everything around codecs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .codec import Codec, Fit, Part


class Exact(Codec):
    """States bit for bit, whatever the bits asked for."""

    name = "exact"
    exact = True

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __repr__(self) -> str:
        return "exact"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        return [Part(block_size, width, dtype)]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        return [states]

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        return parts[0].to(dtype)
