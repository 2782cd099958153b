"""The history of an evicting layer that encodes what it would drop: all tokens are held, some as they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import pieces
from ..attention.streaming import Piece, attend_streaming
from ..blocks import Usage
from ..codecs import Codec
from ..errors import StateError
from ..quantized.queries import mean_squares
from .demoted import DemotedTokens, Demotion
from .evicted_table import EvictedTable
from .policy import Held


class DemotingTable(EvictedTable):
    """The histories of some rows of one layer; see `EvictedTable`, whose limit is on the tokens held as they came.

    Args:
        keys: See `EvictedTable`.
        values: See `EvictedTable`.
        *args: See `EvictedTable`.
        codecs: The codec of the keys and that of the values.

    Raises:
        ConfigError: A codec cannot store states of this width.
    """

    query_squares: Float[Tensor, "rows heads width"] | None = None
    """Mean squares of the queries of a first chunk, until the codecs have learned from them."""

    def __init__(self, keys: Tensor, values: Tensor, *args: Any, codecs: tuple[Codec, Codec]) -> None:
        super().__init__(keys, values, *args)
        self.demoted = DemotedTokens(keys, values, codecs, self.block_size)

    @property
    def tokens_held(self) -> int:
        """Tokens of each head and row that are held: all."""
        return self.tokens

    def usage(self) -> Usage:
        """See `EvictedTable.usage`."""
        usage = Usage(*(sum(kind) for kind in zip(super().usage(), self.demoted.usage(), strict=True)))
        squares = 0 if self.query_squares is None else self.query_squares.nbytes
        return usage._replace(scale_bytes=usage.scale_bytes + squares)

    def read_positions(self) -> Int[Tensor, "rows heads read"]:
        """See `EvictedTable.read_positions`: encoded tokens, then those kept as they came."""
        return torch.cat([self.demoted.positions, self.positions], dim=2)

    def observe(
        self,
        query: Float[Tensor, "rows query_heads queries width"],
        visible: Bool[Tensor, "any_rows seen"] | None,
        scale: float,
        forget: bool,
    ) -> None:
        """See `EvictedTable.observe`."""
        super().observe(query, visible, scale, forget)
        if self.demoted.codecs[0].wants_queries and self.tokens == query.shape[2]:
            self.query_squares = mean_squares(query, self.raw_pool.keys.shape[0])

    def _kept_of(self, candidates: int, count: int) -> int:
        """See `EvictedTable._kept_of`: whole blocks go."""
        return candidates - max(candidates - count, 0) // self.block_size * self.block_size

    def _let_go(self, held: Held, going: Int[Tensor, "rows heads going"]) -> None:
        """See `EvictedTable._let_go`: encode them, in order of their positions."""
        going = going.sort(dim=-1).values
        keys, values = (
            states.gather(2, going[..., None].expand(-1, -1, -1, states.shape[3]))
            for states in (held.keys, held.values)
        )
        self.demoted.add(Demotion(keys, values, held.positions.gather(2, going)), self.query_squares)
        self.query_squares = None

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of the keys and values from position `first_token` on, in order, decoded."""
        keys, values, _ = self.states()
        places = self.slot_positions()[..., None].long()
        wholes = []
        for states in (keys, values):
            whole = states.new_empty(*states.shape[:2], self.tokens, states.shape[3])
            wholes.append(whole.scatter_(2, places.expand_as(states), states))
        self.demoted.put_into(*wholes)
        return wholes[0][:, :, first_token:].contiguous(), wholes[1][:, :, first_token:].contiguous()

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """See `EvictedTable.attend`."""
        begin = self.demoted.tokens
        if not begin:
            return super().attend(query, mask, scale)
        exact = [piece._replace(begin=begin + piece.begin, end=begin + piece.end) for piece in pieces(self.blocks, 0)]
        heads = (self.raw_pool.keys.shape[0], self.raw_pool.values.shape[2])
        whole: list[Piece] = [*self.demoted.pieces(), *exact]
        return attend_streaming(whole, heads, query, self.columns_of(mask, query.shape[1]), scale)

    def attend_receiving(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> Float[Tensor, "rows query_heads queries value_width"] | None:
        """See `EvictedTable.attend_receiving`. What exact tokens receive is their share among themselves."""
        return None if self.demoted.tokens else super().attend_receiving(query, mask, scale)

    def select(self, indices: Sequence[int]) -> None:
        """See `EvictedTable.select`."""
        super().select(indices)
        self.demoted.select(indices)
        if self.query_squares is not None:
            self.query_squares = self.query_squares[list(indices)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """See `EvictedTable.tensors`."""
        squares = {} if self.query_squares is None else {"query_squares": self.query_squares}
        return super().tensors | self.demoted.tensors | squares

    def resume(self, tokens: int, tail_begin: int, scale: float, tensors: Mapping[str, Tensor]) -> None:
        """See `EvictedTable.resume`."""
        super().resume(tokens, tail_begin, scale, tensors)
        self.demoted.resume(tensors)
        self.query_squares = tensors.get("query_squares")

    def check_integrity(self) -> None:
        """See `EvictedTable.check_integrity`. Every token before `tail_begin` is there once, in each head."""
        super().check_integrity()
        self.demoted.check_integrity()
        positions = self.read_positions()
        if not positions.is_meta:
            places = torch.arange(self.tail_begin, dtype=positions.dtype, device=positions.device)
            if positions.shape[2] != self.tail_begin or bool((positions.sort(dim=2).values != places).any()):
                raise StateError(f"the encoded and the kept tokens are not those before {self.tail_begin}")
