"""Where stored states lie: one contiguous, immutable piece of memory per layer for a few consecutive blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

States: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of one layer, each ``[heads, tokens, width]``."""


class Extent:
    """The states of consecutive blocks of one text, in every layer that keeps a history.

    The tensors are never written again, so any number of caches read them where they lie, and never reused for other
    blocks: what a cache holds stays what it was, whatever happens to the store.

    Args:
        layers: Of each layer its states, `blocks` times the block size long.
        blocks: How many blocks.
    """

    def __init__(self, layers: Sequence[States], blocks: int) -> None:
        self.layers = list(layers)
        self.blocks = blocks
        self.leases = 0
        """Caches that read it. None of its blocks is evicted before they are done."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(states.nbytes for layer in self.layers for states in layer)

    def span(self, begin: int, end: int, block_size: int) -> list[States]:
        """Views of blocks `begin` to `end` in every layer."""
        return cut(self.layers, slice(begin * block_size, end * block_size))

    def shorten(self, blocks: int, block_size: int) -> None:
        """Keep the first `blocks` blocks, copied, so that the rest of the memory is given back."""
        with torch.inference_mode(False):
            self.layers = [(keys.clone(), values.clone()) for keys, values in self.span(0, blocks, block_size)]
        self.blocks = blocks


def cut(layers: Sequence[States], tokens: slice) -> list[States]:
    """Views of some tokens in every layer."""
    return [(keys[:, tokens], values[:, tokens]) for keys, values in layers]


def join(extents: Sequence[Extent]) -> Extent:
    """A copy of consecutive extents as one."""
    if len(extents) == 1:
        return extents[0]
    layers = []
    with torch.inference_mode(False):
        for parts in zip(*(extent.layers for extent in extents), strict=True):
            keys, values = zip(*parts, strict=True)
            layers.append((torch.cat(keys, dim=1), torch.cat(values, dim=1)))
    return Extent(layers, sum(extent.blocks for extent in extents))
