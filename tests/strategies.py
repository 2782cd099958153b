"""The strategies every test of the library runs over. A new strategy joins all of them by one line here."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedConfig, PreTrainedModel

from hf_kvcache import (
    EvictingCache,
    KVCache,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    QuestCache,
    SlidingWindowCache,
)
from hf_kvcache.quantized import Quantization
from hf_kvcache.retention import Eviction

# transformers renamed the argument between 5.20 and 5.24.
RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "cache" if RENAMED else "past_key_values"

# The same releases tell a cache the positions of what it stores. Without them text at the wrong place goes unseen.
needs_positions = pytest.mark.skipif(not RENAMED, reason="this transformers does not tell caches the positions")


# A folder whose name a specification can hold; the files in it have no names.
SCRATCH = tempfile.gettempdir()


@dataclass(frozen=True)
class Strategy:
    """How to build a cache, by a specification and in code, and the exactness it must declare."""

    name: str
    spec: str
    build: Callable[[PreTrainedConfig], KVCache]
    exactness: str

    def __str__(self) -> str:
        return self.name

    def claim(self, cache: KVCache) -> str:
        """The exactness that `cache` must declare: a model without full attention has nothing to approximate."""
        full_attention = any(layer.window is None for layer in cache.block_layers)
        return self.exactness if full_attention or self.exactness == "bitwise" else "rounding"


STRATEGIES = [
    Strategy("paged-4", "paged:block_size=4", lambda config: PagedCache(config, block_size=4), "rounding"),
    Strategy("paged-16", "paged:block_size=16", lambda config: PagedCache(config, block_size=16), "rounding"),
    Strategy(
        "paged-4-unfused",
        "paged:block_size=4,fused=false",
        lambda config: PagedCache(config, block_size=4, fused=False),
        "bitwise",
    ),
    # No text of the matrix is longer than this window, so the result is the same.
    Strategy(
        "window-all",
        "window:window=64,sinks=3,block_size=4",
        lambda config: SlidingWindowCache(config, window=64, sinks=3, block_size=4),
        "approximate",
    ),
    Strategy(
        "quantized-exact",
        "quantized:codec=exact,sinks=4,recent=3,block_size=4",
        lambda config: QuantizedCache(config, codec="exact", sinks=4, recent=3, block_size=4),
        "rounding",
    ),
    Strategy(
        "evicting-all-kept",
        "evicting:policy=keydiff,budget=1.0,sinks=2,recent=3,block_size=4",
        lambda config: EvictingCache(config, policy="keydiff", budget=1.0, sinks=2, recent=3, block_size=4),
        "rounding",
    ),
    # What is not kept is encoded, here without loss.
    Strategy(
        "evicting-encoded-exact",
        "quantized:codec=exact,block_size=4+evicting:policy=keydiff,budget=0.5,sinks=2,recent=14",
        lambda config: KVCache(
            config,
            block_size=4,
            quantization=Quantization(4, 4, "exact"),
            retention=Eviction("keydiff", 0.5, sinks=2, recent=14),
        ),
        "rounding",
    ),
    Strategy(
        "quest-all-read",
        "quest:budget=1.0,block_size=4",
        lambda config: QuestCache(config, budget=1.0, block_size=4),
        "rounding",
    ),
    Strategy(
        "offloaded-4",
        f"offloaded:device_budget=2KiB,residency=disk:{SCRATCH},block_size=4",
        lambda config: OffloadedCache(config, device_budget="2KiB", residency=f"disk:{SCRATCH}", block_size=4),
        "rounding",
    ),
]


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=decoder_config(model))


def whole_cache(model: PreTrainedModel, cache: Cache) -> Cache:
    """What `generate` is given: the cache itself, or for an encoder-decoder model the pair it is the first half of."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, dynamic_cache(model))
    return cache
