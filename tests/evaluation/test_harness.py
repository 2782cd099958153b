"""Real tasks of the LM Evaluation Harness on local data, through caches."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import toys
import yaml
from typer.testing import CliRunner

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402 - after the skip
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_kvcache import cli  # noqa: E402
from hf_kvcache.errors import InputError, SpecError  # noqa: E402
from hf_kvcache.evaluation import harness  # noqa: E402
from hf_kvcache.evaluation.harness import CachedLM  # noqa: E402

# The harness and its libraries warn on their own account.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

MODEL = toys.tiny_model()
TOKENIZER = toys.byte_tokenizer(eos_token="Ā", pad_token="Ā")
PAGES = [toys.TEXT[:200], toys.TEXT[200:700]]
QUESTIONS = [
    {"goal": f"To count {number} things", "sol1": "count them", "sol2": "look away", "label": number % 2}
    for number in range(4)
]
SUMS = [{"question": f"What is {number} and 1?", "answer": f"#### {number + 1}"} for number in range(3)]
REAL = Path(lm_eval.__file__).parent / "tasks"


def local_task(folder: Path, name: str, real: str, rows: list[dict], **changes) -> None:
    """A task of the harness as it is, with rows from a file instead of the hub's."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "include": str(REAL / real),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
        "num_fewshot": 0,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | changes))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    local_task(folder, "local_wikitext", "wikitext/wikitext.yaml", [{"page": page} for page in PAGES])
    local_task(folder, "local_piqa", "piqa/piqa.yaml", QUESTIONS)
    until = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 12}
    local_task(folder, "local_gsm8k", "gsm8k/gsm8k.yaml", SUMS, generation_kwargs=until)
    return folder


@pytest.fixture
def run(tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))

    def run(model, *names):
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return lm_eval.simple_evaluate(
            model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, batch_size=2
        )

    return run


def cached(cache, **options):
    return CachedLM(MODEL, cache, tokenizer=TOKENIZER, batch_size=2, max_length=128, **options)


def plain():
    return HFLM(MODEL, tokenizer=TOKENIZER, batch_size=2, max_length=128)


def numbers(results, name):
    return {key: value for key, value in results["results"][name].items() if isinstance(value, float)}


@pytest.mark.parametrize("cache", ["dynamic", "paged:block_size=16", "static"])
def test_an_exact_cache_gives_the_numbers_of_the_harness_itself(run, cache):
    names = ["local_wikitext", "local_piqa", "local_gsm8k"]
    found, expected = run(cached(cache, chunk_tokens=16), *names), run(plain(), *names)
    for name in names:
        assert numbers(found, name) == pytest.approx(numbers(expected, name), rel=1e-4)
        assert numbers(found, name)
    ours, theirs = ([one["resps"] for one in of["samples"]["local_gsm8k"]] for of in (found, expected))
    assert ours == theirs
    ours, theirs = ([one["resps"] for one in of["samples"]["local_piqa"]] for of in (found, expected))
    for mine, its in zip(ours, theirs, strict=True):
        for (log_p, greedy), (expected_log_p, expected_greedy) in zip(mine[0], its[0], strict=True):
            assert log_p == pytest.approx(expected_log_p, abs=1e-3)
            assert greedy == expected_greedy


def test_what_a_cache_does_to_its_history_reaches_every_task(run):
    found, expected = (
        run(cached(cache, chunk_tokens=1), "local_wikitext", "local_piqa", "local_gsm8k")
        for cache in ("toys:random_eviction", "dynamic")
    )
    for name in ("local_piqa", "local_gsm8k"):
        answers = [[one["resps"] for one in of["samples"][name]] for of in (found, expected)]
        assert all(ours != theirs for ours, theirs in zip(*answers, strict=True))
    ours, theirs = (of["results"]["local_wikitext"]["bits_per_byte,none"] for of in (found, expected))
    assert abs(ours - theirs) > 0.1


def test_a_cache_that_cannot_be_copied_reads_each_context_again(run):
    ours, theirs = (run(cached(cache), "local_piqa")["samples"]["local_piqa"] for cache in ("toys:uncopyable", "paged"))
    for mine, its in zip(ours, theirs, strict=True):
        assert [of[0] for of in mine["resps"][0]] == pytest.approx([of[0] for of in its["resps"][0]], abs=1e-3)


