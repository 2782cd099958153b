"""The three things a cache is used for, timed for several caches side by side: prefill, decode, beams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.bench.filling import States, fill
from hf_kvcache.bench.results import Held, Measurement, Task
from hf_kvcache.bench.timing import WARM_UP_ROUNDS, take_turns, timing
from hf_kvcache.errors import EvaluationError, KVCacheError
from hf_kvcache.evaluation.caches import Build
from hf_kvcache.evaluation.memory import measured_bytes
from hf_kvcache.evaluation.protocols import forward

BEAMS = 4
PREFILL_ROUNDS = 3
UNCACHED_ROUNDS = 3


class Contender(NamedTuple):
    """A cache under measurement: the text that names it, and its factory."""

    spec: str
    build: Build


class Bench(NamedTuple):
    """What all measurements of one benchmark share.

    Attributes:
        model: Under measurement.
        states: What it stores for each token.
        contenders: The reference first.
        seed: Of token ids, states and beam choices.
        advance: Called after each round, for a progress bar.
    """

    model: PreTrainedModel
    states: States
    contenders: tuple[Contender, ...]
    seed: int
    advance: Callable[[], object]


def measure_decode(bench: Bench, context_tokens: int, steps: int) -> list[Measurement]:
    """Feed one token at a time after a history of `context_tokens`; one measurement a contender."""
    return _decode(bench, "decode", context_tokens, rows=1, steps=steps)


def measure_beams(bench: Bench, context_tokens: int, steps: int) -> list[Measurement]:
    """Feed one token to each of 4 rows that hold the same prompt, then reorder the rows as beam search does.

    The rows to keep are drawn at random, the same ones for every cache.
    """
    return _decode(bench, "beams", context_tokens, rows=BEAMS, steps=steps)


def measure_prefill(bench: Bench, prompt_tokens: int) -> list[Measurement]:
    """Feed a prompt at once to an empty cache, as often as rounds are measured, until its logits are there."""
    ids = _token_ids(bench, 1, prompt_tokens)
    last: list[Cache | None] = [None] * len(bench.contenders)

    def prefill(place: int, _: int) -> None:
        contender = bench.contenders[place]
        last[place] = None  # its memory first, so that no two histories of one cache are held
        with _named(contender, bench.model):
            last[place] = contender.build(bench.model.config)
            forward(bench.model, ids, last[place], keep=1)

    steps = [partial(prefill, place) for place in range(len(bench.contenders))]
    times = take_turns(steps, PREFILL_ROUNDS, bench.model.device, warm_up=1, advance=bench.advance)
    return [
        Measurement("prefill", prompt_tokens, 1, timing(of, times[0]), held(cache, bench.states, prompt_tokens, 1))
        for of, cache in zip(times, last, strict=True)
    ]


def measure_uncached(bench: Bench, context_tokens: int) -> Measurement:
    """One token more without a cache: a pass over the whole text. Few rounds, and not in turns: it is slow."""
    ids = _token_ids(bench, 1, context_tokens + 1)
    [times] = take_turns(
        [lambda _: forward(bench.model, ids, None, keep=1)],
        UNCACHED_ROUNDS,
        bench.model.device,
        warm_up=1,
        advance=bench.advance,
    )
    return Measurement("decode", context_tokens, 1, timing(times, None), None)


def held(cache: Cache | None, states: States, tokens: int, rows: int) -> Held | None:
    """What `cache` holds now, beside what the formula gives for a history of `tokens` tokens."""
    if cache is None:
        return None
    memory = getattr(cache, "memory", None)
    return Held(
        tokens=tokens,
        total_bytes=measured_bytes(cache),
        formula_bytes=formula_bytes(states, tokens, rows),
        unused_bytes=int(memory().unused_bytes) if callable(memory) else None,
    )


def formula_bytes(states: States, tokens: int, rows: int) -> int:
    """2 L H_kv d_h b S B, written so that layers, and keys and values, may differ."""
    return sum(layer.token_bytes for layer in states.layers) * tokens * rows


def _decode(bench: Bench, task: Task, context_tokens: int, rows: int, steps: int) -> list[Measurement]:
    rounds = WARM_UP_ROUNDS + steps
    ids = _token_ids(bench, rows, rounds)
    generator = torch.Generator().manual_seed(bench.seed)
    kept_rows = torch.randint(rows, (rounds, rows), generator=generator).to(bench.model.device)
    caches = [_filled(bench, contender, context_tokens, rows) for contender in bench.contenders]

    def step(place: int, number: int) -> None:
        with _named(bench.contenders[place], bench.model):
            forward(bench.model, ids[:, number : number + 1], caches[place], keep=1)
            if rows > 1:
                _reorder(caches[place], kept_rows[number])

    turns = [partial(step, place) for place in range(len(caches))]
    times = take_turns(turns, steps, bench.model.device, advance=bench.advance)
    tokens = context_tokens + rounds
    return [
        Measurement(task, context_tokens, rows, timing(of, times[0]), held(cache, bench.states, tokens, rows))
        for of, cache in zip(times, caches, strict=True)
    ]


def _filled(bench: Bench, contender: Contender, tokens: int, rows: int) -> Cache:
    with _named(contender, bench.model):
        cache = contender.build(bench.model.config)
        if cache is None:
            raise ValueError("there is no cache to fill")
        fill(bench.model, cache, bench.states, tokens, rows, bench.seed)
        return cache


@torch.inference_mode()
def _reorder(cache: Any, kept_rows: Int[Tensor, " rows"]) -> None:
    cache.reorder_cache(kept_rows)


def _token_ids(bench: Bench, rows: int, tokens: int) -> Int[Tensor, "rows tokens"]:
    generator = torch.Generator().manual_seed(bench.seed)
    vocabulary = bench.model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (rows, tokens), generator=generator).to(bench.model.device)


@contextmanager
def _named(contender: Contender, model: PreTrainedModel) -> Iterator[None]:
    """Say which cache it was that could not run."""
    try:
        yield
    except KVCacheError as error:
        raise type(error)(f"{contender.spec}: {error}") from error
    except Exception as error:  # a foreign cache may raise anything
        message = (
            f"the cache {contender.spec!r} cannot run with {type(model).__name__} here: "
            f"{type(error).__name__}: {error} Leave it out."
        )
        raise EvaluationError(message) from error
