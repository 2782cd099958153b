"""The most memory while something runs, as the device's allocator and the operating system count it."""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class HighWater:
    """While active, the marks of the allocator and of the process are those of what runs inside.

    Args:
        device: Where the model runs.
        begin_bytes: What the allocator counted before, which does not count here.

    Attributes:
        allocator_bytes: The most bytes that tensors took, more than `begin_bytes`, workspaces of operations included.
            None where the device's allocator does not count (on CPUs).
        process_bytes: The largest resident size of the whole process: weights, libraries, and memory that is free but
            not given back. None where the system does not tell (it is Linux that does).
    """

    def __init__(self, device: torch.device, begin_bytes: int) -> None:
        self.allocator_bytes: int | None = None
        self.process_bytes: int | None = None
        self._device = device
        self._begin_bytes = begin_bytes

    def __enter__(self) -> "HighWater":  # noqa: PYI034  (beartype knows no Self in classes it does not decorate)
        module = _allocator(self._device)
        if module is not None:
            module.reset_peak_memory_stats(self._device)
        self._resets = _reset_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        module = _allocator(self._device)
        if module is not None:
            self.allocator_bytes = int(module.max_memory_allocated(self._device)) - self._begin_bytes
        if self._resets:
            [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
            self.process_bytes = 1024 * int(line.split()[1])


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on a device, as its allocator counts them; 0 where it does not."""
    module = _allocator(device)
    return 0 if module is None else int(module.memory_allocated(device))


def _allocator(device: torch.device) -> Any:
    """The module of a device whose allocator counts (CUDA, ROCm, XPU); None for others."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def _reset_process() -> bool:
    """Let the process's mark begin anew; whether that is possible here."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
