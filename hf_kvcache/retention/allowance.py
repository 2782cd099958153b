"""How many tokens one layer may hold, and how many of them always stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .budget import Recent, least_tokens, recent_tokens

# The last layer chooses the mean over this: the paper's beta.
_BETA = 20


@dataclass(frozen=True)
class Allowance:
    """What one layer may hold of each row.

    All layers hold equally many tokens, or the lower ones more, as many in all: a pyramid. Where a policy chooses S
    tokens in each of m layers in the mean, layer l then has ``S + D (1 - 2 l / (m - 1))`` with ``D = S - S / 20``, or
    less where the first layer would have more than there are. Sinks and recent tokens are as many in every layer.
    Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" (arXiv 2406.02069).
    Here the differences from S are whole blocks.

    Args:
        limit: The most tokens that a layer may hold in the mean, by the length of the history.
        block_size: Tokens per block, and tokens by which an eviction goes below the limit, so that it is rare.
        sinks: Tokens at the beginning of each row, padding aside, that always stay.
        recent: Tokens at the end that always stay, or their share of the limit.
        place: The layer's number, from 0 on, and the number of layers, in a pyramid; None for equally many tokens.
    """

    limit: Callable[[int], int]
    block_size: int
    sinks: int
    recent: Recent
    place: tuple[int, int] | None = None

    def tokens(self, seen: int) -> int:
        """The most tokens of each row that may be held of a history of `seen`."""
        return self._mean(seen) + self._difference(seen)

    def recent_tokens(self, seen: int) -> int:
        """Tokens at the end that always stay."""
        return recent_tokens(self.recent, self._mean(seen))

    def _mean(self, seen: int) -> int:
        return max(self.limit(seen), least_tokens(self.sinks, self.recent, self.block_size))

    def _difference(self, seen: int) -> int:
        """How many tokens more than in the mean: whole blocks, and 0 in the sum over the layers."""
        if self.place is None or self.place[1] == 1:
            return 0
        number, layers = self.place
        always = self.recent_tokens(seen) + self.sinks + self.block_size
        chosen = self._mean(seen) - always
        most = min(chosen - chosen / _BETA, seen - always - chosen)
        return int(max(most, 0.0) * (layers - 1 - 2 * number) / (layers - 1) / self.block_size) * self.block_size
