"""The bytes of a pool whose full blocks lie in a lower tier.

A drop-in for `Arenas`: the same blocks have the same numbers, so tables, reading plans and attention do not know the
difference. What is written goes near at hand while its block is incomplete, and down once it is full: one time, and
never again, since full blocks never change. To be read, the blocks are brought into a buffer laid out as the arenas
would be (`Reader`), and so attention does the same operations on the same layout, with the same bits as result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..blocks import Arenas
from ..blocks.columns import consecutive
from ..errors import StateError, StorageError
from .reader import Reader
from .records import Record, RecordLayout
from .tier import ReadError, Region

# Bytes written down at once, which bounds the memory that takes.
_CHUNK_BYTES = 1 << 20


class LowerArenas(Arenas):
    """Blocks in a lower tier, and the incomplete ones near at hand.

    Args:
        samples: See `Arenas`.
        slots: See `Arenas`.
        regions: Where full blocks go: to the first that has room.
        reader: What brings them back.
        layer: Number of the layer, for messages.
    """

    def __init__(
        self, samples: Sequence[Tensor], slots: Sequence[int], regions: Sequence[Region], reader: Reader, layer: int
    ) -> None:
        super().__init__(samples, slots)
        self.layout = RecordLayout(samples, slots)
        self.regions = list(regions)
        self.reader = reader
        self.layer = layer
        self.capacity_blocks = 0
        self.records: dict[int, Record] = {}
        """Where each full block is."""
        self.near = Arenas(samples, slots)
        self.near_slots: dict[int, int] = {}
        """Where in `near` each block is that is still being written."""
        self.version = 0
        """Changes whenever `records` gains one or blocks move."""
        self.near_version = 0
        """Changes whenever something is written near at hand."""
        self._free_near: list[int] = []

    def take(self, arenas: Arenas, full: Sequence[int], incomplete: Iterable[int], capacity_blocks: int) -> None:
        """Take over blocks that lie in memory.

        Raises:
            StorageError: They cannot be written down. The arenas still hold them.
        """
        self.capacity_blocks = capacity_blocks
        step = self._chunk_blocks
        for begin in range(0, len(full), step):
            some = list(full[begin : begin + step])
            self.fill(some, self._blocks_of(arenas, some))
        for block in incomplete:
            slot = self._near_slot(block)
            for near, arena, slots in zip(self.near.tensors, arenas.tensors, self.slots, strict=True):
                near[:, slot * slots : (slot + 1) * slots] = arena[:, block * slots : (block + 1) * slots]

    def settle(self, incomplete: Iterable[int]) -> None:
        """Write down what is near at hand and full by now.

        Raises:
            StorageError: It cannot be written; it stays near at hand.
        """
        still = set(incomplete)
        full = [block for block in self.near_slots if block not in still]
        if full:
            self.fill(full, self._blocks_of(self.near, [self.near_slots[block] for block in full]))

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def tensors(self) -> list[Tensor]:
        """Arenas in a read buffer with every block in its place; valid until another layer is read.

        Raises:
            StorageError: A block cannot be read, or is not what was written.
        """
        return self.reader.read(self)

    @property
    def held_bytes(self) -> int:
        """Bytes on the device, read buffers aside."""
        return self.near.held_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes here and below."""
        return self.held_bytes + len(self.records) * self.layout.record_bytes

    @property
    def lower_bytes(self) -> dict[str, int]:
        """Bytes in each kind of lower tier."""
        places: dict[str, int] = {}
        for record in self.records.values():
            place = record.region.place
            places[place] = places.get(place, 0) + self.layout.record_bytes
        return places

    def bring_near(self, tensors: Sequence[Tensor]) -> None:
        """Copy the blocks that are near at hand to their places among the arenas `tensors`."""
        blocks, slots = list(self.near_slots), list(self.near_slots.values())
        if not blocks:
            return
        if len(consecutive(blocks)) == 1 and len(consecutive(slots)) == 1:
            for tensor, near, size in zip(tensors, self.near.tensors, self.slots, strict=True):
                come = near[:, slots[0] * size : (slots[-1] + 1) * size]
                tensor[:, blocks[0] * size : (blocks[-1] + 1) * size] = come
            return
        to, come_from = (torch.tensor(numbers, device=tensors[0].device) for numbers in (blocks, slots))
        for tensor, near, size in zip(tensors, self.near.tensors, self.slots, strict=True):
            come = near.unflatten(1, (-1, size)).index_select(1, come_from)
            tensor.unflatten(1, (-1, size)).index_copy_(1, to, come)

    # ------------------------------------------------------------------------------------------------- writing

    def adopt(self, tensors: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Refuse: a history that was stored is restored into memory, from where it may go down."""
        raise StateError("blocks in a lower tier cannot be replaced")

    def open_slot(self, block: int) -> int:
        """See `Arenas.open_slot`."""
        return self._near_slot(block) * self.slots[0]

    def write(self, slot: int, parts: Sequence[Tensor]) -> None:
        """See `Arenas.write`. Whole blocks go down at once."""
        size, length = self.slots[0], parts[0].shape[1]
        block, offset = divmod(slot, size)
        if offset == 0 and length % size == 0:
            step = self._chunk_blocks
            for begin in range(0, length // size, step):
                cut = slice(begin * size, (begin + step) * size)
                some = [part[:, cut].unflatten(1, (-1, size)) for part in parts]
                self.fill(range(block + begin, block + begin + some[0].shape[1]), some)
            return
        self.near.write(self.open_slot(block) + offset, parts)
        self.near_version += 1

    def write_rows(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """See `Arenas.write_rows`."""
        self.near.write_rows(slots, parts)
        self.near_version += 1

    def fill(self, blocks: Sequence[int], parts: Sequence[Tensor]) -> None:
        """See `Arenas.fill`.

        Raises:
            StorageError: There is no room below, or it cannot be written; nothing changes.
        """
        rows = self.layout.pack(parts)
        for region in self.regions:
            records = self._written(region, rows, blocks)
            if records is not None:
                break
        else:
            raise StorageError(
                f"layer {self.layer}, block {blocks[0]}: the lower tiers are full. Give them a larger budget, or start "
                "again with `cache.reset()`"
            )
        for block, record in zip(blocks, records, strict=True):
            self.forget(block)
            self.records[block] = record
        self.version += 1

    def _written(self, region: Region, rows: Tensor, blocks: Sequence[int]) -> list[Record] | None:
        try:
            return region.write(rows)
        except StorageError as error:
            raise StorageError(f"layer {self.layer}, block {blocks[0]}: {error}") from error

    def copy_block(self, source: int, target: int) -> None:
        """See `Arenas.copy_block`. Two blocks share a record until one of them is written to."""
        self.forget(target)
        if source in self.records:
            self.records[target] = self.records[source]
            self.version += 1
            return
        self._near_slot(target)
        self.near.copy_block(self.near_slots[source], self.near_slots[target])
        self.near_version += 1

    def forget(self, block: int) -> None:
        """See `Arenas.forget`."""
        self.records.pop(block, None)
        slot = self.near_slots.pop(block, None)
        if slot is not None:
            self._free_near.append(slot)
            self.near_version += 1

    def rearrange(self, order: Sequence[int | None]) -> None:
        """See `Arenas.rearrange`. Blocks get other numbers; no byte moves."""
        number = {old: new for new, old in enumerate(order) if old is not None}
        self.records = {number[block]: record for block, record in self.records.items()}
        self.near_slots = {number[block]: slot for block, slot in self.near_slots.items()}
        self.capacity_blocks = len(order)
        self.version += 1
        self.near_version += 1

    def check_integrity(self, references: Sequence[int]) -> None:
        """See `Arenas.check_integrity`."""
        used = sorted(block for block, count in enumerate(references) if count)
        if len(references) != self.capacity_blocks or used != sorted([*self.records, *self.near_slots]):
            raise StateError(
                f"layer {self.layer}: of blocks {used}, {sorted(self.records)} are below and {sorted(self.near_slots)} "
                f"near at hand, with room for {self.capacity_blocks} of {len(references)}"
            )
        taken = [*self.near_slots.values(), *self._free_near]
        if sorted(taken) != list(range(self.near.tensors[0].shape[1] // self.slots[0])):
            raise StateError(f"layer {self.layer}: blocks near at hand are counted as {taken}")

    def _near_slot(self, block: int) -> int:
        """Where in `near` a block is; it is brought there, or room is made, if it is not."""
        slot = self.near_slots.get(block)
        if slot is not None:
            return slot
        if not self._free_near:
            held = len(self.near_slots)
            more = max(held, 1)
            self.near.rearrange([*range(held), *[None] * more])
            self._free_near = list(range(held + more - 1, held - 1, -1))
        if block in self.records:
            self._bring(block, self.records[block], self._free_near[-1])
            del self.records[block]
        slot = self.near_slots[block] = self._free_near.pop()
        self.near_version += 1
        return slot

    def _bring(self, block: int, record: Record, slot: int) -> None:
        rows = torch.empty(1, self.layout.record_bytes, dtype=torch.uint8, device=self.samples[0].device)
        try:
            record.region.load([record], rows)
        except ReadError as fault:
            raise StorageError(f"layer {self.layer}, block {block}: {fault}") from fault
        self.layout.unpack(rows, self.near.tensors, [slot])

    @property
    def _chunk_blocks(self) -> int:
        return max(1, _CHUNK_BYTES // self.layout.record_bytes)

    def _blocks_of(self, arenas: Arenas, blocks: Sequence[int]) -> list[Tensor]:
        """The parts of some blocks, ``[heads, blocks, slots, width]``."""
        return [
            tensor.unflatten(1, (-1, slots))[:, list(blocks)]
            for tensor, slots in zip(arenas.tensors, self.slots, strict=True)
        ]
