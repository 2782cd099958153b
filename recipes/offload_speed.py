"""What decoding from a history on disk costs: memory, bytes, time against the disk's own speed.

    python recipes/offload_speed.py --folder /scratch

SmolLM2-135M in bfloat16 gets a history of random states (the time does not depend on them). The caches take turns,
each with a token that is not timed and one that is: so what is read ahead meanwhile is of the same cache, as in a
generation. Medians. Files are dropped from the operating system's cache (`posix_fadvise`) before every token and before
the plain sequential read of the same files that it is compared with. For a slower disk or a network, `--link` holds
every read back to a speed, and then the history is also kept in 4 bits.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from hf_kvcache import KVCache, PagedCache, build_cache
from hf_kvcache.bench.filling import fill, observe_states
from hf_kvcache.evaluation.models import load_model
from hf_kvcache.evaluation.protocols import forward
from hf_kvcache.residency.placement import movable
from hf_kvcache.residency.store import LowerArenas
from hf_kvcache.units import MIB, parse_bytes

TOKEN = torch.tensor([[5]])
READ_BYTES = 1 << 20


def resident_bytes() -> int:
    """Memory that the process has for itself, what it has freed given back (glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


def scratch_files(cache: KVCache) -> list[int]:
    """The files that hold the cache's history."""
    stores = [table.pool.store for layer in cache.layers if (table := movable(layer)) is not None]
    return [region.file.fileno() for store in stores if isinstance(store, LowerArenas) for region in store.regions]


def drop(files: Sequence[int]) -> None:
    """Make sure that files are on the disk, and nowhere else."""
    for file in files:
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: Sequence[int]) -> float:
    """Seconds to read files one after the other, with the calls that the cache makes."""
    landing = memoryview(bytearray(READ_BYTES))
    begin = time.perf_counter()
    for file in files:
        offset = 0
        while count := os.preadv(file, [landing], offset):
            offset += count
    return time.perf_counter() - begin


def step(model: PreTrainedModel, cache: KVCache) -> tuple[float, float, int]:
    """One token behind another, the cache's files dropped before each: seconds, processors' seconds, bytes read."""
    drop(scratch_files(cache))
    forward(model, TOKEN, cache, keep=1)
    drop(scratch_files(cache))
    read, work, begin = cache.traffic.read_bytes, time.process_time(), time.perf_counter()
    forward(model, TOKEN, cache, keep=1)
    return time.perf_counter() - begin, time.process_time() - work, cache.traffic.read_bytes - read


def hold_back(bytes_per_second: int) -> None:
    """From now on no read of this process is faster than a link of this speed, which all reads share."""
    preadv, link = os.preadv, threading.Lock()

    def slow(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        with link:
            begin = time.perf_counter()
            count = preadv(file, buffers, offset)
            time.sleep(max(0.0, begin + count / bytes_per_second - time.perf_counter()))
        return count

    os.preadv = slow  # type: ignore[assignment]


def main(
    folder: Annotated[Path, typer.Option(help="Where the history lies; on a disk, not in memory.")] = Path(),
    tokens: Annotated[int, typer.Option(help="Length of the history.")] = 8192,
    share: Annotated[float, typer.Option(help="Budget, as a share of the history's bytes.")] = 0.25,
    rounds: Annotated[int, typer.Option(help="Tokens by each cache.")] = 9,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    link: Annotated[str, typer.Option(help="Bytes a second that the disk is held back to, as in 100MB.")] = "",
) -> None:
    """Measure and print."""
    torch.set_num_threads(threads)
    model = load_model("smollm2-135m", torch.bfloat16).model
    states = observe_states(model)
    history_bytes = tokens * sum(layer.token_bytes for layer in states.layers)
    budget, disk = int(share * history_bytes), f"disk:{folder.resolve()}"

    def cache_of(spec: str) -> KVCache:
        cache = build_cache(model.config, spec)
        fill(model, cache, states, tokens, 1, 0)
        forward(model, TOKEN, cache, keep=1)
        return cache

    forward(model, TOKEN, PagedCache(model.config), keep=1)
    before = resident_bytes()
    lower = cache_of(f"offloaded:device_budget={budget},residency={disk}")
    step(model, lower)
    print(f"history {history_bytes / MIB:.1f} MiB, budget {budget / MIB:.1f}")
    print(f"read buffers {lower.memory().buffer_bytes / MIB:.1f} MiB, written {lower.traffic.written_bytes / MIB:.1f}")
    print(f"resident above the weights {(resident_bytes() - before) / MIB:.1f} MiB")
    if link:
        encoded = cache_of("quantized:bits=4")
        encoded.keep_within(int(share * encoded.memory().total_bytes), disk)
        forward(model, TOKEN, encoded, keep=1)
        hold_back(parse_bytes(link))
        others = {"4 bits": encoded}
    else:
        others = {
            "paged": cache_of("paged"),
            "all fits": cache_of(f"offloaded:device_budget={2 * history_bytes},residency={disk}"),
        }
    steps: dict[str, list[tuple[float, float, int]]] = {}
    plain = []
    for _ in range(rounds):
        for name, cache in {"offloaded": lower, **others}.items():
            steps.setdefault(name, []).append(step(model, cache))
        drop(scratch_files(lower))
        plain.append(read_all(scratch_files(lower)))
    medians = {name: [statistics.median(part) for part in zip(*some, strict=True)] for name, some in steps.items()}
    for name, (seconds, work, read) in medians.items():
        print(f"{name:10} {1e3 * seconds:8.1f} ms, {1e3 * work:8.1f} ms of work, {read / 1e6:6.1f} MB read")
        print(f"{'':10} {medians['offloaded'][0] / seconds:8.2f}x the speed of offloaded")
    seconds, _, read = medians["offloaded"]
    roofline = statistics.median(plain)
    print(f"plain read {1e3 * roofline:8.1f} ms, {read / roofline / 1e9:.2f} GB/s")
    print(f"{'':10} {roofline / seconds:8.0%} of that is the speed of offloaded")
    if "all fits" in medians:
        seconds, work = (medians["paged"][part] / medians["all fits"][part] for part in (0, 1))
        print(f"all fits: {seconds:.2f}x the speed of paged, by work {work:.2f}x")


if __name__ == "__main__":
    typer.run(main)
