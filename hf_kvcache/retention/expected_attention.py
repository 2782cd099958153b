"""Keep what queries like the last ones are going to look at."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import StateError
from .policy import Held, Policy


class ExpectedAttention(Policy):
    """``score = softmax over tokens of (s m k + s^2 k' C k / 2) * |v|``, with mean m and covariance C of queries.

    If queries are normal, ``E[exp(s q k)] = exp(s m k + s^2 k' C k / 2)``; s is the scale of attention. Devoto et al.,
    "Expected Attention" (arXiv 2510.00636), take m and C before the rotary embedding and move them ahead by the average
    rotation of the next positions. Here they are those of the last 64 queries as they were rotated: the average
    rotation of the positions just passed, which needs to know nothing of the embedding. The scores of the query heads
    that share a key head are averaged.
    """

    name: ClassVar[str] = "expected_attention"
    compares_heads: ClassVar[bool] = True
    queries: ClassVar[int] = 64

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        if held.queries is None:
            raise StateError("expected attention needs queries, and none were seen")
        precise = torch.promote_types(held.keys.dtype, torch.float32)
        keys = held.keys.to(precise)
        queries = held.queries.to(precise).mul(held.scale).unflatten(1, (keys.shape[1], -1))
        counted = queries.new_ones(queries.shape[0], queries.shape[3])
        if held.query_hidden is not None:
            counted = counted.masked_fill(held.query_hidden, 0.0)
        counted = (counted / counted.sum(-1, keepdim=True).clamp_min(1.0))[:, None, None, :, None]
        mean = (queries * counted).sum(3, keepdim=True)
        centred = (queries - mean) * counted.sqrt()
        # k'Ck is the squared length of the centred queries' products with k.
        spread = (centred @ keys[:, :, None].transpose(3, 4)).square().sum(3)
        logits = (mean @ keys[:, :, None].transpose(3, 4))[..., 0, :] + spread / 2
        if held.hidden is not None:
            logits = logits.masked_fill(held.hidden[:, :, None], -torch.inf)
        weights: Tensor = torch.softmax(logits, dim=-1).mean(2)
        return weights * held.values.to(precise).square().sum(-1).sqrt()
