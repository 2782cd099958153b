from types import SimpleNamespace

import torch
import toys
from transformers import DynamicCache, StaticCache

from hf_kvcache.evaluation import measured_bytes
from hf_kvcache.evaluation.protocols import forward

IDS = torch.arange(30)[None]


def test_bytes_of_the_plain_cache_follow_the_formula():
    model = toys.tiny_model()
    cache = DynamicCache(config=model.config)
    assert measured_bytes(cache) == 0
    forward(model, IDS, cache)
    assert measured_bytes(cache) == 2 * 2 * 2 * 8 * 30 * 4  # K and V, layers, heads, width, tokens, bytes


def test_a_fixed_cache_holds_its_full_size_from_the_start():
    model = toys.tiny_model()
    cache = StaticCache(config=model.config, max_cache_len=100)
    forward(model, IDS, cache)
    assert 2 * 2 * 2 * 8 * 100 * 4 <= measured_bytes(cache) < 2 * 2 * 2 * 8 * 100 * 4 + 1024


def test_a_storage_counts_once_and_in_full():
    pool = torch.zeros(100)
    assert measured_bytes([pool[:3], pool[50:], {"again": pool}]) == 400


def test_nested_objects_slots_and_cycles():
    class Slotted:
        __slots__ = ("inner", "missing")

    slotted = Slotted()
    slotted.inner = SimpleNamespace(tensor=torch.zeros(4), back=slotted)
    assert measured_bytes((slotted, None, "text", 3)) == 16


def test_weights_that_a_cache_points_at_are_not_its_own():
    assert measured_bytes(SimpleNamespace(model=toys.tiny_model(), config=toys.tiny_model().config)) == 0


def test_a_tensor_without_storage_counts_nothing():
    assert measured_bytes(torch.zeros(4, device="meta")) == 0
