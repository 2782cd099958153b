"""Operations against torch's FLOP counter, which counts those of a real model as it runs; and sums against loops."""

import pytest
import torch
from architectures import tiny_model
from strategies import CACHE_ARGUMENT, decoder_config, dynamic_cache
from torch.utils.flop_counter import FlopCounterMode

from hf_kvcache import InputError
from hf_kvcache.planner.bandwidth import cache_outweighs_weights, decode_step
from hf_kvcache.planner.compute import Work, model_work, step_flops, total_flops, uniform_work
from hf_kvcache.planner.gpus import GPUS
from hf_kvcache.planner.prefix import prefix_reuse
from hf_kvcache.planner.shapes import observe_model


def counted(model, ids, **options):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_torch_counts_the_same(name):
    model = tiny_model(name, attention="eager")
    work = model_work(observe_model(decoder_config(model), torch.float64))
    ids = torch.arange(3, 43)[None]
    cache = dynamic_cache(model)
    for tokens in range(1, 41):
        without = counted(model, ids[:, :tokens], use_cache=False)
        assert without == step_flops(work, tokens, cached=False, dense=True)
        with_cache = counted(model, ids[:, tokens - 1 : tokens], use_cache=True, **{CACHE_ARGUMENT: cache})
        assert with_cache == step_flops(work, tokens)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("prompt", [0, 1, 7])
def test_totals_are_sums_of_steps(window, prompt):
    work = Work(1000.0, ((64.0, window), (32.0, None)))
    steps = range(prompt + 1, prompt + 21)
    assert total_flops(work, 20, prompt, cached=False) == sum(step_flops(work, t, cached=False) for t in steps)
    prefill = step_flops(work, prompt, cached=False) if prompt else 0
    assert total_flops(work, 20, prompt) == prefill + sum(step_flops(work, t) for t in steps)


def test_crossing_with_windows():
    """Where attention has cost as much as the matrices; later, or never, if layers have windows."""
    full, mixed = Work(1000.0, ((64.0, None),) * 2), Work(1000.0, ((64.0, None), (64.0, 4)))
    assert full.crossing_tokens < mixed.crossing_tokens
    assert total_flops(mixed, int(mixed.crossing_tokens)) >= 2 * 2000 * mixed.crossing_tokens
    assert Work(1000.0, ((64.0, 4),)).crossing_tokens == float("inf")


def test_bandwidth_bound():
    shape = observe_model(decoder_config(tiny_model("llama")))
    step = decode_step(shape, 100, 4)
    assert step.cache_bytes == 4 * 100 * 3 * 2 * 2 * 8 * 2
    assert step.bound_seconds(GPUS["h100"]) == (step.weight_bytes + step.cache_bytes) / 3350e9
    edge = cache_outweighs_weights(shape, 4)
    assert decode_step(shape, edge, 4).cache_bytes > step.weight_bytes >= decode_step(shape, edge - 1, 4).cache_bytes


def test_reuse():
    reuse = prefix_reuse(uniform_work(100.0, 2, 8), 1000, 1.0, 1e9, 2.0, 0.5)
    assert reuse.saved_tokens == 999
    assert reuse.saved_seconds == reuse.saved_flops / 1e9
    assert reuse.cost == pytest.approx((1 * 2.0 + 999 * 0.5) / 1e6)
    assert prefix_reuse(uniform_work(100.0, 2, 8), 1000, 0.0).saved_flops == 0
    for arguments in [(1000, 1.5), (1000, -0.1), (0, 0.5), (1000, 0.5, None, 1.0), (1000, 0.5, None, 1.0, -1.0)]:
        with pytest.raises(InputError):
            prefix_reuse(uniform_work(100.0, 2, 8), *arguments)
