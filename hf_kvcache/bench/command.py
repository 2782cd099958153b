"""The command `hf-kvcache bench`."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_kvcache.bench.report import formula_line, headings, legend, table_rows, write_report
from hf_kvcache.bench.results import BenchResults
from hf_kvcache.bench.run import Sizes, benchmark
from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.command import Dtype
from hf_kvcache.evaluation.models import load_model


def bench_command(
    model: Annotated[
        str, typer.Option(help="Hub id, folder, or smollm2-135m (built in, needs no hub).")
    ] = "smollm2-135m",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="Cache to measure, may be repeated: ours (paged:block_size=64), transformers' (static, offloaded, "
            "quantized:backend=quanto,nbits=4), none, or module:function. transformers' dynamic cache is always "
            "measured. [default: paged]",
            show_default=False,
        ),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Lengths of the history, in tokens.")] = "128,1024,4096,8192",
    steps: Annotated[int, typer.Option(help="Tokens timed at each length.")] = 20,
    prompt: Annotated[int, typer.Option(help="Tokens of the prefill; 0 leaves it out.")] = 1024,
    beams: Annotated[int, typer.Option(help="Tokens of the prompt for 4 beams; 0 leaves them out.")] = 2048,
    dtype: Annotated[Dtype, typer.Option(help="Working dtype.")] = Dtype.bfloat16,
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("results/bench"),
    seed: Annotated[int, typer.Option(help="Of token ids, states and beam choices.")] = 0,
) -> None:
    """Time caches on your model, side by side, and measure the bytes they hold.

    Lengths are cut to what the model has positions for. Ends with exit code 1 if the request is impossible.
    """
    console = Console()
    sizes = Sizes(parse_contexts(contexts), prompt, beams, steps)
    loaded = load_model(model, getattr(torch, dtype.value), device)
    results = benchmark(loaded, cache or ["paged"], sizes, seed=seed)
    files = write_report(results, output)
    console.print(_table(results))
    console.print(formula_line(results), highlight=False)
    console.print(f"Report: {files[1]}", highlight=False)


def parse_contexts(text: str) -> tuple[int, ...]:
    """Read lengths in tokens, separated by commas.

    Raises:
        InputError: Something in `text` is not a whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"expected lengths in tokens such as 128,1024, got {text!r}") from error


def _table(results: BenchResults) -> Table:
    table = Table(
        title=f"{results.model}, {results.dtype}, {results.environment['torch_threads']} threads",
        caption=legend(results).replace("`", ""),
    )
    for place, heading in enumerate(headings(results)):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in table_rows(results):
        table.add_row(*(cell.replace(" (", "\n(").replace("[", r"\[") for cell in row))
    return table
