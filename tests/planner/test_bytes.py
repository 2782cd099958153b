"""Three ways to the same bytes: the closed formula, layer objects on the meta device, a real run of the real model."""

from types import SimpleNamespace

import pytest
import torch
from architectures import VOCABULARY, tiny_model
from strategies import CACHE_ARGUMENT, decoder_config, dynamic_cache, whole_cache

from hf_kvcache import ConfigError, InputError, PagedCache, SpecError, build_cache
from hf_kvcache.evaluation import measured_bytes
from hf_kvcache.layer import layer_tensors
from hf_kvcache.planner.formula import dynamic_bytes, paged_bytes, visible_bytes
from hf_kvcache.planner.objects import cache_bytes, cache_groups
from hf_kvcache.planner.shapes import observe_model

# (tokens, rows, block size): inside one block, at and around a seal, past every window, many rows, much room.
CASES = [(1, 1, 4), (7, 2, 4), (8, 2, 4), (9, 2, 4), (37, 1, 4), (300, 3, 4), (64, 1, 64), (70, 1, 64), (90, 80, 4)]


@pytest.mark.parametrize(("tokens", "rows", "block_size"), CASES)
def test_formula_agrees_with_paged_layers(shape, tokens, rows, block_size):
    counted = cache_bytes(shape, f"paged:block_size={block_size}", tokens, rows)
    assert counted == paged_bytes(shape.config, shape.dtype, tokens, rows, block_size)
    assert counted >= visible_bytes(shape.config, shape.dtype, tokens, rows)


@pytest.mark.parametrize(("tokens", "rows"), [(2, 1), (8, 2), (9, 1), (37, 3)])
def test_formula_agrees_with_the_built_in_cache(shape, tokens, rows):
    counted = cache_bytes(shape, "dynamic", tokens - 1, rows, new_tokens=1)
    assert counted == dynamic_bytes(shape.config, shape.dtype, tokens, rows)


def run(name, cache, tokens, rows, steps=0):
    """Feed random text: a prefill, then single tokens."""
    model = tiny_model(name)
    ids = torch.randint(3, VOCABULARY, (rows, tokens + steps), generator=torch.Generator().manual_seed(0))
    arguments = {"input_ids": ids[:, :6]} if model.config.is_encoder_decoder else {}
    target = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    cache = whole_cache(model, cache)
    with torch.no_grad():
        for begin, end in [(0, tokens), *((step, step + 1) for step in range(tokens, tokens + steps))]:
            model(**arguments | {target: ids[:, begin:end], CACHE_ARGUMENT: cache}, use_cache=True)
    return cache


@pytest.mark.parametrize(("tokens", "rows", "steps"), [(37, 1, 0), (22, 3, 0), (22, 3, 9)])
def test_real_run_holds_what_was_planned(architecture, shape, tokens, rows, steps):
    cache = PagedCache(decoder_config(tiny_model(architecture)), block_size=4)
    whole = run(architecture, cache, tokens, rows, steps)
    assert cache.memory().total_bytes == cache_bytes(shape, "paged:block_size=4", tokens, rows, new_tokens=steps)
    if shape.cross_layers:
        groups = cache_groups(shape, "paged:block_size=4", tokens, rows, encoder_tokens=min(6, tokens))
        assert groups[-1].kind == "cross-attention"
        assert groups[-1].total_bytes == measured_bytes(whole.cross_attention_cache)


@pytest.mark.parametrize(
    "spec",
    [
        "evicting:policy=knorm,budget=0.5,sinks=2,recent=4,block_size=4,pyramid=true",
        "quantized:bits=4,sinks=2,recent=4,block_size=4,layers=0:key_bits=8",
    ],
)
def test_layers_of_one_kind_may_keep_it_in_different_ways(spec):
    cache = build_cache(decoder_config(tiny_model("llama")), spec)
    run("llama", cache, 60, 2)
    shape = observe_model(tiny_model("llama").config, torch.float64)
    assert cache.memory().total_bytes == cache_bytes(shape, spec, 60, 2)
    assert len({group.layer_bytes for group in cache_groups(shape, spec, 60, 2)}) > 1


@pytest.mark.parametrize("steps", [0, 1])
def test_real_run_of_the_built_in_cache(architecture, shape, steps):
    cache = dynamic_cache(tiny_model(architecture))
    run(architecture, cache, 20, 2, steps)
    assert measured_bytes(cache) == cache_bytes(shape, "dynamic", 20, 2, new_tokens=steps)


def test_storages_without_an_address_are_told_apart():
    first, second = torch.empty(2, 4, device="meta"), torch.empty(4, device="meta")
    layer = SimpleNamespace(states={0: first, 1: second}, view=first[1:], length=3)
    assert [tensor.numel() for tensor in layer_tensors(layer)] == [8, 4]


@pytest.mark.parametrize("prompt", [1, 5, 64, 100])
def test_one_prefill_is_the_most_a_growing_history_holds(prompt):
    """A plan counts one prefill of n; a history that grew to n by single tokens holds as much or less."""
    shape = observe_model(decoder_config(tiny_model("llama")))
    for tokens in range(prompt + 1, prompt + 60, 7):
        grown = cache_bytes(shape, "paged:block_size=4", prompt, 2, new_tokens=tokens - prompt)
        assert grown <= cache_bytes(shape, "paged:block_size=4", tokens, 2)


def test_shared_layers_store_nothing():
    shape = observe_model(decoder_config(tiny_model("gemma3n")))
    groups = cache_groups(shape, "paged", 40)
    assert sum(group.layers for group in groups if group.total_bytes) == 2
    # Newer transformers have an empty layer where older ones have none.
    assert {group.kind for group in groups if not group.total_bytes} <= {"nothing (another layer's keys and values)"}


def test_static_cache_holds_its_capacity():
    shape = observe_model(decoder_config(tiny_model("llama")))
    tokens = 40
    # Keys and values, and the 8-byte length that every layer keeps.
    assert cache_groups(shape, "static", tokens)[0].growing_bytes == 0
    assert cache_bytes(shape, "static", tokens) == visible_bytes(shape.config, shape.dtype, tokens) + 3 * 8


def test_bad_input():
    shape = observe_model(decoder_config(tiny_model("llama")))
    with pytest.raises(InputError, match="tokens of at least 1, got 0"):
        cache_bytes(shape, "paged", 0)
    with pytest.raises(InputError, match="batch size of at least 1, got -2"):
        cache_bytes(shape, "paged", 5, -2)
    with pytest.raises(SpecError, match="pagd"):
        cache_bytes(shape, "pagd", 5)
    with pytest.raises(ConfigError, match="is no cache"):
        cache_bytes(shape, "none", 5)
