"""Which tokens each query sees when it sees sinks and a window, as a mask over the columns that are read.

The columns are a row's sinks, then consecutive recent tokens. With P tokens of padding before a row's first real one
and S sinks, the query at position p sees the sinks ``P, ..., P + S - 1`` and ``p - window + 1, ..., p``, no token twice
and none later than itself. This depends on positions alone, so it is the same in any chunking.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Range: TypeAlias = tuple[int, int]
"""Consecutive positions: the first, and one past the last."""


def band(
    queries: Int[Tensor, " queries"],
    padding: Int[Tensor, " rows"],
    sinks: int,
    recent: Int[Tensor, " tokens"],
    window: int,
) -> Bool[Tensor, "rows 1 queries columns"]:
    """True where a query sees a column.

    Args:
        queries: Positions of the queries.
        padding: Tokens of padding before each row's first real one; one entry where all rows have the same.
        sinks: Number of sinks.
        recent: Positions of the recent columns.
        window: Tokens of the window, the query's own included.
    """
    at = queries[:, None]
    seen = sink_positions(padding, sinks)[:, None, :] <= at
    # A sink is read as a sink, also while the window still holds it.
    behind = recent >= padding[:, None] + sinks
    near = (recent <= at) & (recent > at - window) & behind[:, None, :]
    return torch.cat([seen, near], dim=-1)[:, None]


def sink_positions(padding: Int[Tensor, " rows"], sinks: int) -> Int[Tensor, "rows sinks"]:
    """The positions of each row's first real tokens."""
    return padding[:, None] + torch.arange(sinks, device=padding.device)


def select_columns(
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."], padding: Int[Tensor, " rows"], sinks: int, recent: list[Range]
) -> Bool[Tensor, "mask_rows heads queries columns"] | Float[Tensor, "mask_rows heads queries columns"]:
    """The columns of a mask over the whole history: those of the sinks, and those of the recent positions."""
    mask = mask.view(*([1] * (4 - mask.ndim)), *mask.shape)
    positions = sink_positions(padding, sinks).clamp(max=mask.shape[-1] - 1)
    rows = max(mask.shape[0], padding.shape[0])
    mask = mask.expand(rows, *mask.shape[1:])
    index = positions[:, None, None, :].expand(rows, *mask.shape[1:3], sinks)
    return torch.cat([mask.gather(-1, index), *(mask[..., begin:end] for begin, end in recent)], dim=-1)


def visible(mask: Bool[Tensor, "..."] | Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Where a mask lets queries look: True, or anything but the lowest numbers of its dtype."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def both(
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None, allowed: Bool[Tensor, "..."] | None
) -> Bool[Tensor, "..."] | Float[Tensor, "..."] | None:
    """One mask that lets queries look where both do; None lets them look everywhere."""
    if mask is None or allowed is None:
        return allowed if mask is None else mask
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)
