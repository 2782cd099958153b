"""A pool of encoded blocks, and how attention reads a run of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.streaming import Piece
from ..blocks import ArenaPool, Usage
from ..codecs import Codec, Fit
from .plan import Chunk

# Blocks encoded at once: bounds the memory that takes.
ENCODE_BLOCKS = 16


class EncodedPool(ArenaPool):
    """Stores encoded blocks of `block_size` tokens: one arena for each part of the codecs.

    Args:
        keys: A sample ``[rows, key_heads, any, key_width]`` that gives heads, width, dtype and device of the keys.
        values: The same for the values.
        codecs: The codec of the keys and that of the values.
        block_size: Tokens per block.

    Raises:
        ConfigError: A codec cannot store states of this width.
    """

    def __init__(self, keys: Tensor, values: Tensor, codecs: tuple[Codec, Codec], block_size: int) -> None:
        self.codecs = codecs
        arenas, slots, counts = [], [], []
        self.scale_bytes = 0
        """Bytes of one block's scales."""
        for codec, states in zip(codecs, (keys, values), strict=True):
            _, heads, _, width = states.shape
            parts = codec.parts(width, block_size, states.dtype)
            arenas += [states.new_empty(heads, 0, part.width, dtype=part.dtype) for part in parts]
            slots += [part.slots for part in parts]
            counts.append(len(parts))
            self.scale_bytes += heads * sum(p.slots * p.width * p.dtype.itemsize for p in parts if p.is_scale)
        super().__init__(block_size, arenas, slots)
        # The arenas of the keys come first.
        self.key_parts = counts[0]

    def fill(self, blocks: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Write encoded blocks, part by part ``[heads, blocks, slots, part width]``, keys before values."""
        self.store.fill(blocks, parts)

    def encode(self, blocks: Sequence[int], states: Sequence[Tensor], fits: tuple[Fit, Fit]) -> None:
        """Encode keys and values ``[heads, blocks, tokens, width]`` and write them to `blocks`."""
        parts: list[Tensor] = []
        for codec, of_kind, fit in zip(self.codecs, states, fits, strict=True):
            parts += codec.encode(precise(of_kind), fit)
        self.fill(blocks, parts)

    def usage(self, fits: Sequence[tuple[Fit, Fit]], table_bytes: int) -> Usage:
        """Bytes held now by the blocks, by what the codecs learned, which counts as scales, and by a table."""
        used = self.used_blocks
        scales = used * self.scale_bytes + sum(part.nbytes for pair in fits for fit in pair for part in fit.values())
        codes = used * (self.block_bytes - self.scale_bytes)
        return Usage(codes, scales, self.store.room_bytes - used * self.block_bytes, table_bytes)


class EncodedRun:
    """Blocks that were encoded with one fit and meet the same queries. Valid until blocks move."""

    def __init__(self, pool: EncodedPool, fits: tuple[Fit, Fit]) -> None:
        self.pool = pool
        self.fits = fits
        self._arenas = pool.arenas
        self._prepared: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def prepare(self, query: Tensor) -> tuple[Tensor, ...]:
        """The queries as the codec of the keys needs them, made once for all chunks of the run."""
        if self._prepared is None or self._prepared[0] is not query:
            self._prepared = (query, self.pool.codecs[0].prepare(query, self.fits[0]))
        return self._prepared[1]

    def parts(self, first: int, blocks: int, of_keys: bool) -> list[Tensor]:
        """The parts of the keys, or of the values, of consecutive blocks, as views."""
        some = slice(None, self.pool.key_parts) if of_keys else slice(self.pool.key_parts, None)
        return [
            arena[:, first * slots : (first + blocks) * slots]
            for arena, slots in zip(self._arenas[some], self.pool.slots[some], strict=True)
        ]


class EncodedSource(NamedTuple):
    """Some consecutive blocks of a run, cut to `tokens`, for `attend_streaming`."""

    run: EncodedRun
    first: int
    blocks: int
    tokens: int

    def scores(self, query: Float[Tensor, "heads queries width"]) -> Float[Tensor, "heads queries tokens"]:
        """See `attention.streaming.Source`."""
        parts = self.run.parts(self.first, self.blocks, of_keys=True)
        return self.run.pool.codecs[0].scores(self.run.prepare(query), parts, self.run.fits[0])[..., : self.tokens]

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        """See `attention.streaming.Source`."""
        missing = self.blocks * self.run.pool.block_size - self.tokens
        if missing:
            weights = torch.nn.functional.pad(weights, (0, missing))
        parts = self.run.parts(self.first, self.blocks, of_keys=False)
        return self.run.pool.codecs[1].weighted_sum(weights, parts, self.run.fits[1], dtype)

    def decode(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys and values ``[heads, tokens, width]`` themselves."""
        keys, values = (
            codec.decode(self.run.parts(self.first, self.blocks, of_keys), fit, dtype)[:, : self.tokens]
            for codec, fit, of_keys in zip(self.run.pool.codecs, self.run.fits, (True, False), strict=True)
        )
        return keys, values


def encoded_pieces(
    pool: EncodedPool, chunks: Iterable[Chunk], fits: Sequence[tuple[Fit, Fit]], fit_of_row: Sequence[int]
) -> list[Piece]:
    """What attention reads of the encoded blocks in `chunks`; valid until blocks move.

    Args:
        pool: Where the blocks are.
        chunks: Which are decoded together. The rows that read one chunk have one fit.
        fits: What the codecs of keys and values learned.
        fit_of_row: Which of them the blocks of a row were encoded with.
    """
    pieces = []
    runs: dict[tuple[int, int], EncodedRun] = {}
    for rows, begin, tokens, run, first, blocks in chunks:
        if run not in runs:
            runs[run] = EncodedRun(pool, fits[fit_of_row[rows[0] if rows else 0]])
        source = EncodedSource(runs[run], run[0] + first, blocks, tokens)
        pieces.append(Piece(rows, begin, begin + tokens, source))
    return pieces


def precise(states: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The states in float32 or better, as codecs take them."""
    return states.to(torch.promote_types(states.dtype, torch.float32))
