"""The plots of a plan, as PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..units import GIB
from .bandwidth import decode_step
from .capacity import USABLE_SHARE, Planned
from .compute import step_flops, total_flops
from .gpus import Gpu
from .plan import Plan

BATCHES = (1, 8, 32, 128)
"""The points on the roofline."""


def write_plots(plan: Plan, folder: Path) -> list[Path]:
    """Draw memory against context and operations; for a GPU the frontier, and for one of known speed the roofline."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"memory": _memory(plan), "flops": _flops(plan)}
    if plan.gpu is not None:
        figures["frontier"] = _frontier(plan, plan.gpu)
        if plan.gpu.flops is not None and plan.gpu.bandwidth is not None:
            figures["roofline"] = _roofline(plan, plan.gpu.name, plan.gpu.flops, plan.gpu.bandwidth)
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def _new_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def _memory(plan: Plan) -> Figure:
    """What exists at the end of a prefill of each length, stacked, with the first cache; the peak with the others."""
    figure, axes = _new_figure()
    first, *others = (Planned(plan.shape, cache.spec, plan.weights_dtype, plan.ranks) for cache in plan.caches)
    contexts = [int(n) for n in np.linspace(max(1, plan.tokens // 24), plan.tokens, 24)]
    needs = [first.need(tokens, plan.rows) for tokens in contexts]
    parts = {
        "weights": [need.weight_bytes / GIB for need in needs],
        f"cache ({first.spec})": [need.prefill_cache_bytes / GIB for need in needs],
        "activations (estimate)": [need.activation_bytes / GIB for need in needs],
        "logits": [need.logits_bytes / GIB for need in needs],
    }
    axes.stackplot(contexts, list(parts.values()), labels=list(parts), alpha=0.85)
    for number, other in enumerate(others, start=len(parts)):
        peaks = [other.need(tokens, plan.rows).peak_bytes / GIB for tokens in contexts]
        axes.plot(contexts, peaks, color=f"C{number}", linewidth=2, label=f"peak with {other.spec}")
    if plan.gpu is not None:
        memory = plan.gpu.memory_bytes / GIB
        axes.axhline(memory, color="black", linewidth=1, label=f"{plan.gpu.name}: {memory:.0f} GiB")
        axes.axhline(USABLE_SHARE * memory, color="black", linewidth=1, linestyle="--", label="usable")
    axes.set(xlabel="context, tokens", ylabel="GiB on one GPU", title=f"{plan.model}, batch {plan.rows}: memory")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _frontier(plan: Plan, gpu: Gpu) -> Figure:
    figure, axes = _new_figure()
    # Curves may coincide: each cache is drawn thinner than the one before.
    for number, cache in enumerate(plan.caches):
        for place, (style, name) in enumerate((("-", "ideal"), ("--", "usable")), start=1):
            points = [(row[0], row[place]) for row in cache.frontier if row[place] > 0]
            contexts, batches = ([point[axis] for point in points] for axis in (0, 1))
            label = f"{cache.spec}, {name}"
            axes.plot(contexts, batches, style, color=f"C{number}", linewidth=max(1, 5 - 2 * number), label=label)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="texts at once")
    axes.set_title(f"{plan.model} on {gpu.name}: what fits")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    return figure


def _flops(plan: Plan) -> Figure:
    figure, axes = _new_figure()
    lengths = [int(n) for n in np.geomspace(1, max(2, plan.tokens), 60)]
    # A step without a cache computes what all steps with one have computed: two of the curves are one.
    curves = {
        "sum, without a cache": ("C3-", [total_flops(plan.work, n, cached=False) for n in lengths]),
        "sum, with a cache": ("C0-", [total_flops(plan.work, n) for n in lengths]),
        "one step, without a cache": ("C3--", [step_flops(plan.work, n, cached=False) for n in lengths]),
        "one step, with a cache": ("C0--", [step_flops(plan.work, n) for n in lengths]),
    }
    for name, (style, flops) in curves.items():
        axes.plot(lengths, flops, style, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens generated", ylabel="FLOP", title=f"{plan.model}: operations")
    if plan.work.crossing_tokens <= lengths[-1]:
        axes.axvline(plan.work.crossing_tokens, color="gray", linewidth=1, label="half of the sum is attention")
    axes.grid(visible=True, alpha=0.2)
    axes.legend(fontsize=8)
    return figure


def _roofline(plan: Plan, name: str, flops: float, bandwidth: float) -> Figure:
    figure, axes = _new_figure()
    intensity = np.geomspace(0.3, 10 * flops / bandwidth, 200)
    axes.plot(intensity, np.minimum(intensity * bandwidth, flops) / 1e12, color="black", label=name)
    planned = Planned(plan.shape, plan.caches[0].spec, plan.weights_dtype, plan.ranks)
    for place, rows in enumerate(BATCHES):
        step = decode_step(planned, plan.tokens, rows)
        speed = min(step.intensity * bandwidth, flops)
        axes.plot(step.intensity, speed / 1e12, "o", color=f"C{place}", label=f"decoding, batch {rows}")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte read", ylabel="TFLOP/s at most")
    axes.set_title(f"{plan.model} at {plan.tokens:,} tokens, {planned.spec}: roofline")
    axes.grid(visible=True, alpha=0.2)
    axes.legend(fontsize=8)
    return figure
