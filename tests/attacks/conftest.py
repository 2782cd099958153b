from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import tiny_model
from victim import BLOCKS, SIZE, TEXT, Victim, in_order

from hf_kvcache import PrefixStore


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    folder = tmp_path / "blocks"
    model = tiny_model("llama")
    store = PrefixStore.open(f"file://{folder}", model, block_size=SIZE)
    answer = store.generate(model, input_ids=TEXT, max_new_tokens=6, do_sample=False)
    expected = model.generate(TEXT, attention_mask=torch.ones_like(TEXT), max_new_tokens=6, do_sample=False)
    assert torch.equal(answer, expected)
    files = in_order(folder)
    assert len(files) == BLOCKS
    return Victim(folder, answer, files)
