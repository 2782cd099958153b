"""Published figures. Every one states its unit: 1 KiB = 1,024 bytes, 1 GB = 10^9 bytes."""

import pytest
import torch

from hf_kvcache.planner import Planned, load_plan_config, most_rows, most_tokens, observe_model
from hf_kvcache.planner.compute import model_work, sequence_share, total_flops, uniform_work
from hf_kvcache.planner.formula import dynamic_bytes, expanded_values, layer_fields, token_bytes, visible_bytes
from hf_kvcache.planner.objects import cache_bytes
from hf_kvcache.planner.plan import latent_values
from hf_kvcache.planner.presets import PRESETS
from hf_kvcache.planner.weights import active_parameters, parameter_count, shard, weight_bytes
from hf_kvcache.units import GB, GIB, KIB, MIB

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def llama():
    return observe_model(load_plan_config("llama-3.1-8b"))


def test_llama_bytes(llama):
    assert token_bytes(llama.config, BF16) == 128 * KIB
    assert round(weight_bytes(llama) / GIB, 2) == 14.96


def test_llama_capacity_of_80_gib(llama):
    """Ideal memory, nothing but weights and the tokens of the built-in cache."""
    planned = Planned(llama, "dynamic")
    assert round(most_tokens(planned, 80 * GIB), -3) == 533_000
    assert [most_rows(planned, 80 * GIB, tokens) for tokens in (8192, 16384, 32768)] == [65, 32, 16]
    assert 0 < most_tokens(planned, 80 * GIB, usable=True) < most_tokens(planned, 80 * GIB)
    assert most_rows(planned, 14 * GIB, 1) == 0


@pytest.mark.parametrize("usable", [False, True])
@pytest.mark.parametrize("spec", ["paged", "dynamic"])
def test_bisection_finds_the_edge(llama, spec, usable):
    planned, memory = Planned(llama, spec), 24 * GIB
    limit = memory * (0.9 if usable else 1)

    def needed(tokens, rows):
        need = planned.need(tokens, rows)
        return need.peak_bytes if usable else need.ideal_bytes

    tokens, rows = most_tokens(planned, memory, 3, usable=usable), most_rows(planned, memory, 1000, usable=usable)
    assert needed(tokens, 3) <= limit < needed(tokens + 1, 3)
    assert needed(1000, rows) <= limit < needed(1000, rows + 1)


def test_llama_operations():
    """512 tokens from an empty prompt, N = all 8.03e9 parameters."""
    work = uniform_work(8.03e9, 32, 4096)
    without, with_cache = total_flops(work, 512, cached=False), total_flops(work, 512)
    assert f"{without:.2e}" == "2.12e+15"
    assert f"{with_cache:.2e}" == "8.29e+12"
    assert round(without / with_cache) == 256
    assert f"{sequence_share(work, 512):.2%}" == "0.83%"
    assert f"{work.crossing_tokens:.1e}" == "6.1e+04"


def test_llama_operations_of_matrices(llama):
    """The same, N = the parameters that multiply: without the embedding, which is looked up."""
    work = model_work(llama)
    assert f"{work.parameters:.1e}" == "7.5e+09"
    assert f"{total_flops(work, 512, cached=False):.2e}" == "1.98e+15"
    assert f"{total_flops(work, 512):.2e}" == "7.75e+12"
    assert f"{sequence_share(work, 512):.2%}" == "0.89%"
    assert f"{work.crossing_tokens:.1e}" == "5.7e+04"


def test_qwen3():
    config = load_plan_config("qwen3-8b")
    assert token_bytes(config, BF16) == 147_456 == 144 * KIB
    assert visible_bytes(config, BF16, 4096) == 576 * MIB
    assert visible_bytes(config, BF16, 32768) == 4.5 * GIB


def test_llama_2_holds_5_gb_at_10_thousand():
    assert round(visible_bytes(load_plan_config("llama-2-7b"), torch.float16, 10_000) / GB) == 5


def test_deepseek_latents():
    shape = observe_model(load_plan_config("deepseek-v3"))
    assert latent_values(shape) == (576, 32_768)
    assert expanded_values(shape.config) // 576 == 56  # 56.9, published as 57
    assert round(parameter_count(shape) / 1e9) == 671
    assert round(active_parameters(shape) / 1e9) == 37
    assert cache_bytes(shard(shape, 8), "paged", 1000) == cache_bytes(shape, "paged", 1000)


def test_gemma_3_windows():
    """27B at 131,072 tokens: 10 of 62 layers see everything, the others 1,023 tokens. 66.6 GB to 11.2 GB (10^9)."""
    config = load_plan_config("gemma-3-27b")
    without = 62 * 131_072 * 2 * 16 * 128 * 2
    assert round(without / GB, 1) == 66.6
    assert round(visible_bytes(config, BF16, 131_072) / GB, 1) == 11.2
    assert sum(layer.window is None for layer in layer_fields(config, BF16)) == 10


def test_gpt_oss_windows():
    """20B, 32 texts of 8,192 tokens: 6.09 GiB, and 12.00 GiB if its windows of 128 are ignored."""
    config = load_plan_config("gpt-oss-20b")
    assert round(visible_bytes(config, BF16, 8192, 32) / GIB, 2) == 6.09
    assert 32 * 8192 * 24 * 2 * 8 * 64 * 2 / GIB == 12.0


def test_gemma_3n_shares_layers():
    """E4B at 32,768 tokens: of 35 layers 15 use another's keys and values; of the 20 that store, 16 have windows."""
    config = load_plan_config("gemma-3n-e4b")
    layer = 2 * 2 * 256 * 2
    assert token_bytes(config, BF16) == 4 * layer == 8 * KIB
    assert visible_bytes(config, BF16, 32_768) == layer * (4 * 32_768 + 16 * 511)
    # 272 MiB; 2.19 GiB if sharing and windows are ignored.
    assert round(visible_bytes(config, BF16, 32_768) / MIB) == 272
    assert round(35 * layer * 32_768 / GIB, 2) == 2.19


def test_qwen3_next_states_do_not_grow():
    config = load_plan_config("qwen3-next-80b")
    states = sum(layer.state_bytes for layer in layer_fields(config, BF16))
    # 36 layers: a float32 matrix of 32 heads x 128 x 128, and 4 inputs of a convolution over 8,192 channels.
    assert states == 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    assert token_bytes(config, BF16) == 12 * 2 * 2 * 256 * 2


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_tensor_parallel_heads(llama, ranks, heads):
    """Split, and replicated where there are fewer heads than ranks."""
    assert {layer.keys.heads for layer in shard(llama, ranks).layers} == {heads}
    # Norms and embeddings are whole on every rank.
    assert weight_bytes(llama) / ranks <= weight_bytes(llama, ranks=ranks) <= weight_bytes(llama) / ranks + 2.2e9


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-70b", 70.6), ("mistral-7b", 7.2), ("gemma-2-9b", 9.2), ("phi-3-mini", 3.8), ("gpt-oss-20b", 20.9)],
)
def test_parameters(name, billions):
    assert round(parameter_count(observe_model(load_plan_config(name))) / 1e9, 1) == billions


@pytest.mark.parametrize("name", PRESETS)
def test_formula_agrees_with_layer_objects(name):
    shape = observe_model(load_plan_config(name))
    assert cache_bytes(shape, "dynamic", 4999, 2, new_tokens=1) == dynamic_bytes(shape.config, BF16, 5000, 2)
