import gc
import sys

import pytest
import torch
import toys
from transformers import DynamicCache

from hf_kvcache.evaluation import evaluate, measured_bytes, report
from hf_kvcache.evaluation.cost import measure_cost
from hf_kvcache.evaluation.high_water import HighWater, allocated_bytes
from hf_kvcache.evaluation.memory import reachable_tensors
from hf_kvcache.evaluation.peak import PeakBytes
from hf_kvcache.evaluation.protocols import forward

TOKEN = 2 * 2 * 2 * 8 * 4
"""Bytes of a token in the tiny model: K and V, layers, heads, width, bytes."""


def test_storages_count_while_they_live():
    held = torch.zeros(100)
    peak = PeakBytes([held, held[5:]])
    with peak:
        made = torch.ones(50)
        view = made[3:].view(47)
        assert peak.live_bytes == 600
        del made
        assert peak.live_bytes == 600
        del view
        assert peak.live_bytes == 400
        held.add_(1)
    del held
    gc.collect()
    assert (peak.live_bytes, peak.peak_bytes) == (0, 600)


def test_the_plain_cache_needs_one_layer_twice_when_it_grows():
    model = toys.tiny_model()
    cache = DynamicCache(config=model.config)
    forward(model, torch.randint(0, 256, (1, 400)), cache)
    before = measured_bytes(cache)
    peak = PeakBytes(reachable_tensors(cache))
    with peak:
        forward(model, torch.ones(1, 1, dtype=torch.long), cache)
    extra = peak.peak_bytes - before
    assert before == 400 * TOKEN
    assert 0.25 * before < extra < 1.1 * before
    assert peak.live_bytes == pytest.approx(measured_bytes(cache), rel=0.2)


def test_cost_of_every_cache_in_one_run(tmp_path):
    results = evaluate(
        toys.loaded(),
        [toys.TEXT],
        ["static", "evicting:budget=160", "window:window=40", "none"],
        tasks=["cost"],
        contexts=(30, 90),
        progress=False,
    )
    dynamic, static, evicting, window, none = (of.cost for of in (results.reference, *results.caches))
    assert [of.context_tokens for of in dynamic.tokens] == [30, 90]
    assert dynamic.tokens[1].bytes_held == pytest.approx(103 * TOKEN)
    assert all(of.milliseconds > 0 and of.low <= of.milliseconds <= of.high for of in dynamic.tokens)
    assert dynamic.tokens[0].speedup == 1.0
    assert static.tokens[0].speedup > 0
    assert static.peak_bytes > dynamic.prompt_tokens * TOKEN
    assert none.tokens[0].bytes_held == 0
    assert none.tokens[0].speedup is None
    assert none.peak_bytes > 0
    assert dynamic.prompt_tokens_per_second == pytest.approx(1e3 * dynamic.prompt_tokens / dynamic.first_token_ms)
    text = report.write_report(results, tmp_path)[1].read_text()
    assert "ms/token after 90" in text
    assert (dynamic.dropped_tokens, none.dropped_tokens, dynamic.allocator_peak_bytes) == (None, None, None)
    assert evicting.prompt_tokens - 160 <= evicting.dropped_tokens < evicting.prompt_tokens - 90
    assert window.prompt_tokens - 128 <= window.dropped_tokens < window.prompt_tokens - 44
    assert "tokens dropped" in text
    assert "allocator" not in text
    assert ("whole process" in text) == (sys.platform == "linux")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process reset its mark")
def test_the_mark_of_the_process_is_that_of_what_runs_inside():
    sizes = []
    for mib in (96, 0):
        with HighWater(torch.device("cpu"), 0) as marks:
            torch.ones(mib, 2**18)
        sizes.append(marks.process_bytes)
    assert sizes[0] - sizes[1] > 64 * 2**20


def test_the_mark_of_an_allocator_leaves_out_what_was_there(monkeypatch):
    """No GPU here: a module with the functions that those of torch have."""

    class Counting:
        peak, now = 900, 500

        def reset_peak_memory_stats(self, _):
            self.peak = self.now

        def max_memory_allocated(self, _):
            return self.peak

        def memory_allocated(self, _):
            return self.now

    module, device = Counting(), torch.device("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    with HighWater(device, allocated_bytes(device)) as marks:
        module.peak = 700
    assert marks.allocator_bytes == 200


def test_a_cache_asked_for_twice_is_measured_once():
    one, two = measure_cost(toys.loaded(), ["dynamic", "dynamic"], (20,), progress=False)
    assert one == two
