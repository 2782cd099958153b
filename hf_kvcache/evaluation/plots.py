"""The plots of an evaluation, as PNG files; drawn without a display or pyplot's global state."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_kvcache.evaluation.heatmaps import write_heatmap
from hf_kvcache.evaluation.results import Results
from hf_kvcache.evaluation.tables import label, scored

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
    """Bytes held against mean divergence: down and to the left is better."""
    floor = max(results.noise_floor.fidelity.kl_mean.value, SMALLEST_KL)
    found = [(cache, max(cache.fidelity.kl_mean.value, SMALLEST_KL)) for cache in (results.reference, *results.caches)]
    # Before anything is drawn: caches that are all exact would leave the axis no height.
    axes.set_ylim(SMALLEST_KL / 3, 3 * max(floor, *(of for _, of in found if math.isfinite(of))))
    for cache, divergence in found:
        axes.plot([cache.bytes_held / 2**20], [divergence], "o", label=label(cache))
    axes.axhline(floor, color="tab:gray", linestyle="--", label="noise floor")
    axes.set(
        yscale="log",
        xlabel=f"MiB held after {results.reference.tokens_held:,} tokens",
        ylabel="mean KL, nats (zero drawn at 1e-16)",
        title="Memory against fidelity",
    )
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
