"""The history of one attention layer within a budget."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import ConfigError, StateError
from ..exactness import Exactness
from ..layer import BlockLayer
from .allowance import Allowance
from .band import visible
from .budget import Budget, Recent, least_tokens
from .evicted_table import EvictedTable
from .policy import Policy
from .ragged_table import RaggedTable


class EvictingLayer(BlockLayer):
    """Keys and values of one full-attention layer, of which those with the lowest scores are dropped.

    Each query attends to everything held when its tokens arrive, its own chunk included. The budget applies to a first
    chunk at once, to later ones when the next tokens come: what is held is at most the budget and one chunk.

    Args:
        policy: What decides who stays.
        budget: How much stays.
        layers: Layers that share the budget, where it is a size.
        block_size: Tokens per block, and tokens dropped at a time while decoding.
        sinks: Tokens at the beginning that always stay.
        recent: Tokens at the end that always stay, or their share of the budget.
        per_head: Whether the heads of a row share what they keep, instead of keeping equally many tokens each.
        number: Its number among `layers`, if lower ones keep more; None if all keep equally many tokens.
    """

    watches_first_chunk = True

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        layers: int = 1,
        block_size: int = 64,
        sinks: int = 4,
        recent: Recent = 64,
        per_head: bool = False,
        number: int | None = None,
    ) -> None:
        super().__init__(block_size)
        for name, tokens in (("sinks", sinks), ("recent", recent)):
            if tokens < 0:
                raise ConfigError(f"{name} is a number of tokens, at least 0, got {tokens}")
        if isinstance(recent, float) and recent >= 1.0:
            raise ConfigError(f"recent is a number of tokens, or a share of the budget below 1.0, got {recent}")
        self.policy = policy
        self.budget = budget
        self.layers = layers
        self.sinks = sinks
        self.recent = recent
        self.per_head = per_head
        self.number = number
        self._new_tokens = 0
        if budget.fixed_tokens is not None:
            self._check_budget(budget.fixed_tokens)

    @property
    def exactness(self) -> Exactness:
        """Its own claim: see `BlockLayer.exactness`."""
        if self.budget.is_everything:
            return super().exactness
        return Exactness("approximate", f"tokens of full-attention layers are dropped: {self.storage()}")

    def _check_budget(self, tokens: int) -> None:
        least = least_tokens(self.sinks, self.recent, self.block_size)
        if tokens < least:
            raise ConfigError(
                f"a budget of {tokens} tokens leaves no choice: {self.sinks} sinks, {self._recent()} and a block of "
                f"{self.block_size} are always held, which takes {least}. Raise it, or lower one of these"
            )

    def _recent(self) -> str:
        return f"{self.recent} recent tokens" if isinstance(self.recent, int) else f"a share of {self.recent} recent"

    def new_table(self, key_states: Tensor, value_states: Tensor) -> EvictedTable:
        """An empty history for states like these samples ``[rows, heads, any, width]``.

        Raises:
            ConfigError: A budget in bytes is too small for as many rows.
        """
        rows, heads = key_states.shape[:2]
        token_bytes = heads * torch.int32.itemsize
        for states in (key_states, value_states):
            token_bytes += states.shape[1] * states.shape[3] * states.element_size()
        row_bytes = (self.budget.total_bytes or 0) / self.layers / rows

        def limit(seen: int) -> int:
            return self.budget.tokens(seen, row_bytes, token_bytes, self.block_size)

        if self.budget.total_bytes is not None:
            self._check_budget(limit(0))
        place = None if self.number is None else (self.number, self.layers)
        return self._new_table(
            key_states, value_states, Allowance(limit, self.block_size, self.sinks, self.recent, place)
        )

    def _new_table(self, keys: Tensor, values: Tensor, allowance: Allowance) -> EvictedTable:
        kind = RaggedTable if self.per_head else EvictedTable
        return kind(keys, values, self.policy, allowance)

    def update(
        self,
        key_states: Float[Tensor, "rows key_heads tokens key_width"],
        value_states: Float[Tensor, "rows value_heads tokens value_width"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `BlockLayer.update`."""
        self._new_tokens = key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def check_crop(self, tokens_to_remove: int) -> None:
        """See `BlockLayer.check_crop`.

        Raises:
            StateError: What was dropped, or encoded, would be needed.
        """
        super().check_crop(tokens_to_remove)
        if self.table is None:
            return
        table = self._evicted_table()
        if table.tokens + tokens_to_remove < table.tail_begin:
            raise StateError(
                f"{-tokens_to_remove} of {table.tokens} tokens cannot be removed: before token {table.tail_begin} "
                f"not all are held as they came. Raise `recent` above {self.recent}, call "
                "`cache.activate_past_recording()` before the tokens are stored, or start again with `cache.reset()`"
            )

    def observe(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> None:
        """Let the policy know the queries."""
        self._evicted_table().observe(query, _seen_by_last(mask), scale, forget=not self.record_past)
        if query.is_meta and self.get_seq_length() == self._new_tokens:
            self._reduce_first()  # no attention follows

    def _reduce_first(self) -> None:
        """Apply the budget to a first chunk, whose queries are known."""
        if not self.record_past:
            self._evicted_table().drop_before(0)

    def attend_given(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        states: tuple[Tensor, Tensor],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> Float[Tensor, "rows query_heads queries value_width"] | None:
        """Apply the budget to a first chunk, after its attention where the policy looks at that. See `BlockLayer`."""
        with_gradients = any(part.requires_grad for part in (query, *states))
        output = None
        if not (self.record_past or with_gradients):
            output = self._evicted_table().attend_receiving(query, mask, scale)
        self._reduce_first()
        return output

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
        first_token: int,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention of `query` over what is held; see `hf_kvcache.attention.attend`."""
        if first_token:
            raise StateError(f"an evicting layer is read from its first token on, not from {first_token}")
        table = self._evicted_table()
        # Without a mask every query sees everything, not only what is up to its own token.
        output = None if self.record_past or mask is None else table.attend_receiving(query, mask, scale)
        return table.attend(query, mask, scale) if output is None else output

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of the keys and values from position `first_token` on.

        Raises:
            StateError: Tokens were dropped, or should have been by a policy that saw no queries: tensors of the whole
                history, which an attention of the model's own would read, do not exist.
        """
        table = self._evicted_table()
        if table.tokens_held < table.tokens:
            raise StateError(
                f"{table.tokens - table.tokens_held} of {table.tokens} tokens were dropped, and only attention through "
                "torch's scaled_dot_product_attention can leave them out: load the model with "
                'attn_implementation="sdpa"'
            )
        if table.is_due and not table.knows_queries:
            raise StateError(
                f"the policy {self.policy.name!r} looks at queries, which this attention implementation does not show: "
                'load the model with attn_implementation="sdpa", or take a policy that looks at keys and values alone'
            )
        return table.materialize(first_token)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the keys held, ``[rows, heads, columns, width]``; None before the first update.

        Heads that hold fewer tokens than others have zeros before them.
        """
        return None if self.table is None else self._evicted_table().states()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the values held, as `keys`; None before the first update."""
        return None if self.table is None else self._evicted_table().states()[1]

    def _evicted_table(self) -> EvictedTable:
        table = self._table()
        if not isinstance(table, EvictedTable):
            raise StateError(f"an evicting layer cannot read a {type(table).__name__}")
        return table

    def storage(self) -> str:
        """See `BlockLayer.storage`."""
        budget = self.budget.amount
        kept = f"{self.sinks} sinks and {self._recent()} always held"
        kept = f"shared by the heads, {kept}" if self.per_head else kept
        kept = kept if self.number is None else f"layer {self.number} of a pyramid of {self.layers}, {kept}"
        return f"evicted by {self.policy.name} to a budget of {budget}, {kept}, blocks of {self.block_size} tokens"


def _seen_by_last(mask: Tensor | None) -> Tensor | None:
    """Which tokens the last query may look at, ``[rows or 1, seen]``, a copy; None without a mask."""
    if mask is None or mask.shape[-1] == 1:
        return None
    return visible(mask.view(*([1] * (4 - mask.ndim)), *mask.shape)[:, 0, -1]).clone()
