"""GPUs by name: memory, bandwidth and dense bf16 speed, as their vendors state them.

Memory is binary: a card sold as "80 GB" carries 80 GiB (85.9 GB) or slightly less. Drivers and ECC take a part of it,
so plan with the *usable* memory. Speeds are decimal: 1 TB/s = 10^12 bytes/s. FLOPs are for dense matrices; the figures
with sparsity that data sheets print in large letters are twice as high.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

from ..errors import InputError
from ..units import GIB, parse_bytes


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    memory_bytes: int
    bandwidth: float | None
    """Bytes per second from its memory; None where only a size was given."""
    flops: float | None
    """Dense bf16 (fp16 where it has no bf16) operations per second; None where only a size was given."""


def _gpu(name: str, memory_gib: int, bandwidth_gbs: int, tflops: int) -> Gpu:
    return Gpu(name, memory_gib * GIB, bandwidth_gbs * 1e9, tflops * 1e12)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 16, 320, 65),
        _gpu("v100-32gb", 32, 900, 125),
        _gpu("a10", 24, 600, 125),
        _gpu("l4", 24, 300, 121),
        _gpu("l40s", 48, 864, 362),
        _gpu("a100-40gb", 40, 1555, 312),
        _gpu("a100", 80, 2039, 312),
        _gpu("h100", 80, 3350, 989),
        _gpu("h100-pcie", 80, 2000, 756),
        _gpu("h200", 141, 4800, 989),
        _gpu("b200", 180, 8000, 2250),
        _gpu("mi300x", 192, 5300, 1307),
        _gpu("3090", 24, 936, 71),
        _gpu("4090", 24, 1008, 165),
        _gpu("5090", 32, 1792, 210),
    )
}
"""By the name a user types. `a100` and `h100` are the 80 GiB SXM cards."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, or one that is nothing but a size (``24GiB``).

    Raises:
        InputError: Neither; the message lists what is known.

    Example:
        >>> find_gpu("h100").memory_bytes == find_gpu("80GiB").memory_bytes
        True
    """
    key = name.strip().lower()
    if key in GPUS:
        return GPUS[key]
    if key[:1].isdigit():
        return Gpu(key, parse_bytes(key), None, None)
    near = difflib.get_close_matches(key, GPUS, n=2)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise InputError(f"no GPU is called {name!r}. {hint}Known: {', '.join(GPUS)}; or give its memory, such as 24GiB")
