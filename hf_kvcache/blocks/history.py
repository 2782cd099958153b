"""What a layer needs of its history, however it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from .pool import BlockPool


class Usage(NamedTuple):
    """Bytes a history holds."""

    payload_bytes: int
    """Keys and values of tokens, or their codes."""
    scale_bytes: int
    """What codes need to be read: scales, means, and what a codec learned."""
    unused_bytes: int
    """Room in blocks that holds no token: unfilled ends and free blocks."""
    table_bytes: int
    """Block tables and reference counts."""


@runtime_checkable
class History(Protocol):
    """The tokens of some rows, in order."""

    @property
    def tokens(self) -> int:
        """Tokens seen."""

    @property
    def rows(self) -> int:
        """Rows of the batch."""

    @property
    def first_token(self) -> int:
        """Position of the oldest token still held."""

    @property
    def tokens_held(self) -> int:
        """Tokens of each row that are still held."""

    @property
    def raw_pool(self) -> BlockPool:
        """Where tokens are stored as they come: tells heads, widths, dtype and device."""

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write the states ``[rows, heads, tokens, width]`` of new tokens at the end of every row."""

    def skip(self, blocks: int) -> None:
        """Count blocks of tokens as seen without storing them. Only in an empty history."""

    def select(self, indices: Sequence[int]) -> None:
        """Make row i a copy of old row ``indices[i]``."""

    def truncate(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens."""

    def drop_before(self, token: int) -> None:
        """Release what lies wholly before position `token`."""

    def usage(self) -> Usage:
        """Bytes held now."""

    def check_integrity(self) -> None:
        """Raise StateError unless everything agrees."""
