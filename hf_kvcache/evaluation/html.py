"""The report as one HTML file that needs nothing else: tables that sort, plots that answer, no network."""

from collections.abc import Iterator
from html import escape

import numpy as np

from hf_kvcache.evaluation.heatmaps import heat
from hf_kvcache.evaluation.page import SCRIPT, STYLE
from hf_kvcache.evaluation.plots import SMALLEST_KL
from hf_kvcache.evaluation.results import CacheResult, Results
from hf_kvcache.evaluation.svg import Axis, Series, chart, heat_color
from hf_kvcache.evaluation.tables import Table, label, measured, tables
from hf_kvcache.evaluation.verdicts import verdict_line

_KL = Axis("mean KL, nats (zero: 1e-16)", log=True)


def as_html(results: Results, sizes: str, main: Table, proofs: list[str]) -> str:
    """The page.

    Args:
        results: What was found.
        sizes: What was measured, in a sentence.
        main: The table of results.
        proofs: The proofs, as lines of Markdown.
    """
    title = f"Cache evaluation: {results.model}"
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="failed">FAILED {escape(failure)}</p>' for failure in results.failures),
        f"<p>{escape(sizes.replace('`', ''))}</p>",
        "<ul>",
        *(f"<li>{escape(verdict_line(cache, results.reference))}</li>" for cache in results.caches),
        "</ul>",
        *_table(main),
        '<div class="charts">',
        *_charts(results),
        "</div>",
        *_heat_maps(results),
        *(line for table in tables(results) for line in _table(table)),
        *([f"<h2>Proofs</h2><pre>{escape(chr(10).join(proofs[2:]))}</pre>"] if proofs else []),
        "<h2>Environment</h2><ul>",
        *(f"<li>{escape(name)}: {escape(str(value))}</li>" for name, value in results.environment.items()),
        f'</ul><div id="tip" role="status"></div><script>{SCRIPT}</script></body></html>',
    ]
    return "\n".join(lines) + "\n"


def _table(table: Table) -> Iterator[str]:
    yield f'<h2>{escape(table.title)}</h2><div class="scroll"><table class="sortable"><thead><tr>'
    yield from (f'<th scope="col"><button>{escape(name)}</button></th>' for name in table.columns)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield f'</tbody></table></div><p class="note">{escape(table.note)}</p>'


def _charts(results: Results) -> Iterator[str]:
    if "fidelity" in results.tasks:
        caches = [results.noise_floor, *results.caches]
        axes = Axis("KL at a position, nats (zero: 1e-16)", log=True), Axis("share of positions above", log=True)
        yield chart("How often, and how far, predictions move", [_distribution(of) for of in caches], *axes)
        distances = Axis("tokens from the start of the window", log=False)
        yield chart("Divergence along the text", [_along(of, results) for of in caches], distances, _KL)
        held = Axis(f"MiB held after {results.reference.tokens_held:,} tokens", log=False)
        cached = [of for of in measured(results) if of.declared != "uncached"]
        points = [Series(label(of), [(of.bytes_held / 2**20, _kl(of))], line=False) for of in cached]
        yield chart("Memory against fidelity", points, held, _KL)
        timed = [(of, of.cost.tokens[-1]) for of in cached if of.cost and of.cost.tokens]
        if timed:
            speed = Axis(f"ms per token after {timed[0][1].context_tokens:,} tokens", log=False)
            points = [Series(label(of), [(one.milliseconds, _kl(of))], line=False) for of, one in timed]
            yield chart("Speed against fidelity", points, speed, _KL)
    costs = [(of, of.cost) for of in measured(results) if of.cost]
    if costs:
        lines = [
            Series(label(of), [(float(one.context_tokens), one.milliseconds) for one in cost.tokens], line=True)
            for of, cost in costs
        ]
        axes = Axis("tokens in the history", log=False), Axis("milliseconds per token", log=False)
        yield chart("Time of one token", lines, *axes)


def _kl(cache: CacheResult) -> float:
    return max(cache.fidelity.kl_mean.value, SMALLEST_KL)


def _distribution(cache: CacheResult) -> Series:
    """Share of positions whose divergence is larger, at evenly spaced shares on the logarithmic axis."""
    values = np.sort(np.maximum(cache.samples.kl, SMALLEST_KL)) if cache.samples else np.zeros(0)
    count = len(values)
    ranks = np.unique(np.geomspace(1, count, 100).astype(int)) if count else np.zeros(0, int)
    points = [(float(values[count - rank]), rank / count) for rank in ranks[::-1].tolist()]
    return Series(label(cache), points, line=True)


def _along(cache: CacheResult, results: Results) -> Series:
    """Mean divergence in up to 24 stretches of the window."""
    if cache.samples is None or results.positions is None:
        return Series(label(cache), [], line=True)
    distances = results.positions.distances
    edges = np.linspace(distances.min(), distances.max() + 1, min(24, len(np.unique(distances))) + 1)
    places = np.searchsorted(edges, distances, side="right") - 1
    points = [
        (
            float((edges[place] + edges[place + 1]) / 2),
            max(float(cache.samples.kl[places == place].mean()), SMALLEST_KL),
        )
        for place in np.unique(places).tolist()
    ]
    return Series(label(cache), points, line=True)


def _heat_maps(results: Results) -> Iterator[str]:
    """The probability of the right answer as coloured tables, one a kind of problem, depth by length and cache."""
    if not results.reference.retrieval:
        return
    caches = measured(results)
    yield '<h2>Retrieval by length and depth</h2><div class="scroll"><table class="heat"><tbody>'
    for task in dict.fromkeys(of.task for of in results.reference.retrieval):
        found = [heat(cache, task) for cache in caches]
        lengths, depths, _ = found[0]
        names = "".join(f'<th colspan="{len(lengths)}">{escape(label(of))}</th>' for of in caches)
        yield f"<tr><th>{escape(task)}</th>{names}</tr>"
        yield "<tr><td>depth / tokens</td>" + "".join(f"<td>{of:,}</td>" for of in lengths) * len(caches) + "</tr>"
        for row, depth in enumerate(depths):
            cells = "".join(_heat_cell(value) for _, _, values in found for value in values[row].tolist())
            yield f"<tr><td>{'all over' if depth is None else f'{depth:.0%}'}</td>{cells}</tr>"
    yield "</tbody></table></div>"
    yield '<p class="note">Probability of the right answer, geometric mean over its tokens.</p>'


def _heat_cell(value: float) -> str:
    text = "#000" if value > 0.6 else "#fff"
    return f'<td class="value" style="background:{heat_color(value)};color:{text}">{value:.2f}</td>'
