"""What a benchmark found: plain immutable records, with the unit of every number."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

SCHEMA = "hf-kvcache-bench/1"

Task: TypeAlias = Literal["decode", "prefill", "beams"]
"""One token more, the prompt at once, or one token more for 4 beams together with their reordering."""


@dataclass(frozen=True)
class Quartiles:
    """The middle of several measurements: a quarter of them lies below `low`, a quarter above `high`."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Timing:
    """One step of one cache.

    Attributes:
        rounds: Rounds measured; in each, every cache made one step.
        milliseconds: Of one step.
        speedup: The reference's time divided by this cache's, round by round; above 1 is faster. None where
            the reference was not measured in the same rounds.
    """

    rounds: int
    milliseconds: Quartiles
    speedup: Quartiles | None


@dataclass(frozen=True)
class Held:
    """What a cache held when a measurement ended.

    Attributes:
        tokens: Tokens in its history.
        total_bytes: All tensor storages reachable from the cache, each once and in full.
        formula_bytes: 2 L H_kv d_h b S B: keys and values of that history for every row, nothing else.
        unused_bytes: Allocated room that holds no token, as the cache itself reports it; None if it does not.
    """

    tokens: int
    total_bytes: int
    formula_bytes: int
    unused_bytes: int | None

    @property
    def unused_share(self) -> float | None:
        """Unused bytes as a share of all bytes held, 0 to 1."""
        return None if self.unused_bytes is None or not self.total_bytes else self.unused_bytes / self.total_bytes


@dataclass(frozen=True)
class Measurement:
    """One cache at one task and length.

    Attributes:
        task: What was done.
        context_tokens: Tokens in the history when a decode or beam measurement began; tokens of the prompt for
            a prefill.
        rows: Rows of the batch.
        timing: How long a step took.
        held: What the cache held at the end; None without a cache.
    """

    task: Task
    context_tokens: int
    rows: int
    timing: Timing
    held: Held | None


@dataclass(frozen=True)
class CacheSpeed:
    """All measurements of the cache that the text `spec` names."""

    spec: str
    measurements: tuple[Measurement, ...]

    def find(self, task: Task, context_tokens: int) -> Measurement | None:
        """The measurement of this task at this length, if it was made."""
        wanted = (of for of in self.measurements if (of.task, of.context_tokens) == (task, context_tokens))
        return next(wanted, None)


@dataclass(frozen=True)
class BenchResults:
    """One benchmark.

    Attributes:
        model: Name of the model.
        dtype: Of weights, keys and values.
        filling: How histories came about before the clock started: `random states` or `prefill`.
        token_bytes: Keys and values of one token, all layers, one row: 2 L H_kv d_h b.
        seed: Of token ids, states and beam choices.
        caches: The reference first, then the others as asked for.
        environment: Versions, hardware and git state.
        seconds: Wall time.
    """

    model: str
    dtype: str
    filling: str
    token_bytes: int
    seed: int
    caches: tuple[CacheSpeed, ...]
    environment: dict[str, Any]
    seconds: float

    def bits_per_number(self, held: Held) -> float:
        """Bits that a cache takes for each number of the keys and values of its history, all in."""
        dtype_bytes: int = getattr(torch, self.dtype).itemsize
        return 8 * dtype_bytes * held.total_bytes / held.formula_bytes

    def lengths(self, task: Task) -> tuple[int, ...]:
        """The lengths this task was measured at, ascending."""
        found = {of.context_tokens for cache in self.caches for of in cache.measurements if of.task == task}
        return tuple(sorted(found))
