"""The cache a user passes to `generate`: transformers' `Cache`, built from a model config."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from .blocks import Usage
from .errors import ConfigError, InputError, StateError
from .exactness import Exactness, loosest
from .layer import BlockLayer, layer_tensors
from .positions import PositionGuard
from .quantized import Quantization
from .residency import Placement, Residency, Traffic
from .residency.placement import lower_bytes
from .retention import Quest, Retention
from .tokens import TokenRecord

_BLOCK_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class Memory(NamedTuple):
    """Bytes a cache holds."""

    payload_bytes: int
    """Keys and values of tokens, or their codes."""
    scale_bytes: int
    """What codes need to be read: scales, means, and what a codec learned. 0 where nothing is encoded."""
    unused_bytes: int
    """Room in blocks that holds no token: unfilled ends and free blocks."""
    table_bytes: int
    """Block tables and reference counts."""
    other_bytes: int
    """States of layers that transformers' own classes keep (recurrent, convolution, indexed)."""
    buffer_bytes: int
    """Read buffers: copies of what lies in a lower tier. 0 where everything is on its device."""
    device_bytes: dict[str, int]
    """Bytes by device, tables aside; what lies in lower tiers as "host" and "disk"."""
    tokens_seen: int
    """Length of the history."""
    tokens_held: int
    """The most tokens any layer still holds."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        kinds = (self.payload_bytes, self.scale_bytes, self.unused_bytes, self.table_bytes)
        return sum(kinds) + self.other_bytes + self.buffer_bytes


class KVCache(DynamicCache):
    """A cache whose attention layers keep their history in blocks.

    Full, sliding and chunked attention layers are ours (`BlockLayer`). Linear-attention, convolution, hybrid, indexed
    and KV-shared layers keep transformers' own classes. It is a `DynamicCache` so that everything transformers does
    for its default cache (encoder-decoder crops and batch operations among it) holds for this one too.

    Args:
        config: The model's config.
        block_size: Tokens per block.
        fused: Attend over the blocks where they lie. False returns real tensors to the model: bitwise the results of
            transformers' dynamic cache, and its copy of the history for every token.
        quantization: How full-attention layers encode what has left their recent window; None keeps it as it is.
        retention: Which tokens full-attention layers drop or leave unread; None keeps and reads all.
        residency: How much stays on the device and where the rest goes; None keeps everything there.

    Raises:
        ConfigError: A block size below 1, a layer type that transformers does not know either, or choices that do not
            combine.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import KVCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = KVCache(model.config, block_size=16)
        >>> output = model(torch.arange(20)[None], past_key_values=cache)
        >>> cache.get_seq_length(), cache.memory().tokens_held
        (20, 20)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        block_size: int = 64,
        fused: bool = True,
        quantization: Quantization | None = None,
        retention: Retention | None = None,
        residency: Residency | None = None,
    ) -> None:
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        Cache.__init__(self, layers=_build_layers(config, block_size, fused, quantization, retention))
        self.block_size = block_size
        self.fused = fused
        self.quantization = quantization
        self.retention = retention
        self.residency = residency
        self._placement = None if residency is None else self._place(residency)
        self.block_layers = [layer for layer in self.layers if isinstance(layer, BlockLayer)]
        """The layers whose history is in blocks."""
        self._positions = PositionGuard()
        self._tokens = TokenRecord()

    # ------------------------------------------------------------------------------------------ transformers' contract

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new states ``[rows, heads, tokens, width]`` and return what its queries attend to.

        See `BlockLayer.update` for what is returned and how long it is valid.

        Raises:
            InputError: The states do not fit the history, or their positions do not continue it (where transformers
                passes positions); nothing is stored.
            ConfigError: Not even one block is within the budget of the device; nothing is stored.
            StorageError: A lower tier cannot take what has become full. This layer has its tokens, later ones do not.
            StateError: An earlier forward pass stopped half way through the layers.
        """
        if layer_idx >= len(self.layers):
            raise InputError(
                f"layer {layer_idx} does not exist in a cache of {len(self.layers)} layers, built for another model"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, BlockLayer):
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return states
        if layer is self.block_layers[0]:
            self._begin_forward(key_states, kwargs)
        if self._placement is not None and layer.get_seq_length() == 0:
            self._placement.admit(layer, (key_states, value_states))
        try:
            attended = layer.update(key_states, value_states, *args, **kwargs)
        except InputError as error:
            raise InputError(f"layer {layer_idx}: {error}") from None
        if self._placement is not None:
            self._placement.settle(self.layers, layer_idx)
        return attended

    def _begin_forward(self, key_states: Tensor, kwargs: dict[str, Any]) -> None:
        seen, last_seen = self.block_layers[0].get_seq_length(), self.block_layers[-1].get_seq_length()
        if seen != last_seen and self._is_encoder_decoder:
            raise InputError(
                "this model is an encoder-decoder, whose cache has two halves: pass "
                "`EncoderDecoderCache(cache, DynamicCache(config=model.config))`, as `generate` does by itself"
            )
        if seen != last_seen:
            raise StateError(
                f"an earlier forward pass stopped half way: the first layer holds {seen} tokens, the last {last_seen}. "
                "Take it back with `cache.recover()`, or start again with `cache.reset()`"
            )
        positions = (kwargs.get("kwargs") or {}).get("position_ids")
        self._positions.check(positions, key_states.shape[2], seen)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens from every layer, or raise and change none of ours.

        See `BlockLayer.crop`.
        """
        for block_layer in self.block_layers:
            block_layer.check_crop(tokens_to_remove)
        # transformers' own layers may still refuse; they go first, so that ours are not left shorter than theirs.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, BlockLayer)):
            layer.crop(tokens_to_remove)  # type: ignore[union-attr]
        self._positions.crop(-tokens_to_remove)
        self._tokens.truncate(self.get_seq_length())

    def recover(self) -> int:
        """Take back a forward pass that stopped half way, for example because memory ran out.

        Every layer is cut to the tokens that all layers hold: those before that pass, and perhaps some of its first.

        Returns:
            Tokens held.

        Raises:
            StateError: A layer cannot be taken back: a window has left the tokens behind, or it is recurrent.
        """
        self._require_croppable()
        held = min((layer.get_seq_length() for layer in self.block_layers), default=0)
        for layer in self.block_layers:
            layer.check_crop(held - layer.get_seq_length())
        for layer in self.block_layers:
            layer.crop(held - layer.get_seq_length())
        self._positions.reset()  # they may be those of the pass that was taken back
        self._tokens.truncate(held)
        return held

    def keep_within(self, device_budget: str | int, residency: str) -> None:
        """Keep this history within a budget from now on; what is beyond goes to a lower tier at once.

        Args:
            device_budget: See `OffloadedCache`.
            residency: See `OffloadedCache`.

        Raises:
            ConfigError: Neither a size nor a place, or a cache whose history cannot go down.
            StateError: It is kept within a budget already.
            StorageError: The tier cannot take it. What went down is there, the rest stays.
        """
        if self._placement is not None:
            raise StateError(f"this history is kept within {self.residency} already")
        within = Residency(device_budget, residency)
        self._placement = self._place(within)
        self.residency = within
        for index in range(len(self.layers)):
            self._placement.settle(self.layers, index)

    def _place(self, residency: Residency) -> Placement:
        if isinstance(self.retention, Quest):
            raise ConfigError(
                "a cache that chooses which blocks to read (quest) keeps all of them on the device, and whole layers "
                "go down: leave out one of the two"
            )
        return Placement(residency)

    def reset(self) -> None:
        """Forget the history and give its memory back. The cache can be used again, for any batch."""
        super().reset()  # type: ignore[no-untyped-call]
        if self._placement is not None:
            self._placement.reset()
        self._positions.reset()
        self._tokens.reset()

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Make row i a copy of old row ``beam_idx[i]`` in every layer; blocks are shared, not copied."""
        rows = beam_idx.cpu()
        for layer in self.layers:
            if isinstance(layer, BlockLayer):
                layer.batch_select_indices(rows)
            else:
                layer.reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select_records(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to each other; blocks are shared, not copied."""
        if repeats < 1:
            raise InputError(f"rows can be repeated once or more, got {repeats}")
        rows = self.batch_size
        super().batch_repeat_interleave(repeats)
        if rows > 0:
            self._select_records(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` in every layer, in that order; they may repeat."""
        super().batch_select_indices(indices)
        self._select_records(indices.cpu().nonzero()[:, 0] if indices.dtype == torch.bool else indices.cpu())

    def _select_records(self, rows: Tensor) -> None:
        self._positions.select(rows)
        self._tokens.select(rows)

    # ------------------------------------------------------------------------------------------- which text is cached

    def remember(self, token_ids: Int[Tensor, "rows tokens"]) -> None:
        """Tell the cache which text it holds, for example the sequences that `generate` returned.

        A cache sees keys and values, never token ids. With the ids known, `align` keeps what a new prompt shares.

        Args:
            token_ids: The text from its first token on; what goes beyond the history is ignored.

        Raises:
            InputError: Not one row of ids per row held.
        """
        self._tokens.remember(token_ids, self.batch_size, self.get_seq_length())

    def align(self, input_ids: Int[Tensor, "rows tokens"]) -> int:
        """Make the history a prefix of the prompt `input_ids`, so that `generate` may be called with all its ids.

        Keeps the longest history that is known (see `remember`) to be the beginning of every row, and removes the
        rest. The prompt's last token is always left to be computed: its logits are needed. Where the history cannot
        be shortened (tokens that left a window, recurrent states) everything is removed. The cache takes note that
        it is going to hold `input_ids`.

        Returns:
            Tokens kept.

        Example:
            >>> import torch
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from hf_kvcache import PagedCache
            >>> model = LlamaForCausalLM(LlamaConfig(
            ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
            >>> cache, prompt = PagedCache(model.config), torch.arange(20)[None]
            >>> cache.align(prompt)
            0
            >>> _ = model(prompt, past_key_values=cache)
            >>> cache.align(prompt[:, :15])
            14
        """
        if self._tokens.rows not in (0, 1, input_ids.shape[0]):
            raise InputError(f"the cache holds {self._tokens.rows} rows, the prompt has {input_ids.shape[0]}")
        seen = self.get_seq_length()
        kept = min(self._tokens.common_prefix(input_ids), input_ids.shape[1] - 1, seen)
        if kept < seen:
            try:
                self._require_croppable()
                self.crop(kept - seen)
            except StateError:
                kept = 0
                self.reset()
        self._tokens.expect(input_ids)
        return kept

    def continuation(
        self, new_ids: Int[Tensor, "rows tokens"], attention_mask: Int[Tensor, "rows history"] | None = None
    ) -> dict[str, Tensor]:
        """Arguments for `generate` when only the ids that follow the history are at hand.

        Args:
            new_ids: The new token ids.
            attention_mask: The mask of the history, where it holds padding. Default: no padding.

        Returns:
            ``input_ids`` and an ``attention_mask`` over history and new ids.

        Raises:
            InputError: The mask does not have one entry per row and token of the history.
        """
        rows, seen = new_ids.shape[0], self.get_seq_length()
        if attention_mask is None:
            attention_mask = new_ids.new_ones(rows, seen)
        if attention_mask.shape != (rows, seen):
            raise InputError(
                f"the history is {rows} rows x {seen} tokens, its attention mask {list(attention_mask.shape)}; "
                "pass the mask of the history alone"
            )
        return {
            "input_ids": new_ids,
            "attention_mask": torch.cat([attention_mask, torch.ones_like(new_ids)], dim=1),
        }

    def carry(self, token_ids: Tensor | None, positions: Tensor | None) -> None:
        """Take over what another cache of the same history knew: ids, and the last position of each row."""
        self._positions.last = positions
        if token_ids is not None:
            self._tokens.expect(token_ids)

    @property
    def last_positions(self) -> Tensor | None:
        """The last position id of each row, ``[rows or 1]``, where the model told."""
        return self._positions.last

    @property
    def token_ids(self) -> Tensor | None:
        """The token ids known of the history (see `remember`), ``[rows or 1, tokens]`` on the CPU; None if unknown."""
        return self._tokens.known(self.get_seq_length())

    def _require_croppable(self) -> None:
        if not self.is_croppable:
            raise StateError("a layer of this model (recurrent states) cannot be taken back to an earlier token")

    # --------------------------------------------------------------------------------------------------- telling

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first update."""
        return next((layer.batch_size for layer in self.block_layers), super().batch_size)

    @property
    def exactness(self) -> Exactness:
        """What this cache claims about its results: the loosest claim of its layers."""
        return loosest(layer.exactness for layer in self.block_layers)

    def memory(self) -> Memory:
        """Bytes held now, by kind and by device."""
        usage, held, other = Usage(0, 0, 0, 0), 0, 0
        devices: dict[str, int] = {}
        for block_layer in self.block_layers:
            history = block_layer.table
            if history is None:
                continue
            of_layer = history.usage()
            usage = Usage(*(total + part for total, part in zip(usage, of_layer, strict=True)))
            held = max(held, history.tokens_held)
            below = lower_bytes(block_layer)
            device = str(block_layer.device)
            devices[device] = devices.get(device, 0) + sum(of_layer) - of_layer.table_bytes - sum(below.values())
            for place, size in below.items():
                devices[place] = devices.get(place, 0) + size
        buffers = {} if self._placement is None else self._placement.buffer_bytes
        for owner, size in buffers.items():
            devices[str(owner)] = devices.get(str(owner), 0) + size
        for layer in self.layers:
            if isinstance(layer, BlockLayer):
                continue
            for tensor in layer_tensors(layer):
                size = tensor.untyped_storage().nbytes()
                other += size
                devices[str(tensor.device)] = devices.get(str(tensor.device), 0) + size
        blocks_seen = max((layer.get_seq_length() for layer in self.block_layers), default=0)
        return Memory(*usage, other, sum(buffers.values()), devices, blocks_seen, held)

    @property
    def traffic(self) -> Traffic:
        """Bytes that went to lower tiers and came from there, since the cache was made."""
        return Traffic(0, 0) if self._placement is None else self._placement.traffic

    def describe(self) -> str:
        """One readable line per group of equal layers."""
        lines = []
        for text, group in groupby(enumerate(self.layers), key=lambda item: _describe_layer(item[1])):
            numbers = [index for index, _ in group]
            span = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
            lines.append(f"{span}: {text}")
        return "\n".join(lines)

    def check_integrity(self) -> None:
        """Raise StateError unless every layer's blocks are consistent and all layers agree on the length."""
        lengths = {layer.get_seq_length() for layer in self.block_layers}
        if len(lengths) > 1:
            raise StateError(f"layers hold different numbers of tokens: {sorted(lengths)}")
        for layer in self.block_layers:
            layer.check_integrity()

    # ---------------------------------------------------------------------------------------------- save and load

    def save(self, path: str | os.PathLike[str], model: PreTrainedModel) -> None:
        """Write the history to a safetensors file, marked with the fingerprint of `model`.

        Raises:
            StateError: Nothing to save, or a layer whose states cannot be stored.
            StorageError: The file cannot be written.
        """
        from .storage import save_cache

        save_cache(self, path, model)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: PreTrainedModel) -> KVCache:
        """A cache of this class with the history that `save` wrote for this very model.

        Raises:
            StorageError: The file is missing, truncated, altered, of a newer format or of another model.
        """
        from .storage import load_cache

        cache: KVCache = load_cache(cls, path, model)
        return cache


def _build_layers(
    config: PreTrainedConfig,
    block_size: int,
    fused: bool,
    quantization: Quantization | None,
    retention: Retention | None,
) -> list[Any]:
    decoder = config.get_text_config(decoder=True)
    layer_types, layer_arguments = get_layer_types_and_kwargs(decoder)
    if quantization is not None:
        quantization.check_layers(len(layer_types))
    layers: list[Any] = []
    for index, (layer_type, arguments) in enumerate(zip(layer_types, layer_arguments, strict=True)):
        if layer_type == "full_attention":
            kept = (
                BlockLayer(block_size, fused=fused) if quantization is None else quantization.layer(index, block_size)
            )
            layers.append(kept if retention is None else retention.layer(decoder, index, kept))
        elif layer_type in _BLOCK_LAYER_TYPES:
            layers.append(BlockLayer(block_size, window=arguments.get("sliding_window"), fused=fused))
        elif layer_type in DYNAMIC_LAYER_TYPE_MAPPING:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**arguments))
        else:
            known = ", ".join(sorted(DYNAMIC_LAYER_TYPE_MAPPING))
            raise ConfigError(
                f"layer {index} is of type {layer_type!r}, which this transformers has no cache for; known: {known}"
            )
    return layers


def _describe_layer(layer: object) -> str:
    if not isinstance(layer, BlockLayer):
        return f"{type(layer).__name__}, kept by transformers"
    below = (f", {size / 2**20:.2f} MiB of it on {place}" for place, size in lower_bytes(layer).items())
    return layer.describe() + "".join(below)
