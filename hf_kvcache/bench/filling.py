"""Give a cache a long history without minutes of prefill: random states of the right shape, straight to `update`.

The time of a step depends on how much is stored and how, not on the values, so states drawn at random serve as
well as true ones. One query then reads each layer, as the last token of a prompt does: caches that drop tokens do so
once they have seen a query. This works where every layer's history is keys and values that the model hands to `update`
once (see `observe_states`). Where a layer keeps anything else, the history comes from a prefill in chunks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.protocols import forward

CHUNK_TOKENS = 512
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)


class LayerStates(NamedTuple):
    """The keys and values of one layer.

    Attributes:
        key_heads: Heads of the keys.
        key_width: Numbers in one key.
        value_heads: Heads of the values.
        value_width: Numbers in one value.
        dtype: Of both.
    """

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in this layer."""
        numbers = self.key_heads * self.key_width + self.value_heads * self.value_width
        return numbers * self.dtype.itemsize


class States(NamedTuple):
    """What a model stores for each token.

    Attributes:
        layers: Those that keep keys and values.
        plain: Whether those are all layers, so that random states can stand in for a prefill.
    """

    layers: tuple[LayerStates, ...]
    plain: bool


def observe_states(model: PreTrainedModel) -> States:
    """Feed one token through `model` with transformers' dynamic cache, and look at what that holds.

    Raises:
        InputError: No layer keeps keys and values, so there is nothing to measure.
    """
    cache = DynamicCache(config=model.config)
    forward(model, torch.zeros(1, 1, dtype=torch.long, device=model.device), cache, keep=1)
    kept = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    if not kept:
        raise InputError(f"{type(model).__name__} stored no keys and values in its cache; there is nothing to measure")
    plain = len(kept) == len(cache.layers) and all(type(of) in _PLAIN for of in kept)
    return States(tuple(map(_states, kept)), plain)


def _states(layer: Any) -> LayerStates:
    keys, values = layer.keys, layer.values
    return LayerStates(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype)


@torch.inference_mode()
def fill(model: PreTrainedModel, cache: Cache, states: States, tokens: int, rows: int, seed: int) -> None:
    """Give the empty `cache` a history of `tokens` tokens; all `rows` hold the same, as beams of one prompt do.

    One `seed` gives the same history to every cache.
    """
    generator = torch.Generator().manual_seed(seed)
    if not states.plain:
        ids = torch.randint(model.config.get_text_config().vocab_size, (1, tokens), generator=generator)
        ids = ids.repeat(rows, 1).to(model.device)
        for start in range(0, tokens, CHUNK_TOKENS):
            forward(model, ids[:, start : start + CHUNK_TOKENS], cache, keep=1)
        return
    for index, layer in enumerate(states.layers):
        keys, values, query = (
            torch.randn(1, *shape, generator=generator).to(model.device, layer.dtype).repeat(rows, 1, 1, 1)
            for shape in (
                (layer.key_heads, tokens, layer.key_width),
                (layer.value_heads, tokens, layer.value_width),
                (_query_heads(model, layer), 1, layer.key_width),
            )
        )
        history = cache.update(keys, values, index)
        if layer.key_heads == layer.value_heads:
            scaled_dot_product_attention(query, *history, enable_gqa=True)


def _query_heads(model: PreTrainedModel, layer: LayerStates) -> int:
    """Those of the model, where they share the heads of the keys evenly."""
    heads = int(getattr(model.config.get_text_config(decoder=True), "num_attention_heads", layer.key_heads))
    return heads if heads % layer.key_heads == 0 else layer.key_heads
