"""Perplexity of whole documents: every token is scored once, in windows that overlap as much as is asked for."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.continuation import likelihood, read_context
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.reader import Reader


class Strided(NamedTuple):
    """Perplexities of whole documents.

    Attributes:
        window_tokens: The most tokens of history of a prediction.
        stride_tokens: Tokens scored by each window after the first of a document.
        documents: Documents scored.
        tokens: Tokens scored.
        perplexity: Exp of nats per token.
        word_perplexity: Exp of nats per word. A document has one word more than it has runs of whitespace.
        byte_perplexity: Exp of nats per UTF-8 byte.
        bits_per_byte: The same in bits.
    """

    window_tokens: int
    stride_tokens: int
    documents: int
    tokens: int
    perplexity: float
    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float


def strided_perplexity(
    loaded: LoadedModel,
    documents: Iterable[str],
    spec: str,
    *,
    window_tokens: int,
    stride_tokens: int,
    chunk_tokens: int,
    max_tokens: int,
    progress: bool = True,
) -> Strided:
    """Score whole documents through a cache, by the rules of the LM Evaluation Harness.

    Each document is scored on its own, begins with the BOS token (EOS where there is none), and is encoded as its
    tokenizer does by default. The first window scores all of its tokens, each later one the next `stride_tokens`;
    every window but a document's first is full, also its last. With a stride of a whole window the figures are those
    of the harness's task `wikitext`. Each window starts with an empty cache and goes through it as `likelihood` says.

    Args:
        loaded: The model and its tokenizer.
        documents: Texts; none is read after `max_tokens` tokens.
        spec: The cache, see `caches.py`.
        window_tokens: Tokens fed in one window.
        stride_tokens: Tokens from one window's end to the next one's; at most `window_tokens`.
        chunk_tokens: Tokens a pass.
        max_tokens: No further document is begun once so many tokens are scored.
        progress: Whether to show a progress bar.

    Raises:
        InputError: A size that makes no sense, no text, or a tokenizer without BOS and EOS token.
    """
    prefix = check_stride(loaded.tokenizer, window_tokens, stride_tokens)
    build = resolve_cache(spec, window_tokens)
    nll, count, tokens, words, size = 0.0, 0, 0, 0, 0
    with tqdm(total=max_tokens, unit=" tokens", desc=f"strided, {spec}", disable=not progress) as bar:
        for document in documents:
            ids = list(loaded.tokenizer(document, verbose=False)["input_ids"])
            for context, continuation in rolling_windows(ids, prefix, window_tokens, stride_tokens):
                reader = Reader(loaded.model, build(loaded.model.config))
                before = torch.tensor([context])
                read_context(reader, before)
                nll += float(likelihood(reader, before, torch.tensor([continuation]), chunk_tokens).nll.sum())
                bar.update(len(continuation))
            count, tokens = count + 1, tokens + len(ids)
            words, size = words + len(re.split(r"\s+", document)), size + len(document.encode("utf-8"))
            if tokens >= max_tokens:
                break
    if not tokens:
        raise InputError("there is no text to score: every document is empty")
    return Strided(
        window_tokens,
        stride_tokens,
        count,
        tokens,
        perplexity=math.exp(nll / tokens),
        word_perplexity=math.exp(nll / words),
        byte_perplexity=math.exp(nll / size),
        bits_per_byte=nll / size / math.log(2),
    )


def check_stride(tokenizer: PreTrainedTokenizerBase, window_tokens: int, stride_tokens: int) -> int:
    """The token before a document: BOS, else EOS.

    Raises:
        InputError: The tokenizer has neither, or the sizes make no sense.
    """
    if not 1 <= stride_tokens <= window_tokens:
        raise InputError(f"the stride must be 1 to {window_tokens} tokens, the window's, got {stride_tokens}")
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise InputError("a document needs a token before its first one, and this tokenizer has neither BOS nor EOS token")


def rolling_windows(
    ids: Sequence[int], prefix: int, window_tokens: int, stride_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield context and continuation of each window of one document; continuations are the document, cut in pieces."""
    done = min(window_tokens, len(ids))
    if done:
        yield [prefix], list(ids[:done])
    while done < len(ids):
        stop = min(done + stride_tokens, len(ids))
        yield list(ids[stop - window_tokens - 1 : done]), list(ids[done:stop])
        done = stop
