"""The default codec: bits go to the key channels whose error attention sees most.

Keys. The error of a score is the error of each key channel times the query in that channel. Channels differ by orders
of magnitude in both, so the channels of a head are ranked by (variance of the key x mean square of the query), cut
into four classes, and a class gets more bits the higher it ranks, as reverse water-filling asks (Cover and Thomas,
Elements of Information Theory, section 10.3). Within a block a channel's mean is stored apart, as KIVI's per-channel
layout does in effect (arXiv 2402.02750): what is left has a smaller range. Each class is rotated by a Hadamard
matrix, which makes it look normal (QuaRot, arXiv 2404.00456), and coded by the Lloyd-Max levels of the normal
distribution under one scale per token.

Values. Every channel matters alike: one rotation, one scale per token, Lloyd-Max levels. They are not centred,
because the value of an attention sink is close to zero and carries the largest weights.

Reading. Levels come out of one table look-up per symbol (one index per class). Queries are rotated instead of keys,
the output instead of the values, and the scales are applied to scores and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from ..attention import matmul
from ..errors import ConfigError
from .codec import Codec, Fit, Part, check_bits
from .levels import join, look_up, nearest_index, nearest_level
from .packing import pack, plane_shapes, unpack
from .rotation import rotation

# Bits of the four classes of key channels, and of the values, by nominal bits.
_KEY_BITS = {2: (4, 3, 2, 1), 3: (5, 3, 3, 2), 4: (6, 5, 4, 3)}
_CLASSES = 4

# A block's mean is stored in 4 bits, as steps of a third of the channel's deviation from the fitted mean. What the
# rounding leaves is in the residuals, whose energy it raises by under 1 %.
_MEAN_BITS = 4
_STEPS_PER_DEVIATION = 3


class MixedKeys(Codec):
    """Keys in 2.5, 3.25 or 4.5 bits per number, and 3/16 for scales and means (at a head size of 64)."""

    name = "mixed"
    wants_queries = True

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, list(_KEY_BITS))
        self.bits = _KEY_BITS[bits]

    def __repr__(self) -> str:
        return f"mixed {'/'.join(map(str, self.bits))}"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        if width % _CLASSES:
            raise ConfigError(f"codec {self.name!r} needs a key width that is a multiple of {_CLASSES}, got {width}")
        planes = plane_shapes(width // _CLASSES, sum(self.bits))
        means = plane_shapes(width, _MEAN_BITS)
        return [
            *(Part(block_size, count, plane) for count, plane in planes),
            Part(block_size, 1, torch.int8, is_scale=True),
            *(Part(1, count, plane, is_scale=True) for count, plane in means),
        ]

    def fit(
        self, states: Float[Tensor, "heads tokens width"], query_squares: Float[Tensor, "heads width"] | None
    ) -> dict[str, Tensor]:
        mean = states.mean(1)
        step = ((states - mean[:, None]).square().mean(1).sqrt() / _STEPS_PER_DEVIATION).clamp_min(1e-6)
        # What is left once each part of the sequence is centred by itself.
        pieces = [piece - piece.mean(1, keepdim=True) for piece in states.split(64, dim=1)]
        variance = torch.cat(pieces, dim=1).square().mean(1)
        seen = torch.ones_like(variance) if query_squares is None else query_squares
        order = (variance * seen).argsort(-1, descending=True)
        classes = variance.gather(-1, order).unflatten(-1, (_CLASSES, -1))
        scale = classes.mean(-1).sqrt().clamp_min(1e-6)
        # Rounded so that the queries' products with them are as exact as any in bfloat16.
        rounded = {"mean": mean, "step": step, "scale": scale}
        return {"order": order} | {name: each.to(torch.bfloat16).to(states.dtype) for name, each in rounded.items()}

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        half = 1 << (_MEAN_BITS - 1)
        mean, step = fit["mean"][:, None], fit["step"][:, None]
        means = ((states.mean(2) - mean) / step).round_().clamp_(-half, half - 1)
        residual = states - torch.addcmul(mean, means, step)[:, :, None]
        turned = (residual.flatten(1, 2) @ (self._basis(fit) / self._scales(fit))).view_as(states)
        symbols, scales = code_tokens(turned, self.bits)
        stored_means = pack(means.add_(half).to(torch.int32)[:, :, None], _MEAN_BITS)
        return [*pack(symbols, sum(self.bits)), scales[..., None], *stored_means]

    def prepare(self, query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, ...]:
        precise = query.to(fit["mean"].dtype)
        turned = (precise @ self._basis(fit)).mul_(self._scales(fit))
        steps = precise * fit["step"][:, None]
        base = (precise @ fit["mean"][..., None]).sub_(steps.sum(-1, keepdim=True), alpha=1 << (_MEAN_BITS - 1))
        return turned.to(query.dtype), steps, base

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        turned, steps, base = prepared
        *planes, scales, means = parts
        width = turned.shape[-1]
        symbols = unpack(planes, sum(self.bits), width // _CLASSES)
        products = matmul.scores(turned, look_up(symbols, self.bits, turned.dtype))
        products = products.to(steps.dtype, memory_format=torch.contiguous_format)
        products.mul_(token_scales(scales, steps.dtype).transpose(1, 2))
        of_means = unpack([means], _MEAN_BITS, width).to(steps.dtype)
        by_block = torch.baddbmm(base, steps, of_means.transpose(1, 2))
        products.unflatten(-1, (means.shape[1], -1)).add_(by_block[..., None])
        return products

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, scales, means = parts
        precise, width = fit["mean"].dtype, fit["mean"].shape[-1]
        symbols = unpack(planes, sum(self.bits), width // _CLASSES)
        levels = look_up(symbols, self.bits, precise).mul_(token_scales(scales, precise))
        states = (levels * self._scales(fit)) @ self._basis(fit).transpose(1, 2)
        steps = unpack([means], _MEAN_BITS, width).to(precise).sub_(1 << (_MEAN_BITS - 1))
        centres = fit["mean"][:, None] + steps * fit["step"][:, None]
        states.unflatten(1, (means.shape[1], -1)).add_(centres[:, :, None])
        return states.to(dtype)

    @staticmethod
    def _basis(fit: Fit) -> Float[Tensor, "heads width width"]:
        """Orthonormal columns: the rotations of the classes, one coordinate of each class after the other."""
        mean, order = fit["mean"], fit["order"]
        width = mean.shape[-1]
        turns = _class_rotations(width, mean.dtype, mean.device).expand(order.shape[0], -1, -1)
        return torch.empty_like(turns).scatter_(1, order[..., None].expand(-1, -1, width), turns)

    @staticmethod
    def _scales(fit: Fit) -> Float[Tensor, "heads 1 width"]:
        """The scale of each coordinate."""
        return fit["scale"].repeat(1, fit["mean"].shape[-1] // _CLASSES)[:, None]


@lru_cache(maxsize=16)
def _class_rotations(width: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "width width"]:
    """Row ``c * n + i`` is channel i of class c; column ``j * classes + c`` is coordinate j of class c."""
    turn = rotation(width // _CLASSES, dtype, device)
    blocks: Tensor = torch.block_diag(*[turn] * _CLASSES)
    interleaved: Tensor = blocks.unflatten(1, (_CLASSES, -1)).transpose(1, 2).reshape(width, width)
    return interleaved


class RotatedValues(Codec):
    """Values in 2, 3 or 4 bits per number, and one 8-bit scale per token."""

    name = "mixed"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, [2, 3, 4])
        self.bits = (bits,) * 4

    def __repr__(self) -> str:
        return f"rotated {self.bits[0]}"

    def check(self, width: int, block_size: int) -> None:
        if width % 4:
            raise ConfigError(f"codec {self.name!r} needs a value width that is a multiple of 4, got {width}")

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        planes = plane_shapes(width // 4, sum(self.bits))
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
        levels = look_up(unpack(planes, sum(self.bits), planes[0].shape[-1]), self.bits, dtype)
        scaled = weights * token_scales(scales, weights.dtype).transpose(1, 2)
        turned = matmul.weighted_sum(scaled.to(dtype), levels).to(weights.dtype)
        return turned @ rotation(turned.shape[-1], turned.dtype, turned.device).T

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *planes, scales = parts
        precise = torch.promote_types(dtype, torch.float32)
        levels = look_up(unpack(planes, sum(self.bits), planes[0].shape[-1]), self.bits, precise)
        turned = levels * token_scales(scales, precise)
        return (turned @ rotation(turned.shape[-1], precise, turned.device).T).to(dtype)


def code_tokens(
    turned: Float[Tensor, "*blocks tokens width"], bits: Sequence[int]
) -> tuple[Int32[Tensor, "*blocks tokens symbols"], Int8[Tensor, "*blocks tokens"]]:
    """Lloyd-Max symbols of ``len(bits)`` coordinates each, and the logarithm of each token's scale.

    All coordinates of `turned` have unit variance, up to one scale per token. The scale starts as the token's root
    mean square, is replaced by the one that fits the chosen levels best (least squares), and the token is coded again.
    It is stored as its base-2 logarithm in eighths, which reaches from 2**-16 to 2**16.
    """
    parts = turned.unflatten(-1, (-1, len(bits))).movedim(-1, 0).contiguous()
    logarithm = (turned.square().mean(-1).clamp_min_(1e-18).log2_() * 4).round_().clamp_(-128, 127)
    scaled = parts * torch.exp2(logarithm * -0.125)[..., None]
    along, square = torch.zeros_like(logarithm), torch.full_like(logarithm, 1e-18)
    for part, each, width in zip(parts, scaled, bits, strict=True):
        levels = nearest_level(each, width)
        along += torch.linalg.vecdot(part, levels)
        square += torch.linalg.vecdot(levels, levels)
    logarithm = along.div_(square).clamp_min_(1e-9).log2_().mul_(8).round_().clamp_(-128, 127)
    scaled = torch.mul(parts, torch.exp2(logarithm * -0.125)[..., None], out=scaled)
    indices = [nearest_index(each, width) for each, width in zip(scaled, bits, strict=True)]
    return join(indices, bits), logarithm.to(torch.int8)


def token_scales(logarithms: Int8[Tensor, "heads tokens 1"], dtype: torch.dtype) -> Float[Tensor, "heads tokens 1"]:
    """The scales that `code_tokens` stored."""
    return torch.exp2(logarithms.to(dtype) * 0.125)
