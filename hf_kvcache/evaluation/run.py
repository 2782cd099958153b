"""Run an evaluation: push one text through several caches side by side, then judge each."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.errors import ConfigError, InputError, KVCacheError
from hf_kvcache.evaluation import metrics
from hf_kvcache.evaluation.agreement import Prompts, measure_generation
from hf_kvcache.evaluation.caches import REFERENCE, Build, resolve_cache
from hf_kvcache.evaluation.cost import CONTEXTS, measure_cost
from hf_kvcache.evaluation.environment import environment
from hf_kvcache.evaluation.exactness import capacity_tokens, judge, prove, steps
from hf_kvcache.evaluation.fidelity import fidelity
from hf_kvcache.evaluation.journal import Journal, pack, unpack
from hf_kvcache.evaluation.memory import measured_bytes
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.protocols import Protocol, Scored, forward, stream
from hf_kvcache.evaluation.results import (
    CacheResult,
    ContradictionError,
    Fidelity,
    Kind,
    Positions,
    Proof,
    Results,
    Samples,
)
from hf_kvcache.evaluation.retrieval import Grid, measure_retrieval
from hf_kvcache.evaluation.tasks import DEFAULT_TASKS, needs_scoring, parse_tasks
from hf_kvcache.evaluation.windows import Window, count_units, windows

POSITIONS = 64
"""Positions whose float64 log-probabilities are held at once."""
NOT_ASKED: Proof | str = "the task exactness was not asked for"
UNSCORED: dict[Kind, Kind] = {"uncached": "uncached", "approximate": "approximate"}
"""The class of a cache that no text went through; any other is not proven."""


@dataclass
class Trace:
    """What is collected about one cache on the way: some 50 bytes a scored token, and nothing else that grows."""

    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    bytes_held: int = 0
    tokens_held: int = 0

    def add(self, reference: Tensor, reference_log_probs: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Compare some positions with the reference's."""
        reference_nll = metrics.negative_log_likelihood(reference_log_probs, targets)
        same = (reference == logits).all(dim=-1)
        if bool(same.all()):
            found = self._equal(reference_nll)
        else:
            log_probs = metrics.log_probabilities(logits)
            nll = metrics.negative_log_likelihood(log_probs, targets)
            found = {
                "nll": nll,
                "kl": metrics.kl_divergence(reference_log_probs, log_probs),
                "reverse_kl": metrics.kl_divergence(log_probs, reference_log_probs),
                "delta_p": (-nll).exp() - (-reference_nll).exp(),
                "top10": metrics.top_overlap(reference_log_probs, log_probs),
                "agrees": metrics.top1_agreement(reference_log_probs, log_probs),
                "logit_difference": torch.where(same, 0.0, (reference - logits).abs().amax(dim=-1).double()),
            }
        for name, values in (found | {"identical": same}).items():
            self.columns.setdefault(name, []).append(values.cpu())

    @staticmethod
    def _equal(reference_nll: Tensor) -> dict[str, Tensor]:
        """What comparing equal predictions gives, without computing it."""
        zeros = torch.zeros_like(reference_nll)
        return {
            "nll": reference_nll,
            "kl": zeros,
            "reverse_kl": zeros,
            "delta_p": zeros,
            "top10": zeros + 1,
            "agrees": torch.ones_like(zeros, dtype=torch.bool),
            "logit_difference": zeros,
        }

    def samples(self) -> Samples:
        """All positions, joined."""
        return Samples(**{name: torch.cat(pieces).numpy() for name, pieces in self.columns.items()})


