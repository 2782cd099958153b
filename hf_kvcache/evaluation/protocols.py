"""How a text is pushed *through* a cache, so that what is scored was computed from what the cache returned.

A window of W tokens is fed as one prefill of P tokens, then in chunks of c. The logits of the prefill are
thrown away: they were computed without reading the cache, so they are the same for every cache and say
nothing about any. Every later token is predicted by a forward pass that first read the cache; those are the
scored ones. c = 1 is true decoding.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.errors import EvaluationError, InputError
from hf_kvcache.evaluation.memory import measured_bytes


@dataclass(frozen=True)
class Protocol:
    """The sizes of one scoring run, in tokens.

    Attributes:
        window_tokens: Tokens of text the cache sees at most; each window starts with an empty cache.
        prefill_tokens: Tokens fed first, in one forward pass, and not scored.
        chunk_tokens: Tokens per forward pass after that.

    Raises:
        InputError: A size that would score nothing, or score something that never went through the cache.
    """

    window_tokens: int = 2048
    prefill_tokens: int = 256
    chunk_tokens: int = 128

    def __post_init__(self) -> None:
        if self.prefill_tokens < 1 or self.chunk_tokens < 1:
            raise InputError(
                f"prefill and chunk must be at least 1 token, got {self.prefill_tokens} and "
                f"{self.chunk_tokens}: without a prefill the first scores would not have read the cache"
            )
        if self.window_tokens < self.prefill_tokens + 2:
            raise InputError(
                f"a window of {self.window_tokens} tokens leaves nothing to score after a prefill of "
                f"{self.prefill_tokens}: use at least {self.prefill_tokens + 2}"
            )

    @property
    def scored_tokens(self) -> int:
        """Tokens scored in one full window."""
        return self.window_tokens - self.prefill_tokens - 1


class Scored(NamedTuple):
    """Predictions of one chunk: `logits[i]` predicts `targets[i]`, at `first_position + i` in the window."""

    logits: Float[Tensor, "positions vocabulary"]
    targets: Int[Tensor, " positions"]
    first_position: int


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model takes a cache: `past_key_values` or, since transformers 5.24, `cache`.

    Raises:
        InputError: The model takes neither, so it has no such cache.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise InputError(f"{type(model).__name__} takes no key-value cache (no argument `cache` or `past_key_values`)")


@torch.inference_mode()
def forward(
    model: PreTrainedModel, token_ids: Int[Tensor, "rows tokens"], cache: Cache | None, keep: int = 0
) -> Float[Tensor, "rows kept vocabulary"]:
    """Read and extend `cache` by one forward pass; gives logits of the last `keep` positions (0: all)."""
    arguments: dict[str, Any] = (
        {"use_cache": False} if cache is None else {"use_cache": True, cache_argument(model): cache}
    )
    if keep and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = keep
    logits: Tensor = model(input_ids=token_ids, **arguments).logits
    return logits[:, -keep:]


def stream(
    model: PreTrainedModel, cache: Cache | None, window: Int[Tensor, " tokens"], protocol: Protocol
) -> Iterator[Scored]:
    """Feed `window` through `cache` and yield the logits that were computed after reading it.

    The scored positions depend on the window and the prefill only, not on the cache or the chunk. With
    `cache=None` the same positions come from one forward pass without a cache.

    Args:
        model: A causal language model, in the dtype and on the device to measure.
        cache: Empty; changed. It holds all tokens of the window but the last afterwards.
        window: Token ids; at least `prefill_tokens + 2`.
        protocol: The sizes.

    Raises:
        InputError: The window is too short.
        EvaluationError: The model did not store anything in the cache, so nothing would be read back.
    """
    prefill, end = protocol.prefill_tokens, len(window) - 1
    if end <= prefill:
        raise InputError(f"a window of {len(window)} tokens has nothing to score after a prefill of {prefill}")
    ids = window.to(model.device)[None]
    if cache is None:
        logits = forward(model, ids[:, :end], None, keep=end - prefill)[0]
    else:
        forward(model, ids[:, :prefill], cache, keep=1)
        if measured_bytes(cache) == 0:
            raise EvaluationError(
                f"{type(cache).__name__} holds no tensor after a prefill of {prefill} tokens: "
                f"{type(model).__name__} does not use the cache it was given, or the cache stores nothing"
            )
    for start in range(prefill, end, protocol.chunk_tokens):
        stop = min(start + protocol.chunk_tokens, end)
        piece = (
            logits[start - prefill : stop - prefill] if cache is None else forward(model, ids[:, start:stop], cache)[0]
        )
        yield Scored(piece, ids[0, start + 1 : stop + 1], start + 1)
