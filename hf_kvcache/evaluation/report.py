"""Write an evaluation down: results.json for programs, report.md for people (see docs/evaluation.md)."""

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hf_kvcache.evaluation.results import SCHEMA, CacheResult, Results
from hf_kvcache.evaluation.tables import label, markdown, spread, tables

COLUMNS = (
    "cache",
    "class",
    "float64 proof",
    "perplexity",
    "difference",
    "KL mean",
    "KL p99",
    "KL max",
    "top-1",
    "MiB held",
    "bytes/token",
)


_LEGEND = (
    "KL is KL(reference || cache) in nats per token; brackets are 95 % bootstrap intervals over windows, "
    "paired with the reference. The noise floor is what rounding alone does in this dtype. The proof column is "
    "the largest logit difference to the model without a cache, in float64."
)


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write results.json, report.md and the plots into `folder`, made if missing; gives them in that order.

    The numbers are written first: a plot that fails loses nothing.
    """
    from hf_kvcache.evaluation.plots import write_plots

    folder.mkdir(parents=True, exist_ok=True)
    numbers, text = folder / "results.json", folder / "report.md"
    numbers.write_text(json.dumps(as_json(results), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    text.write_text(as_markdown(results, ()), encoding="utf-8")
    plots = write_plots(results, folder)
    text.write_text(as_markdown(results, [plot.name for plot in plots]), encoding="utf-8")
    return [numbers, text, *plots]


def as_json(results: Results) -> dict[str, Any]:
    """The record as plain values: records are objects, tuples lists, numbers that are not finite null."""
    plain: dict[str, Any] = _plain(results)
    return {"schema": SCHEMA, **plain, "failures": list(results.failures)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        names = (of.name for of in fields(value) if of.name not in ("samples", "positions"))  # too many
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table_rows(results: Results) -> list[tuple[str, ...]]:
    """The result table as text, by `COLUMNS`: the reference, the noise floor, then each cache."""
    return [
        _cells(results.reference, f"{results.reference.spec} (reference)"),
        _cells(results.noise_floor, label(results.noise_floor)),
        *(_cells(cache, cache.spec) for cache in results.caches),
    ]


def _cells(cache: CacheResult, name: str) -> tuple[str, ...]:
    found = cache.fidelity
    return (
        name,
        verdict(cache),
        "-" if cache.proof is None else f"{cache.proof.logit_difference:.1e}",
        f"{found.perplexity.value:.4f}",
        f"{found.perplexity_difference.value:+.2g}{spread(found.perplexity_difference)}",
        f"{found.kl_mean.value:.2e}{spread(found.kl_mean)}",
        f"{found.kl_p99:.2e}",
        f"{found.kl_max:.2e}",
        f"{found.top1_agreement.value:.2%}",
        f"{cache.bytes_held / 2**20:.2f}",
        f"{cache.bytes_held / cache.tokens_held:.0f}" if cache.tokens_held else "-",
    )


def verdict(cache: CacheResult) -> str:
    """The class in a few words, with a mark where the claim and the measurement part."""
    if cache.failures:
        return f"FAILED (declares {cache.declared})"
    refused = len(cache.proof.refusals) if cache.proof else 0
    words = {
        "bitwise": "exact, bitwise",
        "rounding": "exact up to rounding",
        "approximate": "approximate",
        "unproven": "not proven",
        "uncached": "no cache",
    }
    return words[cache.measured] + (f" ({refused} modes refused)" if refused else "")


def as_markdown(results: Results, plots: list[str] | tuple[str, ...]) -> str:
    """The report for people."""
    lines = [
        f"# Cache evaluation: {results.model}",
        "",
        *(f"- **FAILED** {failure}" for failure in results.failures),
        *([""] if results.failures else []),
        _sizes(results),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row) + " |" for row in table_rows(results)),
        "",
        _LEGEND,
        *(f"\n![{name}]({name})" for name in plots),
        "",
        *(line for table in tables(results) for line in markdown(table)),
        "## Proofs",
        "",
        *(line for cache in (results.reference, *results.caches) for line in _proof_lines(cache)),
        "## Environment",
        "",
        *(f"- {name}: {value}" for name, value in results.environment.items()),
        "",
    ]
    return "\n".join(lines)


def _sizes(results: Results) -> str:
    size = results.protocol
    return (
        f"{results.scored_tokens:,} tokens of `{results.dataset}` scored in {results.windows} windows of "
        f"{size.window_tokens:,} (prefill {size.prefill_tokens}, then chunks of {size.chunk_tokens} through "
        f"the cache), {results.dtype}, seed {results.seed}, {results.seconds:.0f} s."
    )


def _proof_lines(cache: CacheResult) -> list[str]:
    proof = cache.proof
    claim = f" ({cache.declared_reason})" if cache.declared_reason else ""
    head = [f"### {cache.spec}", "", f"Declares: {cache.declared}{claim}. Measured: {cache.measured}.", ""]
    if proof is None:
        return [*head, f"No proof: {cache.proof_note}.", ""]
    return [
        *head,
        (
            f"float64, {proof.attention}, up to {proof.context_tokens:,} tokens; logit scale {proof.logit_scale:.3g}, "
            f"tolerance {proof.tolerance:.1e}."
        ),
        "",
        *(f"- {of.mode}, {of.positions} positions: {of.logit_difference:.1e}" for of in proof.differences),
        *(
            f"- {of.mode}: same tokens, scores within {of.score_difference:.1e}" if of.equal else f"- {of.complaint}"
            for of in proof.generation
        ),
        "",
    ]
