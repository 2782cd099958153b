"""The two products of attention for few queries over a long history, in the call shape that is fastest.

On CPU the shape of the call is worth a factor of two to four. Measured over 30 cold layers of 8,192 tokens, three
heads of width 64, two cores: bf16 queries times transposed keys 1.0 ms, because a strided history is copied first; the
same product with the keys on the left 0.3 ms. In float32 the plain product is the best of those tried (0.45 ms for
the keys, 0.6 ms for the values; cutting the history into pieces that fit a core's cache gained less than it cost).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def scores(
    query: Float[Tensor, "heads queries width"], keys: Float[Tensor, "heads tokens width"]
) -> Float[Tensor, "heads queries tokens"]:
    """Products of every query with every key, unscaled."""
    if query.device.type == "cpu" and query.element_size() == 2:
        return torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(query, keys.transpose(1, 2))


def weighted_sum(
    weights: Float[Tensor, "heads queries tokens"], values: Float[Tensor, "heads tokens width"]
) -> Float[Tensor, "heads queries width"]:
    """Sums of the values, weighted by each query's row."""
    return torch.bmm(weights, values)
