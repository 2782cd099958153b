"""The plots of an evaluation, as PNG files; drawn without a display or pyplot's global state."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_kvcache.evaluation.results import Results
from hf_kvcache.evaluation.tables import label

SMALLEST_KL = 1e-16
"""Where a logarithmic axis ends: a divergence of zero is drawn here."""


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Draw the distribution of the divergence, the perplexities, and bytes against divergence."""
    files = []
    for name, draw in (("kl", _divergence), ("perplexity", _perplexity), ("bytes", _bytes)):
        figure = Figure(figsize=(7, 4), layout="constrained")
        draw(figure.add_subplot(), results)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def _divergence(axes: Axes, results: Results) -> None:
    """Share of positions whose divergence is larger than x: the tail is what perplexity hides."""
    for cache, style in [(results.noise_floor, "--"), *((cache, "-") for cache in results.caches)]:
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
    rows = [results.noise_floor, *results.caches]
    for place, cache in enumerate(rows):
        found = cache.fidelity.perplexity_difference
        low, high = (found.value if of is None else of for of in (found.low, found.high))
        axes.plot([low, high], [place, place], color="tab:gray", linewidth=3)
        axes.plot([found.value], [place], "o", color="tab:blue")
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [label(cache) for cache in rows])
    axes.invert_yaxis()
    axes.set(
        xlabel="perplexity minus the reference's (95 % interval)",
        title=f"Reference perplexity {results.reference.fidelity.perplexity.value:.3f}",
    )
    axes.grid(axis="x", alpha=0.3)


def _bytes(axes: Axes, results: Results) -> None:
    """Bytes held against mean divergence: down and to the left is better."""
    for cache in (results.reference, *results.caches):
        divergence = max(cache.fidelity.kl_mean.value, SMALLEST_KL)
        axes.plot([cache.bytes_held / 2**20], [divergence], "o", label=label(cache))
    floor = max(results.noise_floor.fidelity.kl_mean.value, SMALLEST_KL)
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
