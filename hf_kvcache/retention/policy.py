"""What decides which tokens of a history are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor


class Held(NamedTuple):
    """The tokens a layer holds, in order of their positions, and what is known of them.

    Heads are key heads. Each head of each row may hold other tokens.
    """

    keys: Float[Tensor, "rows heads tokens key_width"]
    values: Float[Tensor, "rows heads tokens value_width"]
    positions: Int[Tensor, "rows heads tokens"]
    """Places in the history, padding counted."""
    hidden: Bool[Tensor, "rows heads tokens"] | None
    """Padding, which no query may look at; None where there is none."""
    queries: Float[Tensor, "rows query_heads queries key_width"] | None
    """The queries of the newest tokens, as many as the policy asked for or fewer; None if it asked for none."""
    query_hidden: Bool[Tensor, "rows queries"] | None
    """Which of them are those of padding; None where none is."""
    scale: float
    """Factor on the products of queries and keys."""
    attention: Float[Tensor, "rows heads tokens"] | None
    """Attention each token has received so far, where the policy asked for it."""


class Policy(ABC):
    """Scores the tokens of a history; those with the lowest scores are dropped first.

    Sinks and recent tokens are kept and padding is dropped whatever their scores. A policy holds no state, and its
    scores depend on nothing but what it is given: eviction is deterministic, and rows do not influence each other.
    """

    name: ClassVar[str]
    """By which users choose it."""
    queries: ClassVar[int] = 0
    """How many of the last queries it looks at."""
    wants_attention: ClassVar[bool] = False
    """Whether it looks at the attention that tokens have received."""
    compares_heads: ClassVar[bool] = False
    """Whether scores of different heads compare, as shares of the attention of equally many queries do."""

    @abstractmethod
    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """The scores of all tokens held, in float32 or better; the higher, the more worth keeping."""

    @property
    def needs_queries(self) -> bool:
        """Whether it sees anything of queries."""
        return self.queries > 0 or self.wants_attention
