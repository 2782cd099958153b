"""Histories shared by requests: a text computed once is read by every request that begins with it."""

from .cache import PrefixSharedCache
from .stats import Stats
from .store import PrefixStore

__all__ = ["PrefixSharedCache", "PrefixStore", "Stats"]
