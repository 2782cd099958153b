"""Brings blocks from a lower tier back, one layer ahead of the model.

Two buffers take turns. When the blocks of one layer are asked for, their buffer is handed out, and the other one, whose
layer has done its work by then, begins to fill with the blocks of the next layer down below. Layers are read in order
and over and over, so after the last comes the first: its blocks arrive while the model finishes a token.

A buffer knows which record it holds for every block. Whatever was cropped, reordered or written since it was filled
only means that some of its blocks are brought anew, and never that a wrong one is shown.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import StorageError
from .buffer import Buffer
from .records import Record
from .tier import ReadError

if TYPE_CHECKING:
    from .store import LowerArenas

# Bytes that travel through one landing place in the processor's cache, where their checksums are taken.
_LANDING_BYTES = 1 << 20


class Reader:
    """Reads the layers of one device into two buffers, see above. A thread does the reading."""

    def __init__(self) -> None:
        self.current = Buffer()
        """The buffer handed out last."""
        self.other = Buffer()
        self._stores: list[weakref.ref[LowerArenas]] = []
        self._arriving: Future[None] | None = None
        """The filling of `other`, while it goes on."""
        self._thread = _one_thread()

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        """A copy of a cache reads into buffers of its own."""
        memo[id(self)] = copied = self._another()
        copied._stores = [weakref.ref(copy.deepcopy(store, memo)) for store in self.stores]  # noqa: SLF001
        return copied

    def _another(self) -> Reader:
        return Reader()

    @property
    def stores(self) -> list[LowerArenas]:
        """The layers that have gone down, in the order in which the model asks for them."""
        return [store for reference in self._stores if (store := reference()) is not None]

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers."""
        return self.current.memory.nbytes + self.other.memory.nbytes

    def add(self, store: LowerArenas) -> None:
        """Read this layer from now on, in place of one of the same number."""
        stores = [other for other in self.stores if other.layer != store.layer] + [store]
        self._stores = [weakref.ref(store) for store in sorted(stores, key=lambda store: store.layer)]

    def reset(self) -> None:
        """Read nothing any more, and give the buffers back."""
        self._wait()
        self._stores, self.current, self.other = [], Buffer(), Buffer()

    def read(self, store: LowerArenas) -> list[Tensor]:
        """The arenas of a layer with every block in its place; valid until another layer is read.

        Raises:
            StorageError: A block cannot be read, or is not what was written; nothing is handed out.
        """
        buffer = self.current
        if buffer.version == store.version and buffer.near_version == store.near.version and buffer.fits(store):
            return buffer.tensors
        if not buffer.fits(store):
            self._wait()
            self.current, self.other = self.other, self.current
            buffer = self.current
            if not buffer.fits(store):
                buffer.assign(store)
        if buffer.version != store.version:
            self._complete(buffer, store)
        self._before_use()
        if buffer.near_version != store.near.version:
            store.near.lay_into(buffer.tensors)
            buffer.near_version = store.near.version
        self._read_ahead(store)
        return buffer.tensors

    def _complete(self, buffer: Buffer, store: LowerArenas) -> None:
        """Bring the blocks that a buffer does not have yet."""
        wanted = dict(store.records)
        missing = {block: record for block, record in wanted.items() if buffer.contents.get(block) is not record}
        self._before_filling()
        try:
            self._fetch(buffer, store, missing)
        except BaseException:
            buffer.clear()
            raise
        buffer.contents, buffer.version, buffer.near_version = wanted, store.version, -1

    def _read_ahead(self, store: LowerArenas) -> None:
        """Begin to fill the other buffer with the layer that is going to be asked for next."""
        stores = self.stores
        if len(stores) < 2 or self._arriving is not None:
            return
        following = stores[(stores.index(store) + 1) % len(stores)]
        if self.other.fits(following):
            return  # of two layers each has its buffer
        self.other.assign(following)
        self._before_filling()
        wanted = dict(following.records)
        try:
            self._arriving = self._thread.submit(self._fill, self.other, following, wanted, following.version)
        except RuntimeError:
            # There is no memory for a thread. What waits for one must never run, the buffer may be another layer's by
            # then; the layer is read when it is asked for.
            self._thread = _one_thread()

    def _fill(self, buffer: Buffer, store: LowerArenas, wanted: Mapping[int, Record], version: int) -> None:
        try:
            self._fetch(buffer, store, wanted)
        except StorageError:
            return  # whoever asks for the layer reads it again, and is told if that fails too
        buffer.contents, buffer.version = wanted, version

    def _wait(self) -> None:
        if self._arriving is not None:
            arriving, self._arriving = self._arriving, None
            arriving.result()

    def _fetch(self, buffer: Buffer, store: LowerArenas, wanted: Mapping[int, Record]) -> None:
        """Bring some blocks into a buffer, in the order in which they lie below."""
        plan = sorted(wanted.items(), key=lambda item: (id(item[1].region), item[1].slot))
        if not plan:
            return
        landing = self._landing(store.layout.record_bytes, len(plan), buffer)
        for _, group in groupby(plan, key=lambda item: id(item[1].region)):
            items = list(group)
            for begin in range(0, len(items), len(landing)):
                some = items[begin : begin + len(landing)]
                blocks, records = [block for block, _ in some], [record for _, record in some]
                try:
                    records[0].region.load(records, landing[: len(some)])
                except ReadError as fault:
                    raise StorageError(f"layer {store.layer}, block {blocks[fault.index]}: {fault}") from fault
                store.layout.unpack(landing[: len(some)], buffer.tensors, blocks)

    def _landing(self, record_bytes: int, records: int, buffer: Buffer) -> Tensor:
        """A place ``[records, record_bytes]`` where records arrive; fewer than asked for if they come in turns."""
        count = max(1, min(records, _LANDING_BYTES // record_bytes))
        return torch.empty(count, record_bytes, dtype=torch.uint8, device=buffer.memory.device)

    def _before_filling(self) -> None:
        """What is fetched from now on must not overtake what the device has been asked to do so far."""

    def _before_use(self) -> None:
        """What the device is asked to do from now on must not overtake what has been fetched so far."""


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hf_kvcache-reader")
