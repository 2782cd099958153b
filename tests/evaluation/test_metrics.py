import math

import numpy as np
import pytest
import torch

from hf_kvcache.evaluation import metrics

LOGITS = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 3
OTHER = LOGITS + torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 6, 3, 3, 2])


def probabilities(logits):
    """Softmax by hand, in Python floats."""
    rows = []
    for row in logits.tolist():
        total = sum(math.exp(x) for x in row)
        rows.append([math.exp(x) / total for x in row])
    return rows


def test_metrics_are_the_textbook_formulas():
    p, q = probabilities(LOGITS), probabilities(OTHER)
    log_p, log_q = metrics.log_probabilities(LOGITS), metrics.log_probabilities(OTHER)
    nll = [-math.log(row[target]) for row, target in zip(p, TARGETS.tolist(), strict=True)]
    kl = [sum(a * math.log(a / b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
    assert metrics.negative_log_likelihood(log_p, TARGETS).tolist() == pytest.approx(nll, rel=1e-12)
    assert metrics.kl_divergence(log_p, log_q).tolist() == pytest.approx(kl, rel=1e-12)


def test_divergence_of_a_prediction_from_itself_is_exactly_zero():
    log_p = metrics.log_probabilities(LOGITS)
    assert metrics.kl_divergence(log_p, log_p).tolist() == [0.0] * 5


def test_divergence_is_exact_where_float32_would_lose_it():
    log_p = metrics.log_probabilities(LOGITS.double())
    log_q = metrics.log_probabilities(LOGITS.double() + 1e-6 * (OTHER - LOGITS).double())
    small = metrics.kl_divergence(log_p, log_q)
    large = metrics.kl_divergence(log_p, metrics.log_probabilities(LOGITS.double() + 1e-3 * (OTHER - LOGITS).double()))
    assert (small * 1e6 / large).tolist() == pytest.approx([1.0] * 5, rel=1e-2)  # second order in the difference


def test_impossible_tokens():
    certain = torch.tensor([[0.0, -math.inf]])
    even = torch.tensor([[0.0, 0.0]])
    log_certain, log_even = metrics.log_probabilities(certain), metrics.log_probabilities(even)
    assert metrics.kl_divergence(log_certain, log_even).item() == pytest.approx(math.log(2))
    assert metrics.kl_divergence(log_even, log_certain).item() == math.inf
    assert metrics.kl_divergence(log_certain, log_certain).item() == 0.0


def test_perplexity_weighs_windows_by_their_length():
    nll, lengths = np.array([1.0, 2.0, 3.0, 6.0]), np.array([3, 1])
    found = metrics.perplexity(nll, lengths, seed=0)
    assert found.value == pytest.approx(math.exp(3.0))
    assert math.exp(2.0) <= found.low < found.value < found.high <= math.exp(6.0)


def test_intervals_cover_the_truth_about_as_often_as_they_claim():
    random = np.random.default_rng(0)
    lengths = np.full(40, 5)
    hits = 0
    for _ in range(200):
        values = (random.normal(1.0, 1.0, 40)[:, None] + random.normal(0, 1, (40, 5))).ravel()
        interval = metrics.window_mean(values, lengths, seed=0)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_a_paired_difference_is_far_surer_than_two_single_ones():
    random = np.random.default_rng(0)
    lengths = np.full(30, 10)
    reference = np.repeat(random.normal(3.0, 0.5, 30), 10)
    candidate = reference + 0.01
    found = metrics.perplexity_difference(candidate, reference, lengths, seed=0)
    single = metrics.perplexity(reference, lengths, seed=0)
    assert found.low > 0
    assert found.high - found.low < 0.05 * (single.high - single.low)
    same = metrics.perplexity_difference(reference, reference, lengths, seed=0)
    assert same == (0.0, 0.0, 0.0)


def test_the_seed_decides_the_interval_and_one_window_has_none():
    values, lengths = np.random.default_rng(0).normal(size=100), np.full(10, 10)
    assert metrics.window_mean(values, lengths, 1) == metrics.window_mean(values, lengths, 1)
    assert metrics.window_mean(values, lengths, 1) != metrics.window_mean(values, lengths, 2)
    assert metrics.window_mean(values, np.array([100]), 1)[1:] == (None, None)
