"""One attention layer whose history begins in a store."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from ..attention import attend
from ..attention.streaming import attend_streaming
from ..blocks import BlockPool, BlockTable, History
from ..errors import StateError
from ..exactness import Exactness
from ..layer import BlockLayer
from .table import PrefixTable


class PrefixLayer(BlockLayer):
    """Keys and values of one full-attention, sliding-window or chunked layer, shared at the beginning.

    Queries of all rows attend to the shared states together, so that these are read once for the whole batch. With a
    window only the tokens inside it are read, but all are kept: a later text may branch off before any of them.

    Args:
        block_size: Tokens per block.
        window: Length of the layer's own attention window, itself included; None for full attention.
    """

    def __init__(self, block_size: int = 64, window: int | None = None) -> None:
        super().__init__(block_size, window)
        self.record_past = True

    @property
    def exactness(self) -> Exactness:
        """Shared states were computed in the chunks of an earlier request."""
        return Exactness("rounding", "the same sums, added in the order of an earlier request and in pieces")

    def new_table(self, key_states: Tensor, value_states: Tensor) -> History:
        """An empty history for states like these samples ``[rows, heads, any, width]``."""
        return PrefixTable([], BlockTable(BlockPool(key_states, value_states, self.block_size), key_states.shape[0]))

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
        first_token: int,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention of `query` over the history from position `first_token` on."""
        table = self.prefix_table()
        if first_token >= table.shared_tokens:
            return attend(table.own, first_token - table.shared_tokens, query, mask, scale)
        pool = table.raw_pool
        heads = (pool.keys.shape[0], pool.values.shape[2])
        return attend_streaming(table.pieces(first_token), heads, query, mask, scale)

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of the keys and values from position `first_token` on."""
        return self.prefix_table().materialize(first_token)

    def fork(self) -> PrefixLayer:
        """A layer with the same history; see `PrefixTable.fork`."""
        other = PrefixLayer(self.block_size, self.window)
        if self.table is not None:
            other.restore(self.prefix_table().fork())
            self.version += 1  # its own blocks may have become shared ones
        return other

    def prefix_table(self) -> PrefixTable:
        """The history.

        Raises:
            StateError: There is none yet.
        """
        table = self._table()
        if not isinstance(table, PrefixTable):
            raise StateError(f"a layer that shares prefixes cannot read a {type(table).__name__}")
        return table

    def storage(self) -> str:
        """How its tokens are kept, in words."""
        shared = self.table.shared_tokens if isinstance(self.table, PrefixTable) else 0
        return f"{shared} tokens read from a store, then {super().storage()}"
