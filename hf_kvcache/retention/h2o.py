"""Keep what has received the most attention so far."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ..errors import StateError
from .policy import Held, Policy


class H2O(Policy):
    """``score = sum over all queries so far of softmax(q k)``, those of decoded tokens included.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv
    2306.14048), who split the budget evenly between these heavy hitters and the recent tokens. The weights are exact,
    and those of the query heads that share a key head are added up. A dropped token's weights are not handed on.
    """

    name: ClassVar[str] = "h2o"
    compares_heads: ClassVar[bool] = True
    wants_attention: ClassVar[bool] = True

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        if held.attention is None:
            raise StateError("heavy hitters need the attention that tokens have received, and none was seen")
        return held.attention
