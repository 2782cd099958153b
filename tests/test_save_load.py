"""Caches in files: what was stored comes back bit by bit, or an error; never half of it, never another model's."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from modes import PROMPT_TOKENS, generate, prompt
from safetensors import safe_open
from safetensors.torch import save_file
from strategies import CACHE_ARGUMENT, STRATEGIES, Strategy, decoder_config, needs_positions, whole_cache
from transformers import PreTrainedModel

from hf_kvcache import InputError, KVCache, PagedCache, StateError, StorageError

# The states of a recurrence have no format in files, and an encoder's half of the cache is not ours.
STORED = [name for name, traits in ARCHITECTURES.items() if traits.croppable and not traits.encoder_decoder]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)


def filled(
    strategy: Strategy, architecture: str = "llama", rows: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, KVCache]:
    model = tiny_model(architecture, dtype)
    cache = strategy.build(decoder_config(model))
    cache.align(prompt(rows=rows))
    generate(model, cache, prompt(rows=rows), max_new_tokens=1)
    return model, cache


def check_equal(one: KVCache, other: KVCache) -> None:
    for layer, same in zip(one.block_layers, other.block_layers, strict=True):
        assert layer.get_seq_length() == same.get_seq_length()
        assert torch.equal(layer.keys, same.keys)
        assert torch.equal(layer.values, same.values)


@every_strategy
@pytest.mark.parametrize("architecture", STORED)
def test_round_trip(strategy: Strategy, architecture: str, tmp_path: Path) -> None:
    """The same bits, the same bytes held, the same text afterwards."""
    model, cache = filled(strategy, architecture, dtype=torch.float64)
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = type(cache).load(tmp_path / "cache.safetensors", model)
    assert type(loaded) is type(cache)
    loaded.check_integrity()
    check_equal(loaded, cache)
    # The sinks of a window are held twice from the first time that attention asks for them, and after loading at once.
    copied = loaded.memory().payload_bytes - cache.memory().payload_bytes
    assert copied == 0 or (strategy.name == "window-all" and 0 < copied < cache.memory().payload_bytes // 4)
    assert loaded.exactness == cache.exactness
    ids = torch.cat([prompt(rows=2), prompt(rows=2, tokens=6, seed=1)], dim=1)
    expected, generation = generate(model, cache, ids), generate(model, loaded, ids)
    assert torch.equal(generation.tokens, expected.tokens)
    assert torch.equal(generation.tokens, generate(model, None, ids).tokens)
    # Blocks may lie in another order than before, and fused reading then adds in another order.
    allowed = 0.0 if strategy.exactness == "bitwise" else 1e-9
    torch.testing.assert_close(generation.logits, expected.logits, rtol=0, atol=allowed)


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_round_trip_in_other_dtypes(strategy: Strategy, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama", dtype)
    cache = strategy.build(decoder_config(model))
    generate(model, cache, prompt())
    cache.save(str(tmp_path / "cache"), model)
    check_equal(KVCache.load(str(tmp_path / "cache"), model), cache)


@every_strategy
def test_round_trip_after_rows_were_rearranged(strategy: Strategy, tmp_path: Path) -> None:
    """Shared blocks stay shared."""
    model, cache = filled(strategy, rows=1)
    cache.batch_repeat_interleave(3)
    with torch.no_grad():
        model(prompt(rows=3, tokens=5), **{CACHE_ARGUMENT: cache})
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.crop(-2)
    cache.save(tmp_path / "cache", model)
    loaded = KVCache.load(tmp_path / "cache", model)
    check_equal(loaded, cache)
    assert loaded.memory().payload_bytes == cache.memory().payload_bytes


@every_strategy
def test_the_text_is_remembered(strategy: Strategy, tmp_path: Path) -> None:
    model, cache = filled(strategy)
    cache.save(tmp_path / "cache", model)
    loaded = KVCache.load(tmp_path / "cache", model)
    assert loaded.align(prompt(rows=2)) == PROMPT_TOKENS - 1
    expected = generate(model, None, prompt(rows=2))
    assert torch.equal(generate(model, loaded, prompt(rows=2)).tokens, expected.tokens)


@needs_positions
@every_strategy
def test_positions_are_remembered(strategy: Strategy, tmp_path: Path) -> None:
    model, cache = filled(strategy)
    cache.save(tmp_path / "cache", model)
    loaded = KVCache.load(tmp_path / "cache", model)
    with pytest.raises(InputError, match="align"):
        generate(model, loaded, prompt(rows=2))
    check_equal(loaded, cache)


@every_strategy
def test_one_row_saved_right_after_its_prompt(strategy: Strategy, tmp_path: Path) -> None:
    """Its one last position is a view with the stride of a row."""
    model, cache = filled(strategy, rows=1)
    cache.save(tmp_path / "cache", model)
    check_equal(KVCache.load(tmp_path / "cache", model), cache)


def test_saved_over_an_older_file(tmp_path: Path) -> None:
    model, cache = filled(STRATEGIES[0])
    cache.save(tmp_path / "cache", model)
    cache.crop(-5)
    cache.save(tmp_path / "cache", model)
    check_equal(KVCache.load(tmp_path / "cache", model), cache)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_nothing_to_save(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(StateError):
        PagedCache(model.config).save(tmp_path / "cache", model)
    assert not list(tmp_path.iterdir())


def test_states_without_a_format(tmp_path: Path) -> None:
    model, cache = filled(STRATEGIES[0], "qwen3_next")
    with pytest.raises(StateError, match="layer 0"):
        cache.save(tmp_path / "cache", model)
    assert not list(tmp_path.iterdir())


def test_nowhere_to_save(tmp_path: Path) -> None:
    model, cache = filled(STRATEGIES[0])
    with pytest.raises(StorageError):
        cache.save(tmp_path / "no" / "such" / "folder", model)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = filled(STRATEGIES[0])
    path = tmp_path / "cache"
    cache.save(path, model)
    before = path.read_bytes()

    def full_disk(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_kvcache.storage.save_file", full_disk)
    with pytest.raises(StorageError, match="space"):
        cache.save(path, model)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


# Attacks


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    model, cache = filled(STRATEGIES[0])
    cache.save(tmp_path / "cache.safetensors", model)
    return tmp_path / "cache.safetensors", model


def check_refused(path: Path, model: PreTrainedModel, match: str | None = None) -> None:
    with pytest.raises(StorageError, match=match):
        KVCache.load(path, model)


def test_truncated(stored: tuple[Path, PreTrainedModel]) -> None:
    path, model = stored
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        check_refused(path, model)


def test_something_appended(stored: tuple[Path, PreTrainedModel]) -> None:
    path, model = stored
    path.write_bytes(path.read_bytes() + b"\0")
    check_refused(path, model)


def test_flipped_bits(stored: tuple[Path, PreTrainedModel]) -> None:
    """Anywhere in the header, and at many places of the states."""
    path, model = stored
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    generator = torch.Generator().manual_seed(0)
    places = [*range(8), *torch.randint(8, header, (150,), generator=generator).tolist()]
    places += [header, len(content) - 1, *torch.randint(header, len(content), (100,), generator=generator).tolist()]
    for place in places:
        bit = 1 << int(torch.randint(0, 8, (), generator=generator))
        changed = bytearray(content)
        changed[place] ^= bit
        path.write_bytes(changed)
        check_refused(path, model)
    path.write_bytes(content)
    KVCache.load(path, model)


def test_missing(tmp_path: Path) -> None:
    check_refused(tmp_path / "nothing", tiny_model("llama"))


def test_a_folder(tmp_path: Path) -> None:
    check_refused(tmp_path, tiny_model("llama"))


def test_not_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_bytes(b"not a file of tensors " * 100)
    check_refused(path, tiny_model("llama"))


def test_safetensors_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    save_file({"weight": torch.ones(3)}, path)
    check_refused(path, tiny_model("llama"), "no cache of this library")


class Exploit:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return pytest.fail, ("the file was unpickled",)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    for name, write in (
        ("pickle", lambda file: pickle.dump(Exploit(), file)),
        ("torch", lambda file: torch.save(Exploit(), file)),
    ):
        with (tmp_path / name).open("wb") as file:
            write(file)
        check_refused(tmp_path / name, tiny_model("llama"))


def test_other_models(stored: tuple[Path, PreTrainedModel]) -> None:
    """Other weights, another dtype, another architecture."""
    path, _ = stored
    check_refused(path, tiny_model("llama", torch.float32, seed=1), "model")
    check_refused(path, tiny_model("llama", torch.float64), "model")
    check_refused(path, tiny_model("qwen3", torch.float32), "model")


def rewrite(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Change the metadata as someone would who does not care for checksums."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata)
    save_file(tensors, path, metadata)


def test_a_later_version(stored: tuple[Path, PreTrainedModel]) -> None:
    path, model = stored
    rewrite(path, lambda metadata: metadata.update(version="2"))
    check_refused(path, model, "version 2")


def test_altered_metadata(stored: tuple[Path, PreTrainedModel]) -> None:
    path, model = stored
    content = path.read_bytes()

    def one_token_less(metadata: dict[str, str]) -> None:
        cache = json.loads(metadata["cache"])
        cache["layers"]["0"]["raw"]["tokens"] -= 1
        metadata["cache"] = json.dumps(cache)

    for change in (one_token_less, lambda metadata: metadata.pop("sha256"), lambda metadata: metadata.clear()):
        path.write_bytes(content)
        rewrite(path, change)
        check_refused(path, model)


def test_encoder_decoder_half(tmp_path: Path) -> None:
    """The self-attention half of an encoder-decoder cache is an ordinary cache of ours."""
    model = tiny_model("t5", torch.float32)
    cache = PagedCache(decoder_config(model), block_size=4)
    generate(model, whole_cache(model, cache), prompt())
    cache.save(tmp_path / "cache", model)
    check_equal(KVCache.load(tmp_path / "cache", model), cache)
