"""The history of one attention layer, encoded."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..attention import attend_states, streaming
from ..attention.streaming import attend_streaming
from ..codecs import Codec
from ..errors import ConfigError, InputError, StateError
from ..exactness import Exactness
from ..layer import BlockLayer
from .protection import Protection
from .table import QuantizedTable


class QuantizedLayer(BlockLayer):
    """Keys and values of one full-attention layer, encoded block by block when they leave the recent window.

    The queries of a first chunk attend to its states as they are; each later query to exact sinks, decoded blocks and
    exact recent tokens.

    Args:
        codecs: The codec of the keys and that of the values.
        block_size: Tokens per encoded block.
        sinks: Tokens at the beginning that stay exact.
        recent: Tokens at the end that stay exact, at least.
        protection: What guards keys that would be off by too much; None takes the codec as it is.
    """

    watches_first_chunk = True

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        block_size: int = 64,
        sinks: int = 4,
        recent: int = 128,
        protection: Protection | None = None,
    ) -> None:
        super().__init__(block_size)
        for name, tokens in (("sinks", sinks), ("recent", recent)):
            if tokens < 0:
                raise ConfigError(f"{name} is a number of tokens, at least 0, got {tokens}")
        self.codecs = codecs
        self.sinks = sinks
        self.recent = recent
        self.protection = protection

    @property
    def exactness(self) -> Exactness:
        """What this layer claims about its results."""
        if all(codec.exact for codec in self.codecs):
            return super().exactness
        return Exactness("approximate", f"full-attention layers are encoded: {self.storage()}")

    def new_table(self, key_states: Tensor, value_states: Tensor) -> QuantizedTable:
        """An empty history for states like these samples ``[rows, heads, any, width]``.

        Raises:
            ConfigError: A codec cannot store states of this width.
        """
        return QuantizedTable(
            key_states, value_states, self.codecs, self.block_size, self.sinks, self.recent, self.protection
        )

    def check_states(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise InputError unless the states fit the history and hold nothing but finite numbers, as codecs need."""
        super().check_states(key_states, value_states)
        check_finite(key_states, value_states, self.get_seq_length())

    def observe(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,  # noqa: ARG002
        scale: float,  # noqa: ARG002
    ) -> None:
        """Let the codecs know what queries look like; encode a first chunk once its queries are known."""
        table = self._quantized_table()
        table.observe(query)
        if table.tokens == query.shape[2]:
            table.seal()

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of the keys and values from position `first_token` on, decoded."""
        return self._quantized_table().materialize(first_token)

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
        first_token: int,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention of `query` over the whole history; see `hf_kvcache.attention.streaming`.

        For many queries a history of a bounded size is decoded into a workspace instead, and torch's kernel reads it.
        """
        table = self._quantized_table()
        if first_token or table.first_token:
            raise StateError(f"a quantized layer is read from its first token on, not from {first_token}")
        if _decodes_at_once(table, query):
            return attend_states(query, *table.materialize(0), mask, scale)
        keys, values = table.raw_pool.keys, table.raw_pool.values
        if mask is not None and mask.shape[-1] > 1:
            mask = table.in_reading_order(mask)
        return attend_streaming(table.pieces(), (keys.shape[0], values.shape[2]), query, mask, scale)

    def _quantized_table(self) -> QuantizedTable:
        table = self._table()
        if not isinstance(table, QuantizedTable):
            raise StateError(f"a quantized layer cannot read a {type(table).__name__}")
        return table

    def storage(self) -> str:
        """How its tokens are kept, in words."""
        keys, values = map(repr, self.codecs)
        table = self.table
        if isinstance(table, QuantizedTable) and table.off_by is not None:
            keys = f"{table.codecs[0]!r} (as {keys} scores would be off by {table.off_by:.1f} nats)"
        exact = f"{self.sinks} sinks and {self.recent} recent tokens exact"
        return f"keys {keys}, values {values}, blocks of {self.block_size} tokens, {exact}"


def _decodes_at_once(table: QuantizedTable, query: Tensor) -> bool:
    """Whether the decoded history takes less memory than its scores would, and no more than scores may.

    Not in 16 bits, to which decoded states would be rounded.
    """
    keys, values = table.raw_pool.keys, table.raw_pool.values
    rows, query_heads, queries, _ = query.shape
    per_token = keys.shape[0] * keys.shape[2] + values.shape[0] * values.shape[2]
    if query.element_size() < 4 or per_token >= query_heads * queries:
        return False
    return rows * table.tokens * per_token <= streaming.MOST_SCORES


def check_finite(keys: Tensor, values: Tensor, seen: int) -> None:
    """Raise InputError if the states of the tokens behind the first `seen` hold anything but finite numbers."""
    # On a GPU single tokens are not looked at, since that would make it wait at every step.
    if (keys.device.type == "cpu" or keys.shape[-2] > 1) and not keys.is_meta:
        # A sum is cheaper than a look at every number; one that overflows only means that the look is taken.
        total = keys.sum(dtype=torch.float32) + values.sum(dtype=torch.float32)
        if not math.isfinite(total.item()):
            for name, states in (("keys", keys), ("values", values)):
                _check_finite(name, states, seen)


def _check_finite(name: str, states: Tensor, seen: int) -> None:
    finite = torch.isfinite(states)
    if bool(finite.all()):
        return
    row, token = (int(index) for index in finite.logical_not().any(3).any(1).nonzero()[0])
    raise InputError(
        f"the {name} of token {seen + token}, row {row}, hold NaN or infinity, which no codec can store: "
        "the model overflowed (float16 does easily; load it in bfloat16 or float32)"
    )
