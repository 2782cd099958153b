"""Keep what the last query looks at."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from .policy import Held, Policy
from .weights import mean_weights


class Tova(Policy):
    """``score = mean over all heads of softmax(q k)`` of the last query.

    Oren et al., "Transformers are Multi-State RNNs" (arXiv 2401.06104). All heads of a layer hold the same tokens as
    long as they began with the same.
    """

    name: ClassVar[str] = "tova"
    queries: ClassVar[int] = 1

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        weights = mean_weights(held).mean(1)
        return weights[:, None].expand(-1, held.keys.shape[1], -1)
