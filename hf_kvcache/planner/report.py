"""A plan as tables for the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import transformers
from rich.table import Table

from ..units import Number, format_bytes, format_flops
from .capacity import USABLE_SHARE
from .plan import Plan, latent_values
from .prefix import Reuse
from .weights import active_parameters, parameter_count


def plan_tables(plan: Plan) -> Iterator[Table | str]:
    """What to print, from top to bottom."""
    yield from _head(plan)
    yield _bytes(plan)
    if plan.gpu is not None:
        yield _capacity(plan)
    yield _compute(plan)
    yield _bandwidth(plan)
    yield from _advice(plan)
    for warning in plan.warnings:
        yield f"Warning: {warning}"


def _head(plan: Plan) -> Iterator[str]:
    shape = plan.shape
    total, active = parameter_count(shape), active_parameters(shape)
    yield (
        f"{plan.model}: {total / 1e9:.2f} billion parameters, {active / 1e9:.2f} in matrices that one token meets; "
        f"{len(shape.layers)} layers; keys and values in {str(shape.dtype).removeprefix('torch.')}"
    )
    if plan.visible_bytes is not None:
        yield (
            f"Visible at {plan.tokens:,} tokens x {plan.rows}: {format_bytes(plan.visible_bytes)}; "
            "no exact cache holds less"
        )
    latent = latent_values(shape)
    if latent is not None:
        yield f"Latent attention: {latent[0]:,} values per token and layer; {latent[1]:,} if every head kept its own"


def _table(title: str, headings: tuple[str, ...], caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    return table


def _bytes(plan: Plan) -> Table:
    table = _table(
        f"Bytes at {plan.tokens:,} tokens x {plan.rows}{_ranks(plan)}",
        ("", *(cache.spec for cache in plan.caches)),
        f"1 GiB = 2^30 bytes. Cache: exact for transformers {transformers.__version__}. Activations: an estimate.",
    )
    rows: list[tuple[str, Sequence[Number]]] = [
        ("one more token of a row", [cache.token_bytes for cache in plan.caches]),
        ("what does not grow, per row", [cache.fixed_bytes for cache in plan.caches]),
        (f"weights, {plan.weights_dtype}", [cache.need.weight_bytes for cache in plan.caches]),
        ("cache", [cache.need.cache_bytes for cache in plan.caches]),
        *_groups(plan),
        ("cache right after the prefill", [cache.need.prefill_cache_bytes for cache in plan.caches]),
        ("activations of the prefill", [cache.need.activation_bytes for cache in plan.caches]),
        ("logits", [cache.need.logits_bytes for cache in plan.caches]),
        ("one tensor while it grows", [cache.need.growth_bytes for cache in plan.caches]),
        ("peak", [cache.need.peak_bytes for cache in plan.caches]),
    ]
    for name, sizes in rows:
        table.add_row(name, *map(format_bytes, sizes))
    return table


def _groups(plan: Plan) -> Iterator[tuple[str, list[int]]]:
    """The parts of each cache by what its layers keep; zero in a cache that has no such layers."""
    parts: list[dict[tuple[int, str], int]] = []
    for cache in plan.caches:
        layers: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for group in cache.groups:
            layers[group.kind] += group.layers
            sizes[group.kind] += group.total_bytes
        parts.append({(layers[kind], kind): size for kind, size in sizes.items()})
    for count, kind in dict.fromkeys(part for of_cache in parts for part in of_cache):
        yield f"  {count} x {kind}", [of_cache.get((count, kind), 0) for of_cache in parts]


def _capacity(plan: Plan) -> Table:
    gpu = plan.gpu
    assert gpu is not None  # noqa: S101 - the caller's condition
    names = [f"{cache.spec} {kind}" for cache in plan.caches for kind in ("ideal", "usable")]
    table = _table(
        f"What fits into {gpu.name} ({format_bytes(gpu.memory_bytes)})",
        ("", *names),
        f"ideal: weights and cache in all of the memory; usable: the peak in {USABLE_SHARE:.0%} of it",
    )
    longest = [f"{number:,}" for cache in plan.caches for number in cache.most_tokens or (0, 0)]
    table.add_row(f"longest text, {plan.rows} rows", *longest)
    for place, (tokens, *_) in enumerate(plan.caches[0].frontier):
        numbers = [number for cache in plan.caches for number in cache.frontier[place][1:]]
        table.add_row(f"most rows of {tokens:,}", *(f"{number:,}" for number in numbers))
    return table


def _compute(plan: Plan) -> Table:
    c = plan.compute
    prompt = plan.tokens - plan.new_tokens
    half = (
        "never half of it" if c.crossing_tokens == math.inf else f"half of it from {c.crossing_tokens:,.0f} tokens on"
    )
    table = _table(
        f"Operations of one row: {plan.new_tokens:,} tokens after {prompt:,}",
        ("", "with a cache", "without", "ratio"),
        f"attention is {c.sequence_share:.2%} of the sum with a cache, and {half}; a multiplication and an addition "
        "are 2 FLOP",
    )
    for name, cached, uncached in (
        ("last step", c.step_cached, c.step_uncached),
        ("sum", c.total_cached, c.total_uncached),
    ):
        table.add_row(name, format_flops(cached), format_flops(uncached), f"{uncached / cached:,.0f}")
    return table


def _bandwidth(plan: Plan) -> Table:
    table = _table(
        f"One decode step at {plan.tokens:,} tokens x {plan.rows}{_ranks(plan)}",
        ("", *(cache.spec for cache in plan.caches)),
        "at least: the bytes through the memory bus, or the operations at full speed, whichever takes longer",
    )
    steps = [cache.step for cache in plan.caches]
    lengths = [cache.outweighs_tokens for cache in plan.caches]
    table.add_row("reads weights", *(format_bytes(step.weight_bytes) for step in steps))
    table.add_row("reads cache", *(format_bytes(step.cache_bytes) for step in steps))
    table.add_row("operations per byte", *(f"{step.intensity:.2f}" for step in steps))
    table.add_row("more cache than weights from", *("never" if n is None else f"{n:,} tokens" for n in lengths))
    if plan.gpu is not None and plan.gpu.flops is not None:
        bounds = [step.bound_seconds(plan.gpu) or 0 for step in steps]
        table.add_row(f"at least, on {plan.gpu.name}", *(f"{1000 * bound:.3f} ms" for bound in bounds))
    return table


def _ranks(plan: Plan) -> str:
    return f", one of {plan.ranks} ranks" if plan.ranks > 1 else ""


def _advice(plan: Plan) -> Iterator[Table | str]:
    table = _table("Which cache", ("cache", "fits", "cache holds", "peak", "declares"))
    for choice in plan.advice:
        fits = {None: "-", True: "yes", False: "no"}[choice.fits]
        need = choice.need
        table.add_row(
            choice.spec, fits, format_bytes(need.cache_bytes), format_bytes(need.peak_bytes), choice.exactness
        )
    yield table
    yield "Check them with:"
    for choice in plan.advice:
        yield f"  {choice.command}"


def reuse_line(reuse: Reuse, prompt_tokens: int) -> str:
    """What a prefix cache saves, in one sentence."""
    text = f"Prefix reuse: {reuse.saved_tokens:,.0f} of {prompt_tokens:,} prompt tokens, "
    text += f"{format_flops(reuse.saved_flops)}"
    if reuse.saved_seconds is not None:
        text += f", at least {1000 * reuse.saved_seconds:,.1f} ms"
    if reuse.cost is not None and reuse.full_cost is not None:
        text += f"; the prompt costs {reuse.cost:.6g} instead of {reuse.full_cost:.6g}"
    return text
