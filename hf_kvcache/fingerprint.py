"""Which model a history belongs to. Keys and values mean nothing to any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Enough that any training, merge or adapter shows, few enough that a large model takes well under a second a gigabyte.
_SAMPLES_PER_TENSOR = 1024

# Where a config came from, not what the model computes.
_PROVENANCE = ("_name_or_path", "transformers_version", "architectures")


def model_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 (hex) over the config and, of every parameter and buffer, name, dtype, shape and evenly spaced values.

    Models with equal fingerprints compute the same keys and values. Values are sampled: 1,024 of each tensor, or all
    of a smaller one, so a change confined to a handful of weights may go unseen.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _PROVENANCE}
    digest = hashlib.sha256()
    _add(digest, json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in _tensors(model):
        _add(digest, f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        _add(digest, tensor_bytes(_sample(tensor)))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # A single element keeps whatever stride it had, and counts as contiguous.
    return bytes(flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8).numpy())


def _tensors(model: PreTrainedModel) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
    return flat[::step]


def _add(digest: hashlib._Hash, field: bytes) -> None:
    """Add a length-prefixed field, so that no two sequences of fields hash alike."""
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
