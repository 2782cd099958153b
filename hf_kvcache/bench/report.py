"""Write a benchmark down: results.json for programs, report.md for people (see docs/benchmarks.md)."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hf_kvcache.bench.results import SCHEMA, BenchResults, CacheSpeed, Held, Measurement, Task

LEGEND = (
    "Medians; x: how many times faster than `{reference}` (or, for bytes, how many times as much), with the "
    "quartiles over rounds in brackets. All caches took turns token by token in one process. "
    "Histories: {filling}."
)
_TIMES: dict[Task, str] = {
    "decode": "decode after {tokens:,} tokens, ms per token",
    "prefill": "prefill of {tokens:,} tokens, ms",
    "beams": "{rows} beams after {tokens:,} tokens, ms per step",
}
_BYTES: dict[Task, str] = {
    "decode": "held at {tokens:,} tokens, MiB",
    "beams": "held by {rows} beams at {tokens:,} tokens, MiB",
}


def write_report(results: BenchResults, folder: Path) -> list[Path]:
    """Write results.json, report.md and the plots into `folder`, made if missing; gives them in that order.

    The numbers are written first: a plot that fails loses nothing.
    """
    from hf_kvcache.bench.plots import write_plots

    folder.mkdir(parents=True, exist_ok=True)
    numbers, text = folder / "results.json", folder / "report.md"
    numbers.write_text(json.dumps(as_json(results), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    plots = write_plots(results, folder)
    text.write_text(as_markdown(results, [plot.name for plot in plots]), encoding="utf-8")
    return [numbers, text, *plots]


def as_json(results: BenchResults) -> dict[str, Any]:
    """The record as plain values; the fields are those of `hf_kvcache.bench.results`."""
    return {"schema": SCHEMA, **asdict(results)}


def headings(results: BenchResults) -> tuple[str, ...]:
    """What the columns of `table_rows` are."""
    reference, *others = (cache.spec for cache in results.caches)
    return ("", f"{reference} (reference)", *others)


def table_rows(results: BenchResults) -> list[tuple[str, ...]]:
    """The result table as text: a row for each thing measured, a column for each cache."""
    rows = [
        _row(results.caches, task, tokens, label, _time_cell)
        for task, label in _TIMES.items()
        for tokens in results.lengths(task)
    ]
    for task, label in _BYTES.items():
        for tokens in results.lengths(task)[-1:]:
            rows.append(_row(results.caches, task, tokens, label, _bytes_cell))
            rows.append(_row(results.caches, task, tokens, "- of the formula", _formula_cell))
            rows.append(_row(results.caches, task, tokens, "- bits per number", partial(_bits_cell, results)))
            rows.append(_row(results.caches, task, tokens, "- allocated, but unused", _unused_cell))
    return rows


def as_markdown(results: BenchResults, plots: Sequence[str]) -> str:
    """The report for people."""
    return "\n".join(
        [
            f"# Cache benchmark: {results.model}",
            "",
            _setting(results),
            "",
            *markdown_table(headings(results), table_rows(results)),
            "",
            legend(results),
            "",
            formula_line(results),
            *(f"\n![{name}]({name})" for name in plots),
            "",
            "## Environment",
            "",
            *(f"- {name}: {value}" for name, value in results.environment.items()),
            "",
        ]
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column is text and whose others are numbers."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(header) - 1), *lines[1:]]


def legend(results: BenchResults) -> str:
    """How to read the table."""
    return LEGEND.format(reference=results.caches[0].spec, filling=results.filling)


def formula_line(results: BenchResults) -> str:
    """The formula for bytes, with this model's number in it."""
    return (
        f"Formula: 2 L H_kv d_h b S B, keys and values alone; this model: {results.token_bytes:,} bytes a token in "
        f"{results.dtype}, times tokens S, times rows B."
    )


def _setting(results: BenchResults) -> str:
    return (
        f"{results.dtype}, {results.environment['device']}, {results.environment['torch_threads']} threads, "
        f"seed {results.seed}, {results.seconds:.0f} s."
    )


def _row(
    caches: Sequence[CacheSpeed], task: Task, tokens: int, label: str, cell: Callable[[Measurement, Measurement], str]
) -> tuple[str, ...]:
    """One row of the table; a dash where a cache was not measured."""
    found = [cache.find(task, tokens) for cache in caches]
    reference = found[0]
    if reference is None:
        raise ValueError(f"the reference was not measured: {task} at {tokens} tokens")
    shown = reference.held.tokens if reference.held and cell is _bytes_cell else tokens
    return (
        label.format(tokens=shown, rows=reference.rows),
        *("-" if of is None else cell(of, reference) for of in found),
    )


def _time_cell(measurement: Measurement, reference: Measurement) -> str:
    text = f"{measurement.timing.milliseconds.median:,.1f}"
    speedup = measurement.timing.speedup
    if measurement is reference:
        return text
    if speedup is None:
        times = reference.timing.milliseconds.median / measurement.timing.milliseconds.median
        return f"{text} ({times:.2g}x)"
    return f"{text} ({speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}])"


def _bytes_cell(measurement: Measurement, reference: Measurement) -> str:
    return _from_held(measurement, lambda held: f"{held.total_bytes / 2**20:,.2f}{_times(held, reference.held)}")


def _formula_cell(measurement: Measurement, _: Measurement) -> str:
    return _from_held(measurement, lambda held: f"{held.total_bytes / held.formula_bytes:.1%}")


def _bits_cell(results: BenchResults, measurement: Measurement, _: Measurement) -> str:
    return _from_held(measurement, lambda held: f"{results.bits_per_number(held):.2f}")


def _unused_cell(measurement: Measurement, _: Measurement) -> str:
    return _from_held(measurement, lambda held: "-" if held.unused_share is None else f"{held.unused_share:.1%}")


def _from_held(measurement: Measurement, text: Callable[[Held], str]) -> str:
    return "-" if measurement.held is None else text(measurement.held)


def _times(held: Held, reference: Held | None) -> str:
    if reference is None or held is reference:
        return ""
    return f" ({held.total_bytes / reference.total_bytes:.2f}x)"
