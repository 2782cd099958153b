"""Every codec inside a cache: a small model reads what it stores."""

import pytest
import torch
from codec_cases import ALL, OF_BITSANDBYTES
from strategies import CACHE_ARGUMENT
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcache import QuantizedCache


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("name", "bits"), ALL)
def test_a_model_reads_what_a_codec_stores(model: LlamaForCausalLM, name: str, bits: int) -> None:
    if name in OF_BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    tokens = torch.randint(3, 50, (1, 400), generator=torch.Generator().manual_seed(0))
    cache = QuantizedCache(model.config, bits=bits, codec=name, recent=32, block_size=16)
    with torch.no_grad():
        model(tokens[:, :300], **{CACHE_ARGUMENT: cache})
        read = model(tokens[:, 300:], **{CACHE_ARGUMENT: cache}).logits
        expected = model(tokens).logits[:, 300:]
    cache.check_integrity()
    error = (read - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # A random model attends to all tokens alike, and the errors of its few dozen different values average out a little.
    # An 8-bit float has the error of 5 bits.
    assert error < (1e-5 if name == "exact" else 0.4 / 2 ** (5 if name == "fp8" else bits)), error
    if name != "exact":
        assert cache.memory().scale_bytes > 0
        assert cache.memory().payload_bytes < 400 * 2 * 2 * 2 * 16 * 4
