"""Bytes that any cache really holds: found by walking the object, not by asking it."""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

# A cache may point at these; what they hold is not the cache's.
_NOT_OURS = (
    nn.Module,
    PreTrainedConfig,
    ModuleType,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    torch.dtype,
    torch.device,
)


def measured_bytes(cache: object) -> int:
    """Bytes of all tensor storages reachable from `cache`, each storage counted once and in full.

    A view of one row of a pool counts the whole pool: that is what keeps the memory alive. Follows attributes
    (also `__slots__`), containers and the inner tensors of wrapper subclasses (quantized tensors). Nothing is
    changed.
    """
    return sum(dict(map(_storage, reachable_tensors(cache))).values())


def _storage(tensor: Tensor) -> tuple[tuple[str, int], int]:
    """What identifies the storage of a tensor, and its bytes."""
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        address = 0  # a meta tensor, or a wrapper whose parts are walked on their own
    return (str(tensor.device), address), storage.nbytes() if address else 0


def reachable_tensors(root: object) -> Iterator[Tensor]:
    """Every tensor reachable from `root`; of wrapper subclasses, the tensors they are made of."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if item is None or id(item) in seen or isinstance(item, _NOT_OURS):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor) and not _is_wrapper(item):
            yield item
        waiting.extend(_parts(item))


def _is_wrapper(item: object) -> bool:
    """Whether `item` is a tensor made of other tensors, such as a quantized one."""
    return bool(is_traceable_wrapper_subclass(item))


def _parts(item: Any) -> Iterator[object]:
    """The objects directly inside `item`."""
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (list, tuple, set, frozenset)) or type(item).__name__ == "deque":
        yield from item
    if _is_wrapper(item):
        yield from (getattr(item, name) for name in item.__tensor_flatten__()[0])
    yield from getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(item, name, None)
