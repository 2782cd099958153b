"""Attention over blocks against attention over the same history in one tensor, around every switch of method."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvcache.attention import attend, materialize
from hf_kvcache.blocks import BlockPool, BlockTable, Gather, Run

HEADS, GROUPS, WIDTH, BLOCK = 2, 3, 16, 16
# Of the largest output: float64 has 1e-16 a step; a score rounded to bfloat16 moves a weight by 2**-8.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def table_of(rows: int, tokens: int, shared: int, dtype: torch.dtype) -> BlockTable:
    """A history whose first `shared` tokens are equal in all rows."""
    generator = torch.Generator().manual_seed(tokens + rows)
    states = torch.randn(2, rows, HEADS, tokens, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    states[:, :, :, :shared] = states[:, :1, :, :shared]
    table = BlockTable(BlockPool(states[0], states[1], BLOCK), rows)
    table.append(states[0], states[1])
    return table


def masks(rows: int, queries: int, tokens: int) -> dict[str, Tensor | None]:
    seen = torch.ones(rows, 1, queries, tokens, dtype=torch.bool).tril(tokens - queries)
    seen[0, :, :, : tokens // 3] = False  # as left padding does
    return {"none": None, "bool": seen, "float": torch.where(seen, 0.0, -torch.inf)}


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "shared"), [(1, 0), (3, 0), (3, 10_000), (3, 256)])
@pytest.mark.parametrize("tokens", [40, 511, 600, 2100])
@pytest.mark.parametrize("queries", [1, 5, 20])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attend(dtype: torch.dtype, rows: int, shared: int, tokens: int, queries: int, mask: str) -> None:
    table = table_of(rows, tokens, shared, dtype)
    query = torch.randn(rows, HEADS * GROUPS, queries, WIDTH, dtype=torch.float64).to(dtype)
    first = BLOCK // 2
    allowed = masks(rows, queries, tokens - first)[mask]
    keys, values = materialize(table, first)
    expected = scaled_dot_product_attention(
        query.double(),
        keys.double(),
        values.double(),
        attn_mask=allowed if allowed is None or allowed.dtype == torch.bool else allowed.double(),
        scale=0.3,
        enable_gqa=True,
    )
    given = allowed.to(dtype) if mask == "float" and allowed is not None else allowed
    found = attend(table, first, query, given, 0.3)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_what_rows_share_is_read_once() -> None:
    segments = table_of(3, 600, 256, torch.float32).segments()
    assert isinstance(segments[0], Run)
    assert segments[0].rows == [0, 1, 2]
    assert segments[0].blocks == 256 // BLOCK
    assert [segment.rows for segment in segments[1:] if isinstance(segment, Run)] == [[0], [1], [2]]
    assert not any(isinstance(segment, Gather) and segment.blocks > 4 for segment in segments)


def test_a_query_that_may_look_nowhere_gets_zeros() -> None:
    table = table_of(1, 40, 0, torch.float64)
    query = torch.randn(1, HEADS * GROUPS, 1, WIDTH, dtype=torch.float64)
    nowhere = torch.zeros(1, 1, 1, 40, dtype=torch.bool)
    assert torch.equal(attend(table, 0, query, nowhere, 1.0), torch.zeros_like(query))
