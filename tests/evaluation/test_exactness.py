import math

import pytest
import torch
import toys
from transformers import DynamicCache

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.exactness import judge
from hf_kvcache.evaluation.float64 import in_float64
from hf_kvcache.evaluation.generation import MODES
from hf_kvcache.evaluation.proving import prove, steps

EVERYWHERE = ["off_by_one", "shuffled_block", "truncated", "renumbered"]
WINDOW = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1))


def proofs(*specs, model=None, **options):
    model = model or toys.tiny_model()
    return prove(model, [resolve_cache(spec, 256) for spec in specs], WINDOW, **options)


@pytest.fixture(scope="module")
def faulty():
    """The proofs of caches that are wrong; what they are compared with is computed once."""
    names = [*EVERYWHERE, "leaves_traces", "shared_copy", "right_padded"]
    return dict(zip(names, proofs(*(f"toys:{name}" for name in names))[1:], strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_exact_caches_are_proven_to_1e_13_also_where_softmax_and_norms_ask_for_float32(attention):
    model = toys.tiny_model(attn_implementation=attention)
    for proof in proofs("static", "paged", model=model):
        assert proof.complaints == ()
        assert proof.attention == attention
        assert 0 < proof.logit_difference < 1e-13 * proof.logit_scale


def test_all_ways_of_feeding_and_generation_modes_are_compared():
    yardstick, proof = proofs("paged")
    assert yardstick.generation == ()
    assert [of.positions for of in proof.differences] == [112, 32, 55, 55]
    assert proof.refusals == ()
    assert [of.mode for of in proof.generation] == list(MODES)
    assert all(of.equal and of.score_difference < 1e-12 for of in proof.generation)


@pytest.mark.parametrize("fault", EVERYWHERE)
def test_broken_caches_are_caught_in_every_way_of_feeding(faulty, fault):
    proof = faulty[fault]
    assert all(of.logit_difference > 1e6 * proof.tolerance for of in proof.differences)
    assert len(proof.complaints) >= 4
    assert judge("rounding", False, 1.0, proof)[1] != ()


@pytest.mark.parametrize(
    ("fault", "mode"), [("leaves_traces", "after steps taken back"), ("shared_copy", "from copies")]
)
def test_faults_of_single_operations_are_caught_there_alone(faulty, fault, mode):
    proof = faulty[fault]
    assert [of.mode for of in proof.differences if not of.logit_difference <= proof.tolerance] == [mode]
    assert proof.complaints[0].startswith(f"{mode}: logits differ by")
    assert judge("rounding", False, 1e-5, proof)[1] != ()


def test_what_no_cache_has_to_offer_is_listed_and_no_contradiction():
    class Plain(DynamicCache):
        is_croppable = False

        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    _, proof = prove(toys.tiny_model(), [lambda config: Plain(config=config)], WINDOW)
    assert proof.refusals[:2] == (
        "after steps taken back: NotImplementedError: Plain says that it cannot be cropped",
        "from copies: TypeError: no copies",
    )
    assert proof.complaints == ()
    measured, failures = judge("bitwise", True, 0.0, proof)
    assert measured == "bitwise"
    assert tuple(of.partition("in float64, ")[2] for of in failures) == proof.generation_refusals


def test_padding_on_the_wrong_side_is_caught_in_the_padded_batch(faulty):
    proof = faulty["right_padded"]
    assert all(of.logit_difference <= proof.tolerance for of in proof.differences)
    assert [of.mode for of in proof.generation if not of.equal] == ["left-padded batch"]
    assert len(proof.complaints) == 1


def test_a_difference_far_below_float32_is_caught():
    """The smallest lie a cache could tell: one key, off by 1e-7 of itself."""

    class Nudged(toys.ToyCache):
        def changed(self, states, new):  # noqa: ARG002
            states = states.clone()
            states[..., 0, :] *= 1 + 1e-7
            return states

    model = toys.tiny_model()
    _, proof = prove(model, [lambda config: Nudged(config=config)], WINDOW)
    assert any("logits differ" in text for text in proof.complaints)


def test_other_tokens_come_with_the_margin_that_tells_a_tie_from_damage(faulty):
    proof = faulty["truncated"]
    split = [of for of in proof.generation if not of.equal and of.mode == "greedy"]
    assert split
    assert split[0].margin > 0
    assert f"margin there: {split[0].margin:.3g}" in split[0].complaint


def test_a_cache_that_cannot_do_a_mode_is_reported_and_the_others_go_on():
    class NoReorder(DynamicCache):
        def reorder_cache(self, beam_idx):
            raise NotImplementedError("no beams here")

    _, proof = prove(toys.tiny_model(), [lambda config: NoReorder(config=config)], WINDOW)
    assert [of.mode for of in proof.generation if not of.equal] == ["4 beams"]
    assert proof.complaints == ()
    assert proof.refusals == ("4 beams: generate raised NotImplementedError: no beams here",)
    assert judge("undeclared", False, 1e-5, proof) == ("rounding", ())
    assert len(judge("rounding", False, 1e-5, proof)[1]) == 1


def test_a_cache_that_cannot_run_in_float64_gives_the_reason():
    class NoFloat64(DynamicCache):
        def update(self, key_states, *args, **kwargs):
            if key_states.dtype == torch.float64:
                raise TypeError("float64 is not supported")
            return super().update(key_states, *args, **kwargs)

    _, proof = prove(toys.tiny_model(), [lambda config: NoFloat64(config=config)], WINDOW)
    assert proof == "its run in float64 raised TypeError: float64 is not supported"


def test_the_model_comes_back_bitwise_and_so_does_the_random_state():
    model = toys.tiny_model().to(torch.bfloat16)
    before = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    proofs("dynamic", model=model)
    assert torch.equal(torch.rand(1), expected)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_float64_reaches_through_operations_that_ask_for_float32():
    model = toys.tiny_model()
    with in_float64(model), torch.inference_mode():
        x = torch.ones(2, dtype=torch.float64)
        assert x.float().dtype == x.to(torch.float32).dtype == torch.float64
        assert torch.softmax(x, dim=0, dtype=torch.float32).dtype == torch.float64
        assert torch.ones(2).float().dtype == torch.float32
    assert torch.ones(2, dtype=torch.float64).float().dtype == torch.float32


def test_quantized_weights_have_no_proof():
    model = toys.tiny_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(InputError, match=r"lm_head\.weight is torch\.int8"), in_float64(model):
        pass


@pytest.mark.parametrize("specs", [[], ["dynamic", "static"]])
def test_progress_is_announced_as_promised(specs):
    calls = []
    proofs(*specs, step=lambda: calls.append(1))
    assert len(calls) == steps(len(specs))


PROVEN, BROKEN = proofs("dynamic", "toys:truncated")[1:]


@pytest.mark.parametrize(
    ("declared", "identical", "difference", "proof", "measured", "failures"),
    [
        ("bitwise", True, 0.0, PROVEN, "bitwise", 0),
        ("rounding", False, 1e-5, PROVEN, "rounding", 0),
        ("rounding", True, 0.0, PROVEN, "bitwise", 0),
        ("bitwise", False, 1e-5, PROVEN, "rounding", 1),
        ("rounding", False, 1.0, BROKEN, "approximate", len(BROKEN.complaints)),
        ("bitwise", False, 1.0, BROKEN, "approximate", 1 + len(BROKEN.complaints)),
        ("approximate", False, 1.0, None, "approximate", 0),
        ("approximate", True, 0.0, None, "bitwise", 1),
        ("approximate", False, math.nan, None, "approximate", 1),
        ("undeclared", True, 0.0, PROVEN, "bitwise", 0),
        ("undeclared", False, 1e-5, PROVEN, "rounding", 0),
        ("undeclared", False, 1.0, BROKEN, "approximate", 0),
        ("undeclared", False, 1.0, None, "unproven", 0),
        ("uncached", False, 1.0, None, "uncached", 0),
    ],
)
def test_the_verdict(declared, identical, difference, proof, measured, failures):
    found, complaints = judge(declared, identical, difference, proof)
    assert found == measured
    assert len(complaints) == failures
