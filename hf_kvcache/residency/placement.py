"""Which layers have their blocks on the device, and which below.

Every block of a layer is read for every token, so no block is worth more than another, and whatever does not fit has
to travel once a token. What remains to choose is the order: layers go down one at a time, spread evenly over the
model, so that between two that must be fetched there is work for the device to do. A layer that stays is read where it
lies, at the full speed of a cache that has never heard of tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.utils import logging

from ..blocks import BlockTable, ColumnTable
from ..errors import ConfigError
from ..layer import BlockLayer
from ..quantized import QuantizedTable
from .host import HostTier
from .reader import Reader
from .records import RecordLayout
from .residency import Residency
from .store import LowerArenas
from .stream import StreamReader
from .tier import Tier

_logger = logging.get_logger(__name__)


class Traffic(NamedTuple):
    """Bytes that went to lower tiers and came from there."""

    written_bytes: int
    read_bytes: int


class Placement:
    """Keeps the blocks of some layers within a budget.

    Args:
        residency: The budget and the tiers.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.budget_bytes = residency.budget_bytes
        self._held: dict[torch.device, dict[int, int]] = {}
        """Bytes of each layer on its device, when last looked at."""
        self._readers: dict[torch.device, Reader] = {}

    def admit(self, layer: BlockLayer, states: Sequence[torch.Tensor]) -> None:
        """Look at the states ``[rows, heads, tokens, width]`` of a layer that holds nothing yet.

        Raises:
            ConfigError: Not even one of its blocks is within the budget.
        """
        block_bytes = layer.block_size * sum(s.shape[1] * s.shape[3] * s.element_size() for s in states)
        if block_bytes > self.budget_bytes:
            raise ConfigError(
                f"device_budget is {self.budget_bytes} bytes, but one block of {layer.block_size} tokens takes "
                f"{block_bytes}: enlarge the budget or choose a smaller block_size"
            )

    def settle(self, layers: Sequence[object], index: int) -> None:
        """After an update of layer `index` of a cache: send down its full blocks, and layers beyond the budget.

        Raises:
            StorageError: It cannot be written. It stays where it is.
        """
        layer = layers[index]
        table = movable(layer)
        if table is None:
            return
        store = table.pool.store
        if isinstance(store, LowerArenas):
            store.settle(incomplete_blocks(table))
        held = self._held.setdefault(table.pool.device, {})
        held[index] = held_bytes(layer)
        if sum(held.values()) > self.budget_bytes:
            self._shed(layers, held, self._tiers(table.pool.device))

    def _shed(self, layers: Sequence[object], held: dict[int, int], tiers: Sequence[Tier]) -> None:
        """Send layers of a device down until the rest is within the budget."""
        if not tiers:
            return
        for index in held:  # some release blocks at other times than at their update
            held[index] = held_bytes(layers[index])
        for index in sorted(held, key=_spread):
            if sum(held.values()) <= self.budget_bytes:
                return
            if self._send_down(layers[index], index, tiers):
                held[index] = held_bytes(layers[index])

    def _send_down(self, layer: object, index: int, tiers: Sequence[Tier]) -> bool:
        """Move the full blocks of a layer to a lower tier, unless they are there already or it has none."""
        table = movable(layer)
        if table is None or isinstance(table.pool.store, LowerArenas):
            return False
        pool, incomplete = table.pool, incomplete_blocks(table)
        full = [block for block, count in enumerate(pool.references) if count and block not in incomplete]
        if not full:
            return False
        reader = self._readers.setdefault(pool.device, _reader(pool.device))
        layout = RecordLayout(pool.samples, pool.slots)
        regions = [tier.open(layout, index) for tier in tiers]
        store = LowerArenas(pool.samples, pool.slots, regions, reader, index)
        store.take(pool.store, full, incomplete, pool.capacity_blocks)
        pool.store = store
        table.version += 1
        reader.add(store)
        return True

    def _tiers(self, device: torch.device) -> Sequence[Tier]:
        """The tiers that are below this device."""
        tiers = [tier for tier in self.residency.tiers if device.type != "cpu" or not isinstance(tier, HostTier)]
        if not tiers:
            _logger.warning_once(
                "residency='host' does nothing for layers that run on the CPU: host memory is where they are. The "
                "whole history stays there; name a folder, as in residency='disk:FOLDER', to keep it within the budget"
            )
        return tiers

    def reset(self) -> None:
        """Everything was forgotten: give buffers back."""
        self._held = {}
        for reader in self._readers.values():
            reader.reset()

    @property
    def buffer_bytes(self) -> dict[torch.device, int]:
        """Bytes of read buffers on each device."""
        return {device: reader.held_bytes for device, reader in self._readers.items() if reader.held_bytes}

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far, by all caches that share these tiers."""
        tiers = self.residency.tiers
        return Traffic(sum(tier.written_bytes for tier in tiers), sum(tier.read_bytes for tier in tiers))


def movable(layer: object) -> ColumnTable | None:
    """The table of a layer whose full blocks never change; None if it has no such."""
    table = layer.table if isinstance(layer, BlockLayer) else None
    if isinstance(table, QuantizedTable):
        return table.encoded
    return table if isinstance(table, BlockTable) else None


def incomplete_blocks(table: ColumnTable) -> set[int]:
    """The blocks that tokens are still written to."""
    open_column = table.tokens % table.pool.block_size and table.columns
    return {row[-1] for row in table.private} if open_column else set()


def held_bytes(layer: object) -> int:
    """Bytes that a layer has on its device."""
    table = layer.table if isinstance(layer, BlockLayer) else None
    if isinstance(table, QuantizedTable):
        return sum(part.pool.store.held_bytes for part in (table.sinks, table.encoded, table.raw))
    return table.pool.store.held_bytes if isinstance(table, BlockTable) else 0


def lower_bytes(layer: object) -> dict[str, int]:
    """Bytes that a layer has in lower tiers, by kind."""
    table = movable(layer)
    store = None if table is None else table.pool.store
    return store.lower_bytes if isinstance(store, LowerArenas) else {}


def _reader(device: torch.device) -> Reader:
    streams = {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)
    return Reader() if streams is None else StreamReader(device, streams)


def _spread(index: int) -> int:
    """A rank by which the first few of any number of layers lie evenly among them: the index, its bits reversed."""
    return int(f"{index:032b}"[::-1], 2)
