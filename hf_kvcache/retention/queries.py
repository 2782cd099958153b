"""The queries of the newest tokens, for policies that look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class _Chunk(NamedTuple):
    """The queries of consecutive tokens."""

    end: int
    """One past the position of the last."""
    states: Tensor
    """``[rows, query_heads, queries, width]``"""


class RecentQueries:
    """The last `wanted` queries, kept as the model gave them, chunk by chunk: noting one costs no call of torch.

    Args:
        wanted: Queries to keep.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self._chunks: list[_Chunk] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(chunk.states.nbytes for chunk in self._chunks)

    @property
    def count(self) -> int:
        """Queries held."""
        return sum(chunk.states.shape[2] for chunk in self._chunks)

    @property
    def end(self) -> int:
        """One past the position of the last query; 0 if there is none."""
        return self._chunks[-1].end if self._chunks else 0

    def clear(self) -> None:
        """Let go of all queries."""
        self._chunks = []

    def add(self, states: Float[Tensor, "rows query_heads queries width"], end: int, forget: bool) -> None:
        """Note the queries of the tokens before position `end`.

        Args:
            states: The queries.
            end: One past the position of the last.
            forget: Whether older queries than wanted may be forgotten; not while steps back are to come.
        """
        if not self.wanted:
            return
        states = states.detach()
        if forget and states.shape[2] > self.wanted:
            # A copy, so that the long tensor is not held.
            states = states[:, :, -self.wanted :].clone()
        self._chunks.append(_Chunk(end, states))
        if forget:
            self.forget()

    def forget(self) -> None:
        """Let go of whole chunks that are older than the last `wanted` queries."""
        count = 0
        for index in range(len(self._chunks) - 1, -1, -1):
            if count >= self.wanted:
                del self._chunks[: index + 1]
                return
            count += self._chunks[index].states.shape[2]

    def last(self) -> Float[Tensor, "rows query_heads queries width"] | None:
        """The last `wanted` queries, or as many as are known; None if there is none."""
        if not self._chunks:
            return None
        return torch.cat([chunk.states for chunk in self._chunks], dim=2)[:, :, -self.wanted :]

    def recall(self, states: Float[Tensor, "rows query_heads queries width"], end: int) -> None:
        """Take over what another record held."""
        self._chunks = [_Chunk(end, states)]

    def select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of old row ``rows[i]``."""
        self._chunks = [chunk._replace(states=chunk.states[list(rows)]) for chunk in self._chunks]

    def truncate(self, tokens: int) -> None:
        """Forget the queries behind the first `tokens` tokens."""
        kept = []
        for end, states in self._chunks:
            excess = max(end - tokens, 0)
            if excess < states.shape[2]:
                kept.append(_Chunk(end - excess, states[:, :, : states.shape[2] - excess]))
        self._chunks = kept
