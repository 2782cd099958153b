"""A layer whose model attends to everything, of which queries see sinks and a sliding window."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..attention import attend_states, materialize
from ..attention.streaming import Piece, Source, attend_streaming, exact_source
from ..blocks import BlockTable, History
from ..errors import ConfigError, InputError, StateError
from ..exactness import Exactness
from ..layer import BlockLayer
from .band import Range, band, both, select_columns, visible
from .rotation import Rotation, Turned
from .sinks import SinkTable

# Up to so many queries are scored against the blocks where they lie; for more of them these are copied together, for
# torch's kernel, `_SLICE_QUERIES` at a time so that a long prompt does not score what lies far outside its window.
_IN_PLACE_QUERIES = 16
_SLICE_QUERIES = 512


class WindowLayer(BlockLayer):
    """A full-attention layer of which each query sees the row's sinks and the last `window` tokens.

    The query at position p sees the row's first `sinks` real tokens and the tokens ``p - window + 1, ..., p``: in a
    prompt as in decoding, however the text is cut into chunks. Blocks that no later query can see are released at the
    next update. Handles and masks span the whole history; columns are selected when attending.

    Args:
        history: The empty layer that would keep everything.
        window: Tokens that a query sees at the end of the history, its own included.
        sinks: Tokens it sees at the beginning.
        rotation: How keys turn with their position, to see the sinks right in front of the window wherever that is;
            None to see them at the beginning.
    """

    watches_first_chunk = True

    def __init__(self, history: BlockLayer, window: int, sinks: int, rotation: Rotation | None = None) -> None:
        if not history.fused:
            raise ConfigError("a window over full attention is read through handles: `fused=False` has none")
        super().__init__(history.block_size)
        self.history = history
        self.reach: int = window
        self.sinks = sinks
        self.rotation = rotation
        self._new_tokens = 0

    def new_table(self, key_states: Tensor, value_states: Tensor) -> SinkTable:
        """An empty history for states like these samples ``[rows, heads, any, width]``."""
        return SinkTable(self.history.new_table(key_states, value_states), self.sinks)

    def update(
        self,
        key_states: Float[Tensor, "rows key_heads tokens key_width"],
        value_states: Float[Tensor, "rows value_heads tokens value_width"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `BlockLayer.update`."""
        self._new_tokens = key_states.shape[2]
        result = super().update(key_states, value_states, *args, **kwargs)
        table = self._sink_table()
        if key_states.is_meta and table.is_open:  # only bytes are asked for, and no query is going to come
            table.capture(key_states, value_states, table.tokens - self._new_tokens)
        return result

    @property
    def exactness(self) -> Exactness:
        """What this layer claims about its results."""
        reason = f"full attention sees no more than {self._attention()}"
        below = self.history.exactness
        return Exactness("approximate", f"{reason}; {below.reason}" if below.kind == "approximate" else reason)

    def check_states(self, keys: Tensor, values: Tensor) -> None:
        """Raise InputError unless keys and values ``[rows, heads, tokens, width]`` fit the history."""
        self.history.check_states(keys, values)

    def restore(self, table: History) -> None:
        """Take over a history that was stored."""
        super().restore(table)
        self.history.restore(self._sink_table().recent)

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        super().reset()
        self.history.reset()

    # --------------------------------------------------------------------------------------------------- reading

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
        first_token: int,  # noqa: ARG002
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention of the queries of the newest tokens over the sinks and their windows.

        Args:
            query: Query states.
            mask: Over the whole history; see `hf_kvcache.attention.attend`.
            scale: Factor on the scores.
            first_token: Of no effect: handles of this layer begin at 0.

        Raises:
            InputError: The mask has padding on the right.
        """
        table = self._sink_table()
        self._learn_padding(mask)
        if table.is_open:
            begin = max(table.captured, table.first_token)
            table.capture(*self.history.materialize(begin), begin)
        if table.first_token == 0 and not self._hides(table.tokens):
            return self.history.attend(query, mask, scale, 0)
        if isinstance(table.recent, BlockTable) and self._new_tokens > _IN_PLACE_QUERIES:
            first = self._first_needed(table.tokens - self._new_tokens)
            return self._attend_band(query, mask, scale, (materialize(table.recent, first), first))
        return self._attend_band(query, mask, scale, None)

    def attend_given(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        states: tuple[Tensor, Tensor],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> Float[Tensor, "rows query_heads queries value_width"] | None:
        """Attention of a first chunk over its own states; None where each query sees all that the mask lets it see."""
        self._learn_padding(mask)
        if self._sink_table().is_open:
            self._sink_table().capture(states[0].detach(), states[1].detach(), 0)
        return self._attend_band(query, mask, scale, (states, 0)) if self._hides(self.get_seq_length()) else None

    def check_whole(self) -> None:
        """Raise StateError where a query sees less than the tokens that a plain tensor would show it."""
        if self._hides(self.get_seq_length()):
            raise StateError(
                f"{self.get_seq_length()} tokens are more than {self.sinks} sinks and a window of {self.reach}, and "
                "only `scaled_dot_product_attention` is told what its queries do not see: load the model with "
                "`attn_implementation='sdpa'`, and call it without gradients (`torch.no_grad()`) and without attention "
                "dropout. Models that expand latent keys themselves cannot have such a window"
            )

    def observe(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> None:
        """Let the layer below take note of the queries; of a first chunk, first release what no later one sees."""
        table = self._sink_table()
        if self._new_tokens == table.tokens and not self.record_past:
            table.recent.drop_before(self._first_needed(table.tokens))
        self.history.observe(query, mask, scale)

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of the keys and values from position `first_token` on, sinks aside.

        Raises:
            StateError: Some of them were dropped.
        """
        if first_token < self._sink_table().first_token:
            raise StateError(
                f"keys and values are held from {self._sink_table().first_token} on, not from {first_token}"
            )
        return self.history.materialize(first_token)

    def _attend_band(
        self, query: Tensor, mask: Tensor | None, scale: float, copies: tuple[tuple[Tensor, Tensor], int] | None
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention over the sinks and the windows of the newest tokens.

        Args:
            query: As in `attend`.
            mask: As in `attend`.
            scale: As in `attend`.
            copies: Keys and values ``[rows, heads, tokens, width]`` of all tokens from a position on, and that
                position; None to read the blocks where they lie.
        """
        # Not always all new tokens: a layer that reads another one's history may ask for the last of them.
        table, new = self._sink_table(), query.shape[2]
        outputs = []
        for begin in range(0, new, _SLICE_QUERIES):
            end = min(begin + _SLICE_QUERIES, new)
            part = query[:, :, begin:end]
            at = (table.tokens - new + begin, table.tokens - new + end)
            first = self._first_needed(at[0])
            ranges = [(first, at[1])] if copies else table.reading_order(first)
            # A single token that is read nothing but what it sees needs no mask.
            unmasked = new == 1 and ranges == [(first, at[1])] and first >= max(table.padding) + self.sinks
            allowed: Tensor | None = None if unmasked else self._band(at, ranges)
            if mask is not None:
                rows = mask if mask.shape[-2] == 1 else mask[..., begin:end, :]
                allowed = both(select_columns(rows, self._padding(), self.sinks, ranges), allowed)
            if copies:
                columns = slice(first - copies[1], at[1] - copies[1])
                keys, values = (states[:, :, columns] for states in copies[0])
                if self.rotation is None:
                    keys, values = torch.cat([table.keys, keys], dim=2), torch.cat([table.values, values], dim=2)
                    outputs.append(attend_states(part, keys, values, allowed, scale))
                    continue
                pieces = [Piece(None, self.sinks, self.sinks + keys.shape[2], exact_source(keys, values))]
            else:
                pieces = table.recent_pieces(first)
            if self.sinks:
                pieces.append(Piece(None, 0, self.sinks, self._sink_source(part, at)))
            heads = (table.keys.shape[1], table.values.shape[3])
            outputs.append(attend_streaming(pieces, heads, part, allowed, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _sink_source(self, query: Tensor, at: Range) -> Source:
        """The sinks, as the queries at these positions read them."""
        table = self._sink_table()
        source = exact_source(table.keys, table.values)
        if self.rotation is None:
            return source
        behind = torch.arange(*at, device=self.device) - self.reach + 1 - self.sinks
        steps = (behind - self._padding()[:, None]).clamp(min=0)
        groups = query.shape[1] // table.keys.shape[1]
        stacked = steps[:, None].expand(query.shape[0], groups, query.shape[2]).reshape(-1)
        return Turned(source, self.rotation, stacked)

    def _band(self, queries: Range, recent: list[Range]) -> Bool[Tensor, "rows 1 queries columns"]:
        """What the queries at these positions see of the sinks and of the tokens at those."""
        columns = torch.cat([torch.arange(*positions, device=self.device) for positions in recent])
        at = torch.arange(*queries, device=self.device)
        return band(at, self._padding(), self.sinks, columns, self.reach)

    def _padding(self) -> Tensor:
        padding = self._sink_table().padding
        return torch.tensor(padding if len(set(padding)) > 1 else padding[:1], device=self.device)

    def _learn_padding(self, mask: Tensor | None) -> None:
        """Take note of where each row's first real token is, which the mask of its forward pass tells."""
        table, new = self._sink_table(), self._new_tokens
        before = table.tokens - new
        begins = any(padding >= before for padding in table.padding)
        if mask is None or mask.ndim < 2 or mask.shape[-1] != table.tokens or not (begins or new > 1):
            return
        seen = visible(mask.view(*([1] * (4 - mask.ndim)), *mask.shape))[:, 0, -1].expand(table.rows, -1)
        real = seen.any(-1)
        if bool((real & ~seen[:, -1]).any()):
            if before:
                table.truncate(before)
                self.version += 1
            else:
                self.reset()
            row = int((real & ~seen[:, -1]).nonzero()[0])
            raise InputError(
                f"row {row} is padded on the right, where the window is: pad on the left "
                "(`tokenizer.padding_side = 'left'`)"
            )
        if begins:
            first = torch.where(real, seen.int().argmax(-1), table.tokens).tolist()
            table.padding = [
                max(first[row], before) if known >= before else known for row, known in enumerate(table.padding)
            ]

    # -------------------------------------------------------------------------------------------------- internals

    def _hides(self, tokens: int) -> bool:
        """Whether the last of so many tokens does not see some token before it."""
        padding = min(self._sink_table().padding) if self.table is not None else 0
        return tokens - self.reach > padding + self.sinks

    def _sink_table(self) -> SinkTable:
        table = self._table()
        if not isinstance(table, SinkTable):
            raise StateError(f"a layer with sinks and a window cannot read a {type(table).__name__}")
        return table

    def _store_first(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store a first chunk: what later queries see, or all of it where codecs learn from its beginning."""
        if isinstance(self._sink_table().recent, BlockTable):
            super()._store_first(key_states, value_states)
        else:
            self._sink_table().append(key_states, value_states)

    def _attention(self) -> str:
        where = "" if self.rotation is None else " that move along"
        return f"{self.sinks} sinks{where} and a window of {self.reach} tokens"

    def storage(self) -> str:
        """How its tokens are kept, in words."""
        return self.history.storage()
