"""The estimate of a prefill's transient tensors against those that a real model creates, counted on the meta device."""

import weakref

import pytest
import torch
from strategies import CACHE_ARGUMENT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache

from hf_kvcache.layer import layer_tensors
from hf_kvcache.planner import load_plan_config, observe_model
from hf_kvcache.planner.capacity import activation_bytes

TOKENS = 2048


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive at once."""

    def __init__(self, ignored):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in ignored)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.forget, storage.nbytes())
        return result

    def forget(self, size):
        self.live -= size


def attention_without_scores(query, key, value, *args, **kwargs):
    return query.new_empty(*query.shape[:3], value.shape[3])


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "llama-2-7b", "qwen3-8b"])
def test_estimate_of_activations(name, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention_without_scores)
    config = load_plan_config(name)
    shape = observe_model(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        ids = torch.ones(1, TOKENS, dtype=torch.long)
    cache, counter = DynamicCache(config=config), LiveBytes([*model.parameters(), ids])
    with torch.no_grad(), counter:
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    held = sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in layer_tensors(layer))
    assert counter.peak - held == pytest.approx(activation_bytes(shape, TOKENS), rel=0.03)
