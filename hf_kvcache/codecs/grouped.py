"""Products with numbers under one scale per token and group of channels; scales are applied to scores and weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import matmul

_MOST_CHANNELS = 64


def group_count(width: int) -> int:
    """Into how few groups of equal size, of at most 64 channels each, a width can be cut."""
    count = -(-width // _MOST_CHANNELS)
    while width % count:
        count += 1
    return count


def apply_scales(
    numbers: Float[Tensor, "heads tokens width"], scales: Float[Tensor, "heads tokens groups"]
) -> Float[Tensor, "heads tokens width"]:
    """The numbers, times their scales in place."""
    numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.to(numbers.dtype)[..., None])
    return numbers


def scaled_scores(
    query: Float[Tensor, "heads queries width"],
    numbers: Float[Tensor, "heads tokens width"],
    scales: Float[Tensor, "heads tokens groups"],
) -> Float[Tensor, "heads queries tokens"]:
    """Products of the queries with the scaled numbers, contiguous, in float32 or better."""
    precise = torch.promote_types(query.dtype, torch.float32)
    groups = scales.shape[-1]
    total = query.new_zeros(())
    for group, (part, held) in enumerate(zip(query.chunk(groups, -1), numbers.chunk(groups, -1), strict=True)):
        products = matmul.scores(part, held).to(precise, memory_format=torch.contiguous_format)
        products.mul_(scales[:, None, :, group].to(precise))
        total = products.add_(total) if group else products
    return total


def scaled_sum(
    weights: Float[Tensor, "heads queries tokens"],
    numbers: Float[Tensor, "heads tokens width"],
    scales: Float[Tensor, "heads tokens groups"],
) -> Float[Tensor, "heads queries width"]:
    """Sums of the scaled numbers by each query's weights, in their dtype; products in the numbers' dtype."""
    groups = scales.shape[-1]
    sums = [
        matmul.weighted_sum((weights * scales[:, None, :, group].to(weights.dtype)).to(held.dtype), held)
        for group, held in enumerate(numbers.chunk(groups, -1))
    ]
    return (sums[0] if groups == 1 else torch.cat(sums, -1)).to(weights.dtype)
