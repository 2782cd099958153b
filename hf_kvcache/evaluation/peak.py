"""The most bytes of tensors that are alive at once while something runs, on any device."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, no_type_check

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """While active, counts the storages of `held` and of every tensor that an operation makes, each while it lives.

    What an operation needs inside itself, and gives back before it ends, is not seen.

    Attributes:
        live_bytes: Of storages that are alive.
        peak_bytes: The most there were at once.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes: int = 0
        self.peak_bytes: int = 0
        self._known: dict[int, object] = {}
        for tensor in held:
            self._watch(tensor)

    @no_type_check  # called for every operation: checked types would cost more than those of a small model
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, then look at what it made."""
        made = func(*args, **(kwargs or {}))
        given = {_address(of) for of in tree_leaves((args, kwargs)) if isinstance(of, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _address(tensor) not in given:
                self._watch(tensor)
        return made

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self._known:
            return
        size = storage.nbytes()
        self._known[address] = weakref.finalize(storage, self._gone, address, size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, address: int, size: int) -> None:
        self.live_bytes -= size
        self._known.pop(address, None)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0  # a wrapper, or a meta tensor
