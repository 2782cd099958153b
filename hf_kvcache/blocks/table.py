"""Histories of raw keys and values: whole blocks, shared where their bits are equal, and an open block per row."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .columns import ColumnTable, consecutive
from .history import Usage
from .pool import BlockPool, bit_sums, same_bits


class BlockTable(ColumnTable):
    """The histories of `rows` rows in one pool of raw states. See `ColumnTable`."""

    pool: BlockPool

    def __init__(self, pool: BlockPool, rows: int, tight: bool = False) -> None:
        super().__init__(pool, rows, tight)
        self._open: tuple[int, Tensor | None] = (-1, None)

    @property
    def raw_pool(self) -> BlockPool:
        """The pool itself."""
        return self.pool

    def usage(self) -> Usage:
        """Bytes held now."""
        pool, open_tokens = self.pool, self.tokens % self.pool.block_size
        unfilled = self.rows * (pool.block_size - open_tokens) if open_tokens else 0
        payload = (pool.used_blocks * pool.block_size - unfilled) * pool.token_bytes
        return Usage(payload, 0, pool.store.room_bytes - payload, self.table_bytes)

    def append(
        self,
        keys: Float[Tensor, "rows key_heads tokens key_width"],
        values: Float[Tensor, "rows value_heads tokens value_width"],
    ) -> None:
        """Write the states of new tokens at the end of every row.

        Whole blocks that are bitwise equal in several rows are written once and shared.
        """
        size, tokens = self.pool.block_size, keys.shape[2]
        done = 0
        if self.tokens % size:
            done = min(size - self.tokens % size, tokens)
            self._write_open(keys[:, :, :done], values[:, :, :done])
        whole = (tokens - done) // size
        if whole:
            end = done + whole * size
            self._append_sealed(keys[:, :, done:end], values[:, :, done:end])
            done = end
        if done < tokens:
            self._reserve([1] * self.rows)
            for row in self.private:
                row.append(self.pool.allocate(row[-1] if row else self._last_shared()))
            self.version += 1
            self._write_open(keys[:, :, done:], values[:, :, done:])

    def _write_open(self, keys: Tensor, values: Tensor) -> None:
        """Write into the open column, which exists and has room."""
        size = self.pool.block_size
        offset = self.tokens % size
        if self.rows > 1 and keys.shape[2] == 1:
            self.pool.write_rows(self._open_slots() + offset, keys, values)
        else:
            for row, blocks in enumerate(self.private):
                self.pool.write(blocks[-1] * size + offset, keys[row], values[row])
        self.tokens += keys.shape[2]
        if self.tokens % size == 0:
            if self.rows > 1:
                self._merge_equal_rows()
            self._promote()

    def _open_slots(self) -> Tensor:
        """Where each row's open block begins in the arena, ``[rows]``."""
        version, slots = self._open
        if slots is None or version != self.version:
            starts = [self.pool.store.open_slot(row[-1]) for row in self.private]
            slots = torch.tensor(starts, device=self.pool.device)
            self._open = (self.version, slots)
        return slots

    def _append_sealed(self, keys: Tensor, values: Tensor) -> None:
        """Append whole blocks, one copy of each distinct one."""
        size = self.pool.block_size
        for row, taken in enumerate(self.append_columns(equal_blocks(keys, values, size))):
            columns = list(taken)
            for first, block, length in consecutive(list(taken.values())):
                begin = columns[first] * size
                if columns[first + length - 1] - columns[first] == length - 1:
                    span = slice(begin, begin + length * size)
                    self.pool.write(block * size, keys[row, :, span], values[row, :, span])
                else:
                    for step in range(length):
                        span = slice(columns[first + step] * size, (columns[first + step] + 1) * size)
                        self.pool.write((block + step) * size, keys[row, :, span], values[row, :, span])

    def _merge_equal_rows(self) -> None:
        """Let rows whose newly sealed block is bitwise the same share one."""
        size = self.pool.block_size
        index = torch.tensor([[row[-1]] for row in self.private], device=self.pool.device)
        for row, owner in enumerate(equal_blocks(*self.pool.gather(index), size)):
            if owner[0] != row:
                block = self.private[owner[0]][-1]
                self.pool.retain(block)
                self.pool.release(self.private[row][-1])
                self.private[row][-1] = block
                self.version += 1


def equal_blocks(keys: Tensor, values: Tensor, block_size: int) -> list[list[int]]:
    """For each row and block, the first row whose block has the same bits: ``[rows][blocks]``."""
    rows, count = keys.shape[0], keys.shape[2] // block_size
    owners = [[row] * count for row in range(rows)]
    if rows == 1 or keys.is_meta:  # states without values are equal to nothing
        return owners
    key_sums, value_sums = bit_sums(keys, block_size), bit_sums(values, block_size)
    sums = [list(zip(key_sums[row], value_sums[row], strict=True)) for row in range(rows)]
    for row in range(1, rows):
        for other in range(row):
            column = 0
            while column < count:
                end = column
                # A candidate range: equal sums, the other row is itself an owner, and no owner found yet.
                while end < count and sums[row][end] == sums[other][end] and owners[other][end] == other:
                    if owners[row][end] != row:
                        break
                    end += 1
                if end > column:
                    span = slice(column * block_size, end * block_size)
                    if same_bits(keys[row, :, span], keys[other, :, span]) and same_bits(
                        values[row, :, span], values[other, :, span]
                    ):
                        owners[row][column:end] = [other] * (end - column)
                column = max(end, column + 1)
    return owners
