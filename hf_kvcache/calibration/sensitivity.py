"""What it costs to encode the keys, or the values, of one layer: measured through the cache, all else exact.

Prices from one gradient (errors of single tokens, taken to be independent) were tried and dropped: they missed the
first layer's cost by a factor of thirty, because the errors of a block go the same way where attention averages them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..caches import QuantizedCache
from ..codecs import make_codecs
from ..quantized import QuantizedLayer
from .texts import Texts

_KINDS = ("keys", "values")
_BLOCK_TOKENS = 64


class Sensitivity(NamedTuple):
    """One way to store the keys, or the values, of one layer."""

    layer: int
    kind: str
    """"keys" or "values"."""
    bits: int
    """Nominal bits."""
    token_bits: float
    """Bits per token, over all heads, all in."""
    numbers: int
    """Numbers per token, over all heads."""
    kl: float
    """Divergence it causes alone, nats per predicted token."""


def passes(layers: int, levels: int) -> int:
    """Passes over the texts that `sensitivities` takes."""
    return len(_KINDS) * (layers + levels)


def sensitivities(
    texts: Texts, layers: Sequence[int], bits: int, levels: Iterable[int], sinks: int, recent: int
) -> list[Sensitivity]:
    """Price every level of bits for the keys and for the values of every layer.

    What `bits` cost in each layer is measured. How the cost changes with the bits is measured for all layers together,
    once for keys and once for values: layers differ in how much an error costs, not in how it falls with the bits.

    Args:
        texts: What to measure on.
        layers: All layers that such a cache encodes.
        bits: Nominal bits to measure in each layer, one of `levels`.
        levels: Nominal bits to price.
        sinks: Tokens at the beginning that stay exact.
        recent: Tokens at the end that stay exact.
    """

    def cost(kind: int, level: int, layer: int | None = None) -> float:
        named = ["exact", "exact"]
        named[kind] = make_codecs("auto", level, level)[0].name  # by its name: without protection
        codec = "/".join(named)
        everywhere, only = (codec, "") if layer is None else ("exact", f"{layer}:codec={codec}")
        return texts.divergence(
            lambda: QuantizedCache(texts.model.config, level, codec=everywhere, sinks=sinks, recent=recent, layers=only)
        )

    samples = _samples(texts, layers)
    found = []
    for kind, name in enumerate(_KINDS):
        curve = {level: cost(kind, level) for level in levels}
        for layer in layers:
            factor = cost(kind, bits, layer) / curve[bits]
            heads, _, width = samples[layer][kind].shape
            for level, of_all in curve.items():
                parts = make_codecs("auto", level, level)[kind].parts(width, _BLOCK_TOKENS, samples[layer][kind].dtype)
                block_bytes = sum(part.slots * part.width * part.dtype.itemsize for part in parts)
                size = 8 * heads * block_bytes / _BLOCK_TOKENS
                found.append(Sensitivity(layer, name, level, size, heads * width, factor * of_all))
    return found


def _samples(texts: Texts, layers: Sequence[int]) -> dict[int, list[Tensor]]:
    """Keys and values ``[heads, any, width]`` of each layer, from two tokens."""
    from ..evaluation.protocols import forward

    cache = QuantizedCache(texts.model.config)
    forward(texts.model, texts.windows[0][None, :2].to(texts.model.device), cache, keep=1)
    held = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
    return {index: of.table.raw_pool.samples for index, of in zip(layers, held, strict=True) if of.table}
