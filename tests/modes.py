"""Every way to call `generate`, each as a function of a model and a cache; no cache means `use_cache=False`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from architectures import VOCABULARY, tiny_model
from strategies import CACHE_ARGUMENT, dynamic_cache, whole_cache
from torch import Tensor
from transformers import Cache, PreTrainedModel

NEW_TOKENS = 10
PROMPT_TOKENS = 21  # five blocks of 4 and a bit; more than a block of 16; more than two windows of 8


class Generation(NamedTuple):
    """New tokens [rows, new], logits of each step [steps, rows, vocabulary], and the tokens a cache must have seen."""

    tokens: Tensor
    logits: Tensor
    tokens_seen: int


Mode = Callable[[PreTrainedModel, Cache | None], Generation]


def prompt(rows: int = 1, tokens: int = PROMPT_TOKENS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)


def generate(model: PreTrainedModel, cache: Cache | None, input_ids: Tensor, **options: object) -> Generation:
    """`model.generate`, with the logits in the model's own dtype (`output_logits` rounds them to float32)."""
    recorded: list[Tensor] = []
    hook = model.register_forward_hook(lambda _module, _inputs, output: recorded.append(output.logits[:, -1]))
    given = {"use_cache": False} if cache is None else {CACHE_ARGUMENT: cache}
    options = {
        "attention_mask": torch.ones_like(input_ids),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        **given,
        **options,
    }
    try:
        output = model.generate(input_ids, **options)
    finally:
        hook.remove()
    steps = len(output.logits)
    several_tokens_a_step = "assistant_model" in options or "prompt_lookup_num_tokens" in options
    logits = torch.stack(output.logits if several_tokens_a_step else recorded[-steps:])
    fed = 1 if model.config.is_encoder_decoder else input_ids.shape[1]
    return Generation(output.sequences[:, fed:], logits, output.sequences.shape[1] - 1)


def greedy(model: PreTrainedModel, cache: Cache | None) -> Generation:
    return generate(model, cache, prompt())


def batch(model: PreTrainedModel, cache: Cache | None) -> Generation:
    return generate(model, cache, prompt(rows=3))


def sampling(model: PreTrainedModel, cache: Cache | None) -> Generation:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return generate(model, cache, prompt(), do_sample=True)


def sampling_return_sequences(model: PreTrainedModel, cache: Cache | None) -> Generation:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return generate(model, cache, prompt(rows=2), do_sample=True, num_return_sequences=3)


def beams(model: PreTrainedModel, cache: Cache | None) -> Generation:
    return generate(model, cache, prompt(), num_beams=4)


def beams_return_sequences(model: PreTrainedModel, cache: Cache | None) -> Generation:
    return generate(model, cache, prompt(rows=2), num_beams=4, num_return_sequences=3)


def padded_rows() -> list[Tensor]:
    return [prompt(tokens=tokens, seed=tokens) for tokens in (PROMPT_TOKENS, 13, 5)]


def padded_batch(model: PreTrainedModel, cache: Cache | None) -> Generation:
    """Rows of three lengths: padded on the left, or on the right where an encoder with learned positions reads them."""
    rows = padded_rows()
    ids = torch.zeros(len(rows), PROMPT_TOKENS, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        tokens = row.shape[1]
        columns = slice(0, tokens) if model.config.is_encoder_decoder else slice(PROMPT_TOKENS - tokens, None)
        ids[index, columns] = row[0]
        mask[index, columns] = 1
    return generate(model, cache, ids, attention_mask=mask)


def assisted(model: PreTrainedModel, cache: Cache | None) -> Generation:
    """Drafted by a model with nearly the same weights."""
    if cache is None:
        return greedy(model, None)
    return generate(model, cache, prompt(), assistant_model=assistant_of(model))


@functools.cache
def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model with slightly disturbed weights: some of its drafts are accepted, some are not."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.3 * noise / parameter.shape[-1] ** 0.5).to(parameter.dtype))
    return assistant


def prompt_lookup(model: PreTrainedModel, cache: Cache | None) -> Generation:
    repeated = prompt(tokens=7).repeat(1, 3)
    if cache is None:
        return generate(model, None, repeated)
    return generate(model, cache, repeated, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)


def chunked_prefill(model: PreTrainedModel, cache: Cache | None) -> Generation:
    return generate(model, cache, prompt(), prefill_chunk_size=None if cache is None else 5)


def _second_turn(model: PreTrainedModel, cache: Cache | None) -> Tensor:
    """Everything the second turn of a conversation has to know: prompt, answer, question."""
    first = generate(model, cache, prompt(rows=2), max_new_tokens=6)
    return torch.cat([prompt(rows=2), first.tokens, prompt(rows=2, tokens=5, seed=1)], dim=1)


def conversation_all_ids(model: PreTrainedModel, cache: Cache | None) -> Generation:
    return generate(model, cache, _second_turn(model, cache))


def conversation_new_ids(model: PreTrainedModel, cache: Cache | None) -> Generation:
    """Only what the cache has not seen, with the mask of everything."""
    ids = _second_turn(model, cache)
    if cache is None:
        return generate(model, None, ids)
    second = generate(model, cache, ids[:, cache.get_seq_length() :], attention_mask=torch.ones_like(ids))
    return second._replace(tokens_seen=ids.shape[1] + NEW_TOKENS - 1)


MODES: dict[str, Mode] = {
    mode.__name__: mode
    for mode in (
        greedy,
        batch,
        sampling,
        sampling_return_sequences,
        beams,
        beams_return_sequences,
        padded_batch,
        assisted,
        prompt_lookup,
        chunked_prefill,
        conversation_all_ids,
        conversation_new_ids,
    )
}
NEEDS_CROP = {"assisted", "prompt_lookup"}
DECODER_ONLY = {"chunked_prefill", "conversation_all_ids", "conversation_new_ids"}


@functools.cache
def reference(architecture: str, mode: str, dtype: torch.dtype, attention: str | None, *, cached: bool) -> Generation:
    """What the mode gives without a cache, or with transformers' `DynamicCache`."""
    model = tiny_model(architecture, dtype, attention)
    return MODES[mode](model, whole_cache(model, dynamic_cache(model)) if cached else None)
