"""Keep what deviates from the tokens that follow."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from .policy import Held, Policy

_LAG_TOKENS = 128


class LagKV(Policy):
    """Tokens are compared with the next `lag` tokens, channel by channel, and ranked within their partition.

    With ``low`` and ``high`` the smallest and largest number of each channel in the next partition, a partition's
    ``d = std over channels of (x - low) / (high - low)``; its softmax over the partition is added up for keys and
    values, and a token's score is its rank in the partition, 0 to 1: so each partition loses the same share.

    Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important" (arXiv
    2504.04704). Partitions are counted from the newest token, so that a row does not depend on its padding; the last
    one, which is followed by none, is compared with itself.
    """

    name: ClassVar[str] = "lagkv"

    def __init__(self, lag_tokens: int = _LAG_TOKENS) -> None:
        self.lag_tokens = lag_tokens

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        tokens = held.keys.shape[2]
        missing = -tokens % self.lag_tokens
        hidden = held.hidden if held.hidden is not None else held.positions < 0
        hidden = pad(hidden, (missing, 0), value=True).unflatten(2, (-1, self.lag_tokens))
        information = sum(
            self._deviation(pad(states, (0, 0, missing, 0)).unflatten(2, (-1, self.lag_tokens)), hidden)
            for states in (held.keys, held.values)
        )
        # Among equals the older token ranks lower.
        order = torch.argsort(torch.as_tensor(information), dim=-1, stable=True)
        ranks = torch.empty_like(order).scatter_(
            -1, order, torch.arange(self.lag_tokens, device=order.device).expand_as(order)
        )
        return (ranks.flatten(2)[..., missing:] + 1.0) / self.lag_tokens

    @staticmethod
    def _deviation(
        states: Float[Tensor, "rows heads parts lag width"], hidden: Bool[Tensor, "rows heads parts lag"]
    ) -> Float[Tensor, "rows heads parts lag"]:
        precise = states.to(torch.promote_types(states.dtype, torch.float32))
        low = precise.masked_fill(hidden[..., None], torch.inf).amin(3, keepdim=True)
        high = precise.masked_fill(hidden[..., None], -torch.inf).amax(3, keepdim=True)
        low, high = (torch.cat([bound[:, :, 1:], bound[:, :, -1:]], dim=2) for bound in (low, high))
        spread = (high - low).clamp_min(torch.finfo(precise.dtype).tiny)
        deviation = ((precise - low) / spread).std(-1).nan_to_num_(nan=0.0)
        return torch.softmax(deviation.masked_fill(hidden, -torch.inf), dim=-1).nan_to_num_(nan=0.0)
