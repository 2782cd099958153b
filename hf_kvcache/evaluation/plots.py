"""The plots of an evaluation, as PNG files; drawn without a display or pyplot's global state."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_kvcache.evaluation.heatmaps import write_heatmap
from hf_kvcache.evaluation.results import CacheResult, Results
from hf_kvcache.evaluation.tables import label, measured, scored
from hf_kvcache.evaluation.verdicts import pareto_front

SMALLEST_KL = 1e-16
"""Where a logarithmic axis ends: a divergence of zero is drawn here."""


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Draw what there are results for; gives the files."""
    files = []
    for name, draw in _chosen(results).items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        draw(figure.add_subplot(), results)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    if results.reference.retrieval:
        files.append(write_heatmap(results, folder))
    return files


def _chosen(results: Results) -> dict[str, Callable[[Axes, Results], None]]:
    plots: dict[str, Callable[[Axes, Results], None]] = {}
    if "fidelity" in results.tasks:
        plots |= {"kl": _divergence, "bytes": _bytes}
    if "fidelity" in results.tasks and "cost" in results.tasks:
        plots |= {"speed": _speed}
    if "perplexity" in results.tasks:
        plots |= {"perplexity": _perplexity}
    return plots


def _divergence(axes: Axes, results: Results) -> None:
    """Share of positions whose divergence is larger than x: the tail is what perplexity hides."""
    for cache in (results.noise_floor, *results.caches):
        if cache.samples is None:
            continue
        style = "--" if cache is results.noise_floor else "-"
        values = np.sort(np.maximum(cache.samples.kl, SMALLEST_KL))
        share = 1 - np.arange(len(values)) / len(values)
        axes.step(values, share, style, where="post", label=label(cache))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="KL(reference || cache) at a position, nats (zero drawn at the left edge)",
        ylabel="share of positions above",
        title="How often, and how far, predictions move",
    )
    axes.grid(alpha=0.3)
    axes.legend()


def _perplexity(axes: Axes, results: Results) -> None:
    """Difference of the perplexity to the reference, with its paired interval."""
    rows = scored(results)
    for place, (_, of_cache) in enumerate(rows):
        found = of_cache.perplexity_difference
        low, high = (found.value if of is None else of for of in (found.low, found.high))
        axes.plot([low, high], [place, place], color="tab:gray", linewidth=3)
        axes.plot([found.value], [place], "o", color="tab:blue")
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set(
        xlabel="perplexity minus the reference's (95 % interval)",
        title="Perplexity against the reference's",
    )
    axes.grid(axis="x", alpha=0.3)


def _bytes(axes: Axes, results: Results) -> None:
    """Bytes held, and bits per number of keys and values, against mean divergence."""
    xlabel = f"MiB held after {results.reference.tokens_held:,} tokens"
    _pareto(axes, results, lambda cache: cache.bytes_held / 2**20, xlabel, "Memory against fidelity")
    bits = results.bits_per_mib

    def to_bits(mib: Any) -> Any:
        return mib * bits

    def to_mib(bits_held: Any) -> Any:
        return bits_held / bits

    top = axes.secondary_xaxis("top", functions=(to_bits, to_mib))
    top.set_xlabel("bits per number, exact tokens and scales included")


def _speed(axes: Axes, results: Results) -> None:
    """Time of a token against mean divergence."""
    contexts = [of.context_tokens for of in results.reference.cost.tokens] if results.reference.cost else []
    xlabel = f"milliseconds per token after {contexts[-1]:,} tokens" if contexts else ""
    _pareto(axes, results, _milliseconds, xlabel, "Speed against fidelity")


def _milliseconds(cache: CacheResult) -> float:
    """At the longest history; without a cache that is not measured."""
    return cache.cost.tokens[-1].milliseconds if cache.cost and cache.cost.tokens else math.nan


def _pareto(axes: Axes, results: Results, cost: Callable[[CacheResult], float], xlabel: str, title: str) -> None:
    """A cost against mean divergence: down and to the left is better. The line joins what nothing beats."""
    floor = max(results.noise_floor.fidelity.kl_mean.value, SMALLEST_KL)
    caches = [of for of in measured(results) if math.isfinite(cost(of)) and of.declared != "uncached"]
    points = [(cost(of), max(of.fidelity.kl_mean.value, SMALLEST_KL)) for of in caches]
    # Before anything is drawn: caches that are all exact would leave the axis no height.
    axes.set_ylim(SMALLEST_KL / 3, 10 * max(floor, *(y for _, y in points if math.isfinite(y))))
    for place, (cache, (x, y)) in enumerate(zip(caches, points, strict=True)):
        # Caches that cost the same lie on each other: the first are drawn larger.
        axes.plot([x], [y], "o", markersize=max(5, 11 - 2 * place), label=label(cache))
    # Below the noise floor no cache is better than another.
    front = pareto_front([(x, max(y, floor)) for x, y in points])
    axes.step(*zip(*(points[at] for at in front), strict=True), color="tab:gray", linewidth=1, where="post", zorder=0)
    axes.axhline(floor, color="tab:gray", linestyle="--", label="noise floor")
    axes.set(yscale="log", xlabel=xlabel, ylabel="mean KL, nats (zero drawn at 1e-16)", title=title)
    axes.set_xlim(0, 1.15 * max(x for x, _ in points))
    axes.grid(alpha=0.3)
    axes.legend()
