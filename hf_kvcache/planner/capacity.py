"""What fits: memory needed at a context and a batch, and the largest of each by bisection.

*Ideal*: weights and cache alone against all of the card's memory. *Usable*: the share of the memory that is left beside
driver, allocator and fragments, against everything that exists at once at the worst moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .objects import LayerGroup, cache_groups
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

    def groups(self, tokens: int, rows: int = 1) -> tuple[LayerGroup, ...]:
        """The cache on one rank when the last of `tokens` tokens was decoded, in `rows` rows of different texts.

        The encoder's text of an encoder-decoder is as long.
        """
        prompt, steps = max(1, tokens - 1), min(1, tokens - 1)
        return cache_groups(shard(self.shape, self.ranks), self.spec, prompt, rows, steps, encoder_tokens=tokens)

    def ideal_bytes(self, tokens: int, rows: int = 1) -> int:
        """Weights and cache, and nothing else."""
        weights = weight_bytes(self.shape, self.weights_dtype, self.ranks)
        return weights + sum(group.total_bytes for group in self.groups(tokens, rows))

    def need(self, tokens: int, rows: int = 1) -> Need:
        """Everything; see `groups`."""
        local = shard(self.shape, self.ranks)
        groups = self.groups(tokens, rows)
        before = cache_groups(local, self.spec, tokens, rows, encoder_tokens=tokens)
        return Need(
            weight_bytes(self.shape, self.weights_dtype, self.ranks),
            sum(group.total_bytes for group in groups),
            sum(group.total_bytes for group in before),
            activation_bytes(self.shape, tokens, rows, self.ranks),
            rows * self.shape.decoder.vocab_size * (self.shape.dtype.itemsize + 4),
            max((group.growing_bytes for group in groups), default=0),
        )


def activation_bytes(shape: ModelShape, tokens: int, rows: int = 1, ranks: int = 1) -> int:
    """An estimate of the transient tensors of a prefill in one pass, with attention that keeps no scores.

    Embeddings, residual before and after half a layer, and its normed copy; and the larger of: queries, keys, values
    and output of attention; gate, up and product of a gated MLP. Within 3 % of the tensors that a Llama or Qwen3
    creates. Experts and eager attention (scores: heads x tokens^2) need more.
    """
    c = shape.decoder
    heads = getattr(c, "decoder_attention_heads", None) or c.num_attention_heads
    width = getattr(c.per_layer_config[0], "head_dim", None) or c.hidden_size // heads
    states = max(
        (s.keys.heads * s.keys.width + s.values.heads * s.values.width for s in shape.layers if s.keys and s.values),
        default=0,
    )
    inner = next((size for name in _INNER if (size := getattr(c, name, None))), 4 * c.hidden_size)
    numbers = 4 * c.hidden_size + max(2 * heads * width + states, 3 * inner) / ranks
    return int(rows * tokens * numbers * shape.dtype.itemsize)


_INNER = ("intermediate_size", "d_ff", "decoder_ffn_dim", "n_inner")


def most_tokens(planned: Planned, memory_bytes: int, rows: int = 1, *, usable: bool = False) -> int:
    """The longest text that fits in every one of `rows` rows; 0 if not one token does."""
    return largest(lambda tokens: _share(planned, tokens, rows, memory_bytes, usable), most=2**26)


def most_rows(planned: Planned, memory_bytes: int, tokens: int, *, usable: bool = False) -> int:
    """The most rows of `tokens` tokens that fit; 0 if not one does."""
    return largest(lambda rows: _share(planned, tokens, rows, memory_bytes, usable), most=2**14)


def _share(planned: Planned, tokens: int, rows: int, memory_bytes: int, usable: bool) -> float:
    """What is needed as a share of what there is."""
    if usable:
        return planned.need(tokens, rows).peak_bytes / (USABLE_SHARE * memory_bytes)
    return planned.ideal_bytes(tokens, rows) / memory_bytes


def largest(share: Callable[[int], float], most: int) -> int:
    """The largest number from 1 to `most` whose share is at most 1, or 0, by bisection.

    Args:
        share: Grows with the number, about evenly: the search begins where a line through two points meets 1.
        most: Where to stop.
    """
    low, high, below, above = 0, 1, 0.0, share(1)
    while above <= 1:
        if high == most:
            return most
        low, high, below = high, min(2 * high, most), above
        above = share(high)
    probe, step = int(low + (1 - below) / (above - below) * (high - low)), 1
    probe = min(max(probe, low + 1), high - 1)
    while high - low > 1:
        if share(probe) <= 1:
            low = probe
            probe = min(low + step, (low + high) // 2)
        else:
            high = probe
            probe = max(high - step, (low + high) // 2)
        step *= 2
    return low
