"""The history of one attention layer, in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .attention import attend, materialize
from .blocks import BlockPool, BlockTable, History
from .errors import ConfigError, InputError, StateError
from .exactness import BITWISE, Exactness
from .handle import Handle


class BlockLayer(CacheLayerMixin):
    """Keys and values of one full-attention, sliding-window or chunked layer, as transformers' cache layer.

    States are written once into fixed-size blocks and read where they lie. With a window, whole blocks that no later
    query can see are released at the next update.

    Args:
        block_size: Tokens per block.
        window: Length of the layer's own attention window, itself included; None for full attention.
        fused: Return handles that attend without copying. If False, `update` returns the very tensors that
            transformers' dynamic cache returns.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True
    watches_first_chunk = False
    """Whether the layer wants to see the queries of a first chunk, which attend to the states themselves."""

    def __init__(self, block_size: int = 64, window: int | None = None, fused: bool = True) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1 token, got {block_size}")
        if window is not None and window < 1:
            raise ConfigError(f"an attention window must be at least 1 token, got {window}")
        self.block_size = block_size
        self.window = window
        self.reach = window
        """Tokens at the end of the history, the newest included, that are held for later queries; None for all."""
        self.fused = fused
        self.is_sliding = window is not None
        self.record_past = False
        self.table: History | None = None
        self.is_initialized = False
        # Grows for the life of the layer, so that a handle from before a change is never mistaken for a valid one.
        self.version = 0

    def __repr__(self) -> str:
        window = f", window={self.window}" if self.window is not None else ""
        return f"BlockLayer({self.get_seq_length()} tokens, block_size={self.block_size}{window})"

    # ------------------------------------------------------------------------------------------ transformers' contract

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Fix heads, widths, dtype and device from a sample of the states."""
        self.restore(self.new_table(key_states, value_states))

    def new_table(self, key_states: Tensor, value_states: Tensor) -> History:
        """An empty history for states like these samples ``[rows, heads, any, width]``."""
        return BlockTable(BlockPool(key_states, value_states, self.block_size), key_states.shape[0])

    def update(
        self,
        key_states: Float[Tensor, "rows key_heads tokens key_width"],
        value_states: Float[Tensor, "rows value_heads tokens value_width"],
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Store the states of new tokens and return the keys and values their queries attend to.

        A history of one row becomes the common, shared past of every row when more rows arrive. Gradients do not flow
        into what is stored: caches are for inference.

        Returns:
            Keys and values ``[rows, heads, visible tokens, width]``: handles, valid until this layer changes; the
            states themselves at the first update of a fused layer; real tensors if not fused.

        Raises:
            InputError: Rows, heads, width, dtype or device differ from the history; nothing is stored.
        """
        self.check_states(key_states, value_states)
        given = (key_states, value_states)
        key_states, value_states = key_states.detach(), value_states.detach()
        if self.table is None or (self.table.tokens == 0 and self.table.rows != key_states.shape[0]):
            self.lazy_initialization(key_states, value_states)
        table = self._table()
        if table.rows != key_states.shape[0]:
            table.select([0] * key_states.shape[0])
        if table.tokens == 0:
            self._store_first(key_states, value_states)
            self.version += 1
            return self._read_first(*given)
        first_token = self._first_visible(table.tokens)
        if not self.record_past:
            table.drop_before(self._first_needed(table.tokens))
        table.append(key_states, value_states)
        self.version += 1
        if not self.fused:
            return self.materialize(first_token)
        shapes = [
            (*states.shape[:2], table.tokens - first_token, states.shape[3]) for states in (key_states, value_states)
        ]
        return (
            Handle(self, 0, first_token, 1, shapes[0], key_states),
            Handle(self, 1, first_token, 1, shapes[1], value_states),
        )

    def get_seq_length(self) -> int:
        """Tokens seen, whether or not a window has dropped some of them."""
        return 0 if self.table is None else self.table.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible tokens, position of the first) once `query_length` more tokens are stored.

        Raises:
            InputError: No new tokens for a history that is not empty, which is what `generate` asks for when it gets
                only new token ids without a mask that covers the history.
        """
        seen = self.get_seq_length()
        if query_length == 0 and seen:
            raise InputError(
                f"no new tokens for a cache that holds {seen}: `generate` takes ids without an attention mask for the "
                "whole text and cuts off what is cached. If they are the whole text, call `cache.align(input_ids)` "
                "first; if they only continue it, pass `model.generate(**cache.continuation(new_ids), ...)`"
            )
        first_token = self._first_visible(seen)
        return seen - first_token + query_length, first_token

    def get_max_length(self) -> int:
        """The window, or -1 for an unbounded history."""
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.table = None
        self.is_initialized = False
        self.version += 1

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the window until the next `crop`, so that it can take steps back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; with a window, also release what no query can see any more.

        Raises:
            InputError: A positive number, or more tokens than the history has.
            StateError: Tokens that the shorter history must see have left the window already; nothing changes.
        """
        self.check_crop(tokens_to_remove)
        if self.table is None or self.table.tokens == 0:
            return
        tokens = self.table.tokens + tokens_to_remove
        if tokens_to_remove:
            self.table.truncate(tokens)
        self.table.drop_before(self._first_needed(tokens))
        self.version += 1

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise, and change nothing."""
        if tokens_to_remove > 0:
            raise InputError(f"crop takes the negative number of tokens to remove, got {tokens_to_remove}")
        if self.table is None or self.table.tokens == 0 or tokens_to_remove == 0:
            return
        held, seen = self.table.first_token, self.table.tokens
        if seen + tokens_to_remove < 0:
            raise InputError(f"cannot remove {-tokens_to_remove} tokens from a cache that holds {seen}")
        needed = self._first_needed(seen + tokens_to_remove)
        if needed < held:
            raise StateError(
                f"removing {-tokens_to_remove} of {seen} tokens needs history from token {needed} on, but what lies "
                f"before {held} has left the window of {self.reach}. Call `cache.activate_past_recording()` before "
                "the tokens are stored, or start again with `cache.reset()`"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of old row ``beam_idx[i]``; sealed blocks are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to each other; sealed blocks are shared, not copied."""
        if self.table is not None:
            self._select([row for row in range(self.table.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in that order; they may repeat. Boolean masks are taken as such.

        Raises:
            InputError: A row that does not exist.
        """
        if self.table is not None:
            if indices.dtype == torch.bool:
                indices = indices.nonzero()[:, 0]
            self._select(indices.tolist())

    # --------------------------------------------------------------------------------------------------- reading

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first update."""
        return -1 if self.table is None else self.table.rows

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the keys held, ``[rows, heads, tokens, width]``; None before the first update."""
        return None if self.table is None else self.materialize(self.table.first_token)[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the values held, ``[rows, heads, tokens, width]``; None before the first update."""
        return None if self.table is None else self.materialize(self.table.first_token)[1]

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of the keys and values from position `first_token` on."""
        return materialize(self._block_table(), first_token)

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
        first_token: int,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention of `query` over the history from position `first_token` on; see `hf_kvcache.attention.attend`."""
        return attend(self._block_table(), first_token, query, mask, scale)

    def attend_given(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],  # noqa: ARG002
        states: tuple[Tensor, Tensor],  # noqa: ARG002
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,  # noqa: ARG002
        scale: float,  # noqa: ARG002
    ) -> Float[Tensor, "rows query_heads queries value_width"] | None:
        """Attention of a first chunk over its own keys and values; None where torch's own gives the right result."""
        return None

    def check_whole(self) -> None:
        """Raise StateError if some query must not see all that a mask over the whole history lets it see."""

    def observe(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> None:
        """Called with the queries that are about to attend to this layer, those of the tokens stored last.

        Args:
            query: The queries.
            mask: As for `attend`; None where each query sees all tokens up to its own.
            scale: Factor on the scores.
        """

    def restore(self, table: History) -> None:
        """Take over a history that was stored."""
        self.table = table
        self.dtype, self.device = table.raw_pool.samples[0].dtype, table.raw_pool.device
        self.is_initialized = True
        self.version += 1

    @property
    def exactness(self) -> Exactness:
        """What this layer claims about its results."""
        if self.fused:
            return Exactness("rounding", "blocks are read in place: the same sums, added in another order")
        return BITWISE

    def describe(self) -> str:
        """What the layer is and holds, in one line."""
        text = f"{self._attention()}, {self.storage()}"
        if self.table is None:
            return f"{text}, empty"
        usage, table = self.table.usage(), self.table
        size = (usage.payload_bytes + usage.scale_bytes + usage.unused_bytes) / 2**20
        held = f"{table.rows} rows x {table.tokens} tokens ({table.tokens_held} held)"
        return f"{text}, {held}, {size:.2f} MiB for {str(self.dtype).removeprefix('torch.')}"

    def _attention(self) -> str:
        return "full attention" if self.window is None else f"attention window of {self.window}"

    def storage(self) -> str:
        """How its tokens are kept, in words."""
        return f"blocks of {self.block_size} tokens"

    def check_integrity(self) -> None:
        """Raise StateError unless the blocks of this layer are consistent."""
        if self.table is not None:
            self.table.check_integrity()

    # -------------------------------------------------------------------------------------------------- internals

    def _table(self) -> History:
        if self.table is None:
            raise StateError("the layer has no history yet; call `update` first")
        return self.table

    def _block_table(self) -> BlockTable:
        table = self._table()
        if not isinstance(table, BlockTable):
            raise StateError(f"a paged layer cannot read a {type(table).__name__}")
        return table

    def _first_visible(self, seen: int) -> int:
        """Position of the first token that the query after `seen` tokens can see."""
        return 0 if self.window is None else max(0, seen - self.window + 1)

    def _first_needed(self, seen: int) -> int:
        """Position of the first token held for the query after `seen` tokens, sinks aside."""
        return 0 if self.reach is None else max(0, seen - self.reach + 1)

    def _store_first(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store a first chunk; of one longer than the window only the blocks that later queries can see."""
        table, skipped = self._table(), 0
        if not self.record_past:
            skipped = self._first_needed(key_states.shape[2]) // self.block_size
            table.skip(skipped)
        table.append(key_states[:, :, skipped * self.block_size :], value_states[:, :, skipped * self.block_size :])

    def _read_first(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """What the queries of a first chunk attend to: the states themselves, or handles on them."""
        if self.fused and not self.watches_first_chunk:
            return key_states, value_states
        keys, values = key_states.contiguous(), value_states.contiguous()
        if not self.watches_first_chunk:
            return keys, values
        if keys.is_meta:  # only bytes are asked for, and no query is going to come
            self.observe(keys, None, 1.0)
        return (
            Handle(self, 0, 0, 1, keys.shape, keys, keys),
            Handle(self, 1, 0, 1, values.shape, values, values),
        )

    def _select(self, rows: list[int]) -> None:
        table = self._table()
        if not rows or any(not 0 <= row < table.rows for row in rows):
            raise InputError(f"rows {rows} cannot be selected from a cache of {table.rows} rows")
        table.select(rows)
        self.version += 1

    def check_states(self, keys: Tensor, values: Tensor) -> None:
        """Raise InputError unless keys and values ``[rows, heads, tokens, width]`` fit the history."""
        rows, _, tokens, _ = keys.shape if keys.ndim == 4 else (0, 0, 0, 0)
        if keys.ndim != 4 or values.ndim != 4 or values.shape[0] != rows or values.shape[2] != tokens:
            raise InputError(
                "keys and values must be [rows, heads, tokens, width] with equal rows and tokens, got "
                f"{list(keys.shape)} and {list(values.shape)}"
            )
        if self.table is None:
            return
        samples = self.table.raw_pool.samples
        for name, states, arena in zip(("keys", "values"), (keys, values), samples, strict=True):
            if (
                states.shape[1] != arena.shape[0]
                or states.shape[3] != arena.shape[2]
                or states.dtype != arena.dtype
                or states.device != arena.device
            ):
                raise InputError(
                    f"the cache holds {name} of {_describe(arena, 0)}, but {_describe(states, 1)} came: a cache serves "
                    "one model in one dtype on one device. Use a new cache, or `cache.reset()` to start again"
                )
        if self.table.tokens and self.table.rows not in (rows, 1):
            raise InputError(
                f"the cache holds {self.table.rows} rows, but {rows} came. Bring it to the new batch with "
                "`cache.batch_repeat_interleave` or `cache.batch_select_indices`, or start again with `cache.reset()`"
            )


def layer_tensors(layer: object) -> Iterator[Tensor]:
    """The tensors that one of transformers' own cache layers holds, each storage once."""
    # Storages are told apart by identity, which holds as long as they are kept: meta tensors have no address.
    storages: set[torch.UntypedStorage] = set()
    for attribute in vars(layer).values():
        for tensor in attribute.values() if isinstance(attribute, dict) else (attribute,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in storages:
                storages.add(tensor.untyped_storage())
                yield tensor


def _describe(states: Tensor, head_axis: int) -> str:
    return f"{states.shape[head_axis]} heads x {states.shape[-1]} in {states.dtype} on {states.device}"
