"""One byte per number by plain conversion, as baselines: signed integers, and the 8-bit float of accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .codec import Codec, Fit, Part, check_bits
from .grouped import apply_scales, scaled_scores, scaled_sum
from .midpoints import to_half
from .packing import take

_LARGEST_INTEGER = 127
_UNIT = 1 / 128
_LARGEST_FLOAT = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = 2.0**-24


class Int8(Codec):
    """States as 128ths, signed, and one scale in 16 bits per token: its largest number becomes 127.

    Whole numbers would overflow float16 in products.
    """

    name = "int8"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, [8])

    def __repr__(self) -> str:
        return self.name

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        return [Part(block_size, width, torch.int8), Part(block_size, 1, torch.float16, is_scale=True)]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        largest = states.abs().amax(-1, keepdim=True)
        scales = to_half((largest / (_LARGEST_INTEGER * _UNIT)).clamp_min(_SMALLEST_SCALE))
        integers = (states / (scales.to(states.dtype) * _UNIT)).round_().clamp_(-_LARGEST_INTEGER, _LARGEST_INTEGER)
        return [integers.to(torch.int8), scales]

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        (query,) = prepared
        integers, scales = parts
        return scaled_scores(query, _fractions(integers, query.dtype), scales)

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        integers, scales = parts
        return scaled_sum(weights, _fractions(integers, dtype), scales)

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        integers, scales = parts
        return apply_scales(_fractions(integers, torch.promote_types(dtype, torch.float32)), scales).to(dtype)


def _fractions(integers: Integer[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    return integers.to(dtype).mul_(_UNIT)


class Fp8(Codec):
    """States as floats of 4 exponent and 3 mantissa bits, and one scale in 32 bits per head and block.

    The bytes are kept as such, and read by a look-up: on a CPU the conversion of torch takes many times as long.
    """

    name = "fp8"

    def __init__(self, bits: int) -> None:
        check_bits(self.name, bits, [8])

    def __repr__(self) -> str:
        return self.name

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        return [Part(block_size, width, torch.uint8), Part(1, 1, torch.float32, is_scale=True)]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        scales = (states.abs().amax((2, 3), keepdim=True) / _LARGEST_FLOAT).clamp_min_(_SMALLEST_SCALE).float()
        floats = (states / scales).clamp_(-_LARGEST_FLOAT, _LARGEST_FLOAT).to(torch.float8_e4m3fn)
        return [floats.view(torch.uint8), scales]

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        floats, scales = parts
        precise = torch.promote_types(dtype, torch.float32)
        states = take(_numbers(precise, floats.device), floats.contiguous())
        states.unflatten(1, (scales.shape[1], -1)).mul_(scales.to(precise)[..., None])
        return states.to(dtype)


@lru_cache(maxsize=16)
def _numbers(dtype: torch.dtype, device: torch.device) -> Float[Tensor, " bytes"]:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype).to(device)
