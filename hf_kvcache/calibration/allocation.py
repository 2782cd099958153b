"""Spending a number of bits where they take most off the divergence."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """One way to store a part."""

    bits: int
    """Its name."""
    size: float
    """What it takes of the budget."""
    loss: float
    """What it costs in quality."""


def allocate(parts: Mapping[tuple[int, str], Sequence[Choice]], budget: float) -> dict[tuple[int, str], Choice]:
    """Choose one way for each part: the least sum of losses, nearly, whose sum of sizes is within the budget.

    Starts with the smallest of each and takes the step that gains most per size, again and again, among the steps on
    each part's lower convex hull (Everett, Operations Research 11, 1963). Off the optimum by one step at most.

    Raises:
        ValueError: The smallest choices are beyond the budget.
    """
    hulls = {part: _lower_hull(choices) for part, choices in parts.items()}
    place = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].size for hull in hulls.values())
    if left < 0:
        raise ValueError(f"the smallest choices take {budget - left} of a budget of {budget}")
    steps = [(-_gain(hull, 0), part) for part, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, part = heapq.heappop(steps)
        hull, at = hulls[part], place[part]
        size = hull[at + 1].size - hull[at].size
        if size > left:
            continue
        left -= size
        place[part] = at + 1
        if at + 2 < len(hull):
            heapq.heappush(steps, (-_gain(hull, at + 1), part))
    return {part: hull[place[part]] for part, hull in hulls.items()}


def _gain(hull: Sequence[Choice], at: int) -> float:
    """What the next step takes off the loss, per size."""
    return (hull[at].loss - hull[at + 1].loss) / (hull[at + 1].size - hull[at].size)


def _lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that are best for some price of size, smallest first."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.size, choice.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain([hull[-1], choice], 0) >= _gain(hull, len(hull) - 2):
            hull.pop()
        hull.append(choice)
    return hull
