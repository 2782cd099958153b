"""Layers that are encoded unlike the others: because they were asked to be, or because their attention is too sharp."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import tiny_model
from modes import prompt
from strategies import CACHE_ARGUMENT, decoder_config
from transformers import PreTrainedModel

from hf_kvcache import ConfigError, KVCache, QuantizedCache, build_cache
from hf_kvcache.quantized import QuantizedTable

SHARP = 0


@pytest.fixture(scope="module")
def sharp_model() -> PreTrainedModel:
    """A model of which one layer looks at few tokens very surely: its scores differ by dozens of nats."""
    model = copy.deepcopy(tiny_model("llama", torch.float32))
    for projection in (model.model.layers[SHARP].self_attn.q_proj, model.model.layers[SHARP].self_attn.k_proj):
        projection.weight.data *= 4
    return model


def read(model: PreTrainedModel, cache: KVCache | None, rows: int = 1) -> torch.Tensor:
    """Logits of the second half of a text, the first half of which went into the cache before."""
    ids = prompt(rows=rows, tokens=300)
    with torch.no_grad():
        if cache is None:
            return model(ids).logits[:, 200:]
        model(ids[:, :200], **{CACHE_ARGUMENT: cache})
        return model(ids[:, 200:], **{CACHE_ARGUMENT: cache}).logits


def divergence(model: PreTrainedModel, spec: str) -> float:
    exact, found = (
        torch.log_softmax(read(model, cache).double(), -1) for cache in (None, build_cache(decoder_config(model), spec))
    )
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_a_sharp_layer_keeps_more_bits_and_says_so(sharp_model: PreTrainedModel) -> None:
    cache = QuantizedCache(decoder_config(sharp_model), bits=4, recent=32)
    read(sharp_model, cache)
    cache.check_integrity()
    lines = [layer.describe() for layer in cache.block_layers]
    assert "keys grid 8 (as mixed 6/5/4/3 scores would be off by" in lines[SHARP]
    assert all("would be off" not in line for index, line in enumerate(lines) if index != SHARP)
    table = cache.block_layers[SHARP].table
    assert isinstance(table, QuantizedTable)
    assert table.off_by is not None
    assert table.off_by > 0.5

    protected, *plain = (
        divergence(sharp_model, f"quantized:key_bits=4,value_bits=8,codec={codec},recent=32")
        for codec in ("auto", "mixed/grid", "affine/grid")
    )
    assert protected < min(plain) / 8


def test_a_usual_layer_is_as_asked_for() -> None:
    model = tiny_model("llama", torch.float32)
    for bits in (2, 3, 4):
        cache = QuantizedCache(decoder_config(model), bits=bits, recent=32)
        read(model, cache)
        assert "would be off" not in cache.describe()


def test_protection_is_for_all_rows_and_survives_row_operations_crops_and_copies(sharp_model: PreTrainedModel) -> None:
    cache = QuantizedCache(decoder_config(sharp_model), bits=4, recent=32)
    read(sharp_model, cache, rows=2)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    cache = copy.deepcopy(cache)
    cache.crop(-150)
    cache.check_integrity()
    assert "would be off" in cache.describe()
    # Taken back to before anything was encoded, nothing is known of what is to come.
    cache.crop(-cache.get_seq_length() + 3)
    cache.check_integrity()
    assert "would be off" not in cache.describe()


def test_protection_is_saved(sharp_model: PreTrainedModel, tmp_path: object) -> None:
    cache = QuantizedCache(decoder_config(sharp_model), bits=4, recent=32)
    read(sharp_model, cache)
    cache.save(f"{tmp_path}/cache", sharp_model)
    loaded = QuantizedCache.load(f"{tmp_path}/cache", sharp_model)
    assert loaded.describe() == cache.describe()
    ids = prompt(tokens=5, seed=1)
    with torch.no_grad():
        one, other = (sharp_model(ids, **{CACHE_ARGUMENT: each}).logits for each in (cache, loaded))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_layers_differ_as_asked(tmp_path: object) -> None:
    model = tiny_model("llama", torch.float32)
    spec = "quantized:bits=4,recent=32,layers=0:key_bits=8&value_bits=8;1:codec=int8&key_bits=8&value_bits=8&sinks=0"
    cache = build_cache(decoder_config(model), spec)
    read(model, cache)
    cache.check_integrity()
    lines = [layer.describe() for layer in cache.block_layers]
    assert "keys grid 8, values grid 8" in lines[0]
    assert "4 sinks" in lines[0]
    assert "keys int8, values int8" in lines[1].replace("int8 8", "int8")
    assert "0 sinks" in lines[1]
    cache.save(f"{tmp_path}/cache", model)
    assert KVCache.load(f"{tmp_path}/cache", model).describe() == cache.describe()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("0", "expected layers:name=value"),
        ("x:key_bits=4", "expected layers:name=value"),
        ("0:bits=4", "'bits' cannot differ by layer; known: key_bits"),
        ("0:layers=1", "cannot differ"),
        ("0:key_bits=four", "key_bits is a whole number, got 'four'"),
        ("0:key_bits=4;0-1:key_bits=3", "layer 0 is named twice"),
        ("0:codec=zip", "no codec is called 'zip'"),
        ("0:recent=32;99:recent=32", "names layer 99, but the model has 3"),
    ],
)
def test_impossible_layers(layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizedCache(decoder_config(tiny_model("llama", torch.float32)), layers=layers)
