"""A cache in one safetensors file: blocks, tables and token ids, marked with the model they belong to.

Tensors: ``layer.N.keys`` and ``layer.N.values``, axes (heads, tokens, width), the tokens being those of the blocks in
use, block after block; ``token_ids`` and ``last_positions`` where they are known. Metadata: format, version, the
model's fingerprint, and the tables as JSON. A SHA-256 over everything guards against truncation and altered bytes.
Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .blocks import BlockPool, BlockTable
from .errors import StateError, StorageError
from .fingerprint import model_fingerprint, tensor_bytes
from .layer import BlockLayer, layer_tensors

_FORMAT = "hf_kvcache"
_VERSION = "1"


def save_cache(cache: Any, path: str | os.PathLike[str], model: PreTrainedModel) -> None:
    """Write `cache` to `path`, whole or not at all (a temporary file is renamed).

    Raises:
        StateError: The cache is empty, or a layer is kept by transformers' own class, whose states have no format.
        StorageError: The file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    tables = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, BlockLayer):
            if not any(True for _ in layer_tensors(layer)):
                continue  # a placeholder: the layer reads another one's history, or has none
            raise StateError(f"layer {index} ({type(layer).__name__}) is kept by transformers and cannot be saved")
        if layer.table is None:
            raise StateError(f"layer {index} holds nothing to save")
        tables[str(index)] = _store_table(layer.table, f"layer.{index}", tensors)
    for name, known in (("token_ids", cache.token_ids), ("last_positions", cache.last_positions)):
        if known is not None:
            tensors[name] = known.cpu().contiguous()
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model_fingerprint(model),
        "cache": json.dumps({"block_size": cache.block_size, "fused": cache.fused, "layers": tables}),
    }
    metadata["sha256"] = _checksum(metadata, tensors)
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(f"cannot write the cache to {os.fspath(path)}: {error}") from error


def load_cache(kind: Any, path: str | os.PathLike[str], model: PreTrainedModel) -> Any:
    """The cache in file `path`, as an instance of the `KVCache` class `kind`, on the devices of the model's layers.

    Raises:
        StorageError: The file is missing, truncated, altered, of a newer format or of another model.
    """
    name = os.fspath(path)
    metadata, tensors = _read(name)
    if metadata.get("format") != _FORMAT:
        raise StorageError(f"{name} holds no cache of this library")
    if metadata.get("version") != _VERSION:
        raise StorageError(f"{name} has format version {metadata.get('version')}; this release reads {_VERSION}")
    if metadata.get("sha256") != _checksum(metadata, tensors):
        raise StorageError(f"{name} was altered: its checksum does not match. Compute the history again")
    if metadata["model"] != model_fingerprint(model):
        raise StorageError(
            f"{name} belongs to another model (config or weights differ); it must not be used with this one"
        )
    description = json.loads(metadata["cache"])
    cache = kind(model.config, block_size=description["block_size"], fused=description["fused"])
    devices = _layer_devices(model)
    try:
        for index, table in description["layers"].items():
            device = devices.get(int(index))
            keys, values = (tensors[f"layer.{index}.{part}"].to(device) for part in ("keys", "values"))
            cache.layers[int(index)].restore(_restore_table(table, keys, values, cache.block_size))
        cache.check_integrity()
    except (KeyError, IndexError, ValueError, StateError) as error:
        raise StorageError(f"{name} does not describe a consistent cache: {error}") from error
    cache.carry(tensors.get("token_ids"), tensors.get("last_positions"))
    return cache


def _store_table(table: BlockTable, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put the blocks in use, renumbered in order, into `tensors`; return the table as JSON-able values."""
    used = [block for block, count in enumerate(table.pool.references) if count]
    number = {block: index for index, block in enumerate(used)}
    keys, values = table.pool.gather(torch.tensor([used], dtype=torch.long, device=table.pool.keys.device))
    tensors[f"{name}.keys"], tensors[f"{name}.values"] = keys[0].cpu().contiguous(), values[0].cpu().contiguous()
    return {
        "tokens": table.tokens,
        "dropped_blocks": table.dropped_blocks,
        "shared": [number[block] for block in table.shared],
        "private": [[number[block] for block in row] for row in table.private],
    }


def _restore_table(stored: dict[str, Any], keys: Tensor, values: Tensor, block_size: int) -> BlockTable:
    pool = BlockPool.restore(keys, values, block_size)
    table = BlockTable(pool, len(stored["private"]))
    table.tokens, table.dropped_blocks = stored["tokens"], stored["dropped_blocks"]
    table.shared, table.private = stored["shared"], stored["private"]
    for block in [*table.shared, *(block for row in table.private for block in row)]:
        if not 0 <= block < pool.capacity_blocks:
            raise StateError(f"block {block} of {pool.capacity_blocks} does not exist")
        pool.retain(block)
    return table


def _read(name: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(name, framework="pt") as file:
            return file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"cannot read a cache from {name}: {error}") from error


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    fields = {key: value for key, value in metadata.items() if key != "sha256"}
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each decoder layer lives, by its number in the parameter names."""
    devices: dict[int, torch.device] = {}
    for name, parameter in model.named_parameters():
        number = re.search(r"\.(\d+)\.", name)
        if number:
            devices.setdefault(int(number[1]), parameter.device)
    return devices
