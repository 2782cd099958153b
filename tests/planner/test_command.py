"""From what a user types to a plan, and every way to type something impossible."""

import json

import gguf
import huggingface_hub
import pytest
import torch
from architectures import tiny_model
from strategies import decoder_config
from typer.testing import CliRunner

from hf_kvcache import ConfigError, InputError, PagedCache, SpecError
from hf_kvcache.cli import app
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.planner import cache_groups, find_gpu, load_plan_config, make_plan
from hf_kvcache.planner.configs import config_from_fields
from hf_kvcache.planner.formula import visible_bytes
from hf_kvcache.planner.measure import measure_decode, memory_bandwidth
from hf_kvcache.planner.shapes import observe_model
from hf_kvcache.planner.weights import shard, weight_bytes
from hf_kvcache.spec import STRATEGIES
from hf_kvcache.units import parse_bytes

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})


def config_file(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def test_tables_and_plots(tmp_path):
    result = invoke("llama-3.1-8b", "--gpu", "4090", "--context", 2048, "--plot", tmp_path, "--hit-rate", 0.5)
    assert result.exit_code == 0, result.output
    for text in ("128.00 KiB", "24.00 GiB", "paged:fused=false", "hf-kvcache eval --model meta-llama", "Prefix reuse"):
        assert text in result.output
    assert {file.stem for file in tmp_path.iterdir()} == {"memory", "frontier", "flops", "roofline"}


def test_json(tmp_path):
    path = config_file(tmp_path, {"model_type": "llama", **SIZES})
    result = invoke(path, "--json", "--cache", "paged:block_size=16", "--context", 100, "--batch", 2, "--gpu", "16MiB")
    record = json.loads(result.stdout)
    (cache,) = record["caches"]
    assert cache["spec"] == "paged:block_size=16"
    assert (cache["token_bytes"], cache["fixed_bytes"]) == (3 * 2 * 32 * 2, 0)
    assert cache["need"]["peak_bytes"] > cache["need"]["ideal_bytes"]
    assert cache["step"]["cache_bytes"] == 2 * 100 * 3 * 2 * 32 * 2
    assert [choice["fits"] for choice in record["advice"]] == [True] * len(record["advice"])
    assert record["advice"][0]["exactness"] == "bitwise"


def test_json_has_no_infinity():
    """With a window in every layer attention never catches up with the matrices."""
    result = invoke("mistral-7b-v0.1", "--json", "--cache", "dynamic", "--context", 10_000)
    record = json.loads(result.stdout, parse_constant=pytest.fail)
    assert record["compute"]["crossing_tokens"] is None
    assert record["caches"][0]["outweighs_tokens"] is None
    assert "never half of it" in invoke("mistral-7b-v0.1", "--cache", "dynamic").output


class HalfCache(PagedCache):
    def memory(self):
        memory = super().memory()
        return memory._replace(payload_bytes=memory.payload_bytes // 2)


class WindowCache(PagedCache):
    def __init__(self, config, window: int):
        super().__init__(config, block_size=window)


def test_a_new_strategy_joins(monkeypatch):
    """What it says of its own memory is what is planned; one that needs options is planned when it gets them."""
    monkeypatch.setitem(STRATEGIES, "half", HalfCache)
    monkeypatch.setitem(STRATEGIES, "window", WindowCache)
    plan = make_plan("smollm2-135m", tokens=640, specs=("paged", "half", "window:window=8"))
    paged, half, _ = plan.caches
    assert (paged.token_bytes, half.token_bytes) == (23_040, 11_520)
    assert half.step.cache_bytes == paged.step.cache_bytes / 2
    advised = [choice.spec for choice in plan.advice if ":" not in choice.spec]
    # The most exact first, and of equally exact ones the smallest.
    assert [spec for spec in advised if spec in ("dynamic", "half", "paged", "quantized")] == [
        "dynamic",
        "half",
        "paged",
        "quantized",
    ]


def test_a_folder_is_its_config(tmp_path):
    config_file(tmp_path, {"model_type": "llama", **SIZES})
    assert load_plan_config(str(tmp_path)).num_hidden_layers == 3


def test_a_gguf_file_is_its_config(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)  # wider than 32 / 4
    writer.add_vocab_size(97)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    plan = make_plan(str(tmp_path / "tiny.gguf"), tokens=10, specs=("dynamic",))
    assert plan.caches[0].token_bytes == 2 * 2 * 2 * 16 * 2


def test_a_hub_model_is_its_config(tmp_path, monkeypatch):
    """From the hub's cache on disk, as transformers leaves it; and what is not there is said."""
    folder = tmp_path / "models--somebody--something"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    config_file(folder / "snapshots" / "c0ffee", {"model_type": "llama", **SIZES})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_plan_config("somebody/something").num_hidden_layers == 3
    with pytest.raises(InputError, match=r"no preset .*no hub model that can be reached"):
        load_plan_config("somebody/nothing")


def test_a_family_without_a_formula():
    """Recurrent and attention states in one layer: the layer objects know their bytes all the same."""
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    config = config_from_fields({"model_type": "falcon_h1", **SIZES, "num_key_value_heads": 2, **sizes})
    groups = cache_groups(observe_model(config), "dynamic", 100)
    assert [group.kind for group in groups] == ["full attention, 2 x 8, recurrent state"]
    assert groups[0].layer_bytes > 100 * 2 * 2 * 8 * 2
    with pytest.raises(ConfigError, match="no closed formula"):
        visible_bytes(config, torch.bfloat16, 100)


def test_beyond_the_models_positions_is_warned_about_and_computed():
    plan = make_plan("smollm2-135m", tokens=10_000, specs=("dynamic",))
    assert "8,192 positions" in plan.warnings[0]
    assert plan.visible_bytes == 10_000 * 23_040


def test_advice_knows_what_does_not_fit():
    assert all(choice.fits is False for choice in make_plan("smollm2-135m", "100MiB", 100).advice)
    assert all(choice.fits is None for choice in make_plan("smollm2-135m", None, 100).advice)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "lacks num_hidden_layers, num_attention_heads, hidden_size"),
        ({"model_type": "gpt2", "n_layer": 2, "n_head": 2}, "lacks hidden_size"),
        (SIZES, "no field 'model_type'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}, **SIZES}, "never runs code"),
        ({"model_type": "own", **SIZES}, "does not know"),
        ({"model_type": "llama", **SIZES, "num_hidden_layers": 0}, "num_hidden_layers of at least 1, got 0"),
        ({"model_type": "llama", **SIZES, "num_hidden_layers": -2}, "num_hidden_layers"),
        ("{", "not a JSON file"),
        ("[1]", "must hold a JSON object, it holds a list"),
    ],
)
def test_bad_configs(tmp_path, fields, message):
    with pytest.raises(InputError, match=message):
        load_plan_config(str(config_file(tmp_path, fields)))


