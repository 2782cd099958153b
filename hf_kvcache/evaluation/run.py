"""Run an evaluation: everything that was asked for, with every cache, then a judgement of each."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.agreement import Prompts, default_prompts, measure_generation
from hf_kvcache.evaluation.audit import audit
from hf_kvcache.evaluation.caches import REFERENCE
from hf_kvcache.evaluation.candidates import Candidate, candidate, check_request
from hf_kvcache.evaluation.cost import CONTEXTS, measure_cost
from hf_kvcache.evaluation.environment import environment
from hf_kvcache.evaluation.exactness import judge
from hf_kvcache.evaluation.fidelity import fidelity
from hf_kvcache.evaluation.journal import Journal
from hf_kvcache.evaluation.models import LoadedModel, position_limit
from hf_kvcache.evaluation.processes import team
from hf_kvcache.evaluation.proofs import Audit, Kind, Proof
from hf_kvcache.evaluation.protocols import Protocol
from hf_kvcache.evaluation.proving import prove, steps
from hf_kvcache.evaluation.reference import StoredReference
from hf_kvcache.evaluation.results import CacheResult, ContradictionError, Results
from hf_kvcache.evaluation.retrieval import Grid, default_grid, measure_retrieval
from hf_kvcache.evaluation.scoring import ScoredText, score_text
from hf_kvcache.evaluation.strided import check_stride, strided_perplexity
from hf_kvcache.evaluation.tasks import DEFAULT_TASKS, needs_scoring, parse_tasks
from hf_kvcache.evaluation.windows import windows
from hf_kvcache.evaluation.workers import Workers

NOT_ASKED = "the task exactness was not asked for"
UNSCORED: dict[Kind, Kind] = {"uncached": "uncached", "approximate": "approximate"}
"""The class of a cache that no text went through; any other is not proven."""


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
    stride_tokens: int | None = None,
    seed: int = 0,
    dataset: str = "",
    folder: Path | None = None,
    reference: Path | None = None,
    progress: bool = True,
) -> Results:
    """Evaluate caches on a model and a text, against `DynamicCache` in the same dtype and against no cache.

    All caches are fed side by side, so the reference is computed once and nothing but a window of logits is
    held. Processes that were launched together (`accelerate launch`, `torchrun`) share windows and retrieval problems;
    the first one alone does the rest, and all of them return the same.

    Args:
        loaded: The model, as it is to be measured (dtype, device, attention), its tokenizer and name.
        documents: Texts; read lazily, no further than needed.
        caches: Specs, see `caches.py`.
        tasks: What to measure, see `tasks.py`.
        protocol: Window, prefill and chunk; the defaults of `Protocol` if None.
        grid: Problems of the retrieval task; `default_grid` if None.
        prompts: Of the generation task; `default_prompts` if None.
        contexts: Lengths of the history at which the cost task times a token.
        max_tokens: Tokens to score at most.
        stride_tokens: Also score whole documents, in windows that move on by so many tokens, see `strided.py`; None
            does not.
        seed: Of bootstrap draws and sampled generation.
        dataset: Name of the text, for the record.
        folder: Where finished windows and retrieval problems are kept while it runs: the same call after an
            interruption goes on from them. None keeps nothing.
        reference: Where the reference's logits are kept: those that are there take the place of computed ones, the
            others are added, see `reference.py`. None keeps none.
        progress: Whether to show progress bars.

    Raises:
        SpecError, ConfigError, InputError: Before anything runs, if something asked for is impossible.
        ContradictionError: A cache is not what it declares; the error's `results` hold all that was measured.
    """
    started = time.perf_counter()
    protocol, chosen = protocol or Protocol(), parse_tasks(tasks)
    grid = grid or default_grid(chosen)
    prompts = prompts or default_prompts(chosen, position_limit(loaded.model))
    needed = {"a window": protocol.window_tokens} if needs_scoring(chosen) or stride_tokens else {}
    needed |= {"a retrieval prompt": max(grid.lengths_tokens)} if "retrieval" in chosen else {}
    needed |= {"a prompt with its continuation": prompts.total_tokens} if "generation" in chosen else {}
    check_request(loaded.model, caches, needed)
    if stride_tokens is not None:
        check_stride(loaded.tokenizer, protocol.window_tokens, stride_tokens)
    rows = [candidate(spec, protocol, loaded.model) for spec in (REFERENCE, "none", *caches)]
    stored = StoredReference(reference, loaded, protocol) if reference and needs_scoring(chosen) else None
    others = {"max_tokens": max_tokens, "seed": seed, "dataset": dataset, "reference": stored and stored.maker}
    journal = Journal(folder, _request(loaded, rows, protocol, grid, **others))
    processes = team(loaded.model.device)
    progress = progress and processes.first
    scored = None
    proofs: list[Proof | str] = [NOT_ASKED] * len(rows)
    audits: list[Audit | str] = [NOT_ASKED] * len(rows)
    if needs_scoring(chosen):
        texts = windows(documents, loaded.tokenizer, protocol, max_tokens)
        builds = [row.build for row in rows]
        with tqdm(total=max_tokens, unit=" tokens", desc="scoring", disable=not progress) as bar:
            scored = score_text(loaded, builds, texts, protocol, journal, processes, bar.update, stored)
        if "exactness" in chosen:
            window = scored.window
            proofs = processes.by_first(lambda: _proofs(loaded.model, rows, window, seed, progress))
            audits = processes.by_first(lambda: _audits(loaded.model, rows, window, progress))
    plain, floor, *found = (
        _result(row, place, proofs[place], audits[place], scored=scored, seed=seed) for place, row in enumerate(rows)
    )
    measured = [plain, *found]
    specs = [of.spec for of in measured]
    if stride_tokens is not None:
        sizes = {
            "window_tokens": protocol.window_tokens,
            "stride_tokens": stride_tokens,
            "chunk_tokens": protocol.chunk_tokens,
            "max_tokens": max_tokens,
        }
        whole = processes.by_first(
            lambda: [strided_perplexity(loaded, documents, spec, **sizes, progress=progress) for spec in specs]
        )
        measured = [replace(of, strided=its) for of, its in zip(measured, whole, strict=True)]
    if "retrieval" in chosen:
        trials = measure_retrieval(loaded, specs, grid, protocol, seed, progress, journal, processes)
        measured = [replace(of, retrieval=its) for of, its in zip(measured, trials, strict=True)]
    if "generation" in chosen:
        written = processes.by_first(lambda: measure_generation(loaded, documents, specs, prompts, progress))
        measured = [replace(of, generation=its) for of, its in zip(measured, written, strict=True)]
    if "cost" in chosen:
        costs = processes.by_first(lambda: measure_cost(loaded, specs, contexts, seed, progress))
        measured = [replace(of, cost=its) for of, its in zip(measured, costs, strict=True)]
    results = Results(
        model=loaded.name,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        dataset=dataset,
        tasks=chosen,
        protocol=protocol,
        windows=len(scored.positions.lengths) if scored else 0,
        scored_tokens=len(scored.positions.targets) if scored else 0,
        seed=seed,
        reference=measured[0],
        noise_floor=floor,
        caches=tuple(measured[1:]),
        environment=environment(loaded.model)
        | {"processes": processes.count}
        | ({"reference": f"{stored.maker}, from {stored.folder}"} if stored else {}),
        seconds=time.perf_counter() - started,
        positions=scored.positions if scored else None,
    )
    if processes.first:
        journal.close()
    if results.failures:
        raise ContradictionError(results)
    return results


def _request(
    loaded: LoadedModel, rows: list[Candidate], protocol: Protocol, grid: Grid, **others: Any
) -> dict[str, Any]:
    """Everything that decides about a window's figures: what was asked for, and where it is computed."""
    weights = sum(of.numel() for of in loaded.model.parameters())
    return {
        "model": (loaded.name, str(loaded.model.dtype), weights),
        "caches": [row.spec for row in rows],
        "sizes": (str(protocol), str(grid)),
        "environment": environment(loaded.model),
        **others,
    }


