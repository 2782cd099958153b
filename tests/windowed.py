"""Sinks and a window as plain attention with a mask: what a windowed cache is compared with, without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

SINKS, SEEN = 2, 6
"""Sinks and window of the reference."""


def allowed(mask: Tensor | None, tokens: int) -> Tensor:
    """``[rows, 1, queries, tokens]``: where a query looks that sees its row's sinks and its window."""
    at = torch.arange(tokens)
    causal = (at <= at[:, None])[None, None]
    seen = causal if mask is None else causal & (mask if mask.dtype == torch.bool else mask > -1e30)
    rows = []
    for row in seen[:, 0]:
        real = row[-1].nonzero()
        first = int(real[0]) if len(real) else tokens
        rows.append((at > at[:, None] - SEEN) | ((at >= first) & (at < first + SINKS)))
    return seen & torch.stack(rows)[:, None]


def windowed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attention of a forward pass without a cache; layers that have a window of their own keep to it."""
    kinds = getattr(module.config, "layer_types", None)
    full = kinds is None or kinds[module.layer_idx] == "full_attention"
    mask = attention_mask
    # Layers that read another one's keys are asked for the last tokens only, where only their logits are wanted.
    shared = getattr(module, "is_kv_shared_layer", False)
    causal = getattr(module, "is_causal", True) and (shared or query.shape[2] == key.shape[2])
    if causal and full:
        mask = allowed(attention_mask, key.shape[2])[:, :, -query.shape[2] :]
    elif causal and mask is None:
        mask = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None, -query.shape[2] :]
    if position_bias is not None:
        mask = position_bias if mask is None else position_bias.masked_fill(~mask, -torch.inf)
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("windowed", windowed_attention)
AttentionMaskInterface.register("windowed", sdpa_mask)
