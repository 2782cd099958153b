"""Do caches write the same text? Greedy continuations of several prompts, against the reference's."""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.caches import Build, resolve_cache
from hf_kvcache.evaluation.continuation import likelihood, read_context
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.outcomes import Agreement, Output
from hf_kvcache.evaluation.protocols import Protocol
from hf_kvcache.evaluation.reader import Reader
from hf_kvcache.evaluation.tasks import TASKS, Task
from hf_kvcache.evaluation.windows import windows
from hf_kvcache.evaluation.workers import Workers

NGRAM_TOKENS = 4


class _Continuation(NamedTuple):
    """What was written after all prompts, and the leads of the most likely tokens' logits over the second best."""

    tokens: Int[Tensor, "rows new"]
    leads: Float[Tensor, "rows new"]


@dataclass(frozen=True)
class Prompts:
    """What is continued, and how far.

    Attributes:
        count: Prompts, taken from the text one after the other; they are continued as one batch.
        prompt_tokens: Tokens of each.
        new_tokens: Tokens written after each. An end-of-text token does not end it.

    Raises:
        InputError: A size that makes no sense.
    """

    count: int = 8
    prompt_tokens: int = 1024
    new_tokens: int = 128

    def __post_init__(self) -> None:
        if self.count < 1 or self.prompt_tokens < 3 or self.new_tokens < 2:
            raise InputError(f"generation needs a prompt of at least 3 tokens and 2 new tokens, got {self}")

    @property
    def total_tokens(self) -> int:
        """Tokens of a prompt and its continuation."""
        return self.prompt_tokens + self.new_tokens


def default_prompts(tasks: Collection[Task], positions: int | None) -> Prompts:
    """What is continued where nothing else is said: the defaults of `Prompts`; less of each if all tasks are run.

    Prompts are long, so that caches that encode or drop what is old have something to do; no longer than a model with
    so many `positions` has room for.
    """
    sizes = Prompts(4, 768, 64) if set(tasks) == set(TASKS) else Prompts()
    room = sizes.prompt_tokens if positions is None else max(3, positions - sizes.new_tokens)
    return replace(sizes, prompt_tokens=min(sizes.prompt_tokens, room))


def measure_generation(
    loaded: LoadedModel, documents: Iterable[str], specs: Sequence[str], prompts: Prompts, progress: bool = True
) -> list[Agreement]:
    """Continue every prompt with every cache; one record for each of `specs`, compared with the first.

    Args:
        loaded: The model and its tokenizer.
        documents: The text that prompts are taken from.
        specs: Caches, see `caches.py`; the reference first.
        prompts: How many, and their sizes.
        progress: Whether to show a progress bar.

    Raises:
        InputError: The text is too short.
    """
    ids = _prompts(loaded, documents, prompts)
    steps = len(specs) * prompts.new_tokens
    with (
        tqdm(total=steps, unit=" steps", desc="generation", disable=not progress) as bar,
        Workers(loaded.model, len(specs)) as workers,
    ):

        def advance() -> None:
            with tqdm.get_lock():
                bar.update()

        def continue_(model: PreTrainedModel, build: Build) -> _Continuation:
            return _continue(Reader(model, build(model.config)), ids, prompts.new_tokens, advance)

        continued = list(workers.map(continue_, [resolve_cache(spec, prompts.total_tokens) for spec in specs]))
        texts = zip(ids, torch.stack([of.tokens for of in continued], dim=1), strict=True)
        nll = torch.stack(list(workers.map(_likelihood, texts)), dim=1)
    expected, leads = continued[0]
    return [_agreement(expected, of.tokens, leads, its) for of, its in zip(continued, nll, strict=True)]


def repetition(tokens: Sequence[int]) -> float:
    """Share of runs of `NGRAM_TOKENS` tokens that stood in the text before, 0 to 1."""
    grams = [tuple(tokens[start : start + NGRAM_TOKENS]) for start in range(len(tokens) - NGRAM_TOKENS + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _prompts(loaded: LoadedModel, documents: Iterable[str], prompts: Prompts) -> Int[Tensor, "rows tokens"]:
    sizes = Protocol(prompts.prompt_tokens, prefill_tokens=1, chunk_tokens=1)
    cut = windows(documents, loaded.tokenizer, sizes, prompts.count * sizes.scored_tokens)
    rows = [of.ids for of in islice(cut, prompts.count) if len(of.ids) == prompts.prompt_tokens]
    if len(rows) < prompts.count:
        raise InputError(
            f"the text gives {len(rows)} prompts of {prompts.prompt_tokens} tokens, {prompts.count} were asked for: "
            "use a longer text, or fewer prompts"
        )
    return torch.stack(rows).to(loaded.model.device)


def _continue(
    reader: Reader, ids: Int[Tensor, "rows tokens"], new_tokens: int, advance: Callable[[], object]
) -> _Continuation:
    """The most likely token, again and again, and the lead of its logit over the second best."""
    tokens, leads = [], []
    piece = ids
    for _ in range(new_tokens):
        best = reader.feed(piece)[:, -1].topk(2, dim=-1)
        piece = best.indices[:, :1]
        tokens.append(piece)
        leads.append((best.values[:, 0] - best.values[:, 1]).float())
        advance()
    return _Continuation(torch.cat(tokens, dim=1), torch.stack(leads, dim=1))


def _likelihood(
    model: PreTrainedModel, text: tuple[Int[Tensor, " tokens"], Int[Tensor, "caches new"]]
) -> Float[Tensor, "caches new"]:
    """-log p of what each cache wrote after a prompt, as text for the model: that of a healthy text stays low.

    The prompt is read once, into transformers' cache, and each of the texts that differ goes on from a copy.
    """
    prompt, written = text[0][None], text[1]
    cache = DynamicCache(config=model.config)
    read_context(Reader(model, cache), prompt)
    different, which = written.unique(dim=0, return_inverse=True)
    nll = [
        likelihood(Reader(model, copy.deepcopy(cache)), prompt, new[None], chunk_tokens=len(new)).nll
        for new in different
    ]
    return torch.stack(nll)[which.to(nll[0].device)]


def _agreement(
    expected: Int[Tensor, "rows new"],
    written: Int[Tensor, "rows new"],
    margins: Float[Tensor, "rows new"],
    nll: Float[Tensor, "rows new"],
) -> Agreement:
    new_tokens = written.shape[1]
    outputs = []
    for row, (ours, theirs) in enumerate(zip(written, expected, strict=True)):
        split = (ours != theirs).nonzero()
        first = int(split[0]) if len(split) else None
        halves = nll[row].tensor_split(2)
        outputs.append(
            Output(
                first_difference=first,
                margin=None if first is None else float(margins[row, first]),
                repetition=repetition(ours.tolist()),
                nll_first_half=float(halves[0].mean()),
                nll_second_half=float(halves[1].mean()),
            )
        )
    return Agreement(
        new_tokens=new_tokens,
        same_text=sum(of.first_difference is None for of in outputs) / len(outputs),
        agreement_tokens=sum(new_tokens if of.first_difference is None else of.first_difference for of in outputs)
        / len(outputs),
        repetition=sum(of.repetition for of in outputs) / len(outputs),
        drift=sum(of.nll_second_half - of.nll_first_half for of in outputs) / len(outputs),
        outputs=tuple(outputs),
    )
