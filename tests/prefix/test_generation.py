"""A prompt whose beginning is stored gives the same tokens and logits as without a cache, in every mode, everywhere."""

from __future__ import annotations

import functools

import modes
import pytest
import torch
from architectures import ARCHITECTURES, VOCABULARY, tiny_model
from modes import DECODER_ONLY, MODES, NEEDS_CROP, Generation
from strategies import RENAMED, dynamic_cache
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvcache import ConfigError, PrefixSharedCache, PrefixStore

BLOCK_SIZE = 4
SHARED_TOKENS = 14  # three blocks, and two tokens more
LARGEST_FLOOR = 1e-5

SHAREABLE = [name for name, traits in ARCHITECTURES.items() if not traits.encoder_decoder and traits.croppable]
# What `generate` pads on the left goes through `PrefixStore.prepare`, see test_store.py.
# transformers 5.20 feeds the chunks of a whole prompt to a cache that holds its beginning.
SINGLE_MODES = [mode for mode in MODES if mode != "padded_batch" and (RENAMED or mode != "chunked_prefill")]


def prompt(rows: int = 1, tokens: int = modes.PROMPT_TOKENS, seed: int = 0) -> Tensor:
    """Rows that begin alike and differ after that."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    ids[:, :SHARED_TOKENS] = ids[:1, :SHARED_TOKENS]
    return ids


def filled_store(model: PreTrainedModel, text: Tensor) -> PrefixStore:
    store = PrefixStore.for_model(model, block_size=BLOCK_SIZE)
    with PrefixSharedCache(model.config, store, text) as cache, torch.no_grad():
        model(text, **{modes.CACHE_ARGUMENT: cache})
        assert cache.commit(text) == text.shape[1] // BLOCK_SIZE * BLOCK_SIZE
    return store


@functools.cache
def reference(architecture: str, mode: str, dtype: torch.dtype, *, cached: bool) -> Generation:
    model = tiny_model(architecture, dtype)
    return MODES[mode](model, dynamic_cache(model) if cached else None)


@pytest.mark.parametrize("mode", SINGLE_MODES)
@pytest.mark.parametrize("architecture", SHAREABLE)
def test_same_result(architecture: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "prompt", prompt)
    traits = ARCHITECTURES[architecture]
    dtype = torch.float32 if traits.attention[0] == "eager" else torch.float64
    model = tiny_model(architecture, dtype)
    text = prompt(tokens=7).repeat(1, 3) if mode == "prompt_lookup" else prompt()
    store = filled_store(model, text[:, : SHARED_TOKENS + 1])
    rows = {"batch": 3, "sampling_return_sequences": 2, "beams_return_sequences": 2}
    rows |= dict.fromkeys(("conversation_all_ids", "conversation_new_ids"), 2)
    asked = text if mode == "prompt_lookup" else prompt(rows=rows.get(mode, 1))
    cache = PrefixSharedCache(model.config, store, asked)
    assert cache.shared_tokens == SHARED_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    generation = MODES[mode](model, cache)
    floor = traits.floor if dtype == torch.float64 and mode not in NEEDS_CROP else max(traits.floor, 1e-5)
    expected = reference(architecture, mode, dtype, cached=floor > LARGEST_FLOOR)
    torch.testing.assert_close(generation.tokens, expected.tokens, rtol=0, atol=0)
    allowed = min(floor, LARGEST_FLOOR) * expected.logits.abs().max().item()
    expected_logits = expected.logits.to(generation.logits.dtype)
    torch.testing.assert_close(generation.logits, expected_logits, rtol=0, atol=allowed)
    assert cache.exactness.kind == "rounding"
    assert cache.get_seq_length() == generation.tokens_seen
    cache.check_integrity()
    store.check_integrity()
    assisted = mode in NEEDS_CROP  # transformers then feeds the whole prompt
    assert cache.shared_tokens == store.stats().hit_tokens == (0 if assisted else 12)
    assert store.stats().misses == {"nothing_shared": 1} | ({"assisted_decoding": 1} if assisted else {})


def test_there_are_modes_of_every_kind() -> None:
    assert set(SINGLE_MODES) > (NEEDS_CROP | DECODER_ONLY) - {"chunked_prefill"}


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in SHAREABLE])
def test_what_cannot_be_shared_is_refused(architecture: str) -> None:
    with pytest.raises(ConfigError, match=r"encoder-decoder|cannot be shared"):
        PrefixStore.for_model(tiny_model(architecture))


@pytest.mark.parametrize("architecture", SHAREABLE)
def test_bitwise_where_the_chunks_are_the_same(architecture: str) -> None:
    """Eager attention gets real tensors: what is stored and what would be recomputed give the very same bits."""
    model = tiny_model(architecture, torch.bfloat16, "eager")
    text = prompt()
    store = filled_store(model, text[:, :12])
    cache, plain = PrefixSharedCache(model.config, store, text), dynamic_cache(model)
    assert cache.shared_tokens == 12
    with torch.no_grad():
        model(text[:, :12], **{modes.CACHE_ARGUMENT: plain})
        for chunk in text[:, 12:].split([5, 1, 1, 2], dim=1):
            ours, theirs = (model(chunk, **{modes.CACHE_ARGUMENT: of}).logits for of in (cache, plain))
            assert torch.equal(ours, theirs)
