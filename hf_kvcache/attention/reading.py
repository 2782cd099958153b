"""Attention over a paged history without copying it: scores per segment, one softmax, weighted sums per segment.

The result is the real number that ``scaled_dot_product_attention`` computes; only the order of additions differs.
A run that several rows read (a common prompt, the past of beams) is read once, with the queries of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..blocks import BlockTable, Run
from . import matmul
from .streaming import Piece, exact_source

# Up to here torch's kernel on a view of the arena beats two products and a softmax, by bytes per element (measured,
# two CPU cores). With several queries or a mask it always does, as long as the history is one view. In float64, the
# dtype of proofs, a single token always takes the products, so that a proof covers them at any length.
_STOCK_BELOW_TOKENS = {2: 512, 4: 2048, 8: 0}

# Above this many queries the scores would need much memory: better copy a scattered history for the stock kernel.
_STOCK_ABOVE_QUERIES = 16


class _Piece(NamedTuple):
    """A segment cut to the visible tokens; `rows` is None for all rows."""

    rows: list[int] | None
    begin: int
    end: int
    keys: Tensor
    """``[key_heads, tokens, width]``, or ``[rows, key_heads, tokens, width]`` where gathered."""
    values: Tensor


def attend(
    table: BlockTable,
    first_token: int,
    query: Float[Tensor, "rows query_heads queries key_width"],
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
    scale: float,
) -> Float[Tensor, "rows query_heads queries value_width"]:
    """Attention of `query` over the tokens of `table` from position `first_token` on.

    Args:
        table: The history; not changed. Keys and values must have the same number of heads.
        first_token: Position of the first visible token, held by the table.
        query: Query states; the number of query heads is a multiple of the number of key heads.
        mask: Broadcastable to ``[rows, query_heads, queries, tokens]``; True or 0 where a query may look. A query
            that may look nowhere gets zeros.
        scale: Factor on the scores.
    """
    tokens, heads = table.tokens - first_token, table.pool.samples[0].shape[0]
    rows, query_heads, queries, _ = query.shape
    stride = table.uniform_stride()
    masked = mask is not None and query.element_size() < 8
    if stride is not None and (queries > 1 or masked or tokens < _STOCK_BELOW_TOKENS[query.element_size()]):
        return attend_states(query, *_batch_view(table, first_token, stride), mask, scale)
    if queries > _STOCK_ABOVE_QUERIES:
        return attend_states(query, *materialize(table, first_token), mask, scale)

    products = matmul.product_dtype(query.dtype, query.device)
    grouped = query.reshape(rows, heads, -1, query.shape[3]).to(products)
    pieces = list(_pieces(table, first_token))
    scores = _scores(grouped, pieces, tokens)
    weights = _softmax(scores.view(rows, query_heads, queries, tokens), mask, scale).view_as(scores)
    return _weighted_sums(weights, pieces).view(rows, query_heads, queries, -1).to(query.dtype)


def attend_states(
    query: Float[Tensor, "rows query_heads queries key_width"],
    keys: Float[Tensor, "rows key_heads tokens key_width"],
    values: Float[Tensor, "rows key_heads tokens value_width"],
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
    scale: float,
) -> Float[Tensor, "rows query_heads queries value_width"]:
    """Attention of `query` over states as they are, by torch's kernel.

    The query heads of one key head are packed or repeated, as suits it. See `attend` for the arguments.
    """
    rows, heads, queries, _ = query.shape
    groups = heads // keys.shape[1]
    # Packed, one history is read for the whole group; grouped float32 heads have a kernel as good.
    packs = query.element_size() == 2 or mask is not None
    if groups > 1 and queries == 1 and packs:
        packed = query.view(rows, keys.shape[1], groups, -1)
        if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
            mask = mask.reshape(*mask.shape[:-3], keys.shape[1], groups, mask.shape[-1])
        return scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale).view(rows, heads, 1, -1)
    if groups > 1 and mask is not None and query.device.type != "cpu":
        # Elsewhere a mask together with grouped heads has no fast kernel.
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    grouped = keys.shape[1] != heads
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _scores(grouped: Tensor, pieces: list[_Piece], tokens: int) -> Tensor:
    """Unscaled scores ``[rows, heads, queries, tokens]``, contiguous."""
    rows, heads, queries, _ = grouped.shape
    if rows == 1 and len(pieces) == 1:
        return matmul.scores(grouped[0], pieces[0].keys)[None].contiguous()
    scores = grouped.new_empty(rows, heads, queries, tokens)
    for rows_read, begin, end, keys, _ in pieces:
        if keys.ndim == 4:
            scores[..., begin:end] = torch.matmul(grouped, keys.to(grouped.dtype).transpose(2, 3))
            continue
        reading = grouped if rows_read is None else grouped[rows_read]
        stacked = reading.transpose(0, 1).reshape(heads, -1, reading.shape[3])
        product = matmul.scores(stacked, keys).reshape(heads, -1, queries, end - begin).transpose(0, 1)
        if rows_read is None:
            scores[..., begin:end] = product
        else:
            scores[rows_read, :, :, begin:end] = product
    return scores


def _softmax(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention weights in the dtype of `scores`, computed in float32 or better; `scores` is used up."""
    dtype = scores.dtype
    precise = scores.float().mul_(scale) if dtype in (torch.bfloat16, torch.float16) else scores.mul_(scale)
    if mask is None:
        return torch.softmax(precise, dim=-1).to(dtype)
    if mask.dtype == torch.bool:
        precise.masked_fill_(mask.logical_not(), -torch.inf)
    else:
        precise.add_(mask)
    return torch.softmax(precise, dim=-1).nan_to_num_(nan=0.0).to(dtype)


