"""What queries look like, as far as the first tokens of a history tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class _Seen(NamedTuple):
    """Mean squares of some queries."""

    end: int
    """One past the position of the last of them."""
    queries: int
    squares: Tensor
    """``[rows, key_heads, width]``"""


class QueryRecord:
    """Mean squares of the query channels, per row and key head. Can be taken back token by token until it is used."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    @property
    def squares(self) -> Float[Tensor, "rows key_heads width"] | None:
        """The mean squares; None where no query was seen."""
        if len(self._seen) > 1:
            count = sum(seen.queries for seen in self._seen)
            squares = torch.stack([seen.squares * seen.queries for seen in self._seen]).sum(0) / count
            self._seen = [_Seen(self._seen[-1].end, count, squares)]
        return self._seen[0].squares if self._seen else None

    @property
    def counts(self) -> list[int]:
        """One past the position of the last query, and the number of queries, for `recall`."""
        return [self._seen[-1].end if self._seen else 0, sum(seen.queries for seen in self._seen)]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(seen.squares.nbytes for seen in self._seen)

    def add(self, query: Float[Tensor, "rows query_heads queries width"], key_heads: int, end: int) -> None:
        """Take note of the queries of the tokens before position `end`."""
        self._seen.append(_Seen(end, query.shape[2], mean_squares(query, key_heads)))

    def recall(self, counts: Sequence[int], squares: Float[Tensor, "rows key_heads width"]) -> None:
        """Take over what another record told."""
        self._seen = [_Seen(counts[0], counts[1], squares)]

    def select(self, rows: Tensor) -> None:
        """Make row i a copy of old row ``rows[i]``."""
        self._seen = [seen._replace(squares=seen.squares[rows]) for seen in self._seen]

    def truncate(self, tokens: int) -> None:
        """Forget what was seen behind the first `tokens` tokens."""
        self._seen = [seen for seen in self._seen if seen.end <= tokens]


def mean_squares(
    query: Float[Tensor, "rows query_heads queries width"], key_heads: int
) -> Float[Tensor, "rows key_heads width"]:
    """Mean squares of the channels of some queries, in float32 or better."""
    precise = query.detach().to(torch.promote_types(query.dtype, torch.float32))
    squares: Tensor = precise.square().mean(2).unflatten(1, (key_heads, -1)).mean(2)
    return squares
