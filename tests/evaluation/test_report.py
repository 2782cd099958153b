import json
import math

import pytest
import toys
import typer
from typer.testing import CliRunner

from hf_kvcache.evaluation import ContradictionError, Protocol, command, evaluate, report

SIZES = Protocol(60, 12, 8)
FIRST = ["results.json", "report.md", "report.html"]


@pytest.fixture(scope="module")
def results():
    text = [toys.TEXT]
    caches = ["static", "toys:rounded", "none"]
    return evaluate(toys.loaded(), text, caches, protocol=SIZES, max_tokens=150, dataset="toy", progress=False)


def test_all_files_are_written_and_numbers_come_first(results, tmp_path):
    files = report.write_report(results, tmp_path / "deep" / "folder")
    assert [file.name for file in files] == [*FIRST, "samples.parquet", "kl.png", "bytes.png", "perplexity.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files[4:])
    text = files[1].read_text()
    assert all(f"![{file.name}]" in text for file in files[4:])
    assert "exact up to rounding" in text
    assert "greedy: same tokens" in text
    assert all(f"## {table.title}" in text for table in report.tables(results))
    assert {len(row) for table in report.tables(results) for row in (table.columns, *table.rows)} == {5}


def test_the_record_is_plain_json_with_everything_but_samples(results, tmp_path):
    record = json.loads(report.write_report(results, tmp_path)[0].read_text())
    assert record["schema"] == "hf-kvcache-evaluation/1"
    assert record["protocol"] == {"window_tokens": 60, "prefill_tokens": 12, "chunk_tokens": 8}
    assert record["failures"] == []
    rounded = record["caches"][1]
    assert rounded["spec"] == "toys:rounded"
    assert set(rounded["fidelity"]["kl_mean"]) == {"value", "low", "high"}
    assert rounded["proof"] is None
    assert "samples" not in rounded
    assert {"torch", "transformers", "python", "git_commit"} <= set(record["environment"])
    proof = record["caches"][0]["proof"]
    # transformers 5.20 cannot crop a static cache: such a mode has an error instead of a number.
    found = [of["logit_difference"] for of in proof["differences"] if not of["error"]]
    assert len(found) >= len(proof["differences"]) - 1
    assert max(found) <= proof["tolerance"]


def test_every_row_of_the_table_has_every_column(results):
    table = report.main_table(results)
    assert [row[0] for row in table.rows] == [
        "dynamic (reference)",
        "no cache (noise floor)",
        "static",
        "toys:rounded",
        "none",
    ]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert table.rows[0][table.columns.index("bits/number")] == "32.00"


def test_numbers_that_are_not_finite_become_null(tmp_path):
    with pytest.raises(ContradictionError) as caught:
        evaluate(toys.loaded(), [toys.TEXT], ["toys:not_a_number"], protocol=SIZES, max_tokens=94, progress=False)
    assert math.isnan(caught.value.results.caches[0].fidelity.kl_max)
    record = json.loads(report.write_report(caught.value.results, tmp_path)[0].read_text())
    assert record["caches"][0]["fidelity"]["kl_max"] is None


@pytest.fixture(scope="module")
def invoke(tmp_path_factory):
    """Run the command on a tiny model and a text file."""
    folder = tmp_path_factory.mktemp("command")
    loaded = toys.loaded()
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(toys.TEXT)
    app = typer.Typer()
    app.command()(command.evaluate_command)

    def run(*arguments):
        sizes = ["--max-tokens", "94", "--window", "60", "--prefill", "12", "--chunk", "8"]
        where = ["--model", str(folder / "model"), "--dataset", f"file:{folder / 'text.txt'}"]
        return CliRunner().invoke(app, [*where, *sizes, *arguments])

    return run


def test_the_command_prints_a_table_and_writes_the_report(invoke, tmp_path):
    done = invoke("--cache", "dynamic", "--cache", "toys:rounded", "--dtype", "float64", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "no cache" in done.output
    assert (tmp_path / "report.md").is_file()
    assert json.loads((tmp_path / "results.json").read_text())["dtype"] == "float64"


def test_a_contradiction_ends_with_code_1_after_the_report_is_written(invoke, tmp_path):
    done = invoke("--cache", "toys:idle", "--output", str(tmp_path))
    assert done.exit_code == 1
    assert "never engaged" in " ".join(done.output.split())
    assert "never engaged" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["failures"] != []


def test_options_come_from_a_yaml_file_and_the_command_line_wins(invoke, tmp_path):
    config = tmp_path / "evaluation.yaml"
    config.write_text("cache: static\ntask: [fidelity]\nmax-tokens: 20\nseed: 3\ndtype: float64\n")
    done = invoke("--config", str(config), "--seed", "4", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "results.json").read_text())
    assert [of["spec"] for of in record["caches"]] == ["static"]
    assert (record["tasks"], record["seed"], record["dtype"]) == (["fidelity"], 4, "float64")
    assert record["scored_tokens"] == 94  # the command line's


@pytest.mark.parametrize(
    ("text", "message"),
    [("cachee: paged", "did you mean 'cache'"), ("- paged", "holds a list"), ("a: [", "expected a YAML file")],
)
def test_a_config_that_makes_no_sense_ends_with_code_2(invoke, tmp_path, text, message):
    config = tmp_path / "evaluation.yaml"
    config.write_text(text)
    done = invoke("--config", str(config))
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "arguments", [["--cache", "pagd"], ["--task", "fidelty"], ["--chunk", "0"], ["--dataset", "file:missing.txt"]]
)
def test_an_impossible_request_ends_with_code_2(invoke, tmp_path, arguments):
    done = invoke("--output", str(tmp_path / "never"), *arguments)
    assert done.exit_code == 2
    assert not (tmp_path / "never").exists()


def test_results_that_cannot_be_written_are_printed(invoke, tmp_path):
    (tmp_path / "results.json").mkdir()
    done = invoke("--cache", "dynamic", "--task", "fidelity", "--output", str(tmp_path))
    assert done.exit_code == 2
    assert "the report cannot be written" in done.output
    text = done.output
    record, _ = json.JSONDecoder().raw_decode(text[text.index('{\n  "schema"') :])
    assert record["caches"][0]["spec"] == "dynamic"
    assert record["scored_tokens"] == 94
