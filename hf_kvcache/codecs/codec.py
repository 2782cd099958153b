"""What a codec is: how the blocks of keys, or of values, of one layer are stored and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import matmul
from ..errors import ConfigError

Fit = Mapping[str, Tensor]
"""What a codec learned from the beginning of a sequence, per head; kept, and counted, for the sequence's life."""


class Part(NamedTuple):
    """One array of an encoded block."""

    slots: int
    """Entries along the token axis per block: the block size for arrays per token, 1 for arrays per block."""
    width: int
    """Elements per head and slot."""
    dtype: torch.dtype
    is_scale: bool = False
    """Scales, means and the like, as against codes."""


class Codec(ABC):
    """Stores blocks of one kind of states. A codec has no state of its own: what it learns is in the fit it returns.

    The states of a block never change, so each is encoded once. Subclasses say what the parts are, how states become
    parts and parts states again; `scores` and `weighted_sum` may be overridden where attention needs less than the
    states themselves (scales folded into queries or weights, rotations applied to one query instead of all keys).
    """

    name: str
    exact = False
    """Whether decoded states are the states themselves, bit for bit."""
    wants_queries = False
    """Whether `fit` makes use of the queries."""

    @abstractmethod
    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        """The arrays of one encoded block of states of `width` and `dtype`.

        Raises:
            ConfigError: Such states cannot be stored.
        """

    def fit(
        self,
        states: Float[Tensor, "heads tokens width"],
        query_squares: Float[Tensor, "heads width"] | None,
    ) -> dict[str, Tensor]:
        """Learn from the first states of a sequence (never its sinks).

        Args:
            states: The first states that are going to be encoded.
            query_squares: The mean square of each query channel per key head, where the queries were seen.
        """
        return {}

    @abstractmethod
    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        """The parts of whole blocks, each ``[heads, blocks, slots, part width]``. `states` are in float32 or better."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        """The states of consecutive blocks, whose parts are ``[heads, blocks * slots, part width]``."""

    def prepare(self, query: Float[Tensor, "heads queries width"], fit: Fit) -> tuple[Tensor, ...]:
        """What `scores` needs of the queries, computed once for all the chunks they are to meet."""
        return (query,)

    def scores(
        self, prepared: tuple[Tensor, ...], parts: Sequence[Tensor], fit: Fit
    ) -> Float[Tensor, "heads queries tokens"]:
        """Products of the prepared queries with the stored keys, in the queries' dtype or float32."""
        return matmul.scores(prepared[0], self.decode(parts, fit, prepared[0].dtype))

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        """Sums of the stored values, weighted by each query's row; products are computed in `dtype`."""
        return matmul.weighted_sum(weights.to(dtype), self.decode(parts, fit, dtype))


def check_bits(name: str, bits: int, known: Sequence[int]) -> None:
    """Raise ConfigError unless `bits` is one of `known`."""
    if bits not in known:
        raise ConfigError(f"codec {name!r} stores {', '.join(map(str, known))} bits per number, got bits={bits!r}")
