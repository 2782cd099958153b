"""Operations against torch's FLOP counter, which counts those of a real model as it runs; and sums against loops."""

import copy

import pytest
import torch
from architectures import tiny_model
from strategies import CACHE_ARGUMENT, decoder_config, dynamic_cache
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from hf_kvcache import InputError
from hf_kvcache.planner.bandwidth import cache_outweighs_weights, decode_step
from hf_kvcache.planner.capacity import Planned, largest
from hf_kvcache.planner.compute import Work, model_work, step_flops, total_flops, uniform_work
from hf_kvcache.planner.gpus import GPUS
from hf_kvcache.planner.prefix import prefix_reuse
from hf_kvcache.planner.shapes import observe_model
from hf_kvcache.planner.weights import parameter_count


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


def test_torch_counts_the_same_of_a_real_model(smollm2):
    config = copy.deepcopy(smollm2.model.config)
    work = model_work(observe_model(config, torch.float32))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(smollm2.model.state_dict())
    cache, ids = dynamic_cache(model), torch.arange(3, 36)[None]
    prefill = counted(model, ids[:, :32], use_cache=True, **{CACHE_ARGUMENT: cache})
    assert prefill == counted(model, ids[:, :32], use_cache=False) == step_flops(work, 32, cached=False, dense=True)
    assert counted(model, ids[:, 32:], use_cache=True, **{CACHE_ARGUMENT: cache}) == step_flops(work, 33)


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
    planned = Planned(shape, "paged:block_size=4")
    step = decode_step(planned, 101, 4)
    assert step.cache_bytes == 4 * 101 * 3 * 2 * 2 * 8 * 2  # the tokens, not their blocks
    assert step.bound_seconds(GPUS["h100"]) == (step.weight_bytes + step.cache_bytes) / 3350e9
    edge = cache_outweighs_weights(planned, 4)
    assert (
        decode_step(planned, edge, 4).cache_bytes > step.weight_bytes >= decode_step(planned, edge - 1, 4).cache_bytes
    )
    half = decode_step(planned._replace(ranks=2), 101, 4)
    assert (half.cache_bytes, half.flops) == (step.cache_bytes // 2, step.flops / 2)
    assert step.weight_bytes / 2 < half.weight_bytes < step.weight_bytes


def test_each_row_visits_experts_of_its_own():
    shape = observe_model(decoder_config(tiny_model("deepseek_v3")))  # 2 of 4 experts
    one, two, many = (decode_step(Planned(shape, "dynamic"), 10, rows).weight_bytes for rows in (1, 2, 1000))
    experts = 2 * parameter_count(shape, "expert")
    assert two - one == pytest.approx(experts / 4)
    assert many - one == pytest.approx(experts / 2)


def test_a_decoder_step_meets_no_encoder():
    shape = observe_model(tiny_model("bart").config)
    encoder = {parameter.name for parameter in shape.parameters if parameter.kind == "encoder"}
    assert encoder == {parameter.name for parameter in shape.parameters if parameter.name.startswith("model.encoder.")}
    read = parameter_count(shape) - parameter_count(shape, "encoder", "embedding")
    assert decode_step(Planned(shape, "dynamic"), 9).weight_bytes == 2 * read


@pytest.mark.parametrize("edge", [0, 1, 2, 7, 63, 64, 65, 900, 1023, 1024])
@pytest.mark.parametrize("step", [1, 64])
def test_largest(edge, step):
    """Of sizes that grow evenly, and in steps."""
    expected = edge // step * step + step - 1 if step > 1 else edge
    assert largest(lambda n: (n // step) / max(1e-9, edge // step), most=1024) == min(expected, 1024)


def test_reuse():
    reuse = prefix_reuse(uniform_work(100.0, 2, 8), 1000, 1.0, 1e9, 2.0, 0.5)
    assert reuse.saved_tokens == 999
    assert reuse.saved_seconds == reuse.saved_flops / 1e9
    assert reuse.cost == pytest.approx((1 * 2.0 + 999 * 0.5) / 1e6)
    assert prefix_reuse(uniform_work(100.0, 2, 8), 1000, 0.0).saved_flops == 0
    for arguments in [(1000, 1.5), (1000, -0.1), (0, 0.5), (1000, 0.5, None, 1.0), (1000, 0.5, None, 1.0, -1.0)]:
        with pytest.raises(InputError):
            prefix_reuse(uniform_work(100.0, 2, 8), *arguments)
