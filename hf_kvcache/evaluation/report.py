"""Write an evaluation down: results.json for programs, report.md for people (see docs/evaluation.md)."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hf_kvcache.evaluation.results import SCHEMA, CacheResult, Results
from hf_kvcache.evaluation.retrieval import mean
from hf_kvcache.evaluation.samples import Fidelity
from hf_kvcache.evaluation.tables import NOISE_FLOOR, Table, markdown, spread, tables
from hf_kvcache.evaluation.verdicts import rewrites, verdict, verdict_line
from hf_kvcache.whole_file import whole_file

__all__ = ["as_json", "as_markdown", "as_text", "main_table", "verdict", "write_report"]

Column: TypeAlias = tuple[str, Callable[[CacheResult], str]]
"""A heading, and what stands below it."""

_LEGEND = (
    "KL is KL(reference || cache) in nats per token; brackets are 95 % bootstrap intervals over windows, "
    "paired with the reference. The noise floor is what rounding alone does in this dtype. The proof column is "
    "the largest logit difference to the model without a cache, in float64. States rewritten: how often what a cache "
    "gives the model of one token changes while others are appended."
)


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write everything into `folder`, made if missing; gives the files.

    In this order: results.json, report.md, report.html, samples.parquet if text was scored, and the plots. The numbers
    are written first, completely or not at all: a plot that fails, or a full disk, loses nothing.

    Raises:
        OSError: A file cannot be written.
    """
    from hf_kvcache.evaluation.html import as_html
    from hf_kvcache.evaluation.parquet import write_samples
    from hf_kvcache.evaluation.plots import write_plots

    folder.mkdir(parents=True, exist_ok=True)
    numbers, text = folder / "results.json", folder / "report.md"
    with whole_file(numbers) as scratch:
        scratch.write_bytes(as_text(results).encode())
    text.write_text(as_markdown(results, ()), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(as_html(results, _sizes(results), main_table(results), _proofs(results)), encoding="utf-8")
    samples = [write_samples(results, folder / "samples.parquet")] if results.positions else []
    plots = write_plots(results, folder)
    text.write_text(as_markdown(results, [plot.name for plot in plots]), encoding="utf-8")
    return [numbers, text, page, *samples, *plots]


def as_text(results: Results) -> str:
    """results.json."""
    return json.dumps(as_json(results), indent=2, allow_nan=False) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    """The record as plain values: records are objects, tuples lists, numbers that are not finite null."""
    plain: dict[str, Any] = _plain(results)
    return {"schema": SCHEMA, **plain, "failures": list(results.failures)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        names = {of.name: of.metadata.get("name", of.name) for of in fields(value)}
        return {name: _plain(getattr(value, of)) for of, name in names.items() if name}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def main_table(results: Results) -> Table:
    """One row a cache, by what was asked for: the reference, the noise floor if text was scored, then each cache."""
    columns = list(_columns(results))
    rows = [results.reference, *([results.noise_floor] if results.scored_tokens else []), *results.caches]
    names = {id(results.reference): f"{results.reference.spec} (reference)", id(results.noise_floor): NOISE_FLOOR}
    return Table(
        "Results",
        _LEGEND if results.scored_tokens else "",
        ("cache", *(heading for heading, _ in columns)),
        tuple((names.get(id(of), of.spec), *(write(of) for _, write in columns)) for of in rows),
    )


def _columns(results: Results) -> Iterator[Column]:
    yield "class", verdict
    if "exactness" in results.tasks:
        yield "float64 proof", lambda of: "-" if of.proof is None else f"{of.proof.logit_difference:.1e}"
        yield "states rewritten", rewrites
    if "perplexity" in results.tasks:
        yield "perplexity", _of_fidelity(lambda of: f"{of.perplexity.value:.4f}")
        yield (
            "difference",
            _of_fidelity(lambda of: f"{of.perplexity_difference.value:+.2g}{spread(of.perplexity_difference)}"),
        )
    if "fidelity" in results.tasks:
        yield "KL mean", _of_fidelity(lambda of: f"{of.kl_mean.value:.2e}{spread(of.kl_mean)}")
        yield "KL p99", _of_fidelity(lambda of: f"{of.kl_p99:.2e}")
        yield "KL max", _of_fidelity(lambda of: f"{of.kl_max:.2e}")
        yield "top-1", _of_fidelity(lambda of: f"{of.top1_agreement.value:.2%}")
    if results.scored_tokens:
        yield "MiB held", lambda of: f"{of.bytes_held / 2**20:.2f}"
        yield "bytes/token", lambda of: f"{of.bytes_held / of.tokens_held:.0f}" if of.tokens_held else "-"
        yield "bits/number", lambda of: f"{of.bytes_held / 2**20 * results.bits_per_mib:.2f}"
    if "retrieval" in results.tasks:
        yield "recall", lambda of: f"{mean(of.retrieval, lambda one: one.recall):.1%}" if of.retrieval else "-"
        yield "gold p", lambda of: f"{mean(of.retrieval, lambda one: one.probability):.4f}" if of.retrieval else "-"
    if "generation" in results.tasks:
        yield "same text", lambda of: f"{of.generation.same_text:.0%}" if of.generation else "-"
        yield "tokens alike", lambda of: f"{of.generation.agreement_tokens:.1f}" if of.generation else "-"
    if "cost" in results.tasks:
        yield "first token, ms", lambda of: f"{of.cost.first_token_ms:,.0f}" if of.cost else "-"
        yield "ms/token", lambda of: f"{of.cost.tokens[-1].milliseconds:.1f}" if of.cost and of.cost.tokens else "-"
        yield "MiB peak", lambda of: f"{of.cost.peak_bytes / 2**20:.2f}" if of.cost else "-"


def _of_fidelity(write: Callable[[Fidelity], str]) -> Callable[[CacheResult], str]:
    return lambda of: "-" if of.scores is None else write(of.scores)


def as_markdown(results: Results, plots: list[str] | tuple[str, ...]) -> str:
    """The report for people."""
    lines = [
        f"# Cache evaluation: {results.model}",
        "",
        *(f"- **FAILED** {failure}" for failure in results.failures),
        *([""] if results.failures else []),
        _sizes(results),
        "",
        *(f"- {verdict_line(cache, results.reference)}" for cache in results.caches),
        "",
        *markdown(main_table(results)),
        *(line for name in plots for line in (f"![{name}]({name})", "")),
        *(line for table in tables(results) for line in markdown(table)),
        *_proofs(results),
        "## Environment",
        "",
        *(f"- {name}: {value}" for name, value in results.environment.items()),
        "",
    ]
    return "\n".join(lines)


def _sizes(results: Results) -> str:
    if not results.scored_tokens:
        return f"{results.dtype}, seed {results.seed}, {results.seconds:.0f} s."
    size = results.protocol
    return (
        f"{results.scored_tokens:,} tokens of `{results.dataset}` scored in {results.windows} windows of "
        f"{size.window_tokens:,} (prefill {size.prefill_tokens}, then chunks of {size.chunk_tokens} through "
        f"the cache), {results.dtype}, seed {results.seed}, {results.seconds:.0f} s."
    )


def _proofs(results: Results) -> list[str]:
    if "exactness" not in results.tasks:
        return []
    caches = (results.reference, *results.caches)
    return ["## Proofs", "", *(line for cache in caches for line in _proof_lines(cache))]


def _proof_lines(cache: CacheResult) -> list[str]:
    proof = cache.proof
    claim = f" ({cache.declared_reason})" if cache.declared_reason else ""
    head = [f"### {cache.spec}", "", f"Declares: {cache.declared}{claim}. Measured: {cache.measured}.", ""]
    if cache.audit is None:
        head += [f"No audit of stored states: {cache.audit_note}.", ""]
    else:
        found = cache.audit
        first = f", first {found.first}" if found.first else ""
        reads = f"Stored states, read after each of {found.appends} appends ({found.tokens:,} tokens): rewritten"
        head += [f"{reads} {rewrites(cache)}, {found.rewrites_mean:.2f} times a token in the mean{first}.", ""]
    if proof is None:
        return [*head, f"No proof: {cache.proof_note}.", ""]
    return [
        *head,
        (
            f"float64, {proof.attention}, up to {proof.context_tokens:,} tokens; logit scale {proof.logit_scale:.3g}, "
            f"tolerance {proof.tolerance:.1e}."
        ),
        "",
        *(
            f"- {of.mode}: refused, {of.error}"
            if of.error
            else f"- {of.mode}, {of.positions} positions: {of.logit_difference:.1e}"
            for of in proof.differences
        ),
        *(
            f"- {of.mode}: same tokens, scores within {of.score_difference:.1e}" if of.equal else f"- {of.complaint}"
            for of in proof.generation
        ),
        "",
    ]
