import math

import pytest
import torch
import toys
from transformers import MistralConfig, MistralForCausalLM

from hf_kvcache.evaluation import evaluate, report
from hf_kvcache.evaluation.audit import audit
from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.proofs import Rewrite
from hf_kvcache.evaluation.protocols import Protocol

WINDOW = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(1))


def audited(spec, model=None):
    return audit(model or toys.tiny_model(), resolve_cache(spec, 512), WINDOW)


@pytest.mark.parametrize("spec", ["dynamic", "static", "paged", "paged:fused=false", "quantized:codec=exact", "quest"])
def test_what_exact_caches_hold_never_changes(spec):
    assert audited(spec) == (400, 23, 0, 0.0, 0.0, None)


def test_a_quantized_token_changes_once_when_it_leaves_the_recent_ones():
    found = audited("quantized:bits=4,sinks=4,recent=32,block_size=16")
    encoded = (400 - 4 - 32) // 16 * 16
    assert (found.rewrites_most, found.rewrites_mean, found.missing) == (1, encoded / 400, 0.0)
    assert found.first == Rewrite(0, 4, 148)


@pytest.mark.parametrize("spec", ["evicting:budget=160", "evicting:budget=160,per_head=true", "window:window=64"])
def test_dropping_tokens_changes_no_other(spec):
    found = audited(spec)
    assert (found.rewrites_most, found.first) == (0, None)
    assert 0.5 < found.missing < 0.9


def test_changes_are_counted_where_tokens_are_dropped_as_well():
    found = audited("window:window=64,sinks=0,block_size=16+quantized:bits=4,sinks=0,recent=32")
    assert found.rewrites_most is None
    assert 0 < found.rewrites_mean <= 1
    assert found.first.token is None
    assert found.complaint.endswith(f"first a token of layer 0, when {found.first.history_tokens} were there")


@pytest.mark.parametrize(
    ("fault", "most", "share"),
    [
        ("off_by_one", 1, 1.0),
        ("shuffled_block", 1, 8 / 400),
        ("renumbered", 1, 1.0),
        ("jittering", math.inf, 8 / 400),
        ("random_eviction", math.inf, 1.0),
    ],
)
def test_every_cache_that_rewrites_its_history_is_caught(fault, most, share):
    found = audited(f"toys:{fault}")
    assert 1 <= found.rewrites_most <= most
    assert (found.rewrites_most > 10) == (most == math.inf)
    assert found.rewrites_mean / found.rewrites_most == pytest.approx(share, abs=0.6 * share)


def test_one_bit_of_one_layer_is_found_where_and_when_it_changes():
    class OneBit(toys.ToyCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            if layer_idx == 1 and self.get_seq_length(1) == 148:
                values = self.layers[1].values[0, 1, 77]
                values[3] = torch.nextafter(values[3], values[3] + 1)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    found = audit(toys.tiny_model(), lambda config: OneBit(config=config), WINDOW)
    assert found.first == Rewrite(1, 77, 196)
    assert (found.rewrites_most, found.rewrites_mean) == (1, 1 / 800)


def test_a_sliding_window_of_the_model_is_followed():
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32) | {"num_attention_heads": 4, "head_dim": 8}
    config = MistralConfig(vocab_size=256, num_hidden_layers=2, num_key_value_heads=2, sliding_window=100, **sizes)
    model = MistralForCausalLM(config).eval()
    for spec in ("dynamic", "static", "paged"):
        found = audited(spec, model)
        assert (found.rewrites_most, found.first) == (0, None)
        assert found.missing > 0.4


def test_what_cannot_be_read_says_why():
    assert audited("none") == "there is no cache to audit"
    assert audited("toys:shortened").startswith("reading what it holds raised RuntimeError")


def test_the_report_says_how_often(tmp_path):
    sizes = Protocol(60, 12, 8)
    caches = ["quantized:bits=4,recent=8,block_size=8", "none"]
    results = evaluate(toys.loaded(), [toys.TEXT], caches, protocol=sizes, max_tokens=94, progress=False)
    table = report.main_table(results)
    column = table.columns.index("states rewritten")
    assert [row[column] for row in table.rows] == ["never", "-", "once", "-"]
    text = report.write_report(results, tmp_path)[1].read_text()
    assert "appends (60 tokens): rewritten once, 0." in text
    assert "No audit of stored states: there is no cache to audit." in text
