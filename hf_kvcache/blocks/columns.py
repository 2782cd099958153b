"""The block table of one layer: which blocks, in which order, are the history of each row of the batch.

Column j of the table holds tokens ``[j * block_size, (j + 1) * block_size)`` of every row. A column is *sealed* once
its last token is written: its blocks never change again and may be shared. The last column of a history whose length
is no multiple of the block size is *open*: each row owns its block alone.

Columns in which all rows read one block come first and are stored once (`shared`); the rest are stored per row. A
common prompt of many rows therefore costs one list, and reordering beams touches only what differs between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import StateError
from .arena import ArenaPool


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


class ColumnTable:
    """The histories of `rows` rows in one pool.

    Args:
        pool: An empty pool that this table owns.
        rows: Rows of the batch.
        tight: Keep no room for growth and give back what is free early: for a table whose blocks cost little to move.
    """

    def __init__(self, pool: ArenaPool, rows: int, tight: bool = False) -> None:
        self.pool = pool
        self.tight = tight
        self.tokens = 0
        """Tokens seen: written, and neither cropped nor counted off by dropping."""
        self.dropped_blocks = 0
        """Columns released at the front of the history."""
        self.shared: list[int] = []
        self.private: list[list[int]] = [[] for _ in range(rows)]
        self.version = 0
        """Changes whenever the blocks of a column do."""
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
    def tokens_held(self) -> int:
        """Tokens of each row that are still held."""
        return self.tokens - self.first_token

    @property
    def table_bytes(self) -> int:
        """Bytes of the table and of the pool's reference counts."""
        entries = len(self.shared) + sum(len(row) for row in self.private)
        return 8 * (entries + self.pool.capacity_blocks)

    # ---------------------------------------------------------------------------------------------- writing

    def append_columns(self, owners: Sequence[Sequence[int]]) -> list[dict[int, int]]:
        """Append whole columns, ``[rows][columns]``: each row takes the block of row ``owners[row][column]``.

        A row that owns a column (``owners[row][column] == row``) gets a fresh block; no row comes before its owner.

        Returns:
            For each row the fresh blocks by column, counted from the first one appended, for the caller to fill.
        """
        count = len(owners[0])
        fresh = [[column for column in range(count) if owner[column] == row] for row, owner in enumerate(owners)]
        self._reserve([len(columns) for columns in fresh])
        taken: list[dict[int, int]] = []
        for row, columns in enumerate(fresh):
            blocks = self.private[row]
            taken.append({})
            last = blocks[-1] if blocks else self._last_shared()
            for column in columns:
                last = taken[row][column] = self.pool.allocate(last)
            for column in range(count):
                if column in taken[row]:
                    blocks.append(taken[row][column])
                else:
                    block = self.private[owners[row][column]][column - count]
                    self.pool.retain(block)
                    blocks.append(block)
        self.tokens += count * self.pool.block_size
        self.version += 1
        self._promote()
        return taken

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
        slack = 0 if self.tight else max(1, (self.pool.used_blocks + sum(fresh_blocks)) // _SLACK_SHARE)
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
        """Give memory back when more than half of a pool of some size is free (of a tight one: a quarter)."""
        most = self.pool.used_blocks // 3 if self.tight else max(16, self.pool.used_blocks)
        if self.pool.free_blocks > most:
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
            return [Run(everyone, first, block, n) for first, block, n in consecutive(self.shared + self.private[0])]
        segments: list[Segment] = [Run(everyone, *run) for run in consecutive(self.shared)]
        for begin, end, groups in self._partitions():
            column = len(self.shared) + begin
            if len(groups) > 1 and end - begin < _GATHER_BELOW_BLOCKS:
                if segments and isinstance(segments[-1], Gather):
                    column = segments.pop().column
                index = [row[column - len(self.shared) : end] for row in self.private]
                gathered = torch.tensor(index, device=self.pool.device)
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
        if self.shared or any(len(consecutive(row)) != 1 for row in self.private):
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


def consecutive(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Maximal runs of consecutive numbers as (index of the first, its number, length)."""
    runs: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((index, block, 1))
    return runs
