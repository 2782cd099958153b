"""What a lower tier is: somewhere else to keep records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import UInt8
from torch import Tensor

from ..errors import StorageError
from .records import Record, RecordLayout


@runtime_checkable
class Region(Protocol):
    """Room for the records of one layer, all of one size."""

    place: str
    """What `Memory.device_bytes` calls it: "host" or "disk"."""

    def write(self, rows: UInt8[Tensor, "records record_bytes"]) -> list[Record] | None:
        """Store rows as new records. None, and nothing is stored, if they would go beyond the tier's budget.

        Raises:
            StorageError: They cannot be written.
        """

    def load(self, records: Sequence[Record], tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Copy records of this region to blocks of arenas of its layout.

        Raises:
            ReadError: One cannot be read, or is not what was written.
        """

    def check(self, records: Sequence[Record], tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Look whether `load` brought what was written, if it could not look itself; before anybody uses the blocks.

        Raises:
            ReadError: A block is not what was written.
        """

    def free(self, slot: int) -> None:
        """Take a record's room back. Called when a record dies, in whatever thread that happens."""


@runtime_checkable
class Tier(Protocol):
    """A kind of memory below the one where layers run."""

    written_bytes: int
    """Bytes written to it so far."""
    read_bytes: int
    """Bytes read from it so far."""

    def open(self, layout: RecordLayout, layer: int) -> Region:
        """Room for records of one layer.

        Raises:
            StorageError: There is none.
        """


class ReadError(StorageError):
    """A record that cannot be trusted; which one, so that the layer and the block can be named."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class Slots:
    """Numbers of records: freed ones are used again before the region grows."""

    def __init__(self) -> None:
        self.end = 0
        """Slots in use are below this one."""
        self._freed: list[int] = []

    def __len__(self) -> int:
        """Slots in use."""
        return self.end - len(self._freed)

    def take(self, count: int) -> list[int]:
        """Take some slots, in ascending order."""
        if not len(self):
            self.end, self._freed = 0, []
        again = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        begin, self.end = self.end, self.end + count - len(again)
        return sorted(again) + list(range(begin, self.end))

    def free(self, slot: int) -> None:
        """Give one back. An append alone, and so safe in any thread and in the midst of `take`."""
        self._freed.append(slot)
