"""A cache in one safetensors file: blocks, tables and token ids, marked with the model they belong to.

Tensors: the arenas of layer N, ``layer.N.raw.0`` (keys) and ``layer.N.raw.1`` (values) of a paged layer, axes (heads,
slots, width), the slots being those of the blocks in use, block after block; of a quantized one also ``sinks`` and
``encoded``, and what its codecs learned; of an evicting one the ``positions`` of its tokens, what its heads keep in
different numbers (``kept``), what it encoded (``demoted``), and what its policy has seen; of one that chooses what it
reads the ``bounds`` of its blocks; ``token_ids`` and ``last_positions`` where they are known. Metadata: format,
version, the model's fingerprint, how the cache was built, and the tables as JSON. A SHA-256 over everything guards
against truncation and altered bytes.
Nothing is ever unpickled.
"""

from __future__ import annotations

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

from .blocks import BlockPool, BlockTable, ColumnTable, History
from .errors import KVCacheError, StateError, StorageError
from .fingerprint import model_fingerprint, tensor_bytes
from .layer import BlockLayer, layer_tensors
from .quantized import QuantizedLayer, QuantizedTable
from .retention import DemotingTable, EvictedTable, EvictingLayer, QuestLayer, QuestTable, SinkTable, WindowLayer
from .spec import build_cache, cache_spec
from .whole_file import whole_file

_FORMAT = "hf_kvcache"
_VERSION = "1"


