"""The plots of a plan, as PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .bandwidth import decode_step
from .capacity import USABLE_SHARE, Planned
from .compute import step_flops, total_flops
from .plan import Plan
from .units import GIB


def write_plots(plan: Plan, folder: Path) -> list[Path]:
    """Draw memory against context, the frontier, operations and the roofline; the last three where they apply."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"memory": _memory, "flops": _flops}
    if plan.gpu is not None:
        drawings["frontier"] = _frontier
    if plan.gpu is not None and plan.gpu.flops is not None and plan.step is not None:
        drawings["roofline"] = _roofline
    files = []
    for name, draw in drawings.items():
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        draw(figure.add_subplot(), plan)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def _contexts(plan: Plan, points: int) -> list[int]:
    return [int(n) for n in np.linspace(max(1, plan.tokens // points), plan.tokens, points)]


def _memory(axes: Axes, plan: Plan) -> None:
    """What exists at the end of a prefill of each length, stacked, with the first cache."""
    planned = Planned(plan.shape, plan.caches[0].spec, plan.weights_dtype, plan.ranks)
    contexts = _contexts(plan, 24)
    needs = [planned.need(tokens, plan.rows) for tokens in contexts]
    parts = {
        "weights": [need.weight_bytes / GIB for need in needs],
        f"cache ({planned.spec})": [need.prefill_cache_bytes / GIB for need in needs],
        "activations (estimate)": [need.activation_bytes / GIB for need in needs],
        "logits": [need.logits_bytes / GIB for need in needs],
    }
    axes.stackplot(contexts, list(parts.values()), labels=list(parts), alpha=0.85)
    if plan.gpu is not None:
        memory = plan.gpu.memory_bytes / GIB
        axes.axhline(memory, color="black", linewidth=1, label=f"{plan.gpu.name}: {memory:.0f} GiB")
        axes.axhline(USABLE_SHARE * memory, color="black", linewidth=1, linestyle="--", label="usable")
    axes.set(xlabel="context, tokens", ylabel="GiB on one GPU", title=f"{plan.model}, batch {plan.rows}: memory")
    axes.set_ylim(bottom=0)
    axes.legend(loc="best", fontsize=8)


def _frontier(axes: Axes, plan: Plan) -> None:
    # Curves may coincide: each cache is drawn thinner than the one before.
    for number, cache in enumerate(plan.caches):
        for place, (style, name) in enumerate((("-", "ideal"), ("--", "usable")), start=1):
            points = [(row[0], row[place]) for row in cache.frontier if row[place] > 0]
            contexts, batches = ([point[axis] for point in points] for axis in (0, 1))
            label = f"{cache.spec}, {name}"
            axes.plot(contexts, batches, style, color=f"C{number}", linewidth=max(1, 5 - 2 * number), label=label)
    assert plan.gpu is not None  # noqa: S101 - the caller's condition
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="texts at once")
    axes.set_title(f"{plan.model} on {plan.gpu.name}: what fits")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)


def _flops(axes: Axes, plan: Plan) -> None:
    lengths = [int(n) for n in np.geomspace(1, max(2, plan.tokens), 60)]
    for cached, name in ((True, "with a cache"), (False, "without")):
        color = "C0" if cached else "C3"
        steps = [step_flops(plan.work, n, cached=cached) for n in lengths]
        sums = [total_flops(plan.work, n, cached=cached) for n in lengths]
        axes.plot(lengths, steps, color=color, linestyle="--", label=f"one step, {name}")
        axes.plot(lengths, sums, color=color, label=f"sum, {name}")
    axes.set(xscale="log", yscale="log", xlabel="tokens generated", ylabel="FLOP", title=f"{plan.model}: operations")
    axes.grid(visible=True, alpha=0.2)
    axes.legend(fontsize=8)


def _roofline(axes: Axes, plan: Plan) -> None:
    gpu = plan.gpu
    assert gpu is not None and gpu.flops is not None and gpu.bandwidth is not None  # noqa: PT018, S101 - the caller's condition
    intensity = np.geomspace(0.3, 10 * gpu.flops / gpu.bandwidth, 100)
    roof = np.minimum(intensity * gpu.bandwidth, gpu.flops)
    axes.plot(intensity, roof / 1e12, color="black", label=gpu.name)
    for place, rows in enumerate((1, 8, 32, 128)):
        step = decode_step(plan.shape, plan.tokens, rows, plan.weights_dtype)
        speed = min(step.intensity * gpu.bandwidth, gpu.flops)
        axes.plot(step.intensity, speed / 1e12, "o", color=f"C{place}", label=f"decoding, batch {rows}")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte read", ylabel="TFLOP/s at most")
    axes.set_title(f"{plan.model} at {plan.tokens:,} tokens: roofline")
    axes.grid(visible=True, alpha=0.2)
    axes.legend(fontsize=8)
