"""Paged storage: a pool of fixed-size blocks, and the table that says which rows read which blocks."""

from .arena import ArenaPool, Arenas
from .columns import ColumnTable, Gather, Run
from .history import History, Usage
from .pool import BlockPool
from .table import BlockTable, equal_blocks

__all__ = [
    "ArenaPool",
    "Arenas",
    "BlockPool",
    "BlockTable",
    "ColumnTable",
    "Gather",
    "History",
    "Run",
    "Usage",
    "equal_blocks",
]
