import math

import numpy as np
import pytest
import torch
import toys

from hf_kvcache.evaluation import Protocol, evaluate, metrics
from hf_kvcache.evaluation.divergence import top_tokens
from hf_kvcache.evaluation.fidelity import fidelity
from hf_kvcache.evaluation.samples import Positions, Samples

TEXTS = [toys.TEXT[:90], toys.TEXT[90:170], toys.TEXT[170:]]


def samples(kl, nll=None, delta_p=None):
    kl = np.asarray(kl, dtype=float)
    zeros = np.zeros(len(kl))
    nll = zeros if nll is None else np.asarray(nll, dtype=float)
    delta_p = zeros if delta_p is None else np.asarray(delta_p, dtype=float)
    return Samples(nll, kl, 2 * kl, delta_p, zeros + 1, kl < 0.5, kl, kl == 0)


POSITIONS = Positions(
    targets=np.arange(6),
    distances=np.array([3, 4, 5, 3, 4, 5]),
    documents=np.array([0, 0, 0, 0, 1, 1]),
    confidence=np.array([0.1, 0.3, 0.97, 1.0, 0.25, 0.5]),
    lengths=np.array([3, 3]),
    words=np.array([2, 1]),
    bytes=np.array([10, 5]),
)


def test_groups_are_means_over_the_positions_they_name():
    found = fidelity(samples([0, 0.1, 0.3, 0, 0, 0.6]), samples([0] * 6), samples([0] * 6), POSITIONS, 0)
    confidence = {of.name.removeprefix("reference's best token "): of[1:] for of in found.by_confidence}
    assert confidence["0.95 to 1"] == (2, pytest.approx(0.15), 1.0)
    assert confidence["0.25 to 0.5"] == (2, pytest.approx(0.05), 1.0)
    assert confidence["0.5 to 0.75"] == (1, 0.6, 0.0)
    assert sum(of.positions for of in found.by_confidence) == 6
    assert [(of.name, of.positions) for of in found.by_distance] == [
        ("2 to 3 tokens from the start", 2),
        ("4 to 7 tokens from the start", 4),
    ]
    assert [of[1:] for of in found.by_document] == [(4, pytest.approx(0.1), 1.0), (2, pytest.approx(0.3), 0.5)]


def test_the_tail_ends_in_each_window_where_the_floor_is_first_left():
    found = fidelity(samples([0.01, 0.1, 0.0, 0.0, 0.02, 0.6]), samples([0] * 6), samples([0.02] * 6), POSITIONS, 0)
    tail, body = found.tail_and_body
    assert (tail.name, tail.positions, body.name, body.positions) == ("tail", 3, "body", 3)
    assert tail.kl_mean == pytest.approx(0.01)
    assert body.kl_mean == pytest.approx(0.7 / 3)
    never = fidelity(samples([0] * 6), samples([0] * 6), samples([0] * 6), POSITIONS, 0)
    assert [of.name for of in never.tail_and_body] == ["tail"]
    broken = fidelity(samples([math.nan] * 6), samples([0] * 6), samples([0] * 6), POSITIONS, 0)
    assert [of.name for of in broken.tail_and_body] == ["body"]


def test_perplexities_by_unit_and_ratios():
    nll = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    delta = [0.1, -0.1, 0.3, 0, 0, -0.3]
    found = fidelity(samples([0] * 6, nll + 0.5, delta), samples([0] * 6, nll), samples([0] * 6), POSITIONS, 0)
    assert found.word_perplexity.value == pytest.approx(math.exp(24 / 3))
    assert found.byte_perplexity.value == pytest.approx(math.exp(24 / 15))
    assert found.bits_per_byte.value == pytest.approx(24 / 15 / math.log(2))
    assert found.nll_difference == pytest.approx((0.5, 0.5, 0.5))  # paired: no spread at all
    assert found.nll_difference_over_documents == pytest.approx((0.5, 0.5, 0.5))
    assert found.delta_p_mean.value == pytest.approx(0.0)
    assert found.delta_p_rms.value == pytest.approx(math.sqrt(0.2 / 6))
    assert found.delta_p_percentiles["minimum"] == pytest.approx(-0.3)
    assert found.delta_p_percentiles["maximum"] == pytest.approx(0.3)
    assert found.delta_p_percentiles["50"] == pytest.approx(0.0)
    assert found.bits_per_byte.low < found.bits_per_byte.value < found.bits_per_byte.high


def test_a_text_that_decodes_to_nothing_has_no_rate():
    assert math.isnan(metrics.rate(np.ones(3), np.array([3]), np.array([0]), 0).value)


def test_overlap_counts_members_whatever_their_order():
    log_p = torch.arange(40, dtype=torch.float64)[None]
    swapped = log_p.clone()
    swapped[0, [39, 30]] = swapped[0, [30, 39]]
    other = log_p.clone()
    other[0, :3] = 100.0
    top = top_tokens(log_p)[0]
    assert metrics.overlap(top, top_tokens(swapped)[0]).item() == 1.0
    assert metrics.overlap(top, top_tokens(other)[0]).item() == pytest.approx(0.7)


def test_an_evaluation_fills_every_statistic():
    results = evaluate(
        toys.loaded(),
        TEXTS,
        ["toys:rounded"],
        tasks=["fidelity"],
        protocol=Protocol(60, 12, 8),
        max_tokens=150,
        progress=False,
    )
    found, floor = results.caches[0].fidelity, results.noise_floor.fidelity
    assert found.kl_percentiles["99"] == found.kl_p99
    assert found.kl_percentiles["maximum"] == found.kl_max
    assert found.reverse_kl_mean.value == pytest.approx(found.kl_mean.value, rel=0.3)
    assert found.reverse_kl_mean.value != found.kl_mean.value
    assert 0.5 < found.top10_overlap.value < 1.0
    assert found.delta_p_rms.value > 1e3 * floor.delta_p_rms.value > 0
    assert [of.name for of in found.by_document] == ["document 0", "document 1", "document 2"]
    assert found.kl_over_documents.value == pytest.approx(found.kl_mean.value)
    assert found.kl_over_documents.low != found.kl_mean.low
    # The toy's text has one byte a token and no window is scored in full.
    assert found.byte_perplexity.value == pytest.approx(found.perplexity.value)
    assert found.word_perplexity.value > found.perplexity.value
    assert (results.positions.distances[:48] == np.arange(13, 61)[:48]).sum() == 47
    assert results.positions.lengths.sum() == results.scored_tokens == len(results.positions.confidence)
