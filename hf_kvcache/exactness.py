"""What a cache claims about its results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_FROM_TIGHT_TO_LOOSE = ("bitwise", "rounding", "approximate")


class Exactness(NamedTuple):
    """What a cache, or one of its layers, claims about its results; the evaluation module checks the claim."""

    kind: str
    """"bitwise" (the same tensors reach the same kernels), "rounding" (the same real numbers, added in another
    order) or "approximate"."""
    reason: str
    """Why, in one sentence."""


BITWISE = Exactness("bitwise", "the model gets the tensors that transformers' dynamic cache returns")


def loosest(claims: Iterable[Exactness]) -> Exactness:
    """The claim that holds for all parts: that of the loosest one, the first of several."""
    return max(claims, key=lambda claim: _FROM_TIGHT_TO_LOOSE.index(claim.kind), default=BITWISE)
