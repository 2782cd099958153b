"""Keep what the last queries look at, and what lies around it."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d

from .policy import Held, Policy
from .weights import mean_weights

_NEIGHBOURS = 7


class SnapKV(Policy):
    """``score = mean over 7 neighbours of mean over the last 32 queries of softmax(q k)``.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469). The weights of the
    query heads that share a key head are averaged. Neighbours are those among the tokens held.
    """

    name: ClassVar[str] = "snapkv"
    compares_heads: ClassVar[bool] = True
    queries: ClassVar[int] = 32

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        weights = mean_weights(held)
        if held.hidden is None:
            return _pool(weights)
        # Padding is no neighbour.
        return _pool(weights) / _pool((~held.hidden).to(weights.dtype)).clamp_min(1 / _NEIGHBOURS)


def _pool(numbers: Float[Tensor, "rows heads tokens"]) -> Float[Tensor, "rows heads tokens"]:
    """Means over the neighbours."""
    return avg_pool1d(numbers, _NEIGHBOURS, 1, _NEIGHBOURS // 2, count_include_pad=False)