def _weighted_sums(weights: Tensor, pieces: list[_Piece]) -> Tensor:
    """Weighted sums of the values, ``[rows, heads, queries, value_width]``."""
    rows, heads, queries, _ = weights.shape
    if rows == 1 and len(pieces) == 1:
        return matmul.weighted_sum(weights[0], pieces[0].values)[None]
    # Partial sums are added up in float32 or better: their number must not cost precision.
    precise = torch.promote_types(weights.dtype, torch.float32)
    total = weights.new_zeros(rows, heads, queries, pieces[0].values.shape[-1], dtype=precise)
    for rows_read, begin, end, _, values in pieces:
        part = weights[..., begin:end]
        if values.ndim == 4:
            total += torch.matmul(part, values.to(part.dtype))
            continue
        reading = part if rows_read is None else part[rows_read]
        stacked = reading.transpose(0, 1).reshape(heads, -1, end - begin)
        product = matmul.weighted_sum(stacked, values).view(heads, -1, queries, values.shape[-1]).transpose(0, 1)
        if rows_read is None:
            total += product
        else:
            total[rows_read] += product
    return total.to(weights.dtype)


def _pieces(table: BlockTable, first_token: int) -> Iterator[_Piece]:
    """The table's segments, cut to the tokens from `first_token` to the last one written."""
    pool, size = table.pool, table.pool.block_size
    for segment in table.segments():
        # Positions of this segment's first and last token among the visible ones.
        start = (table.dropped_blocks + segment.column) * size - first_token
        begin = max(start, 0)
        end = min(start + segment.blocks * size, table.tokens - first_token)
        if end <= begin:
            continue
        if isinstance(segment, Run):
            slots = slice(segment.block * size + begin - start, segment.block * size + end - start)
            rows = None if len(segment.rows) == table.rows else segment.rows
            yield _Piece(rows, begin, end, pool.keys[:, slots], pool.values[:, slots])
        else:
            keys, values = pool.gather(segment.slots)
            cut = slice(begin - start, end - start)
            yield _Piece(None, begin, end, keys[:, :, cut], values[:, :, cut])


def read_states(table: BlockTable, first_token: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[rows, heads, tokens, width]`` from `first_token` on: views if possible, else copies."""
    stride = table.uniform_stride()
    return materialize(table, first_token) if stride is None else _batch_view(table, first_token, stride)


def pieces(table: BlockTable, first_token: int) -> list[Piece]:
    """The tokens of `table` from position `first_token` on, for `attend_streaming`, read in place where they can be.

    Valid until the table changes.
    """
    stride = table.uniform_stride()
    if stride is not None and stride[1]:
        views = _batch_view(table, first_token, stride)
        return [Piece(None, 0, table.tokens - first_token, exact_source(*views))]
    return [
        Piece(rows, begin, end, exact_source(*((keys, values) if keys.ndim == 4 else (keys[None], values[None]))))
        for rows, begin, end, keys, values in _pieces(table, first_token)
    ]


def _batch_view(table: BlockTable, first_token: int, stride: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The visible history as views ``[rows, heads, tokens, width]`` of the arenas, valid until the table changes."""
    size = table.pool.block_size
    start = stride[0] * size + first_token - table.first_token
    tokens = table.tokens - first_token
    views = []
    for arena in (table.pool.keys, table.pool.values):
        heads, slots, width = arena.shape
        strides = (stride[1] * size * width, slots * width, width, 1)
        begin = arena.storage_offset() + start * width  # an arena may be part of a larger buffer
        views.append(arena.as_strided((table.rows, heads, tokens, width), strides, begin))
    return views[0], views[1]


def materialize(table: BlockTable, first_token: int) -> tuple[Tensor, Tensor]:
    """Contiguous copies ``[rows, heads, tokens, width]`` of the keys and values from `first_token` on, bit for bit."""
    tokens = table.tokens - first_token
    copies = []
    pieces = list(_pieces(table, first_token))
    for kind, arena in enumerate((table.pool.keys, table.pool.values)):
        copy = arena.new_empty(table.rows, arena.shape[0], tokens, arena.shape[2])
        for piece in pieces:
            source = piece.values if kind else piece.keys
            if piece.rows is None:
                copy[:, :, piece.begin : piece.end] = source
            else:
                copy[piece.rows, :, piece.begin : piece.end] = source
        copies.append(copy)
    return copies[0], copies[1]
