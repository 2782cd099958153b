"""The block table of one layer: which blocks, in which order, are the history of each row of the batch.

Column j of the table holds tokens ``[j * block_size, (j + 1) * block_size)`` of every row. A column is *sealed* once
its last token is written: its blocks never change again and may be shared. The last column of a history whose length
is no multiple of the block size is *open*: each row owns its block alone and writes into it.

Columns in which all rows read one block come first and are stored once (`shared`); the rest are stored per row. A
common prompt of many rows therefore costs one list, and reordering beams touches only what differs between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import StateError
from .pool import BlockPool, bit_sums, same_bits


class Run(NamedTuple):
    """Consecutive blocks, read in place by some rows."""

    rows: list[int]
    """The rows that read it."""
    column: int
    """First table column."""
    block: int
    """First block in the pool; the others follow it."""
    blocks: int
    """How many."""


class Gather(NamedTuple):
    """A few columns whose blocks lie scattered, read through a copy by all rows."""

    column: int
    """First table column."""
    slots: Tensor
    """Blocks, ``[rows, blocks]`` on the pool's device."""
    blocks: int
    """How many columns."""


Segment = Run | Gather

# A range of columns shorter than this, read through different blocks by different rows, is cheaper to copy together
# than to attend over row by row.
_GATHER_BELOW_BLOCKS = 4

# Free slots kept after a rearrangement, as a share of the blocks in use: rare moves, and no more than 2 % unused at 8k.
_SLACK_SHARE = 64


