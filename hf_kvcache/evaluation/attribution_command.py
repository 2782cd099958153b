"""The command `hf-kvcache attribute`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hf_kvcache.evaluation.attribution import Part, attribute
from hf_kvcache.evaluation.command import Dtype
from hf_kvcache.evaluation.datasets import load_text
from hf_kvcache.evaluation.environment import environment
from hf_kvcache.evaluation.models import load_model
from hf_kvcache.evaluation.protocols import Protocol

SCHEMA = "hf-kvcache-attribution/1"


def attribute_command(
    cache: Annotated[list[str], typer.Option(help="Cache to take apart, may be repeated; names as for eval.")],
    model: Annotated[
        str, typer.Option(help="Hub id, folder, or smollm2-135m (built in, needs no hub).")
    ] = "smollm2-135m",
    dataset: Annotated[str, typer.Option(help="file:PATH, stdlib, wikitext-2, or a hub data set.")] = "stdlib",
    max_tokens: Annotated[int, typer.Option(help="Tokens to score at most, for every part.")] = 512,
    window: Annotated[int, typer.Option(help="Tokens a cache sees at most before it starts anew.")] = 1024,
    prefill: Annotated[int, typer.Option(help="Tokens of a window fed first, not scored.")] = 511,
    chunk: Annotated[int, typer.Option(help="Tokens per forward pass after that.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="Working dtype.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("results/attribution"),
) -> None:
    """Say which part of an approximate cache costs how much: keys, values, exact tokens, every layer.

    Each part is read from the cache and all others exactly.
    """
    protocol = Protocol(window, prefill, chunk)
    loaded = load_model(model, getattr(torch, dtype.value), device)
    found = {
        spec: attribute(loaded, load_text(dataset), spec, protocol=protocol, max_tokens=max_tokens) for spec in cache
    }
    output.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": SCHEMA,
        "model": loaded.name,
        "dtype": dtype.value,
        "dataset": dataset,
        "protocol": asdict(protocol),
        "max_tokens": max_tokens,
        "caches": {spec: {part.name: part.kl_mean for part in parts} for spec, parts in found.items()},
        "environment": environment(loaded.model),
    }
    (output / "results.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    plot(found, output / "attribution.png")
    console = Console()
    console.print(_table(found))
    console.print(f"Plot: {output / 'attribution.png'}", highlight=False)


def plot(found: dict[str, list[Part]], file: Path) -> None:
    """Draw a bar for every part, a panel for every cache."""
    longest = max(map(len, found.values()))
    figure = Figure(figsize=(5 * len(found), 1 + 0.22 * longest), layout="constrained")
    for place, (spec, parts) in enumerate(found.items(), start=1):
        axes = figure.add_subplot(1, len(found), place)
        axes.barh([part.name for part in parts], [part.kl_mean for part in parts])
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=8)
        axes.set(xlabel="mean KL, nats", title=spec)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=150)


def _table(found: dict[str, list[Part]]) -> Table:
    table = Table(title="Mean KL in nats, each part alone", caption="Parts do not add up: errors meet each other")
    table.add_column("part")
    names = list(dict.fromkeys(part.name for parts in found.values() for part in parts))
    for spec in found:
        table.add_column(spec, justify="right", overflow="fold")
    costs = [{part.name: f"{part.kl_mean:.2e}" for part in parts} for parts in found.values()]
    for name in names:
        table.add_row(name, *(of.get(name, "-") for of in costs))
    return table
