"""Is a cache exact? A proof in float64, and a verdict on what the cache claims."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.evaluation.caches import REFERENCE, Build, resolve_cache
from hf_kvcache.evaluation.detours import Copies, Detour, RefusedError, cropped, read, straight
from hf_kvcache.evaluation.float64 import in_float64
from hf_kvcache.evaluation.generation import MODES, NEW_TOKENS, Generated, compare, generate
from hf_kvcache.evaluation.proofs import Audit, Difference, GenerationCheck, Kind, Proof
from hf_kvcache.evaluation.protocols import Protocol, forward

PROOF_TOKENS = 640
PROMPT_TOKENS = 120
SINGLE_TOKENS = 32
TOLERANCE = 1e-9


class Float64Reference(NamedTuple):
    """What caches are proven against: logits without a cache, and generation with `DynamicCache`."""

    attention: str
    window: Int[Tensor, " tokens"]
    logits: Float[Tensor, "positions vocabulary"]
    generated: dict[str, Generated]


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
    with torch.inference_mode(), in_float64(model) as attention:
        modes = tuple(MODES) if builds else ()
        reference = _reference(model, attention, window[:PROOF_TOKENS], modes=modes, seed=seed, step=step)
        yardstick = _prove_one(model, _dynamic(window), reference._replace(generated={}), seed, step)
        return [yardstick, *(_prove_one(model, build, reference, seed, step) for build in builds)]


def steps(caches: int) -> int:
    """How often `prove` calls `step` for so many caches."""
    logits, modes = 4, len(MODES) if caches else 0
    return 1 + logits + modes + caches * (logits + modes)


def judge(
    declared: Kind, identical: bool | None, difference: float, proof: Proof | None, audit: Audit | None = None
) -> tuple[Kind, tuple[str, ...]]:
    """Give the class that the measurements support, and where they contradict the claim.

    Args:
        declared: What the cache claims.
        identical: Whether all working-dtype logits were bitwise those of the reference; None if the reference is of
            another run, so that they cannot be.
        difference: The largest of those logit differences; not finite if there were NaNs.
        proof: The float64 proof, if it was run.
        audit: What became of stored states, if that was looked at.
    """
    measured: Kind
    if declared == "uncached":
        return "uncached", ()
    if proof is not None and not proof.complaints:
        measured = "bitwise" if identical else "rounding"
    elif proof is None:
        measured = "bitwise" if identical else "approximate" if declared == "approximate" else "unproven"
    else:
        measured = "approximate"
    failures: list[str] = []
    if not math.isfinite(difference):
        failures.append("logits are not finite numbers where the reference's are")
    if declared == "approximate" and identical:
        failures.append(
            "declares itself approximate, but every logit is bitwise the reference's: it never engaged. "
            "Score a longer window, or look whether its parameters leave it anything to do"
        )
    if declared == "bitwise" and identical is False:
        failures.append(
            f"declares itself bitwise exact, but logits differ by up to {difference:.3g} in the working dtype"
        )
    if declared in ("bitwise", "rounding") and proof is not None:
        texts = proof.complaints + proof.generation_refusals
        failures.extend(f"declares itself exact ({declared}), but in float64, {text}" for text in texts)
    if declared in ("bitwise", "rounding") and audit is not None and audit.complaint:
        failures.append(f"declares itself exact ({declared}), but {audit.complaint}")
    return measured, tuple(failures)


def _reference(
    model: PreTrainedModel,
    attention: str,
    window: Tensor,
    *,
    modes: tuple[str, ...],
    seed: int,
    step: Callable[[], object],
) -> Float64Reference:
    positions = len(window) - 1 - _chunked(window).prefill_tokens
    logits = forward(model, window[None, :-1].to(model.device), None, keep=positions)[0]
    step()
    generated: dict[str, Generated] = {}
    for mode in modes:
        generated[mode] = generate(model, _made(_dynamic(window), model), window[:PROMPT_TOKENS], mode, seed)
        step()
    return Float64Reference(attention, window, logits, generated)


def _prove_one(
    model: PreTrainedModel, build: Build, reference: Float64Reference, seed: int, step: Callable[[], object]
) -> Proof | str:
    scale = float(reference.logits.abs().max())
    try:
        differences = tuple(_differences(model, build, reference, step))
    except Exception as error:  # noqa: BLE001 - a foreign cache may raise anything: that is a finding
        return f"its run in float64 raised {type(error).__name__}: {error}"
    checks: list[GenerationCheck] = []
    for mode, expected in reference.generated.items():
        prompt = reference.window[:PROMPT_TOKENS]
        checks.append(_generation(model, build, prompt, mode, expected=expected, seed=seed))
        step()
    return Proof(reference.attention, len(reference.window) - 1, scale, TOLERANCE * scale, differences, tuple(checks))


def _differences(
    model: PreTrainedModel, build: Build, reference: Float64Reference, step: Callable[[], object]
) -> Iterator[Difference]:
    window, chunked = reference.window, _chunked(reference.window)
    single = min(SINGLE_TOKENS, len(window) // 2)
    begin = chunked.prefill_tokens
    part = replace(chunked, window_tokens=max(begin + 2, len(window) * 5 // 8))
    ways: dict[str, tuple[Protocol, Detour]] = {
        "chunk by chunk": (chunked, straight),
        "token by token": (Protocol(len(window), len(window) - 1 - single, chunk_tokens=1), straight),
        "after steps taken back": (part, cropped),
        "from copies": (part, Copies()),
    }
    for mode, (protocol, detour) in ways.items():
        largest, place = 0.0, protocol.prefill_tokens - begin
        try:
            for logits in read(model, _made(build, model), window[: protocol.window_tokens], protocol, detour):
                difference = (logits - reference.logits[place : place + len(logits)]).abs().max()
                largest, place = float(torch.maximum(difference, difference.new_tensor(largest))), place + len(logits)
        except RefusedError as error:
            yield Difference(mode, 0, math.nan, str(error))
        else:
            yield Difference(mode, protocol.scored_tokens, largest)
        step()


def _generation(
    model: PreTrainedModel, build: Build, prompt: Tensor, mode: str, *, expected: Generated, seed: int
) -> GenerationCheck:
    try:
        found = generate(model, _made(build, model), prompt, mode, seed)
    except Exception as error:  # noqa: BLE001 - a foreign cache may raise anything: that is a finding
        return GenerationCheck(mode, False, None, None, float("nan"), f"{type(error).__name__}: {error}")
    return compare(mode, len(prompt), expected, found)


def _chunked(window: Int[Tensor, " tokens"]) -> Protocol:
    """A quarter as prefill, the rest in chunks of 48: a block of 64 or 128 is filled in odd pieces."""
    return Protocol(len(window), len(window) // 4, chunk_tokens=max(2, min(48, len(window) // 5)))


def _dynamic(window: Int[Tensor, " tokens"]) -> Build:
    return resolve_cache(REFERENCE, len(window))


def _made(build: Build, model: PreTrainedModel) -> Cache:
    cache = build(model.config)
    if cache is None:
        raise ValueError("there is no cache to prove")
    return cache


def capacity_tokens(protocol: Protocol) -> int:
    """Tokens that a cache of fixed size must be able to hold for all that is measured here."""
    return max(protocol.window_tokens, PROMPT_TOKENS) + 2 * NEW_TOKENS
