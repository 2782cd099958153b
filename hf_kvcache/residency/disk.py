"""Disk as the lower tier: one scratch file for each layer, without a name, so that nothing is left behind.

Each record has a checksum, which is looked at whenever it is read: a 64-bit sum of each page's words, the pages
weighted with odd numbers so that exchanged pages show too. It is there against bytes lost on the way, not against
an attacker.
"""

from __future__ import annotations

import errno
import math
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
from .records import Record
from .tier import ReadError, Slots

_PAGE_BYTES = 4096


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

    def open(self, record_bytes: int, layer: int) -> DiskRegion:
        """A new scratch file."""
        region = DiskRegion(
            self, self._file(layer), record_bytes, f"the scratch file of layer {layer} in {self.folder}"
        )
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

    def __init__(self, tier: DiskTier, file: Any, record_bytes: int, name: str) -> None:
        self.tier = tier
        self.file = file
        weakref.finalize(self, file.close)
        self.record_bytes = record_bytes
        self.name = name
        self.slots = Slots()
        pages = record_bytes // math.gcd(record_bytes, _PAGE_BYTES)
        weights = np.random.default_rng(0).integers(0, 1 << 63, pages, dtype=np.uint64)
        self._weights = weights | np.uint64(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskRegion:
        return self

    def __reduce__(self) -> Any:
        raise StorageError(f"{self.name} cannot be sent to another process; use `cache.save`")

    def write(self, rows: UInt8[Tensor, "records record_bytes"]) -> list[Record] | None:
        """See `Region.write`. The operating system writes to the disk itself when it sees fit."""
        tier = self.tier
        if tier.budget_bytes is not None and tier.held_bytes + rows.numel() > tier.budget_bytes:
            return None
        array = rows.cpu().numpy()
        slots = self.slots.take(len(array))
        sums = self._checksums(array)
        # From here on the slots are the records', which give them back if writing fails.
        records = [Record(self, slot, int(checksum)) for slot, checksum in zip(slots, sums, strict=True)]
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

    def load(self, records: Sequence[Record], rows: UInt8[Tensor, "records record_bytes"]) -> None:
        """See `Region.load`."""
        # On its way to an accelerator it passes through pinned memory.
        on_cpu = rows.device.type == "cpu"
        landing = rows if on_cpu else torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        array = landing.numpy()
        for first, slot, length in consecutive([record.slot for record in records]):
            self._read(array[first : first + length].reshape(-1).data, slot * self.record_bytes, first)
        expected = np.fromiter((record.checksum for record in records), dtype=np.uint64, count=len(records))
        wrong = np.flatnonzero(self._checksums(array) != expected)
        if len(wrong):
            index = int(wrong[0])
            raise ReadError(
                index,
                f"{self.name} was altered: the {self.record_bytes} bytes at byte "
                f"{records[index].slot * self.record_bytes} do not have their checksum",
            )
        self.tier.read_bytes += array.nbytes
        if not on_cpu:
            rows.copy_(landing, non_blocking=True)

    def _read(self, view: memoryview, offset: int, index: int) -> None:
        """Fill `view`, the first of whose records is number `index`."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise ReadError(
                    index + done // self.record_bytes,
                    f"cannot read {self.name} at byte {offset + done}: {error.strerror}",
                ) from error
            if not count:
                raise ReadError(
                    index + done // self.record_bytes, f"{self.name} was cut short: it ends at byte {offset + done}"
                )
            done += count

    def _checksums(self, array: Any) -> Any:
        """One for each row, ``[records]``."""
        pages = array.view(np.uint64).reshape(len(array), len(self._weights), -1)
        return (pages.sum(axis=2) * self._weights).sum(axis=1)

    def free(self, slot: int) -> None:
        """See `Region.free`."""
        self.slots.free(slot)
