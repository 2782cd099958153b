import json

import pytest
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

from hf_kvcache import EvaluationError, InputError, SpecError
from hf_kvcache.bench import Sizes, benchmark, write_report
from hf_kvcache.bench.report import headings, table_rows

SIZES = Sizes(context_tokens=(8, 64), prompt_tokens=32, beam_tokens=128, steps=4)
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values x layers x heads x width x bytes


class Broken(DynamicCache):
    """Refuses its second update."""

    def update(self, *args, **kwargs):
        if self.get_seq_length() > 0:
            raise RuntimeError("no room")
        return super().update(*args, **kwargs)


def broken(config):
    return Broken(config=config)


@pytest.fixture(scope="module")
def results(model_folder):
    from hf_kvcache.evaluation import load_model

    return benchmark(load_model(str(model_folder)), ["paged:block_size=16", "none"], SIZES, progress=False)


def test_every_cache_is_measured_at_every_length(results):
    assert [cache.spec for cache in results.caches] == ["dynamic", "paged:block_size=16", "none"]
    cached = [("decode", 8), ("decode", 64), ("prefill", 32), ("beams", 128)]
    for cache in results.caches[:2]:
        assert [(of.task, of.context_tokens) for of in cache.measurements] == cached
        assert [of.rows for of in cache.measurements] == [1, 1, 1, 4]
        assert [of.timing.rounds for of in cache.measurements] == [4, 4, 3, 4]
        for of in cache.measurements:
            times = of.timing.milliseconds
            assert 0 < times.low <= times.median <= times.high
            assert of.timing.speedup.median > 0
    assert [(of.task, of.context_tokens) for of in results.caches[2].measurements] == cached[:3]
    assert all(of.held is None for of in results.caches[2].measurements)


def test_the_reference_against_itself_is_one(results):
    speedups = [of.timing.speedup for of in results.caches[0].measurements]
    assert {(of.low, of.median, of.high) for of in speedups} == {(1.0, 1.0, 1.0)}


def test_bytes_are_those_of_the_formula(results):
    dynamic, paged, _ = results.caches
    assert results.token_bytes == TOKEN_BYTES
    for of in dynamic.measurements:
        grown = 0 if of.task == "prefill" else 3 + 4
        assert of.held.tokens == of.context_tokens + grown
        assert of.held.total_bytes == of.held.formula_bytes == TOKEN_BYTES * of.held.tokens * of.rows
        assert of.held.unused_share is None
    one = paged.find("decode", 64).held
    assert 0 <= one.total_bytes - one.unused_bytes - one.formula_bytes < 64  # the last positions, seen by the cache
    assert 0 < one.unused_share < 1


def test_beams_of_one_prompt_share_it(results):
    dynamic, paged, _ = (cache.find("beams", 128) for cache in results.caches)
    assert paged.held.total_bytes < dynamic.held.total_bytes / 2


def test_report_and_record(results, tmp_path):
    files = write_report(results, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["results.json", "report.md", "decode.png", "bytes.png", "bits.png"]
    record = json.loads(files[0].read_text())
    assert record["schema"] == "hf-kvcache-bench/1"
    assert record["filling"] == "random states"
    assert set(record["caches"][1]["measurements"][0]) == {"task", "context_tokens", "rows", "timing", "held"}
    text = files[1].read_text()
    assert f"{TOKEN_BYTES:,} bytes a token" in text
    assert "![decode.png](decode.png)" in text
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files[2:])


def test_rows_of_the_table_name_what_was_measured(results):
    rows = {row[0]: row[1:] for row in table_rows(results)}
    assert headings(results) == ("", "dynamic (reference)", "paged:block_size=16", "none")
    assert list(rows)[:4] == [
        "decode after 8 tokens, ms per token",
        "decode after 64 tokens, ms per token",
        "prefill of 32 tokens, ms",
        "4 beams after 128 tokens, ms per step",
    ]
    assert "x [" in rows["decode after 64 tokens, ms per token"][1]
    assert rows["4 beams after 128 tokens, ms per step"][2] == "-"
    assert rows["held at 71 tokens, MiB"][0] == f"{TOKEN_BYTES * 71 / 2**20:.2f}"
    assert rows["- bits per number"][0] == "32.00"


def test_lengths_are_cut_to_the_models_positions():
    assert Sizes((128, 300, 600), 1024, 2048, steps=7).within(512) == Sizes((128, 300, 502), 502, 502, steps=7)
    assert Sizes((600,)).within(None) == Sizes((600,))
    with pytest.raises(InputError, match="fewer steps"):
        Sizes(steps=600).within(512)


@pytest.mark.parametrize("sizes", [{"context_tokens": ()}, {"context_tokens": (0,)}, {"steps": 0}, {"beam_tokens": -1}])
def test_sizes_that_measure_nothing_are_refused(sizes):
    with pytest.raises(InputError):
        Sizes(**sizes)


def test_parts_can_be_left_out(tiny):
    found = benchmark(tiny, ["static"], Sizes((8,), 0, 0, steps=1), progress=False)
    assert [[of.task for of in cache.measurements] for cache in found.caches] == [["decode"], ["decode"]]


def test_requests_that_cannot_work_are_refused(tiny):
    with pytest.raises(SpecError):
        benchmark(tiny, ["pagd"], SIZES, progress=False)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(InputError, match="encoder-decoder"):
        benchmark(tiny._replace(model=t5), ["paged"], SIZES, progress=False)


def test_a_cache_that_raises_is_named(tiny, monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    with pytest.raises(EvaluationError, match=r"'test_benchmark:broken' cannot run with Llama.*no room"):
        benchmark(tiny, ["test_benchmark:broken"], SIZES, progress=False)
