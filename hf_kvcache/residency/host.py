"""Host memory as the lower tier of an accelerator: pinned, so that copies run beside the model's own work."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from ..blocks.columns import consecutive
from ..errors import StorageError
from .records import Record, RecordLayout
from .tier import Slots

# Memory is taken in pieces of about this size: pinning is slow, and what is pinned cannot be moved.
_SLAB_BYTES = 16 << 20


class HostTier:
    """Slabs of host memory.

    Args:
        budget_bytes: The most that all records together may take; None for as much as there is.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.written_bytes = 0
        self.read_bytes = 0
        self._regions: weakref.WeakSet[HostRegion] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> HostTier:
        return self

    def open(self, layout: RecordLayout, layer: int) -> HostRegion:
        """Room without a slab yet."""
        region = HostRegion(self, layout, layer)
        self._regions.add(region)
        return region

    @property
    def held_bytes(self) -> int:
        """Bytes of all records."""
        return sum(len(region.slots) * region.record_bytes for region in self._regions)


class HostRegion:
    """Slabs with the records of one layer."""

    place = "host"

    def __init__(self, tier: HostTier, layout: RecordLayout, layer: int) -> None:
        self.tier = tier
        self.layout = layout
        self.record_bytes = layout.record_bytes
        self.layer = layer
        self.slots = Slots()
        self.slab_records = max(1, _SLAB_BYTES // self.record_bytes)
        self.slabs: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> HostRegion:
        return self

    def write(self, rows: UInt8[Tensor, "records record_bytes"]) -> list[Record] | None:
        """See `Region.write`. Waits until the rows are there: they are one block in some dozens of tokens."""
        tier = self.tier
        if tier.budget_bytes is not None and tier.held_bytes + rows.numel() > tier.budget_bytes:
            return None
        slots = self.slots.take(len(rows))
        records = [Record(self, slot, 0) for slot in slots]
        while len(self.slabs) * self.slab_records < self.slots.end:
            self.slabs.append(self._slab(rows.device))
        for first, slab, begin, length in self._spans(slots):
            self.slabs[slab][begin : begin + length] = rows[first : first + length]
        tier.written_bytes += rows.numel()
        return records

    def _slab(self, device: torch.device) -> Tensor:
        try:
            with torch.inference_mode(False):
                # Only accelerators read pinned memory faster.
                return torch.empty(
                    self.slab_records, self.record_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
                )
        except (RuntimeError, MemoryError) as error:
            raise StorageError(f"no host memory is left for the history of layer {self.layer}: {error}") from error

    def load(self, records: Sequence[Record], tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """See `Region.load`. On an accelerator the copies, few and large, are queued on its current stream."""
        rows = torch.empty(len(records), self.record_bytes, dtype=torch.uint8, device=tensors[0].device)
        for first, slab, begin, length in self._spans([record.slot for record in records]):
            rows[first : first + length].copy_(self.slabs[slab][begin : begin + length], non_blocking=True)
        self.layout.unpack(rows, tensors, blocks)
        self.tier.read_bytes += rows.numel()

    def check(self, records: Sequence[Record], tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Nothing: copies within memory are trusted."""

    def _spans(self, slots: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """(index of the first, slab, place in it, length) of runs of slots that do not cross slabs."""
        spans = []
        for first, slot, length in consecutive(slots):
            done = 0
            while done < length:
                slab, begin = divmod(slot + done, self.slab_records)
                count = min(length - done, self.slab_records - begin)
                spans.append((first + done, slab, begin, count))
                done += count
        return spans

    def free(self, slot: int) -> None:
        """See `Region.free`."""
        self.slots.free(slot)
