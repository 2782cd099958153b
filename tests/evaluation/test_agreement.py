import pytest
import torch
import toys

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation import Prompts, evaluate, report
from hf_kvcache.evaluation.agreement import default_prompts, measure_generation, repetition
from hf_kvcache.evaluation.tasks import TASKS

MODEL = toys.loaded()
SIZES = Prompts(count=3, prompt_tokens=40, new_tokens=20)


def measure(*specs, sizes=SIZES):
    return measure_generation(MODEL, [toys.TEXT], ["dynamic", *specs], sizes, progress=False)


def test_texts_are_those_of_generate_and_equal_caches_agree():
    reference, static, none = measure("static", "none")
    ids = torch.tensor([MODEL.tokenizer(toys.TEXT)["input_ids"][:40]])
    expected = MODEL.model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    text = expected[0, 40:].tolist()
    for found in (reference, static, none):
        assert found.same_text == 1.0
        assert found.agreement_tokens == found.new_tokens == 20
        assert all(of.first_difference is of.margin is None for of in found.outputs)
        assert found.outputs[0].repetition == repetition(text)
    logits = MODEL.model(expected, use_cache=False).logits[0, 39:-1].double().detach()
    nll = -torch.log_softmax(logits, -1).gather(1, expected[0, 40:, None])[:, 0]
    assert reference.outputs[0].nll_first_half == pytest.approx(float(nll[:10].mean()), abs=1e-4)
    assert reference.outputs[0].nll_second_half == pytest.approx(float(nll[10:].mean()), abs=1e-4)


def test_a_damaged_cache_parts_from_the_reference_with_a_margin():
    found = measure("toys:truncated")[1]
    assert found.same_text < 1.0
    split = [of for of in found.outputs if of.first_difference is not None]
    assert all(of.margin > 0 and of.first_difference >= 1 for of in split)  # the prompt is read without the cache
    assert found.agreement_tokens == sum(20 if (d := of.first_difference) is None else d for of in found.outputs) / 3
    # What it wrote is less likely to the model that sees everything.
    assert sum(of.nll_second_half for of in found.outputs) > sum(of.nll_second_half for of in measure()[0].outputs)


def test_prompts_do_not_depend_on_the_size_of_the_batch():
    many, one = measure(sizes=SIZES)[0], measure(sizes=Prompts(1, 40, 20))[0]
    assert many.outputs[0][2:] == pytest.approx(one.outputs[0][2:], rel=1e-4)


def test_a_window_shorter_than_the_prompt_writes_other_texts():
    assert measure("window:window=8,sinks=1,block_size=4")[1].same_text < 1.0


def test_prompts_where_nothing_is_said_are_long_but_leave_room_for_what_is_written():
    assert default_prompts(["generation"], None) == Prompts(8, 1024, 128)
    assert default_prompts(["generation"], 8192) == Prompts(8, 1024, 128)
    assert default_prompts(["generation"], 1024) == Prompts(8, 896, 128)
    assert default_prompts(TASKS, 1024) == Prompts(4, 768, 64)
    assert default_prompts(TASKS, 512) == Prompts(4, 448, 64)


def test_repetition():
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([1, 2, 3, 4, 5, 6]) == 0.0
    assert repetition([7] * 13) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 40, 20), "at least"), ((9999, 40, 20), "use a longer text")],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(InputError, match=message):
        measure(sizes=Prompts(*sizes))


def test_a_continuation_longer_than_the_model_is_refused():
    with pytest.raises(InputError, match="continuation of 600 tokens is more than the 512 positions"):
        evaluate(MODEL, [toys.TEXT], ["dynamic"], tasks=["generation"], prompts=Prompts(1, 400, 200), progress=False)


def test_the_report_has_a_table(tmp_path):
    results = evaluate(MODEL, [toys.TEXT], ["toys:truncated"], tasks=["generation"], prompts=SIZES, progress=False)
    text = report.write_report(results, tmp_path)[1].read_text()
    assert "## Generation" in text
    assert "tokens alike" in text
