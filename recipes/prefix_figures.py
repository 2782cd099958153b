"""What sharing prefixes saves, measured: the figures of docs/prefix.md.

    python recipes/prefix_figures.py --dtype float32

With the built-in model, SmolLM2-135M, and random token ids, since what they say changes no time. Every figure is a
median; those that are compared are measured in turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_kvcache import PrefixSharedCache, PrefixStore
from hf_kvcache.evaluation.models import load_model
from hf_kvcache.evaluation.protocols import cache_argument

ROWS, DOCUMENT_TOKENS, QUESTION_TOKENS, FORK_TOKENS, STORED_BLOCKS = 16, 2048, 32, 4096, 10_000
TOKEN_IDS = (1000, 40_000)


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def in_turns(repeats: int, *actions: Callable[[], object]) -> list[float]:
    """The median seconds of each action."""
    taken = [[seconds(action) for action in actions] for _ in range(repeats)]
    return [statistics.median(of_action) for of_action in zip(*taken, strict=True)]


def text(tokens: int, seed: int, rows: int = 1) -> Tensor:
    """Token ids."""
    return torch.randint(*TOKEN_IDS, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def prompt(seed: int) -> Tensor:
    """The document and a question."""
    return torch.cat([text(DOCUMENT_TOKENS, 0), text(QUESTION_TOKENS, seed)], dim=1)


def first_token(model: PreTrainedModel, store: PrefixStore, seed: int) -> Callable[[], object]:
    """Ask one question."""
    return lambda: store.generate(model, input_ids=prompt(seed), max_new_tokens=1, do_sample=False)


def from_files(model: PreTrainedModel, folder: str) -> None:
    """The second process: time to the first token with nothing in memory, the time to open the store included."""

    def ask(seed: int) -> float:
        begin = time.perf_counter()
        first_token(model, PrefixStore.open(f"file://{folder}", model), seed)()
        return time.perf_counter() - begin

    print(json.dumps(statistics.median([ask(seed) for seed in range(100, 104)][1:])))  # the first one warms up


def states_of(model: PreTrainedModel, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, as random as the text."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    pairs = [torch.randn(2, *shape, generator=generator) for _ in range(config.num_hidden_layers)]
    return [(keys.to(model.dtype), values.to(model.dtype)) for keys, values in pairs]


@torch.inference_mode()
def filled(model: PreTrainedModel, store: PrefixStore) -> PrefixStore:
    """The store, with the document in it."""
    document = text(DOCUMENT_TOKENS, 0)
    with PrefixSharedCache(model.config, store, document) as cache:
        for index, (keys, values) in enumerate(states_of(model, DOCUMENT_TOKENS)):
            cache.update(keys, values, index)
        cache.commit(document)
    return store


def latency(model: PreTrainedModel, folder: str, dtype: str) -> None:
    """Time to the first token."""
    ids = prompt(1)
    history = DynamicCache(config=model.config)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}
    computed = seconds(lambda: model.generate(ids, **options, **{cache_argument(model): history}))
    print(f"first token of {DOCUMENT_TOKENS} + {QUESTION_TOKENS} tokens: computed {computed:.2f} s")
    store = filled(model, PrefixStore.open(f"file://{folder}", model))
    (memory,) = in_turns(5, first_token(model, store, 2))
    print(f"  found in memory {memory:.3f} s: {computed / memory:.1f} times sooner", flush=True)
    second = subprocess.run(  # noqa: S603 - this very program
        [sys.executable, __file__, "--dtype", dtype, "--files", folder], capture_output=True, text=True, check=True
    )
    files = json.loads(second.stdout)
    print(f"  found in files, second process {files:.3f} s: {computed / files:.1f} times sooner", flush=True)


def batch(model: PreTrainedModel) -> None:
    """Bytes and decode step of many questions on one document, and what the step takes without any history."""
    argument = cache_argument(model)
    ids = torch.cat([text(DOCUMENT_TOKENS, 0).expand(ROWS, -1), text(8, 3, ROWS)], dim=1)
    store = filled(model, PrefixStore.for_model(model))
    cache = store.prepare({"input_ids": ids})[argument]
    plain = DynamicCache(config=model.config)
    for index, pair in enumerate(states_of(model, DOCUMENT_TOKENS)):
        plain.update(*(states.repeat(ROWS, 1, 1, 1) for states in pair), index)
    empty = [DynamicCache(config=model.config)]

    @torch.inference_mode()
    def feed(cache: Any, token_ids: Tensor) -> None:
        model(input_ids=token_ids, logits_to_keep=1, **{argument: cache})

    def alone() -> None:
        feed(empty[0], ids[:, -1:])
        empty[0] = DynamicCache(config=model.config)

    for each in (cache, plain):
        feed(each, ids[:, DOCUMENT_TOKENS:])
    ours, theirs, nothing = in_turns(7, lambda: feed(cache, ids[:, -1:]), lambda: feed(plain, ids[:, -1:]), alone)
    held = cache.memory().total_bytes
    dynamic = sum(states.nbytes for layer in plain.layers for states in (layer.keys, layer.values))
    print(f"{ROWS} questions on it, held: {held / 2**20:.1f} MiB, {held / dynamic:.3f} of a DynamicCache")
    print(f"  decode step {1e3 * ours:.0f} ms, with a DynamicCache {1e3 * theirs:.0f} ms: {theirs / ours:.2f} times")
    print(f"  without any history the model takes {1e3 * nothing:.0f} ms, so reading the histories takes")
    reading, copies = ours - nothing, theirs - nothing
    print(f"  {1e3 * reading:.0f} and {1e3 * copies:.0f} ms: {copies / reading:.1f} times faster")


def fork(model: PreTrainedModel) -> None:
    """Fork of a long history."""
    config = model.config
    cache = PrefixSharedCache(config, PrefixStore.for_model(model), text(FORK_TOKENS, 4))
    plain = DynamicCache(config=config)
    with torch.inference_mode():
        for index, (keys, values) in enumerate(states_of(model, FORK_TOKENS)):
            cache.update(keys, values, index)
            plain.update(keys, values, index)
    ours, theirs = in_turns(15, cache.fork, lambda: copy.deepcopy(plain))
    print(f"fork of {FORK_TOKENS} tokens {1e3 * ours:.2f} ms, deepcopy of a DynamicCache {1e3 * theirs:.1f} ms")


def look_up(model: PreTrainedModel) -> None:
    """Finding a long prompt among many blocks, whose states are left out: they change no time."""
    store = PrefixStore.for_model(model)
    root = store.root(model, None)
    texts = [text(FORK_TOKENS, seed)[0] for seed in range(math.ceil(STORED_BLOCKS * store.block_size / FORK_TOKENS))]
    for ids in texts:
        store.put(root, ids, lambda part: [(torch.zeros(1, part.stop - part.start, 1),) * 2])

    def find() -> None:
        store.find(model.config, model, texts[0], None, FORK_TOKENS).lease.release()

    found, unchanged = in_turns(15, find, lambda: store.root(model, None))
    print(f"look-up of {FORK_TOKENS} tokens among {store.stats().blocks} blocks {1e3 * found:.1f} ms,")
    print(f"  of which {1e3 * unchanged:.1f} ms to see that the model is unchanged")


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--files", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model, _, _ = load_model("smollm2-135m", getattr(torch, arguments.dtype))
    if arguments.files:
        from_files(model, arguments.files)
        return
    with tempfile.TemporaryDirectory() as folder:
        latency(model, folder, arguments.dtype)
    batch(model)
    fork(model)
    look_up(model)


if __name__ == "__main__":
    main()
