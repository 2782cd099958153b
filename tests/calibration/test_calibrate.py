"""Calibration: prices that are what the cache does, plans that hold, files that come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import tiny_model
from strategies import decoder_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_kvcache import ConfigError, InputError, QuantizationPlan, QuantizedCache, StorageError, build_cache, calibrate
from hf_kvcache.calibration import LayerBits, Texts, cut, sensitivities
from hf_kvcache.evaluation.protocols import forward

PLAN = QuantizationPlan(4, (LayerBits(0, 8, 4), LayerBits(1, 4, 4), LayerBits(2, 4, 4)), 4, 128, 4.4, 0.001, 0.002)


FRAGILE = 1


# A tokenizer of words that are numbers, and a text of them.
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({str(number): number for number in range(90)}, "0"))
)
WORDS.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
IDS = torch.randint(3, 90, (2048,), generator=torch.Generator().manual_seed(0))
TEXT = " ".join(map(str, IDS.tolist()))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Three layers, of which one looks at few tokens very surely."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=90,
        initializer_range=0.15,
    )
    made = LlamaForCausalLM(config).eval()
    for projection in (made.model.layers[FRAGILE].self_attn.q_proj, made.model.layers[FRAGILE].self_attn.k_proj):
        projection.weight.data *= 2
    return made


def test_the_price_of_a_layer_is_the_divergence_it_causes(model: PreTrainedModel) -> None:
    """At the bits that were measured exactly; at others as the bits of all layers together change."""
    texts = Texts(model, cut([TEXT], WORDS, 1024 * 2)[:1], lambda: None)
    found = sensitivities(texts, [0, FRAGILE, 2], 3, [3, 4], sinks=4, recent=128)
    priced = {(of.layer, of.kind, of.bits): of for of in found}
    alone = texts.divergence(
        lambda: build_cache(model.config, f"quantized:bits=3,codec=exact,layers={FRAGILE}:codec=mixed/exact")
    )
    assert priced[FRAGILE, "keys", 3].kl == pytest.approx(alone, rel=1e-6)
    ratios = [priced[layer, "keys", 4].kl / priced[layer, "keys", 3].kl for layer in (0, FRAGILE, 2)]
    assert ratios == pytest.approx(ratios[:1] * 3)
    assert 0.1 < ratios[0] < 0.5
    assert priced[0, "values", 4].token_bits == 2 * 16 * 4 + 2 * 8  # two heads of width 16, a byte of scale a token
    assert priced[0, "values", 4].numbers == 32


def test_a_fragile_layer_is_given_more_and_the_plan_costs_less(model: PreTrainedModel) -> None:
    plan = calibrate(model, [TEXT], WORDS, bits=3, progress=False)
    given = {of.layer: of.key_bits for of in plan.layers}
    assert given[FRAGILE] == max(given.values()) > 3
    assert plan.kl < 0.8 * plan.uniform_kl
    cache, uniform = (QuantizedCache(model.config, **options) for options in (plan.options(), {"bits": 3}))
    for of in (cache, uniform):
        forward(model, IDS[None, :1024], of)
    assert cache.memory().total_bytes <= 1.02 * uniform.memory().total_bytes


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert QuantizationPlan.load(tmp_path / "plan.json") == PLAN
    assert PLAN.spec == (
        "quantized:bits=4,sinks=4,recent=128,layers=0:key_bits=8&value_bits=4;1-2:key_bits=4&value_bits=4"
    )


def test_a_plan_makes_a_cache() -> None:
    config = decoder_config(tiny_model("llama", torch.float32))
    plan = QuantizationPlan(4, PLAN.layers[:2], 4, 128, 4.4, 0.001, 0.002)
    described = build_cache(config, plan.spec).describe()
    assert described == QuantizedCache(config, **plan.options()).describe()
    assert "keys grid 8" in described
    assert "keys mixed" in described


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot read a plan"),
        ("[]", "holds no plan"),
        ('{"format": "other"}', "holds no plan"),
        (json.dumps({"format": "hf_kvcache quantization plan", "version": 99}), "format version 99"),
        (json.dumps({"format": "hf_kvcache quantization plan", "version": 1, "layers": []}), "does not describe"),
    ],
)
def test_damaged_plans(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(StorageError, match=message):
        QuantizationPlan.load(tmp_path / "plan.json")


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        QuantizationPlan.load(tmp_path / "none.json")
    with pytest.raises(StorageError, match="cannot write"):
        PLAN.save(tmp_path / "no" / "plan.json")


def test_too_little_text(model: PreTrainedModel) -> None:
    with pytest.raises(InputError, match="at least 2048 tokens"):
        calibrate(model, ["5 6 7"], WORDS, progress=False)


def test_bits_that_do_not_exist(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="bits"):
        calibrate(model, [TEXT], WORDS, bits=1, progress=False)
