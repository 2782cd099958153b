"""Tiny random models of every attention architecture the library must serve: one table, with what each can do.

A few layers, a vocabulary of 97, no end-of-sequence token. Weights are drawn from a fixed seed and scaled so
that attention decides the tokens: a wrong key, a lost token or a wrong position shows in the logits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

VOCABULARY = 97
WINDOW = 8

COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DECODER = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Architecture:
    """A configuration, and what the model can do.

    `windowed`: some layers see only the last `WINDOW` tokens. `croppable`: false where a layer keeps a recurrent
    state, which cannot be rolled back. `attention`: what runs on a CPU in reasonable time, the usual one first.
    `floor`: how far the model's own float64 logits with `DynamicCache` are from those without a cache, as a share of
    the largest; above 1e-9 where it computes routing, softmax or recurrences in float32 whatever its dtype.
    """

    config_class: str
    options: dict[str, Any]
    encoder_decoder: bool = False
    windowed: bool = False
    croppable: bool = True
    floor: float = 1e-9
    attention: tuple[str, ...] = ("sdpa", "eager")


LAYER_PATTERN = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaConfig", DECODER, attention=("sdpa", "eager", "flex_attention")),
    "gpt2": Architecture("GPT2Config", {**COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "qwen3": Architecture("Qwen3Config", {**DECODER, "head_dim": 8}),
    "phi3": Architecture("Phi3Config", DECODER),
    "mistral": Architecture(
        "MistralConfig",
        {**DECODER, "sliding_window": WINDOW},
        windowed=True,
        attention=("sdpa", "eager", "flex_attention"),
    ),
    "gemma2": Architecture(
        "Gemma2Config",
        {**DECODER, "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
        windowed=True,
        floor=1e-5,
        attention=("eager",),
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        {
            **DECODER,
            **LAYER_PATTERN,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
        },
        windowed=True,
    ),
    "gemma3n": Architecture(
        "Gemma3nTextConfig",
        {
            **DECODER,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        windowed=True,
    ),
    "gemma4": Architecture(
        "Gemma4TextConfig",
        {
            **DECODER,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
        windowed=True,
    ),
    "llama4": Architecture(
        "Llama4TextConfig",
        {
            **DECODER,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "no_rope_layers": [1, 1, 1, 0],
        },
        windowed=True,
        floor=1e-5,
    ),
    "gpt_oss": Architecture(
        "GptOssConfig",
        {
            **DECODER,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        windowed=True,
        floor=1e-5,
        attention=("eager",),
    ),
    "qwen3_next": Architecture(
        "Qwen3NextConfig",
        {
            **DECODER,
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_hidden_layers": 4,
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 2,
            "shared_expert_intermediate_size": 16,
        },
        croppable=False,
        floor=1e-3,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3Config",
        {
            **DECODER,
            **EXPERTS,
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        floor=1e-5,
    ),
    "t5": Architecture(
        "T5Config",
        {**COMMON, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2},
        encoder_decoder=True,
    ),
    "bart": Architecture(
        "BartConfig",
        {
            **COMMON,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 512,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
        encoder_decoder=True,
    ),
}


def settle(model: PreTrainedModel, seed: int = 0) -> None:
    """Weights large enough that attention matters, and generation that goes on until it is told to stop."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                spread = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(1.5 * spread / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0


@functools.cache
def tiny_model(
    name: str, dtype: torch.dtype = torch.float64, attention: str | None = None, seed: int = 0
) -> PreTrainedModel:
    """The tiny model of one architecture, the same object at every call; `attention` None takes the usual one."""
    architecture = ARCHITECTURES[name]
    config_class = getattr(transformers, architecture.config_class, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.config_class}")
    auto = AutoModelForSeq2SeqLM if architecture.encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(
            config_class(**architecture.options),
            dtype=dtype,
            attn_implementation=attention or architecture.attention[0],
            experts_implementation="eager",  # the grouped expert kernel has no float64
        ).eval()
    settle(model, seed)
    return model
