"""The command `hf-kvcache eval`."""

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_kvcache.errors import InputError, KVCacheError
from hf_kvcache.evaluation.agreement import Prompts, default_prompts
from hf_kvcache.evaluation.config import read_config
from hf_kvcache.evaluation.datasets import load_text
from hf_kvcache.evaluation.models import load_model, position_limit
from hf_kvcache.evaluation.processes import own_device, team
from hf_kvcache.evaluation.protocols import Protocol
from hf_kvcache.evaluation.report import as_text, main_table, write_report
from hf_kvcache.evaluation.results import ContradictionError, Results
from hf_kvcache.evaluation.retrieval import Grid, default_grid
from hf_kvcache.evaluation.run import evaluate
from hf_kvcache.evaluation.tasks import DEFAULT_TASKS, TASKS, Task, parse_tasks
from hf_kvcache.evaluation.verdicts import verdict_line

Number = TypeVar("Number", int, float)


class Dtype(str, Enum):
    """Working dtypes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


def evaluate_command(
    model: Annotated[
        str, typer.Option(help="Hub id, folder, or smollm2-135m (built in, needs no hub).")
    ] = "smollm2-135m",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="Cache to evaluate, may be repeated: ours (paged:block_size=64), transformers' (dynamic, "
            "static, offloaded, quantized:backend=quanto,nbits=4), none, or module:function. [default: paged]",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to measure, may be repeated: {', '.join(TASKS)}, or all. [default: {', '.join(DEFAULT_TASKS)}]",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[str, typer.Option(help="file:PATH, stdlib, wikitext-2, or a hub data set.")] = "stdlib",
    max_tokens: Annotated[int, typer.Option(help="Tokens to score at most.")] = 8192,
    window: Annotated[int, typer.Option(help="Tokens a cache sees at most before it starts anew.")] = 2048,
    prefill: Annotated[int, typer.Option(help="Tokens of a window fed first, not scored.")] = 256,
    chunk: Annotated[int, typer.Option(help="Tokens per forward pass after that; 1 is true decoding.")] = 128,
    stride: Annotated[
        int | None,
        typer.Option(help="Perplexity: also of whole documents, by windows that move on by so many tokens."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Retrieval: tokens of the prompts. [default: 512,1024; 768 if all]", show_default=False),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(
            help="Retrieval: places of the answer, 0 (start) to 1 (end). [default: 0,0.5,1; 0.25 if all]",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(help="Generation: prompts. [default: 8; 4 if all]", show_default=False)
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Generation: tokens of each. [default: 1024; 768 if all; or what there is room for]",
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(help="Generation: tokens written after each. [default: 128; 64 if all]", show_default=False),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Cost: lengths of the history, in tokens.")] = "128,1024",
    dtype: Annotated[Dtype, typer.Option(help="Working dtype.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("results/eval"),
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the reference's logits for other runs; those in it are not computed anew."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of bootstrap draws and sampled generation.")] = 0,
    config: Annotated[  # noqa: ARG001 - it only sets the defaults of the others
        Path | None,
        typer.Option(help="YAML file with options; the command line wins.", callback=read_config, is_eager=True),
    ] = None,
) -> None:
    """Say whether caches are exact, how far they are if not, and what they hold.

    Ends with exit code 1 if a cache is not what it declares, after writing the report; with 2 if the request
    is impossible, or the report cannot be written (its numbers are printed then).
    """
    console = Console()
    try:
        protocol, tasks = Protocol(window, prefill, chunk), parse_tasks(task or DEFAULT_TASKS)
        loaded = load_model(model, getattr(torch, dtype.value), own_device(device))
        results = evaluate(
            loaded,
            load_text(dataset),
            cache or ["paged"],
            tasks=tasks,
            protocol=protocol,
            prompts=_prompts(tasks, position_limit(loaded.model), prompts, prompt_tokens, new_tokens),
            contexts=_numbers(contexts, int),
            grid=_grid(tasks, lengths, depths),
            max_tokens=max_tokens,
            stride_tokens=stride,
            seed=seed,
            dataset=dataset,
            folder=output,
            reference=reference,
        )
    except ContradictionError as error:
        results = error.results
    except KVCacheError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False)
        raise typer.Exit(2) from error
    if team(loaded.model.device).first:
        _show(results, console)
        _write(results, output, console)
    if results.failures:
        raise typer.Exit(1)


def _write(results: Results, folder: Path, console: Console) -> None:
    """Write the report; if that fails, print the record, so that nothing is lost that was computed."""
    try:
        files = write_report(results, folder)
    except OSError as error:
        typer.echo(as_text(results))
        message = f"the report cannot be written: {error}. results.json was printed instead"
        Console(stderr=True).print(f"[red]OSError[/red]: {message}", highlight=False)
        raise typer.Exit(2) from error
    console.print(f"Report: {files[1]}", highlight=False)


def _show(results: Results, console: Console) -> None:
    console.print(_table(results))
    for found in results.caches:
        console.print(verdict_line(found, results.reference), highlight=False, markup=False)
    for failure in results.failures:
        console.print(f"[bold red]FAILED[/bold red] {failure}", highlight=False)


def _grid(tasks: Sequence[Task], lengths: str | None, depths: str | None) -> Grid:
    """The problems of these tasks; what is not said is as in `default_grid`."""
    grid = default_grid(tasks)
    return Grid(
        grid.lengths_tokens if lengths is None else _numbers(lengths, int),
        grid.depths if depths is None else _numbers(depths, float),
    )


def _prompts(
    tasks: Sequence[Task], positions: int | None, count: int | None, prompt_tokens: int | None, new_tokens: int | None
) -> Prompts:
    """What these tasks continue; what is not said is as in `default_prompts`."""
    prompts = default_prompts(tasks, positions)
    return Prompts(
        prompts.count if count is None else count,
        prompts.prompt_tokens if prompt_tokens is None else prompt_tokens,
        prompts.new_tokens if new_tokens is None else new_tokens,
    )


def _numbers(text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"expected numbers separated by commas, got {text!r}") from error


def _table(results: Results) -> Table:
    """One column a cache: the figures of a row stand side by side, also on a narrow terminal."""
    scored = f": {results.scored_tokens:,} tokens of {results.dataset}" if results.scored_tokens else ""
    table = Table(
        title=f"{results.model}, {results.dtype}{scored}",
        caption="KL in nats per token; in brackets: 95 % intervals; proof: largest logit difference in float64",
    )
    found = main_table(results)
    for heading in (found.columns[0], *(row[0] for row in found.rows)):
        table.add_column(heading, justify="right" if table.columns else "left", overflow="fold")
    for place, name in enumerate(found.columns[1:], start=1):
        table.add_row(name, *(row[place].replace(" [", "\n[").replace("[", r"\[") for row in found.rows))
    return table
