import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from hf_kvcache import PagedCache
from hf_kvcache.bench.filling import LayerStates, fill, observe_states
from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.protocols import forward
from hf_kvcache.retention.policies import POLICIES


def test_states_are_seen_from_one_token(tiny):
    states = observe_states(tiny.model)
    assert states.plain
    assert states.layers == (LayerStates(2, 8, 2, 8, torch.float32),) * 2
    assert states.layers[0].token_bytes == 2 * 2 * 8 * 4


@pytest.mark.parametrize("spec", ["dynamic", "static", "paged", "paged:fused=false"])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_cache_gets_the_same_history_and_the_model_continues_it(tiny, spec, rows):
    expected, cache = DynamicCache(config=tiny.model.config), resolve_cache(spec, 64)(tiny.model.config)
    states = observe_states(tiny.model)
    for of in (expected, cache):
        fill(tiny.model, of, states, tokens=50, rows=rows, seed=1)
        assert int(of.get_seq_length()) == 50
    token = torch.full((rows, 1), 7)
    logits = [forward(tiny.model, token, of) for of in (expected, cache)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    assert torch.equal(logits[0][0], logits[0][-1])


DROPPING = [
    "window:window=32,sinks=4",
    "window:window=32,sinks=4,rerotate=true",
    "quantized:bits=4+window:window=32",
    "quantized:bits=4+evicting:budget=160",
    "evicting:budget=160,per_head=true",
    "evicting:budget=0.5,pyramid=true",
    "quest:budget=0.25",
    *(f"evicting:policy={name},budget=160" for name in POLICIES),
]


@pytest.mark.parametrize("spec", DROPPING)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_history_longer_than_a_cache_keeps_is_continued_too(tiny, spec, rows):
    """What is dropped depends on a query, and on a mask or none, as after a prompt."""
    cache, tokens = resolve_cache(spec, 320)(tiny.model.config), 300
    fill(tiny.model, cache, observe_states(tiny.model), tokens=tokens, rows=rows, seed=1)
    for number in range(5):
        logits = forward(tiny.model, torch.full((rows, 1), number), cache)
        assert bool(logits.isfinite().all())
        cache.reorder_cache(torch.arange(rows).flip(0))
        cache.check_integrity()
    assert cache.get_seq_length() == tokens + 5
    keeps_all = spec.startswith("quest") or "+evicting" in spec
    assert (cache.memory().tokens_held < 200) != keeps_all


def test_another_seed_is_another_history(tiny):
    states, token = observe_states(tiny.model), torch.tensor([[7]])
    logits = []
    for seed in (0, 1):
        cache = PagedCache(tiny.model.config)
        fill(tiny.model, cache, states, tokens=20, rows=1, seed=seed)
        logits.append(forward(tiny.model, token, cache))
    assert not torch.allclose(logits[0], logits[1])


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_windows_are_filled_with_states_too():
    model = MistralForCausalLM(MistralConfig(num_hidden_layers=2, sliding_window=16, **SMALL)).eval()
    states, cache = observe_states(model), PagedCache(model.config)
    assert states.plain
    fill(model, cache, states, tokens=40, rows=1, seed=0)
    assert cache.get_seq_length() == 40


def test_recurrent_states_take_a_prefill():
    config = Qwen3NextConfig(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **SMALL,
    )
    model = Qwen3NextForCausalLM(config).eval()
    states, cache = observe_states(model), PagedCache(config)
    assert not states.plain
    assert len(states.layers) == 1
    fill(model, cache, states, tokens=20, rows=2, seed=0)
    assert cache.get_seq_length() == 20
