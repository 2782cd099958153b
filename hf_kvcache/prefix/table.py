"""The history of one layer that begins with states of a store: those in place, what follows in blocks of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import materialize, pieces
from ..attention.streaming import Piece, exact_source
from ..blocks import BlockPool, BlockTable, Run, Usage
from ..errors import StateError
from .extent import States


class PrefixTable:
    """Tokens that all rows share and nobody writes, then the rows' own.

    Args:
        shared: The states of the shared tokens, in order. Views that are read in place; never changed.
        own: An empty table for what follows.
    """

    def __init__(self, shared: Sequence[States], own: BlockTable) -> None:
        self.shared = list(shared)
        self.own = own
        self.shared_tokens = sum(keys.shape[1] for keys, _ in self.shared)
        self.tokens = self.shared_tokens

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.own.rows

    @property
    def first_token(self) -> int:
        """Always 0: whoever continues this text may branch off anywhere, so nothing is dropped."""
        return 0

    @property
    def tokens_held(self) -> int:
        """Tokens of each row that are held: all."""
        return self.tokens

    @property
    def raw_pool(self) -> BlockPool:
        """The pool of the rows' own blocks."""
        return self.own.pool

    def usage(self) -> Usage:
        """Bytes held now, those of the shared tokens once, however many caches read them."""
        own = self.own.usage()
        return own._replace(payload_bytes=own.payload_bytes + self.shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the shared tokens."""
        return sum(states.nbytes for pair in self.shared for states in pair)

    # ------------------------------------------------------------------------------------------------- changing

    def append(
        self,
        keys: Float[Tensor, "rows key_heads tokens key_width"],
        values: Float[Tensor, "rows value_heads tokens value_width"],
    ) -> None:
        """Write the states of new tokens at the end of every row."""
        self.own.append(keys, values)
        self.tokens += keys.shape[2]

    def skip(self, blocks: int) -> None:
        """Nothing: no token is left out."""
        if blocks:
            raise StateError("a history that is to be shared cannot begin behind its first token")

    def drop_before(self, token: int) -> None:
        """Nothing; see `first_token`."""

    def select(self, indices: Sequence[int]) -> None:
        """Make row i a copy of old row ``indices[i]``."""
        self.own.select(indices)

    def truncate(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens. Shared states stay as they are; less of them is read."""
        if not 0 <= tokens <= self.tokens:
            raise StateError(f"cannot truncate to {tokens} tokens: 0 to {self.tokens} are held")
        self.own.truncate(max(0, tokens - self.shared_tokens))
        if tokens < self.shared_tokens:
            self.shared = [pair for _, _, pair in self._cut_shared(0, tokens)]
            self.shared_tokens = tokens
        self.tokens = tokens

    def fork(self) -> PrefixTable:
        """The same history once more; each of the two may go on without the other.

        What one row holds becomes shared in place, with no copy. Rows of a batch share what they shared before, and
        their own tokens are copied.
        """
        if self.rows > 1:
            other = PrefixTable(self.shared, copy.deepcopy(self.own))
            other.tokens = self.tokens
            return other
        if self.own.tokens:
            self.shared += _runs(self.own)
            self.shared_tokens = self.tokens
            self.own = self._empty()
        return PrefixTable(self.shared, self._empty())

    def _empty(self) -> BlockTable:
        pool = self.own.pool
        return BlockTable(BlockPool(pool.keys[None], pool.values[None], pool.block_size), 1)

    # ------------------------------------------------------------------------------------------------- reading

    def pieces(self, first_token: int) -> Iterator[Piece]:
        """The history from position `first_token` on, for `attend_streaming`; valid until the table changes."""
        for begin, end, (keys, values) in self._cut_shared(first_token, self.shared_tokens):
            yield Piece(None, begin - first_token, end - first_token, exact_source(keys[None], values[None]))
        offset = max(self.shared_tokens - first_token, 0)
        for piece in pieces(self.own, max(first_token - self.shared_tokens, 0)):
            yield piece._replace(begin=piece.begin + offset, end=piece.end + offset)

    def materialize(self, first_token: int) -> States:
        """Contiguous ``[rows, heads, tokens, width]`` copies from position `first_token` on, bit for bit."""
        own = materialize(self.own, max(first_token - self.shared_tokens, 0))
        shared = [pair for _, _, pair in self._cut_shared(first_token, self.shared_tokens)]
        if not shared:
            return own
        copies = []
        for kind in (0, 1):
            parts = [pair[kind].expand(self.rows, -1, -1, -1) for pair in shared]
            copies.append(torch.cat([*parts, own[kind]], dim=2))
        return copies[0], copies[1]

    def states_of(self, row: int, columns: Int[Tensor, " tokens"]) -> States:
        """Copies of the keys and values of one row at rising positions `columns`, ``[heads, tokens, width]`` each."""
        parts: list[States] = []
        begin = 0
        for keys, values in self.shared:
            end = begin + keys.shape[1]
            inside = columns[(columns >= begin) & (columns < end)].to(keys.device) - begin
            if len(inside):
                parts.append((keys.index_select(1, inside), values.index_select(1, inside)))
            begin = end
        own = columns[columns >= self.shared_tokens] - self.shared_tokens
        if len(own) or not parts:
            size = self.own.pool.block_size
            blocks = torch.tensor([*self.own.shared, *self.own.private[row]], dtype=torch.int64)
            slots = (blocks[own // size] * size + own % size).to(self.own.pool.device)
            parts.append((self.own.pool.keys.index_select(1, slots), self.own.pool.values.index_select(1, slots)))
        if len(parts) == 1:
            return parts[0]
        keys, values = (torch.cat(states, dim=1) for states in zip(*parts, strict=True))
        return keys, values

    def _cut_shared(self, begin: int, end: int) -> Iterator[tuple[int, int, States]]:
        """(first, one past the last, states) of the shared pieces between two positions."""
        at = 0
        for keys, values in self.shared:
            first, last = max(begin, at), min(end, at + keys.shape[1])
            if first < last:
                yield first, last, (keys[:, first - at : last - at], values[:, first - at : last - at])
            at += keys.shape[1]

    def check_integrity(self) -> None:
        """Raise StateError unless the parts agree on the length."""
        self.own.check_integrity()
        if sum(keys.shape[1] for keys, _ in self.shared) != self.shared_tokens:
            raise StateError(f"the shared pieces do not hold {self.shared_tokens} tokens")
        if self.shared_tokens + self.own.tokens != self.tokens:
            raise StateError(f"{self.shared_tokens} shared and {self.own.tokens} own tokens are not {self.tokens}")


def _runs(table: BlockTable) -> Iterator[States]:
    """The states of a table of one row, as views of its arenas."""
    size = table.pool.block_size
    for run in table.segments():
        if not isinstance(run, Run):
            raise StateError("a single row is never gathered")
        begin, tokens = run.block * size, min(run.blocks * size, table.tokens - run.column * size)
        yield table.pool.keys[:, begin : begin + tokens], table.pool.values[:, begin : begin + tokens]
