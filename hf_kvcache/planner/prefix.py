"""What a prefix cache saves: prompt tokens that need no computing, their time and their price."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InputError
from ..units import Number, positive
from .compute import Work, total_flops


class Reuse(NamedTuple):
    """Per request."""

    saved_tokens: float
    """Prompt tokens taken from the cache."""
    saved_flops: float
    saved_seconds: float | None
    """At full speed; None where the GPU's speed is unknown."""
    cost: float | None
    """Of the prompt, in the currency of the prices; None without prices."""
    full_cost: float | None
    """Of the same prompt without a prefix cache."""


def prefix_reuse(
    work: Work,
    prompt_tokens: int,
    hit_rate: Number,
    flops_per_second: Number | None = None,
    price: Number | None = None,
    cached_price: Number | None = None,
) -> Reuse:
    """What reusing a share of the prompt saves.

    Args:
        work: Of the model.
        prompt_tokens: Length of the prompt.
        hit_rate: Share of it, from its beginning, whose keys and values are at hand: 0 to 1. At least the last token
            is always computed.
        flops_per_second: Of the GPU.
        price: Per million prompt tokens.
        cached_price: Per million prompt tokens that were at hand.

    Raises:
        InputError: A rate outside 0 to 1, one price without the other, or a negative one.

    Example:
        >>> from hf_kvcache.planner.compute import uniform_work
        >>> reuse = prefix_reuse(uniform_work(8.03e9, 32, 4096), 10_000, 0.8, price=3.0, cached_price=0.3)
        >>> reuse.saved_tokens, round(reuse.cost, 4), reuse.full_cost
        (8000.0, 0.0084, 0.03)
    """
    positive(prompt_tokens, "a prompt length")
    if not 0 <= hit_rate <= 1:
        raise InputError(f"expected a hit rate from 0 to 1, got {hit_rate}")
    if (price is None) != (cached_price is None) or min(price or 0, cached_price or 0) < 0:
        raise InputError(f"expected two prices of at least 0, or none, got {price} and {cached_price}")
    saved = min(hit_rate * prompt_tokens, prompt_tokens - 1)
    saved_flops = total_flops(work, int(saved)) if saved >= 1 else 0.0
    cost = full_cost = None
    if price is not None and cached_price is not None:
        cost = ((prompt_tokens - saved) * price + saved * cached_price) / 1e6
        full_cost = prompt_tokens * price / 1e6
    return Reuse(saved, saved_flops, saved_flops / flops_per_second if flops_per_second else None, cost, full_cost)
