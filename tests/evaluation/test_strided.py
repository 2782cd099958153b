import math

import pytest
import torch
import toys

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation import LoadedModel, Protocol, evaluate
from hf_kvcache.evaluation.strided import check_stride, rolling_windows, strided_perplexity
from hf_kvcache.evaluation.tables import tables

MODEL = LoadedModel(toys.tiny_model(), toys.byte_tokenizer(eos_token="Ā"), "tiny")
PAGES = [toys.TEXT[:150], toys.TEXT[150:260], toys.TEXT[260:300]]


def measure(spec="dynamic", pages=PAGES, **changes):
    sizes = {"window_tokens": 64, "stride_tokens": 64, "chunk_tokens": 16, "max_tokens": 10**6} | changes
    return strided_perplexity(MODEL, pages, spec, progress=False, **sizes)


def by_hand(window, stride):
    """Nats of all tokens, each predicted by one pass without a cache over the tokens it may see."""
    total, prefix = 0.0, MODEL.tokenizer.eos_token_id
    for page in PAGES:
        ids = MODEL.tokenizer(page)["input_ids"]
        ends = [min(window, len(ids))]
        while ends[-1] < len(ids):
            ends.append(min(ends[-1] + stride, len(ids)))
        for begin, end in zip([0, *ends], ends, strict=False):
            seen = [prefix, *ids][end - min(window, end) : end]
            with torch.no_grad():
                log_p = MODEL.model(torch.tensor([seen]), use_cache=False).logits[0].double().log_softmax(-1)
            targets = torch.tensor(ids[begin:end])
            total -= float(log_p[-len(targets) :].gather(1, targets[:, None]).sum())
    return total


@pytest.mark.parametrize(("window", "stride"), [(64, 64), (64, 16), (32, 7), (500, 500)])
@pytest.mark.parametrize("spec", ["dynamic", "paged:block_size=16"])
def test_every_token_is_scored_once_with_the_history_of_its_window(spec, window, stride):
    found, nats = measure(spec, window_tokens=window, stride_tokens=stride), by_hand(window, stride)
    size = sum(len(page) for page in PAGES)
    assert (found.documents, found.tokens) == (3, size)
    assert math.log(found.perplexity) == pytest.approx(nats / size, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert math.log(found.word_perplexity) == pytest.approx(
        nats / sum(len(page.split(" ")) for page in PAGES), rel=1e-5
    )


def test_continuations_are_the_document_and_windows_are_full():
    ids = list(range(100, 137))
    cut = list(rolling_windows(ids, 7, 16, 5))
    assert [token for _, continuation in cut for token in continuation] == ids
    assert cut[0][0] == [7]
    assert {len(context) + len(continuation) for context, continuation in cut} == {17}
    assert list(rolling_windows([], 7, 16, 5)) == []


def test_what_a_cache_does_to_its_history_shows():
    exact, changed = measure(), measure("toys:random_eviction")
    assert abs(math.log(exact.perplexity / changed.perplexity)) > 0.05


def test_no_document_is_begun_beyond_the_limit():
    assert measure(max_tokens=150).documents == 1
    assert measure(max_tokens=151).documents == 2


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="stride must be 1 to 64"):
        measure(stride_tokens=65)
    with pytest.raises(InputError, match="neither BOS nor EOS"):
        check_stride(toys.byte_tokenizer(), 64, 64)
    with pytest.raises(InputError, match="every document is empty"):
        measure(pages=[""])


def test_the_figures_are_those_of_the_harness(tmp_path):
    """The task `wikitext`, its own preprocessing included, on text that this leaves as it is."""
    pytest.importorskip("lm_eval")
    import test_harness as local
    from lm_eval.tasks import TaskManager

    local.local_task(tmp_path, "local_wikitext", "wikitext/wikitext.yaml", [{"page": page} for page in PAGES])
    found = local.lm_eval.simple_evaluate(
        model=local.HFLM(MODEL.model, tokenizer=MODEL.tokenizer, max_length=64),
        tasks=["local_wikitext"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )["results"]["local_wikitext"]
    ours = measure()
    assert ours.word_perplexity == pytest.approx(found["word_perplexity,none"], rel=1e-4)
    assert ours.byte_perplexity == pytest.approx(found["byte_perplexity,none"], rel=1e-5)
    assert ours.bits_per_byte == pytest.approx(found["bits_per_byte,none"], rel=1e-5)


def test_an_evaluation_reports_it_for_every_cache():
    sizes = {"protocol": Protocol(64, 12, 16), "max_tokens": 100, "progress": False}
    results = evaluate(MODEL, PAGES, ["paged"], tasks=["perplexity"], stride_tokens=16, **sizes)
    for cache in (results.reference, *results.caches):
        assert cache.strided.bits_per_byte == pytest.approx(
            measure(stride_tokens=16, max_tokens=100).bits_per_byte, rel=1e-5
        )
    assert results.noise_floor.strided is None
    (table,) = [of for of in tables(results) if of.title == "Whole documents"]
    assert [row[0] for row in table.rows] == ["dynamic", "paged"]
    with pytest.raises(InputError, match="stride must be"):
        evaluate(MODEL, PAGES, ["paged"], stride_tokens=65, **sizes)
