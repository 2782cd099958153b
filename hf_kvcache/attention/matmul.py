"""The two products of attention for few queries over a long history, in the way that is fastest.

On CPU that is the C code of `rows`, where it was compiled and covers the case. Of torch's calls the shape is worth a
factor of two to four. Measured over 30 cold layers of 8,192 tokens, three
heads of width 64, two cores: bf16 queries times transposed keys 1.0 ms, because a strided history is copied first; the
same product with the keys on the left 0.3 ms. In float32 the plain product is the best of those tried (0.45 ms for
the keys, 0.6 ms for the values; cutting the history into pieces that fit a core's cache gained less than it cost).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from . import rows
from .rows import Logarithms, Packed, token_scales

# Tokens converted at once: bounds the memory, and costs nothing.
_CONVERTED_TOKENS = 2048


@lru_cache(maxsize=16)
def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which queries and weights meet a history of `dtype`.

    That is its own, but float32 for 16 bits on a processor without AVX-512: torch has no fast product of 16-bit numbers
    there, and converting the history, part by part, is three to eight times faster (two cores, 8,192 tokens, three
    heads of width 64: keys 0.8 instead of 2.5 ms, values 0.8 instead of 7.8 ms).
    """
    slow = device.type == "cpu" and dtype.itemsize == 2 and torch.backends.cpu.get_cpu_capability() != "AVX512"
    return torch.float32 if slow else dtype


def scores(
    query: Float[Tensor, "heads queries width"],
    keys: Float[Tensor, "heads tokens width"] | Packed,
    scales: Logarithms | None = None,
) -> Float[Tensor, "heads queries tokens"]:
    """Products of every query with every key, in its dtype; times their scales, if any, in float32 or better."""
    products = rows.scores(query, keys, scales)
    if products is not None:
        return products
    if not isinstance(keys, Tensor):
        keys = keys.decode(query.dtype)
    if keys.dtype == query.dtype:
        products = _product(query, keys)
    elif keys.shape[1] <= _CONVERTED_TOKENS:
        products = _product(query, keys.to(query.dtype))
    else:
        products = torch.cat([_product(query, part.to(query.dtype)) for part in keys.split(_CONVERTED_TOKENS, 1)], -1)
    if scales is None:
        return products
    precise = torch.promote_types(query.dtype, torch.float32)
    return products.to(precise) * token_scales(scales, precise).transpose(1, 2)


def weighted_sum(
    weights: Float[Tensor, "heads queries tokens"],
    values: Float[Tensor, "heads tokens width"] | Packed,
    scales: Logarithms | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "heads queries width"]:
    """Sums of the values (times their scales), weighted by each query's row, in `dtype` or else the weights' dtype."""
    precise, weights = weights, weights if dtype is None else weights.to(dtype)
    sums = rows.weighted_sum(weights, values, scales)
    if sums is not None:
        return sums
    if not isinstance(values, Tensor):
        values = values.decode(weights.dtype)
    if scales is not None:
        weights = (precise * token_scales(scales, precise.dtype).transpose(1, 2)).to(weights.dtype)
    if values.dtype != weights.dtype:
        if values.shape[1] <= _CONVERTED_TOKENS:
            return torch.bmm(weights, values.to(weights.dtype))
        parts = zip(weights.split(_CONVERTED_TOKENS, 2), values.split(_CONVERTED_TOKENS, 1), strict=True)
        total = weights.new_zeros(*weights.shape[:2], values.shape[2])
        for part, held in parts:
            total.baddbmm_(part, held.to(weights.dtype))
        return total
    return torch.bmm(weights, values)


def _product(query: Tensor, keys: Tensor) -> Tensor:
    if query.device.type == "cpu" and query.element_size() == 2:
        return torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(query, keys.transpose(1, 2))
