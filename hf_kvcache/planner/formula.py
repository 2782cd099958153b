"""The same bytes from the numbers in the config alone: a check that shares no code with models or caches.

Per token and attention layer: ``(K heads x K width + V heads x V width) x bytes per value``. Which heads, which width
and which layers store anything is what calculators get wrong; it is all in `layer_fields`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..errors import ConfigError

_TABLE_ENTRY_BYTES = 8
_SLACK_SHARE = 64
"""A pool that must grow gets room for one block in 64 more, at least one, in equal parts behind every row."""


class LayerFields(NamedTuple):
    """One decoder layer, from the config."""

    keys: int
    """Values per token on the key side: heads x width; 0 in a layer that stores no tokens."""
    values: int
    window: int | None = None
    state_bytes: int = 0
    """Bytes per row that do not grow with the text (recurrent and convolution states)."""


def layer_fields(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[LayerFields, ...]:
    """What each decoder layer stores, for the families whose config fields are known here.

    Raises:
        ConfigError: A layer type that is not known here.
    """
    decoder: Any = config.get_text_config(decoder=True)
    layers = decoder.per_layer_config
    types = _layer_types(decoder, len(layers))
    stored = len(types) - (getattr(decoder, "num_kv_shared_layers", 0) or 0)
    return tuple(
        _fields(layer, kind, dtype) if index < stored else LayerFields(0, 0)
        for index, (layer, kind) in enumerate(zip(layers, types, strict=True))
    )


def paged_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int, rows: int = 1, block_size: int = 64) -> int:
    """Bytes of `PagedCache` after one prefill of `tokens` tokens in each of `rows` different rows."""
    return sum(
        _paged_layer(layer, dtype, tokens, rows, block_size) + rows * layer.state_bytes
        for layer in layer_fields(config, dtype)
    )


def dynamic_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int, rows: int = 1) -> int:
    """Bytes of transformers' `DynamicCache` after a decoded token has made the text `tokens` long.

    A layer with window w keeps a view of w - 1 tokens, but the memory of w; and an 8-byte integer.
    """
    total = 0
    for layer in layer_fields(config, dtype):
        held = tokens if layer.window is None else min(layer.window, tokens)
        total += rows * (held * (layer.keys + layer.values) * dtype.itemsize + layer.state_bytes)
        total += 8 if layer.window is not None and layer.keys else 0
    return total


def visible_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int, rows: int = 1) -> int:
    """Bytes of what a later query can see: no room, no pages, no tables. No exact cache can hold less.

    A layer with window w sees the w - 1 last tokens besides the new one.
    """
    total = 0
    for layer in layer_fields(config, dtype):
        seen = tokens if layer.window is None else min(layer.window - 1, tokens)
        total += rows * (seen * (layer.keys + layer.values) * dtype.itemsize + layer.state_bytes)
    return total


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that one more token adds to a text longer than every window: layers of full attention only."""
    return sum((f.keys + f.values) * dtype.itemsize for f in layer_fields(config, dtype) if f.window is None)


def expanded_values(config: PreTrainedConfig) -> int:
    """Values per token and layer if latent attention (MLA) kept a key and a value for every head, as MHA does.

    Without the rotary part, which the latent design adds: 128 x (128 + 128) = 32,768 for DeepSeek-V3.
    """
    c: Any = config.get_text_config(decoder=True)
    return int(c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))


def _paged_layer(layer: LayerFields, dtype: torch.dtype, tokens: int, rows: int, block_size: int) -> int:
    if not layer.keys:
        return 0
    # Whole blocks that no later query can see are not stored.
    skipped = 0 if layer.window is None else max(0, tokens - layer.window + 1) // block_size
    sealed, open_tokens = divmod(tokens - skipped * block_size, block_size)
    used = rows * sealed
    # The sealed blocks come first, with room behind them; open blocks take that room, or the pool grows once more.
    capacity = used + _room(used, rows) if sealed else 0
    if open_tokens:
        used += rows
        if capacity < used:
            capacity = used + _room(used, rows)
    block_bytes = block_size * (layer.keys + layer.values) * dtype.itemsize
    return capacity * block_bytes + _TABLE_ENTRY_BYTES * (used + capacity)


def _room(blocks: int, rows: int) -> int:
    return max(1, blocks // _SLACK_SHARE) // rows * rows


def _layer_types(decoder: Any, layers: int) -> list[str]:
    types = getattr(decoder, "layer_types", None)
    if types is not None:
        return list(types)
    return ["full_attention" if getattr(decoder, "sliding_window", None) is None else "sliding_attention"] * layers


def _fields(c: Any, kind: str, dtype: torch.dtype) -> LayerFields:
    if kind == "linear_attention":
        return LayerFields(0, 0, None, _linear_state_bytes(c, dtype))
    windows = {
        "full_attention": None,
        "sliding_attention": getattr(c, "sliding_window", None),
        "chunked_attention": getattr(c, "attention_chunk_size", None),
    }
    if kind not in windows:
        raise ConfigError(f"layers of type {kind!r} have no closed formula here")
    if getattr(c, "kv_lora_rank", None):
        return LayerFields(c.kv_lora_rank, c.qk_rope_head_dim, windows[kind])
    heads, width = _heads_and_width(c)
    return LayerFields(heads * width, heads * width, windows[kind])


def _heads_and_width(c: Any) -> tuple[int, int]:
    query_heads = getattr(c, "decoder_attention_heads", None) or c.num_attention_heads
    heads = getattr(c, "num_key_value_heads", None) or query_heads
    width = getattr(c, "head_dim", None) or getattr(c, "d_kv", None) or c.hidden_size // query_heads
    return int(heads), int(width)


def _linear_state_bytes(c: Any, dtype: torch.dtype) -> int:
    """Gated delta rule: the last inputs of a convolution over q, k and v, and one float32 matrix per value head."""
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    matrix = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    return int((2 * keys + values) * c.linear_conv_kernel_dim * dtype.itemsize + matrix * torch.float32.itemsize)
