import json
from dataclasses import replace

import pytest
import torch
import toys

from hf_kvcache.errors import InputError, StorageError
from hf_kvcache.evaluation import ContradictionError, LoadedModel, Protocol, evaluate, scoring

SIZES = Protocol(60, 12, 8)


def run(folder, *caches, model=None, text=toys.TEXT, sizes=SIZES, **options):
    options = {"tasks": ["fidelity", "exactness"], "max_tokens": 120} | options
    return evaluate(model or toys.loaded(), [text], caches, protocol=sizes, reference=folder, progress=False, **options)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return folder, run(folder, "toys:rounded", "static")


def test_a_later_run_finds_the_same_figures_without_computing_the_reference(kept, monkeypatch):
    folder, first = kept
    assert [of.name for of in sorted(folder.iterdir())] == [
        "reference.json",
        *(f"window-{n}.safetensors" for n in range(3)),
    ]
    lengths, real = [], scoring.measured_bytes
    monkeypatch.setattr(scoring, "measured_bytes", lambda cache: lengths.append(real(cache)) or real(cache))
    again = run(folder, "toys:rounded", "static")
    assert [of > 0 for of in lengths[::4]] == [True, False, False]  # the plain cache was fed in the first window alone
    assert again.reference == first.reference
    for ours, theirs in zip(again.caches, first.caches, strict=True):  # where tensors lie moves the last bits of sums
        assert (ours.spec, ours.measured, ours.failures) == (theirs.spec, theirs.measured, ())
        assert ours.fidelity.perplexity.value == pytest.approx(theirs.fidelity.perplexity.value, rel=1e-6)
        assert ours.samples.kl == pytest.approx(theirs.samples.kl, rel=1e-3, abs=1e-9)
    assert first.reference.fidelity.identical
    assert again.environment["reference"] == f"tiny, float32, from {folder}"


def test_another_model_is_compared_with_it_and_not_failed_for_other_bits(kept):
    """A model whose weights were rounded to few bits, as a quantized one's are."""
    folder, first = kept
    few = toys.loaded()
    with torch.no_grad():
        for weights in few.model.parameters():
            weights.copy_(weights.to(torch.bfloat16))
    found = run(folder, "paged:fused=false", "dynamic", model=few)
    paged, dynamic = found.caches
    assert paged.declared == "bitwise"
    assert (paged.measured, paged.failures) == ("rounding", ())  # by the proof; bits say nothing here
    assert paged.fidelity.kl_mean == dynamic.fidelity.kl_mean
    assert found.noise_floor.fidelity.kl_mean.value == pytest.approx(paged.fidelity.kl_mean.value, rel=1e-3)
    assert paged.fidelity.kl_mean.value > 1e3 * first.noise_floor.fidelity.kl_mean.value
    assert found.reference.fidelity.kl_mean.value == 0.0


def test_a_cache_that_boasts_is_still_caught_where_bits_are_the_same(kept):
    with pytest.raises(ContradictionError, match="declares itself bitwise exact, but logits differ"):
        run(kept[0], "toys:boaster")


def test_half_precision_is_kept_as_it_is(tmp_path):
    model = toys.loaded()
    model.model.to(torch.bfloat16)
    first = run(tmp_path, "toys:bits4", model=model, tasks=["fidelity"])
    again = run(tmp_path, "toys:bits4", model=model, tasks=["fidelity"])
    assert again.reference.fidelity.identical
    assert again.caches[0].samples.kl == pytest.approx(first.caches[0].samples.kl, rel=1e-3)
    vocabulary, scored = 256, 47
    assert (tmp_path / "window-0.safetensors").stat().st_size == pytest.approx(2 * vocabulary * scored, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": Protocol(60, 13, 8)}, "prefill_tokens 12, this run is of prefill_tokens 13"),
        ({"sizes": Protocol(50, 12, 8)}, "window_tokens 60, this run is of window_tokens 50"),
        ({"text": "x" + toys.TEXT}, "window 0 .* another text: token 0 is .* there and .* here"),
        ({"max_tokens": 100}, "window 2 .* another text: it has 39 tokens there and 19 here"),
        ({"max_tokens": 200, "model": LoadedModel(toys.tiny_model(), toys.byte_tokenizer(), "other")}, "window 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(kept, changes, message):
    with pytest.raises(InputError, match=message):
        run(kept[0], "dynamic", tasks=["fidelity"], **changes)


def test_another_vocabulary_is_refused_by_both_names(kept):
    tokenizer = toys.byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    larger = LoadedModel(toys.tiny_model(vocab_size=257), tokenizer, "tiny")
    ours = json.loads((kept[0] / "reference.json").read_text())["vocabulary"]
    with pytest.raises(InputError, match=rf"vocabulary {ours[:3]} .* this run is of vocabulary 257 \("):
        run(kept[0], "dynamic", model=larger)


def test_another_model_adds_nothing_and_no_window_is_left_half_written(tmp_path):
    run(tmp_path, "dynamic", tasks=["fidelity"], max_tokens=47)
    other = toys.loaded()._replace(name="other")
    with pytest.raises(InputError, match="made by tiny, float32 and has no window 1; other in float32 cannot add one"):
        run(tmp_path, "dynamic", model=other, tasks=["fidelity"], max_tokens=94)
    (tmp_path / "window-1.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"a window of the reference \(0 MiB\) cannot be written"):
        run(tmp_path, "dynamic", tasks=["fidelity"], max_tokens=94)
    (tmp_path / "window-1.safetensors").rmdir()
    assert len(list(tmp_path.iterdir())) == 2
    run(tmp_path, "dynamic", tasks=["fidelity"], max_tokens=94)
    assert (tmp_path / "window-1.safetensors").is_file()


def test_another_chunk_moves_figures_by_rounding_only(kept):
    folder, first = kept
    found = run(folder, "toys:rounded", sizes=replace(SIZES, chunk_tokens=13), tasks=["fidelity"])
    ours, theirs = found.caches[0].fidelity.kl_mean.value, first.caches[0].fidelity.kl_mean.value
    assert ours == pytest.approx(theirs, rel=1e-3)
