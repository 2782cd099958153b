import re
from itertools import islice
from random import Random

import pytest
import torch
import toys

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation import Grid, Protocol, command, evaluate, report
from hf_kvcache.evaluation.answering import answer
from hf_kvcache.evaluation.haystack import fit, place
from hf_kvcache.evaluation.heatmaps import heat
from hf_kvcache.evaluation.protocols import forward
from hf_kvcache.evaluation.reader import Reader
from hf_kvcache.evaluation.retrieval import WITH_DEPTH, WITHOUT_DEPTH, default_grid, measure_retrieval
from hf_kvcache.evaluation.tasks import TASKS

ALL = WITH_DEPTH | WITHOUT_DEPTH
SIZES = Protocol(200, 100, 50)
MODEL = toys.loaded(max_position_embeddings=1024)


@pytest.mark.parametrize("kind", ALL)
def test_problems_are_as_long_as_asked_for_and_hold_their_answers(kind):
    tokenizer = toys.byte_tokenizer()
    problem = fit(ALL[kind], 3000, 0.5, "seed", tokenizer)
    length = len(tokenizer(problem.context + problem.question)["input_ids"])
    assert 2800 < length <= 3000
    assert all(answer in problem.context for answer in problem.answers)
    assert len(set(problem.answers)) == len(problem.answers)
    assert fit(ALL[kind], 3000, 0.5, "seed", tokenizer) == problem
    assert fit(ALL[kind], 3000, 0.5, "other", tokenizer).answers != problem.answers
    with pytest.raises(InputError, match="too few"):
        fit(ALL[kind], 20, 0.5, "seed", tokenizer)


@pytest.mark.parametrize("kind", WITH_DEPTH)
def test_the_answer_stands_at_the_depth_asked_for_and_nothing_else_moves(kind):
    problems = [WITH_DEPTH[kind](200, depth, Random(1)) for depth in (0.0, 0.5, 1.0)]
    assert len({of.answers for of in problems}) == 1
    assert len({"".join(sorted(of.context)) for of in problems}) == 1
    places = [of.context.index(of.answers[0]) / len(of.context) for of in problems]
    assert places[0] < 0.05
    assert 0.45 < places[1] < 0.55
    assert places[2] > 0.95


def test_answers_that_are_counted_are_the_right_ones():
    common = ALL["common words"](300, 0.5, Random(3))
    counts = {word: common.context.split().count(word) for word in common.context.split() if word.isalpha()}
    assert sorted(counts, key=counts.get, reverse=True)[:5] == sorted(common.answers, key=counts.get, reverse=True)
    frequent = ALL["frequent words"](500, 0.5, Random(3))
    counts = {word: frequent.context.split().count(word) for word in frequent.context.split()}
    assert tuple(sorted(counts, key=counts.get, reverse=True)[:3]) == frequent.answers
    traced = ALL["variable tracking"](50, 0.5, Random(3))
    lines = dict(re.findall(r"Let (\w+) = (\w+)\.", traced.context))
    for name in traced.answers:
        value = name
        while value in lines:
            value = lines[value]
        assert value in traced.question


def test_needles_are_placed_in_order():
    assert place(["a", "b", "c", "d"], ["X", "Y"], [1.0, 0.5]) == "a b Y c d X"
    assert place([], ["X"], [0.3]) == "X"


def test_reading_in_pieces_is_reading():
    ids = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))
    readers = [Reader(MODEL.model, cache) for cache in (toys.ToyCache(config=MODEL.model.config), None)]
    for reader in readers:
        reader.feed_in_chunks(ids[:, :50], Protocol(60, 20, 7))
    logits = [reader.feed(ids[:, 50:], keep=10) for reader in readers]
    assert torch.allclose(*logits, atol=1e-4)
    first = logits[0][:, -1:].argmax(dim=-1)
    written = [list(islice(of.write(first), 5)) for reader in readers for of in (reader.fork(), reader)]
    assert all(torch.equal(torch.stack(of), torch.stack(written[0])) for of in written)


