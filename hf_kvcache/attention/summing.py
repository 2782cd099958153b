"""Attention that also tells what every token received of it.

No kernel returns its weights, and computing them a second time costs about as much as attention itself. Here they are
computed once, for some queries at a time: their products with the keys, a softmax, its sums, and the sums of values.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Scores computed at once, but those of some queries in any case: what bounds the memory. Measured on one core for
# 1,024 and 2,048 tokens (9 heads of width 64, float32): twice or half as many take up to a fifth longer.
_MOST_SCORES = 1 << 19
_LEAST_QUERIES = 32


def attend_summing(
    query: Float[Tensor, "rows query_heads queries key_width"],
    keys: Float[Tensor, "rows heads tokens key_width"],
    values: Float[Tensor, "rows heads tokens value_width"],
    mask: Bool[Tensor, "any_rows any_heads any_queries any_tokens"]
    | Float[Tensor, "any_rows any_heads any_queries any_tokens"]
    | None,
    scale: float,
    hidden: Bool[Tensor, "rows heads tokens"] | None = None,
    padding: Bool[Tensor, "rows queries"] | None = None,
) -> tuple[Float[Tensor, "rows query_heads queries value_width"], Float[Tensor, "rows heads tokens"]]:
    """Attention of the queries of the last tokens, and its weights, added up.

    Args:
        query: The queries; their number of heads is a multiple of that of the keys.
        keys: The history.
        values: The same.
        mask: Broadcastable to ``[rows, query_heads, queries, tokens]``; True or 0 where a query may look. None where
            each sees all tokens up to its own.
        scale: Factor on the scores.
        hidden: Tokens that no query sees; None for none.
        padding: Queries that count for nothing; None for none.

    Returns:
        Attention, in the dtype of the queries; zeros for a query that may look nowhere. And the weights of each token,
        added up over the queries and over the query heads of a key head, in float32 or better.
    """
    rows, heads, tokens, _ = keys.shape
    query_heads, count = query.shape[1:3]
    precise = torch.promote_types(query.dtype, torch.float32)
    # Rows and heads are one dimension, and so are the queries of the heads that share keys.
    across = keys.to(precise).flatten(0, 1).transpose(1, 2)
    values = values.to(precise).flatten(0, 1)
    grouped = query.to(precise).mul(scale).unflatten(1, (heads, -1)).flatten(0, 1)
    output = query.new_empty(*grouped.shape[:3], values.shape[2])
    sums = across.new_zeros(rows * heads, tokens)
    step = min(max(_MOST_SCORES // (rows * query_heads * tokens), _LEAST_QUERIES), count)
    room = across.new_empty(2, rows * query_heads * step * tokens)
    later = torch.ones(step, step, dtype=torch.bool, device=query.device).triu(1)
    for begin in range(0, count, step):
        size = min(step, count - begin)
        seen = tokens if mask is not None else tokens - count + begin + size
        part = grouped[:, :, begin : begin + size].flatten(1, 2)
        shape = (*part.shape[:2], seen)
        scores, weights = (each[: math.prod(shape)].view(shape) for each in room)
        torch.bmm(part, across[..., :seen], out=scores)
        by_query = scores.view(rows, heads, -1, size, seen)
        if mask is None:
            by_query[..., seen - size :].masked_fill_(later[:size, :size], -torch.inf)
        else:
            _hide(by_query, mask if mask.shape[2] == 1 else mask[:, :, begin : begin + size])
        if hidden is not None:
            by_query.masked_fill_(hidden[:, :, None, None, :seen], -torch.inf)
        torch.softmax(scores, dim=-1, out=weights)
        if mask is not None or hidden is not None:
            weights.nan_to_num_(nan=0.0)
        if padding is not None:
            weights.view_as(by_query).masked_fill_(padding[:, None, None, begin : begin + size, None], 0.0)
        sums[:, :seen] += weights.sum(1)
        output[:, :, begin : begin + size] = torch.bmm(weights, values[:, :seen]).unflatten(1, (-1, size))
    return output.view(rows, query_heads, count, -1), sums.view(rows, heads, tokens)


def _hide(scores: Tensor, mask: Tensor) -> None:
    """Apply a mask ``[rows, query_heads, queries, tokens]`` to scores ``[rows, heads, groups, queries, tokens]``."""
    by_group = mask.unflatten(1, scores.shape[1:3] if mask.shape[1] > 1 else (1, 1))
    if mask.dtype == torch.bool:
        scores.masked_fill_(by_group.logical_not(), -torch.inf)
    else:
        scores.add_(by_group)