@pytest.mark.parametrize("name", ["./nowhere", "nowhere.json", "nowhere.gguf", "/nowhere/at/all"])
def test_missing_files(name):
    with pytest.raises(InputError, match="does not exist"):
        load_plan_config(name)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(InputError, match="holds no config"):
        load_plan_config(str(tmp_path))


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a GGUF file at all")
    with pytest.raises(InputError, match="cannot read the config"):
        load_plan_config(str(path))


@pytest.mark.parametrize("text", ["-5GiB", "0", "5 parsecs", "GiB", ""])
def test_bad_sizes(text):
    with pytest.raises(InputError):
        parse_bytes(text)


def test_unknown_gpu_lists_the_known():
    with pytest.raises(InputError, match=r"Did you mean h100.*Known: t4.*4090"):
        find_gpu("h10")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": 0}, InputError, "context of at least 1, got 0"),
        ({"rows": -1}, InputError, "batch size of at least 1, got -1"),
        ({"new_tokens": 0}, InputError, "new tokens of at least 1"),
        ({"ranks": 0}, InputError, "ranks of at least 1"),
        ({"ranks": 2}, ConfigError, "3 key-value heads cannot be shared by 2 ranks"),
        ({"weights_dtype": "int3"}, InputError, "int3.*known: float32"),
        ({"specs": ("pagd",)}, SpecError, "pagd"),
    ],
)
def test_bad_plans(options, error, message):
    with pytest.raises(error, match=message):
        make_plan("smollm2-135m", **options)


def test_errors_of_the_command_are_messages():
    result = invoke("smollm2-135m", "--context", -3)
    assert result.exit_code == 1
    assert "InputError: expected a context of at least 1, got -3" in result.output


def test_quantized_weights():
    shape = observe_model(load_plan_config("smollm2-135m"))
    assert weight_bytes(shape, "float32") == 2 * weight_bytes(shape)
    assert weight_bytes(shape, "int8") / weight_bytes(shape) == pytest.approx(0.5, abs=0.01)
    assert shard(shape, 1) is shape


def test_measured_steps():
    """No time is asserted: only that there is one, and that the bound is what the step reads."""
    assert memory_bandwidth(torch.device("cpu"), 2**20) > 0
    model = tiny_model("llama", dtype=torch.float32)
    measured = measure_decode(LoadedModel(model, None, "tiny"), "paged", 20, 1e9, steps=3)
    assert measured.measured_seconds > 0
    shape = observe_model(decoder_config(model), torch.float32)
    read = sum(parameter.numbers for parameter in shape.parameters if parameter.kind != "embedding")
    assert measured.bound_seconds * 1e9 == pytest.approx(4 * read + 20 * 3 * 2 * 2 * 8 * 4)


def test_measuring_needs_weights(tmp_path):
    result = invoke(config_file(tmp_path, {"model_type": "llama", **SIZES}), "--context", 8, "--measure")
    assert result.exit_code == 1
    assert "can load" in result.output
    result = invoke(tmp_path / "model.gguf", "--measure")
    assert result.exit_code == 1
    assert "can only be planned" in result.output
