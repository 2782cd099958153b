"""Retrieval as heat maps: length by depth, one column a cache, one row a kind of problem."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hf_kvcache.evaluation.results import CacheResult, Results
from hf_kvcache.evaluation.tables import label, measured


def write_heatmap(results: Results, folder: Path) -> Path:
    """Draw the probability of the right answer of every kind of problem, length and depth; gives the file."""
    caches = measured(results)
    tasks = list(dict.fromkeys(of.task for of in results.reference.retrieval))
    heights = [len({of.depth for of in results.reference.retrieval if of.task == task}) for task in tasks]
    figure = Figure(figsize=(2.2 + 2.4 * len(caches), 1 + 0.45 * sum(heights) + 0.3 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), len(caches), squeeze=False, height_ratios=heights)
    for row, task in enumerate(tasks):
        for column, cache in enumerate(caches):
            lengths, depths, values = heat(cache, task)
            panel = axes[row, column]
            image = panel.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            for (y, x), value in np.ndenumerate(values):
                color = "black" if value > 0.6 else "white"
                panel.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
            panel.set_xticks(range(len(lengths)), [f"{of:,}" for of in lengths] if row == len(tasks) - 1 else [])
            panel.set_yticks(range(len(depths)), ["all over" if of is None else f"{of:.0%}" for of in depths])
            if column:
                panel.set_yticks([])
            else:
                panel.set_ylabel(task, rotation=0, ha="right", va="center")
            if row == 0:
                panel.set_title(label(cache) + (" (reference)" if cache is results.reference else ""), fontsize=10)
    figure.colorbar(image, ax=axes, label="probability of the right answer, per token", shrink=0.6)
    figure.supxlabel("tokens of the prompt (rows: depth of the answer)", fontsize=10)
    path = folder / "retrieval.png"
    figure.savefig(path, dpi=150)
    return path


def heat(cache: CacheResult, task: str) -> tuple[list[int], list[float | None], np.ndarray]:
    """Lengths, depths, and the mean probability of the right answer (depths by lengths) of one kind of problem."""
    trials = [of for of in cache.retrieval if of.task == task]
    lengths = list(dict.fromkeys(of.length_tokens for of in trials))
    depths = list(dict.fromkeys(of.depth for of in trials))
    values = [
        [
            np.mean([of.probability for of in trials if (of.length_tokens, of.depth) == (length, depth)])
            for length in lengths
        ]
        for depth in depths
    ]
    return lengths, depths, np.array(values)