def _proofs(
    model: PreTrainedModel, rows: list[Candidate], window: Tensor, seed: int, progress: bool
) -> list[Proof | str]:
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


def _audits(model: PreTrainedModel, rows: list[Candidate], window: Tensor, progress: bool) -> list[Audit | str]:
    """Audit every cache; text where there is no audit, saying why."""
    with Workers(model, len(rows)) as workers:
        audits = workers.map(lambda own, row: audit(own, row.build, window), rows)
        return list(tqdm(audits, total=len(rows), unit=" caches", desc="auditing", disable=not progress))


def _result(
    row: Candidate, place: int, proof: Proof | str, audited: Audit | str, *, scored: ScoredText | None, seed: int
) -> CacheResult:
    """Judge a cache by what was measured."""
    found = proof if isinstance(proof, Proof) else None
    history = audited if isinstance(audited, Audit) else None
    figures = None
    measured: Kind = UNSCORED.get(row.declared, "unproven")
    failures: tuple[str, ...] = ()
    if scored:
        samples = scored.samples
        figures = fidelity(samples[place], samples[0], samples[1], scored.positions, seed)
        identical = figures.identical if scored.comparable else None
        measured, failures = judge(row.declared, identical, figures.logit_difference_max, found, history)
    return CacheResult(
        spec=row.spec,
        declared=row.declared,
        declared_reason=row.reason,
        measured=measured,
        failures=failures,
        scores=figures,
        proof=found,
        proof_note="" if found else str(proof),
        audit=history,
        audit_note="" if history else str(audited),
        bytes_held=scored.bytes_held[place] if scored else 0,
        tokens_held=scored.tokens_held[place] if scored else 0,
        samples=scored.samples[place] if scored else None,
    )
