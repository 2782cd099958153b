"""A place that blocks of one layer are read into."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .records import Record

if TYPE_CHECKING:
    from .store import LowerArenas


class Buffer:
    """Arenas of one layer, filled with its blocks."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.tensors: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Hold nothing; the memory stays."""
        # Weak, so that a cache that is no longer used is gone at once, with its files.
        self.owner: weakref.ref[LowerArenas] | None = None
        self.capacity_blocks = 0
        self.contents: Mapping[int, Record] = {}
        self.unchecked: Mapping[int, Record] = {}
        self.version = -1
        self.near_version = -1

    def assign(self, store: LowerArenas) -> None:
        """Lay arenas out for a layer."""
        self.clear()
        size, device = store.layout.arena_bytes(store.capacity_blocks), store.samples[0].device
        if self.memory.nbytes < size or self.memory.device != device:
            self.tensors, self.memory = [], torch.empty(0)  # given back before more is taken
            # Made in inference mode, it could not be written outside it.
            with torch.inference_mode(False):
                self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = store.layout.arenas(self.memory, store.capacity_blocks)
        self.owner, self.capacity_blocks = weakref.ref(store), store.capacity_blocks

    def is_current(self, store: LowerArenas) -> bool:
        """Whether every block of this layer is in its place, as it is now, and has been looked at."""
        up_to_date = self.version == store.version and self.near_version == store.near.version
        return up_to_date and not self.unchecked and self.fits(store)

    def fits(self, store: LowerArenas) -> bool:
        """Whether the arenas are those of this layer, as it is now."""
        return self.owner is not None and self.owner() is store and self.capacity_blocks == store.capacity_blocks
