"""Time decode steps of a model on this machine, next to the bound that its memory bandwidth sets."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from tqdm import tqdm

from ..evaluation.caches import resolve_cache
from ..evaluation.models import LoadedModel
from ..evaluation.protocols import forward
from ..units import positive
from .bandwidth import decode_step
from .capacity import Planned
from .shapes import observe_model

_CHUNK_TOKENS = 512


class Measured(NamedTuple):
    """Seconds per decode step, one row."""

    spec: str
    tokens: int
    measured_seconds: float
    """The median of the steps."""
    bandwidth: float
    bound_seconds: float
    """Bytes the step reads / bandwidth."""


def measure_decode(loaded: LoadedModel, spec: str, tokens: int, bandwidth: float, steps: int = 10) -> Measured:
    """Prefill `tokens` random ids in chunks, then time `steps` single tokens.

    Args:
        loaded: The model.
        spec: The cache.
        tokens: Length of the prefill.
        bandwidth: See `memory_bandwidth`.
        steps: Tokens to time.
    """
    positive(tokens, "a context")
    model = loaded.model
    cache = resolve_cache(spec, tokens + steps + 1)(model.config)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens + steps + 1), device=model.device)
    for start in tqdm(range(0, tokens, _CHUNK_TOKENS), desc=f"prefill with {spec}", leave=False, disable=None):
        forward(model, ids[:, start : min(start + _CHUNK_TOKENS, tokens)], cache, keep=1)
    seconds = []
    for token in tqdm(range(tokens, tokens + steps + 1), desc=f"decoding with {spec}", leave=False, disable=None):
        _wait(model.device)
        begin = time.perf_counter()
        forward(model, ids[:, token : token + 1], cache, keep=1)
        _wait(model.device)
        seconds.append(time.perf_counter() - begin)
    # The first step is left out: it allocates.
    median = sorted(seconds[1:])[steps // 2]
    planned = Planned(observe_model(model.config, model.dtype), spec, str(model.dtype).removeprefix("torch."))
    return Measured(spec, tokens, median, bandwidth, decode_step(planned, tokens).read_bytes / bandwidth)


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