def test_a_context_that_is_too_long_loses_its_start():
    model = cached("dynamic", chunk_tokens=7)
    request = ("text", list(range(100, 250)), [7, 8, 9])
    whole = [*request[1], *request[2]][-129:]
    with torch.no_grad():
        logits = MODEL(torch.tensor([whole[:-1]])).logits[0, -3:].double()
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(3), torch.tensor(request[2])].sum()
    ((log_p, _),) = model._loglikelihood_tokens([request], disable_tqdm=True)
    assert log_p == pytest.approx(float(expected), abs=1e-4)


def test_a_context_that_is_too_long_loses_its_middle_where_longbench_is_run():
    model = cached("dynamic", cut="middle")
    _, context, _ = model._shortened(("text", list(range(300)), [7, 8, 9]))
    assert context == [*range(63), *range(237, 300)]  # 126 of 300, and 3 to predict
    texts = ["0123456789" * 30, "short"]
    ids, mask = model.tok_batch_encode(texts, left_truncate_len=21)
    assert TOKENIZER.decode(ids[0]) == texts[0][:10] + texts[0][-11:]
    assert TOKENIZER.decode(ids[1, -5:]) == "short"
    assert mask.sum(dim=1).tolist() == [21, 5]
    ours, theirs = (of.tok_batch_encode(texts, left_truncate_len=400) for of in (model, plain()))
    assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))
    with pytest.raises(InputError, match="'start' or 'middle', got 'end'"):
        cached("dynamic", cut="end")


def test_longbench_runs_through_a_cache(run, tasks):
    """A task as LongBench's are: long contexts, short answers, several of them right."""
    rows = [{"context": toys.TEXT[:700], "input": f"Which is number {at}?", "answers": ["3", "5"]} for at in range(2)]
    until = {"until": [], "do_sample": False, "temperature": 1, "max_gen_toks": 8}
    form = {"doc_to_text": "{{context}} {{input}}", "doc_to_target": "{{answers}}", "output_type": "generate_until"}
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    local_task(tasks, "local_long", "gsm8k/gsm8k.yaml", rows, generation_kwargs=until, metric_list=metrics, **form)
    found = [run(of, "local_long") for of in (cached("paged", cut="middle"), cached("paged"))]
    middle, start = ({one["doc_id"]: one["resps"][0][0] for one in of["samples"]["local_long"]} for of in found)
    assert middle != start
    model = cached("dynamic", cut="middle")
    prompts = [f"{of['context']} {of['input']}" for of in rows]
    ids, mask = model.tok_batch_encode(prompts, left_truncate_len=128 - 8)
    written = MODEL.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert middle == {at: TOKENIZER.decode(of[-8:]) for at, of in enumerate(written)}


@pytest.mark.parametrize(("cache", "message"), [("none", "--model hf"), ("pagd", "Did you mean 'paged'")])
def test_a_cache_that_is_none_or_unknown_is_refused(cache, message):
    with pytest.raises(SpecError, match=message):
        cached(cache)


def test_the_command_is_the_harness_with_one_model_more(tasks, tmp_path, monkeypatch):
    MODEL.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    found = []

    def evaluate():  # the harness's command, without the minute it takes to look through its own tasks
        _, _, name, _, arguments = sys.argv
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        options = {"tasks": ["local_wikitext"], "task_manager": manager, "bootstrap_iters": 0}
        found.append(lm_eval.simple_evaluate(model=name, model_args=json.loads(arguments), **options))

    monkeypatch.setattr(harness, "cli_evaluate", evaluate)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    arguments = json.dumps({"pretrained": str(tmp_path / "model"), "cache": "paged", "max_length": 128})
    done = CliRunner().invoke(cli.app, ["lm-eval", "--model", "hf-kvcache", "--model_args", arguments])
    assert done.exit_code == 0, done.output
    assert math.isfinite(numbers(found[0], "local_wikitext")["byte_perplexity,none"])
    assert found[0]["config"]["model"] == "hf-kvcache"
