"""Run out of memory in the middle of a generation, move the history to disk, and go on to the same text.

    MALLOC_MMAP_THRESHOLD_=131072 python recipes/out_of_memory.py --folder /scratch

The variable makes glibc give large tensors back to the system when they are freed. Without it some stay in a heap with
holes, and what was moved to disk may leave no hole that is large enough for the buffers to read it back.

`generate_to_the_end` is what to take into a program of one's own. Around it, the model of `longer_than_memory.py` with
a history of random states is limited to the memory it has by then and a little more, so that there is none the next
time its cache grows.

Greedy decoding only: after an error nothing is left of the random numbers that sampling had drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from longer_than_memory import allocated_bytes, fill, limit_memory, small_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

from hf_kvcache import KVCache, PagedCache
from hf_kvcache.evaluation.protocols import cache_argument
from hf_kvcache.units import parse_bytes


class Text(BaseStreamer):
    """Keeps the tokens of one row as they are made, so that they outlive an error."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token."""
        self.ids.append(value.reshape(1, -1))

    def end(self) -> None:
        """Nothing is left to do."""


def generate_to_the_end(
    model: PreTrainedModel, input_ids: Tensor, cache: KVCache, new_tokens: int, budget: str | int, residency: str
) -> Tensor:
    """Greedy `model.generate` of one row; should memory run out, the history moves below and generation goes on.

    Args:
        model: The model.
        input_ids: The prompt, or what of it is not cached yet, ``[1, tokens]``.
        cache: Any cache of this library that is not offloaded already and can be cropped.
        new_tokens: Tokens to generate.
        budget: What may stay in memory after memory ran out; see `OffloadedCache`.
        residency: Where the rest goes.

    Returns:
        The new tokens ``[1, new_tokens]``.
    """
    options = {cache_argument(model): cache, "do_sample": False}
    text, before = Text(), cache.get_seq_length()
    try:
        model.generate(**cache.continuation(input_ids), max_new_tokens=new_tokens, streamer=text, **options)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError of a GPU is a RuntimeError too
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
    else:
        return torch.cat(text.ids[1:], dim=1)
    # Outside of `except`: until that ends, the error holds what the failed pass had allocated.
    held = cache.recover()
    cache.keep_within(budget, residency)
    ids = torch.cat(text.ids, dim=1)
    made = ids.shape[1] - input_ids.shape[1]
    print(f"memory ran out after {made} tokens; the history goes on with {cache.memory().device_bytes}")
    rest = cache.continuation(ids[:, held - before :])
    model.generate(**rest, max_new_tokens=new_tokens - made, streamer=(more := Text()), **options)
    return torch.cat([*text.ids[1:], *more.ids[1:]], dim=1)


def filled(model: PreTrainedModel, tokens: int) -> PagedCache:
    """A cache with a history of random states that has to grow, by a copy of one layer, some 16 tokens later."""
    cache = PagedCache(model.config)
    fill(cache, tokens)
    fill(cache, tokens // 64 - 16)
    return cache


def main(
    folder: Annotated[Path, typer.Option(help="Where the history may lie; on a disk, not in memory.")] = Path(),
    tokens: Annotated[int, typer.Option(help="Length of the history; a multiple of 4,096.")] = 65536,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    more: Annotated[str, typer.Option(help="What may be allocated after the history is there.")] = "8MiB",
) -> None:
    """Generate 32 tokens undisturbed, then once more while memory runs out."""
    model, first = small_model(layers, tokens), torch.tensor([[1]])
    undisturbed, cache = filled(model, tokens), filled(model, tokens)
    expected = generate_to_the_end(model, first, undisturbed, 32, "1GiB", "host")
    limit_memory(allocated_bytes() + parse_bytes(more))
    found = generate_to_the_end(model, first, cache, 32, cache.memory().payload_bytes // 2, f"disk:{folder.resolve()}")
    print("the same 32 tokens" if torch.equal(found, expected) else f"{found} instead of {expected}")


if __name__ == "__main__":
    typer.run(main)