@dataclass
class _Shared:
    """What is collected about the text on the way."""

    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, **values: Tensor) -> None:
        for name, of in values.items():
            self.columns.setdefault(name, []).append(of.cpu())

    def positions(self) -> Positions:
        lengths, words, bytes_ = torch.stack(self.counts).numpy().T
        columns = {name: torch.cat(pieces).numpy() for name, pieces in self.columns.items()}
        return Positions(**columns, lengths=lengths, words=words, bytes=bytes_)


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
    tasks: Iterable[str] = DEFAULT_TASKS,
    protocol: Protocol | None = None,
    grid: Grid | None = None,
    prompts: Prompts | None = None,
    contexts: Sequence[int] = CONTEXTS,
    max_tokens: int = 8192,
    seed: int = 0,
    dataset: str = "",
    folder: Path | None = None,
    progress: bool = True,
) -> Results:
    """Evaluate caches on a model and a text, against `DynamicCache` in the same dtype and against no cache.

    All caches are fed side by side, so the reference is computed once and nothing but a window of logits is
    held.

    Args:
        loaded: The model, as it is to be measured (dtype, device, attention), its tokenizer and name.
        documents: Texts; read lazily, no further than needed.
        caches: Specs, see `caches.py`.
        tasks: What to measure, see `tasks.py`.
        protocol: Window, prefill and chunk; the defaults of `Protocol` if None.
        grid: Problems of the retrieval task; the defaults of `Grid` if None.
        prompts: Of the generation task; the defaults of `Prompts` if None.
        contexts: Lengths of the history at which the cost task times a token.
        max_tokens: Tokens to score at most.
        seed: Of bootstrap draws and sampled generation.
        dataset: Name of the text, for the record.
        folder: Where finished windows and retrieval problems are kept while it runs: the same call after an
            interruption goes on from them. None keeps nothing.
        progress: Whether to show progress bars.

    Raises:
        SpecError, ConfigError, InputError: Before anything runs, if something asked for is impossible.
        ContradictionError: A cache is not what it declares; the error's `results` hold all that was measured.
    """
    started = time.perf_counter()
    protocol, chosen = protocol or Protocol(), parse_tasks(tasks)
    grid, prompts = grid or Grid(), prompts or Prompts()
    needed = {"a window": protocol.window_tokens} if needs_scoring(chosen) else {}
    needed |= {"a retrieval prompt": max(grid.lengths_tokens)} if "retrieval" in chosen else {}
    needed |= {"a prompt with its continuation": prompts.total_tokens} if "generation" in chosen else {}
    _check(loaded.model, caches, needed)
    rows = [_row(spec, protocol, loaded.model) for spec in (REFERENCE, "none", *caches)]
    journal = Journal(folder, _request(loaded, rows, protocol, grid, max_tokens=max_tokens, seed=seed, dataset=dataset))
    positions, proofs = None, [NOT_ASKED] * len(rows)
    if needs_scoring(chosen):
        texts = windows(documents, loaded.tokenizer, protocol, max_tokens)
        with tqdm(total=max_tokens, unit=" tokens", desc="scoring", disable=not progress) as bar:
            first, positions = _measure(loaded, rows, texts, protocol, journal, bar.update)
        if "exactness" in chosen:
            proofs = _proofs(loaded.model, rows, first, seed, progress)
    figures = _figures(rows, positions, seed)
    reference, floor, *found = [_result(*of) for of in zip(rows, proofs, figures, strict=True)]
    measured = [reference, *found]
    specs = [of.spec for of in measured]
    if "retrieval" in chosen:
        trials = measure_retrieval(loaded, specs, grid, protocol, seed, progress, journal)
        measured = [replace(of, retrieval=its) for of, its in zip(measured, trials, strict=True)]
    if "generation" in chosen:
        written = measure_generation(loaded, documents, specs, prompts, progress)
        measured = [replace(of, generation=its) for of, its in zip(measured, written, strict=True)]
    if "cost" in chosen:
        costs = measure_cost(loaded, specs, contexts, seed, progress)
        measured = [replace(of, cost=its) for of, its in zip(measured, costs, strict=True)]
    results = Results(
        model=loaded.name,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        dataset=dataset,
        tasks=chosen,
        protocol=protocol,
        windows=0 if positions is None else len(positions.lengths),
        scored_tokens=0 if positions is None else len(positions.targets),
        seed=seed,
        reference=measured[0],
        noise_floor=floor,
        caches=tuple(measured[1:]),
        environment=environment(loaded.model),
        seconds=time.perf_counter() - started,
        positions=positions,
    )
    journal.close()
    if results.failures:
        raise ContradictionError(results)
    return results


def _request(loaded: LoadedModel, rows: list[_Row], protocol: Protocol, grid: Grid, **others: Any) -> dict[str, Any]:
    """Everything that decides about a window's figures: what was asked for, and where it is computed."""
    weights = sum(of.numel() for of in loaded.model.parameters())
    return {
        "model": (loaded.name, str(loaded.model.dtype), weights),
        "caches": [row.spec for row in rows],
        "sizes": (str(protocol), str(grid)),
        "environment": environment(loaded.model),
        **others,
    }


