"""Paged storage: a pool of fixed-size blocks, and the table that says which rows read which blocks."""

from .pool import BlockPool
from .table import BlockTable, Gather, Run

__all__ = ["BlockPool", "BlockTable", "Gather", "Run"]
