"""Rotated states in the Lloyd-Max levels of the normal distribution, one 8-bit scale per token.

A Hadamard rotation makes the channels of a token look normal, whatever they were (QuaRot, arXiv 2404.00456); then
these levels are the best there are for one number at a time. Keys are centred by one vector per head, learned at the
beginning of the sequence; values are not, because the value of an attention sink is close to zero and carries the
largest weights.

Levels come out of one table look-up per symbol of two or four coordinates. Queries are rotated instead of keys, the
output instead of the values, and the scales are applied to scores and weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from ..attention import matmul
from ..attention.rows import token_scales
from ..errors import ConfigError
from .centring import round_learned
from .codec import Codec, Fit, Part, check_bits
from .levels import Levels, nearest_symbols
from .packing import pack, plane_shapes
from .rotation import rotation

# Coordinates that share a symbol, by bits. A table of symbols must fit a core's smallest cache to be read fast.
_TOGETHER = {2: 4, 3: 4, 4: 2}


class LloydValues(Codec):
    """Values in 2, 3 or 4 bits per number, and one 8-bit scale per token."""

    name = "lloyd"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, [2, 3, 4])
        self.bits = (bits,) * _TOGETHER[bits]

    def __repr__(self) -> str:
        return f"{self.name} {self.bits[0]}"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        together = len(self.bits)
        if width % together:
            raise ConfigError(f"codec {self.name!r} needs a width that is a multiple of {together}, got {width}")
        planes = plane_shapes(width // together, sum(self.bits))
        return [
            *(Part(block_size, count, plane) for count, plane in planes),
            Part(block_size, 1, torch.int8, is_scale=True),
        ]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        turned = states @ rotation(states.shape[-1], states.dtype, states.device)
        symbols, scales = code_tokens(turned, self.bits)
        return [*pack(symbols, sum(self.bits)), scales[..., None]]

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        *planes, scales = parts
        turned = matmul.weighted_sum(weights, self._levels(planes), scales, dtype).to(weights.dtype)
        return turned @ rotation(turned.shape[-1], turned.dtype, turned.device).T

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, scales = parts
        precise = torch.promote_types(dtype, torch.float32)
        turned = self._levels(planes).decode(precise).mul_(token_scales(scales, precise))
        return (turned @ rotation(turned.shape[-1], precise, turned.device).T).to(dtype)

    def _levels(self, planes: Sequence[Tensor]) -> Levels:
        # Of symbols of 8 or 12 bits the first plane has one element each.
        return Levels(planes, (self.bits,), planes[0].shape[-1])


class LloydKeys(LloydValues):
    """Keys as the values, without the vector they are centred by."""

    def fit(
        self, states: Float[Tensor, "heads tokens width"], query_squares: Float[Tensor, "heads width"] | None
    ) -> dict[str, Tensor]:
        return {"mean": round_learned(states.mean(1))}

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        return super().encode(states - fit["mean"][:, None, None], fit)

    def prepare(self, query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, ...]:
        precise = query.to(fit["mean"].dtype)
        turned = precise @ rotation(query.shape[-1], precise.dtype, query.device)
        return turned.to(query.dtype), precise @ fit["mean"][..., None]

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        turned, of_mean = prepared
        *planes, scales = parts
        return matmul.scores(turned, self._levels(planes), scales).to(of_mean.dtype) + of_mean

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        return super().decode(parts, fit, fit["mean"].dtype).add_(fit["mean"][:, None]).to(dtype)


def token_logarithms(turned: Float[Tensor, "*blocks tokens width"]) -> Int8[Tensor, "*blocks tokens"]:
    """The root mean square of each token, as its base-2 logarithm in eighths: from 2**-16 to 2**16."""
    return (turned.square().mean(-1).clamp_min_(1e-18).log2_() * 4).round_().clamp_(-128, 127).to(torch.int8)


def code_tokens(
    turned: Float[Tensor, "*blocks tokens width"], bits: Sequence[int]
) -> tuple[Int32[Tensor, "*blocks tokens symbols"], Int8[Tensor, "*blocks tokens"]]:
    """Lloyd-Max symbols of ``len(bits)`` coordinates each, and the logarithm of each token's scale.

    All coordinates of `turned` have unit variance, up to one scale per token: its root mean square, rounded as it is
    stored before the token is coded under it. Fitting the scale to the chosen levels and coding again would take 1 to
    3 % off the squared error, and double the time.
    """
    logarithms = token_logarithms(turned)
    return nearest_symbols(turned / token_scales(logarithms, turned.dtype)[..., None], bits), logarithms
