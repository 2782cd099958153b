"""Prompts that are given as embeddings instead of token ids: each token is known by the SHA-256 of its embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InputError
from ..fingerprint import tensor_bytes
from .identity import digest


def embedded_prompt(
    model: PreTrainedModel,
    inputs_embeds: Float[Tensor, "rows tokens width"],
    attention_mask: Tensor | None,
    inputs: Mapping[str, Any],
) -> Int[Tensor, "1 tokens 4"]:
    """What stands for the token ids of a prompt: of each token a SHA-256 over dtype and bytes, as four numbers.

    So a block of embeddings has four times the bytes of a block of ids, and can never be taken for one.

    Raises:
        InputError: Several rows, padding, further inputs, or a model whose positions depend on more than the number of
            tokens.
    """
    if inputs:
        raise InputError(
            f"the store knows such a prompt by its embeddings alone; leave {', '.join(sorted(inputs))} out"
        )
    rows, tokens = inputs_embeds.shape[:2]
    padded = attention_mask is not None and not bool(attention_mask.all())
    if rows != 1 or not tokens or padded:
        raise InputError(
            f"embeddings are shared between prompts of one row without padding, got {rows} "
            f"{'padded ' if padded else ''}rows of {tokens} tokens: ask one by one"
        )
    if attention_mask is not None and attention_mask.shape != (rows, tokens):
        raise InputError(f"the attention mask of {tokens} embeddings is {list(attention_mask.shape)}")
    if hasattr(model.base_model, "get_rope_index"):
        raise InputError(
            f"positions of {model.config.model_type} depend on the images of a prompt, which embeddings do not tell; "
            "pass input_ids, and the images"
        )
    data, kind = tensor_bytes(inputs_embeds), str(inputs_embeds.dtype).encode()
    width_bytes = len(data) // tokens
    each = (data[begin : begin + width_bytes] for begin in range(0, len(data), width_bytes))
    hashed = b"".join(digest("embedding", kind, one) for one in each)
    return torch.frombuffer(bytearray(hashed), dtype=torch.int64).view(1, tokens, 4)
