"""Checksums of records, taken over the parts of blocks wherever they lie.

A 64-bit sum of the words of each page, the pages weighted with odd numbers so that exchanged pages show too. It is
there against bytes lost on the way, not against an attacker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from ..blocks.columns import consecutive
from .records import RecordLayout

_PAGE_BYTES = 4096


class Checksum:
    """The checksum of blocks of one layout, in the processor's memory.

    Args:
        layout: What a block's parts are.
    """

    def __init__(self, layout: RecordLayout) -> None:
        generator = torch.Generator().manual_seed(0)
        self._word = torch.int64 if all(lane % 8 == 0 for lane in layout.lane_bytes) else torch.uint8
        self._weights = []
        for sample, lane in zip(layout.samples, layout.lane_bytes, strict=True):
            pages = lane // (lane if lane <= _PAGE_BYTES else math.gcd(lane, _PAGE_BYTES))
            numbers = torch.randint(0, 1 << 62, (sample.shape[0], 1, pages), generator=generator, dtype=torch.int64)
            self._weights.append(2 * numbers + 1)

    def __call__(self, parts: Sequence[UInt8[Tensor, "_ any _"]], blocks: Sequence[int]) -> Int64[Tensor, " blocks"]:
        """One for each of some blocks, whose parts are `RecordLayout.parts`."""
        sums = torch.zeros(len(blocks), dtype=torch.int64)
        for first, block, length in consecutive(blocks):
            for part, weights in zip(parts, self._weights, strict=True):
                lanes = part[:, block : block + length].view(self._word)
                pages = lanes.unflatten(2, (weights.shape[2], -1)).sum(dim=3, dtype=torch.int64)
                sums[first : first + length] += (pages * weights).sum(dim=(0, 2))
        return sums
