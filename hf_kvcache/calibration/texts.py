"""Texts to calibrate on: what a model predicts of them, and how far a cache moves that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..errors import InputError

WINDOW_TOKENS = 1024
_PREFILL_TOKENS = 768
_CHUNK_TOKENS = 256
_LEAST_WINDOWS = 2


class Texts:
    """Windows of text, with the logits of their last quarter under an exact cache.

    Args:
        model: A causal language model.
        windows: Token ids; each is a text of its own.
        advance: Called after every pass over a window: one for each now, and one for each in every `divergence`.
    """

    def __init__(
        self, model: PreTrainedModel, windows: Sequence[Int[Tensor, " tokens"]], advance: Callable[[], object]
    ) -> None:
        self.model = model
        self.windows = windows
        self.advance = advance
        self._reference = [self._logits(DynamicCache(config=model.config), window) for window in windows]

    def divergence(self, make: Callable[[], Cache]) -> float:
        """Mean KL(exact cache || the cache that `make` makes) in nats per token, over all windows."""
        from ..evaluation.metrics import kl_divergence, log_probabilities

        found = [
            kl_divergence(log_probabilities(reference), log_probabilities(self._logits(make(), window)))
            for window, reference in zip(self.windows, self._reference, strict=True)
        ]
        return float(torch.cat(found).mean())

    def _logits(self, cache: Cache, window: Int[Tensor, " tokens"]) -> Float[Tensor, "positions vocabulary"]:
        from ..evaluation.protocols import Protocol, stream

        protocol = Protocol(WINDOW_TOKENS, _PREFILL_TOKENS, _CHUNK_TOKENS)
        logits = torch.cat([chunk.logits for chunk in stream(self.model, cache, window, protocol)])
        self.advance()
        return logits


def cut(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Int[Tensor, " tokens"]]:
    """Texts joined and cut into windows.

    Raises:
        InputError: Less than two windows.
    """
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= max_tokens:
            break
    count = min(len(ids), max_tokens) // WINDOW_TOKENS
    if count < _LEAST_WINDOWS:
        raise InputError(
            f"calibration takes at least {_LEAST_WINDOWS * WINDOW_TOKENS} tokens, half of them to check the plan on, "
            f"got {min(len(ids), max_tokens)}: give more text, or a larger max_tokens"
        )
    return list(torch.tensor(ids[: count * WINDOW_TOKENS]).split(WINDOW_TOKENS))