@pytest.mark.parametrize("build", [toys.uncopyable, toys.ToyCache])
@pytest.mark.parametrize("right", [0, 3, 6])
def test_an_answer_is_what_would_be_written_token_by_token(build, right, monkeypatch):
    question = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(1))

    def read():
        reader = Reader(MODEL.model, build(config=MODEL.model.config))
        return reader, reader.feed(question)

    written = torch.cat(list(islice(Reader(MODEL.model, None).write(question), 14)))
    gold = written[None, :6].clone()
    gold[0, right:] += 1
    answers = [MODEL.tokenizer.decode(gold[0])]
    found = answer(MODEL, read, answers, gold % 256)
    logits = forward(MODEL.model, torch.cat([question, gold[:, :-1] % 256], dim=1), None, keep=6)[0]
    likely = logits.double().log_softmax(dim=-1).gather(1, gold[0, :, None] % 256).mean().exp()
    assert found.text == MODEL.tokenizer.decode(written if right < 6 else written[:6])
    assert found.recall == (right == 6)
    assert found.probability == pytest.approx(float(likely), rel=1e-4)
    end = int(written[4])
    monkeypatch.setattr(MODEL.model.generation_config, "eos_token_id", [end])
    found = answer(MODEL, read, answers, gold % 256)
    assert found.text == MODEL.tokenizer.decode(written[: written.tolist().index(end)] if right < 6 else written[:6])


def test_every_kind_of_problem_is_put_to_a_cache():
    (trials,) = measure_retrieval(MODEL, ["dynamic"], Grid((650,), (0.0,)), SIZES, progress=False)
    assert [of.task for of in trials] == list(ALL)
    assert all(0 < of.probability < 1 and 600 < of.prompt_tokens <= 650 and of.answer for of in trials)
    assert [of.depth for of in trials] == [0.0] * 4 + [None] * 5


def test_a_cache_that_forgets_the_start_is_seen(tmp_path):
    caches = ["static", "toys:truncated"]
    with toys.few_problems():
        results = evaluate(
            MODEL,
            [toys.TEXT],
            caches,
            tasks=["retrieval"],
            protocol=SIZES,
            grid=Grid((250,), (0.0, 1.0)),
            progress=False,
        )
    reference, static, broken = (of.retrieval for of in (results.reference, *results.caches))
    assert len(reference) == 2 + 1
    assert [of.answer for of in static] == [of.answer for of in reference]
    assert [of.probability for of in static] == pytest.approx([of.probability for of in reference], rel=1e-3)
    assert [of.probability for of in broken] != pytest.approx([of.probability for of in reference], rel=1e-2)
    lengths, depths, values = heat(results.reference, "pass key")
    assert (lengths, depths, values.shape) == ([250], [0.0, 1.0], (2, 1))
    assert results.scored_tokens == 0
    assert results.caches[0].measured == "unproven"
    files = report.write_report(results, tmp_path)
    assert [of.name for of in files] == ["results.json", "report.md", "report.html", "retrieval.png"]
    assert "gold p" in files[1].read_text()


def test_a_cache_that_cannot_be_copied_reads_again():
    with toys.few_problems():
        trials = measure_retrieval(MODEL, ["dynamic", "toys:uncopyable"], Grid((250,), (0.5,)), SIZES, progress=False)
    assert trials[0] == trials[1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [(((), (0.5,)), "at least 1"), (((100,), (1.5,)), "between 0"), (((100,), (0.5,), 0), "at least 1")],
)
def test_grids_that_make_no_sense(sizes, message):
    with pytest.raises(InputError, match=message):
        Grid(*sizes)


def test_where_everything_is_measured_there_is_one_problem_of_each_kind():
    assert default_grid(["retrieval"]) == default_grid(TASKS[1:]) == Grid()
    assert default_grid(TASKS) == Grid((768,), (0.25,))
    assert command._grid(TASKS, "250", None) == Grid((250,), (0.25,))
    assert command._grid(["retrieval"], None, "0,1") == Grid(depths=(0.0, 1.0))


def test_texts_longer_than_the_model_are_refused():
    with pytest.raises(InputError, match="a retrieval prompt of 700 tokens is more than the 512 positions"):
        evaluate(toys.loaded(), [toys.TEXT], ["dynamic"], tasks=["retrieval"], grid=Grid((700,)), progress=False)
