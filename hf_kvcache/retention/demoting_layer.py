"""The history of one attention layer, exact where it matters and in few bits elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..codecs import Codec
from ..exactness import Exactness
from ..layer import BlockLayer
from ..quantized.layer import check_finite
from .allowance import Allowance
from .demoting_table import DemotingTable
from .evicting_layer import EvictingLayer


class DemotingLayer(EvictingLayer):
    """Keys and values of one full-attention layer, of which those with the lowest scores are encoded, once.

    The budget is on what stays exact. An encoded token is never scored again, and what a policy sees of attention is
    that among the exact tokens.

    Args:
        *args: See `EvictingLayer`.
        codecs: The codec of the keys and that of the values.
        **kwargs: See `EvictingLayer`; heads keep equally many tokens.
    """

    def __init__(self, *args: Any, codecs: tuple[Codec, Codec], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.codecs = codecs

    @property
    def exactness(self) -> Exactness:
        """Its own claim: see `BlockLayer.exactness`."""
        if self.budget.is_everything or all(codec.exact for codec in self.codecs):
            return BlockLayer(self.block_size).exactness
        return Exactness("approximate", f"tokens of full-attention layers are encoded: {self.storage()}")

    def check_states(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise InputError unless the states fit the history and hold nothing but finite numbers, as codecs need."""
        super().check_states(key_states, value_states)
        check_finite(key_states, value_states, self.get_seq_length())

    def _new_table(self, keys: Tensor, values: Tensor, allowance: Allowance) -> DemotingTable:
        return DemotingTable(keys, values, self.policy, allowance, codecs=self.codecs)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """A copy of all keys, ``[rows, heads, tokens, width]``, decoded; None before the first update."""
        return None if self.table is None else self._evicted_table().materialize(0)[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """A copy of all values, as `keys`; None before the first update."""
        return None if self.table is None else self._evicted_table().materialize(0)[1]

    def storage(self) -> str:
        """See `BlockLayer.storage`."""
        keys, values = map(repr, self.codecs)
        return f"{super().storage()}, what does not stay encoded: keys {keys}, values {values}"
