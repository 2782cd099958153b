"""The model class `hf-kvcache` of the LM Evaluation Harness (`lm-eval`): its tasks, read through a cache.

It needs the extra `lm-eval`. The harness knows a model class once something has imported it, and its own command cannot
be asked to; `hf-kvcache lm-eval` is that command with this class registered.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.errors import InputError, SpecError
from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.continuation import likelihood, read_context
from hf_kvcache.evaluation.models import source_of
from hf_kvcache.evaluation.protocols import cache_argument
from hf_kvcache.evaluation.reader import Reader

NAME = "hf-kvcache"
"""What `--model` calls it."""

Request: TypeAlias = tuple[Any, list[int], list[int]]
"""Of the harness: the texts (None for a window of a longer text), ids of the context, ids of the continuation."""


class CachedLM(HFLM):
    """The harness's model class for transformers, with every token scored or generated after reading a cache.

    *Log-likelihood*: the context but for its last token is one prefill, what follows are chunks, so each token scored
    is predicted by a pass that read the cache. Rows are read one at a time, because padding would enter the cache;
    `batch_size` does not matter. Continuations of one context start from copies of one cache. *Generation*: each
    batch, padded on the left, has a fresh cache.

    Args:
        pretrained: As in `load_model`, or a model.
        cache: A cache by name, see `caches.py`.
        chunk_tokens: Tokens a pass when a continuation is scored; 1 is true decoding.
        cut: What a context that is too long for the model loses: its `start`, as in the harness, or its `middle`, as in
            LongBench (arXiv 2308.14508), which keeps as many tokens of the beginning as of the end.
        device: As in the harness; the GPU if there is one.
        **options: All other arguments of the harness's class `hf`.

    Raises:
        SpecError: `cache` names nothing known, or no cache at all.
        InputError: `cut` is neither of the two.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        cache: str = "paged",
        chunk_tokens: int = 128,
        cut: str = "start",
        device: str | None = None,
        **options: Any,
    ) -> None:
        resolve_cache(cache, 1)  # a mistake in it shows before the weights are loaded
        if cache == "none":
            raise SpecError("a model without a cache is what --model hf runs; name a cache here, such as 'dynamic'")
        if cut not in ("start", "middle"):
            raise InputError(f"cut is 'start' or 'middle', got {cut!r}")
        source = source_of(pretrained) if isinstance(pretrained, str) else pretrained
        found = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(source, backend="causal", device=found, **options)
        self.cache_spec = cache
        self.chunk_tokens = chunk_tokens
        self.cut = cut

    def _loglikelihood_tokens(
        self,
        requests: Iterable[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,  # noqa: ARG002 - of the harness; rows are read one at a time
    ) -> list[tuple[float, bool]]:
        """The sum of log p over each continuation, and whether it is what greedy decoding gives."""
        asked = [self._shortened(request) for request in requests]
        order = sorted(range(len(asked)), key=lambda at: asked[at][1])
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(asked)
        with tqdm(total=len(asked), desc="log-likelihood", disable=disable_tqdm or self.rank != 0) as bar:
            for context, group in groupby(order, key=lambda at: asked[at][1]):
                places = list(group)
                scores = self._score(context, [asked[at][2] for at in places])
                for at, answer in zip(places, scores, strict=True):
                    answers[at] = answer
                    if asked[at][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", asked[at][0], answer)
                    bar.update()
        return answers

    def _score(self, context: list[int], continuations: Sequence[list[int]]) -> list[tuple[float, bool]]:
        """Score continuations of one context, which is read once."""
        ids = torch.tensor([context])
        capacity = len(context) + max(map(len, continuations))

        def read() -> Reader:
            reader = Reader(self.model, self._fresh_cache(capacity))
            read_context(reader, ids)
            return reader

        whole, found = read(), []
        for place, continuation in enumerate(continuations, start=1):
            branch = whole if place == len(continuations) else whole.fork() or read()
            nll, greedy = likelihood(branch, ids, torch.tensor([continuation]), self.chunk_tokens)
            found.append((-float(nll.sum()), bool(greedy.all())))
        return found

    def _shortened(self, request: Request) -> Request:
        """A request that fits the model: its context without what is too much."""
        texts, context, continuation = request
        return texts, _kept(context, max(1, self.max_length + 1 - len(continuation)), self.cut), continuation

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]:
        """Token ids of prompts and their mask, padded on the left; too long ones are cut where `cut` says."""
        if self.cut == "start" or left_truncate_len is None:
            ids, mask = super().tok_batch_encode(list(strings), padding_side, left_truncate_len, truncation)
            return ids, mask
        rows = [torch.tensor(_kept(self.tok_encode(of), left_truncate_len, self.cut)) for of in strings]
        masks = [torch.ones_like(row) for row in rows]
        pad = self.tokenizer.pad_token_id
        return (
            pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left"),
            pad_sequence(masks, batch_first=True, padding_side="left"),
        )

    def _model_generate(
        self, context: Int[Tensor, "rows tokens"], max_length: int, stop: list[str], **options: Any
    ) -> Int[Tensor, "rows longer"]:
        """Generate with a fresh cache."""
        cache = {cache_argument(self.model): self._fresh_cache(max_length)}
        written: Tensor = super()._model_generate(context, max_length, stop, **options, **cache)
        return written

    def _fresh_cache(self, capacity_tokens: int) -> Cache | None:
        return resolve_cache(self.cache_spec, capacity_tokens)(self.model.config)


def harness_command(arguments: list[str]) -> None:
    """The harness's own command line, with `--model hf-kvcache` known."""
    register_model(NAME)(CachedLM)
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()


def _kept(ids: list[int], most: int, cut: str) -> list[int]:
    """At most so many ids: the last ones, or as many from the beginning as from the end."""
    if len(ids) <= most:
        return ids
    begin = most // 2 if cut == "middle" else 0
    return ids[:begin] + ids[len(ids) - (most - begin) :]
