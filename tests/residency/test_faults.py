"""What goes wrong below ends in an error that names file, layer and block, or is never noticed; no wrong token."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model
from modes import MODES, generate, prompt
from strategies import CACHE_ARGUMENT
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvcache import OffloadedCache, PagedCache, StorageError
from hf_kvcache.residency import placement
from hf_kvcache.residency.buffer import Buffer
from hf_kvcache.residency.disk import DiskRegion
from hf_kvcache.residency.stream import StreamReader

NAMES_ALL = r"layer \d, block \d+: .*scratch file of layer \d in "


def offloaded(model: PreTrainedModel, folder: Path, budget: str = "2KiB", quota: str = "") -> OffloadedCache:
    return OffloadedCache(model.config, device_budget=budget, residency=f"disk:{folder}{quota}", block_size=4)


def filled(folder: Path) -> tuple[PreTrainedModel, OffloadedCache]:
    model = tiny_model("llama", torch.float32)
    cache = offloaded(model, folder)
    cache.align(prompt())
    with torch.no_grad():
        model(prompt(), **{CACHE_ARGUMENT: cache})
    return model, cache


def check_goes_on(model: PreTrainedModel, cache: OffloadedCache) -> None:
    ids = torch.cat([prompt(), prompt(tokens=3, seed=1)], dim=1)
    generation = generate(model, cache, **cache.continuation(prompt(tokens=3, seed=1)))
    resident = PagedCache(model.config, block_size=4)
    with torch.no_grad():
        model(prompt(), **{CACHE_ARGUMENT: resident})
    expected = generate(model, resident, **resident.continuation(prompt(tokens=3, seed=1)))
    assert torch.equal(generation.logits, expected.logits)
    assert torch.equal(generation.tokens, generate(model, None, ids).tokens)
    cache.check_integrity()


def region(cache: OffloadedCache, layer: int) -> DiskRegion:
    (only,) = cache.layers[layer].table.pool.store.regions
    return only


PWRITE, PREADV = os.pwrite, os.preadv


def refuse(call: Callable[..., int], code: int, after: int = 0) -> Callable[..., int]:
    """A call to the operating system that fails from some call on."""
    calls = iter(range(1_000_000))

    def refused(*arguments: Any) -> int:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    return refused


@pytest.mark.parametrize(
    ("code", "after"), [(errno.ENOSPC, 0), (errno.ENOSPC, 7), (errno.EDQUOT, 3), (errno.EFBIG, 5), (errno.EIO, 3)]
)
def test_disk_full_in_mid_generation(code: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32)
    cache = offloaded(model, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse(PWRITE, code, after))
        with pytest.raises(StorageError, match=NAMES_ALL + str(tmp_path)):
            generate(model, cache, prompt(), max_new_tokens=30)
    cache.reset()
    assert torch.equal(MODES["greedy"](model, cache).tokens, MODES["greedy"](model, None).tokens)


def test_tier_beyond_its_own_budget(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    cache = offloaded(model, tmp_path, quota=":4KiB")
    with pytest.raises(StorageError, match=r"layer \d, block \d+: the lower tiers are full"):
        generate(model, cache, prompt(), max_new_tokens=30)


def test_chain_of_tiers(tmp_path: Path) -> None:
    """What does not fit in the first goes to the second."""
    model = tiny_model("llama", torch.float32)
    (tmp_path / "first").mkdir()
    residency = f"disk:{tmp_path / 'first'}:6KiB+disk:{tmp_path}"
    cache = OffloadedCache(model.config, device_budget="2KiB", residency=residency, block_size=4)
    generation = MODES["beams"](model, cache)
    first, second = cache.residency.tiers
    assert 0 < first.held_bytes <= 6 << 10 < second.written_bytes
    resident = MODES["beams"](model, PagedCache(model.config, block_size=4))
    assert torch.equal(generation.logits, resident.logits)


def test_folder_removed(tmp_path: Path) -> None:
    """Files that are open stay readable."""
    (tmp_path / "scratch").mkdir()
    model, cache = filled(tmp_path / "scratch")
    shutil.rmtree(tmp_path / "scratch")
    check_goes_on(model, cache)
    cache.reset()
    with pytest.raises(StorageError, match="scratch"):
        generate(model, cache, prompt())


def test_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told while it lasts; once it is over, the same cache goes on."""
    model, cache = filled(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse(PREADV, errno.EIO))
        with pytest.raises(StorageError, match=NAMES_ALL):
            cache.layers[1].keys.sum()
    check_goes_on(model, cache)


