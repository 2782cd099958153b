"""What a run is asked for, refused before anything runs if it cannot work: caches, and the sizes of everything."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.errors import ConfigError, InputError, KVCacheError
from hf_kvcache.evaluation.caches import Build, resolve_cache
from hf_kvcache.evaluation.models import position_limit
from hf_kvcache.evaluation.proofs import Kind
from hf_kvcache.evaluation.protocols import Protocol, forward
from hf_kvcache.evaluation.proving import capacity_tokens


@dataclass(frozen=True)
class Candidate:
    """One cache under measurement.

    Attributes:
        spec: The text that named it.
        build: Makes an empty one.
        declared: The class it claims for itself.
        reason: In its own words.
    """

    spec: str
    build: Build
    declared: Kind
    reason: str


def check_request(model: PreTrainedModel, caches: Sequence[str], needed: dict[str, int]) -> None:
    """Refuse what cannot work; `needed` are the tokens that each part of the run takes.

    Raises:
        InputError: No cache, an encoder-decoder, or more tokens than the model has positions.
    """
    if not caches:
        raise InputError("give at least one cache to evaluate, for example 'paged'")
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder; the evaluation scores decoder-only models")
    room = position_limit(model)
    for what, tokens in needed.items():
        if room is not None and tokens > room:
            raise InputError(f"{what} of {tokens:,} tokens is more than the {room:,} positions of this model")


def candidate(spec: str, protocol: Protocol, model: PreTrainedModel) -> Candidate:
    """Resolve a spec, try the cache it names on three tokens, and ask what it says about itself.

    Raises:
        SpecError: See `resolve_cache`.
        ConfigError: The cache cannot run on this model and machine.
    """
    build = resolve_cache(spec, capacity_tokens(protocol))
    cache = build(model.config)
    if cache is None:
        return Candidate(spec, build, "uncached", "every token is recomputed")
    _try(model, cache, spec)
    exactness = getattr(cache, "exactness", None)
    if exactness is None:
        return Candidate(spec, build, "undeclared", "")
    return Candidate(spec, build, cast("Kind", exactness.kind), str(exactness.reason))


def _try(model: PreTrainedModel, cache: Cache, spec: str) -> None:
    """Raise now what would otherwise stop the run halfway."""
    try:
        for ids in ([[0, 1]], [[2]]):
            forward(model, torch.tensor(ids, device=model.device), cache)
    except KVCacheError:
        raise
    except Exception as error:
        raise ConfigError(f"{spec!r} cannot run on this model and machine: {type(error).__name__}: {error}") from error
