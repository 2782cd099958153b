"""A pool of fixed-size blocks in one contiguous arena for keys and one for values.

The arenas are head-major, ``[heads, capacity_blocks * block_size, width]``, so that consecutive blocks are one
strided view per head and attention reads them where they lie. A block is named by its slot number. The pool counts
references; it knows nothing of rows, tokens or layers.

Growing moves the arena (`rearrange`) instead of adding a second one: a history stays readable as one view, and
because the arena grows by about 1.5 % at a time the move costs a few token copies per appended token, not one copy of
the history per token as concatenation does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import StateError


class BlockPool:
    """Allocates, counts and stores blocks of `block_size` tokens.

    Args:
        keys: A sample ``[rows, key_heads, any, key_width]`` that gives heads, width, dtype and device of the keys.
        values: The same for the values, whose heads and width may differ (latent attention).
        block_size: Tokens per block.
    """

    def __init__(self, keys: Tensor, values: Tensor, block_size: int) -> None:
        self.block_size = block_size
        self.keys = keys.new_empty(keys.shape[1], 0, keys.shape[3])
        self.values = values.new_empty(values.shape[1], 0, values.shape[3])
        self.references: list[int] = []
        # An insertion-ordered set: taking a given block and taking any block are both O(1).
        self._free: dict[int, None] = {}

    @classmethod
    def restore(
        cls,
        keys: Float[Tensor, "key_heads tokens key_width"],
        values: Float[Tensor, "value_heads tokens value_width"],
        block_size: int,
    ) -> BlockPool:
        """A pool whose arenas are these tensors, with no free block; the caller retains each block it refers to."""
        pool = cls(keys[None], values[None], block_size)
        pool.keys, pool.values = keys, values
        pool.references = [0] * (keys.shape[1] // block_size)
        return pool

    @property
    def capacity_blocks(self) -> int:
        """Blocks the arenas have room for."""
        return len(self.references)

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks with at least one reference."""
        return self.capacity_blocks - self.free_blocks

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(arena.shape[0] * arena.shape[2] * arena.element_size() for arena in (self.keys, self.values))

    def allocate(self, after: int | None = None) -> int:
        """Take a free block with one reference, the one that follows block `after` in memory if it is free.

        Raises:
            StateError: No block is free. Callers make room with `rearrange` first.
        """
        follower = -1 if after is None else after + 1
        if follower in self._free:
            del self._free[follower]
            block = follower
        elif self._free:
            block = self._free.popitem()[0]
        else:
            raise StateError("the block pool is full; make room with `rearrange` before allocating")
        self.references[block] = 1
        return block

    def retain(self, block: int, count: int = 1) -> None:
        """Add `count` references to a block in use."""
        self.references[block] += count

    def release(self, block: int) -> None:
        """Give one reference back; the block is free when none is left. Its bytes stay until it is reused."""
        self.references[block] -= 1
        if self.references[block] == 0:
            self._free[block] = None

    def write(
        self,
        token: int,
        keys: Float[Tensor, "key_heads tokens key_width"],
        values: Float[Tensor, "value_heads tokens value_width"],
    ) -> None:
        """Copy states into the arena from slot `token` (= block * block_size + offset) on."""
        end = token + keys.shape[1]
        self.keys[:, token:end] = keys
        self.values[:, token:end] = values

    def write_rows(
        self,
        tokens: Int[Tensor, " rows"],
        keys: Float[Tensor, "rows key_heads 1 key_width"],
        values: Float[Tensor, "rows value_heads 1 value_width"],
    ) -> None:
        """Copy one token of each row into the arena, row i at slot ``tokens[i]``, in one call for all rows."""
        self.keys.index_copy_(1, tokens, keys[:, :, 0].transpose(0, 1))
        self.values.index_copy_(1, tokens, values[:, :, 0].transpose(0, 1))

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's bytes onto another block."""
        size = self.block_size
        for arena in (self.keys, self.values):
            arena[:, target * size : (target + 1) * size] = arena[:, source * size : (source + 1) * size]

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of `blocks` (``[rows, columns]`` numbers), each ``[rows, heads, columns * block_size, width]``."""
        rows, columns = blocks.shape
        flat = blocks.reshape(-1)
        copies = []
        for arena in (self.keys, self.values):
            paged = arena.view(arena.shape[0], -1, self.block_size, arena.shape[2])
            copy = paged.index_select(1, flat).view(arena.shape[0], rows, columns * self.block_size, arena.shape[2])
            copies.append(copy.transpose(0, 1))
        return copies[0], copies[1]

    def rearrange(self, order: Sequence[int | None]) -> dict[int, int]:
        """Move the blocks into new arenas: slot i takes old block ``order[i]``, or is free where that is None.

        Invalidates every view of the arenas.

        Args:
            order: Every block in use exactly once, and a None for each free slot.

        Returns:
            The new slot of each old block.
        """
        moved = {old: new for new, old in enumerate(order) if old is not None}
        if len(moved) != self.used_blocks:
            raise StateError(f"rearranging must keep all {self.used_blocks} blocks in use, {len(moved)} were listed")
        self.keys = self._moved(self.keys, order)
        self.values = self._moved(self.values, order)
        self.references = [0 if old is None else self.references[old] for old in order]
        self._free = {slot: None for slot in range(len(order) - 1, -1, -1) if order[slot] is None}
        return moved

    def _moved(self, arena: Tensor, order: Sequence[int | None]) -> Tensor:
        size = self.block_size
        # An arena made in inference mode could not be written outside it, and a history may go on in another mode.
        with torch.inference_mode(False):
            target = arena.new_empty(arena.shape[0], len(order) * size, arena.shape[2])
        start = 0
        while start < len(order):
            first = order[start]
            if first is None:
                start += 1
                continue
            end = start + 1
            while end < len(order) and order[end] == first + end - start:
                end += 1
            target[:, start * size : end * size] = arena[:, first * size : (first + end - start) * size]
            start = end
        return target

    def check_integrity(self) -> None:
        """Raise StateError unless counts, free list and arenas agree."""
        unreferenced = {block for block, count in enumerate(self.references) if count == 0}
        if unreferenced != set(self._free):
            raise StateError(f"free list {sorted(self._free)} differs from the unreferenced {sorted(unreferenced)}")
        if any(count < 0 for count in self.references):
            raise StateError(f"a block was released more often than retained: {self.references}")
        for arena in (self.keys, self.values):
            if arena.shape[1] != self.capacity_blocks * self.block_size or not arena.is_contiguous():
                raise StateError(f"an arena of shape {tuple(arena.shape)} does not hold {self.capacity_blocks} blocks")


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bit patterns (NaN equals itself, 0.0 differs from -0.0)."""
    integer = _INTEGER_OF_BYTES[left.element_size()]
    return torch.equal(left.view(integer), right.view(integer))


def bit_sums(states: Float[Tensor, "rows heads tokens width"], block_size: int) -> list[list[int]]:
    """A cheap fingerprint of each row's blocks, ``[rows][blocks]``: equal blocks have equal sums, not the reverse."""
    rows, heads, tokens, width = states.shape
    bits = states.view(_INTEGER_OF_BYTES[states.element_size()])
    blocks = bits.reshape(rows, heads, tokens // block_size, block_size, width)
    sums: list[list[int]] = blocks.sum(dim=(1, 3, 4), dtype=torch.int64).tolist()
    return sums


_INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