def test_read_error_of_the_thread_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer read ahead in vain is read again when it is asked for."""
    model, cache = filled(tmp_path)
    failed = []

    def fails_ahead(*arguments: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            failed.append(arguments)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(*arguments)

    monkeypatch.setattr(os, "preadv", fails_ahead)
    check_goes_on(model, cache)
    assert failed


@pytest.mark.parametrize("call", [0, 3, 10])
def test_a_bit_lost_on_the_way(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came wrong, while the file is right, is read again, and nobody sees it."""
    model, cache = filled(tmp_path)
    calls = itertools.count()
    lost = []

    def loses(file: int, buffers: list[Any], offset: int) -> int:
        count = PREADV(file, buffers, offset)
        if next(calls) == call:
            lost.append(offset)
            buffers[0][5] ^= 64
        return count

    monkeypatch.setattr(os, "preadv", loses)
    check_goes_on(model, cache)
    assert lost


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError(), KeyboardInterrupt()])
def test_a_block_that_could_not_be_opened(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays below, whatever stopped its way up, and is the same when it comes."""
    _, cache = filled(tmp_path)
    store = cache.layers[1].table.pool.store
    block = min(store.records)
    slots = slice(block * store.slots[0], (block + 1) * store.slots[0])
    expected = [tensor[:, slots].clone() for tensor in store.tensors]

    def fails(*_: Any) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(StorageError if isinstance(error, OSError) else type(error)):
            store.open_slot(block)
    cache.check_integrity()
    place = store.open_slot(block)
    for near, tensor in zip(store.near.arenas.tensors, expected, strict=True):
        assert torch.equal(near[:, place : place + store.slots[0]], tensor)


def test_no_memory_for_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are read when they are asked for, and nothing of what waited for the thread runs once there is one."""
    model, cache = filled(tmp_path)
    refused = []

    def refuses(thread: threading.Thread) -> None:
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        check_goes_on(model, cache)
        cache.crop(prompt().shape[1] - cache.get_seq_length())
    assert len(refused) > 3
    check_goes_on(model, cache)


@pytest.mark.parametrize("fails_at", range(5))
def test_no_memory_for_a_read_buffer(fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, after which the pass can be taken back and the generation goes on."""
    model, cache = filled(tmp_path)
    assign, calls = Buffer.assign, itertools.count()

    def assigned(buffer: Buffer, store: Any) -> None:
        if next(calls) == fails_at:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        assign(buffer, store)

    monkeypatch.setattr(Buffer, "assign", assigned)
    with pytest.raises(RuntimeError, match="allocate"):
        check_goes_on(model, cache)
    cache.recover()
    cache.crop(prompt().shape[1] - cache.get_seq_length())
    check_goes_on(model, cache)


def test_calls_that_do_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda file, view, offset: PWRITE(file, view[:100], offset))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: PREADV(file, [views[0][:70]], offset))
    model, cache = filled(tmp_path)
    check_goes_on(model, cache)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_file_cut_short(layer: int, tmp_path: Path) -> None:
    model, cache = filled(tmp_path)
    os.ftruncate(region(cache, layer).file.fileno(), 700)
    with pytest.raises(StorageError, match=NAMES_ALL + ".*(cut short|altered)"):
        generate(model, cache, **cache.continuation(prompt(tokens=3, seed=1)))


@pytest.mark.parametrize("byte", [0, 511, 1023, 5 * 512 - 1])
def test_one_bit_flipped(byte: int, tmp_path: Path) -> None:
    model, cache = filled(tmp_path)
    file = region(cache, 1).file.fileno()
    (value,) = os.pread(file, 1, byte)
    os.pwrite(file, bytes([value ^ 64]), byte)
    with pytest.raises(StorageError, match=NAMES_ALL + ".*altered"):
        generate(model, cache, **cache.continuation(prompt(tokens=3, seed=1)))


def test_blocks_exchanged(tmp_path: Path) -> None:
    _, cache = filled(tmp_path)
    file, size = region(cache, 2).file.fileno(), region(cache, 2).record_bytes
    first, second = os.pread(file, size, 0), os.pread(file, size, size)
    os.pwrite(file, second + first, 0)
    with pytest.raises(StorageError, match=r"layer 2, block .*altered"):
        cache.layers[2].values.sum()


@pytest.mark.parametrize("slots", [64, 512])
def test_pages_exchanged_within_a_block(slots: int, tmp_path: Path) -> None:
    """The same words in another order: whole parts of a block, or pages of one."""
    tier = placement.Residency("1MiB", f"disk:{tmp_path}").tiers[0]
    layout = placement.RecordLayout([torch.empty(2, 0, 16)], [slots])
    only = tier.open(layout, 0)
    rows = torch.randint(0, 256, (1, layout.record_bytes), dtype=torch.uint8)
    records = only.write(rows)
    arenas = layout.arenas(torch.empty(layout.arena_bytes(1), dtype=torch.uint8), 1)
    only.load(records, arenas, [0])
    only.check(records, arenas, [0])
    assert torch.equal(arenas[0].view(torch.uint8).flatten(), rows[0])
    os.pwrite(only.file.fileno(), bytes(rows[0].roll(4096).numpy()), 0)
    only.load(records, arenas, [0])
    with pytest.raises(StorageError, match="altered"):
        only.check(records, arenas, [0])


def test_two_caches_in_one_folder(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    caches = [offloaded(model, tmp_path) for _ in range(2)]
    texts = [prompt(seed=seed) for seed in (0, 1)]
    with torch.no_grad():
        for cache, ids in zip(caches, texts, strict=True):
            model(ids, **{CACHE_ARGUMENT: cache})
    for cache, ids in zip(caches, texts, strict=True):
        expected = generate(model, None, torch.cat([ids, prompt(tokens=2, seed=9)], dim=1))
        assert torch.equal(
            generate(model, cache, **cache.continuation(prompt(tokens=2, seed=9))).tokens, expected.tokens
        )


KILLED = """
import sys, torch
from transformers import LlamaConfig
from hf_kvcache import OffloadedCache
cache = OffloadedCache(LlamaConfig(num_hidden_layers=4), device_budget="64KiB", residency="disk:" + sys.argv[1])
for index in range(4):
    cache.update(*torch.randn(2, 1, 2, 1000, 16), index)
print(cache.memory().device_bytes["disk"], flush=True)
sys.stdin.read()
"""


def test_process_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 900_000
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


# The way of an accelerator, with copies that wait for nobody


class Streams:
    """Stands in for ``torch.cuda``: notes who waits for whom."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def Stream(self, _device: torch.device) -> Any:  # noqa: N802 - torch's name
        return self._named("side")

    def current_stream(self, _device: torch.device) -> Any:
        return self._named("model")

    @contextmanager
    def stream(self, _stream: Any) -> Iterator[None]:
        self.notes.append("copies")
        yield

    def _named(self, name: str) -> Any:
        notes = self.notes

        class Named:
            def wait_stream(self, _other: Any) -> None:
                notes.append(f"{name} waits")

        return Named()


@pytest.mark.parametrize("mode", ["beams", "prompt_lookup"])
def test_pinned_memory_and_a_side_stream(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; no copy before its stream has waited for the model, no use before the model has for the copy."""
    streams = Streams()
    monkeypatch.setattr(placement, "_reader", lambda device: StreamReader(device, streams))
    monkeypatch.setattr(placement.Placement, "_tiers", lambda self, _device: self.residency.tiers)
    model = tiny_model("llama", torch.float32)
    cache = OffloadedCache(model.config, device_budget="2KiB", residency="host", block_size=4)
    generation = MODES[mode](model, cache)
    resident = MODES[mode](model, PagedCache(model.config, block_size=4))
    assert torch.equal(generation.logits, resident.logits)
    assert cache.memory().device_bytes["host"] > 0
    cache.check_integrity()
    assert streams.notes[:3] == ["side waits", "copies", "model waits"]
    assert streams.notes.count("side waits") == streams.notes.count("copies")
    # The thread copies at a time of its own: what holds is that no copy is ahead of its wait.
    ahead = itertools.accumulate({"side waits": 1, "copies": -1}.get(note, 0) for note in streams.notes)
    assert min(ahead) == 0


def test_states_of_every_width_are_stored(tmp_path: Path) -> None:
    """Records end in the middle of a sector, keys and values differ."""
    tier = placement.Residency("1MiB", f"disk:{tmp_path}").tiers[0]
    generator = torch.Generator().manual_seed(0)
    for heads, width, dtype in ((1, 1, torch.bfloat16), (3, 5, torch.float32), (2, 7, torch.uint8)):
        samples = [torch.empty(heads, 0, width, dtype=dtype), torch.empty(1, 0, 3, dtype=torch.float16)]
        parts: list[Tensor] = [
            torch.randint(0, 99, (s.shape[0], 6, slots, s.shape[2]), generator=generator).to(s.dtype)
            for s, slots in zip(samples, (5, 2), strict=True)
        ]
        layout = placement.RecordLayout(samples, [5, 2])
        rows = layout.pack(parts)
        records = tier.open(layout, 0).write(rows)
        arenas = layout.arenas(torch.empty(layout.arena_bytes(9), dtype=torch.uint8), 9)
        blocks = [4, 5, 6, 0, 8, 2]
        records[0].region.load(records, arenas, blocks)
        records[0].region.check(records, arenas, blocks)
        for arena, slots, part in zip(arenas, (5, 2), parts, strict=True):
            assert torch.equal(arena.unflatten(1, (-1, slots))[:, blocks], part)
