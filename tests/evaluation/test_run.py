import dataclasses
import math

import pytest
import torch
import toys

from hf_kvcache.errors import ConfigError, InputError, SpecError
from hf_kvcache.evaluation import ContradictionError, Protocol, evaluate
from hf_kvcache.evaluation.report import main_table
from hf_kvcache.evaluation.tasks import TASKS, parse_tasks

SIZES = Protocol(window_tokens=60, prefill_tokens=12, chunk_tokens=8)


def run(*caches, model=None, protocol=SIZES, text=toys.TEXT, **options):
    options = {"max_tokens": 150, "progress": False} | options
    return evaluate(model or toys.loaded(), [text], caches, protocol=protocol, **options)


def test_the_reference_against_itself_is_exactly_zero():
    results = run("dynamic")
    for cache in (results.reference, *results.caches):
        found = cache.fidelity
        assert found.identical
        assert found.logit_difference_max == found.kl_max == found.kl_p99 == 0.0
        assert found.kl_mean == found.perplexity_difference == found.nll_difference == (0.0, 0.0, 0.0)
        assert found.top1_agreement == (1.0, 1.0, 1.0)
        assert cache.measured == "bitwise"
        assert cache.proof.complaints == ()


def test_perplexity_is_that_of_a_loop_by_hand():
    loaded = toys.loaded()
    results = run("none", model=loaded, max_tokens=94, tasks=["perplexity"])
    ids = loaded.tokenizer(toys.TEXT)["input_ids"]
    nll = []
    for start in (0, 60):
        window = torch.tensor([ids[start : start + 60]])
        with torch.no_grad():
            logits = loaded.model(window, use_cache=False).logits[0]
        for position in range(12, 59):  # the first 12 tokens are the prefill; its last logit is not scored
            probabilities = torch.softmax(logits[position].double(), dim=-1)
            nll.append(-math.log(float(probabilities[window[0, position + 1]])))
    assert results.scored_tokens == len(nll) == 94
    assert results.reference.fidelity.perplexity.value == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-5)


def test_results_depend_on_the_chunk_by_rounding_only():
    model = toys.loaded()
    ones, many = (run("static", model=model, protocol=Protocol(60, 12, chunk), tasks=["fidelity"]) for chunk in (1, 13))
    assert ones.scored_tokens == many.scored_tokens
    assert ones.reference.samples.nll == pytest.approx(many.reference.samples.nll, abs=1e-4)
    assert (ones.positions.targets == many.positions.targets).all()


def test_a_seed_gives_the_same_results_again():
    one, two = (run("toys:rounded", seed=3) for _ in range(2))
    assert one.caches[0].fidelity == two.caches[0].fidelity
    assert one.caches[0].proof_note == "declares itself approximate"


def test_an_honest_approximation_passes_above_the_noise_floor():
    results = run("toys:rounded")
    found, floor = results.caches[0].fidelity, results.noise_floor.fidelity
    assert results.caches[0].measured == "approximate"
    assert found.kl_mean.value > 1e3 * floor.kl_mean.value > 0
    assert found.kl_mean.low <= found.kl_mean.value <= found.kl_mean.high
    assert found.kl_mean.value <= found.kl_p99 <= found.kl_max


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("toys:idle", "toys:idle: declares itself approximate, but .* never engaged"),
        ("toys:boaster", "toys:boaster: declares itself bitwise exact, but logits differ by"),
        ("toys:off_by_one", r"toys:off_by_one: declares itself exact \(rounding\), but in float64"),
        ("toys:shuffled_block", "chunk by chunk: logits differ"),
        ("toys:truncated", "token by token: logits differ"),
        ("toys:not_a_number", "not finite"),
        ("toys:jittering", "what it gives the model of a token changes .* first token 0 of layer 0"),
    ],
)
def test_a_cache_that_is_not_what_it_declares_raises_and_keeps_the_numbers(spec, message):
    with pytest.raises(ContradictionError, match=message) as caught:
        run(spec, "dynamic")
    results = caught.value.results
    assert [cache.spec for cache in results.caches] == [spec, "dynamic"]
    assert results.caches[0].failures
    assert not results.caches[1].failures


def test_bytes_are_those_at_the_end_of_the_first_window():
    results = run("static", "none", tasks=["fidelity"])
    per_token = 2 * 2 * 2 * 8 * 4
    assert results.reference.tokens_held == 59
    assert results.reference.bytes_held == 59 * per_token
    static, none = results.caches
    assert static.bytes_held >= 2 * results.reference.bytes_held  # long enough for the generation checks
    assert (none.bytes_held, none.tokens_held) == (0, 0)


def test_requests_that_cannot_work_are_refused_before_anything_runs():
    def no_text():
        pytest.fail("the text was read")
        yield

    with pytest.raises(SpecError):
        evaluate(toys.loaded(), no_text(), ["pagd"], protocol=SIZES)
    with pytest.raises(InputError, match="at least one cache"):
        evaluate(toys.loaded(), no_text(), [], protocol=SIZES)
    with pytest.raises(InputError, match="more than the 512 positions"):
        evaluate(toys.loaded(), no_text(), ["dynamic"], protocol=Protocol(513, 12, 8))


def test_a_cache_that_cannot_run_here_is_refused_before_the_text_is_read():
    with pytest.raises(ConfigError, match="'toys:unable' cannot run on this model and machine: OSError: no device"):
        run("toys:unable")


def test_only_what_was_asked_for_is_measured():
    results = run("toys:rounded", tasks=["perplexity"])
    assert results.tasks == ("perplexity",)
    assert results.caches[0].proof_note == results.reference.proof_note == "the task exactness was not asked for"
    headings = main_table(results).columns
    assert "perplexity" in headings
    assert "KL mean" not in headings
    assert "float64 proof" not in headings


def test_tasks_by_name():
    assert parse_tasks(["all"]) == TASKS
    assert parse_tasks(["exactness, perplexity", "exactness"]) == ("perplexity", "exactness")
    with pytest.raises(InputError, match="did you mean 'fidelity'"):
        parse_tasks(["fidelty"])
    with pytest.raises(InputError, match="at least one task"):
        parse_tasks([])


def test_results_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        run("none").seed = 1
