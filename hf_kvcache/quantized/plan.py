"""Which encoded blocks are decoded together, and for which rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..blocks import ColumnTable, Run

# Elements of keys decoded at once: 4 MiB of bfloat16. Smaller chunks fit a core's cache, but cost more calls.
_CHUNK_ELEMENTS = 1 << 21


class Chunk(NamedTuple):
    """Encoded blocks that are decoded together."""

    rows: list[int] | None
    """The rows that read them; None for all."""
    begin: int
    """Place of the first token among the encoded ones."""
    tokens: int
    run: tuple[int, int]
    """First block, and number of blocks, of the run they are part of."""
    first: int
    """First of them, counted from the run's."""
    blocks: int


class ReadingPlan(NamedTuple):
    """How to read the first columns of an encoded table."""

    chunks: list[Chunk]
    tokens: int
    """Tokens of these columns."""


def plan_reading(encoded: ColumnTable, lengths: Sequence[int], end: int, token_elements: int) -> ReadingPlan:
    """Cut the columns that hold the first `end` encoded tokens into chunks of a bounded number of elements.

    Args:
        encoded: The table.
        lengths: Tokens of each of its columns.
        end: Tokens to read; a boundary of columns.
        token_elements: Elements of one token's keys.
    """
    starts = list(accumulate(lengths, initial=0))
    columns = sum(1 for start in starts[1:] if start <= end)
    block_size = encoded.pool.block_size
    most = max(1, _CHUNK_ELEMENTS // (token_elements * block_size))
    chunks = []
    for rows, column, block, blocks in _runs(encoded, columns):
        for first, count in _cut(lengths[column : column + blocks], most, block_size):
            begin = starts[column + first]
            tokens = starts[column + first + count] - begin
            chunks.append(Chunk(rows, begin, tokens, (block, blocks), first, count))
    return ReadingPlan(chunks, starts[columns])


def _runs(encoded: ColumnTable, columns: int) -> Iterator[tuple[list[int] | None, int, int, int]]:
    """(rows, first column, first block, blocks) of the first `columns` columns."""
    for segment in encoded.segments():
        blocks = min(segment.blocks, columns - segment.column)
        if blocks <= 0:
            continue
        if isinstance(segment, Run):
            rows = None if len(segment.rows) == encoded.rows else segment.rows
            yield rows, segment.column, segment.block, blocks
        else:
            for row, numbers in enumerate(segment.slots.tolist()):
                for step, block in enumerate(numbers[:blocks]):
                    yield [row], segment.column + step, block, 1


def _cut(lengths: Sequence[int], most: int, block_size: int) -> Iterator[tuple[int, int]]:
    """(first, count) of ranges of at most `most` blocks in which only the last one may be shortened."""
    begin = 0
    for index, tokens in enumerate(lengths):
        if tokens < block_size or index + 1 - begin == most or index + 1 == len(lengths):
            yield begin, index + 1 - begin
            begin = index + 1
