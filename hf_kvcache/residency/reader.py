"""Brings blocks from a lower tier back, one layer ahead of the model.

Two buffers take turns. When the blocks of one layer are asked for, their buffer is handed out, and the other one, whose
layer has done its work by then, begins to fill with the blocks of the next layer down below. Layers are read in order
and over and over, so after the last comes the first: its blocks arrive while the model finishes a token.

A buffer knows which record it holds for every block. Whatever was cropped, reordered or written since it was filled
only means that some of its blocks are brought anew, and never that a wrong one is shown.

What was brought is checked by whoever asks for it, when the thread has begun with the next layer: the thread has
nothing to do but wait for bytes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import StorageError
from .buffer import Buffer
from .records import Record
from .tier import ReadError

if TYPE_CHECKING:
    from .store import LowerArenas


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
        if buffer.is_current(store):
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
        self._read_ahead(store)
        self._check(buffer, store)
        if buffer.near_version != store.near.version:
            store.near.lay_into(buffer.tensors)
            buffer.near_version = store.near.version
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
        fresh = {**buffer.unchecked, **missing}
        buffer.unchecked = {block: record for block, record in fresh.items() if wanted.get(block) is record}
        buffer.contents, buffer.version, buffer.near_version = wanted, store.version, -1

    def _check(self, buffer: Buffer, store: LowerArenas) -> None:
        """Look at what has been brought, while the thread brings the next layer."""
        try:
            self._compare(buffer, store)
        except StorageError:
            # It may have been lost on the way only: once more.
            buffer.contents = {}
            self._complete(buffer, store)
            self._before_use()
            try:
                self._compare(buffer, store)
            except StorageError:
                buffer.clear()
                raise

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
        buffer.contents, buffer.unchecked, buffer.version = wanted, wanted, version

    def _wait(self) -> None:
        if self._arriving is not None:
            arriving, self._arriving = self._arriving, None
            arriving.result()

    def _fetch(self, buffer: Buffer, store: LowerArenas, wanted: Mapping[int, Record]) -> None:
        """Bring some blocks into a buffer, in the order in which they lie below."""
        for records, blocks in _by_region(wanted):
            with naming(store, blocks):
                records[0].region.load(records, buffer.tensors, blocks)

    def _compare(self, buffer: Buffer, store: LowerArenas) -> None:
        """Raise StorageError if a block has come that is not what was written."""
        for records, blocks in _by_region(buffer.unchecked):
            with naming(store, blocks):
                records[0].region.check(records, buffer.tensors, blocks)
        buffer.unchecked = {}

    def _before_filling(self) -> None:
        """What is fetched from now on must not overtake what the device has been asked to do so far."""

    def _before_use(self) -> None:
        """What the device is asked to do from now on must not overtake what has been fetched so far."""


def _by_region(wanted: Mapping[int, Record]) -> Iterator[tuple[list[Record], list[int]]]:
    """Records and their blocks, in the order in which they lie below."""
    plan = sorted(wanted.items(), key=lambda item: (id(item[1].region), item[1].slot))
    for _, group in groupby(plan, key=lambda item: id(item[1].region)):
        items = list(group)
        yield [record for _, record in items], [block for block, _ in items]


@contextmanager
def naming(store: LowerArenas, blocks: Sequence[int]) -> Iterator[None]:
    """What goes wrong with one of some records is told with its layer and block."""
    try:
        yield
    except ReadError as fault:
        raise StorageError(f"layer {store.layer}, block {blocks[fault.index]}: {fault}") from fault


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hf_kvcache-reader")
