"""Run a model in true float64, so that rounding shrinks to 1e-15 and what is left is a mistake.

Casting the weights is not enough: norms, softmax and rotary embeddings of most models go through float32 on
the way, and a difference of 1e-16 in front of such a rounding can come out as 1e-7.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_kvcache.errors import InputError

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class KeepFloat64(TorchFunctionMode):
    """While active, an operation on float64 tensors that asks for float32 gets float64 instead."""

    @no_type_check  # called for every operation: checked types would cost more than the operations of a small model
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the dtype, then run the operation."""
        named = dict(kwargs or {})
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in (*args, *named.values())):
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            named = {k: torch.float64 if value is torch.float32 else value for k, value in named.items()}
        return func(*args, **named)


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[str]:
    """Turn `model` to float64 in place, give its attention implementation's name, and turn it back exactly.

    Widening and narrowing again loses nothing, so the weights afterwards are bitwise those from before, and
    no second copy of the model is needed. Only `sdpa` and `eager` attention know float64: any other is
    switched to `sdpa` meanwhile.

    Raises:
        InputError: A weight is not a plain float (a quantized model), so there is no float64 twin.
    """
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = [tensor.dtype for tensor in tensors]
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _FLOATS:
            raise InputError(f"the float64 proof needs plain floating-point weights, {name} is {parameter.dtype}")
    used = str(model.config._attn_implementation)  # noqa: SLF001 - transformers offers a setter, but no getter
    attention = used if used in ("sdpa", "eager") else "sdpa"
    try:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float64)
        if attention != used:
            model.set_attn_implementation(attention)
        with KeepFloat64():
            yield attention
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
        if attention != used:
            model.set_attn_implementation(used)
