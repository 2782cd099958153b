"""Models whose layers or weights accelerate's `device_map` spreads: each layer's history is where the layer runs."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from modes import generate, prompt
from strategies import SCRATCH
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvcache import build_cache
from hf_kvcache.residency.placement import movable

SPECS = {
    "paged": "paged:block_size=4",
    "quantized": "quantized:sinks=2,recent=3,block_size=4",
    "offloaded": f"offloaded:device_budget=2KiB,residency=disk:{SCRATCH},block_size=4",
}


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Weights of some layers in memory, those of others on disk, from where accelerate brings them for each pass."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.layers.2": "cpu", "model.norm": "disk", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=folder / "weights")
    assert next(model.model.layers[1].parameters()).is_meta
    return model.eval()


@pytest.mark.parametrize("name", SPECS)
def test_weights_on_disk(name: str, spread: PreTrainedModel) -> None:
    cache = build_cache(spread.config, SPECS[name])
    generation = generate(spread, cache, prompt())
    whole = tiny_model("llama", torch.float32)
    expected = generate(whole, build_cache(whole.config, SPECS[name]), prompt())
    assert torch.equal(generation.tokens, expected.tokens)
    torch.testing.assert_close(generation.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert {layer.device for layer in cache.layers} == {torch.device("cpu")}
    assert set(cache.memory().device_bytes) == ({"cpu", "disk"} if name == "offloaded" else {"cpu"})
    cache.check_integrity()


@pytest.mark.parametrize("name", SPECS)
def test_layers_on_two_devices(name: str) -> None:
    """The second device is torch's `meta`, which has shapes but no bytes. A budget is one for each device."""
    config = tiny_model("llama", torch.float32).config
    cache = build_cache(config, SPECS[name].replace("2KiB", "240KiB"))
    devices = ["cpu", "meta", "cpu"]
    for tokens in (40, 1, 1, 1, 5):
        for index, device in enumerate(devices):
            keys, values = torch.randn(2, 1, 2, tokens, 128).to(device)
            cache.update(keys, values, index)
    assert [layer.device.type for layer in cache.layers] == devices
    held = cache.memory().device_bytes
    assert set(held) == {"cpu", "meta"}
    if name != "quantized":
        assert held["cpu"] == 2 * held["meta"] <= 240 << 10 < sum(held.values())
    for layer in cache.layers:
        assert all(arena.device == layer.device for arena in movable(layer).pool.arenas)
