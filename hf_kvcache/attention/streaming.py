"""Attention over a history that comes in pieces, with memory that does not depend on its length.

An encoded history is decoded piece by piece, each time into a small workspace, and never as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from . import matmul

# Queries taken at once: with the scores kept at once, what bounds the memory.
_MOST_QUERIES = 512

MOST_SCORES = 1 << 22
"""Numbers kept at once: 16 MiB of float32."""


@runtime_checkable
class Source(Protocol):
    """The keys and values of one piece."""

    def scores(self, query: Float[Tensor, "heads queries width"]) -> Float[Tensor, "heads queries tokens"]:
        """Unscaled products of the queries with the keys."""

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        """Sums of the values, weighted by each query's row; products are computed in `dtype`."""


class Piece(NamedTuple):
    """Consecutive tokens that some rows read."""

    rows: list[int] | None
    """The rows that read it; None for all."""
    begin: int
    """First of its tokens, counted from the first visible one."""
    end: int
    """One past the last."""
    source: Source


class _OneRow(NamedTuple):
    """Keys and values ``[heads, tokens, width]`` as they are."""

    keys: Tensor
    values: Tensor

    def scores(self, query: Tensor) -> Tensor:
        return matmul.scores(query, self.keys)

    def weighted_sum(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return matmul.weighted_sum(weights.to(dtype), self.values)


class _Rows(NamedTuple):
    """Keys and values ``[rows, heads, tokens, width]`` as they are, for queries of all these rows, row by row."""

    keys: Tensor
    values: Tensor

    def scores(self, query: Tensor) -> Tensor:
        by_row = query.unflatten(1, (self.keys.shape[0], -1))
        scores: Tensor = torch.matmul(by_row, self.keys.to(query.dtype).permute(1, 0, 3, 2))
        flat: Tensor = scores.flatten(1, 2)
        return flat

    def weighted_sum(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        by_row = weights.to(dtype).unflatten(1, (self.keys.shape[0], -1))
        product: Tensor = torch.matmul(by_row, self.values.to(dtype).transpose(0, 1))
        flat: Tensor = product.flatten(1, 2)
        return flat


def exact_source(
    keys: Float[Tensor, "rows heads tokens key_width"], values: Float[Tensor, "rows heads tokens value_width"]
) -> Source:
    """Tokens of all rows, each row its own, as they are."""
    return _OneRow(keys[0], values[0]) if keys.shape[0] == 1 else _Rows(keys, values)


def attend_streaming(
    pieces: Iterable[Piece],
    heads: tuple[int, int],
    query: Float[Tensor, "rows query_heads queries key_width"],
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
    scale: float,
) -> Float[Tensor, "rows query_heads queries value_width"]:
    """Attention of `query` over the tokens of `pieces`. A query that may look nowhere gets zeros.

    Args:
        pieces: The history: every token once for every row, in any order.
        heads: Number of key heads, and width of the values.
        query: Query states; the number of query heads is a multiple of the number of key heads.
        mask: Broadcastable to ``[rows, query_heads, queries, tokens]``; True or 0 where a query may look.
        scale: Factor on the scores.
    """
    pieces = list(pieces)
    tokens = max(piece.end for piece in pieces)
    outputs = []
    for begin in range(0, query.shape[2], _MOST_QUERIES):
        part = query[:, :, begin : begin + _MOST_QUERIES]
        allowed = mask if mask is None or mask.shape[-2] == 1 else mask[..., begin : begin + _MOST_QUERIES, :]
        grouped = _Grouped(part, heads[0])
        if part.shape[:3].numel() * tokens <= MOST_SCORES:
            output = _at_once(pieces, tokens, grouped, heads[1], allowed, scale)
        else:
            output = _in_one_pass(pieces, grouped, heads[1], allowed, scale)
        outputs.append(grouped.ungroup(output))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


class _Grouped:
    """Queries by the key head they share: ``[key_heads, rows, groups * queries, width]``."""

    def __init__(self, query: Tensor, key_heads: int) -> None:
        rows, query_heads, queries, width = query.shape
        self.shape = query.shape
        self.dtype = query.dtype
        self.products = matmul.product_dtype(query.dtype, query.device)
        self.precise = torch.promote_types(query.dtype, torch.float32)
        self.key_heads = key_heads
        self.groups = query_heads // key_heads
        by_head = query.reshape(rows, key_heads, self.groups * queries, width).transpose(0, 1)
        self.states = by_head.to(self.products)
        self._of_all = self.states.reshape(key_heads, -1, width)

    def scores(self, piece: Piece) -> Tensor:
        """Unscaled scores ``[key_heads, rows of the piece, groups * queries, tokens]``, precise."""
        reading = self._of_all if piece.rows is None else self.states[:, piece.rows].flatten(1, 2)
        scores = piece.source.scores(reading).to(self.precise)
        return scores.reshape(self.key_heads, -1, self.states.shape[2], scores.shape[-1])

    def weighted_sum(self, piece: Piece, weights: Tensor) -> Tensor:
        """Sums of the values of a piece ``[key_heads, rows of the piece, groups * queries, width]``, precise."""
        sums = piece.source.weighted_sum(weights.flatten(1, 2), self.products).to(self.precise)
        return sums.reshape(self.key_heads, -1, self.states.shape[2], sums.shape[-1])

    def hide(self, scores: Tensor, mask: Tensor, piece: Piece | None) -> None:
        """Apply the mask to scores ``[key_heads, rows, groups * queries, tokens]``, of a piece or of all tokens."""
        if mask.ndim < 4:
            mask = mask.view(*([1] * (4 - mask.ndim)), *mask.shape)
        if piece is not None:
            mask = mask[..., piece.begin : piece.end]
            if piece.rows is not None and mask.shape[0] > 1:
                mask = mask[piece.rows]
        per_head = mask.shape[1] > 1
        mask = mask.unflatten(1, (self.key_heads, self.groups) if per_head else (1, 1)).permute(1, 0, 2, 3, 4)
        viewed = scores.unflatten(2, (self.groups, -1))
        if mask.dtype == torch.bool:
            viewed.masked_fill_(mask.logical_not(), -torch.inf)
        else:
            viewed.add_(mask)

    def ungroup(self, output: Tensor) -> Tensor:
        """Outputs ``[rows, query_heads, queries, width]`` from ``[key_heads, rows, groups * queries, width]``."""
        rows, query_heads, queries, _ = self.shape
        return output.to(self.dtype).transpose(0, 1).reshape(rows, query_heads, queries, output.shape[-1])


def _at_once(
    pieces: list[Piece], tokens: int, query: _Grouped, value_width: int, mask: Tensor | None, scale: float
) -> Tensor:
    """All scores, one softmax, all sums: fewer calls, for few queries."""
    shape = (*query.states.shape[:3], tokens)
    scores = query.states.new_empty(shape, dtype=query.precise)
    for piece in pieces:
        rows = slice(None) if piece.rows is None else piece.rows
        scores[:, rows, :, piece.begin : piece.end] = query.scores(piece)
    scores.mul_(scale)
    if mask is not None:
        query.hide(scores, mask, None)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:
        weights.nan_to_num_(nan=0.0)
    output = scores.new_zeros((*shape[:3], value_width))
    for piece in pieces:
        part = weights[..., piece.begin : piece.end]
        if piece.rows is None:
            output.add_(query.weighted_sum(piece, part))
        else:
            output[:, piece.rows] += query.weighted_sum(piece, part[:, piece.rows])
    return output


def _in_one_pass(pieces: list[Piece], query: _Grouped, value_width: int, mask: Tensor | None, scale: float) -> Tensor:
    """Piece after piece, each scored, weighted against the largest score so far and added up, for many queries.

    What was added before is scaled down when a larger score turns up (Milakov and Gimelshein, arXiv 1805.02867).
    """
    shape = query.states.shape[:3]
    highest = query.states.new_full((*shape, 1), -torch.inf, dtype=query.precise)
    total = torch.zeros_like(highest)
    output = highest.new_zeros((*shape, value_width))
    for piece in pieces:
        rows = slice(None) if piece.rows is None else piece.rows
        scores = query.scores(piece).contiguous().mul_(scale)
        if mask is not None:
            query.hide(scores, mask, piece)
        after = torch.maximum(highest[:, rows], scores.amax(-1, keepdim=True))
        # Where nothing was visible yet every score is -inf, and so is the highest: 0 keeps the weights 0.
        anchor = after if mask is None else after.masked_fill(after == -torch.inf, 0.0)
        weights = scores.sub_(anchor).exp_()
        decay = (highest[:, rows] - anchor).exp_()
        highest[:, rows] = after
        total[:, rows] = total[:, rows] * decay + weights.sum(-1, keepdim=True)
        output[:, rows] = output[:, rows] * decay + query.weighted_sum(piece, weights)
    if mask is not None:
        total.masked_fill_(total == 0.0, 1.0)
    return output / total
