"""What a stored block is: the model, the namespace, and every token from the first one on.

The key of a block is a SHA-256 over the key of the block before it and its own token ids; the chain begins with a
root over format version, block size, model and namespace, and over a digest of what the text holds besides tokens.
Fields carry their length and every kind of hash its own domain, so that no two different histories hash the same bytes.
A key alone is never believed: see `Index.match`.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from ..errors import ConfigError, InputError
from ..fingerprint import model_fingerprint, tensor_bytes

FORMAT_VERSION = "1"

_SHAREABLE_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Layers that read another one's history, or have none.
_EMPTY_LAYER_TYPES = ("dummy",)

# Rotary embeddings whose frequencies change with the length of the text: keys then depend on what follows them.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_WATCHED_PER_TENSOR = 8


class Root(NamedTuple):
    """Where chains begin. Blocks of different roots are never shared."""

    model: str
    """Fingerprint of the model, its adapters and its attention settings."""
    namespace: str | None
    """Whose texts they are. None, the default, is a namespace of its own and equals no string."""
    media: str | None = None
    """Digest (hex) of what the texts hold besides tokens, see `Media`; None if there is nothing."""


def require_shareable(config: PreTrainedConfig) -> None:
    """Raise ConfigError unless the keys and values of a prefix depend on that prefix alone, block by block."""
    if config.is_encoder_decoder:
        raise ConfigError(
            "the keys of an encoder-decoder depend on the encoder's text as well, which a prefix store does not know; "
            "use a PagedCache"
        )
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "use_bidirectional_attention", None):
        raise ConfigError("this model attends in both directions, so a prefix depends on what follows it")
    for index, kind in enumerate(get_layer_types_and_kwargs(decoder)[0]):
        if kind not in _SHAREABLE_LAYER_TYPES + _EMPTY_LAYER_TYPES:
            raise ConfigError(
                f"layer {index} ({kind}) keeps a state that is not made of tokens, and cannot be taken up in the "
                "middle of a text: a prefix of this model cannot be shared. Use a PagedCache"
            )
    rope = getattr(decoder, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise ConfigError(
                f"rotary embeddings of type {part['rope_type']!r} change with the length of the text, so keys of a "
                "prefix cannot be shared. Use a PagedCache"
            )


def shareable_layers(config: PreTrainedConfig) -> list[int]:
    """The numbers of the layers that keep keys and values."""
    kinds = get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]
    return [index for index, kind in enumerate(kinds) if kind in _SHAREABLE_LAYER_TYPES]


def has_window(config: PreTrainedConfig) -> bool:
    """Whether some layer sees only so many columns back."""
    kinds = get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]
    return any(kind in ("sliding_attention", "chunked_attention") for kind in kinds)


class ModelWatch:
    """Fingerprints of one model at a time, computed anew when it has changed."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int, torch.dtype]] = []
        self._tensors: list[Tensor] = []
        self._samples: list[list[Tensor]] = []
        self._seen: tuple[object, ...] | None = None
        self._fingerprint = ""

    @torch.no_grad()
    def fingerprint(self, model: PreTrainedModel) -> str:
        """SHA-256 (hex) over what `model_fingerprint` covers, the attention implementation and active adapters.

        Whether to compute it again is decided by address, version and 8 values of each tensor: a few milliseconds.
        """
        settings = _settings(model)
        tensors = [*model.parameters(), *model.buffers()]
        places = [(tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in tensors]
        if places != self._places:
            # Kept alive from here on: an address that is in use cannot be that of another tensor.
            self._places, self._tensors, self._samples = places, tensors, _sampled(tensors)
        versions = [tensor._version for tensor in tensors]  # noqa: SLF001
        samples = [tensor_bytes(torch.cat([view.reshape(-1) for view in group])) for group in self._samples]
        seen = (settings, places, versions, samples)
        if seen != self._seen:
            self._fingerprint = digest("model", model_fingerprint(model).encode(), settings.encode()).hex()
            self._seen = seen
        return self._fingerprint


def root_key(root: Root, block_size: int) -> bytes:
    """The key that chains of `root` begin with."""
    namespace = [] if root.namespace is None else [root.namespace.encode("utf-8", "surrogatepass")]
    key = digest("root", FORMAT_VERSION.encode(), str(block_size).encode(), root.model.encode(), *namespace)
    return key if root.media is None else digest("root with media", key, root.media.encode())


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of the block that holds `tokens` (see `block_tokens`) and follows the block, or the root, `parent`."""
    return digest("block", parent, tokens)


def block_tokens(token_ids: Int[Tensor, "tokens *numbers"], block_size: int) -> list[bytes]:
    """The token ids of every whole block, each as 8 bytes, little endian; of embeddings 32 (see `embedded_prompt`)."""
    data = tensor_bytes(token_ids.to(torch.int64))
    step = 8 * block_size * math.prod(token_ids.shape[1:])
    return [data[begin : begin + step] for begin in range(0, len(data) - step + 1, step)]


def digest(domain: str, *fields: bytes) -> bytes:
    """SHA-256 over the number of fields and every field with its length."""
    hashed = hashlib.sha256(f"hf_kvcache.prefix.{domain} {len(fields)}\n".encode())
    for field in fields:
        hashed.update(len(field).to_bytes(8, "little"))
        hashed.update(field)
    return hashed.digest()


def check_namespace(namespace: object) -> None:
    """Raise InputError unless this is a string or None."""
    if namespace is not None and not isinstance(namespace, str):
        raise InputError(f"a namespace is a string or None, got {type(namespace).__name__}")


def _settings(model: nn.Module) -> str:
    """What changes attention without being a parameter: kernels, and which adapters are active at what scale."""
    config = getattr(model, "config", None)
    parts = [str(getattr(config, "_attn_implementation", None)), str(getattr(model, "dtype", None))]
    for name, module in model.named_modules():
        # The public attributes of PEFT's tuner layers; transformers' models have methods of these names. Asking a
        # module for what it does not have is slow, and most do not.
        if "active_adapters" not in vars(module) and not hasattr(type(module), "active_adapters"):
            continue
        active, disabled = getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None)
        if isinstance(active, list | tuple) and isinstance(disabled, bool):
            merged, scaling = getattr(module, "merged_adapters", []), getattr(module, "scaling", {})
            parts.append(f"{name} {list(active)} {disabled} {list(merged)} {sorted(dict(scaling).items())}")
    return "\n".join(parts)


def _sampled(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Views of some values of each tensor, by device and dtype. They must be views: they show what becomes of it."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        held = tensor.detach()
        if held.is_contiguous():
            view = held.view(-1)[:: max(1, held.numel() // _WATCHED_PER_TENSOR)]
        else:
            view = held[tuple(slice(None, None, max(1, size // 2)) for size in held.shape)]
        groups.setdefault((tensor.device, tensor.dtype), []).append(view)
    return list(groups.values())
