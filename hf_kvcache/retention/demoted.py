"""Tokens that were encoded instead of dropped: in blocks, each head's own, in the order in which they went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.streaming import Piece
from ..blocks import ColumnTable, Usage, equal_blocks
from ..codecs import Codec, Fit
from ..errors import StateError
from ..quantized.plan import ReadingPlan, plan_reading
from ..quantized.pool import ENCODE_BLOCKS, EncodedPool, EncodedSource, encoded_pieces, precise

# The last of the tokens that go first, at most so many, are what the codecs learn from. Padding would come first.
_FIT_TOKENS = 1024


class Demotion(NamedTuple):
    """Whole blocks of tokens ``[rows, heads, tokens, ...]`` that are to be encoded."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    """Places in the history."""


class DemotedTokens:
    """The demoted tokens of some rows of one layer. Each is encoded once; none is ever dropped.

    Args:
        keys: A sample ``[rows, heads, any, key_width]`` that gives rows, heads, width, dtype and device.
        values: The same for the values.
        codecs: The codec of the keys and that of the values.
        block_size: Tokens per block.

    Raises:
        ConfigError: A codec cannot store states of this width.
    """

    def __init__(self, keys: Tensor, values: Tensor, codecs: tuple[Codec, Codec], block_size: int) -> None:
        self.codecs = codecs
        self.block_size = block_size
        self.pool = EncodedPool(keys, values, codecs, block_size)
        self.encoded = ColumnTable(self.pool, keys.shape[0], tight=True)
        self.positions: Int[Tensor, "rows heads demoted"] = keys.new_empty(*keys.shape[:2], 0, dtype=torch.int32)
        """Places in the history."""
        self.fits: list[tuple[Fit, Fit]] = []
        """What the codecs learned of each distinct row, from the first tokens that went."""
        self.fit_of_row: list[int] = []
        self._plan: tuple[int, ReadingPlan] = (-1, ReadingPlan([], 0))

    @property
    def tokens(self) -> int:
        """Tokens of each head and row."""
        return self.positions.shape[2]

    def usage(self) -> Usage:
        """Bytes held now. Positions and what the codecs learned count as scales."""
        usage = self.pool.usage(self.fits, self.encoded.table_bytes)
        return usage._replace(scale_bytes=usage.scale_bytes + self.positions.nbytes)

    # --------------------------------------------------------------------------------------------------- writing

    def add(self, demotion: Demotion, query_squares: Float[Tensor, "rows heads width"] | None) -> None:
        """Encode whole blocks. Rows with the same tokens in a block share it.

        Args:
            demotion: The tokens.
            query_squares: The mean square of each query channel per key head, if known; looked at the first time only.
        """
        keys, values, positions = demotion
        owners = equal_blocks(keys, values, self.block_size)
        if not self.fits:
            self._fit(keys, values, query_squares, owners)
        for row, of_row in enumerate(owners):
            for column, owner in enumerate(of_row):
                if self.fit_of_row[owner] != self.fit_of_row[row]:
                    of_row[column] = row
        self.positions = torch.cat([self.positions, positions], dim=2)
        for row, taken in enumerate(self.encoded.append_columns(owners)):
            columns = list(taken)
            if keys.is_meta:  # bytes are planned, and there is nothing to encode
                continue
            for at in range(0, len(columns), ENCODE_BLOCKS):
                some = columns[at : at + ENCODE_BLOCKS]
                states = [of_kind[row].unflatten(1, (-1, self.block_size))[:, some] for of_kind in (keys, values)]
                self.pool.encode([taken[column] for column in some], states, self.fits[self.fit_of_row[row]])

    def _fit(self, keys: Tensor, values: Tensor, squares: Tensor | None, owners: list[list[int]]) -> None:
        """Let the codecs learn from these tokens, once for rows that are the same."""
        leaders: list[int] = []
        for row, of_row in enumerate(owners):
            same = next((index for index, leader in enumerate(leaders) if of_row == owners[leader]), len(leaders))
            self.fit_of_row.append(same)
            if same < len(leaders):
                continue
            leaders.append(row)
            of_keys = self.codecs[0].fit(
                precise(keys[row, :, -_FIT_TOKENS:]), None if squares is None else squares[row]
            )
            self.fits.append((of_keys, self.codecs[1].fit(precise(values[row, :, -_FIT_TOKENS:]), None)))

    # --------------------------------------------------------------------------------------------------- reading

    def pieces(self) -> list[Piece]:
        """The tokens in the order of `positions`, for `attend_streaming`; valid until tokens are added or rows move."""
        if self._plan[0] != self.encoded.version:
            heads, _, width = self.pool.samples[0].shape
            lengths = [self.block_size] * self.encoded.columns
            self._plan = (self.encoded.version, plan_reading(self.encoded, lengths, self.tokens, heads * width))
        return encoded_pieces(self.pool, self._plan[1].chunks, self.fits, self.fit_of_row)

    def put_into(self, keys: Tensor, values: Tensor) -> None:
        """Write the decoded tokens to their places in a whole history ``[rows, heads, tokens, width]``."""
        for rows, begin, end, source in self.pieces():
            if not isinstance(source, EncodedSource):
                raise StateError(f"demoted tokens are read from a {type(source).__name__}")
            some = slice(None) if rows is None else rows
            places = self.positions[some, :, begin:end, None].long()
            for whole, states in zip((keys, values), source.decode(keys.dtype), strict=True):
                width = whole.shape[3]
                whole[some] = whole[some].scatter(
                    2, places.expand(-1, -1, -1, width), states.expand(len(places), -1, -1, -1)
                )

    # --------------------------------------------------------------------------------------------------- changing

    def select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of old row ``rows[i]``; blocks are shared."""
        self.encoded.select(rows)
        self.positions = self.positions[list(rows)]
        self.fit_of_row = [self.fit_of_row[row] for row in rows] if self.fits else []

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is held besides the blocks, for `resume`."""
        found = {"demoted.positions": self.positions, "demoted.fit_of_row": torch.tensor(self.fit_of_row)}
        for number, pair in enumerate(self.fits):
            for kind, fit in zip(("keys", "values"), pair, strict=True):
                found |= {f"demoted.fit.{number}.{kind}.{name}": tensor for name, tensor in fit.items()}
        return found

    def resume(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with tokens whose blocks have been put into `encoded`."""
        self.positions = tensors["demoted.positions"]
        self.fit_of_row = [int(number) for number in tensors["demoted.fit_of_row"].tolist()]
        for number in range(max(self.fit_of_row, default=-1) + 1):
            keys, values = (_named(f"demoted.fit.{number}.{kind}.", tensors) for kind in ("keys", "values"))
            self.fits.append((keys, values))

    def check_integrity(self) -> None:
        """Raise StateError unless blocks, positions and fits agree."""
        self.encoded.check_integrity()
        if self.encoded.tokens != self.tokens:
            raise StateError(f"{self.encoded.tokens} tokens are encoded, but {self.tokens} have positions")
        if self.tokens and (len(self.fit_of_row) != self.encoded.rows or max(self.fit_of_row) >= len(self.fits)):
            raise StateError(f"{self.encoded.rows} rows have the fits {self.fit_of_row} of {len(self.fits)}")


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
