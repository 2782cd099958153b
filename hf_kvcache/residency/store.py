"""The bytes of a pool whose full blocks lie in a lower tier.

A drop-in for `Arenas`: the same blocks have the same numbers, so tables, reading plans and attention do not know the
difference. What is written goes near at hand while its block is incomplete, and down once it is full: one time, and
never again, since full blocks never change. To be read, the blocks are brought into a buffer laid out as the arenas
would be (`Reader`), and so attention does the same operations on the same layout, with the same bits as result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..blocks import Arenas
from ..errors import StateError, StorageError
from .near import NearBlocks, block_parts
from .reader import Reader, naming
from .records import Record, RecordLayout
from .tier import Region

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
        self.near = NearBlocks(samples, slots)
        """The blocks that are still being written."""
        self.version = 0
        """Changes whenever `records` gains one or blocks move."""

    def take(self, arenas: Arenas, full: Sequence[int], incomplete: Iterable[int], capacity_blocks: int) -> None:
        """Take over blocks that lie in memory.

        Raises:
            StorageError: They cannot be written down. The arenas still hold them.
        """
        self.capacity_blocks = capacity_blocks
        step = self._chunk_blocks
        for begin in range(0, len(full), step):
            some = list(full[begin : begin + step])
            self.fill(some, block_parts(arenas, some))
        for block in incomplete:
            place = self.near.take(block)
            for near, arena, slots in zip(self.near.arenas.tensors, arenas.tensors, self.slots, strict=True):
                near[:, place * slots : (place + 1) * slots] = arena[:, block * slots : (block + 1) * slots]

    def settle(self, incomplete: Iterable[int]) -> None:
        """Write down what is near at hand and full by now.

        Raises:
            StorageError: It cannot be written; it stays near at hand.
        """
        still = set(incomplete)
        full = [block for block in self.near.places if block not in still]
        if full:
            self.fill(full, self.near.parts(full))

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
        return self.near.arenas.held_bytes

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

    # ------------------------------------------------------------------------------------------------- writing

    def adopt(self, tensors: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Refuse: a history that was stored is restored into memory, from where it may go down."""
        raise StateError("blocks in a lower tier cannot be replaced")

    def open_slot(self, block: int) -> int:
        """See `Arenas.open_slot`."""
        return self._near(block) * self.slots[0]

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
        self._near(block)
        self.near.write(block, offset, parts)

    def write_rows(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """See `Arenas.write_rows`."""
        self.near.write_rows(slots, parts)

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
        self.near.copy(source, target)

    def forget(self, block: int) -> None:
        """See `Arenas.forget`."""
        self.records.pop(block, None)
        self.near.forget(block)

    def rearrange(self, order: Sequence[int | None]) -> None:
        """See `Arenas.rearrange`. Blocks get other numbers; no byte moves."""
        number = {old: new for new, old in enumerate(order) if old is not None}
        self.records = {number[block]: record for block, record in self.records.items()}
        self.near.renumber(number)
        self.capacity_blocks = len(order)
        self.version += 1

    def check_integrity(self, references: Sequence[int]) -> None:
        """See `Arenas.check_integrity`."""
        used = sorted(block for block, count in enumerate(references) if count)
        near = self.near.places
        if len(references) != self.capacity_blocks or used != sorted([*self.records, *near]):
            raise StateError(
                f"layer {self.layer}: of blocks {used}, {sorted(self.records)} are below and {sorted(near)} near at "
                f"hand, with room for {self.capacity_blocks} of {len(references)}"
            )
        self.near.check_integrity()

    def _near(self, block: int) -> int:
        """Where among the near blocks a block is; it is brought there if it is not.

        Raises:
            StorageError: It cannot be read, or is not what was written; it stays below.
        """
        if block in self.near.places:
            return self.near.places[block]
        if block not in self.records:
            return self.near.take(block)
        record, place = self.records[block], self.near.take(block)
        try:
            with naming(self, [block]):
                record.region.load([record], self.near.arenas.tensors, [place])
                record.region.check([record], self.near.arenas.tensors, [place])
        except BaseException:
            # Whatever went wrong, what lies there is not the block.
            self.near.forget(block)
            raise
        del self.records[block]
        return place

    @property
    def _chunk_blocks(self) -> int:
        return max(1, _CHUNK_BYTES // self.layout.record_bytes)
