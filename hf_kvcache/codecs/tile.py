"""Rotated tiles with even variance along both axes, which is the idea of KVarN (arXiv 2606.03458).

The tile of a head and block is rotated along the channels; then its tokens and its channels are divided in turn by
their root mean squares, until both have the same everywhere. What is left is coded in Lloyd-Max levels, where KVarN
rounds to a grid between extremes. The scales of tokens and channels are stored as 8-bit logarithms. Keys are centred
by the means of their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from ..attention import matmul
from ..attention.rows import token_scales
from .codec import Fit, Part
from .lloyd import LloydValues, code_tokens
from .packing import pack
from .rotation import rotation

_ROUNDS = 8


class Tile(LloydValues):
    """States in 2, 3 or 4 bits per number, and 8 bits for each token and for each channel of a block."""

    name = "tile"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        return [*super().parts(width, block_size, dtype), Part(1, width, torch.int8, is_scale=True)]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        turned = states @ rotation(states.shape[-1], states.dtype, states.device)
        channels = even_channels(turned)
        symbols, tokens = code_tokens(turned / token_scales(channels, turned.dtype), self.bits)
        return [*pack(symbols, sum(self.bits)), tokens[..., None], channels]

    def prepare(self, query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, ...]:
        precise = query.to(torch.promote_types(query.dtype, torch.float32))
        return ((precise @ rotation(query.shape[-1], precise.dtype, query.device)).to(query.dtype),)

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        (turned,) = prepared
        *planes, tokens, channels = parts
        return matmul.scores(turned, self._even(planes, channels, turned.dtype), tokens)

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        *planes, tokens, channels = parts
        turned = matmul.weighted_sum(weights, self._even(planes, channels, dtype), tokens, dtype).to(weights.dtype)
        return turned @ rotation(turned.shape[-1], turned.dtype, turned.device).T

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, tokens, channels = parts
        precise = torch.promote_types(dtype, torch.float32)
        turned = self._even(planes, channels, precise).mul_(token_scales(tokens, precise))
        return (turned @ rotation(turned.shape[-1], precise, turned.device).T).to(dtype)

    def _even(
        self, planes: Sequence[Tensor], channels: Int8[Tensor, "heads blocks width"], dtype: torch.dtype
    ) -> Float[Tensor, "heads tokens width"]:
        """Rotated states up to the scales of the tokens."""
        levels = self._levels(planes).decode(dtype)
        levels.unflatten(1, (channels.shape[1], -1)).mul_(token_scales(channels, dtype)[:, :, None])
        return levels


def even_channels(
    tiles: Float[Tensor, "heads blocks tokens width"],
) -> Int8[Tensor, "heads blocks 1 width"]:
    """The scales by which to divide channels so that all have one root mean square once the tokens have, as logarithms.

    Base 2, in eighths; what they have in common is left to the scales of the tokens.
    """
    squares = tiles.square() + 1e-18
    channels = squares.mean(2, keepdim=True)
    for _ in range(_ROUNDS):
        tokens = (squares / channels).mean(3, keepdim=True)
        channels = (squares / tokens).mean(2, keepdim=True)
    logarithms = channels.log2_().mul_(4)
    return (logarithms - logarithms.mean(3, keepdim=True)).round_().clamp_(-128, 127).to(torch.int8)
