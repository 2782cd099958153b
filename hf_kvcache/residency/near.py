"""The few blocks of a layer that tokens are still written to, while the full ones lie in a lower tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..blocks import Arenas
from ..blocks.columns import consecutive
from ..errors import StateError


class NearBlocks:
    """Blocks near at hand, in arenas that have hardly more room than they need.

    Args:
        samples: See `Arenas`.
        slots: See `Arenas`.
    """

    def __init__(self, samples: Sequence[Tensor], slots: Sequence[int]) -> None:
        self.arenas = Arenas(samples, slots)
        self.slots = list(slots)
        self.places: dict[int, int] = {}
        """Where in the arenas each block is."""
        self.version = 0
        """Changes whenever a block comes, goes or is written to."""
        self._free: list[int] = []

    def take(self, block: int) -> int:
        """Make a block near, its bytes undefined. Returns where in the arenas it is."""
        if not self._free:
            held = len(self.places)
            more = max(held, 1)
            self.arenas.rearrange([*range(held), *[None] * more])
            self._free = list(range(held + more - 1, held - 1, -1))
        place = self.places[block] = self._free.pop()
        self.version += 1
        return place

    def forget(self, block: int) -> None:
        """The block is near no more, if it was."""
        place = self.places.pop(block, None)
        if place is not None:
            self._free.append(place)
            self.version += 1

    def copy(self, source: int, target: int) -> None:
        """Make a block near, with the bytes of another near one."""
        place = self.take(target)
        self.arenas.copy_block(self.places[source], place)

    def renumber(self, number: Mapping[int, int]) -> None:
        """Blocks get other numbers; no byte moves."""
        self.places = {number[block]: place for block, place in self.places.items()}
        self.version += 1

    def write(self, block: int, offset: int, parts: Sequence[Tensor]) -> None:
        """Copy ``[heads, tokens, width]`` for each arena into a near block, from its token `offset` on."""
        self.arenas.write(self.places[block] * self.slots[0] + offset, parts)
        self.version += 1

    def write_rows(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """See `Arenas.write_rows`."""
        self.arenas.write_rows(slots, parts)
        self.version += 1

    def parts(self, blocks: Sequence[int]) -> list[Tensor]:
        """Copies of near blocks, ``[heads, blocks, slots, width]`` for each arena."""
        return block_parts(self.arenas, [self.places[block] for block in blocks])

    def lay_into(self, tensors: Sequence[Tensor]) -> None:
        """Copy all near blocks to their places among the arenas `tensors`."""
        blocks, places = list(self.places), list(self.places.values())
        if not blocks:
            return
        if len(consecutive(blocks)) == 1 and len(consecutive(places)) == 1:
            for tensor, near, size in zip(tensors, self.arenas.tensors, self.slots, strict=True):
                come = near[:, places[0] * size : (places[-1] + 1) * size]
                tensor[:, blocks[0] * size : (blocks[-1] + 1) * size] = come
            return
        to, come_from = (torch.tensor(numbers, device=tensors[0].device) for numbers in (blocks, places))
        for tensor, near, size in zip(tensors, self.arenas.tensors, self.slots, strict=True):
            come = near.unflatten(1, (-1, size)).index_select(1, come_from)
            tensor.unflatten(1, (-1, size)).index_copy_(1, to, come)

    def check_integrity(self) -> None:
        """Raise StateError unless every place of the arenas is one block's or free."""
        taken = sorted([*self.places.values(), *self._free])
        if taken != list(range(self.arenas.tensors[0].shape[1] // self.slots[0])):
            raise StateError(f"blocks near at hand are counted as {taken}")


def block_parts(arenas: Arenas, blocks: Sequence[int]) -> list[Tensor]:
    """Copies of some blocks of arenas, ``[heads, blocks, slots, width]`` for each."""
    return [
        tensor.unflatten(1, (-1, slots))[:, list(blocks)]
        for tensor, slots in zip(arenas.tensors, arenas.slots, strict=True)
    ]
