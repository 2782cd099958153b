"""Run an evaluation: push one text through several caches side by side, then judge each."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.errors import ConfigError, InputError, KVCacheError
from hf_kvcache.evaluation import metrics
from hf_kvcache.evaluation.caches import REFERENCE, Build, resolve_cache
from hf_kvcache.evaluation.environment import environment
from hf_kvcache.evaluation.exactness import capacity_tokens, judge, prove, steps
from hf_kvcache.evaluation.memory import measured_bytes
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.protocols import Protocol, Scored, forward, stream
from hf_kvcache.evaluation.results import (
    CacheResult,
    ContradictionError,
    Fidelity,
    Kind,
    Proof,
    Results,
    Samples,
)
from hf_kvcache.evaluation.windows import windows

POSITIONS = 64
"""Positions whose float64 log-probabilities are held at once."""


@dataclass
class Trace:
    """What is collected about one cache on the way: 17 bytes a scored token, and nothing else that grows."""

    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    logit_difference: float = 0.0
    identical: bool = True
    bytes_held: int = 0
    tokens_held: int = 0

    def add(self, reference: Tensor, reference_log_probs: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Compare some positions with the reference's."""
        log_probs = metrics.log_probabilities(logits)
        self.nll.append(metrics.negative_log_likelihood(log_probs, targets).cpu())
        self.kl.append(metrics.kl_divergence(reference_log_probs, log_probs).cpu())
        self.agrees.append(metrics.top1_agreement(reference_log_probs, log_probs).cpu())
        if not torch.equal(reference, logits):
            self.identical = False
            largest = float((reference - logits).abs().max())
            self.logit_difference = float(np.maximum(self.logit_difference, largest))  # a NaN stays

    def samples(self, lengths: Sequence[int]) -> Samples:
        """All positions, joined."""
        nll, kl, agrees = (torch.cat(of).numpy() for of in (self.nll, self.kl, self.agrees))
        return Samples(nll, kl, agrees, np.asarray(lengths))


@dataclass(frozen=True)
class _Row:
    """One cache under measurement."""

    spec: str
    build: Build
    declared: Kind
    reason: str
    trace: Trace = field(default_factory=Trace)


def evaluate(
    loaded: LoadedModel,
    documents: Iterable[str],
    caches: Sequence[str],
    *,
    protocol: Protocol | None = None,
    max_tokens: int = 8192,
    seed: int = 0,
    dataset: str = "",
    progress: bool = True,
) -> Results:
    """Evaluate caches on a model and a text, against `DynamicCache` in the same dtype and against no cache.

    All caches are fed side by side, so the reference is computed once and nothing but a window of logits is
    held.

    Args:
        loaded: The model, as it is to be measured (dtype, device, attention), its tokenizer and name.
        documents: Texts; read lazily, no further than needed.
        caches: Specs, see `caches.py`.
        protocol: Window, prefill and chunk; the defaults of `Protocol` if None.
        max_tokens: Tokens to score at most.
        seed: Of bootstrap draws and sampled generation.
        dataset: Name of the text, for the record.
        progress: Whether to show progress bars.

    Raises:
        SpecError, ConfigError, InputError: Before anything runs, if something asked for is impossible.
        ContradictionError: A cache is not what it declares; the error's `results` hold all that was measured.
    """
    started = time.perf_counter()
    protocol = protocol or Protocol()
    _check(loaded.model, caches, protocol)
    rows = [_row(spec, protocol, loaded.model) for spec in (REFERENCE, "none", *caches)]
    texts = windows(documents, loaded.tokenizer, protocol, max_tokens)
    with tqdm(total=max_tokens, unit=" tokens", desc="scoring", disable=not progress) as bar:
        first, lengths = _measure(loaded.model, rows, texts, protocol, bar.update)
    proofs = _proofs(loaded.model, rows, first, seed, progress)
    reference = rows[0].trace.samples(lengths)
    found = [_result(row, proof, reference, lengths, seed) for row, proof in zip(rows, proofs, strict=True)]
    results = Results(
        model=loaded.name,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        dataset=dataset,
        protocol=protocol,
        windows=len(lengths),
        scored_tokens=sum(lengths),
        seed=seed,
        reference=found[0],
        noise_floor=found[1],
        caches=tuple(found[2:]),
        environment=environment(loaded.model),
        seconds=time.perf_counter() - started,
    )
    if results.failures:
        raise ContradictionError(results)
    return results


def _check(model: PreTrainedModel, caches: Sequence[str], protocol: Protocol) -> None:
    if not caches:
        raise InputError("give at least one cache to evaluate, for example 'paged'")
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder; the evaluation scores decoder-only models")
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and protocol.window_tokens > longest:
        raise InputError(
            f"a window of {protocol.window_tokens} tokens is more than the {longest} positions of this model"
        )


