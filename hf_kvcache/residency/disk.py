"""Disk as the lower tier: one scratch file for each layer, without a name, so that nothing is left behind.

What is read goes to its place without a stop on the way: one call of the operating system scatters the parts of many
records over the arenas. Each record has a checksum, which is looked at before anybody uses what was read.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ..blocks.columns import consecutive
from ..errors import ConfigError, StorageError
from .checksum import Checksum
from .records import Record, RecordLayout
from .tier import ReadError, Slots

# Read by one call: while a piece is copied to its places, the operating system reads the next one from the disk.
_READ_BYTES = 1 << 19
# The fewest that an operating system takes in one call (IOV_MAX) where there is a limit.
_BUFFERS_A_CALL = 1024


class DiskTier:
    """Scratch files in a folder.

    Args:
        folder: Where; it must exist, on a file system with room.
        budget_bytes: The most that all files together may hold; None for as much as fits.

    Raises:
        StorageError: No file can be made there.
        ConfigError: This operating system cannot read files at a position.
    """

    def __init__(self, folder: str, budget_bytes: int | None = None) -> None:
        if not hasattr(os, "preadv"):
            raise ConfigError("history on disk needs an operating system that has preadv (Linux, macOS)")
        self.folder = Path(folder)
        self.budget_bytes = budget_bytes
        self.written_bytes = 0
        self.read_bytes = 0
        self._regions: weakref.WeakSet[DiskRegion] = weakref.WeakSet()
        self._file(0).close()

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskTier:
        return self

    def open(self, layout: RecordLayout, layer: int) -> DiskRegion:
        """A new scratch file."""
        region = DiskRegion(self, self._file(layer), layout, f"the scratch file of layer {layer} in {self.folder}")
        self._regions.add(region)
        return region

    @property
    def held_bytes(self) -> int:
        """Bytes of all records."""
        return sum(len(region.slots) * region.record_bytes for region in self._regions)

    def _file(self, layer: int) -> Any:
        try:
            # Never has a name where the file system can do that, and elsewhere loses it at once.
            return tempfile.TemporaryFile(dir=self.folder, prefix=f"hf_kvcache-layer-{layer}-", buffering=0)
        except OSError as error:
            raise StorageError(
                f"cannot make a scratch file in {self.folder}: {error.strerror}. Name a folder that exists, where this "
                "process may write"
            ) from error


class DiskRegion:
    """One scratch file. Closed, and with that gone, when nobody refers to it or to one of its records."""

    place = "disk"

    def __init__(self, tier: DiskTier, file: Any, layout: RecordLayout, name: str) -> None:
        self.tier = tier
        self.file = file
        weakref.finalize(self, file.close)
        self.layout = layout
        self.record_bytes = layout.record_bytes
        self.name = name
        self.slots = Slots()
        self._checksum = Checksum(layout)
        self._fill = np.empty(layout.fill_bytes, np.uint8)

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskRegion:
        return self

    def __reduce__(self) -> Any:
        raise StorageError(f"{self.name} cannot be sent to another process; use `cache.save`")

    def write(self, rows: UInt8[Tensor, "records record_bytes"]) -> list[Record] | None:
        """See `Region.write`. The operating system writes to the disk itself when it sees fit."""
        tier = self.tier
        if tier.budget_bytes is not None and tier.held_bytes + rows.numel() > tier.budget_bytes:
            return None
        rows = rows.cpu()
        array = rows.numpy()
        slots = self.slots.take(len(array))
        sums = self._checksum(self.layout.split(rows), range(len(array))).tolist()
        # From here on the slots are the records', which give them back if writing fails.
        records = [Record(self, slot, checksum) for slot, checksum in zip(slots, sums, strict=True)]
        for first, slot, length in consecutive(slots):
            self._write(array[first : first + length].reshape(-1).data, slot * self.record_bytes)
        tier.written_bytes += array.nbytes
        return records

    def _write(self, view: memoryview, offset: int) -> None:
        while view:
            try:
                written = os.pwrite(self.file.fileno(), view, offset)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                advice = "Make room there" if full else "See to it"
                raise StorageError(
                    f"cannot write to {self.name} at byte {offset}: {error.strerror}. {advice}, and start again with "
                    "`cache.reset()`, or generate with a cache that stays in memory"
                ) from error
            view, offset = view[written:], offset + written

    def load(self, records: Sequence[Record], tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """See `Region.load`."""
        device = tensors[0].device
        if device.type == "cpu":
            self._scatter(records, self.layout.parts(tensors), blocks)
            return
        # On its way to an accelerator it passes through pinned memory, where the processor can look at it.
        rows = torch.empty(len(records), self.record_bytes, dtype=torch.uint8, pin_memory=True)
        parts = self.layout.split(rows)
        self._scatter(records, parts, range(len(records)))
        self._compare(records, parts, range(len(records)))
        self.layout.unpack(rows.to(device, non_blocking=True), tensors, blocks)

    def check(self, records: Sequence[Record], tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """See `Region.check`."""
        if tensors[0].device.type == "cpu":
            self._compare(records, self.layout.parts(tensors), blocks)

    def _scatter(self, records: Sequence[Record], parts: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Read records to their blocks in `parts`, ``[heads, any, lane_bytes]`` each."""
        lanes = [lane for part in parts for lane in part.numpy()]
        at_once = max(1, _READ_BYTES // self.record_bytes)
        for first, slot, length in consecutive([record.slot for record in records]):
            for begin in range(first, first + length, at_once):
                some = blocks[begin : min(begin + at_once, first + length)]
                buffers = [part for block in some for part in (*(lane[block] for lane in lanes), self._fill)]
                self._read(buffers, (slot + begin - first) * self.record_bytes, begin)
        self.tier.read_bytes += len(records) * self.record_bytes

    def _read(self, buffers: list[Any], offset: int, index: int) -> None:
        """Fill buffers one after the other, the first of which belongs to record number `index`."""
        begin = offset
        while buffers := [buffer for buffer in buffers if len(buffer)]:
            number = index + (offset - begin) // self.record_bytes
            try:
                count = os.preadv(self.file.fileno(), buffers[:_BUFFERS_A_CALL], offset)
            except OSError as error:
                raise ReadError(number, f"cannot read {self.name} at byte {offset}: {error.strerror}") from error
            if not count:
                raise ReadError(number, f"{self.name} was cut short: it ends at byte {offset}")
            offset += count
            buffers = _behind(buffers, count)

    def _compare(self, records: Sequence[Record], parts: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Look at the checksums of records."""
        sums = self._checksum(parts, blocks).tolist()
        for index, (record, checksum) in enumerate(zip(records, sums, strict=True)):
            if checksum != record.checksum:
                raise ReadError(
                    index,
                    f"{self.name} was altered: the {self.record_bytes} bytes at byte "
                    f"{record.slot * self.record_bytes} do not have their checksum",
                )

    def free(self, slot: int) -> None:
        """See `Region.free`."""
        self.slots.free(slot)


def _behind(buffers: Sequence[Any], count: int) -> list[Any]:
    """What is left of buffers when their first `count` bytes are filled."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []
