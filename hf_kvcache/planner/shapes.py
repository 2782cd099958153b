"""What a model stores per layer, seen by running it on the meta device: shapes only, no weights, no arithmetic."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..errors import ConfigError
from ..evaluation.protocols import cache_argument

# Longer than any convolution kernel, shorter than any attention window that matters here.
_PROBE_TOKENS = 5


class StateShape(NamedTuple):
    """One tensor of a layer: ``[rows, *shape]`` for a recurrent state, ``[rows, heads, tokens, width]`` for K or V."""

    heads: int
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.width * self.dtype.itemsize


class LayerShape(NamedTuple):
    """What the model hands to one cache layer."""

    keys: StateShape | None
    values: StateShape | None
    conv: tuple[tuple[int, tuple[int, ...], torch.dtype], ...] = ()
    """Convolution states: (index, shape without rows, dtype)."""
    recurrent: tuple[tuple[int, tuple[int, ...], torch.dtype], ...] = ()
    """Recurrent states, likewise."""


class Parameter(NamedTuple):
    """One parameter of a model; tied ones are one."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """``matrix`` (multiplies every token), ``expert`` (a stack of matrices, of which a token meets a few),
    ``embedding`` (looked up only), ``vector`` (norms and biases) or ``encoder`` (what no step of a decoder meets)."""

    @property
    def numbers(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


class ModelShape(NamedTuple):
    """What a model stores."""

    config: PreTrainedConfig
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    cross_layers: tuple[LayerShape, ...]
    """The cross-attention half of an encoder-decoder; empty for others."""
    parameters: tuple[Parameter, ...]

    @property
    def decoder(self) -> PreTrainedConfig:
        """The config of the decoder alone."""
        return self.config.get_text_config(decoder=True)


def observe_model(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> ModelShape:
    """Build the model on the meta device, run a few tokens through it and note what each layer caches.

    Raises:
        ConfigError: transformers cannot build or run this model without weights, or a layer keeps states of a kind
            that is not known here.
    """
    # The model looks for padding in the ids if it knows a padding id, and meta tensors have no ids.
    config = copy.deepcopy(config)
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        part.pad_token_id = None
    model = _meta_model(config, dtype)
    decoder = config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=decoder)
    ids = torch.ones(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    arguments: dict[str, Any] = {}
    if config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=decoder))
        arguments["decoder_input_ids"] = ids
    try:
        with torch.no_grad(), quiet():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **arguments)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise ConfigError(f"a {config.model_type} model cannot be run on shapes alone: {error}") from error
    halves = (cache.self_attention_cache, cache.cross_attention_cache) if config.is_encoder_decoder else (cache, None)
    layers, cross_layers = (tuple(map(_layer_shape, half.layers)) if half else () for half in halves)
    return ModelShape(config, dtype, layers, cross_layers, _parameters(model))


def _parameters(model: PreTrainedModel) -> tuple[Parameter, ...]:
    """Each parameter once, also where embedding and output share one."""
    output = model.get_output_embeddings()
    shared = None if output is None else output.weight
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not shared
    }
    parameters = []
    for name, parameter in model.named_parameters():
        kind = "matrix"
        if ".encoder." in f".{name}":
            kind = "encoder"
        elif parameter.ndim < 2 or name.endswith("bias"):
            kind = "vector"
        elif id(parameter) in looked_up:
            kind = "embedding"
        elif ".experts." in name:
            kind = "expert"
        parameters.append(Parameter(name, tuple(parameter.shape), kind))
    return tuple(parameters)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from warning about slow fallbacks: nothing is computed here."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and config.is_encoder_decoder:
        auto = AutoModelForSeq2SeqLM
    try:
        with torch.device("meta"), quiet():
            model: PreTrainedModel = auto.from_config(
                config, dtype=dtype, attn_implementation="eager", experts_implementation="batched_mm"
            ).eval()
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise ConfigError(f"transformers cannot build a language model from this config: {error}") from error
    return model


def _layer_shape(layer: object) -> LayerShape:
    known = {"keys", "values", "conv_states", "recurrent_states", "_sliding_window_tensor"}
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and name not in known:
            raise ConfigError(f"{type(layer).__name__} keeps {name!r}, which is not counted yet")
    keys, values = (_state(getattr(layer, name, None)) for name in ("keys", "values"))
    conv, recurrent = (_states(getattr(layer, name, {})) for name in ("conv_states", "recurrent_states"))
    return LayerShape(keys, values, conv, recurrent)


def _state(states: Tensor | None) -> StateShape | None:
    return None if states is None else StateShape(states.shape[1], states.shape[3], states.dtype)


def _states(states: dict[int, Tensor | None]) -> tuple[tuple[int, tuple[int, ...], torch.dtype], ...]:
    return tuple((index, tuple(s.shape[1:]), s.dtype) for index, s in states.items() if s is not None)
