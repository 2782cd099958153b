"""The mean of every key channel over a block, stored apart in four bits.

Key channels have means far larger than their deviations, and the means drift with the text. What is left without them
has a smaller range, which is what KIVI's per-channel layout gains in effect (arXiv 2402.02750). A mean is stored as
steps of a third of the channel's deviation from the mean that was fitted at the beginning of the sequence. What the
rounding leaves is in the residuals, whose energy it raises by under 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from .codec import Fit, Part
from .packing import pack, plane_shapes, unpack

_BITS = 4
_HALF = 1 << (_BITS - 1)
_STEPS_PER_DEVIATION = 3


def mean_parts(width: int) -> list[Part]:
    """The array that holds the means of a block."""
    return [Part(1, count, plane, is_scale=True) for count, plane in plane_shapes(width, _BITS)]


def fit_means(states: Float[Tensor, "heads tokens width"]) -> dict[str, Tensor]:
    """The mean of each channel, and the size of a step from it, ``[heads, width]`` each."""
    mean = states.mean(1)
    step = ((states - mean[:, None]).square().mean(1).sqrt() / _STEPS_PER_DEVIATION).clamp_min(1e-6)
    return {"mean": round_learned(mean), "step": round_learned(step)}


def round_learned(learned: Tensor) -> Tensor:
    """Rounded so that the queries' products with it are as exact as any in bfloat16."""
    return learned.to(torch.bfloat16).to(learned.dtype)


def centre(
    states: Float[Tensor, "heads blocks tokens width"], fit: Fit
) -> tuple[Float[Tensor, "heads blocks tokens width"], list[Tensor]]:
    """The states without the stored means of their blocks, and the stored means."""
    mean, step = fit["mean"][:, None], fit["step"][:, None]
    means = ((states.mean(2) - mean) / step).round_().clamp_(-_HALF, _HALF - 1)
    residual = states - torch.addcmul(mean, means, step)[:, :, None]
    return residual, pack(means.add_(_HALF).to(torch.int32)[:, :, None], _BITS)


def block_means(means: UInt8[Tensor, "heads blocks packed"], fit: Fit) -> Float[Tensor, "heads blocks width"]:
    """The means themselves."""
    mean = fit["mean"]
    steps = unpack([means], _BITS, mean.shape[-1]).to(mean.dtype).sub_(_HALF)
    return mean[:, None] + steps * fit["step"][:, None]


def prepare_means(query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, Tensor]:
    """What `add_mean_scores` needs of the queries, which come in the precision of the fit."""
    steps = query * fit["step"][:, None]
    return steps, (query @ fit["mean"][..., None]).sub_(steps.sum(-1, keepdim=True), alpha=_HALF)


def add_mean_scores(
    scores: Float[Tensor, "heads queries tokens"],
    prepared: Sequence[Tensor],
    means: UInt8[Tensor, "heads blocks packed"],
) -> Float[Tensor, "heads queries tokens"]:
    """`scores`, which are contiguous, with the products of the queries with the means added in place."""
    steps, base = prepared
    of_means = unpack([means], _BITS, steps.shape[-1]).to(steps.dtype)
    by_block = torch.baddbmm(base, steps, of_means.transpose(1, 2))
    scores.unflatten(-1, (means.shape[1], -1)).add_(by_block[..., None])
    return scores
