"""The instrument under test: known faults must be found where they are, and nothing where there is none."""

import numpy as np
import pytest
import toys

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation import ContradictionError, Protocol, attribute, evaluate

SIZES = Protocol(60, 12, 8)
MODEL = toys.loaded()
LADDER = ["bits3", "bits4", "bits5", "bits6", "bits7", "rounded", "random_eviction", "planted_error"]


def run(*caches, tasks=("fidelity",), protocol=SIZES, max_tokens=282):
    return evaluate(MODEL, [toys.TEXT], caches, tasks=tasks, protocol=protocol, max_tokens=max_tokens, progress=False)


@pytest.fixture(scope="module")
def ladder():
    return run(*(f"toys:{name}" for name in LADDER))


def test_the_negative_control_fails():
    with pytest.raises(ContradictionError, match="boasting_eviction: declares itself exact"):
        run("toys:boasting_eviction", tasks=["exactness"], max_tokens=94)


def test_the_reference_differs_from_itself_by_nothing():
    found = run("dynamic").caches[0].fidelity
    assert found.identical
    assert found.kl_max == found.reverse_kl_mean.value == found.delta_p_rms.value == found.logit_difference_max == 0.0
    assert found.top10_overlap.value == found.top1_agreement.value == 1.0


def test_two_halves_of_the_text_rank_caches_alike(ladder):
    half = int(ladder.positions.lengths[: len(ladder.positions.lengths) // 2].sum())
    kl = np.array([of.samples.kl for of in ladder.caches])
    ranks = [means.argsort().argsort() for means in (kl[:, :half].mean(axis=1), kl[:, half:].mean(axis=1))]
    assert np.corrcoef(*ranks)[0, 1] >= 0.95
    assert len(set(ranks[0])) == len(LADDER)


def test_more_bits_are_never_worse(ladder):
    bits = [of.fidelity.kl_mean.value for of in ladder.caches[:5]]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] > 10 * bits[-1]


def test_a_planted_error_of_1e_3_in_one_layer_is_found_and_attributed_to_it(ladder):
    planted = ladder.caches[-1].fidelity
    assert planted.kl_mean.low > 10 * ladder.noise_floor.fidelity.kl_mean.high
    parts = {
        of.name: of.kl_mean
        for of in attribute(MODEL, [toys.TEXT], "toys:planted_error", protocol=SIZES, max_tokens=47, progress=False)
    }
    assert list(parts) == ["everything", "keys", "values", "layer 0", "layer 1"]
    assert parts["layer 0"] == 0.0
    assert parts["layer 1"] == parts["everything"] > 0.0
    assert min(parts["keys"], parts["values"]) > 0


def test_parts_of_an_exact_cache_cost_nothing():
    parts = attribute(MODEL, [toys.TEXT], "paged", protocol=SIZES, max_tokens=47, progress=False)
    assert max(of.kl_mean for of in parts) < 1e-11


def test_what_is_kept_exact_is_a_part():
    spec = "quantized:bits=2,sinks=4,recent=16,block_size=4"
    parts = {
        of.name: of.kl_mean for of in attribute(MODEL, [toys.TEXT], spec, protocol=SIZES, max_tokens=47, progress=False)
    }
    assert list(parts) == ["everything", "keys", "values", "no sinks", "no recent", "layer 0", "layer 1"]
    assert max(parts["layer 0"], parts["keys"], parts["values"]) > 0
    assert 0 < parts["everything"] < parts["no recent"]


def test_parts_of_a_cache_that_gives_back_less_cannot_be_mixed():
    with pytest.raises(InputError, match="does not give back tensors of the whole history"):
        attribute(MODEL, [toys.TEXT], "toys:shortened", protocol=SIZES, max_tokens=47, progress=False)


def test_the_chunk_changes_the_divergence_of_an_approximation_by_rounding_only(ladder):
    other = run("toys:bits4", protocol=Protocol(60, 12, 47))
    assert other.caches[0].samples.kl == pytest.approx(ladder.caches[1].samples.kl, rel=0.01, abs=1e-6)
