"""The history of a windowed layer: each row's sinks, and recent blocks.

The first real tokens of a text draw attention from every later query, whatever they say (Xiao et al., "Efficient
Streaming Language Models with Attention Sinks", arXiv 2309.17453). In a batch padded on the left they begin at another
position in each row, so they are held apart from the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import pieces
from ..attention.streaming import Piece
from ..blocks import BlockPool, BlockTable, History, Usage
from ..errors import StateError
from ..quantized import QuantizedTable


class SinkTable:
    """Copies of each row's sinks, and a table of the recent tokens, from which the sinks are copied on the way.

    Args:
        recent: Where tokens are stored as they come.
        sinks: Tokens at the beginning of each row that are never dropped.
    """

    def __init__(self, recent: History, sinks: int) -> None:
        self.recent = _droppable(recent)
        self.sinks = sinks
        pool = recent.raw_pool
        self.keys: Float[Tensor, "rows key_heads sinks key_width"] = _room(pool.keys, recent.rows, sinks)
        self.values: Float[Tensor, "rows value_heads sinks value_width"] = _room(pool.values, recent.rows, sinks)
        self.padding = [0] * recent.rows
        """Tokens before each row's first real one; for a row that has none yet, the tokens seen."""
        self.captured = 0
        """Sinks that lie before this position are held."""

    # ------------------------------------------------------------------------------------------------- telling

    @property
    def tokens(self) -> int:
        """Tokens seen."""
        return self.recent.tokens

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.recent.rows

    @property
    def first_token(self) -> int:
        """Position of the oldest recent token held."""
        return self.recent.first_token

    @property
    def tokens_held(self) -> int:
        """Tokens of each row that are held, the sinks included."""
        return self.recent.tokens_held + min(self.sinks, self.first_token)

    @property
    def raw_pool(self) -> BlockPool:
        """Where tokens are stored as they come."""
        return self.recent.raw_pool

    @property
    def is_open(self) -> bool:
        """Whether some row's sinks among the tokens seen are not held yet."""
        return self.captured < min(self.tokens, max(self.padding) + self.sinks)

    def usage(self) -> Usage:
        """Bytes held now."""
        usage = self.recent.usage()
        own = (states.untyped_storage().nbytes() for states in (self.keys, self.values))
        return usage._replace(payload_bytes=usage.payload_bytes + sum(own))

    def recent_pieces(self, first: int) -> list[Piece]:
        """Recent tokens that comprise those from position `first` on, with places behind the sinks.

        For `attend_streaming`; valid until the table changes. Their positions are those of `reading_order`.
        """
        recent = self.recent.pieces() if isinstance(self.recent, QuantizedTable) else pieces(self.recent, first)
        return [piece._replace(begin=piece.begin + self.sinks, end=piece.end + self.sinks) for piece in recent]

    def reading_order(self, first: int) -> list[tuple[int, int]]:
        """The positions of what `recent_pieces` has, as ranges in its order."""
        return self.recent.reading_order if isinstance(self.recent, QuantizedTable) else [(first, self.tokens)]

    # ------------------------------------------------------------------------------------------------- changing

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write the states ``[rows, heads, tokens, width]`` of new tokens at the end of every row."""
        self.recent.append(keys, values)

    def skip(self, blocks: int) -> None:
        """Count blocks of tokens as seen without storing them. Only in an empty history of raw states."""
        self.recent.skip(blocks)

    def capture(
        self,
        keys: Float[Tensor, "rows key_heads tokens key_width"],
        values: Float[Tensor, "rows value_heads tokens value_width"],
        begin: int,
    ) -> None:
        """Copy the sinks that are not held yet from the states of the tokens from position `begin` to the last.

        Raises:
            StateError: A sink lies before `begin`: it was dropped before anyone knew that it is one.
        """
        positions = torch.tensor(self.padding, device=keys.device)[:, None] + torch.arange(
            self.sinks, device=keys.device
        )
        missing = (positions >= self.captured) & (positions < self.tokens)
        if begin > self.captured and bool((missing & (positions < begin)).any()):
            raise StateError(
                f"the sinks of this history lie before token {begin}, the first one held: they were dropped because "
                "the attention mask of their forward pass was never seen. Start again with `cache.reset()`, with the "
                "model in `attn_implementation='sdpa'`"
            )
        index = (positions - begin).clamp(0, keys.shape[2] - 1)[:, None, :, None]
        found = (states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3])) for states in (keys, values))
        missing = missing[:, None, :, None]
        self.keys, self.values = (
            torch.where(missing, new, own) for new, own in zip(found, (self.keys, self.values), strict=True)
        )
        self.captured = self.tokens

    def resume(self, recent: History, states: tuple[Tensor, Tensor], padding: list[int], captured: int) -> None:
        """Go on with recent tokens and sinks that were stored."""
        self.recent, (self.keys, self.values) = _droppable(recent), states
        self.padding, self.captured = padding, captured

    def select(self, indices: Sequence[int]) -> None:
        """Make row i a copy of old row ``indices[i]``."""
        self.recent.select(indices)
        self.keys, self.values = _selected(self.keys, indices), _selected(self.values, indices)
        self.padding = [self.padding[row] for row in indices]

    def truncate(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens."""
        self.recent.truncate(tokens)
        self.captured = min(self.captured, tokens)
        self.padding = [min(padding, tokens) for padding in self.padding]

    def drop_before(self, token: int) -> None:
        """Release what lies wholly before position `token`; nothing as long as a sink may be among it."""
        if not self.is_open:
            self.recent.drop_before(token)

    def check_integrity(self) -> None:
        """Raise StateError unless everything agrees."""
        self.recent.check_integrity()
        shapes = [
            (self.rows, arena.shape[0], self.sinks, arena.shape[2])
            for arena in (self.raw_pool.keys, self.raw_pool.values)
        ]
        if [tuple(self.keys.shape), tuple(self.values.shape)] != shapes:
            raise StateError(f"sinks of {tuple(self.keys.shape)} and {tuple(self.values.shape)} where {shapes} belong")
        if len(self.padding) != self.rows or not all(0 <= padding <= self.tokens for padding in self.padding):
            raise StateError(f"{self.rows} rows of {self.tokens} tokens have the padding {self.padding}")
        if self.captured > self.tokens:
            raise StateError(f"sinks are held up to position {self.captured} of {self.tokens} tokens")


def _droppable(recent: History) -> BlockTable | QuantizedTable:
    if not isinstance(recent, BlockTable | QuantizedTable):
        raise StateError(f"a window cannot be laid over a {type(recent).__name__}")
    return recent


def _room(arena: Tensor, rows: int, sinks: int) -> Tensor:
    return arena.new_zeros(1, arena.shape[0], sinks, arena.shape[2]).expand(rows, -1, -1, -1)


def _selected(states: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows; copies of one row are held once."""
    if len(set(rows)) == 1:
        return states[rows[0]][None].clone().expand(len(rows), -1, -1, -1)
    return states[torch.tensor(list(rows), device=states.device)]
