"""Blocks as rows of bytes, which is how they lie in a lower tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from ..blocks.columns import consecutive

if TYPE_CHECKING:
    from .tier import Region

# A record is a whole number of disk sectors.
_SECTOR_BYTES = 512


class Record:
    """One block's bytes in a lower tier. They never change; when nobody refers to the record their room is free."""

    __slots__ = ("checksum", "region", "slot")

    def __init__(self, region: Region, slot: int, checksum: int) -> None:
        self.region = region
        self.slot = slot
        self.checksum = checksum

    def __del__(self) -> None:
        self.region.free(self.slot)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        """Copies of a cache share what never changes."""
        return self


class RecordLayout:
    """How the parts of a block follow each other in its record: arena after arena, head after head.

    Args:
        samples: Empty tensors ``[heads, 0, width]``, one for each arena.
        slots: Slots per block in each arena.
    """

    def __init__(self, samples: Sequence[Tensor], slots: Sequence[int]) -> None:
        self.samples = list(samples)
        self.slots = list(slots)
        self.lane_bytes = [
            count * sample.shape[2] * sample.element_size() for sample, count in zip(samples, slots, strict=True)
        ]
        """Bytes of one head of a block, in each arena."""
        self.part_bytes = [sample.shape[0] * lane for sample, lane in zip(self.samples, self.lane_bytes, strict=True)]
        """Bytes of a block in each arena."""
        self.record_bytes = -(-sum(self.part_bytes) // _SECTOR_BYTES) * _SECTOR_BYTES
        """Bytes of a record, with what fills its last sector."""
        self.fill_bytes = self.record_bytes - sum(self.part_bytes)
        """Bytes at the end of a record that are nobody's."""

    def pack(self, parts: Sequence[Tensor]) -> UInt8[Tensor, "blocks record_bytes"]:
        """Records of blocks whose parts are ``[heads, blocks, slots, width]``."""
        blocks, device = parts[0].shape[1], parts[0].device
        rows = [
            part.to(sample.dtype).transpose(0, 1).contiguous().view(torch.uint8).reshape(blocks, -1)
            for sample, part in zip(self.samples, parts, strict=True)
        ]
        return torch.cat([*rows, torch.zeros(blocks, self.fill_bytes, dtype=torch.uint8, device=device)], dim=1)

    def arenas(self, memory: UInt8[Tensor, " bytes"], capacity_blocks: int) -> list[Tensor]:
        """Arenas ``[heads, capacity_blocks * slots, width]`` in `memory`, each at a whole sector."""
        tensors, begin = [], 0
        for sample, slots, part_bytes in zip(self.samples, self.slots, self.part_bytes, strict=True):
            size = capacity_blocks * part_bytes
            flat = memory[begin : begin + size].view(sample.dtype)
            tensors.append(flat.view(sample.shape[0], capacity_blocks * slots, sample.shape[2]))
            begin += -(-size // _SECTOR_BYTES) * _SECTOR_BYTES
        return tensors

    def arena_bytes(self, capacity_blocks: int) -> int:
        """Bytes of memory that `arenas` needs."""
        return sum(-(-capacity_blocks * part // _SECTOR_BYTES) * _SECTOR_BYTES for part in self.part_bytes)

    def parts(self, tensors: Sequence[Tensor]) -> list[UInt8[Tensor, "_ blocks _"]]:
        """Arenas as bytes ``[heads, blocks, lane_bytes]``: one row for each head of each block. Views."""
        return [
            tensor.view(torch.uint8).view(tensor.shape[0], -1, lane)
            for tensor, lane in zip(tensors, self.lane_bytes, strict=True)
        ]

    def split(self, rows: UInt8[Tensor, "blocks record_bytes"]) -> list[UInt8[Tensor, "_ blocks _"]]:
        """Records as `parts` has arenas. Views."""
        parts, begin = [], 0
        for sample, lane, part in zip(self.samples, self.lane_bytes, self.part_bytes, strict=True):
            parts.append(rows[:, begin : begin + part].unflatten(1, (sample.shape[0], lane)).transpose(0, 1))
            begin += part
        return parts

    def unpack(
        self, rows: UInt8[Tensor, "blocks record_bytes"], tensors: Sequence[Tensor], blocks: Sequence[int]
    ) -> None:
        """Write the parts of records to their blocks in arenas on the same device."""
        for to, come in zip(self.parts(tensors), self.split(rows), strict=True):
            for first, block, length in consecutive(blocks):
                to[:, block : block + length] = come[:, first : first + length]
