"""A text that grows piece by piece, read through a cache, or anew each time where there is none."""

import copy
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.evaluation.protocols import Protocol, forward


class Reader:
    """Feeds a model.

    Args:
        model: A causal language model.
        cache: Empty; changed. None: the whole text is computed again for every piece.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache | None) -> None:
        self.model = model
        self.cache = cache
        self._seen: list[Tensor] = []

    def feed(self, ids: Int[Tensor, "rows tokens"], keep: int = 1) -> Float[Tensor, "rows kept vocabulary"]:
        """Read some tokens more; gives the logits of the last `keep`."""
        ids = ids.to(self.model.device)
        if self.cache is not None:
            return forward(self.model, ids, self.cache, keep)
        self._seen.append(ids)
        return forward(self.model, torch.cat(self._seen, dim=1), None, keep)

    def feed_in_chunks(self, ids: Int[Tensor, "rows tokens"], protocol: Protocol) -> None:
        """Read a long text: the protocol's prefill, then its chunks."""
        if self.cache is None:
            self._seen.append(ids.to(self.model.device))  # the next piece computes it
            return
        sizes = [protocol.prefill_tokens]
        while sum(sizes) < ids.shape[1]:
            sizes.append(protocol.chunk_tokens)
        sizes[-1] -= sum(sizes) - ids.shape[1]
        for piece in ids.split(sizes, dim=1):
            self.feed(piece)

    def write(self, begun: Int[Tensor, "rows begun"]) -> Iterator[Int[Tensor, " rows"]]:
        """Read `begun` and continue it by the most likely token, without end; each is read when the next is wanted."""
        piece = begun
        while True:
            piece = self.feed(piece)[:, -1:].argmax(dim=-1)
            yield piece[:, 0]

    def fork(self) -> "Reader | None":
        """A second reader that goes on from here; None if the cache cannot be copied (then read the text again)."""
        try:
            other = Reader(self.model, copy.deepcopy(self.cache))
        except Exception:  # noqa: BLE001 - a foreign cache may raise anything
            return None
        other._seen = list(self._seen)
        return other
