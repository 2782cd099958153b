"""The named caches: thin presets over `KVCache`."""

from __future__ import annotations

from transformers import PreTrainedConfig

from .cache import KVCache


class PagedCache(KVCache):
    """The whole history, exact, in blocks that rows share and that are never copied to grow.

    The idea of pages with reference counts is that of PagedAttention (arXiv 2309.06180), inside plain `generate`.

    Args:
        config: The model's config.
        block_size: Tokens per block. Smaller blocks share more and waste less, larger ones are fewer to count.
        fused: See `KVCache`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import PagedCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = PagedCache(model.config)
        >>> text = model.generate(torch.arange(3, 13)[None], past_key_values=cache, max_new_tokens=5, min_new_tokens=5)
        >>> cache.get_seq_length()
        14
    """

    def __init__(self, config: PreTrainedConfig, block_size: int = 64, fused: bool = True) -> None:
        super().__init__(config, block_size=block_size, fused=fused)
