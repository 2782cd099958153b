"""What a fused layer's `update` returns: a tensor without storage that reads through to the layer.

A model expects keys and values back. Real ones would have to be copied together (paged), decoded (quantized) or
fetched (offloaded) in full for every token. A `Handle` has their shape, dtype and device but no bytes. When it
arrives at ``scaled_dot_product_attention``, the layer attends over its blocks where they lie. Any other operation
first turns it into a real tensor, so every attention implementation, and any model that touches the keys on the way,
gets what it would have got.

Nothing is registered or patched: this is the `__torch_function__` protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map

from .errors import StateError

if TYPE_CHECKING:
    from .layer import BlockLayer

# Questions about a handle that its metadata answers.
_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta")
} | {
    getattr(Tensor, name)
    for name in ("size", "dim", "ndimension", "numel", "__len__", "is_floating_point", "element_size", "get_device")
}

_ALL = slice(None)


class Handle(torch.Tensor):
    """Keys or values ``[rows, heads, tokens, width]`` of a layer from `first_token` on.

    Valid until the layer changes: using an older handle raises StateError instead of showing newer history.
    """

    layer: BlockLayer
    kind: int
    """0 for keys, 1 for values."""
    first_token: int
    version: int
    _shape: torch.Size
    repeats: int
    """How often every head of the layer is repeated."""
    given: Tensor | None
    """The real tensor, where the layer was given it in this very update and it is the whole history."""

    @staticmethod
    def __new__(  # noqa: PYI034  (beartype knows no Self in classes it does not decorate)
        cls,
        layer: BlockLayer,
        kind: int,
        first_token: int,
        repeats: int,
        shape: Sequence[int],
        like: Tensor,
        given: Tensor | None = None,
    ) -> Handle:
        """A handle of `shape` with the dtype and device of `like`."""
        size = torch.Size(shape)
        # The protocol's own constructor; it has no public name. https://docs.pytorch.org/docs/stable/notes/extending.html
        handle: Handle = torch.Tensor._make_wrapper_subclass(cls, size, dtype=like.dtype, device=like.device)  # noqa: SLF001
        handle._shape = size
        handle.layer = layer
        handle.kind = kind
        handle.first_token = first_token
        handle.version = layer.version
        handle.repeats = repeats
        handle.given = given
        return handle

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """As of any tensor; answered here because models ask for it several times per token."""
        return self._shape

    def materialize(self) -> Tensor:
        """The real tensor, a contiguous copy."""
        self.check_valid()
        self.layer.check_whole()
        tensor = self.layer.materialize(self.first_token)[self.kind] if self.given is None else self.given
        if self.ndim == 5:
            return tensor[:, :, None].expand(self.shape)
        return tensor if self.repeats == 1 else tensor.repeat_interleave(self.repeats, dim=1)

    def check_valid(self) -> None:
        """Raise StateError if the layer has changed since."""
        if self.version != self.layer.version:
            raise StateError(
                "these keys and values were returned by an earlier update and the cache has changed since; "
                "use them before the next update, or keep a copy with `.clone()`"
            )

    def reshaped(self, shape: Sequence[int], repeats: int) -> Handle:
        """The same history in another shape, with every head repeated `repeats` times."""
        self.check_valid()
        return Handle(self.layer, self.kind, self.first_token, repeats, shape, self, self.given)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "values" if self.kind else "keys"
        return f"Handle({kind}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.materialize()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            fused = _attend(*args, **kwargs)
            if fused is not None:
                return fused
        elif func is Tensor.__getitem__ or func is Tensor.expand or func is Tensor.reshape:
            repeated = _repeat_heads(func, args)
            if repeated is not None:
                return repeated
        elif func is Tensor.to and not kwargs and _is_already(args):
            return args[0]
        return func(*_real(args), **_real(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Reached only from code that runs below `__torch_function__`.
        return func(*_real(args), **_real(kwargs or {}))


def _real(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.materialize() if isinstance(leaf, Handle) else leaf, tree)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The layer's own attention, or None where only real tensors will do."""
    if not (isinstance(key, Handle) and isinstance(value, Handle)) or isinstance(query, Handle):
        return None
    key.check_valid()
    if not _same_history(key, value):
        return None
    scale = scale or 1 / math.sqrt(query.shape[-1])
    heads = key.shape[1]
    shape = query.shape
    if _is_packed(query, heads, attn_mask, is_causal):
        query = query.flatten(1, 2)[:, :, None]
        enable_gqa = True
    key.layer.observe(query, attn_mask, scale)
    fits = query.ndim == 4 and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if dropout_p > 0.0 or not fits or (query.shape[1] != heads and not (enable_gqa and query.shape[1] % heads == 0)):
        return None
    if key.given is not None and value.given is not None:
        output = key.layer.attend_given(query, (key.given, value.given), attn_mask, scale)
    elif is_causal or query.requires_grad:
        return None
    else:
        output = key.layer.attend(query, attn_mask, scale, key.first_token)
    return output if output is None else output.reshape(*shape[:3], -1)


def _is_packed(query: Tensor, heads: int, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether these are the query heads of one token by key head, ``[rows, key_heads, groups, width]``.

    transformers lays them out like this for kernels that take no groups, under the mask of that one token.
    """
    if query.ndim != 4 or query.shape[1] != heads or query.shape[2] == 1:
        return False
    return not is_causal if mask is None else mask.ndim == 4 and mask.shape[2] == 1


def _same_history(key: Handle, value: Handle) -> bool:
    """Whether these are the keys and the values of one history, with equally many heads."""
    return (
        key.layer is value.layer
        and key.version == value.version
        and key.first_token == value.first_token
        and key.kind == 0
        and value.kind == 1
        and len(key.shape) == len(value.shape) == 4
        and key.shape[1] == value.shape[1]
    )


def _is_already(args: Sequence[Any]) -> bool:
    """Whether ``handle.to(device)`` or ``handle.to(dtype)`` asks for what the handle is."""
    handle, *target = args
    if not isinstance(handle, Handle) or len(target) != 1 or not isinstance(target[0], torch.device | torch.dtype):
        return False
    return target[0] in (handle.device, handle.dtype)


def _repeat_heads(func: Callable[..., Any], args: Sequence[Any]) -> Handle | None:
    """Follow the three steps by which models repeat key heads, without bytes; None for anything else.

    ``handle[:, :, None]`` -> ``.expand(rows, heads, repeats, tokens, width)`` -> ``.reshape(rows, heads * repeats,
    tokens, width)``.
    """
    handle = args[0]
    if not isinstance(handle, Handle):
        return None
    rows, heads, *rest, tokens, width = handle.shape
    if func is Tensor.__getitem__:
        adds_axis = args[1] in ((_ALL, _ALL, None, _ALL, _ALL), (_ALL, _ALL, None))
        fits = adds_axis and not rest and handle.repeats == 1
        return handle.reshaped((rows, heads, 1, tokens, width), 1) if fits else None
    if len(rest) != 1:
        return None
    shape = tuple(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list | torch.Size) else tuple(args[1:])
    if func is Tensor.expand:
        fits = rest == [1] and len(shape) == 5 and shape == (rows, heads, shape[2], tokens, width) and shape[2] > 0
        return handle.reshaped(shape, shape[2]) if fits else None
    return handle.reshaped(shape, rest[0]) if shape == (rows, heads * rest[0], tokens, width) else None
