"""The command `hf-kvcache demo`: one model and one text, without a cache, with DynamicCache and with PagedCache.

The evaluation (in float32, with its proof in float64) says whether results are the same; the benchmark says what they
cost, in bfloat16, or in float32 on a processor without fast products of 16-bit numbers. Nothing is measured here that
`hf-kvcache eval` and `bench` do not measure.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_kvcache.attention.matmul import product_dtype
from hf_kvcache.bench import BenchResults, CacheSpeed, Sizes, benchmark
from hf_kvcache.bench.command import parse_contexts
from hf_kvcache.bench.plots import write_plots
from hf_kvcache.bench.report import as_json as bench_as_json
from hf_kvcache.bench.report import formula_line, markdown_table
from hf_kvcache.bench.run import UNCACHED_TOKENS
from hf_kvcache.caches import PagedCache
from hf_kvcache.evaluation import (
    CacheResult,
    ContradictionError,
    LoadedModel,
    Protocol,
    Results,
    evaluate,
    load_model,
    load_text,
)
from hf_kvcache.evaluation.models import position_limit
from hf_kvcache.evaluation.protocols import cache_argument
from hf_kvcache.evaluation.report import as_json as evaluation_as_json
from hf_kvcache.evaluation.report import verdict

SCHEMA = "hf-kvcache-demo/1"
PROMPT = "The capital of France is"
NEW_TOKENS = 24
SCORED_TOKENS = 1024
PREFILL_TOKENS = 256
STEPS = 15
COLUMNS = ("", "use_cache=False", "DynamicCache", "PagedCache")


@dataclass(frozen=True)
class Generated:
    """A prompt continued without a cache and through PagedCache, greedily.

    Attributes:
        prompt: Where both began.
        uncached: The text without a cache, prompt included.
        paged: The text through PagedCache.
    """

    prompt: str
    uncached: str
    paged: str

    @property
    def same(self) -> bool:
        """Whether both are the same text."""
        return self.uncached == self.paged


def demo_command(
    model: Annotated[
        str, typer.Option(help="Hub id, folder, or smollm2-135m (built in, needs no hub).")
    ] = "smollm2-135m",
    dataset: Annotated[str, typer.Option(help="file:PATH, stdlib, wikitext-2, or a hub data set.")] = "stdlib",
    contexts: Annotated[
        str, typer.Option(help="Lengths of the history at which a token is timed.")
    ] = "128,1024,4096,8192",
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("results/demo"),
) -> None:
    """Show PagedCache at work: the same result as without a cache, its speed, and the bytes it holds.

    Takes about four minutes on two CPU cores with the built-in model. Ends with exit code 1 if the request is
    impossible, or if a cache is not what it declares (the report is written all the same).
    """
    console = Console()
    sizes = Sizes(parse_contexts(contexts), steps=STEPS)
    documents = load_text(dataset)
    loaded = load_model(model)
    dtype = product_dtype(torch.bfloat16, loaded.model.device)
    generated, found = _results(loaded, documents, dataset)
    del loaded  # its memory is the benchmark's
    speed = benchmark(load_model(model, dtype), ["paged", "none"], sizes)
    report = write_demo(generated, found, speed, output)
    console.print(_rich_table(found, speed))
    for line in (*_notes(found, speed), *_text_lines(generated), f"Report: {report}", "", *next_steps()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for failure in found.failures:
        console.print(f"FAILED {failure}", style="bold red", highlight=False, markup=False)
    if found.failures or not generated.same:
        raise typer.Exit(1)


def generate_both(loaded: LoadedModel, prompt: str = PROMPT) -> Generated:
    """Continue `prompt` by `NEW_TOKENS` tokens, without a cache and through PagedCache."""
    cached = {cache_argument(loaded.model): PagedCache(loaded.model.config)}
    return Generated(prompt, _generate(loaded, prompt, {"use_cache": False}), _generate(loaded, prompt, cached))


def write_demo(generated: Generated, found: Results, speed: BenchResults, folder: Path) -> Path:
    """Write results.json, report.md and the plots into `folder`, made if missing; gives the path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": SCHEMA,
        "generation": asdict(generated) | {"same": generated.same},
        "evaluation": evaluation_as_json(found),
        "bench": bench_as_json(speed),
    }
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")
    plots = write_plots(speed, folder)
    lines = [
        f"# PagedCache on {found.model}",
        "",
        *(f"- **FAILED** {failure}" for failure in found.failures),
        *markdown_table(COLUMNS, table_rows(found, speed)),
        "",
        *(f"{note}\n" for note in _notes(found, speed)),
        *(f"![{plot.name}]({plot.name})\n" for plot in plots),
        "## The text",
        "",
        *(f"{line}\n" for line in _text_lines(generated)),
        "## Next",
        "",
        "```",
        *next_steps(),
        "```",
        "",
        "## Environment",
        "",
        *(f"- {name}: {value}" for name, value in speed.environment.items()),
        "",
    ]
    report = folder / "report.md"
    report.write_text("\n".join(lines), encoding="utf-8")
    return report


