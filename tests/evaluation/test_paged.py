"""Our own cache under the instrument, on a tiny model and on the real one."""

import copy

import pytest
import torch
import toys

from hf_kvcache import PagedCache, build_cache
from hf_kvcache.evaluation import Protocol, evaluate, measured_bytes, metrics
from hf_kvcache.evaluation.float64 import in_float64
from hf_kvcache.evaluation.protocols import forward, stream
from hf_kvcache.evaluation.windows import windows


@pytest.mark.parametrize("chunk", [1, 24])
@pytest.mark.parametrize(
    ("spec", "classes"), [("paged:block_size=16", ["bitwise", "rounding"]), ("paged:fused=false", ["bitwise"])]
)
def test_paged_is_what_it_declares(spec, classes, chunk):
    results = evaluate(
        toys.loaded(), [toys.TEXT], [spec], protocol=Protocol(100, 30, chunk), max_tokens=138, progress=False
    )
    paged = results.caches[0]
    assert paged.declared == classes[-1]
    assert paged.measured in classes
    assert paged.proof.logit_difference < 1e-13 * paged.proof.logit_scale
    assert paged.fidelity.top1_agreement.value == 1.0
    assert results.reference.bytes_held <= paged.bytes_held < 1.5 * results.reference.bytes_held


def test_measured_bytes_are_those_the_cache_reports():
    """All but its tables, which are Python numbers and no tensors."""
    model = toys.tiny_model()
    cache = build_cache(model.config, "paged:block_size=16")
    forward(model, torch.arange(100)[None], cache)
    forward(model, torch.arange(1)[None], cache)
    memory = cache.memory()
    assert sum(memory.device_bytes.values()) <= measured_bytes(cache) <= memory.total_bytes


def test_the_real_model_agrees_with_no_cache(smollm2, wikitext):
    torch.set_num_threads(2)
    protocol = Protocol(48, 40, 1)
    ((window, _),) = windows([wikitext], smollm2.tokenizer, protocol, max_tokens=7)
    model = copy.deepcopy(smollm2.model)
    with in_float64(model):
        paged, none = (
            torch.cat([of.logits for of in stream(model, cache, window, protocol)])
            for cache in (PagedCache(model.config), None)
        )
    assert paged.dtype == torch.float64
    assert float(none.abs().max()) > 10
    assert float((paged - none).abs().max()) < 1e-11
    nll = metrics.negative_log_likelihood(metrics.log_probabilities(paged), window[41:])
    assert 0.5 < float(nll.mean()) < 8
