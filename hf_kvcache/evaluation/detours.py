"""Ways to read a text through a cache: straight on, after steps that were taken back, and from copies."""

import copy
from collections.abc import Callable, Iterator
from typing import TypeAlias

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.evaluation.protocols import Protocol, forward

DETOUR_TOKENS = 40
"""Other tokens read on a detour, at most."""

Detour: TypeAlias = Callable[[PreTrainedModel, Cache, Tensor], Cache]
"""Does something with a cache and other tokens ``[1, tokens]``; gives the cache that goes on."""


class RefusedError(Exception):
    """A cache raised on a detour."""


def read(
    model: PreTrainedModel, cache: Cache, window: Int[Tensor, " tokens"], protocol: Protocol, detour: Detour
) -> Iterator[Float[Tensor, "positions vocabulary"]]:
    """Feed a window as a prefill and chunks, with a detour before each chunk; yields the logits of each chunk.

    Raises:
        RefusedError: From the detour, with what was raised there.
    """
    ids = window.to(model.device)[None]
    others = ids[:, : protocol.prefill_tokens].flip(1)[:, :DETOUR_TOKENS]
    sizes = [protocol.chunk_tokens] * -(-(protocol.scored_tokens) // protocol.chunk_tokens)
    sizes[-1] -= sum(sizes) - protocol.scored_tokens
    if detour is cropped:
        cache.activate_past_recording()
    forward(model, ids[:, : protocol.prefill_tokens], cache, keep=1)
    for piece in ids[:, protocol.prefill_tokens : -1].split(sizes, dim=1):
        try:
            cache = detour(model, cache, others)
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        yield forward(model, piece, cache)[0]


def straight(_: PreTrainedModel, cache: Cache, __: Tensor) -> Cache:
    """No detour."""
    return cache


def cropped(model: PreTrainedModel, cache: Cache, others: Tensor) -> Cache:
    """Go on with other tokens, then take them back."""
    if not cache.is_croppable:
        raise NotImplementedError(f"{type(cache).__name__} says that it cannot be cropped")
    forward(model, others, cache, keep=1)
    cache.crop(-others.shape[1])
    return cache


class Copies:
    """Go on with a copy; what it was copied of goes on with other tokens once the copy has read some of its own."""

    def __init__(self) -> None:
        self._original: Cache | None = None

    def __call__(self, model: PreTrainedModel, cache: Cache, others: Tensor) -> Cache:
        """Disturb the cache before this one, and copy this one."""
        if self._original is not None:
            forward(model, others, self._original, keep=1)
        self._original = cache
        found: Cache = copy.deepcopy(cache)
        return found