def table_rows(found: Results, speed: BenchResults) -> list[tuple[str, ...]]:
    """The table as text, by `COLUMNS`."""
    results = (found.noise_floor, found.reference, found.caches[0])
    by_spec = {cache.spec: cache for cache in speed.caches}
    caches = [by_spec[result.spec] for result in results]
    longest = speed.lengths("decode")[-1]
    prompt, beams = speed.lengths("prefill")[0], speed.lengths("beams")[0]
    times = [
        (f"time to first token, prompt of {prompt:,} tokens", "prefill", prompt),
        *((f"ms per token after {length:,} tokens", "decode", length) for length in speed.lengths("decode")),
        (f"ms per step of 4 beams after {beams:,} tokens", "beams", beams),
    ]
    return [
        ("exactness, measured against no cache", "the yardstick", *(_exactness(result) for result in results[1:])),
        ("proof: largest logit difference in float64", *map(_proof, results)),
        ("ways to generate that give the same tokens", *map(_modes, results)),
        (f"perplexity of {found.scored_tokens:,} tokens", *(f"{of.fidelity.perplexity.value:.4f}" for of in results)),
        *((label, *(_milliseconds(cache, task, length) for cache in caches)) for label, task, length in times),
        (f"MiB held after {longest:,} tokens", *(_mebibytes(cache, "decode", longest) for cache in caches)),
        (f"MiB held by 4 beams after {beams:,} tokens", *(_mebibytes(cache, "beams", beams) for cache in caches)),
    ]


def next_steps() -> tuple[str, str, str]:
    """What to do with a model of one's own, a line each."""
    return (
        "Use it:    model.generate(**inputs, past_key_values=PagedCache(model.config))",
        "Prove it:  hf-kvcache eval --model YOUR_MODEL --cache paged --dataset file:YOUR_TEXT",
        "Time it:   hf-kvcache bench --model YOUR_MODEL --cache paged",
    )


def _results(loaded: LoadedModel, documents: Any, dataset: str) -> tuple[Generated, Results]:
    """The generated text and the evaluation."""
    generated = generate_both(loaded)
    try:
        protocol = _protocol(loaded.model)
        results = evaluate(loaded, documents, ["paged"], protocol=protocol, max_tokens=SCORED_TOKENS, dataset=dataset)
    except ContradictionError as error:
        results = error.results
    return generated, results


def _protocol(model: PreTrainedModel) -> Protocol:
    """All of `SCORED_TOKENS` in one window, or as much as the model has positions for."""
    full = PREFILL_TOKENS + SCORED_TOKENS + 1
    positions = position_limit(model)
    window = full if positions is None else min(full, positions)
    return Protocol(window, min(PREFILL_TOKENS, window // 4))


def _generate(loaded: LoadedModel, prompt: str, cache: dict[str, Any]) -> str:
    inputs = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.model.device)
    output = cast("Any", loaded.model).generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **cache,
    )
    return str(loaded.tokenizer.decode(output[0], skip_special_tokens=True))


def _exactness(result: CacheResult) -> str:
    """What the float64 proof says; that logits of one text may agree bit for bit as well is not the point here."""
    proven = result.proof is not None and not result.proof.complaints and not result.failures
    return "exact up to rounding" if proven else verdict(result)


def _proof(result: CacheResult) -> str:
    return "-" if result.proof is None else f"{result.proof.logit_difference:.1e}"


def _modes(result: CacheResult) -> str:
    if result.proof is None:
        return "-"
    checks = result.proof.generation
    return f"{sum(check.equal for check in checks)} of {len(checks)}" if checks else "the yardstick"


def _milliseconds(cache: CacheSpeed, task: Any, tokens: int) -> str:
    measurement = cache.find(task, tokens)
    if measurement is None:
        return "-"
    speedup = measurement.timing.speedup
    times = f" ({speedup.median:.2f}x)" if speedup and cache.spec == "paged" else ""
    return f"{measurement.timing.milliseconds.median:,.1f}{times}"


def _mebibytes(cache: CacheSpeed, task: Any, tokens: int) -> str:
    measurement = cache.find(task, tokens)
    if measurement is None or measurement.held is None:
        return "0" if cache.spec == "none" else "-"
    held = measurement.held
    unused = "" if held.unused_share is None else f", {held.unused_share:.1%} unused"
    return f"{held.total_bytes / 2**20:,.1f}{unused}"


def _notes(found: Results, speed: BenchResults) -> tuple[str, ...]:
    proof = found.caches[0].proof
    passes = "" if proof is None else f" (passes up to {proof.tolerance:.0e})"
    results = (
        f"Results: {found.dtype}, {found.scored_tokens:,} tokens of {found.dataset}, scored through the cache; the "
        f"proof compares logits with use_cache=False in float64{passes}."
    )
    times = (
        f"Times: {speed.dtype}, {speed.environment['torch_threads']} threads, medians, the caches taking turns token "
        "by token; x: how many times faster than DynamicCache. Without a cache every token takes a pass over the "
        f"whole text, timed up to {UNCACHED_TOKENS:,} tokens only."
    )
    return results, times, formula_line(speed)


def _text_lines(generated: Generated) -> tuple[str, ...]:
    same = "the same as without a cache" if generated.same else f"DIFFERENT from: {generated.uncached!r}"
    return (f"Generated through PagedCache, {same}: {generated.paged!r}",)


def _rich_table(found: Results, speed: BenchResults) -> Table:
    table = Table(title=f"{found.model}: no cache, transformers' cache, ours")
    for place, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in table_rows(found, speed):
        table.add_row(*row)
    return table
