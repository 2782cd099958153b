"""The history of a quantized layer: exact sinks, encoded blocks, exact recent tokens.

Tokens ``[0, sinks)`` are kept as they are, in a table of their own. Then come encoded blocks, up to a boundary that
is a function of the length alone; from there on tokens are read as they are. Raw tokens are kept for another `recent`
tokens behind that boundary, so that a history cut back by up to so much is read exactly as if it had never gone on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import read_states
from ..attention.streaming import Piece, exact_source
from ..blocks import BlockPool, BlockTable, ColumnTable, Usage
from ..codecs import Codec, Fit
from ..errors import StateError
from .plan import ReadingPlan, plan_reading
from .pool import ENCODE_BLOCKS, EncodedPool, EncodedSource, encoded_pieces, precise
from .protection import Protection, score_error
from .queries import QueryRecord

# Tokens after the sinks that a fit looks at, at most.
_FIT_TOKENS = 256

# Tokens per block of the raw parts; small, because a block is kept or released as a whole.
_RAW_BLOCK_TOKENS = 16


class QuantizedTable:
    """The histories of some rows of one layer.

    Args:
        keys: A sample ``[rows, key_heads, any, key_width]`` that gives rows, heads, width, dtype and device.
        values: The same for the values.
        codecs: The codec of the keys and that of the values.
        block_size: Tokens per encoded block.
        sinks: Tokens at the beginning that stay exact.
        recent: Tokens at the end that stay exact, at least.
        protection: What guards keys that would be off by too much; None takes the codec as it is.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        codecs: tuple[Codec, Codec],
        block_size: int,
        sinks: int,
        recent: int,
        protection: Protection | None = None,
    ) -> None:
        rows = keys.shape[0]
        self.codecs = codecs
        """The codecs in use: those asked for, unless the keys are protected."""
        self.protection = protection
        self.off_by: float | None = None
        """By how many nats scores would have been off, if the keys are protected."""
        self._asked_codecs = codecs
        self.block_size = block_size
        self.sink_tokens = sinks
        self.recent_tokens = recent
        self.tokens = 0
        """Tokens seen."""
        raw_block = _RAW_BLOCK_TOKENS if block_size % _RAW_BLOCK_TOKENS == 0 else block_size
        self.sinks = BlockTable(BlockPool(keys, values, max(sinks, 1)), rows, tight=True)
        self.encoded = ColumnTable(EncodedPool(keys, values, codecs, block_size), rows, tight=True)
        self.raw = BlockTable(BlockPool(keys, values, raw_block), rows, tight=True)
        self.raw_begin = sinks
        """Position of the first token the raw table ever held."""
        self.encoded_begin = sinks
        """Position of the first encoded token held; what lies between it and the sinks was dropped."""
        self.lengths: list[int] = []
        """Tokens of each encoded column: the block size, but less where a history was cut back inside a block."""
        self.fits: list[tuple[Fit, Fit]] = []
        self.fit_of_row: list[int] = []
        self.queries = QueryRecord()
        self._exact_from = sinks
        self._plans: tuple[tuple[int, int], ReadingPlan] = ((-1, -1), ReadingPlan([], 0))

    # ------------------------------------------------------------------------------------------------- telling

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.raw.rows

    @property
    def first_token(self) -> int:
        """Position of the oldest token held; where something was dropped, the sinks aside."""
        return self.encoded_begin if self.encoded_begin > self.sink_tokens else 0

    @property
    def tokens_held(self) -> int:
        """Tokens of each row that are held."""
        return self.tokens - (self.encoded_begin - self.sink_tokens)

    @property
    def encoded_end(self) -> int:
        """One past the position of the last encoded token."""
        return self.encoded_begin + sum(self.lengths)

    @property
    def raw_first(self) -> int:
        """Position of the first token that is held as it came, sinks aside."""
        return self.raw_begin + self.raw.first_token

    @property
    def raw_pool(self) -> BlockPool:
        """The pool of the tokens that are kept as they are."""
        return self.raw.pool

    def usage(self) -> Usage:
        """Bytes held now. Tokens that are encoded and not yet released count twice, as they are held twice."""
        of_encoded = self._encoded_pool.usage(self.fits, self.encoded.table_bytes)
        of_encoded = of_encoded._replace(scale_bytes=of_encoded.scale_bytes + self.queries.nbytes)
        parts = (self.sinks.usage(), of_encoded, self.raw.usage())
        return Usage(*(sum(kind) for kind in zip(*parts, strict=True)))

    @property
    def _encoded_pool(self) -> EncodedPool:
        pool = self.encoded.pool
        if not isinstance(pool, EncodedPool):
            raise StateError(f"the encoded table owns a {type(pool).__name__}")
        return pool

    # ------------------------------------------------------------------------------------------------- writing

    def append(
        self,
        keys: Float[Tensor, "rows key_heads tokens key_width"],
        values: Float[Tensor, "rows value_heads tokens value_width"],
    ) -> None:
        """Write the states of new tokens. What has left the recent window since the last call is encoded first."""
        self.seal()
        to_sinks = min(max(self.sink_tokens - self.tokens, 0), keys.shape[2])
        if to_sinks:
            self.sinks.append(keys[:, :, :to_sinks], values[:, :, :to_sinks])
        if to_sinks < keys.shape[2]:
            self.raw.append(keys[:, :, to_sinks:], values[:, :, to_sinks:])
        self.tokens += keys.shape[2]

    def seal(self) -> None:
        """Encode the blocks that have left the recent window and release the raw ones no step back can need."""
        self._exact_from = max(self._boundary(self.tokens), self.raw_first)
        count = (self._exact_from - self.encoded_end) // self.block_size
        if count > 0:
            if not self.fits:
                self._fit(self._exact_from)
            self._encode(count)
        self.raw.drop_before(max(self._boundary(self.tokens - self.recent_tokens) - self.raw_begin, 0))

    def _boundary(self, tokens: int) -> int:
        """Where exact reading begins for a query after `tokens` tokens: a function of the length alone."""
        whole = (tokens - self.recent_tokens - self.raw_begin) // self.block_size
        return self.raw_begin + max(whole, 0) * self.block_size

    def observe(self, query: Float[Tensor, "rows query_heads queries width"]) -> None:
        """Take note of the queries of the newest tokens, if they are among the first of the history."""
        begin = max(self.tokens - query.shape[2], self.sink_tokens)
        end = min(self.tokens, self.sink_tokens + _FIT_TOKENS)
        # Only updates that begin in the first block, so that what a fit knows does not depend on when it is made.
        if self.fits or not self.codecs[0].wants_queries or begin >= self.sink_tokens + self.block_size or end <= begin:
            return
        first = query.shape[2] - (self.tokens - begin)
        self.queries.add(query[:, :, first : first + end - begin], self.raw.pool.keys.shape[0], end)

    def resume(
        self,
        tokens: int,
        raw_begin: int,
        encoded_begin: int,
        lengths: list[int],
        fits: Sequence[tuple[Fit, Fit]],
        fit_of_row: list[int],
    ) -> None:
        """Go on with a history whose blocks have been put into the three tables."""
        self.tokens, self.raw_begin = tokens, raw_begin
        self.encoded_begin, self.lengths = encoded_begin, lengths
        self.fits, self.fit_of_row = list(fits), fit_of_row
        self._exact_from = max(min(self._boundary(tokens), self.encoded_end), self.raw_first)

    def _fit(self, end: int) -> None:
        """Let the codecs look at the first tokens held behind the sinks, once per distinct text in the batch."""
        begin = self.raw_first
        end = min(end, begin + max(_FIT_TOKENS // self.block_size, 1) * self.block_size)
        columns = (end - begin) // self.raw.pool.block_size
        texts: dict[tuple[int, ...], int] = {}
        readers: list[tuple[int, tuple[int, ...]]] = []
        for row, own in enumerate(self.raw.private):
            text = tuple([*self.raw.shared, *own][:columns])
            if text not in texts:
                texts[text] = len(readers)
                readers.append((row, text))
            self.fit_of_row.append(texts[text])
        fits = [self._fit_text(row, text) for row, text in readers]
        off_by = max(fit[1] for fit in fits)
        if self.protection is not None and self.off_by is None and off_by > self.protection.most_nats:
            self.protect(off_by)
            fits = [self._fit_text(row, text) for row, text in readers]
        self.fits = [fit[0] for fit in fits]

    def _fit_text(self, row: int, blocks: Sequence[int]) -> tuple[tuple[Fit, Fit], float]:
        """What the codecs learn from some blocks of a row, and by how many nats scores will be off (0 if unknown)."""
        gathered = self.raw.pool.gather(torch.tensor([list(blocks)], device=self.raw.pool.device))
        keys, values = (precise(states[0]) for states in gathered)
        squares = None if self.queries.squares is None else self.queries.squares[row]
        fits = self.codecs[0].fit(keys, squares), self.codecs[1].fit(values, None)
        if self.protection is None or squares is None or keys.is_meta:
            return fits, 0.0
        return fits, score_error(self.codecs[0], fits[0], keys[:, : self.block_size], squares)

    def protect(self, off_by: float) -> None:
        """Store the keys with the codec that is kept for this, because scores would be off by so many nats.

        Only before anything is encoded.
        """
        if self.protection is None:
            raise StateError("this history has no codec to protect its keys with")
        self.off_by = off_by
        self._encode_with((self.protection.codec, self._asked_codecs[1]))

    def _encode_with(self, codecs: tuple[Codec, Codec]) -> None:
        """Make an empty encoded table for these codecs."""
        self.codecs = codecs
        pool = EncodedPool(*self._samples(), codecs, self.block_size)
        self.encoded = ColumnTable(pool, self.rows, tight=True)

    def _encode(self, count: int) -> None:
        """Encode the next `count` columns, each distinct block once."""
        per_block = self.block_size // self.raw.pool.block_size
        first = (self.encoded_end - self.raw_begin) // self.raw.pool.block_size - self.raw.dropped_blocks
        sources: list[dict[int, tuple[int, ...]]] = []
        owners: list[list[int]] = []
        known: dict[tuple[int, ...], int] = {}
        for row, own in enumerate(self.raw.private):
            blocks = [*self.raw.shared, *own]
            owners.append([])
            sources.append({})
            for column in range(count):
                begin = first + column * per_block
                source = tuple(blocks[begin : begin + per_block])
                owner = known.setdefault((self.fit_of_row[row], *source), row)
                owners[row].append(owner)
                if owner == row:
                    sources[row][column] = source
        fresh = self.encoded.append_columns(owners)
        self.lengths += [self.block_size] * count
        if self.raw.pool.device.type == "meta":  # bytes are planned, and there is nothing to encode
            return
        for row, taken in enumerate(fresh):
            columns = list(taken)
            for at in range(0, len(columns), ENCODE_BLOCKS):
                some = columns[at : at + ENCODE_BLOCKS]
                index = torch.tensor([sources[row][column] for column in some], device=self.raw.pool.device)
                states = [of_kind.transpose(0, 1) for of_kind in self.raw.pool.gather(index)]
                blocks = [taken[column] for column in some]
                self._encoded_pool.encode(blocks, states, self.fits[self.fit_of_row[row]])

    # ------------------------------------------------------------------------------------------------- reading

    def pieces(self) -> list[Piece]:
        """The history in reading order: encoded runs, in chunks of a fixed number of elements, then what is exact.

        See `in_reading_order` for the places of the tokens.
        """
        chunks, end = self._plan
        pieces = encoded_pieces(self._encoded_pool, chunks, self.fits, self.fit_of_row)
        keys, values = self._exact()
        if keys.shape[2]:
            pieces.append(Piece(None, end, end + keys.shape[2], exact_source(keys, values)))
        return pieces

    def in_reading_order(self, columns: Tensor) -> Tensor:
        """`columns`, one per token along the last axis (a mask), in the order in which `pieces` has the tokens."""
        sinks, end = min(self.tokens, self.sink_tokens), self._plan.tokens
        if not sinks or not end:
            return columns
        return torch.cat([columns[..., sinks : sinks + end], columns[..., :sinks], columns[..., sinks + end :]], dim=-1)

    @property
    def reading_order(self) -> list[tuple[int, int]]:
        """The positions of what `pieces` has, as ranges in its order."""
        encoded = (self.encoded_begin, self.encoded_begin + self._plan.tokens)
        sinks = (0, min(self.tokens, self.sink_tokens))
        return [encoded, sinks, (min(self._exact_from, self.tokens), self.tokens)]

    @property
    def _plan(self) -> ReadingPlan:
        state = (self.encoded.version, self._exact_from)
        if self._plans[0] != state:
            keys = self.raw.pool.keys
            end = self._exact_from - self.encoded_begin
            self._plans = (state, plan_reading(self.encoded, self.lengths, end, keys.shape[0] * keys.shape[2]))
        return self._plans[1]

    def _exact(self) -> tuple[Tensor, Tensor]:
        """The sinks and the tokens that are read as they are, ``[rows, heads, tokens, width]``: views or copies."""
        parts = []
        if self.sinks.tokens:
            parts.append(read_states(self.sinks, 0))
        if self.tokens > self._exact_from:
            parts.append(read_states(self.raw, self._exact_from - self.raw_begin))
        if not parts:
            return read_states(self.raw, self.raw.tokens)
        keys, values = zip(*parts, strict=True)
        return (keys[0], values[0]) if len(parts) == 1 else (torch.cat(keys, 2), torch.cat(values, 2))

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous ``[rows, heads, tokens, width]`` copies of what is read from `first_token` on."""
        exact = self._exact()
        sinks = min(self.tokens, self.sink_tokens)
        copies = []
        for states in exact:
            copy = states.new_empty(*states.shape[:2], self.tokens, states.shape[3])
            copy[:, :, :sinks], copy[:, :, self._exact_from :] = states[:, :, :sinks], states[:, :, sinks:]
            copies.append(copy)
        for piece in self.pieces():
            if isinstance(piece.source, EncodedSource):
                rows = slice(None) if piece.rows is None else piece.rows
                for copy, states in zip(copies, piece.source.decode(copies[0].dtype), strict=True):
                    copy[rows, :, self.encoded_begin + piece.begin : self.encoded_begin + piece.end] = states
        return copies[0][:, :, first_token:].contiguous(), copies[1][:, :, first_token:].contiguous()

    # ------------------------------------------------------------------------------------------------- changing

    def select(self, indices: Sequence[int]) -> None:
        """Make row i a copy of old row ``indices[i]``; nothing is encoded again."""
        for table in (self.sinks, self.encoded, self.raw):
            table.select(indices)
        self.fit_of_row = [self.fit_of_row[index] for index in indices] if self.fits else []
        self.queries.select(torch.tensor(list(indices), device=self.raw.pool.device))

    def truncate(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens; nothing is encoded again."""
        if not self.first_token <= tokens <= self.tokens:
            raise StateError(f"cannot truncate to {tokens} tokens: {self.first_token} to {self.tokens} are held")
        raw_first = self.raw_first
        # Where the raw tokens are still at hand, the shorter history is what it was before it went on. Where they are
        # not, encoded blocks are all there is, the last of them shortened.
        last = max(self._boundary(tokens), raw_first) if tokens >= raw_first else tokens
        kept, end = 0, self.encoded_begin
        while kept < len(self.lengths) and end < last:
            end += self.lengths[kept]
            kept += 1
        self.encoded.truncate((self.encoded.dropped_blocks + kept) * self.block_size)
        del self.lengths[kept:]
        if tokens < self.sink_tokens:
            self.sinks.truncate(tokens)
        if tokens >= raw_first:
            self.raw.truncate(tokens - self.raw_begin)
        else:
            if self.lengths:
                self.lengths[-1] -= end - tokens
            self.raw = BlockTable(BlockPool(*self._samples(), self.raw.pool.block_size), self.rows, tight=True)
            self.raw_begin = max(tokens, self.sink_tokens)
        if not self.lengths and not self.first_token:
            self.fits, self.fit_of_row = [], []
            if self.off_by is not None:
                self.off_by = None
                self._encode_with(self._asked_codecs)
        self.queries.truncate(tokens)
        self.tokens = tokens
        self._exact_from = max(min(self._boundary(tokens), self.encoded_end), self.raw_first)

    def skip(self, blocks: int) -> None:
        """Only no blocks: the sinks and what the codecs learn from come first."""
        if blocks:
            raise StateError("a quantized history cannot begin behind its first token")

    def drop_before(self, token: int) -> None:
        """Release the blocks that lie wholly between the sinks and position `token`, encoded or not yet."""
        count, begin = 0, self.encoded_begin
        while count < len(self.lengths) and begin + self.lengths[count] <= token:
            begin += self.lengths[count]
            count += 1
        if count:
            self.encoded.drop_before((self.encoded.dropped_blocks + count) * self.block_size)
            del self.lengths[:count]
        if not self.lengths and token > begin:
            begin += (token - begin) // self.block_size * self.block_size
            self.raw.drop_before(begin - self.raw_begin)
        self.encoded_begin = begin
        self._exact_from = max(self._exact_from, begin if not self.lengths else self.raw_first)

    def _samples(self) -> tuple[Tensor, Tensor]:
        return self.raw.pool.keys[None], self.raw.pool.values[None]

    def check_integrity(self) -> None:
        """Raise StateError unless tables, lengths and fits agree."""
        for table in (self.sinks, self.encoded, self.raw):
            table.check_integrity()
        if self.sinks.tokens != min(self.tokens, self.sink_tokens):
            raise StateError(f"{self.sinks.tokens} sinks are held of {self.tokens} tokens")
        if self.encoded.columns != len(self.lengths) or any(not 0 < n <= self.block_size for n in self.lengths):
            raise StateError(f"{self.encoded.columns} encoded columns have the lengths {self.lengths}")
        if self.tokens > self.sink_tokens and self.raw_begin + self.raw.tokens != self.tokens:
            raise StateError(f"the raw tokens end at {self.raw_begin + self.raw.tokens}, the history at {self.tokens}")
        if not self.raw_first <= self._exact_from <= max(self.encoded_end, self.raw_first):
            raise StateError(f"exact reading begins at {self._exact_from}, raw tokens at {self.raw_first}")
        if self.raw_first > self.encoded_end:
            raise StateError(f"tokens {self.encoded_end} to {self.raw_first} are lost")
        if self.lengths and (len(self.fit_of_row) != self.rows or max(self.fit_of_row) >= len(self.fits)):
            raise StateError(f"{self.rows} rows have the fits {self.fit_of_row} of {len(self.fits)}")
