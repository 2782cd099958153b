"""Time several things fairly on one machine: they take turns, step by step, in alternating order.

Whatever slows the machine down for a second (another program, a clock that drops with heat) then hits all of
them alike, and the ratio of two times from one round is steadier than either time.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from hf_kvcache.bench.results import Quartiles, Timing

Step: TypeAlias = Callable[[int], object]
"""Something to time. It gets the number of the round, the same one for all that take turns."""

WARM_UP_ROUNDS = 3


def take_turns(
    steps: Sequence[Step],
    rounds: int,
    device: torch.device,
    *,
    warm_up: int = WARM_UP_ROUNDS,
    advance: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Run every step once a round, first to last, then last to first, and so on.

    Args:
        steps: What to time.
        rounds: Rounds that count.
        device: Waited for before a clock is read.
        warm_up: Rounds before them that do not.
        advance: Called after each round.

    Returns:
        Milliseconds of each step, one number for each round that counts.
    """
    times: list[list[float]] = [[] for _ in steps]
    for number in range(warm_up + rounds):
        order = range(len(steps)) if number % 2 == 0 else reversed(range(len(steps)))
        for place in order:
            _wait(device)
            started = time.perf_counter()
            steps[place](number)
            _wait(device)
            if number >= warm_up:
                times[place].append((time.perf_counter() - started) * 1e3)
        advance()
    return times


def timing(milliseconds: Sequence[float], reference: Sequence[float] | None) -> Timing:
    """Summarize the rounds of one step, and compare them with the reference's, round by round."""
    ratios = (
        None if reference is None else [theirs / ours for ours, theirs in zip(milliseconds, reference, strict=True)]
    )
    return Timing(len(milliseconds), quartiles(milliseconds), None if ratios is None else quartiles(ratios))


def quartiles(values: Sequence[float]) -> Quartiles:
    """The median and the quartiles of `values`."""
    low, median, high = np.quantile(np.asarray(values), [0.25, 0.5, 0.75])
    return Quartiles(float(low), float(median), float(high))


def _wait(device: torch.device) -> None:
    """Wait for what was queued on an accelerator; the CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