def save_cache(cache: Any, path: str | os.PathLike[str], model: PreTrainedModel) -> None:
    """Write `cache` to `path`, whole or not at all.

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
        tables[str(index)] = _store_history(layer.table, f"layer.{index}", tensors)
    for name, known in (("token_ids", cache.token_ids), ("last_positions", cache.last_positions)):
        if known is not None:
            tensors[name] = known.cpu().contiguous()
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model_fingerprint(model),
        "cache": json.dumps({"spec": cache_spec(cache), "layers": tables}),
    }
    metadata["sha256"] = checksum(metadata, tensors)
    try:
        with whole_file(Path(path)) as scratch:
            save_file(tensors, scratch, metadata)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the cache to {os.fspath(path)}: {error}") from error


def load_cache(kind: Any, path: str | os.PathLike[str], model: PreTrainedModel) -> Any:
    """The cache in file `path`, built as it was, on the devices of the model's layers.

    Raises:
        StorageError: The file is missing, truncated, altered, of a newer format, of another model, or holds a cache
            that is no `kind`.
    """
    name = os.fspath(path)
    metadata, tensors = _read(name)
    if metadata.get("format") != _FORMAT:
        raise StorageError(f"{name} holds no cache of this library")
    if metadata.get("version") != _VERSION:
        raise StorageError(f"{name} has format version {metadata.get('version')}; this release reads {_VERSION}")
    if metadata.get("sha256") != checksum(metadata, tensors):
        raise StorageError(f"{name} was altered: its checksum does not match. Compute the history again")
    if metadata["model"] != model_fingerprint(model):
        raise StorageError(
            f"{name} belongs to another model (config or weights differ); it must not be used with this one"
        )
    description = json.loads(metadata["cache"])
    devices = layer_devices(model)
    try:
        cache = build_cache(model.config, description["spec"])
        for index, stored in description["layers"].items():
            prefix, device = f"layer.{index}.", devices.get(int(index))
            parts = {key.removeprefix(prefix): t.to(device) for key, t in tensors.items() if key.startswith(prefix)}
            layer = cache.layers[int(index)]
            if not isinstance(layer, BlockLayer):
                raise StateError(f"layer {index} is kept by transformers, but was stored as blocks")
            layer.restore(_restore_history(layer, stored, parts))
        cache.check_integrity()
    except (KeyError, IndexError, ValueError, TypeError, KVCacheError) as error:
        raise StorageError(f"{name} does not describe a consistent cache: {error}") from error
    if not isinstance(cache, kind):
        raise StorageError(f"{name} holds a {type(cache).__name__}, no {kind.__name__}; load it with that class")
    cache.carry(tensors.get("token_ids"), tensors.get("last_positions"))
    return cache


def _store_history(history: History, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(history, QuantizedTable):
        return _store_quantized(history, name, tensors)
    if isinstance(history, SinkTable):
        tensors |= {
            f"{name}.row_sinks.{kind}": part.cpu().contiguous()
            for kind, part in enumerate((history.keys, history.values))
        }
        recent = _store_history(history.recent, name, tensors)
        return {**recent, "padding": history.padding, "captured": history.captured}
    if isinstance(history, BlockTable):
        return {"raw": _store_table(history, f"{name}.raw", tensors)}
    if isinstance(history, EvictedTable):
        tensors |= {f"{name}.{key}": tensor.cpu().contiguous() for key, tensor in history.tensors.items()}
        stored: dict[str, Any] = {"tokens": history.tokens, "tail_begin": history.tail_begin, "scale": history.scale}
        if isinstance(history, DemotingTable):
            stored["demoted"] = _store_table(history.demoted.encoded, f"{name}.demoted", tensors)
        return {"raw": _store_table(history.blocks, f"{name}.raw", tensors), **stored}
    if isinstance(history, QuestTable):
        bounds = _store_table(history.bounds, f"{name}.bounds", tensors)
        return {"raw": _store_table(history.blocks, f"{name}.raw", tensors), "bounds": bounds}
    raise StateError(f"a {type(history).__name__} has no file format")


def _store_quantized(history: QuantizedTable, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    for number, pair in enumerate(history.fits):
        for kind, fit in zip(("keys", "values"), pair, strict=True):
            tensors |= {f"{name}.fit.{number}.{kind}.{key}": value.cpu().contiguous() for key, value in fit.items()}
    squares = history.queries.squares
    if squares is not None:
        tensors[f"{name}.queries"] = squares.cpu().contiguous()
    return {
        "queries": history.queries.counts,
        "sinks": _store_table(history.sinks, f"{name}.sinks", tensors),
        "encoded": _store_table(history.encoded, f"{name}.encoded", tensors),
        "raw": _store_table(history.raw, f"{name}.raw", tensors),
        "tokens": history.tokens,
        "raw_begin": history.raw_begin,
        "encoded_begin": history.encoded_begin,
        "lengths": history.lengths,
        "fits": len(history.fits),
        "fit_of_row": history.fit_of_row,
        "off_by": history.off_by,
    }


def _restore_history(layer: BlockLayer, stored: dict[str, Any], parts: dict[str, Tensor]) -> History:
    rows = len(stored["raw"]["private"])
    keys, values = (parts[f"raw.{kind}"][None].expand(rows, -1, -1, -1) for kind in (0, 1))
    if isinstance(layer, WindowLayer):
        windowed = layer.new_table(keys, values)
        windowed.resume(
            _restore_history(layer.history, stored, parts),
            (parts["row_sinks.0"], parts["row_sinks.1"]),
            stored["padding"],
            stored["captured"],
        )
        return windowed
    if isinstance(layer, EvictingLayer):
        layer.lazy_initialization(keys, values)
        return _restore_evicted(layer.table, stored, parts)
    if isinstance(layer, QuestLayer):
        bounded = layer.new_table(keys, values)
        _restore_table(bounded.blocks, stored["raw"], "raw", parts)
        _restore_table(bounded.bounds, stored["bounds"], "bounds", parts)
        return bounded
    if not isinstance(layer, QuantizedLayer):
        table = BlockTable(BlockPool(keys, values, layer.block_size), rows)
        _restore_table(table, stored["raw"], "raw", parts)
        return table
    layer.lazy_initialization(keys, values)
    history = layer.table
    if not isinstance(history, QuantizedTable):
        raise StateError(f"a quantized layer made a {type(history).__name__}")
    if stored["off_by"] is not None:
        history.protect(stored["off_by"])
    for part in ("sinks", "encoded", "raw"):
        _restore_table(getattr(history, part), stored[part], part, parts)
    fits = [
        (_named(f"fit.{number}.keys.", parts), _named(f"fit.{number}.values.", parts))
        for number in range(stored["fits"])
    ]
    history.resume(
        stored["tokens"],
        stored["raw_begin"],
        stored["encoded_begin"],
        stored["lengths"],
        fits,
        stored["fit_of_row"],
    )
    if "queries" in parts:
        history.queries.recall(stored["queries"], parts["queries"])
    return history


def _restore_evicted(table: History | None, stored: dict[str, Any], parts: dict[str, Tensor]) -> EvictedTable:
    """Fill the empty table of an evicting layer."""
    if not isinstance(table, EvictedTable):
        raise StateError(f"an evicting layer made a {type(table).__name__}")
    _restore_table(table.blocks, stored["raw"], "raw", parts)
    if isinstance(table, DemotingTable):
        _restore_table(table.demoted.encoded, stored["demoted"], "demoted", parts)
    table.resume(stored["tokens"], stored["tail_begin"], stored["scale"], parts)
    return table


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _store_table(table: ColumnTable, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put the blocks in use, renumbered in order, into `tensors`; return the table as JSON-able values."""
    used = [block for block, count in enumerate(table.pool.references) if count]
    number = {block: index for index, block in enumerate(used)}
    for index, (arena, slots) in enumerate(zip(table.pool.arenas, table.pool.slots, strict=True)):
        kept = arena.unflatten(1, (-1, slots))[:, used].flatten(1, 2)
        tensors[f"{name}.{index}"] = kept.cpu().contiguous()
    return {
        "tokens": table.tokens,
        "dropped_blocks": table.dropped_blocks,
        "shared": [number[block] for block in table.shared],
        "private": [[number[block] for block in row] for row in table.private],
    }


def _restore_table(table: ColumnTable, stored: dict[str, Any], name: str, parts: dict[str, Tensor]) -> None:
    """Fill an empty table of the right kind."""
    table.pool.adopt([parts[f"{name}.{index}"] for index in range(len(table.pool.arenas))])
    table.tokens, table.dropped_blocks = stored["tokens"], stored["dropped_blocks"]
    table.shared, table.private = stored["shared"], stored["private"]
    for block in [*table.shared, *(block for row in table.private for block in row)]:
        if not 0 <= block < table.pool.capacity_blocks:
            raise StateError(f"block {block} of {table.pool.capacity_blocks} does not exist")
        table.pool.retain(block)


def _read(name: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(name, framework="pt") as file:
            return file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"cannot read a cache from {name}: {error}") from error


def checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """SHA-256 (hex) over all metadata but itself, and over name, dtype, shape and bytes of every tensor."""
    digest = hashlib.sha256()
    fields = {key: value for key, value in metadata.items() if key != "sha256"}
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each decoder layer lives, by its number in the parameter names."""
    devices: dict[int, torch.device] = {}
    for name, parameter in model.named_parameters():
        number = re.search(r"\.(\d+)\.", name)
        if number:
            devices.setdefault(int(number[1]), parameter.device)
    return devices
