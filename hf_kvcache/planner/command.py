"""The command `hf-kvcache plan`."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..errors import InputError
from .plan import as_json, make_plan
from .prefix import prefix_reuse
from .presets import loadable_name
from .report import plan_tables, reuse_line


class StatesDtype(str, Enum):
    """Dtypes of keys, values and activations."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def plan_command(
    model: Annotated[
        str, typer.Argument(help="Preset (llama-3.1-8b, ...), hub id, folder, config.json or GGUF file. Runs no code.")
    ],
    gpu: Annotated[str | None, typer.Option(help="h100, a100, 4090, ... or its memory, such as 24GiB.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text at its end.")] = 8192,
    batch: Annotated[int, typer.Option(help="Different texts at once.")] = 1,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="Cache, may be repeated. [default: paged and dynamic]", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs of a tensor-parallel group; sizes are those of one.")] = 1,
    weights_dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float8, int8 or int4.")] = "bfloat16",
    dtype: Annotated[StatesDtype, typer.Option(help="Of keys, values and activations.")] = StatesDtype.bfloat16,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate, for the operations.")] = 512,
    hit_rate: Annotated[float | None, typer.Option(help="Share of the prompt in a prefix cache, 0 to 1.")] = None,
    price: Annotated[float | None, typer.Option(help="Per million prompt tokens.")] = None,
    cached_price: Annotated[float | None, typer.Option(help="Per million prompt tokens that were cached.")] = None,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Load the model here and time its decode steps.")] = False,
) -> None:
    """Say what a model and its cache need, and what fits, before anything is loaded."""
    if measure and model.lower().endswith(".gguf"):
        raise InputError(f"expected a folder or a hub id to load and --measure, got {model}, which can only be planned")
    states = getattr(torch, dtype.value)
    plan = make_plan(
        model, gpu, context, batch, tuple(cache or ("paged", "dynamic")), new_tokens, tp, weights_dtype, states
    )
    prompt = max(1, plan.tokens - plan.new_tokens)
    reuse = None
    if hit_rate is not None:
        speed = None if plan.gpu is None or plan.gpu.flops is None else plan.gpu.flops * plan.ranks
        reuse = prefix_reuse(plan.work, prompt, hit_rate, speed, price, cached_price)
    measured = []
    if measure:
        from ..evaluation.models import load_model
        from .measure import measure_decode, memory_bandwidth

        loaded = load_model(loadable_name(model), states)
        bandwidth = memory_bandwidth(loaded.model.device)
        measured = [measure_decode(loaded, planned.spec, plan.tokens, bandwidth) for planned in plan.caches]
    if as_json_text:
        record = as_json(plan) | {"measured": [item._asdict() for item in measured]}
        record["prefix_reuse"] = None if reuse is None else reuse._asdict()
        typer.echo(json.dumps(record, indent=2))
    else:
        console = Console()
        for part in plan_tables(plan):
            console.print(part, highlight=False, soft_wrap=isinstance(part, str))
        if reuse is not None:
            console.print(reuse_line(reuse, prompt), highlight=False, soft_wrap=True)
        for item in measured:
            console.print(
                f"{item.spec}: {1000 * item.measured_seconds:.1f} ms per step measured here, bound "
                f"{1000 * item.bound_seconds:.1f} ms at {item.bandwidth / 1e9:.1f} GB/s",
                highlight=False,
            )
    if plot is not None:
        from .plots import write_plots

        for file in write_plots(plan, plot):
            typer.echo(f"Plot: {file}", err=True)
