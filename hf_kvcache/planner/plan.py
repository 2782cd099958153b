"""The whole plan of one model: every figure of the other modules, in one value."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm

from ..errors import ConfigError
from ..units import positive
from .advice import Choice, advise
from .bandwidth import Step, cache_outweighs_weights, decode_step
from .capacity import USABLE_SHARE, Need, Planned, most_rows, most_tokens
from .compute import Work, model_work, sequence_share, step_flops, total_flops
from .configs import load_plan_config
from .formula import expanded_values, visible_bytes
from .gpus import Gpu, find_gpu
from .objects import CROSS_ATTENTION, LayerGroup
from .shapes import ModelShape, observe_model
from .weights import active_parameters, parameter_count

FRONTIER_TOKENS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
"""Contexts for which the largest batch is sought."""

_FAR_TOKENS = 2**16
"""Beyond every attention window, and whole blocks."""


class CachePlan(NamedTuple):
    """One cache, on one rank."""

    spec: str
    groups: tuple[LayerGroup, ...]
    """By kind of layer, after the last token was decoded."""
    token_bytes: float
    """What one more token adds in one row, beyond every window."""
    fixed_bytes: float
    """What does not grow there, in one row: windows, recurrent states, tokens kept otherwise than the rest."""
    need: Need
    step: Step
    """The last decode step."""
    outweighs_tokens: int | None
    """From this length on a step reads more cache than weights."""
    most_tokens: tuple[int, int] | None
    """The longest text at this batch in ideal and in usable memory; None without a GPU."""
    frontier: tuple[tuple[int, int, int], ...]
    """(context, largest batch in ideal memory, in usable memory)."""


class Compute(NamedTuple):
    """Operations, in FLOP, for `new_tokens` after a prompt that fills the rest of the context."""

    step_cached: float
    step_uncached: float
    total_cached: float
    total_uncached: float
    sequence_share: float
    """Share of attention in `total_cached`."""
    crossing_tokens: float
    """Where attention has cost as much as the matrices: N / (L d)."""


class Plan(NamedTuple):
    """What `make_plan` returns. Sizes in bytes of one rank, operations in FLOP, times in seconds."""

    model: str
    shape: ModelShape
    gpu: Gpu | None
    tokens: int
    rows: int
    new_tokens: int
    ranks: int
    weights_dtype: str
    visible_bytes: int | None
    """The least an exact cache can hold at this context and batch, all ranks together; None without a formula."""
    caches: tuple[CachePlan, ...]
    work: Work
    compute: Compute
    advice: tuple[Choice, ...]
    warnings: tuple[str, ...]


def make_plan(
    model: str,
    gpu: str | None = None,
    tokens: int = 8192,
    rows: int = 1,
    specs: tuple[str, ...] = ("paged", "dynamic"),
    new_tokens: int = 512,
    ranks: int = 1,
    weights_dtype: str = "bfloat16",
    states_dtype: torch.dtype = torch.bfloat16,
) -> Plan:
    """Plan a model.

    Args:
        model: See `configs.load_plan_config`.
        gpu: A name of `gpus.GPUS` or a size; None leaves capacity and time out.
        tokens: Length of each text at its end, new tokens included.
        rows: Different texts at once.
        specs: Caches to count.
        new_tokens: Tokens to generate, for the operations.
        ranks: GPUs of a tensor-parallel group.
        weights_dtype: See `weights.WEIGHT_BITS`.
        states_dtype: Of keys, values and activations.

    Raises:
        InputError: Sizes below one, or names that lead nowhere.
        ConfigError: A model or a cache that cannot be planned.

    Example:
        >>> plan = make_plan("llama-3.1-8b", "h100", tokens=8192, specs=("dynamic",))
        >>> plan.caches[0].token_bytes, plan.caches[0].need.cache_bytes
        (131072.0, 1073741824)
    """
    positive(tokens, "a context")
    positive(rows, "a batch size")
    positive(new_tokens, "a number of new tokens")
    found = None if gpu is None else find_gpu(gpu)
    shape = observe_model(load_plan_config(model), states_dtype)
    memory = None if found is None else found.memory_bytes
    work = model_work(shape)
    new = min(new_tokens, tokens)
    return Plan(
        model=model,
        shape=shape,
        gpu=found,
        tokens=tokens,
        rows=rows,
        new_tokens=new,
        ranks=ranks,
        weights_dtype=weights_dtype,
        visible_bytes=_visible_bytes(shape, tokens, rows),
        caches=tuple(_cache_plan(Planned(shape, spec, weights_dtype, ranks), tokens, rows, memory) for spec in specs),
        work=work,
        compute=Compute(
            step_flops(work, tokens),
            step_flops(work, tokens, cached=False),
            total_flops(work, new, tokens - new),
            total_flops(work, new, tokens - new, cached=False),
            sequence_share(work, new, tokens - new),
            work.crossing_tokens,
        ),
        advice=tuple(advise(shape, model, tokens, rows, memory, weights_dtype, ranks)),
        warnings=_warnings(shape, tokens),
    )


def _visible_bytes(shape: ModelShape, tokens: int, rows: int) -> int | None:
    try:
        return visible_bytes(shape.config, shape.dtype, tokens, rows)
    except (ConfigError, AttributeError):
        return None  # a family without a closed formula


def _cache_plan(planned: Planned, tokens: int, rows: int, memory: int | None) -> CachePlan:
    token_bytes, fixed_bytes = _growth(planned)
    longest, frontier = None, []
    if memory is not None:
        longest = (most_tokens(planned, memory, rows), most_tokens(planned, memory, rows, usable=True))
        for context in tqdm(FRONTIER_TOKENS, desc=f"what fits with {planned.spec}", leave=False, disable=None):
            batches = (most_rows(planned, memory, context), most_rows(planned, memory, context, usable=True))
            frontier.append((context, *batches))
    return CachePlan(
        planned.spec,
        planned.groups(tokens, rows),
        token_bytes,
        fixed_bytes,
        planned.need(tokens, rows),
        decode_step(planned, tokens, rows),
        cache_outweighs_weights(planned, rows),
        longest,
        tuple(frontier),
    )


def _growth(planned: Planned) -> tuple[float, float]:
    """Bytes per token and fixed bytes of a long text, without unused room: a line through two lengths."""
    near, far = (
        sum(group.layers * group.read_bytes for group in planned.groups(tokens) if group.kind != CROSS_ATTENTION)
        for tokens in (_FAR_TOKENS, 2 * _FAR_TOKENS)
    )
    token_bytes = (far - near) / _FAR_TOKENS
    return token_bytes, near - _FAR_TOKENS * token_bytes


def _warnings(shape: ModelShape, tokens: int) -> tuple[str, ...]:
    warnings = []
    limit = getattr(shape.decoder, "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        warnings.append(f"the model was made for {limit:,} positions; {tokens:,} are planned all the same")
    if shape.decoder is not shape.config and not shape.config.is_encoder_decoder:
        warnings.append("of a model with several parts only the cache of the text decoder is counted")
    return tuple(warnings)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, with the versions that it holds for."""
    record = {name: _plain(value) for name, value in plan._asdict().items() if name not in ("shape", "work")}
    for cache, written in zip(plan.caches, record["caches"], strict=True):
        written["need"] |= {"ideal_bytes": cache.need.ideal_bytes, "peak_bytes": cache.need.peak_bytes}
        bound = None if plan.gpu is None else cache.step.bound_seconds(plan.gpu)
        written["step"] |= {"intensity": cache.step.intensity, "bound_seconds": bound}
    latent = latent_values(plan.shape)
    return record | {
        "parameters": parameter_count(plan.shape),
        "active_parameters": active_parameters(plan.shape),
        "expanded_values": latent[1] if latent else None,
        "states_dtype": str(plan.shape.dtype).removeprefix("torch."),
        "usable_share": USABLE_SHARE,
        "transformers": transformers.__version__,
    }


def latent_values(shape: ModelShape) -> tuple[int, int] | None:
    """Values per token and layer of a latent-attention model: as stored, and as heads; None for other models."""
    if not getattr(shape.decoder, "kv_lora_rank", None):
        return None
    pairs = [(layer.keys, layer.values) for layer in shape.layers]
    stored = [k.heads * k.width + v.heads * v.width for k, v in pairs if k and v]
    return max(stored), expanded_values(shape.config)


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if value == math.inf else value  # JSON has no infinity