def _row(spec: str, protocol: Protocol, model: PreTrainedModel) -> _Row:
    """Resolve a spec, try the cache it names on three tokens, and ask what it says about itself."""
    build = resolve_cache(spec, capacity_tokens(protocol))
    cache = build(model.config)
    if cache is None:
        return _Row(spec, build, "uncached", "every token is recomputed")
    _try(model, cache, spec)
    exactness = getattr(cache, "exactness", None)
    if exactness is None:
        return _Row(spec, build, "undeclared", "")
    return _Row(spec, build, cast("Kind", exactness.kind), str(exactness.reason))


def _try(model: PreTrainedModel, cache: Cache, spec: str) -> None:
    """Raise now what would otherwise stop the run halfway."""
    try:
        for ids in ([[0, 1]], [[2]]):
            forward(model, torch.tensor(ids, device=model.device), cache)
    except KVCacheError:
        raise
    except Exception as error:
        raise ConfigError(f"{spec!r} cannot run on this model and machine: {type(error).__name__}: {error}") from error


def _measure(
    model: PreTrainedModel,
    rows: list[_Row],
    texts: Iterable[Tensor],
    protocol: Protocol,
    advance: Callable[[int], object],
) -> tuple[Tensor, list[int]]:
    """Score all windows through all caches. Gives the first window, and the scored tokens of each."""
    lengths: list[int] = []
    first = torch.empty(0, dtype=torch.long)
    for window in texts:
        made = [row.build(model.config) for row in rows]
        for chunks in zip(*(stream(model, cache, window, protocol) for cache in made), strict=True):
            _compare(chunks, rows)
            advance(len(chunks[0].targets))
        if not lengths:
            first = window
            for row, cache in zip(rows, made, strict=True):
                row.trace.bytes_held = measured_bytes(cache)
                row.trace.tokens_held = 0 if cache is None else len(window) - 1
        lengths.append(len(window) - 1 - protocol.prefill_tokens)
    return first, lengths


def _compare(chunks: tuple[Scored, ...], rows: list[_Row]) -> None:
    """Compare what each cache predicted for one chunk with the first one's predictions."""
    targets = chunks[0].targets
    for start in range(0, len(targets), POSITIONS):
        some = slice(start, start + POSITIONS)
        reference = chunks[0].logits[some]
        log_probs = metrics.log_probabilities(reference)
        for chunk, row in zip(chunks, rows, strict=True):
            row.trace.add(reference, log_probs, chunk.logits[some], targets[some])


def _proofs(model: PreTrainedModel, rows: list[_Row], window: Tensor, seed: int, progress: bool) -> list[Proof | str]:
    """Prove every cache that does not call itself approximate; text where there is no proof, saying why."""
    notes: dict[Kind, str] = {
        "uncached": "there is no cache to prove",
        "approximate": "declares itself approximate",
    }
    chosen = [row for row in rows[1:] if row.declared not in notes]
    with tqdm(total=steps(len(chosen)), unit=" steps", desc="proving in float64", disable=not progress) as bar:
        try:
            found = prove(model, [row.build for row in chosen], window, seed, lambda: bar.update(1))
        except InputError as error:
            found = [str(error)] * (len(chosen) + 1)
    remaining = iter(found)
    return [notes[row.declared] if row.declared in notes else next(remaining) for row in rows]


def _result(row: _Row, proof: Proof | str, reference: Samples, lengths: list[int], seed: int) -> CacheResult:
    samples, trace = row.trace.samples(lengths), row.trace
    found = proof if isinstance(proof, Proof) else None
    measured, failures = judge(row.declared, trace.identical, trace.logit_difference, found)
    return CacheResult(
        spec=row.spec,
        declared=row.declared,
        declared_reason=row.reason,
        measured=measured,
        failures=failures,
        fidelity=fidelity(samples, reference, trace.logit_difference, trace.identical, seed),
        proof=found,
        proof_note="" if found else str(proof),
        bytes_held=trace.bytes_held,
        tokens_held=trace.tokens_held,
        samples=samples,
    )


def fidelity(samples: Samples, reference: Samples, logit_difference: float, identical: bool, seed: int) -> Fidelity:
    """Summarize the positions of one cache against those of the reference."""
    lengths = samples.lengths
    return Fidelity(
        perplexity=metrics.perplexity(samples.nll, lengths, seed),
        perplexity_difference=metrics.perplexity_difference(samples.nll, reference.nll, lengths, seed),
        nll_difference=metrics.window_mean(samples.nll - reference.nll, lengths, seed),
        kl_mean=metrics.window_mean(samples.kl, lengths, seed),
        kl_p99=float(np.quantile(samples.kl, 0.99)),
        kl_max=float(samples.kl.max()),
        top1_agreement=metrics.window_mean(samples.agrees.astype(np.float64), lengths, seed),
        logit_difference_max=logit_difference,
        identical=identical,
    )