def _check(model: PreTrainedModel, caches: Sequence[str], needed: dict[str, int]) -> None:
    """Refuse what cannot work; `needed` are the tokens that each part of the run takes."""
    if not caches:
        raise InputError("give at least one cache to evaluate, for example 'paged'")
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder; the evaluation scores decoder-only models")
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for what, tokens in needed.items():
        if positions is not None and tokens > positions:
            raise InputError(f"{what} of {tokens:,} tokens is more than the {positions:,} positions of this model")


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
    loaded: LoadedModel,
    rows: list[_Row],
    texts: Iterable[Window],
    protocol: Protocol,
    journal: Journal,
    advance: Callable[[int], object],
) -> tuple[Tensor, Positions]:
    """Score all windows through all caches. Gives the first window, and what all caches share."""
    shared = _Shared()
    first = torch.empty(0, dtype=torch.long)
    for number, window in enumerate(texts):
        first = first if number else window.ids
        kept = journal.load(f"window-{number}")
        arrays = unpack(kept) if kept else {}
        if np.array_equal(arrays.get("shared.targets", ()), window.ids[protocol.prefill_tokens + 1 :]):
            advance(len(arrays["shared.targets"]))
        else:  # not there, or of another text
            arrays = _score(loaded, rows, window, protocol, advance)
            journal.save(f"window-{number}", pack(arrays))
        _collect(arrays, rows, shared)
    return first, shared.positions()


def _score(
    loaded: LoadedModel, rows: list[_Row], window: Window, protocol: Protocol, advance: Callable[[int], object]
) -> dict[str, np.ndarray]:
    """Score one window through all caches: everything that is known about it, by name."""
    traces, shared = [Trace() for _ in rows], _Shared()
    made = [row.build(loaded.model.config) for row in rows]
    for chunks in zip(*(stream(loaded.model, cache, window.ids, protocol) for cache in made), strict=True):
        places = torch.arange(len(chunks[0].targets)) + chunks[0].first_position
        shared.add(targets=chunks[0].targets, distances=places, documents=window.documents[places])
        _compare(chunks, traces, shared)
        advance(len(places))
    columns = {"shared": shared.columns} | {str(place): of.columns for place, of in enumerate(traces)}
    scored = len(window.ids) - 1 - protocol.prefill_tokens
    return {
        "counts": np.array([scored, *count_units(window.ids, loaded.tokenizer, protocol)]),
        "held": np.array([[measured_bytes(of), 0 if of is None else len(window.ids) - 1] for of in made]),
        **{f"{who}.{name}": torch.cat(of).numpy() for who, found in columns.items() for name, of in found.items()},
    }


def _collect(arrays: dict[str, np.ndarray], rows: list[_Row], shared: _Shared) -> None:
    """Add what is known about a window to what was collected before; bytes are those of the first."""
    if not shared.counts:
        for row, (held, tokens) in zip(rows, arrays["held"].tolist(), strict=True):
            row.trace.bytes_held, row.trace.tokens_held = held, tokens
    shared.counts.append(torch.from_numpy(arrays["counts"]))
    for name, values in arrays.items():
        who, dot, column = name.partition(".")
        if dot:
            columns = shared.columns if who == "shared" else rows[int(who)].trace.columns
            columns.setdefault(column, []).append(torch.from_numpy(values))


def _compare(chunks: tuple[Scored, ...], traces: list[Trace], shared: _Shared) -> None:
    """Compare what each cache predicted for one chunk with the first one's predictions."""
    targets = chunks[0].targets
    for start in range(0, len(targets), POSITIONS):
        some = slice(start, start + POSITIONS)
        reference = chunks[0].logits[some]
        log_probs = metrics.log_probabilities(reference)
        shared.add(confidence=log_probs.amax(dim=-1).exp())
        for chunk, trace in zip(chunks, traces, strict=True):
            trace.add(reference, log_probs, chunk.logits[some], targets[some])


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


def _figures(rows: list[_Row], positions: Positions | None, seed: int) -> list[Fidelity | None]:
    if positions is None:
        return [None] * len(rows)
    samples = [row.trace.samples() for row in rows]
    return [fidelity(of, samples[0], samples[1], positions, seed) for of in samples]


def _result(row: _Row, proof: Proof | str, figures: Fidelity | None) -> CacheResult:
    found = proof if isinstance(proof, Proof) else None
    measured, failures = (
        (UNSCORED.get(row.declared, "unproven"), ())
        if figures is None
        else judge(row.declared, figures.identical, figures.logit_difference_max, found)
    )
    return CacheResult(
        spec=row.spec,
        declared=row.declared,
        declared_reason=row.reason,
        measured=measured,
        failures=failures,
        scores=figures,
        proof=found,
        proof_note="" if found else str(proof),
        bytes_held=row.trace.bytes_held,
        tokens_held=row.trace.tokens_held,
        samples=row.trace.samples() if figures else None,
    )
