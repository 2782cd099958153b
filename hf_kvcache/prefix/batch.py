"""Texts of different lengths in one batch: what they share first, then padding, then what each has for itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import InputError


def real_rows(
    input_ids: Int[Tensor, "rows tokens"], attention_mask: Tensor | None
) -> tuple[list[Tensor], Bool[Tensor, "rows tokens"]]:
    """The tokens of each row without its padding, and which they are.

    Raises:
        InputError: The mask does not fit, or a row holds nothing.
    """
    if input_ids.ndim != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise InputError(f"input_ids must be token ids [rows, tokens], got {list(input_ids.shape)} {input_ids.dtype}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"input_ids are {list(input_ids.shape)}, the attention mask {list(attention_mask.shape)}: pass the mask of "
            "the prompt alone, one entry a token"
        )
    real = attention_mask.bool()
    rows = [row[mask] for row, mask in zip(input_ids, real, strict=True)]
    if any(not len(row) for row in rows):
        raise InputError("a row holds no token; leave it out")
    return rows, real


def common_beginning(rows: Sequence[Int[Tensor, " _"]]) -> Int[Tensor, " tokens"]:
    """The tokens that all rows begin with, without the last token of any row: its logits have to be computed."""
    length = min(len(row) for row in rows) - 1
    equal = torch.ones(length, dtype=torch.bool, device=rows[0].device)
    for row in rows[1:]:
        equal &= row[:length] == rows[0][:length]
    beginning: Tensor = rows[0][: int(equal.long().cumprod(0).sum())]
    return beginning


def lay_out(
    rows: Sequence[Int[Tensor, " _"]], shared_tokens: int, width: int, pad: int
) -> tuple[Int[Tensor, "rows width"], Int[Tensor, "rows width"]]:
    """Ids and attention mask: `shared_tokens` of each row, padding, the rest of it.

    The shared tokens stand in the same columns of every row, and the last token of every row in the last one. Positions
    count what the mask shows, so every row reads as it would alone.
    """
    ids = rows[0].new_full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        rest = width - (len(row) - shared_tokens)
        ids[index, :shared_tokens], ids[index, rest:] = row[:shared_tokens], row[shared_tokens:]
        mask[index, :shared_tokens] = 1
        mask[index, rest:] = 1
    return ids, mask
