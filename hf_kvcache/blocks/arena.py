"""Blocks in one or several contiguous arenas, counted and moved together.

An arena is head-major, ``[heads, capacity_blocks * slots, width]``, so that consecutive blocks are one strided view
per head and attention reads them where they lie. A block is named by its number and has the same place in every
arena. Nothing here knows of rows, tokens or layers, or of what an arena holds: raw states, codes or scales.

Growing moves the arenas (`rearrange`) instead of adding more: a history stays readable as one view, and because they
grow by about 1.5 % at a time the move costs a few token copies per appended token, not one copy of the history per
token as concatenation does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import StateError


class ArenaPool:
    """Allocates, counts and moves blocks.

    Args:
        block_size: Tokens per block.
        arenas: Empty tensors ``[heads, 0, width]`` of the dtype and on the device of what is to be stored.
        slots: Slots per block in each arena.
    """

    def __init__(self, block_size: int, arenas: Sequence[Tensor], slots: Sequence[int]) -> None:
        self.block_size = block_size
        self.arenas = list(arenas)
        self.slots = list(slots)
        self.references: list[int] = []
        # An insertion-ordered set: taking a given block and taking any block are both O(1).
        self._free: dict[int, None] = {}

    def adopt(self, arenas: Sequence[Tensor]) -> None:
        """Take over arenas that were stored, with no free block; the caller retains each block it refers to.

        Raises:
            StateError: They are not what an arena of this pool is.
        """
        blocks = arenas[0].shape[1] // self.slots[0]
        for own, arena, slots in zip(self.arenas, arenas, self.slots, strict=True):
            expected = (own.shape[0], blocks * slots, own.shape[2], own.dtype)
            if (*arena.shape, arena.dtype) != expected:
                raise StateError(f"an arena of {(*arena.shape, arena.dtype)} was stored where {expected} is expected")
        self.arenas = list(arenas)
        self.references = [0] * blocks
        self._free = {}

    @property
    def device(self) -> torch.device:
        """Where the arenas are."""
        return self.arenas[0].device

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
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(
            arena.shape[0] * slots * arena.shape[2] * arena.element_size()
            for arena, slots in zip(self.arenas, self.slots, strict=True)
        )

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

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's bytes onto another block."""
        for arena, slots in zip(self.arenas, self.slots, strict=True):
            arena[:, target * slots : (target + 1) * slots] = arena[:, source * slots : (source + 1) * slots]

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
        self.arenas = [_moved(arena, slots, order) for arena, slots in zip(self.arenas, self.slots, strict=True)]
        self.references = [0 if old is None else self.references[old] for old in order]
        self._free = {slot: None for slot in range(len(order) - 1, -1, -1) if order[slot] is None}
        return moved

    def check_integrity(self) -> None:
        """Raise StateError unless counts, free list and arenas agree."""
        unreferenced = {block for block, count in enumerate(self.references) if count == 0}
        if unreferenced != set(self._free):
            raise StateError(f"free list {sorted(self._free)} differs from the unreferenced {sorted(unreferenced)}")
        if any(count < 0 for count in self.references):
            raise StateError(f"a block was released more often than retained: {self.references}")
        for arena, slots in zip(self.arenas, self.slots, strict=True):
            if arena.shape[1] != self.capacity_blocks * slots or not arena.is_contiguous():
                raise StateError(f"an arena of shape {tuple(arena.shape)} does not hold {self.capacity_blocks} blocks")


def _moved(arena: Tensor, slots: int, order: Sequence[int | None]) -> Tensor:
    # An arena made in inference mode could not be written outside it, and a history may go on in another mode.
    with torch.inference_mode(False):
        target = arena.new_empty(arena.shape[0], len(order) * slots, arena.shape[2])
    start = 0
    while start < len(order):
        first = order[start]
        if first is None:
            start += 1
            continue
        end = start + 1
        while end < len(order) and order[end] == first + end - start:
            end += 1
        target[:, start * slots : end * slots] = arena[:, first * slots : (first + end - start) * slots]
        start = end
    return target
