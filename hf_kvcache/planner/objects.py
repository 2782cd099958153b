"""Bytes of a cache, asked of its own layer objects: they are fed meta tensors, and count what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from ..cache import KVCache
from ..errors import ConfigError
from ..evaluation.caches import resolve_cache
from ..layer import BlockLayer, layer_tensors
from ..units import positive
from .shapes import LayerShape, ModelShape

CROSS_ATTENTION = "cross-attention"


class LayerGroup(NamedTuple):
    """Equal layers of one cache."""

    kind: str
    """What they keep, in words."""
    layers: int
    layer_bytes: int
    """Bytes of one of them."""
    read_bytes: int
    """The same without unused room and tables: what a decode step reads. A window in blocks holds up to one more."""
    growing_bytes: int
    """Bytes of its larger tensor of the two that hold keys and values; 0 if it has none, or none that grows."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.layers * self.layer_bytes


def cache_groups(
    shape: ModelShape, spec: str, tokens: int, rows: int = 1, new_tokens: int = 0, encoder_tokens: int = 0
) -> tuple[LayerGroup, ...]:
    """What each kind of layer of the cache `spec` holds, after a prefill and some single tokens.

    Args:
        shape: The model.
        spec: A cache by name, as for the evaluation: ``paged:block_size=16``, ``dynamic``, ``static``.
        tokens: Tokens of the prefill, in every row.
        rows: Rows of the batch, all of them different texts.
        new_tokens: Tokens decoded after that, one at a time.
        encoder_tokens: Length of the encoder's text, for encoder-decoder models.

    Raises:
        SpecError: No such cache.
        ConfigError: The cache cannot be built for this model, or not on the meta device.
    """
    positive(tokens, "a number of tokens")
    positive(rows, "a batch size")
    build = resolve_cache(spec, tokens + new_tokens)
    cache = _build(build, shape.decoder, spec)
    kinds: dict[tuple[str, str, LayerShape], list[int]] = {}
    for index, (layer, states) in enumerate(zip(cache.layers, shape.layers, strict=False)):
        # Layers that keep the same may do so in other ways, as in few bits or in a pyramid.
        storage = layer.storage() if isinstance(layer, BlockLayer) else ""
        kinds.setdefault((_kind(layer, states), storage, states), []).append(index)
    groups = []
    for (kind, _, states), indices in kinds.items():
        # One layer of each kind is fed, in a cache of its own: the others would say the same.
        cache = _build(build, shape.decoder, spec)
        layer = cache.layers[indices[0]]
        _feed(layer, states, tokens, new_tokens, rows, spec)
        held, read = _held_bytes(cache, layer)
        # A layer that can be compiled has all of its memory from the beginning.
        growing = 0 if layer.is_compileable else _larger(states, held)
        groups.append(LayerGroup(kind, len(indices), held, read, growing))
    if shape.cross_layers and encoder_tokens:
        cross = DynamicCache()
        states = shape.cross_layers[0]
        cross.update(*_key_values(states, rows, encoder_tokens), 0)
        groups.append(LayerGroup(CROSS_ATTENTION, len(shape.cross_layers), *_held_bytes(cross, cross.layers[0]), 0))
    return tuple(groups)


def cache_bytes(
    shape: ModelShape, spec: str, tokens: int, rows: int = 1, new_tokens: int = 0, encoder_tokens: int = 0
) -> int:
    """The sum over all layers; see `cache_groups`."""
    return sum(group.total_bytes for group in cache_groups(shape, spec, tokens, rows, new_tokens, encoder_tokens))


def _held_bytes(cache: Cache, layer: Any) -> tuple[int, int]:
    """Bytes of a cache in which only `layer` holds something: all, and those that a decode step reads."""
    if isinstance(cache, KVCache):
        memory = cache.memory()
        return memory.total_bytes, memory.total_bytes - memory.unused_bytes - memory.table_bytes
    held = sum(tensor.untyped_storage().nbytes() for tensor in layer_tensors(layer))
    return held, held


def _larger(states: LayerShape, layer_bytes: int) -> int:
    if states.keys is None or states.values is None:
        return 0
    key, value = states.keys.token_bytes, states.values.token_bytes
    return layer_bytes * max(key, value) // (key + value)


def _build(build: Callable[[PreTrainedConfig], Cache | None], config: PreTrainedConfig, spec: str) -> Cache:
    cache = build(config)
    if cache is None:
        raise ConfigError(f"{spec!r} is no cache: it holds nothing to plan")
    if isinstance(cache, KVCache) and cache.residency is not None:
        raise ConfigError(
            f"{spec!r} holds on the device what its budget says, and two layers' buffers; plan 'paged' for all bytes"
        )
    return cache


def _kind(layer: Any, states: LayerShape) -> str:
    parts = []
    if states.keys is not None and states.values is not None:
        window = getattr(layer, "reach", None) or getattr(layer, "sliding_window", None)
        parts.append(f"window of {window:,}" if window else "full attention")
        keys, values = (f"{state.heads} x {state.width}" for state in (states.keys, states.values))
        parts.append(keys if keys == values else f"keys {keys}, values {values}")
    if states.conv or states.recurrent:
        parts.append("recurrent state")
    return ", ".join(parts) or "nothing (another layer's keys and values)"


def _feed(layer: Any, states: LayerShape, tokens: int, new_tokens: int, rows: int, spec: str) -> None:
    try:
        for index, shape, dtype in states.conv:
            layer.update_conv_state(torch.empty(rows, *shape, dtype=dtype, device="meta"), state_idx=index)
        for index, shape, dtype in states.recurrent:
            layer.update_recurrent_state(torch.empty(rows, *shape, dtype=dtype, device="meta"), state_idx=index)
        if states.keys is not None:
            layer.update(*_key_values(states, rows, tokens))
            step = _key_values(states, rows, 1)
            for _ in range(new_tokens):
                layer.update(*step)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise ConfigError(f"the cache {spec!r} cannot be counted without real tensors: {error}") from error


def _key_values(states: LayerShape, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    if states.keys is None or states.values is None:
        raise ConfigError("this layer keeps no keys and values")
    keys, values = (
        torch.empty(rows, state.heads, tokens, state.width, dtype=state.dtype, device="meta")
        for state in (states.keys, states.values)
    )
    return keys, values
