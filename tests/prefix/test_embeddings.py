"""Prompts given as embeddings: the same ones are found, others and those of ids never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, tiny_model
from strategies import CACHE_ARGUMENT
from torch import Tensor

from hf_kvcache import InputError, PrefixSharedCache, PrefixStore
from hf_kvcache.prefix.embeddings import embedded_prompt

SIZE = 4
ANSWER = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def words(name: str, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, and what the model makes of them; texts of one seed begin alike."""
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(seed))[:, :tokens]
    return ids, tiny_model(name).get_input_embeddings()(ids).detach()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_what_is_found_is_what_would_be_computed(name: str) -> None:
    model = tiny_model(name)
    store = PrefixStore.for_model(model, block_size=SIZE)
    changed = words(name, 17)[1].clone()
    changed[0, 9, 0] += 1e-9
    asked: list[tuple[Tensor, int, dict[str, Any]]] = [
        (words(name, 17)[1], 0, {}),
        (words(name, 17)[1], 16, {}),
        (words(name, 22)[1], 16, {"num_beams": 2}),
        (words(name, 22)[1], 20, {}),
        (changed, 8, {}),
        (words(name, 17, seed=1)[1], 0, {}),
    ]
    for embeds, found, options in asked:
        before = store.stats().hit_tokens
        expected = model.generate(inputs_embeds=embeds, **ANSWER, **options)
        output = store.generate(model, inputs_embeds=embeds, **ANSWER, **options)
        torch.testing.assert_close(output.sequences, expected.sequences, rtol=0, atol=0)
        for ours, theirs in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8 * theirs.abs().max().item())
        assert store.stats().hit_tokens - before == found
        store.check_integrity()
    # Ids never meet embeddings, though these are the same text.
    store.generate(model, input_ids=words(name, 17)[0], max_new_tokens=1)
    assert store.stats().misses == {"nothing_shared": 3}
    assert store.stats().blocks_in_use == 0


def test_every_entry_finds_what_others_stored(tmp_path: Path) -> None:
    model, (_, embeds) = tiny_model("llama"), words("llama", 17)
    expected = model.generate(inputs_embeds=embeds, max_new_tokens=3, do_sample=False)
    for found in (0, 16):
        for entry in ("generate", "prepare", "cache"):
            store = PrefixStore.open(f"file://{tmp_path / 'blocks'}", model, block_size=SIZE, namespace=entry)
            if entry == "generate":
                answer = store.generate(model, inputs_embeds=embeds, max_new_tokens=3, do_sample=False)
            else:
                prepared = (
                    store.prepare({"inputs_embeds": embeds, "attention_mask": torch.ones(1, 17)})
                    if entry == "prepare"
                    else {
                        "inputs_embeds": embeds,
                        CACHE_ARGUMENT: PrefixSharedCache(model.config, store, inputs_embeds=embeds),
                    }
                )
                with prepared[CACHE_ARGUMENT] as cache:
                    answer = model.generate(**prepared, max_new_tokens=3, do_sample=False)
                    cache.commit(answer)
            assert torch.equal(answer, expected)
            assert store.stats().loaded_tokens == store.stats().hit_tokens == found
            assert not store.stats().file_problems
    # What belongs to ids, and to another dtype, is elsewhere.
    store = PrefixStore.open(f"file://{tmp_path / 'blocks'}", model, block_size=SIZE, namespace="generate")
    store.prepare({"inputs_embeds": embeds.float()})
    assert store.stats().hits == 0


def test_a_token_is_known_by_dtype_and_every_value() -> None:
    model, embeds = tiny_model("llama"), words("llama", 6)[1].half()
    names = embedded_prompt(model, embeds, None, {})
    for value in (0, -1):
        changed = embeds.clone()
        changed[0, 2, value] += 1
        differ = (embedded_prompt(model, changed, None, {}) != names).any(2)
        assert differ.tolist() == [[False, False, True, False, False, False]]
    # The same bytes as other numbers.
    assert (embedded_prompt(model, embeds.view(torch.bfloat16), None, {}) != names).any(2).all()


def test_what_cannot_be_known_is_refused() -> None:
    model, (ids, embeds) = tiny_model("llama"), words("llama", 9)
    store = PrefixStore.for_model(model, block_size=SIZE)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("leave inputs_embeds out", {"input_ids": ids, "inputs_embeds": embeds}),
        ("one of them", {}),
        ("one by one", {"inputs_embeds": embeds.repeat(2, 1, 1)}),
        ("one by one", {"inputs_embeds": embeds, "attention_mask": torch.arange(9)[None]}),
        ("attention mask", {"inputs_embeds": embeds, "attention_mask": torch.ones(1, 10)}),
        ("leave pixel_values out", {"inputs_embeds": embeds, "pixel_values": embeds}),
    ]
    for message, inputs in refused:
        with pytest.raises(InputError, match=message):
            store.generate(model, **inputs, max_new_tokens=1)
        with pytest.raises(InputError, match=message):
            store.prepare(inputs)
    assert store.stats().prompt_tokens == 0
