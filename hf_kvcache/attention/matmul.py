"""The two products of attention for few queries over a long history, in the call shape that is fastest.

On CPU the shape of the call is worth a factor of two to four (measured over 30 cold layers of 8,192 tokens, two
cores): a batched product of bf16 queries with transposed keys copies a strided history first, the same product with
the keys on the left does not; a float32 product per head leaves one of two cores idle unless the history is cut
into pieces.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_PIECES = 8
_PIECES_FROM_TOKENS = 2048


def scores(
    query: Float[Tensor, "heads queries width"], keys: Float[Tensor, "heads tokens width"]
) -> Float[Tensor, "heads queries tokens"]:
    """Products of every query with every key, unscaled."""
    if query.device.type != "cpu":
        return torch.bmm(query, keys.transpose(1, 2))
    if query.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2)
    tokens = keys.shape[1]
    if tokens < _PIECES_FROM_TOKENS:
        return torch.bmm(query, keys.transpose(1, 2))
    out = query.new_empty(query.shape[0], query.shape[1], tokens)
    even = tokens // _PIECES * _PIECES
    for head, (head_query, head_keys) in enumerate(zip(query, keys, strict=True)):
        pieces = head_keys[:even].view(_PIECES, -1, keys.shape[2])
        product = torch.bmm(head_query.expand(_PIECES, -1, -1), pieces.transpose(1, 2))
        out[head, :, :even].view(-1, _PIECES, even // _PIECES).copy_(product.transpose(0, 1))
        if even < tokens:
            torch.mm(head_query, head_keys[even:].t(), out=out[head, :, even:])
    return out


def weighted_sum(
    weights: Float[Tensor, "heads queries tokens"], values: Float[Tensor, "heads tokens width"]
) -> Float[Tensor, "heads queries width"]:
    """Sums of the values, weighted by each query's row."""
    tokens = values.shape[1]
    if values.device.type != "cpu" or values.dtype in (torch.bfloat16, torch.float16) or tokens < _PIECES_FROM_TOKENS:
        return torch.bmm(weights, values)
    even = tokens // _PIECES * _PIECES
    sums = []
    for head_weights, head_values in zip(weights, values, strict=True):
        cut = head_weights[:, :even].reshape(-1, _PIECES, even // _PIECES).transpose(0, 1)
        total = torch.bmm(cut, head_values[:even].view(_PIECES, -1, values.shape[2])).sum(0)
        if even < tokens:
            total = torch.addmm(total, head_weights[:, even:], head_values[even:])
        sums.append(total)
    return torch.stack(sums)
