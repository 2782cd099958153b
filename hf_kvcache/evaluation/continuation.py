"""How likely is a text after another one, as predictions that were made after reading a cache?"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation import metrics
from hf_kvcache.evaluation.reader import Reader


class Likelihood(NamedTuple):
    """Of each token of a continuation.

    Attributes:
        nll: -log p, nats, from a log-softmax in float64.
        greedy: Whether it was the most likely one.
    """

    nll: Float[Tensor, " tokens"]
    greedy: Bool[Tensor, " tokens"]


def read_context(reader: Reader, context: Int[Tensor, "one context"]) -> None:
    """Read a context as one prefill, but for its last token: that is read with the continuation it predicts."""
    if context.shape[1] > 1:
        reader.feed(context[:, :-1])


def likelihood(
    reader: Reader,
    context: Int[Tensor, "one context"],
    continuation: Int[Tensor, "one continuation"],
    chunk_tokens: int,
) -> Likelihood:
    """Score a continuation of a context that `read_context` has read; the reader goes on from there.

    The last token of the context and the continuation but for its last token are read in chunks. Every token scored was
    thus predicted by a pass that read the cache. There is one exception: after a context of a single token nothing is
    cached yet. That token is a pass of its own, so that all others read it from the cache.

    Args:
        reader: Has read the context but for its last token.
        context: At least one token.
        continuation: At least one token.
        chunk_tokens: Tokens a pass; 1 is true decoding.

    Raises:
        InputError: A context or continuation without tokens, or a chunk below 1.
    """
    if not context.shape[1] or not continuation.shape[1] or chunk_tokens < 1:
        raise InputError(
            f"expected at least one token of context, of continuation and of a chunk, got {context.shape[1]}, "
            f"{continuation.shape[1]} and {chunk_tokens}"
        )
    inputs = torch.cat([context[:, -1:], continuation[:, :-1]], dim=1)
    alone = 1 if context.shape[1] == 1 else 0
    found: list[Likelihood] = []
    start = 0
    for piece in (inputs[:, :alone], *inputs[:, alone:].split(chunk_tokens, dim=1)):
        if not piece.shape[1]:
            continue
        stop = start + piece.shape[1]
        logits = reader.feed(piece, keep=piece.shape[1])[0]
        targets = continuation[0, start:stop].to(logits.device)
        nll = metrics.negative_log_likelihood(metrics.log_probabilities(logits), targets)
        found.append(Likelihood(nll.cpu(), (logits.argmax(dim=-1) == targets).cpu()))
        start = stop
    return Likelihood(*map(torch.cat, zip(*found, strict=True)))
