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


class Arenas:
    """The bytes of a pool's blocks, all of them in memory.

    Args:
        samples: Empty tensors ``[heads, 0, width]`` of the dtype and on the device of what is to be stored.
        slots: Slots per block in each arena.
    """

    def __init__(self, samples: Sequence[Tensor], slots: Sequence[int]) -> None:
        self.samples = list(samples)
        self.slots = list(slots)
        self._tensors = self.samples

    @property
    def tensors(self) -> list[Tensor]:
        """The arenas, as attention reads them; valid until blocks move."""
        return self._tensors

    @property
    def held_bytes(self) -> int:
        """Bytes that these blocks take on the device, free ones included."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def room_bytes(self) -> int:
        """Bytes that these blocks take anywhere, free ones included."""
        return self.held_bytes

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Take over arenas that were stored."""
        self._tensors = list(tensors)

    def open_slot(self, block: int) -> int:
        """The slot of a block's first token where `write_rows` is going to write."""
        return block * self.slots[0]

    def write(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Copy ``[heads, slots, width]`` for each arena to the slots from `slot` on, which are the same in all."""
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor[:, slot : slot + part.shape[1]] = part

    def write_rows(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy ``[heads, rows, width]`` for each arena, row i to slot ``slots[i]`` as `open_slot` counts them."""
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.index_copy_(1, slots, part)

    def fill(self, blocks: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Write whole blocks, ``[heads, blocks, slots, width]`` for each arena."""
        index = torch.tensor(blocks, device=self.samples[0].device)
        for tensor, slots, part in zip(self._tensors, self.slots, parts, strict=True):
            tensor.unflatten(1, (-1, slots)).index_copy_(1, index, part.to(tensor.dtype))

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's bytes onto another block."""
        for tensor, slots in zip(self._tensors, self.slots, strict=True):
            tensor[:, target * slots : (target + 1) * slots] = tensor[:, source * slots : (source + 1) * slots]

    def forget(self, block: int) -> None:
        """The block is free: its bytes are needed no more."""

    def rearrange(self, order: Sequence[int | None]) -> None:
        """Move the blocks: slot i takes old block ``order[i]``. Invalidates every view."""
        self._tensors = [_moved(tensor, slots, order) for tensor, slots in zip(self._tensors, self.slots, strict=True)]

    def check_integrity(self, references: Sequence[int]) -> None:
        """Raise StateError unless there is room for so many blocks, and bytes for each that is referred to."""
        capacity_blocks = len(references)
        for tensor, slots in zip(self._tensors, self.slots, strict=True):
            if tensor.shape[1] != capacity_blocks * slots or not tensor.is_contiguous():
                raise StateError(f"an arena of shape {tuple(tensor.shape)} does not hold {capacity_blocks} blocks")


class ArenaPool:
    """Allocates, counts and moves blocks.

    Args:
        block_size: Tokens per block.
        samples: Empty tensors ``[heads, 0, width]`` of the dtype and on the device of what is to be stored.
        slots: Slots per block in each arena.
    """

    def __init__(self, block_size: int, samples: Sequence[Tensor], slots: Sequence[int]) -> None:
        self.block_size = block_size
        self.store = Arenas(samples, slots)
        """Where the bytes are."""
        self.references: list[int] = []
        # An insertion-ordered set: taking a given block and taking any block are both O(1).
        self._free: dict[int, None] = {}

    def adopt(self, arenas: Sequence[Tensor]) -> None:
        """Take over arenas that were stored, with no free block; the caller retains each block it refers to.

        Raises:
            StateError: They are not what an arena of this pool is.
        """
        blocks = arenas[0].shape[1] // self.slots[0]
        for own, arena, slots in zip(self.samples, arenas, self.slots, strict=True):
            expected = (own.shape[0], blocks * slots, own.shape[2], own.dtype)
            if (*arena.shape, arena.dtype) != expected:
                raise StateError(f"an arena of {(*arena.shape, arena.dtype)} was stored where {expected} is expected")
        self.store.adopt(arenas)
        self.references = [0] * blocks
        self._free = {}

    @property
    def samples(self) -> list[Tensor]:
        """Empty tensors ``[heads, 0, width]``: heads, width, dtype and device of each arena."""
        return self.store.samples

    @property
    def slots(self) -> list[int]:
        """Slots per block in each arena."""
        return self.store.slots

    @property
    def arenas(self) -> list[Tensor]:
        """The arenas, ``[heads, capacity_blocks * slots, width]`` each, to be read; valid until blocks move."""
        return self.store.tensors

    @property
    def device(self) -> torch.device:
        """Where the arenas are."""
        return self.samples[0].device

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
            sample.shape[0] * slots * sample.shape[2] * sample.element_size()
            for sample, slots in zip(self.samples, self.slots, strict=True)
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
            self.store.forget(block)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's bytes onto another block."""
        self.store.copy_block(source, target)

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
        self.store.rearrange(order)
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
        self.store.check_integrity(self.references)


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
