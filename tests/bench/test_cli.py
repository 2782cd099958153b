import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_kvcache import cli
from hf_kvcache.cli import app

HEAVY = ("datasets", "matplotlib", "hf_kvcache.evaluation", "hf_kvcache.bench", "hf_kvcache.demo")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(text):
    """The text without line breaks, which depend on the terminal."""
    return " ".join(text.split())


def test_help_names_every_command():
    done = invoke("--help")
    assert done.exit_code == 0
    assert all(name in done.output for name in ("demo", "eval", "attribute", "bench", "plan", "lm-eval"))


def test_help_imports_no_command():
    code = (
        "import sys; from typer.testing import CliRunner; from hf_kvcache.cli import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "option"), [("demo", "--contexts"), ("eval", "--max-tokens"), ("bench", "--steps")]
)
def test_each_command_has_its_own_help(command, option):
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert option in done.output


def test_an_unknown_option_is_a_usage_error():
    assert invoke("bench", "--stepz", "3").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "pagd"], "no cache is called 'pagd'"),
        (["--contexts", "8,many"], "expected lengths in tokens such as 128,1024, got '8,many'"),
        (["--contexts", "0"], "at least 1 token"),
        (["--model", "./missing"], "does not exist"),
    ],
)
def test_an_error_is_one_message_on_stderr(model_folder, tmp_path, arguments, message):
    done = invoke("bench", "--model", model_folder, "--output", tmp_path / "never", *arguments)
    assert done.exit_code == 1
    assert message in words(done.stderr)
    assert "Traceback" not in done.output
    assert not (tmp_path / "never").exists()


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_kvcache.bench.command", None)
    monkeypatch.setitem(cli.EXTRAS, "hf_kvcache", "eval")
    done = invoke("bench")
    assert done.exit_code == 1
    assert "pip install 'hf-kvcache[eval]'" in done.stderr


def test_without_typer_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import hf_kvcache.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == cli.MISSING_EXTRA.format(module="typer", extra="eval")


def test_bench_prints_a_table_and_writes_the_report(model_folder, tmp_path):
    sizes = ["--contexts", "8,32", "--steps", "2", "--prompt", "16", "--beams", "32"]
    where = ["--model", model_folder, "--output", tmp_path]
    done = invoke("bench", *where, *sizes, "--cache", "paged", "--cache", "static", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    assert "dynamic" in done.stdout
    assert "2 L H_kv d_h b S B" in words(done.stdout)
    record = json.loads((tmp_path / "results.json").read_text())
    assert [cache["spec"] for cache in record["caches"]] == ["dynamic", "paged", "static"]
    assert (tmp_path / "decode.png").is_file()


def test_attribute_prints_a_table_and_writes_a_plot(model_folder, tmp_path):
    spec = "quantized:bits=2,sinks=2,recent=8,block_size=4"
    sizes = ("--window", "60", "--prefill", "30", "--chunk", "9", "--max-tokens", "29")
    done = invoke("attribute", "--model", model_folder, "--cache", spec, *sizes, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert "no recent" in words(done.stdout)
    record = json.loads((tmp_path / "results.json").read_text())
    assert list(record["caches"]) == [spec]
    assert record["caches"][spec]["everything"] > 0
    assert (tmp_path / "attribution.png").read_bytes()[:4] == b"\x89PNG"


def test_the_demo_from_end_to_end(model_folder, tmp_path):
    done = invoke("demo", "--model", model_folder, "--contexts", "8,64", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert "PagedCache" in done.stdout
    assert [line.split(":")[0] for line in done.stdout.splitlines()[-3:]] == ["Use it", "Prove it", "Time it"]
    plots = {"decode.png", "bytes.png", "bits.png"}
    assert {file.name for file in tmp_path.iterdir()} == {"report.md", "results.json", *plots}
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["schema"] == "hf-kvcache-demo/1"
    assert record["generation"]["same"]
    assert record["evaluation"]["failures"] == []
    assert [cache["spec"] for cache in record["bench"]["caches"]] == ["dynamic", "paged", "none"]
    report = (tmp_path / "report.md").read_text()
    assert "| the yardstick | exact up to rounding | exact up to rounding |" in report
    assert "| perplexity of" in report
    assert "| ms per token after 64 tokens |" in report