class BlockTable:
    """The histories of `rows` rows in one pool.

    Args:
        pool: An empty pool that this table owns.
        rows: Rows of the batch.
    """

    def __init__(self, pool: BlockPool, rows: int) -> None:
        self.pool = pool
        self.tokens = 0
        """Tokens seen: written, and neither cropped nor counted off by dropping."""
        self.dropped_blocks = 0
        """Columns released at the front of the history."""
        self.shared: list[int] = []
        self.private: list[list[int]] = [[] for _ in range(rows)]
        self.version = 0
        """Changes whenever the blocks of a column do."""
        self._open: tuple[int, Tensor | None] = (-1, None)
        self._reading: tuple[int, list[Segment], tuple[int, int] | None] = (-1, [], None)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self.private)

    @property
    def columns(self) -> int:
        """Columns held, dropped ones not counted."""
        return len(self.shared) + len(self.private[0])

    @property
    def first_token(self) -> int:
        """Position of the oldest token still held."""
        return self.dropped_blocks * self.pool.block_size

    @property
    def entries(self) -> int:
        """Block numbers the table stores."""
        return len(self.shared) + sum(len(row) for row in self.private)

    # ---------------------------------------------------------------------------------------------- writing

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
            starts = [row[-1] * self.pool.block_size for row in self.private]
            slots = torch.tensor(starts, device=self.pool.keys.device)
            self._open = (self.version, slots)
        return slots

    def _append_sealed(self, keys: Tensor, values: Tensor) -> None:
        """Append whole blocks, one copy of each distinct one."""
        size = self.pool.block_size
        count = keys.shape[2] // size
        owners = _equal_blocks(keys, values, size)
        fresh = [[column for column in range(count) if owner[column] == row] for row, owner in enumerate(owners)]
        self._reserve([len(columns) for columns in fresh])
        for row, columns in enumerate(fresh):
            blocks = self.private[row]
            taken: dict[int, int] = {}
            last = blocks[-1] if blocks else self._last_shared()
            for column in columns:
                last = taken[column] = self.pool.allocate(last)
            for column in range(count):
                if column in taken:
                    blocks.append(taken[column])
                else:
                    block = self.private[owners[row][column]][column - count]
                    self.pool.retain(block)
                    blocks.append(block)
            for first, block, length in _consecutive(list(taken.values())):
                begin = columns[first] * size
                if columns[first + length - 1] - columns[first] == length - 1:
                    span = slice(begin, begin + length * size)
                    self.pool.write(block * size, keys[row, :, span], values[row, :, span])
                else:
                    for step in range(length):
                        span = slice(columns[first + step] * size, (columns[first + step] + 1) * size)
                        self.pool.write((block + step) * size, keys[row, :, span], values[row, :, span])
        self.tokens += count * size
        self.version += 1
        self._promote()

    def _merge_equal_rows(self) -> None:
        """Let rows whose newly sealed block is bitwise the same share one."""
        size = self.pool.block_size
        index = torch.tensor([[row[-1]] for row in self.private], device=self.pool.keys.device)
        for row, owner in enumerate(_equal_blocks(*self.pool.gather(index), size)):
            if owner[0] != row:
                block = self.private[owner[0]][-1]
                self.pool.retain(block)
                self.pool.release(self.private[row][-1])
                self.private[row][-1] = block
                self.version += 1

    def _promote(self) -> None:
        """Move leading sealed columns in which all rows read one block from the rows to `shared`."""
        sealed = self.tokens // self.pool.block_size - self.dropped_blocks - len(self.shared)
        count = 0
        while count < sealed and all(row[count] == self.private[0][count] for row in self.private):
            block = self.private[0][count]
            for _ in range(self.rows - 1):
                self.pool.release(block)
            self.shared.append(block)
            count += 1
        if count:
            for row in self.private:
                del row[:count]

    def _last_shared(self) -> int | None:
        return self.shared[-1] if self.shared else None

    # ---------------------------------------------------------------------------------------------- room

    def _reserve(self, fresh_blocks: Sequence[int]) -> None:
        """Make room for so many new blocks of each row."""
        if self.pool.free_blocks < sum(fresh_blocks):
            self._rearrange(fresh_blocks)

    def _rearrange(self, fresh_blocks: Sequence[int]) -> None:
        """Lay the blocks out anew, each row's in order, with the same room for growth behind every row.

        Equal room keeps rows of equal length equally spaced: then the batch is one view of the arena.
        """
        slack = max(1, (self.pool.used_blocks + sum(fresh_blocks)) // _SLACK_SHARE)
        order: list[int | None] = list(self.shared)
        placed = set(self.shared)
        for row, blocks in enumerate(self.private):
            for block in blocks:
                if block not in placed:
                    placed.add(block)
                    order.append(block)
            order += [None] * (fresh_blocks[row] + slack // self.rows)
        moved = self.pool.rearrange(order)
        self.shared = [moved[block] for block in self.shared]
        self.private = [[moved[block] for block in row] for row in self.private]
        self.version += 1

    def trim(self) -> None:
        """Give memory back when more than half of a pool of some size is free."""
        if self.pool.free_blocks > max(16, self.pool.used_blocks):
            self._rearrange([0] * self.rows)

    # ---------------------------------------------------------------------------------------------- changing

    def select(self, indices: Sequence[int]) -> None:
        """Make row i a copy of old row ``indices[i]``. Sealed blocks are shared; only open blocks are copied."""
        if list(indices) == list(range(self.rows)):
            return
        old = self.private
        self.private = [list(old[index]) for index in indices]
        for row in self.private:
            for block in row:
                self.pool.retain(block)
        for row in old:
            for block in row:
                self.pool.release(block)
        self.version += 1
        self._own_open_column()
        self._promote()
        self.trim()

    def truncate(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens. A block cut in the middle becomes the open one.

        Raises:
            StateError: The new end lies before the oldest token held.
        """
        size = self.pool.block_size
        if tokens < self.first_token or tokens > self.tokens:
            raise StateError(f"cannot truncate to {tokens} tokens: {self.first_token} to {self.tokens} are held")
        keep = -(-tokens // size) - self.dropped_blocks
        private = max(0, keep - len(self.shared))
        for row in self.private:
            for block in row[private:]:
                self.pool.release(block)
            del row[private:]
        for block in self.shared[keep:]:
            self.pool.release(block)
        del self.shared[keep:]
        self.tokens = tokens
        self.version += 1
        if tokens % size:
            if len(self.shared) == keep:
                block = self.shared.pop()
                self.pool.retain(block, self.rows - 1)
                for row in self.private:
                    row.append(block)
            self._own_open_column()
        self.trim()

    def _own_open_column(self) -> None:
        """Copy the open block for every row that shares it, so that each may write."""
        if self.tokens % self.pool.block_size == 0 or not self.private[0]:
            return
        count: dict[int, int] = {}
        for row in self.private:
            count[row[-1]] = count.get(row[-1], 0) + 1
        copies = self.rows - len(count)
        if copies and self.pool.free_blocks < copies:
            self._rearrange([1] * self.rows)
        for row in self.private:
            block = row[-1]
            if self.pool.references[block] > 1:
                row[-1] = self.pool.allocate(row[-2] if len(row) > 1 else self._last_shared())
                self.pool.copy_block(block, row[-1])
                self.pool.release(block)
                self.version += 1

    def drop_before(self, token: int) -> None:
        """Release the columns that lie wholly before position `token`."""
        count = min(token // self.pool.block_size - self.dropped_blocks, self.columns)
        if count <= 0:
            return
        from_shared = min(count, len(self.shared))
        for block in self.shared[:from_shared]:
            self.pool.release(block)
        del self.shared[:from_shared]
        for row in self.private:
            for block in row[: count - from_shared]:
                self.pool.release(block)
            del row[: count - from_shared]
        self.dropped_blocks += count
        self.version += 1
        self._promote()
        self.trim()

    def skip(self, blocks: int) -> None:
        """Count `blocks` columns of tokens as seen without storing them. Only in an empty table."""
        if self.tokens:
            raise StateError(f"cannot skip tokens after {self.tokens} were written")
        self.dropped_blocks = blocks
        self.tokens = blocks * self.pool.block_size

    # ---------------------------------------------------------------------------------------------- reading

    def segments(self) -> list[Segment]:
        """How to read the held columns: runs in place, and gathers where a copy is cheaper. In order of columns."""
        return self._read_plan()[1]

    def uniform_stride(self) -> tuple[int, int] | None:
        """(first block of row 0, blocks from one row to the next) if the rows are equally spaced whole runs.

        Then the whole batch is one strided view of the arena. None otherwise.
        """
        return self._read_plan()[2]

    def _read_plan(self) -> tuple[int, list[Segment], tuple[int, int] | None]:
        if self._reading[0] != self.version:
            segments = self._build_segments()
            self._reading = (self.version, segments, self._build_stride(segments))
        return self._reading

    def _build_segments(self) -> list[Segment]:
        everyone = list(range(self.rows))
        if self.rows == 1:
            return [Run(everyone, first, block, n) for first, block, n in _consecutive(self.shared + self.private[0])]
        segments: list[Segment] = [Run(everyone, *run) for run in _consecutive(self.shared)]
        for begin, end, groups in self._partitions():
            column = len(self.shared) + begin
            if len(groups) > 1 and end - begin < _GATHER_BELOW_BLOCKS:
                if segments and isinstance(segments[-1], Gather):
                    column = segments.pop().column
                index = [row[column - len(self.shared) : end] for row in self.private]
                gathered = torch.tensor(index, device=self.pool.keys.device)
                segments.append(Gather(column, gathered, gathered.shape[1]))
            else:
                segments += [Run(rows, column, self.private[rows[0]][begin], end - begin) for rows in groups]
        return segments

    def _partitions(self) -> list[tuple[int, int, list[list[int]]]]:
        """Maximal ranges of private columns in which the same rows read the same, consecutive blocks."""
        ranges: list[tuple[int, int, list[list[int]]]] = []
        for column in range(len(self.private[0])):
            readers: dict[int, list[int]] = {}
            for index, row in enumerate(self.private):
                readers.setdefault(row[column], []).append(index)
            groups = list(readers.values())
            if ranges and ranges[-1][2] == groups:
                follows = all(row[column] == row[column - 1] + 1 for row in self.private)
                if follows:
                    ranges[-1] = (ranges[-1][0], column + 1, groups)
                    continue
            ranges.append((column, column + 1, groups))
        return ranges

    def _build_stride(self, segments: list[Segment]) -> tuple[int, int] | None:
        if len(segments) == 1 and isinstance(segments[0], Run):
            return (segments[0].block, 0)
        if self.shared or any(len(_consecutive(row)) != 1 for row in self.private):
            return None
        firsts = [row[0] for row in self.private]
        stride = firsts[1] - firsts[0]
        equal = all(later - first == stride for first, later in pairwise(firsts))
        return (firsts[0], stride) if equal and stride > 0 else None

    def check_integrity(self) -> None:
        """Raise StateError unless table, pool and token count agree."""
        self.pool.check_integrity()
        size = self.pool.block_size
        counted: dict[int, int] = {}
        for block in [*self.shared, *(block for row in self.private for block in row)]:
            counted[block] = counted.get(block, 0) + 1
        expected = {block: count for block, count in enumerate(self.pool.references) if count}
        if counted != expected:
            raise StateError(f"the table refers to blocks {counted}, the pool counted {expected}")
        if len({len(row) for row in self.private}) != 1:
            raise StateError(f"rows hold different numbers of blocks: {[len(row) for row in self.private]}")
        if self.columns != -(-self.tokens // size) - self.dropped_blocks:
            raise StateError(f"{self.columns} columns do not hold {self.tokens} tokens ({self.dropped_blocks} dropped)")
        if self.tokens % size and self.columns:
            if not self.private[0]:
                raise StateError("the open column is shared")
            for row in self.private:
                if self.pool.references[row[-1]] != 1:
                    raise StateError(f"open block {row[-1]} has {self.pool.references[row[-1]]} owners")
        if self.rows == 1 and len(self.private[0]) > 1:
            raise StateError(f"a single row keeps {len(self.private[0])} columns private")


def _equal_blocks(keys: Tensor, values: Tensor, block_size: int) -> list[list[int]]:
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


def _consecutive(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Maximal runs of consecutive numbers as (index of the first, its number, length)."""
    runs: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((index, block, 1))
    return runs
