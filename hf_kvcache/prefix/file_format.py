"""One block as the bytes of one file: safetensors that say what they are. Specified in docs/prefix.md."""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..errors import StorageError
from ..fingerprint import tensor_bytes
from ..storage import checksum
from .extent import States

_FORMAT = "hf_kvcache.prefix"
_VERSION = "1"
_AXES = "heads tokens width"


class FileBlock(NamedTuple):
    """What a file must turn out to be."""

    key: bytes
    parent: bytes
    """Key of the block before it, or of where its chain begins."""
    root: bytes
    """Key of the root: model, namespace, block size, not what the text holds besides tokens."""
    tokens: bytes
    """Its token ids, 8 bytes each, little endian."""

    @property
    def metadata(self) -> dict[str, str]:
        """Everything but the states, as text."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "axes": _AXES,
            "key": self.key.hex(),
            "parent": self.parent.hex(),
            "root": self.root.hex(),
        }


def encode(block: FileBlock, layers: list[States]) -> bytes:
    """The file of one block."""
    tensors = {"token_ids": torch.frombuffer(bytearray(block.tokens), dtype=torch.int64)}
    for index, pair in enumerate(layers):
        for kind, states in zip(("keys", "values"), pair, strict=True):
            tensors[f"layer.{index}.{kind}"] = states.detach().cpu().contiguous()
    return save(tensors, {**block.metadata, "sha256": checksum(block.metadata, tensors)})


def decode(data: bytes, block: FileBlock) -> list[States] | None:
    """The states in a file, of every layer, on the CPU; None if a release with another format wrote it.

    Raises:
        StorageError: It is not the file of this block, or not what was written.
    """
    try:
        tensors = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    except (SafetensorError, ValueError, KeyError) as error:
        raise StorageError(f"cut short, altered, or no file of this library: {error}") from error
    if metadata.get("format") == _FORMAT and metadata.get("version") != _VERSION:
        return None
    expected = {**block.metadata, "sha256": checksum(metadata, tensors)}
    if metadata != expected:
        wrong = {name for name in {*metadata, *expected} if metadata.get(name) != expected.get(name)}
        raise StorageError(f"altered, or the file of another block: {', '.join(sorted(wrong))} differ")
    if tensor_bytes(tensors.pop("token_ids", torch.empty(0))) != block.tokens:
        raise StorageError("its token ids are those of another text")
    try:
        names = [(f"layer.{index}.keys", f"layer.{index}.values") for index in range(len(tensors) // 2)]
        return [(tensors[keys], tensors[values]) for keys, values in names]
    except KeyError as error:
        raise StorageError(f"a layer is missing: {error}") from error
