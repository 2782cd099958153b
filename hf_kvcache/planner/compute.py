"""Operations with and without a cache.

A matrix of N numbers costs 2N FLOP per token. Attention costs, per layer and (query, key) pair, 2 x heads x (key width
+ value width): 4d for a layer of width d. With L such layers, per step at length t and in sum up to T (leading terms):

| | per step | sum |
|---|---|---|
| with a cache | 2 (N + 2 L d t) | 2 (N T + L d T^2) |
| without | 2 (N t + L d t^2) | 2 (N T^2 / 2 + L d T^3 / 3) |

Pairs are counted as causal attention needs them, t (t + 1) / 2 for t tokens. Kernels that compute masked pairs too do
up to twice that (`dense`), and that is what torch's FLOP counter counts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..units import Number, positive
from .shapes import ModelShape
from .weights import active_parameters


class Work(NamedTuple):
    """What a model does per token."""

    parameters: Number
    """N: matrix parameters that one token meets."""
    attention: tuple[tuple[Number, int | None], ...]
    """For each attention layer: heads x (key width + value width), and the window."""

    @property
    def pair_flops(self) -> float:
        """FLOP of one (query, key) pair in every layer: 4 L d for layers of width d."""
        return float(sum(2 * width for width, _ in self.attention))

    @property
    def crossing_tokens(self) -> Number:
        """The length T at which attention has cost as much as the matrices, in sum, with a cache.

        N / (L d) where no layer has a window; infinite where all have. A single step gets there at half of it.
        """
        if all(window is None for _, window in self.attention):
            return 4 * self.parameters / self.pair_flops if self.attention else math.inf
        low, high = 1, 2**40
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sequence_share(self, middle) >= 0.5 else (middle + 1, high)
        return low if low < 2**40 else math.inf


def uniform_work(parameters: Number, layers: int, width: int) -> Work:
    """A textbook decoder: `layers` layers of full attention of width d = heads x head width.

    Example:
        >>> llama = uniform_work(8.03e9, 32, 4096)
        >>> with_cache, without = total_flops(llama, 512), total_flops(llama, 512, cached=False)
        >>> f"{without:.3g} {with_cache:.3g} {without / with_cache:.0f}"
        '2.12e+15 8.29e+12 256'
    """
    return Work(parameters, ((2 * width, None),) * layers)


def model_work(shape: ModelShape) -> Work:
    """The work of a model: its matrices (experts as far as a token meets them) and its attention layers.

    Not counted: recurrences of linear attention, and that transformers expands the whole latent history at every step
    (MLA).
    """
    attention = []
    decoder: Any = shape.decoder
    kinds = getattr(decoder, "layer_types", None) or [None] * len(shape.layers)
    for layer, kind in zip(decoder.per_layer_config, kinds, strict=False):
        if kind == "linear_attention":
            continue
        window = {
            None: getattr(layer, "sliding_window", None),
            "sliding_attention": getattr(layer, "sliding_window", None),
            "chunked_attention": getattr(layer, "attention_chunk_size", None),
        }.get(kind)
        attention.append((_query_width(layer), window))
    return Work(active_parameters(shape), tuple(attention))


def step_flops(work: Work, tokens: int, *, cached: bool = True, dense: bool = False) -> Number:
    """FLOP of the step that brings the text from ``tokens - 1`` to `tokens`.

    Without a cache all `tokens` are computed again.
    """
    positive(tokens, "a number of tokens")
    computed = 1 if cached else tokens
    total = 2 * work.parameters * computed
    for width, window in work.attention:
        visible = min(tokens, window or tokens)
        recomputed = tokens * tokens if dense else _pairs(tokens, window)
        total += 2 * width * (visible if cached else recomputed)
    return total


def total_flops(work: Work, new_tokens: int, prompt_tokens: int = 0, *, cached: bool = True) -> Number:
    """FLOP until `new_tokens` tokens after a prompt have been generated and fed: the sum of the steps.

    With a cache the prompt is computed once; without, all of it again for each new token.
    """
    positive(new_tokens, "a number of new tokens")
    end = prompt_tokens + new_tokens
    if cached:
        return 2 * work.parameters * end + sum(2 * width * _pairs(end, window) for width, window in work.attention)
    matrices = 2 * work.parameters * (_triangle(end) - _triangle(prompt_tokens))
    return matrices + sum(
        2 * width * (_pair_sum(end, window) - _pair_sum(prompt_tokens, window)) for width, window in work.attention
    )


def sequence_share(work: Work, new_tokens: int, prompt_tokens: int = 0) -> float:
    """Share of the FLOP with a cache that is attention."""
    end = prompt_tokens + new_tokens
    return 1 - 2 * work.parameters * end / total_flops(work, new_tokens, prompt_tokens)


def _query_width(layer: Any) -> float:
    heads = getattr(layer, "decoder_attention_heads", None) or layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None):
        return float(heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim))
    width = getattr(layer, "head_dim", None) or getattr(layer, "d_kv", None) or layer.hidden_size // heads
    return float(heads * 2 * width)


def _triangle(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _pairs(tokens: int, window: int | None) -> int:
    """Causal pairs among `tokens` tokens: the sum of min(t, window)."""
    if window is None or tokens <= window:
        return _triangle(tokens)
    return _triangle(window) + (tokens - window) * window


def _pair_sum(tokens: int, window: int | None) -> int:
    """The sum of `_pairs(t)` for t up to `tokens`."""
    if window is None or tokens <= window:
        return tokens * (tokens + 1) * (tokens + 2) // 6
    rest = tokens - window
    return window * (window + 1) * (window + 2) // 6 + rest * _triangle(window) + window * _triangle(rest)
