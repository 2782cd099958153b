"""A whole history in blocks, and the smallest and largest number of every key channel in each full block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import materialize
from ..blocks import BlockPool, BlockTable, Usage
from ..errors import StateError

# Blocks of bounds, by this many: one for each block of the history.
_BOUNDS_A_BLOCK = 16


class QuestTable:
    """The histories of some rows of one layer.

    Args:
        keys: A sample ``[rows, heads, any, key_width]`` that gives rows, heads, widths, dtype and device.
        values: The same for the values.
        block_size: Tokens per block.
    """

    def __init__(self, keys: Tensor, values: Tensor, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = BlockTable(BlockPool(keys, values, block_size), keys.shape[0])
        """All tokens."""
        self.bounds = BlockTable(BlockPool(keys, keys, _BOUNDS_A_BLOCK), keys.shape[0])
        """A token here is a full block there: its least keys for keys, its largest for values, channel by channel."""
        self._numbers: tuple[int, Tensor | None] = (-1, None)

    @property
    def tokens(self) -> int:
        """Tokens seen, all of which are held."""
        return self.blocks.tokens

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.blocks.rows

    @property
    def first_token(self) -> int:
        """Position of the oldest token held: 0."""
        return 0

    @property
    def tokens_held(self) -> int:
        """Tokens of each row that are held: all."""
        return self.blocks.tokens

    @property
    def raw_pool(self) -> BlockPool:
        """Where the tokens are."""
        return self.blocks.pool

    @property
    def full_blocks(self) -> int:
        """Blocks that are full, and therefore have bounds."""
        return self.blocks.tokens // self.block_size

    def usage(self) -> Usage:
        """Bytes held now. Bounds count as scales."""
        states, bounds = self.blocks.usage(), self.bounds.usage()
        return Usage(
            states.payload_bytes,
            bounds.payload_bytes,
            states.unused_bytes + bounds.unused_bytes,
            states.table_bytes + bounds.table_bytes,
        )

    def block_numbers(self) -> Int[Tensor, "rows blocks"]:
        """The block of the pool that holds each block of the history, an open one included."""
        version, numbers = self._numbers
        if numbers is None or version != self.blocks.version:
            device, stride = self.blocks.pool.device, self.blocks.uniform_stride()
            if stride is None:
                table = [self.blocks.shared + row for row in self.blocks.private]
                numbers = torch.tensor(table, device=device)
            else:
                columns = torch.arange(-(-self.blocks.tokens // self.block_size), device=device)
                numbers = stride[0] + stride[1] * torch.arange(self.rows, device=device)[:, None] + columns
            self._numbers = (self.blocks.version, numbers)
        return numbers

    def append(
        self,
        keys: Float[Tensor, "rows heads tokens key_width"],
        values: Float[Tensor, "rows heads tokens value_width"],
    ) -> None:
        """Write the states of new tokens, and the bounds of the blocks that became full."""
        self.blocks.append(keys, values)
        begin, end = self.bounds.tokens * self.block_size, self.full_blocks * self.block_size
        if begin < end:
            full = materialize(self.blocks, begin)[0][:, :, : end - begin].unflatten(2, (-1, self.block_size))
            self.bounds.append(full.amin(3), full.amax(3))

    def select(self, indices: Sequence[int]) -> None:
        """Make row i a copy of old row ``indices[i]``; blocks are shared."""
        self.blocks.select(indices)
        self.bounds.select(indices)

    def truncate(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens."""
        self.blocks.truncate(tokens)
        self.bounds.truncate(self.full_blocks)

    def drop_before(self, token: int) -> None:
        """Nothing: every token may still be read."""

    def skip(self, blocks: int) -> None:
        """Nothing: every token may be read by later queries."""
        if blocks:
            raise StateError("a history of which every block may be read cannot begin behind its first token")

    def check_integrity(self) -> None:
        """Raise StateError unless blocks and bounds agree."""
        self.blocks.check_integrity()
        self.bounds.check_integrity()
        if self.bounds.tokens != self.full_blocks:
            raise StateError(f"{self.full_blocks} blocks are full, but {self.bounds.tokens} have bounds")
        if not self.full_blocks or self.blocks.pool.keys.is_meta:
            return
        keys = materialize(self.blocks, 0)[0][:, :, : self.full_blocks * self.block_size]
        low, high = (bound[:, :, :, None] for bound in materialize(self.bounds, 0))
        full = keys.unflatten(2, (-1, self.block_size))
        if bool(((full < low) | (full > high)).any()):
            raise StateError("a key lies outside the bounds of its block")
