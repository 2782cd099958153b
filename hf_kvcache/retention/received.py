"""The attention that the tokens of a history have received so far.

It is the sum of softmax weights over all queries, of the prompt and of decoded tokens alike. The weights of many
queries, a prompt's or those of a chunk of it, are added up while attention is computed of them. Those of few queries
are computed a second time, as no kernel returns its weights: with as many calls of torch for 64 decoded tokens as for
one. Between, queries wait, so that those of a rejected draft leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import attend_summing
from .policy import Held
from .queries import RecentQueries

# Queries that may wait: what bounds the memory.
_MOST_WAITING = 64
_ALL = 1 << 40


class ReceivedAttention:
    """What each token held has received, in sums over queries and over the query heads of a key head."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._end = 0
        self._waiting = RecentQueries(_ALL)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._waiting.nbytes + (0 if self._sums is None else self._sums.nbytes)

    @property
    def end(self) -> int:
        """One past the position of the last query seen; 0 if there was none."""
        return self._waiting.end or self._end

    def is_full_with(self, queries: int) -> bool:
        """Whether more queries wait than should, besides as many new ones that attend all at once."""
        return self._waiting.count > _MOST_WAITING and not self.awaits(queries)

    def awaits(self, queries: int) -> bool:
        """Whether the queries that wait are these new ones, and so many that attention had better add them up."""
        return _MOST_WAITING < self._waiting.count == queries

    def add(self, query: Float[Tensor, "rows query_heads queries width"], end: int) -> None:
        """Note the queries of the tokens before position `end`."""
        self._waiting.add(query, end, forget=False)

    def settle(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """Add up the weights of the queries that wait.

        Args:
            held: All tokens held, the last of them that of the last query; queries are not looked at.

        Returns:
            What each token has received: the sums themselves.
        """
        queries = self._waiting.last()
        if queries is None:
            precise = torch.promote_types(held.keys.dtype, torch.float32)
            return self.take(torch.zeros_like(held.positions, dtype=precise))
        padding = None if held.hidden is None else held.hidden[:, 0, -queries.shape[2] :]
        return self.take(attend_summing(queries, held.keys, held.values, None, held.scale, held.hidden, padding)[1])

    def take(self, sums: Float[Tensor, "rows heads tokens"]) -> Float[Tensor, "rows heads tokens"]:
        """Add the weights of the queries that wait, which wait no more, to what was received before."""
        if self._sums is not None:
            sums[..., : self._sums.shape[2]] += self._sums
        self._sums, self._end = sums, self.end
        self._waiting.clear()
        return sums

    def rearrange(
        self, arranged: Callable[[Float[Tensor, "rows heads tokens"]], Float[Tensor, "rows heads tokens_after"]]
    ) -> None:
        """Follow an eviction, of which `arranged` tells where the tokens are now."""
        if self._sums is not None:
            self._sums = arranged(self._sums)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of old row ``rows[i]``."""
        self._sums = None if self._sums is None else self._sums[list(rows)]
        self._waiting.select(rows)

    def truncate(self, tokens: int) -> None:
        """Forget what lies behind the first `tokens` tokens.

        Queries whose weights were added up already have given them to the tokens before.
        """
        self._waiting.truncate(tokens)
        excess = max(self._end - tokens, 0)
        if self._sums is not None and excess:
            self._sums = self._sums[..., : self._sums.shape[2] - excess]
        self._end -= excess

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """What is held, for `recall`."""
        return {"received": self._sums, "waiting": self._waiting.last()}

    def recall(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Take over what another record of as many tokens held."""
        self._sums = tensors.get("received")
        if "waiting" in tensors:
            self._waiting.recall(tensors["waiting"], tokens)
        self._end = tokens - self._waiting.count
