"""A pool of blocks of raw keys and values."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .arena import ArenaPool


class BlockPool(ArenaPool):
    """Stores blocks of `block_size` tokens: an arena for keys, an arena for values.

    Args:
        keys: A sample ``[rows, key_heads, any, key_width]`` that gives heads, width, dtype and device of the keys.
        values: The same for the values, whose heads and width may differ (latent attention).
        block_size: Tokens per block.
    """

    def __init__(self, keys: Tensor, values: Tensor, block_size: int) -> None:
        arenas = [states.new_empty(states.shape[1], 0, states.shape[3]) for states in (keys, values)]
        super().__init__(block_size, arenas, [block_size, block_size])

    @property
    def keys(self) -> Tensor:
        """The arena of the keys."""
        return self.arenas[0]

    @property
    def values(self) -> Tensor:
        """The arena of the values."""
        return self.arenas[1]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.block_bytes // self.block_size

    def write(
        self,
        token: int,
        keys: Float[Tensor, "key_heads tokens key_width"],
        values: Float[Tensor, "value_heads tokens value_width"],
    ) -> None:
        """Copy states into the arena from slot `token` (= block * block_size + offset) on."""
        self.store.write(token, (keys, values))

    def write_rows(
        self,
        tokens: Int[Tensor, " rows"],
        keys: Float[Tensor, "rows key_heads 1 key_width"],
        values: Float[Tensor, "rows value_heads 1 value_width"],
    ) -> None:
        """Copy one token of each row into the arena, row i at slot ``tokens[i]``, in one call for all rows.

        Slots are counted from each block's `Arenas.open_slot`.
        """
        self.store.write_rows(tokens, (keys[:, :, 0].transpose(0, 1), values[:, :, 0].transpose(0, 1)))

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of `blocks` (``[rows, columns]`` numbers), each ``[rows, heads, columns * block_size, width]``."""
        rows, columns = blocks.shape
        flat = blocks.reshape(-1)
        copies = []
        for arena in self.arenas:
            paged = arena.view(arena.shape[0], -1, self.block_size, arena.shape[2])
            copy = paged.index_select(1, flat).view(arena.shape[0], rows, columns * self.block_size, arena.shape[2])
            copies.append(copy.transpose(0, 1))
        return copies[0], copies[1]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bit patterns (NaN equals itself, 0.0 differs from -0.0)."""
    integer = _INTEGER_OF_BYTES[left.element_size()]
    return torch.equal(left.view(integer), right.view(integer))


def bit_sums(states: Float[Tensor, "rows heads tokens width"], block_size: int) -> list[list[int]]:
    """A cheap fingerprint of each row's blocks, ``[rows][blocks]``: equal blocks have equal sums, not the reverse."""
    rows, heads, tokens, width = states.shape
    bits = states.view(_INTEGER_OF_BYTES[states.element_size()])
    blocks = bits.reshape(rows, heads, tokens // block_size, block_size, width)
    sums: list[list[int]] = blocks.sum(dim=(1, 3, 4), dtype=torch.int64).tolist()
    return sums


_INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
