"""Text at the wrong place is noticed; padding is not taken for it."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from modes import padded_rows
from strategies import CACHE_ARGUMENT

from hf_kvcache import InputError, PagedCache
from hf_kvcache.positions import PositionGuard


@pytest.mark.parametrize("chunk", [2, 3, 5, 20])
def test_a_padded_batch_may_be_fed_in_chunks(chunk: int) -> None:
    """In the first chunks a short row is padding alone."""
    model, rows = tiny_model("llama"), padded_rows()
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - row.shape[1] :], mask[index, width - row.shape[1] :] = row[0], 1
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    cache = PagedCache(model.config, block_size=4)
    output = model.generate(ids, prefill_chunk_size=chunk, **{CACHE_ARGUMENT: cache}, **options)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_a_row_that_stands_still_goes_on_where_it_was() -> None:
    guard = PositionGuard()
    guard.check(torch.tensor([[0, 0, 0], [0, 1, 2]]), 3, 0)
    guard.check(torch.tensor([[0, 0, 0], [3, 4, 5]]), 3, 3)
    guard.check(torch.tensor([[0, 0, 1], [6, 7, 8]]), 3, 6)
    assert guard.last is not None
    assert guard.last.tolist() == [1, 8]
    with pytest.raises(InputError, match="row 0"):
        guard.check(torch.tensor([[0, 1, 2], [9, 10, 11]]), 3, 9)
