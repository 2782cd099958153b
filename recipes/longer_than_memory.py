"""Generate from a history that takes more memory than the process may have.

    python recipes/longer_than_memory.py --folder /scratch

A model of the geometry of SmolLM2-135M, with random weights and narrow feed-forward layers, gets a history of 65,536
tokens (1.4 GiB in bfloat16) of random states: a prefill of that length would take hours on a CPU, and what the text
says does not matter here. The process is limited to less memory than the history takes. `OffloadedCache` generates,
and `PagedCache` fails.

The limit is `RLIMIT_DATA` of Linux: whatever a process allocates for itself, torch's own memory and the model included.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_kvcache import KVCache, OffloadedCache, PagedCache
from hf_kvcache.evaluation.protocols import cache_argument
from hf_kvcache.units import format_bytes, parse_bytes

HEADS, WIDTH = 3, 64
CHUNK_TOKENS = 1024


def small_model(layers: int, tokens: int) -> PreTrainedModel:
    """The geometry of SmolLM2-135M's attention, and little else."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=HEADS,
        vocab_size=64,
        max_position_embeddings=2 * tokens,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def fill(cache: KVCache, tokens: int) -> None:
    """Give the cache a history of random states, chunk by chunk, as a prefill in chunks would."""
    generator = torch.Generator().manual_seed(0)
    chunks = [min(CHUNK_TOKENS, tokens - begin) for begin in range(0, tokens, CHUNK_TOKENS)]
    for count in tqdm(chunks, desc=type(cache).__name__, unit="chunk"):
        for index in range(len(cache.layers)):
            shape = (2, 1, HEADS, count, WIDTH)
            keys, values = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
            cache.update(keys, values, index)


def allocated_bytes() -> int:
    """What counts against the limit."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def limit_memory(most_bytes: int) -> None:
    """Let no allocation go beyond the limit any more."""
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def go_on(model: PreTrainedModel, cache: KVCache, tokens: int, new_tokens: int = 4) -> None:
    """Fill the cache, generate from there, and say how it went."""
    fill(cache, tokens)
    inputs = cache.continuation(torch.tensor([[1]]))
    begin = time.perf_counter()
    model.generate(**inputs, **{cache_argument(model): cache}, max_new_tokens=new_tokens, do_sample=False)
    seconds = (time.perf_counter() - begin) / new_tokens
    places = ", ".join(f"{format_bytes(size)} on {place}" for place, size in cache.memory().device_bytes.items())
    print(f"{type(cache).__name__}: {new_tokens} tokens, {seconds:.2f} s each; {places}")


def main(
    folder: Annotated[Path, typer.Option(help="Where the history may lie; on a disk, not in memory.")] = Path(),
    tokens: Annotated[int, typer.Option(help="Length of the history.")] = 65536,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 30,
    limit: Annotated[str, typer.Option(help="What the process may allocate beside torch and the model.")] = "600MiB",
    budget: Annotated[str, typer.Option(help="How much of the history may stay in memory.")] = "256MiB",
) -> None:
    """Generate with one cache, fail with the other."""
    model = small_model(layers, tokens)
    history_bytes = layers * tokens * 2 * HEADS * WIDTH * torch.bfloat16.itemsize
    model(torch.tensor([[1]]))  # what torch sets up for itself at a first pass does not count
    most = allocated_bytes() + parse_bytes(limit)
    print(f"{tokens:,} tokens take {format_bytes(history_bytes)}; the process may allocate {format_bytes(most)}")
    limit_memory(most)
    go_on(model, OffloadedCache(model.config, device_budget=budget, residency=f"disk:{folder.resolve()}"), tokens)
    try:
        go_on(model, PagedCache(model.config), tokens)
    except (RuntimeError, MemoryError) as error:
        print(f"PagedCache: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    typer.run(main)
