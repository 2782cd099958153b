"""What fits: memory needed at a context and a batch, and the largest of each by bisection.

*Ideal*: weights and cache alone against all of the card's memory. *Usable*: the share of the memory that is left beside
driver, allocator and fragments, against everything that exists at once at the worst moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .objects import cache_groups
from .shapes import ModelShape
from .weights import shard, weight_bytes

USABLE_SHARE = 0.9
"""Of the memory; the rest is for driver, allocator and fragments. A rule of thumb, as serving engines use it."""


class Need(NamedTuple):
    """Bytes on one rank."""

    weight_bytes: int
    cache_bytes: int
    """The cache after the last token was decoded."""
    prefill_cache_bytes: int
    """The cache right after a prefill of the whole text; more where a cache keeps views of it."""
    activation_bytes: int
    """Of the prefill; an estimate, see `activation_bytes`."""
    logits_bytes: int
    """Of one position per row, in the working dtype and once more in float32."""
    growth_bytes: int
    """The largest key or value tensor of one layer: while it grows, old and new exist together."""

    @property
    def ideal_bytes(self) -> int:
        """Weights and cache."""
        return self.weight_bytes + self.cache_bytes

    @property
    def peak_bytes(self) -> int:
        """The worse moment of two: the end of the prefill, or a decode step in which the largest tensor grows."""
        prefill = self.prefill_cache_bytes + self.activation_bytes + self.logits_bytes
        return self.weight_bytes + max(prefill, self.cache_bytes + self.growth_bytes + self.logits_bytes)


class Planned(NamedTuple):
    """A model, how it is kept, and the cache it is given."""

    shape: ModelShape
    spec: str
    weights_dtype: str = "bfloat16"
    ranks: int = 1

    def need(self, tokens: int, rows: int = 1) -> Need:
        """Bytes for `rows` different texts of `tokens` tokens; of an encoder-decoder, with an encoder text as long."""
        local = shard(self.shape, self.ranks)
        groups, before = (
            cache_groups(local, self.spec, prompt, rows, steps, encoder_tokens=tokens)
            for prompt, steps in ((max(1, tokens - 1), min(1, tokens - 1)), (tokens, 0))
        )
        growth = max((group.tensor_bytes for group in groups), default=0)
        return Need(
            weight_bytes(self.shape, self.weights_dtype, self.ranks),
            sum(group.total_bytes for group in groups),
            sum(group.total_bytes for group in before),
            activation_bytes(self.shape, tokens, rows, self.ranks),
            rows * self.shape.decoder.vocab_size * (self.shape.dtype.itemsize + 4),
            growth,
        )


def activation_bytes(shape: ModelShape, tokens: int, rows: int = 1, ranks: int = 1) -> int:
    """An estimate of the transient tensors of a prefill in one pass, with attention that keeps no scores.

    Residual and its normed copy, and the larger of: queries, keys, values and output of attention; gate, up and product
    of a gated MLP. Experts and eager attention (scores: heads x tokens^2) need more.
    """
    c = shape.decoder
    heads = getattr(c, "decoder_attention_heads", None) or c.num_attention_heads
    width = getattr(c.per_layer_config[0], "head_dim", None) or c.hidden_size // heads
    states = max(
        (s.keys.heads * s.keys.width + s.values.heads * s.values.width for s in shape.layers if s.keys and s.values),
        default=0,
    )
    inner = next((size for name in _INNER if (size := getattr(c, name, None))), 4 * c.hidden_size)
    numbers = 2 * c.hidden_size + max(2 * heads * width + states, 3 * inner) / ranks
    return int(rows * tokens * numbers * shape.dtype.itemsize)


_INNER = ("intermediate_size", "d_ff", "decoder_ffn_dim", "n_inner")


def most_tokens(planned: Planned, memory_bytes: int, rows: int = 1, *, usable: bool = False) -> int:
    """The longest text that fits in every one of `rows` rows; 0 if not one token does."""
    return _largest(lambda tokens: _fits(planned.need(tokens, rows), memory_bytes, usable))


def most_rows(planned: Planned, memory_bytes: int, tokens: int, *, usable: bool = False) -> int:
    """The most rows of `tokens` tokens that fit; 0 if not one does."""
    return _largest(lambda rows: _fits(planned.need(tokens, rows), memory_bytes, usable), most=2**14)


def _fits(need: Need, memory_bytes: int, usable: bool) -> bool:
    return need.peak_bytes <= USABLE_SHARE * memory_bytes if usable else need.ideal_bytes <= memory_bytes


def _largest(fits: Callable[[int], bool], most: int = 2**26) -> int:
    """The largest number up to `most` that fits, of a condition that no larger number fulfils again."""
    high = 1
    while high <= most and fits(high):
        high *= 2
    low, high = high // 2, min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
