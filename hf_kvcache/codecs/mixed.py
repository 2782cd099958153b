"""The default codec: bits go to the key channels whose error attention sees most.

Keys. The error of a score is the error of each key channel times the query in that channel. Channels differ by orders
of magnitude in both, so the channels of a head are ranked by (variance of the key x mean square of the query), cut
into four classes, and a class gets more bits the higher it ranks, as reverse water-filling asks (Cover and Thomas,
Elements of Information Theory, section 10.3). The means of a block's channels are stored apart. Each class is rotated
by a Hadamard matrix, which makes it look normal (QuaRot, arXiv 2404.00456), and coded by the Lloyd-Max levels of the
normal distribution under one scale per token.

Values. Every channel matters alike: see `nibble`, and for fewer bits `lloyd`.

Reading. Levels come out of table look-ups: one per symbol, which holds one index of each of two or four classes.
Queries are rotated instead of keys, and the scales are applied to scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import matmul
from ..attention.rows import token_scales
from ..errors import ConfigError
from .centring import add_mean_scores, block_means, centre, fit_means, mean_parts, prepare_means, round_learned
from .codec import Codec, Fit, Part, check_bits
from .levels import Levels, nearest_symbols
from .lloyd import token_logarithms
from .packing import pack, plane_shapes
from .rotation import rotation

# Bits of the four classes of key channels by nominal bits: classes in one bracket share a symbol. The table of a symbol
# must fit a core's smallest cache to be read fast.
_KEY_BITS = {2: ((4, 3, 2, 1),), 3: ((5, 3, 3, 2),), 4: ((6, 4), (5, 3))}
_CLASSES = 4


class MixedKeys(Codec):
    """Keys in 2.5, 3.25 or 4.5 bits per number, and 3/16 for scales and means (at a head size of 64)."""

    name = "mixed"
    wants_queries = True

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, list(_KEY_BITS))
        self.symbols = _KEY_BITS[bits]

    def __repr__(self) -> str:
        return f"mixed {'/'.join(map(str, sorted(sum(self.symbols, ()), reverse=True)))}"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        if width % _CLASSES:
            raise ConfigError(f"codec {self.name!r} needs a key width that is a multiple of {_CLASSES}, got {width}")
        planes = [plane for bits in self.symbols for plane in plane_shapes(width // _CLASSES, sum(bits))]
        return [
            *(Part(block_size, count, plane) for count, plane in planes),
            Part(block_size, 1, torch.int8, is_scale=True),
            *mean_parts(width),
        ]

    def fit(
        self, states: Float[Tensor, "heads tokens width"], query_squares: Float[Tensor, "heads width"] | None
    ) -> dict[str, Tensor]:
        # What is left once each part of the sequence is centred by itself.
        pieces = [piece - piece.mean(1, keepdim=True) for piece in states.split(64, dim=1)]
        variance = torch.cat(pieces, dim=1).square().mean(1)
        seen = torch.ones_like(variance) if query_squares is None else query_squares
        ranking = (variance * seen).argsort(-1, descending=True)
        bits = sum(self.symbols, ())
        ranks = [sorted(bits, reverse=True).index(each) + bits[:place].count(each) for place, each in enumerate(bits)]
        order = ranking.unflatten(-1, (_CLASSES, -1))[:, ranks].flatten(1)
        classes = variance.gather(-1, order).unflatten(-1, (_CLASSES, -1))
        scale = classes.mean(-1).sqrt().clamp_min(1e-6)
        return {"order": order, "scale": round_learned(scale)} | fit_means(states)

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        residual, means = centre(states, fit)
        turned = (residual.flatten(1, 2) @ (self._basis(fit) / self._scales(fit))).view_as(states)
        scales = token_logarithms(turned)
        turned.div_(token_scales(scales, turned.dtype)[..., None])
        planes: list[Tensor] = []
        for part, bits in zip(turned.chunk(len(self.symbols), -1), self.symbols, strict=True):
            planes += pack(nearest_symbols(part, bits), sum(bits))
        return [*planes, scales[..., None], *means]

    def prepare(self, query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, ...]:
        precise = query.to(fit["mean"].dtype)
        width, symbols = precise.shape[-1], len(self.symbols)
        ranked = precise.gather(-1, fit["order"][:, None].expand(-1, precise.shape[1], -1))
        turned = ranked @ _class_rotations(width, symbols, precise.dtype, precise.device)
        turned.unflatten(-1, (symbols, width // _CLASSES, -1)).mul_(self._symbol_scales(fit)[:, None])
        return turned.to(query.dtype), *prepare_means(precise, fit)

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        turned, *of_means = prepared
        *planes, scales, means = parts
        products = matmul.scores(turned, self._levels(planes, turned.shape[-1]), scales)
        precise = products.to(fit["mean"].dtype, memory_format=torch.contiguous_format)
        return add_mean_scores(precise, of_means, means)

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, scales, means = parts
        precise, width = fit["mean"].dtype, fit["mean"].shape[-1]
        levels = self._levels(planes, width).decode(precise).mul_(token_scales(scales, precise))
        states = (levels * self._scales(fit)) @ self._basis(fit).transpose(1, 2)
        states.unflatten(1, (means.shape[1], -1)).add_(block_means(means, fit)[:, :, None])
        return states.to(dtype)

    def _levels(self, planes: Sequence[Tensor], width: int) -> Levels:
        return Levels(planes, self.symbols, width // _CLASSES)

    def _basis(self, fit: Fit) -> Float[Tensor, "heads width width"]:
        """Orthonormal columns: the rotations of the classes, in the order of the levels."""
        mean, order = fit["mean"], fit["order"]
        width = mean.shape[-1]
        turns = _class_rotations(width, len(self.symbols), mean.dtype, mean.device).expand(order.shape[0], -1, -1)
        return torch.empty_like(turns).scatter_(1, order[..., None].expand(-1, -1, width), turns)

    def _symbol_scales(self, fit: Fit) -> Float[Tensor, "heads symbols 1 places"]:
        """The scale of each class, by the symbol and the place in it."""
        of_symbols: Tensor = fit["scale"].unflatten(1, (len(self.symbols), 1, -1))
        return of_symbols

    def _scales(self, fit: Fit) -> Float[Tensor, "heads 1 width"]:
        """The scale of each coordinate, in the order of the levels."""
        scales: Tensor = self._symbol_scales(fit).expand(-1, -1, fit["mean"].shape[-1] // _CLASSES, -1).flatten(1)
        return scales[:, None]


@lru_cache(maxsize=16)
def _class_rotations(
    width: int, symbols: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "width width"]:
    """Row ``c * n + i`` is channel i of class c. Columns go through the symbols, their coordinates, their classes."""
    turn = rotation(width // _CLASSES, dtype, device)
    blocks: Tensor = torch.block_diag(*[turn] * _CLASSES)
    interleaved: Tensor = blocks.unflatten(1, (symbols, _CLASSES // symbols, -1)).transpose(2, 3)
    basis: Tensor = interleaved.reshape(width, width)
    return basis
