"""Keep the keys that are unlike the others."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from .policy import Held, Policy


class KeyDiff(Policy):
    """``score = -cos(k, m)``, where m is the mean of ``k / |k|`` over the tokens held.

    Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction" (arXiv 2504.15364). Padding is no part of the mean.
    """

    name: ClassVar[str] = "keydiff"

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        directions = normalize(held.keys.to(torch.promote_types(held.keys.dtype, torch.float32)), dim=-1)
        counted = directions if held.hidden is None else directions.masked_fill(held.hidden[..., None], 0.0)
        anchor = normalize(counted.sum(2), dim=-1)
        return -(directions @ anchor[..., None])[..., 0]
