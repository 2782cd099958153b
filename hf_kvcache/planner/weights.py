"""What the weights weigh, what of them one token meets, and what of them one rank of a tensor-parallel group holds."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from ..errors import ConfigError, InputError
from ..units import Number, positive
from .shapes import LayerShape, ModelShape, StateShape

WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "int8": 8, "int4": 4}
"""Bits per parameter. Quantized matrices also have scales, 1 to 12 % more: not counted."""


def weight_bits(weights_dtype: str) -> int:
    """Bits per parameter of a dtype.

    Raises:
        InputError: An unknown dtype.
    """
    if weights_dtype not in WEIGHT_BITS:
        raise InputError(f"no weights are of dtype {weights_dtype!r}; known: {', '.join(WEIGHT_BITS)}")
    return WEIGHT_BITS[weights_dtype]


def parameter_count(shape: ModelShape, *kinds: str) -> int:
    """Parameters of these kinds (see `Parameter.kind`); of all kinds where none is named."""
    return sum(parameter.numbers for parameter in shape.parameters if not kinds or parameter.kind in kinds)


def active_parameters(shape: ModelShape) -> Number:
    """Matrix parameters that one token meets: all but the experts it does not visit."""
    return parameter_count(shape, "matrix") + parameter_count(shape, "expert") * expert_share(shape)


def expert_share(shape: ModelShape) -> float:
    """The share k / E of the experts that a token visits; 1 without experts."""
    stacks = [parameter.shape[0] for parameter in shape.parameters if parameter.kind == "expert"]
    per_token = getattr(shape.decoder, "num_experts_per_tok", None)
    return min(1.0, per_token / max(stacks)) if stacks and per_token else 1.0


def weight_bytes(shape: ModelShape, weights_dtype: str = "bfloat16", ranks: int = 1) -> int:
    """Bytes of the weights that one of `ranks` ranks holds.

    What transformers' own plan for the model names is split evenly; everything else is whole on every rank. Below 16
    bits only matrices (also of an encoder) and experts are quantized; embeddings, norms and biases stay at 16.

    Raises:
        InputError: An unknown dtype.
    """
    return int(sum(_bits(shape, weights_dtype, ranks).values()) // 8)


def step_weight_bytes(shape: ModelShape, weights_dtype: str = "bfloat16", rows: int = 1, ranks: int = 1) -> float:
    """Bytes of the weights that one rank reads in a step with one token in each of `rows` rows.

    Of E experts, of which each token visits k, rows that choose independently meet E (1 - (1 - k/E)^rows).
    """
    bits = _bits(shape, weights_dtype, ranks)
    met = 1 - (1 - expert_share(shape)) ** rows
    return (bits["matrix"] + bits["vector"] + met * bits["expert"]) / 8


def _bits(shape: ModelShape, weights_dtype: str, ranks: int) -> dict[str, float]:
    """Bits on one rank, by kind of parameter."""
    positive(ranks, "a number of ranks")
    plan: dict[str, Any] = (getattr(shape.decoder, "base_model_tp_plan", None) or {}) if ranks > 1 else {}
    matrix_bits = weight_bits(weights_dtype)
    bits = dict.fromkeys(("matrix", "expert", "embedding", "vector", "encoder"), 0.0)
    for parameter in shape.parameters:
        size = matrix_bits if parameter.kind in ("matrix", "expert", "encoder") else max(16, matrix_bits)
        module = parameter.name.removeprefix("model.").removesuffix(".weight")
        split = any(fnmatch(module, pattern) for pattern, how in plan.items() if "replicated" not in how)
        bits[parameter.kind] += parameter.numbers * size / (ranks if split else 1)
    return bits


def shard(shape: ModelShape, ranks: int) -> ModelShape:
    """What one rank of a tensor-parallel group caches.

    Key-value heads are split, and replicated where there are fewer heads than ranks. A latent (MLA) is one head, so
    every rank keeps all of it. Recurrent states are whole on every rank, as transformers' plans leave them.

    Raises:
        ConfigError: Heads and ranks do not divide.
    """
    if positive(ranks, "a number of ranks") == 1:
        return shape
    layers, cross = (tuple(_shard_layer(s, ranks) for s in half) for half in (shape.layers, shape.cross_layers))
    return shape._replace(layers=layers, cross_layers=cross)


def _shard_layer(layer: LayerShape, ranks: int) -> LayerShape:
    return layer._replace(keys=_shard_state(layer.keys, ranks), values=_shard_state(layer.values, ranks))


def _shard_state(state: StateShape | None, ranks: int) -> StateShape | None:
    if state is None:
        return None
    if max(state.heads, ranks) % min(state.heads, ranks):
        raise ConfigError(f"{state.heads} key-value heads cannot be shared by {ranks} ranks: one must divide the other")
    return state._replace(heads=max(1, state.heads // ranks))
