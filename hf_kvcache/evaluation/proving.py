"""The float64 proof: does a cache give the same real numbers as no cache, however the text is fed and continued?"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.evaluation.caches import REFERENCE, Build, resolve_cache
from hf_kvcache.evaluation.detours import Copies, Detour, RefusedError, cropped, read, straight
from hf_kvcache.evaluation.float64 import KeepFloat64, in_float64
from hf_kvcache.evaluation.generation import MODES, NEW_TOKENS, Generated, compare, generate
from hf_kvcache.evaluation.proofs import Difference, GenerationCheck, Proof
from hf_kvcache.evaluation.protocols import Protocol, forward
from hf_kvcache.evaluation.workers import Workers

PROOF_TOKENS = 640
PROMPT_TOKENS = 120
SINGLE_TOKENS = 32
TOLERANCE = 1e-9
WAYS = ("chunk by chunk", "token by token", "after steps taken back", "from copies")

T = TypeVar("T")


def prove(
    model: PreTrainedModel,
    builds: list[Build],
    window: Int[Tensor, " tokens"],
    seed: int = 0,
    step: Callable[[], object] = lambda: None,
) -> list[Proof | str]:
    """Prove caches on `model` in float64, with at most `PROOF_TOKENS` tokens of `window`.

    Logits of every position after the prefill are compared with a run without a cache: fed in chunks (of a
    size that crosses block boundaries at odd places), token by token, after other tokens that were taken back, and from
    copies whose originals went on in another way. Generation is compared with `DynamicCache` in every mode.

    Args:
        model: Turned to float64 meanwhile and back exactly.
        builds: One factory for each cache; a fresh cache is made for each run.
        window: Token ids, at least 16.
        seed: Of sampled generation.
        step: Called as work goes on, `steps(len(builds))` times if all goes well.

    Returns:
        The proof of `DynamicCache` itself (its generation is the yardstick, so that part is empty), then one
        for each factory; text instead where the cache cannot run in float64, saying why.

    Raises:
        InputError: The model has no float64 twin (quantized weights).
    """
    window = window[:PROOF_TOKENS]
    caches = [resolve_cache(REFERENCE, len(window)), *builds]
    modes = tuple(MODES) if builds else ()

    def counted(results: Iterator[T], count: int) -> Iterator[T]:
        for result in islice(results, count):
            step()
            yield result

    with torch.inference_mode(), in_float64(model) as attention:
        scored = len(window) - 1 - _chunked(window).prefill_tokens
        logits = forward(model, window[None, :-1].to(model.device), None, keep=scored)[0]
        step()
        with Workers(model, len(caches) * len(WAYS)) as workers:
            reading = workers.map(lambda own, of: _difference(own, *of, window, logits), product(caches, WAYS))
            writing = workers.map(lambda own, of: _continued(own, *of, window, seed), product(caches, modes))
            differences = [tuple(counted(reading, len(WAYS))) for _ in caches]
            continued = [tuple(counted(writing, len(modes))) for _ in caches]
    scale = float(logits.abs().max())
    found: list[Proof | str] = []
    for ways, texts in zip(differences, continued, strict=True):
        checks = () if texts is continued[0] else map(_check, modes, continued[0], texts)
        errors = [of for of in ways if isinstance(of, str)]
        measured = tuple(of for of in ways if isinstance(of, Difference))
        proof = Proof(attention, len(window) - 1, scale, TOLERANCE * scale, measured, tuple(checks))
        found.append(errors[0] if errors else proof)
    return found


def steps(caches: int) -> int:
    """How often `prove` calls `step` for so many caches."""
    return 1 + (1 + caches) * (len(WAYS) + (len(MODES) if caches else 0))


@torch.inference_mode()
def _difference(
    model: PreTrainedModel,
    build: Build,
    mode: str,
    window: Int[Tensor, " tokens"],
    expected: Float[Tensor, "positions vocabulary"],
) -> Difference | str:
    """Read a window in one of `WAYS`, and compare with the logits without a cache; text if the cache cannot."""
    protocol, detour = _way(mode, window)
    largest, place = 0.0, protocol.prefill_tokens - _chunked(window).prefill_tokens
    try:
        with KeepFloat64():  # of this thread
            for logits in read(model, _made(build, model), window[: protocol.window_tokens], protocol, detour):
                difference = (logits - expected[place : place + len(logits)]).abs().max()
                largest, place = float(torch.maximum(difference, difference.new_tensor(largest))), place + len(logits)
    except RefusedError as error:
        return Difference(mode, 0, math.nan, str(error))
    except Exception as error:  # noqa: BLE001 - a foreign cache may raise anything: that is a finding
        return f"its run in float64 raised {type(error).__name__}: {error}"
    return Difference(mode, protocol.scored_tokens, largest)


def _way(mode: str, window: Int[Tensor, " tokens"]) -> tuple[Protocol, Detour]:
    chunked = _chunked(window)
    if mode == "chunk by chunk":
        return chunked, straight
    if mode == "token by token":
        single = min(SINGLE_TOKENS, len(window) // 2)
        return Protocol(len(window), len(window) - 1 - single, chunk_tokens=1), straight
    part = replace(chunked, window_tokens=max(chunked.prefill_tokens + 2, len(window) * 5 // 8))
    return part, cropped if mode == "after steps taken back" else Copies()


@torch.inference_mode()
def _continued(
    model: PreTrainedModel, build: Build, mode: str, window: Int[Tensor, " tokens"], seed: int
) -> Generated | Exception:
    """What is generated after the first tokens of a window, or what was raised."""
    try:
        with KeepFloat64():  # of this thread
            return generate(model, _made(build, model), window[:PROMPT_TOKENS], mode, seed)
    except Exception as error:  # noqa: BLE001 - a foreign cache may raise anything: that is a finding
        return error


def _check(mode: str, expected: Generated | Exception, found: Generated | Exception) -> GenerationCheck:
    if isinstance(expected, Exception):
        raise expected
    if isinstance(found, Exception):
        return GenerationCheck(mode, False, None, None, math.nan, f"{type(found).__name__}: {found}")
    return compare(mode, expected, found)


def _chunked(window: Int[Tensor, " tokens"]) -> Protocol:
    """A quarter as prefill, the rest in chunks of 48: a block of 64 or 128 is filled in odd pieces."""
    return Protocol(len(window), len(window) // 4, chunk_tokens=max(2, min(48, len(window) // 5)))


def _made(build: Build, model: PreTrainedModel) -> Cache:
    cache = build(model.config)
    if cache is None:
        raise ValueError("there is no cache to prove")
    return cache


def capacity_tokens(protocol: Protocol) -> int:
    """Tokens that a cache of fixed size must be able to hold for all that is measured here."""
    return max(protocol.window_tokens, PROMPT_TOKENS) + 2 * NEW_TOKENS
