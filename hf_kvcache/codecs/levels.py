"""Codebooks, and the tables that turn packed symbols into numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from ..attention.rows import Rows, symbols
from .packing import plane_bits, take, unpack


@lru_cache(maxsize=16)
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The ``2**bits`` levels that code a standard normal number with the least mean squared error, ascending.

    Lloyd's iteration (IEEE Transactions on Information Theory 28, 1982) on the density itself, no samples.
    """
    count = 1 << bits
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    levels = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count) * 1.3
    for _ in range(1500):
        inner = (levels[1:] + levels[:-1]) / 2
        density = torch.cat([inner.new_zeros(1), torch.exp(normal.log_prob(inner)), inner.new_zeros(1)])
        share = torch.cat([inner.new_zeros(1), normal.cdf(inner), inner.new_ones(1)])
        levels = (density[:-1] - density[1:]) / (share[1:] - share[:-1])
    return tuple(levels.tolist())


# A number is looked up among so many cells between plus and minus this; beyond, the outermost level is nearest.
_CELLS = 4096
_REACH = 4.5


def nearest_symbols(numbers: Float[Tensor, "*batch width"], bits: Sequence[int]) -> Int32[Tensor, "*batch symbols"]:
    """The symbols of the nearest Lloyd-Max levels, up to half a cell of 1/455.

    A look-up by cell costs one access; a search costs one per bit, and is ten times slower.

    Args:
        numbers: Are used up. The last axis goes through the places of one symbol after another.
        bits: Bits of the places of a symbol, the lowest first.
    """
    cells = numbers.mul_(_CELLS / (2 * _REACH)).add_(_CELLS / 2).clamp_(0, _CELLS - 1).to(torch.int64)
    places = cells.unflatten(-1, (-1, len(bits)))
    places.add_(_CELLS * torch.arange(len(bits), device=cells.device))
    return take(_cell_indices(tuple(bits), cells.device), places).sum(-1, dtype=torch.int32)


@lru_cache(maxsize=32)
def _cell_indices(bits: tuple[int, ...], device: torch.device) -> Int32[Tensor, " places_cells"]:
    """For each cell of each place the index of the level nearest to its centre, shifted to its place in the symbol."""
    centres = ((torch.arange(_CELLS, dtype=torch.float64) + 0.5) / _CELLS * 2 - 1) * _REACH
    indices, shift = [], 0
    for width in bits:
        levels = torch.tensor(lloyd_max(width), dtype=torch.float64)
        indices.append(torch.bucketize(centres, (levels[1:] + levels[:-1]) / 2, out_int32=True) << shift)
        shift += width
    return torch.cat(indices).to(device)


@lru_cache(maxsize=32)
def symbol_table(bits: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels of every symbol: row s holds one level per entry of `bits`, whose indices s is made of, lowest first.

    Returned as words of the rows' size where there is such a word, so that a look-up moves one word.
    """
    symbols = torch.arange(1 << sum(bits))
    columns, shift = [], 0
    for width in bits:
        levels = torch.tensor(lloyd_max(width), dtype=torch.float64)
        columns.append(levels[(symbols >> shift) & ((1 << width) - 1)])
        shift += width
    table = torch.stack(columns, dim=1).to(dtype)
    word = _WORD_OF_BYTES.get(table.shape[1] * table.element_size())
    return (table if word is None else table.view(word).flatten()).to(device)


class Levels(NamedTuple):
    """Levels ``[heads, tokens, width]``, packed as symbols; see `attention.rows.Packed`."""

    planes: Sequence[Tensor]
    """Of one kind of symbol after the other, see `packing`."""
    symbols: tuple[tuple[int, ...], ...]
    """Of each kind, the bits of its places, the lowest first."""
    symbols_of_kind: int
    """Symbols of each kind in a token."""

    def rows(self, dtype: torch.dtype) -> Rows:
        """See `attention.rows.Packed`."""
        bits, tables = _planes_and_tables(self.symbols, dtype, self.planes[0].device)
        return symbols(self.planes, bits, self.symbols_of_kind * sum(map(len, self.symbols)), tables)

    def decode(self, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        """See `attention.rows.Packed`."""
        levels, begin = [], 0
        for kind in self.symbols:
            end = begin + len(plane_bits(sum(kind)))
            numbers = unpack(self.planes[begin:end], sum(kind), self.symbols_of_kind)
            levels.append(look_up(numbers, kind, dtype))
            begin = end
        return levels[0] if len(levels) == 1 else torch.cat(levels, -1)


@lru_cache(maxsize=32)
def _planes_and_tables(
    kinds: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """The bits of all planes, and of each kind of symbol a table ``[symbols, numbers]``."""
    tables = (symbol_table(kind, dtype, device).view(dtype).view(-1, len(kind)) for kind in kinds)
    return tuple(width for kind in kinds for width in plane_bits(sum(kind))), tuple(tables)


def look_up(
    symbols: Int[Tensor, "... count"], bits: Sequence[int], dtype: torch.dtype
) -> Float[Tensor, "... count_times_levels"]:
    """The levels of each symbol, next to each other."""
    table = symbol_table(tuple(bits), dtype, symbols.device)
    if table.ndim == 1:
        return take(table, symbols).view(dtype).view(*symbols.shape[:-1], -1)
    return table[symbols.to(torch.int64)].flatten(-2)


_WORD_OF_BYTES = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
