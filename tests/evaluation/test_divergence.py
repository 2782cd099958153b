import pytest
import torch

from hf_kvcache.evaluation import divergence, metrics
from hf_kvcache.evaluation.divergence import Reference

POSITIONS, VOCABULARY = 12, 5000


def predictions(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(POSITIONS, VOCABULARY, generator=generator) * 4).to(dtype)
    return logits, torch.randint(VOCABULARY, (POSITIONS,), generator=generator)


def changed(logits, size, seed=1):
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits.double() + size * noise + 0.3).to(logits.dtype)  # a shift of all logits changes nothing


def by_definition(logits, other, targets):
    """The textbook formulas in float64."""
    theirs, ours = metrics.log_probabilities(logits), metrics.log_probabilities(other)
    nll, reference_nll = (metrics.negative_log_likelihood(of, targets) for of in (ours, theirs))
    top = [of.topk(10, dim=-1).indices for of in (theirs, ours)]
    return {
        "nll": nll,
        "kl": metrics.kl_divergence(theirs, ours),
        "reverse_kl": metrics.kl_divergence(ours, theirs),
        "delta_p": (-nll).exp() - (-reference_nll).exp(),
        "top10": metrics.overlap(*top),
        "agrees": logits.argmax(dim=-1) == other.argmax(dim=-1),
        "logit_difference": (logits - other).abs().amax(dim=-1).double(),
        "identical": (logits == other).all(dim=-1),
    }


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])
def test_every_figure_is_that_of_the_definition(size):
    logits, targets = predictions()
    other = changed(logits, size)
    found, expected = Reference(logits, targets).compare(other), by_definition(logits, other, targets)
    assert set(found) == set(expected)
    for name in ("kl", "reverse_kl"):
        assert found[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-3)
        assert float(found[name].sum()) == pytest.approx(float(expected[name].sum()), rel=3e-4)
    for name in ("nll", "delta_p"):
        assert found[name].tolist() == pytest.approx(expected[name].tolist(), abs=2e-7 + 1e-5 * size)
    for name in ("top10", "agrees", "logit_difference", "identical"):
        assert found[name].tolist() == expected[name].tolist()


def test_float64_predictions_are_compared_in_float64():
    logits, targets = predictions(dtype=torch.float64)
    other = changed(logits, 1e-2)
    found, expected = Reference(logits, targets).compare(other), by_definition(logits, other, targets)
    for name in ("nll", "kl", "reverse_kl"):
        assert found[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_predictions_with_ties(dtype):
    logits, targets = predictions(dtype=dtype)
    other = changed(logits, 0.1)
    found, expected = Reference(logits, targets).compare(other), by_definition(logits, other, targets)
    assert found["kl"].tolist() == pytest.approx(expected["kl"].tolist(), rel=1e-3)
    assert found["agrees"].tolist() == expected["agrees"].tolist()
    assert found["logit_difference"].max() == pytest.approx(float(expected["logit_difference"].max()), rel=1e-2)


def test_equal_positions_among_others_are_exactly_equal():
    logits, targets = predictions()
    other = changed(logits, 0.1)
    other[3] = logits[3]
    found = Reference(logits, targets).compare(other)
    alone = Reference(logits, targets).compare(logits.clone())
    for name, values in alone.items():
        assert values[3] == found[name][3]
    assert found["identical"].nonzero().tolist() == [[3]]
    assert found["kl"][3] == found["logit_difference"][3] == 0.0


def test_infinite_logits_and_changes_beyond_an_exponential_follow_the_definition():
    logits, targets = predictions()
    logits[0, :5] = -torch.inf  # forbidden by both
    other = changed(logits, 0.1)
    other[1, 7] = -torch.inf  # forbidden by the cache alone
    other[2, 9] += 200.0
    other[3, 0] = torch.nan
    targets[0], targets[1] = 17, 18
    found, expected = Reference(logits, targets).compare(other), by_definition(logits, other, targets)
    for name in ("nll", "kl", "reverse_kl"):
        assert found[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-3, nan_ok=True)
    assert found["kl"][1] == torch.inf
    assert found["nll"][3].isnan()
    assert not found["identical"].any()


@pytest.mark.parametrize("vocabulary", [2, 7, 256, 1280, 1281, 5000, 5120])
def test_top_tokens_are_those_of_the_whole_vocabulary(vocabulary):
    logits = torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[5] = -torch.arange(vocabulary)
    logits[6] = torch.arange(vocabulary)
    logits[7, vocabulary // 2 :] = 9.0
    top, best = divergence.top_tokens(logits)
    count = min(10, vocabulary // 2)
    assert logits.gather(1, top).tolist() == logits.topk(count, dim=-1).values.tolist()
    assert all(len(set(row)) == count for row in top.tolist())
    assert best[:7].tolist() == logits.argmax(dim=-1)[:7].tolist()
    assert logits[7, best[7]] == 9.0
