"""Can what stands somewhere in a long text still be found? Length by depth, read through the cache."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation import needles, tracing
from hf_kvcache.evaluation.answering import SPARE_TOKENS, answer
from hf_kvcache.evaluation.caches import Build, resolve_cache
from hf_kvcache.evaluation.haystack import Make, Problem, fit
from hf_kvcache.evaluation.journal import Journal
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.outcomes import Trial
from hf_kvcache.evaluation.processes import Team
from hf_kvcache.evaluation.protocols import Protocol
from hf_kvcache.evaluation.reader import Reader
from hf_kvcache.evaluation.tasks import TASKS, Task
from hf_kvcache.evaluation.workers import Workers

WITH_DEPTH: dict[str, Make] = {
    "single needle": needles.single,
    "multi-key needle": needles.multi_key,
    "pass key": needles.passkey,
    "key-value": needles.key_value,
}
"""Problems whose answer stands at one place."""

WITHOUT_DEPTH: dict[str, Make] = {
    "multi-value needle": needles.multi_value,
    "multi-query needle": needles.multi_query,
    "variable tracking": tracing.variable_tracking,
    "common words": tracing.common_words,
    "frequent words": tracing.frequent_words,
}
"""Problems whose answer stands all over the text."""


@dataclass(frozen=True)
class Grid:
    """The problems of a retrieval run.

    Attributes:
        lengths_tokens: Lengths of context and question.
        depths: Places of the answer, 0 (start) to 1 (end), for problems that have one.
        samples: Problems of each kind at each length and depth.

    Raises:
        InputError: A size that makes no sense.
    """

    lengths_tokens: tuple[int, ...] = (512, 1024)
    depths: tuple[float, ...] = (0.0, 0.5, 1.0)
    samples: int = 1

    def __post_init__(self) -> None:
        if not self.lengths_tokens or not self.depths or min(self.lengths_tokens) < 1 or self.samples < 1:
            raise InputError(f"retrieval needs lengths, depths and samples of at least 1, got {self}")
        if min(self.depths) < 0 or max(self.depths) > 1:
            raise InputError(f"depths lie between 0 (start) and 1 (end), got {list(self.depths)}")


def default_grid(tasks: Collection[Task]) -> Grid:
    """The problems where nothing else is said: one of each kind if all tasks are run, else the defaults of `Grid`.

    The answer of the one stands a quarter into the text, so that it is not among the last tokens, 512 or fewer, that a
    window or budget keeps.
    """
    return Grid((768,), (0.25,)) if set(tasks) == set(TASKS) else Grid()


class _Prompt(NamedTuple):
    """A problem at one place of the grid, as token ids."""

    task: str
    length_tokens: int
    depth: float | None
    sample: int
    answers: tuple[str, ...]
    context: Int[Tensor, "one context"]
    question: Int[Tensor, "one question"]
    gold: Int[Tensor, "one gold"]


def measure_retrieval(
    loaded: LoadedModel,
    specs: Sequence[str],
    grid: Grid,
    protocol: Protocol,
    seed: int = 0,
    progress: bool = True,
    journal: Journal | None = None,
    team: Team | None = None,
) -> list[tuple[Trial, ...]]:
    """Put every problem of the grid to every cache; one tuple of trials for each of `specs`.

    Args:
        loaded: The model and its tokenizer.
        specs: Caches, see `caches.py`.
        grid: Lengths, depths, samples.
        protocol: Prefill and chunk with which a context is read; the question is a chunk of its own after it, so
            that it reads the context through the cache.
        seed: Of the problems.
        progress: Whether to show a progress bar.
        journal: Where finished problems are kept, and found after an interruption.
        team: The processes that share the problems, each taking every nth; all get all trials.

    Raises:
        InputError: A length is too short for a problem.
    """
    prompts = list(_prompts(loaded, grid, seed))
    longest = max(_tokens(of) for of in prompts)
    builds = [resolve_cache(spec, longest) for spec in specs]
    team = team or Team()
    own = [number for number in range(len(prompts)) if team.owns(number)]
    kept = {number: journal.load(f"problem-{number}") for number in own} if journal else {}
    with Workers(loaded.model, len(own) * len(builds)) as workers:
        asked = product((prompts[number] for number in own if kept.get(number) is None), builds)
        answers = workers.map(lambda model, of: _try(loaded._replace(model=model), of[1], of[0], protocol), asked)
        trials: dict[int, list[Trial]] = {}
        for number in tqdm(own, unit=" problems", desc="retrieval", disable=not progress):
            found = kept.get(number)
            if found is None:
                trials[number] = list(islice(answers, len(builds)))
                if journal:
                    journal.save(f"problem-{number}", json.dumps(trials[number]).encode())
            else:
                trials[number] = [Trial(*of) for of in json.loads(found)]
    return [tuple(column) for column in zip(*team.share(trials), strict=True)]


def mean(trials: Iterable[Trial], read: Callable[[Trial], float]) -> float:
    """The mean of something over trials."""
    values = [read(of) for of in trials]
    return sum(values) / len(values)


def _prompts(loaded: LoadedModel, grid: Grid, seed: int) -> Iterator[_Prompt]:
    kinds: list[tuple[str, Make, tuple[float | None, ...]]] = [
        *((name, make, grid.depths) for name, make in WITH_DEPTH.items()),
        *((name, make, (None,)) for name, make in WITHOUT_DEPTH.items()),
    ]
    for name, make, depths in kinds:
        for length, depth, sample in product(grid.lengths_tokens, depths, range(grid.samples)):
            # The depth is no part of it: one problem moves through the text.
            key = f"{seed}/{name}/{length}/{sample}"
            problem = fit(make, length, 0.5 if depth is None else depth, key, loaded.tokenizer)
            yield _tokenized(loaded, problem, _Prompt(name, length, depth, sample, problem.answers, *_NOTHING))


_NOTHING = (torch.zeros(1, 0, dtype=torch.long),) * 3


def _tokenized(loaded: LoadedModel, problem: Problem, prompt: _Prompt) -> _Prompt:
    def ids(text: str, special: bool = False) -> Tensor:
        return torch.tensor([loaded.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]])

    gold = ids(" " + ", ".join(problem.answers))
    return prompt._replace(context=ids(problem.context, special=True), question=ids(problem.question), gold=gold)


def _tokens(prompt: _Prompt) -> int:
    return prompt.context.shape[1] + prompt.question.shape[1] + prompt.gold.shape[1] + SPARE_TOKENS


def _try(loaded: LoadedModel, build: Build, prompt: _Prompt, protocol: Protocol) -> Trial:
    def read() -> tuple[Reader, Tensor]:
        reader = Reader(loaded.model, build(loaded.model.config))
        reader.feed_in_chunks(prompt.context, protocol)
        return reader, reader.feed(prompt.question)

    found = answer(loaded, read, prompt.answers, prompt.gold)
    length = prompt.context.shape[1] + prompt.question.shape[1]
    return Trial(prompt.task, prompt.length_tokens, length, prompt.depth, prompt.sample, *found)
