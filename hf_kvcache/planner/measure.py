"""Time decode steps of a model on this machine, next to the bound that its memory bandwidth sets."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import DynamicCache

from ..evaluation.caches import resolve_cache
from ..evaluation.models import LoadedModel
from .bandwidth import decode_step
from .shapes import cache_argument, observe_model
from .units import positive


class Measured(NamedTuple):
    """Seconds per decode step, one row."""

    spec: str
    tokens: int
    measured_seconds: float
    """The median of the steps."""
    bandwidth: float
    """Bytes per second that copying a large tensor on this machine reads and writes."""
    bound_seconds: float
    """Bytes the step reads / bandwidth."""


def measure_decode(loaded: LoadedModel, spec: str, tokens: int, steps: int = 10) -> Measured:
    """Prefill `tokens` random ids, then time `steps` single tokens."""
    positive(tokens, "a context")
    model = loaded.model
    cache = resolve_cache(spec, tokens + steps + 1)(model.config)
    cache = DynamicCache(config=model.config) if cache is None else cache
    ids = torch.randint(0, model.config.vocab_size, (1, tokens + steps + 1), device=model.device)
    seconds = []
    with torch.no_grad():
        options = {"use_cache": True, "logits_to_keep": 1, cache_argument(model): cache}
        model(ids[:, :tokens], **options)
        for step in tqdm(range(steps + 1), desc=f"decoding with {spec}", leave=False):
            _wait(model.device)
            begin = time.perf_counter()
            model(ids[:, tokens + step : tokens + step + 1], **options)
            _wait(model.device)
            seconds.append(time.perf_counter() - begin)
    # The first step is left out: it allocates.
    median = sorted(seconds[1:])[steps // 2]
    shape = observe_model(model.config, model.dtype)
    step_read = decode_step(shape, tokens, weights_dtype=str(model.dtype).removeprefix("torch."))
    bandwidth = memory_bandwidth(model.device)
    return Measured(spec, tokens, median, bandwidth, (step_read.weight_bytes + step_read.cache_bytes) / bandwidth)


def memory_bandwidth(device: torch.device, size_bytes: int = 2**28) -> float:
    """Bytes per second of the fastest of five copies of a tensor of `size_bytes`, read and written."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size_bytes / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
