"""The configs of well-known models as numbers, so that planning needs no network and no download.

Each is the part of the published ``config.json`` that decides sizes. Multimodal models stand with their text decoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_GEMMA3_LAYERS = [*["sliding_attention"] * 5, "full_attention"]


def _config(model_type: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """The six sizes every decoder has: hidden, intermediate, layers, heads, vocabulary, context."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **others}


PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _config("llama", 4096, 11008, 32, 32, 32000, 4096, num_key_value_heads=32),
    "llama-3.1-8b": _config("llama", 4096, 14336, 32, 32, 128256, 131072, num_key_value_heads=8),
    "llama-3.1-70b": _config("llama", 8192, 28672, 80, 64, 128256, 131072, num_key_value_heads=8),
    "qwen3-8b": _config(
        "qwen3", 4096, 12288, 36, 32, 151936, 40960, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False
    ),
    "mistral-7b-v0.1": _config(
        "mistral", 4096, 14336, 32, 32, 32000, 32768, num_key_value_heads=8, sliding_window=4096
    ),
    "mistral-7b": _config("mistral", 4096, 14336, 32, 32, 32768, 32768, num_key_value_heads=8, sliding_window=None),
    "gemma-2-9b": _config(
        "gemma2", 3584, 14336, 42, 16, 256000, 8192, num_key_value_heads=8, head_dim=256, sliding_window=4096
    ),
    "gemma-3-27b": _config(
        "gemma3_text",
        5376,
        21504,
        62,
        32,
        262208,
        131072,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1024,
        layer_types=(_GEMMA3_LAYERS * 11)[:62],
    ),
    "gemma-3n-e4b": _config(
        "gemma3n_text",
        2048,
        16384,
        35,
        8,
        262400,
        32768,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=512,
        num_kv_shared_layers=15,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
    ),
    "phi-3-mini": _config("phi3", 3072, 8192, 32, 32, 32064, 4096, num_key_value_heads=32, sliding_window=2047),
    "deepseek-v3": _config(
        "deepseek_v3",
        7168,
        18432,
        61,
        128,
        129280,
        163840,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
    ),
    "gpt-oss-20b": _config(
        "gpt_oss",
        2880,
        2880,
        24,
        64,
        201088,
        131072,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        num_local_experts=32,
        num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "smollm2-135m": _config("llama", 576, 1536, 30, 9, 49152, 8192, num_key_value_heads=3, tie_word_embeddings=True),
    "qwen3-next-80b": _config(
        "qwen3_next",
        2048,
        5120,
        48,
        16,
        151936,
        262144,
        num_key_value_heads=2,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 12,
    ),
}
"""By the name a user types."""

HUB_IDS: dict[str, str] = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "gemma-2-9b": "google/gemma-2-9b",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "gemma-3n-e4b": "google/gemma-3n-E4B",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "qwen3-next-80b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
"""Where the weights of a preset are; `smollm2-135m` is the evaluation's built-in model."""


def loadable_name(name: str) -> str:
    """The name by which the evaluation loads the model that is planned as `name`: of a config.json its folder."""
    return str(Path(name).parent) if name.endswith(".json") else HUB_IDS.get(name.lower(), name)
