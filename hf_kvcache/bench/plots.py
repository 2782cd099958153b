"""The plots of a benchmark, as PNG files; drawn without a display or pyplot's global state."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from hf_kvcache.bench.results import BenchResults, Held, Measurement

COLORS = ("#7f7f7f", "#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22")
"""The reference in gray, then the caches."""
FORMULA_COLOR = "#222222"


def write_plots(results: BenchResults, folder: Path) -> list[Path]:
    """Draw the time of a token against the length of the history and against bits, and bytes held against tokens."""
    files = []
    for name, draw in (("decode", _decode), ("bytes", _bytes), ("bits", _bits)):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, results)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def _decode(axes: Axes, results: BenchResults) -> None:
    """Median time of a token, and the quartiles as a band; the times without a cache may leave the picture."""
    found = [tuple(of for of in cache.measurements if of.task == "decode") for cache in results.caches]
    top = 1.15 * max(of.timing.milliseconds.high for measurements in found for of in measurements if of.held)
    for place, (cache, measurements) in enumerate(zip(results.caches, found, strict=True)):
        times = [of.timing.milliseconds for of in measurements]
        lengths = [of.context_tokens for of in measurements]
        outside = [
            f"{of.median:,.0f} at {tokens:,}" for of, tokens in zip(times, lengths, strict=True) if of.median > top
        ]
        label = _label(cache.spec) + (f" (above: {', '.join(outside)})" if outside else "")
        color = COLORS[place % len(COLORS)]
        axes.plot(lengths, [of.median for of in times], "o-", color=color, label=label, linewidth=2)
        axes.fill_between(lengths, [of.low for of in times], [of.high for of in times], color=color, alpha=0.15)
    axes.set(
        xscale="log",
        xlabel="tokens in the history",
        ylabel="milliseconds per token",
        title=f"Time of one token: {results.model}, {results.dtype}",
    )
    axes.set_ylim(0, top)
    axes.set_xticks(results.lengths("decode"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _bytes(axes: Axes, results: BenchResults) -> None:
    """Bytes held by one sequence, and the line of the formula."""
    longest = 0
    for place, cache in enumerate(results.caches):
        held = sorted(_held_by_one_row(cache.measurements), key=lambda of: of.tokens)
        if not held:
            continue
        longest = max(longest, held[-1].tokens)
        axes.plot(
            [of.tokens for of in held],
            [of.total_bytes / 2**20 for of in held],
            # Caches that hold the same lie on each other: the first are drawn larger.
            "o",
            color=COLORS[place % len(COLORS)],
            markersize=max(5, 12 - 3 * place),
            label=_label(cache.spec),
        )
    axes.plot(
        [0, longest],
        [0, results.token_bytes * longest / 2**20],
        "--",
        color=FORMULA_COLOR,
        linewidth=1.2,
        zorder=0,
        label=f"2 L H_kv d_h b S = {results.token_bytes:,} bytes x tokens",
    )
    axes.set(
        xlabel="tokens held",
        ylabel="MiB held",
        title=f"Memory of one sequence: {results.model}, {results.dtype}",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _bits(axes: Axes, results: BenchResults) -> None:
    """Median time of a token at the longest history against the bits per number: down and to the left is better."""
    longest = results.lengths("decode")[-1]
    for place, cache in enumerate(results.caches):
        found = cache.find("decode", longest)
        if found is None or found.held is None:
            continue
        axes.plot(
            [results.bits_per_number(found.held)],
            [found.timing.milliseconds.median],
            "o",
            color=COLORS[place % len(COLORS)],
            markersize=max(5, 12 - 3 * place),
            label=_label(cache.spec),
        )
    axes.set(
        xlabel="bits per number of keys and values, all in",
        ylabel="milliseconds per token",
        title=f"Time of one token after {longest:,} tokens: {results.model}, {results.dtype}",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _held_by_one_row(measurements: tuple[Measurement, ...]) -> list[Held]:
    return [of.held for of in measurements if of.held is not None and of.rows == 1]


def _label(spec: str) -> str:
    return "no cache" if spec == "none" else spec
