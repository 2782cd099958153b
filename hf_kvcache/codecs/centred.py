"""Keys without the means of their blocks, stored by another codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .centring import add_mean_scores, block_means, centre, fit_means, mean_parts, prepare_means
from .codec import Codec, Fit, Part


class CentredKeys(Codec):
    """Keys as `codec` stores them, and 4 bits per channel and block for the means that are taken out first.

    Args:
        codec: Stores what is left. It learns nothing, and its scores are contiguous, in float32 or better.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.name = codec.name

    def __repr__(self) -> str:
        return repr(self.codec)

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        return [*self.codec.parts(width, block_size, dtype), *mean_parts(width)]

    def fit(
        self, states: Float[Tensor, "heads tokens width"], query_squares: Float[Tensor, "heads width"] | None
    ) -> dict[str, Tensor]:
        return fit_means(states)

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        residual, means = centre(states, fit)
        return [*self.codec.encode(residual, fit), *means]

    def prepare(self, query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, ...]:
        return *prepare_means(query.to(fit["mean"].dtype), fit), *self.codec.prepare(query, fit)

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        of_means, of_codec = prepared[:2], prepared[2:]
        *coded, means = parts
        return add_mean_scores(self.codec.scores(of_codec, coded, fit), of_means, means)

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        *coded, means = parts
        states = self.codec.decode(coded, fit, fit["mean"].dtype)
        states.unflatten(1, (means.shape[1], -1)).add_(block_means(means, fit)[:, :, None])
        return states.to(dtype)
