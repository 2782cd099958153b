"""A history that lies on disk gives the bits it gives in memory, whatever is done to it."""

from __future__ import annotations

import copy
import faulthandler
import gc
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import tiny_model
from hypothesis import HealthCheck, settings
from modes import MODES, Generation, generate, prompt
from strategies import CACHE_ARGUMENT, decoder_config, whole_cache
from test_operations import CacheOperations
from torch import Tensor
from transformers import Qwen3Config

from hf_kvcache import ConfigError, KVCache, OffloadedCache, PagedCache, StateError, StorageError, build_cache
from hf_kvcache.blocks import arena
from hf_kvcache.quantized import Quantization
from hf_kvcache.residency.placement import movable
from hf_kvcache.residency.store import LowerArenas
from hf_kvcache.spec import cache_spec

FOLDER = tempfile.gettempdir()
MOVED = arena._moved


def build(config: object, budget: str | int = "2KiB", folder: object = FOLDER, block_size: int = 4) -> OffloadedCache:
    return OffloadedCache(config, device_budget=budget, residency=f"disk:{folder}", block_size=block_size)


def layers_below(cache: KVCache) -> list[int]:
    tables = [movable(layer) for layer in cache.layers]
    return [i for i, table in enumerate(tables) if table is not None and isinstance(table.pool.store, LowerArenas)]


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A deadlock ends the tests and shows where every thread stands."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [(mode, torch.bfloat16) for mode in MODES]
    + [(mode, dtype) for mode in ("beams", "padded_batch") for dtype in (torch.float32, torch.float16)],
    ids=str,
)
def test_same_bits_as_in_memory(mode: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    resident = MODES[mode](model, PagedCache(model.config, block_size=4))
    cache = build(model.config)
    generation: Generation = MODES[mode](model, cache)
    assert layers_below(cache) == [0, 1, 2]
    assert torch.equal(generation.tokens, resident.tokens)
    assert torch.equal(generation.logits, resident.logits)
    cache.check_integrity()


@pytest.mark.parametrize("architecture", ["mistral", "gemma3n", "gpt_oss", "deepseek_v3", "qwen3_next", "t5"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_same_bits_on_other_architectures(architecture: str, attention: str) -> None:
    if (architecture, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("its sinks need eager attention")
    model = tiny_model(architecture, torch.float32, attention)
    config = decoder_config(model)
    resident = MODES["beams"](model, whole_cache(model, PagedCache(config, block_size=4)))
    cache = build(config, 4096)
    generation = MODES["beams"](model, whole_cache(model, cache))
    assert layers_below(cache)
    assert torch.equal(generation.logits, resident.logits)


class OffloadedOperations(CacheOperations):
    """All operations in any order, of a cache that keeps next to nothing in memory."""

    def build(self, config: Qwen3Config, block_size: int, fused: bool) -> KVCache:
        assert isinstance(fused, bool)
        faulthandler.dump_traceback_later(300, exit=True)  # for each sequence, not for all of them together
        return build(config, 2048, block_size=block_size)


TestOffloadedOperations = OffloadedOperations.TestCase
# The tests execute annotations, also those of the reading thread, and beartype draws random numbers for that.
TestOffloadedOperations.pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module inside strategies:hypothesis.errors.HypothesisDeprecationWarning"
)
TestOffloadedOperations.settings = settings(
    max_examples=int(os.environ.get("OFFLOADED_SEQUENCES", "15")),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# Where the bytes are


def filled(cache: OffloadedCache, tokens: int, heads: int = 2, width: int = 8, rows: int = 1) -> None:
    generator = torch.Generator().manual_seed(cache.get_seq_length())
    for index in range(len(cache.layers)):
        keys, values = torch.randn(2, rows, heads, tokens, width, generator=generator)
        cache.update(keys, values, index)


def some_config(layers: int = 4) -> Qwen3Config:
    return Qwen3Config(num_hidden_layers=layers, hidden_size=32, num_attention_heads=4)


def test_what_fits_stays() -> None:
    cache = build(some_config(), "1MiB")
    filled(cache, 50)
    assert layers_below(cache) == []
    assert cache.traffic == (0, 0)
    assert cache.memory().buffer_bytes == 0


@pytest.mark.parametrize("tokens", [[400], [100] * 4, [300] + [1] * 100])
def test_budget_is_kept(tokens: list[int]) -> None:
    """Eight layers, room for two, and the one that is growing has its slack."""
    layer_bytes = 2 * 2 * 8 * 4 * 400
    cache = build(some_config(8), 2 * layer_bytes + 8000, block_size=16)
    for count in tokens:
        filled(cache, count)
        memory = cache.memory()
        assert memory.device_bytes["cpu"] - memory.buffer_bytes <= 2 * layer_bytes + 8000
    assert len(layers_below(cache)) in (6, 7)
    assert memory.payload_bytes == 8 * layer_bytes
    assert memory.device_bytes["disk"] >= 6 * layer_bytes
    for layer in cache.block_layers:
        assert layer.keys is not None
    assert cache.memory().buffer_bytes <= 2 * 1.1 * layer_bytes


def test_layers_go_down_evenly() -> None:
    cache = build(some_config(8), 2 * 2 * 8 * 4 * 400 * 6, block_size=16)
    filled(cache, 400)
    assert len(layers_below(cache)) == 3
    assert layers_below(cache)[1:] == [2, 4]


def test_every_block_is_written_once() -> None:
    """Whether its tokens come at once or one by one: one token a layer and token."""
    cache = build(some_config(), 2048, block_size=16)
    filled(cache, 256)
    for _ in range(64):
        filled(cache, 1)
        assert torch.isfinite(cache.layers[3].keys).all()
    record_bytes = 2 * 2 * 8 * 4 * 16
    assert layers_below(cache) == [0, 1, 2, 3]
    assert cache.traffic.written_bytes == 4 * 20 * record_bytes
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.traffic.written_bytes == 4 * 20 * record_bytes


def test_two_layers_stay_in_their_buffers() -> None:
    cache = build(some_config(2), 2048)
    filled(cache, 80)
    for _ in range(3):
        for layer in cache.block_layers:
            assert layer.keys is not None
    record_bytes = 2 * 2 * 8 * 4 * 4
    assert cache.traffic.read_bytes == 2 * 20 * record_bytes


def test_nothing_is_left(tmp_path: Path) -> None:
    cache = build(some_config(), folder=tmp_path)
    filled(cache, 80)
    assert list(tmp_path.iterdir()) == []
    files = [region.file for layer in cache.block_layers for region in layer.table.pool.store.regions]
    cache.reset()
    assert all(file.closed for file in files)
    assert cache.memory().total_bytes == 0


def test_a_cache_that_is_not_used_is_gone_at_once(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        cache = build(some_config(), folder=tmp_path)
        filled(cache, 80)
        filled(cache, 1)
        assert cache.layers[0].keys is not None
        file = cache.layers[0].table.pool.store.regions[0].file
        cache.layers[1].table.pool.store.reader.reset()
        del cache
        assert file.closed
    finally:
        gc.enable()


def test_a_copy_goes_its_own_way() -> None:
    model = tiny_model("llama", torch.float32)
    cache = build(model.config)
    with torch.no_grad():
        model(prompt(), **{CACHE_ARGUMENT: cache})
    written = cache.traffic.written_bytes
    other = copy.deepcopy(cache)
    assert cache.traffic.written_bytes == written
    cache.crop(-7)
    for kept in (cache, other):
        ids = torch.cat([prompt()[:, : kept.get_seq_length()], prompt(tokens=5, seed=3)], dim=1)
        inputs = kept.continuation(prompt(tokens=5, seed=3))
        generation = generate(model, kept, **inputs)
        assert torch.equal(generation.tokens, generate(model, None, ids).tokens)
        kept.check_integrity()


def test_host_does_nothing_for_the_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", torch.float32)
    cache = OffloadedCache(model.config, device_budget="2KiB", residency="host", block_size=4)
    resident = MODES["greedy"](model, PagedCache(model.config, block_size=4))
    type(logging.getLogger("hf_kvcache.residency.placement")).warning_once.cache_clear()
    generation = MODES["greedy"](model, cache)
    MODES["greedy"](model, OffloadedCache(model.config, device_budget="2KiB", residency="host", block_size=4))
    assert torch.equal(generation.logits, resident.logits)
    assert layers_below(cache) == []
    assert len([record for record in caplog.records if "host memory" in record.message]) == 1


# With other choices


@pytest.mark.parametrize(
    ("bits", "mode"),
    [(4, "beams"), (4, "padded_batch"), (4, "prompt_lookup"), (4, "conversation_all_ids"), (2, "beams"), (8, "greedy")],
)
def test_encoded_blocks_travel_encoded(mode: str, bits: int) -> None:
    model = tiny_model("llama", torch.float32)
    quantization = Quantization(bits, bits, codec="grid", sinks=2, recent=3)
    resident = MODES[mode](model, KVCache(model.config, block_size=4, quantization=quantization))
    spec = f"quantized:bits={bits},codec=grid,sinks=2,recent=3+offloaded:device_budget=1KiB,residency=disk:{FOLDER}"
    cache = build_cache(model.config, f"{spec},block_size=4")
    generation = MODES[mode](model, cache)
    assert layers_below(cache) == [0, 1, 2]
    assert torch.equal(generation.logits, resident.logits)
    assert cache.exactness.kind == "approximate"
    cache.check_integrity()


@pytest.mark.parametrize("fails_at", range(6))
def test_memory_runs_out_and_the_history_moves(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any allocation of a pass may fail; the history is taken back, moves to disk, and goes on to the same text."""
    model = tiny_model("llama", torch.float32)
    cache = PagedCache(model.config, block_size=4)
    calls = itertools.count()

    def moved(*arguments: Tensor) -> Tensor:
        if next(calls) == fails_at:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return MOVED(*arguments)

    expected = generate(model, None, prompt())
    with torch.no_grad():
        model(prompt()[:, :5], **{CACHE_ARGUMENT: cache})
        with monkeypatch.context() as patch:
            patch.setattr(arena, "_moved", moved)
            with pytest.raises(RuntimeError, match="allocate"):
                model(prompt()[:, 5:20], **{CACHE_ARGUMENT: cache})
    assert cache.recover() in (5, 8)  # every layer had filled its open block, or not
    cache.check_integrity()
    cache.keep_within(512, f"disk:{FOLDER}")
    assert layers_below(cache) == [0, 1, 2]
    generation = generate(model, cache, prompt())
    assert torch.equal(generation.tokens, expected.tokens)
    with pytest.raises(StateError, match="already"):
        cache.keep_within("2KiB", "host")


# Choices that are none


@pytest.mark.parametrize(
    ("budget", "residency"),
    [("many", "host"), (0, "host"), ("1GiB", "moon"), ("1GiB", "disk"), ("1GiB", "host:much"), ("1GiB", "disk:/a,b")],
)
def test_impossible_choices(budget: str | int, residency: str) -> None:
    with pytest.raises(ConfigError):
        OffloadedCache(some_config(), device_budget=budget, residency=residency)


def test_budget_below_one_block() -> None:
    cache = build(some_config(), 100)
    with pytest.raises(ConfigError, match="one block of 4 tokens takes 512"):
        filled(cache, 3)
    assert cache.get_seq_length() == 0


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        build(some_config(), folder=tmp_path / "missing")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="may write"):
        build(some_config(), folder=tmp_path)


def test_specification_of_a_chain() -> None:
    residency = f"host:1GiB+disk:{FOLDER}:2GiB"
    cache = build_cache(some_config(), f"offloaded:device_budget=1MiB,residency={residency}")
    assert build_cache(some_config(), cache_spec(cache)).residency == cache.residency
    host, disk = cache.residency.tiers
    assert (host.budget_bytes, disk.budget_bytes) == (1 << 30, 2 << 30)
