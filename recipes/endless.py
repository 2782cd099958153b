"""Read a text far longer than the model was trained to, in constant memory and time.

    python recipes/endless.py --text stdlib --tokens 65536

A text is fed once through each cache, in chunks; every token is predicted by a pass that read the cache. The end of the
text is its beginning again, so that its difficulty is the same: the perplexity of the last 8,192 tokens can be held
against that of the first 8,192 after a warm-up. With more than twice the window between them, nothing of the first
reading is in the cache at the second.

Written to the folder: `NAME.json` for each cache, and `endless.png`. A cache whose file is there already is not run
again.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.datasets import load_text
from hf_kvcache.evaluation.models import load_model
from hf_kvcache.evaluation.protocols import forward

CACHES = ("window:window=2048,rerotate=true", "window:window=2048", "dynamic@12288")
COLORS = ("#1f77b4", "#2ca02c", "#7f7f7f", "#d95f02", "#9467bd")


def repeated(ids: torch.Tensor, tokens: int, again: int) -> torch.Tensor:
    """The first tokens of `ids`, the last `again` of them replaced by the first `again`."""
    if len(ids) < tokens - again:
        raise typer.BadParameter(f"the text has {len(ids):,} tokens, {tokens - again:,} are needed")
    return torch.cat([ids[: tokens - again], ids[:again]])


def read(model: PreTrainedModel, spec: str, ids: torch.Tensor, chunk: int) -> list[dict[str, Any]]:
    """Feed `ids` through the cache `spec`; for every chunk its end, loss in nats, seconds and the bytes then held.

    Seconds are the processor time of all threads, which a machine that does other things besides does not lengthen.
    """
    cache = resolve_cache(spec, len(ids))(model.config)
    steps = []
    for begin in tqdm(range(0, len(ids) - 1, chunk), desc=spec, unit="chunk"):
        end = min(begin + chunk, len(ids) - 1)
        start = time.process_time()
        logits = forward(model, ids[None, begin:end], cache)[0]
        seconds = time.process_time() - start
        losses = torch.nn.functional.cross_entropy(logits.float(), ids[begin + 1 : end + 1], reduction="sum")
        if hasattr(cache, "memory"):
            held = cache.memory().total_bytes
        else:
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        steps.append({"end": end, "tokens": end - begin, "loss": losses.item(), "seconds": seconds, "bytes": held})
    return steps


def perplexity(steps: list[dict[str, Any]], begin: int, end: int) -> float:
    """Of the tokens of the chunks that lie between two places."""
    chosen = [step for step in steps if begin < step["end"] <= end]
    return math.exp(sum(step["loss"] for step in chosen) / max(1, sum(step["tokens"] for step in chosen)))


def draw(runs: dict[str, list[dict[str, Any]]], trained: int, file: Path) -> None:
    """Perplexity, bytes and time against the place in the text."""
    figure = Figure(figsize=(8, 9), layout="constrained")
    for place, (quantity, label) in enumerate(
        (("perplexity", "perplexity"), ("bytes", "MiB held"), ("seconds", "processor ms per token"))
    ):
        axes = figure.add_subplot(3, 1, place + 1)
        for color, (spec, steps) in zip(COLORS, runs.items(), strict=False):
            if quantity == "perplexity":
                span = min(1024, steps[-1]["end"] // 8)
                places = range(span, steps[-1]["end"] + 1, span)
                points = [(end, perplexity(steps, end - span, end)) for end in places]
            elif quantity == "bytes":
                points = [(step["end"], step["bytes"] / 2**20) for step in steps]
            else:
                points = [(step["end"], 1000 * step["seconds"] / step["tokens"]) for step in steps]
            axes.plot(*zip(*points, strict=True), color=color, label=spec)
        axes.axvline(trained, color="black", linewidth=0.8, linestyle=":", label=f"trained to {trained:,}")
        axes.set(ylabel=label, xlabel="tokens read", yscale="log" if quantity != "seconds" else "linear")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 0:
            axes.legend(frameon=False)
    figure.savefig(file, dpi=130)


def main(
    model: Annotated[str, typer.Option(help="A hub id, a folder, or smollm2-135m.")] = "smollm2-135m",
    text: Annotated[str, typer.Option(help="As for the evaluation: stdlib, file:PATH, a hub data set.")] = "stdlib",
    cache: Annotated[list[str] | None, typer.Option(help="SPEC, or SPEC@TOKENS to stop it early.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the text.")] = 65_536,
    part: Annotated[int, typer.Option(help="Tokens compared at the beginning and at the end.")] = 8192,
    warm_up: Annotated[int, typer.Option(help="Tokens before the first of these.")] = 2048,
    chunk: Annotated[int, typer.Option(help="Tokens fed at once.")] = 256,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("results/endless"),
) -> None:
    """Feed a long text through caches and compare its end with its beginning."""
    loaded = load_model(model, getattr(torch, dtype))
    words = "\n\n".join(load_text(text))[: 8 * tokens]
    ids = repeated(torch.tensor(loaded.tokenizer(words)["input_ids"]), tokens, warm_up + part)
    out.mkdir(parents=True, exist_ok=True)
    runs = {}
    for item in cache or CACHES:
        spec, _, stop = item.partition("@")
        file = out / (spec.replace(":", "-").replace(",", "-").replace("+", "-") + ".json")
        if not file.exists():
            steps = read(loaded.model, spec, ids[: int(stop) + 1] if stop else ids, chunk)
            file.write_text(json.dumps({"model": model, "text": text, "dtype": dtype, "spec": spec, "steps": steps}))
        runs[spec] = json.loads(file.read_text())["steps"]
    print(f"{'cache':36} {'first':>9} {'last':>9} {'change':>8} {'MiB':>8} {'ms/token first':>15} {'last':>6}")
    for spec, steps in runs.items():
        end = steps[-1]["end"]
        first, last = perplexity(steps, warm_up, warm_up + part), perplexity(steps, end - part, end)
        pace = [
            1000 * sum(step["seconds"] for step in some) / sum(step["tokens"] for step in some)
            for some in ([s for s in steps if warm_up < s["end"] <= warm_up + part], steps[-(part // chunk) :])
        ]
        held = steps[-1]["bytes"] / 2**20
        change = f"{100 * (last / first - 1):+.1f} %" if end + 1 == tokens else "-"
        print(f"{spec:36} {first:9.2f} {last:9.2f} {change:>8} {held:8.1f} {pace[0]:15.2f} {pace[1]:6.2f}")
    trained = loaded.model.config.max_position_embeddings
    draw(runs, trained, out / "endless.png")


if __name__ == "__main__":
    typer.run(main)
