"""The softmax weights of given queries over the tokens held."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import StateError
from .policy import Held


def attention_weights(held: Held) -> Float[Tensor, "rows heads groups queries tokens"]:
    """What each of the last queries looks at, by the key head they share. In float32 or better.

    A query sees the tokens up to its own and no padding. Queries of padding have zeros.
    """
    if held.queries is None:
        raise StateError("attention weights need queries, and none were seen")
    count, heads = held.queries.shape[2], held.keys.shape[1]
    precise = torch.promote_types(held.keys.dtype, torch.float32)
    grouped = held.queries.to(precise).unflatten(1, (heads, -1)).flatten(2, 3)
    scores = (grouped @ held.keys.to(precise).transpose(2, 3)).mul_(held.scale).unflatten(2, (-1, count))
    # The queries are those of the newest tokens: all but the last `count` tokens are before them.
    recent = held.positions[:, :, -count:]
    newest = held.positions[:, :1, -1:, None] - torch.arange(count - 1, -1, -1, device=recent.device)[:, None]
    scores[..., -count:].masked_fill_((recent[:, :, None] > newest)[:, :, None], -torch.inf)
    if held.hidden is not None:
        scores.masked_fill_(held.hidden[:, :, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if held.query_hidden is not None:
        # A query of padding may see nothing at all.
        weights = weights.nan_to_num_(nan=0.0).masked_fill_(held.query_hidden[:, None, None, :, None], 0.0)
    return weights


def mean_weights(held: Held) -> Float[Tensor, "rows heads tokens"]:
    """The mean of `attention_weights` over the query heads of a key head and over the queries that are no padding."""
    weights = attention_weights(held)
    if held.query_hidden is None:
        return weights.mean((2, 3))
    real = (~held.query_hidden).sum(1).clamp_min(1)
    return weights.mean(2).sum(2) / real[:, None, None]
