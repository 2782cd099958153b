"""Reading on an accelerator: copies run on a stream of their own, beside the model's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .buffer import Buffer
from .reader import Reader
from .records import Record

if TYPE_CHECKING:
    from .store import LowerArenas


class StreamReader(Reader):
    """A `Reader` whose copies are queued on a side stream.

    That stream waits for the work that still reads a buffer before it fills the buffer, and the model's stream waits
    for the copies before it reads. The processor waits for neither.

    Args:
        device: The accelerator.
        streams: What makes streams there: the module ``torch.cuda`` or ``torch.xpu``.
    """

    def __init__(self, device: torch.device, streams: Any) -> None:
        super().__init__()
        self.device = device
        self.streams = streams
        self.side = streams.Stream(device)

    def _another(self) -> Reader:
        return StreamReader(self.device, self.streams)

    def _fetch(self, buffer: Buffer, store: LowerArenas, wanted: Mapping[int, Record]) -> None:
        with self.streams.stream(self.side):
            super()._fetch(buffer, store, wanted)
        if buffer.memory.device.type != "cpu":
            # Given back while copies are under way, the memory must not serve anybody else before they are done.
            buffer.memory.record_stream(self.side)

    def _before_filling(self) -> None:
        self.side.wait_stream(self.streams.current_stream(self.device))

    def _before_use(self) -> None:
        self.streams.current_stream(self.device).wait_stream(self.side)
