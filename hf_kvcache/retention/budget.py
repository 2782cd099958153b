"""How much of a history may be held."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import ConfigError, InputError
from ..units import parse_bytes

Amount: TypeAlias = float | int | str
"""A float up to 1.0: a share of the tokens seen. An int: tokens. A size such as "64MiB": bytes."""

Recent: TypeAlias = float | int
"""Tokens at the end that always stay. An int: tokens. A float below 1.0: that share of the budget."""


@dataclass(frozen=True)
class Budget:
    """What a layer may hold of each row.

    Args:
        amount: A float up to 1.0: that share of the tokens seen. An int: tokens. A size such as "64MiB": bytes of all
            layers that evict, and of all rows.

    Raises:
        ConfigError: None of these.
    """

    amount: Amount

    def __post_init__(self) -> None:
        amount = self.amount
        if isinstance(amount, str):
            try:
                parse_bytes(amount)
            except InputError as error:
                raise ConfigError(
                    f"a budget is a share of the tokens (0.5), a number of tokens (1024) or a size (64MiB): {error}"
                ) from error
        elif isinstance(amount, float) and not 0.0 < amount <= 1.0:
            raise ConfigError(f"a share of the tokens lies above 0 and goes up to 1.0, got {amount}")

    @property
    def is_everything(self) -> bool:
        """Whether nothing is ever dropped."""
        return isinstance(self.amount, float) and self.amount == 1.0

    @property
    def total_bytes(self) -> int | None:
        """The size, where the budget is one."""
        return parse_bytes(self.amount) if isinstance(self.amount, str) else None

    @property
    def fixed_tokens(self) -> int | None:
        """The tokens, where the budget is a number of tokens."""
        return self.amount if isinstance(self.amount, int) else None

    def tokens(self, seen: int, row_bytes: float, token_bytes: int, block_size: int) -> int:
        """Tokens of each row that a layer may hold.

        Args:
            seen: Tokens of the history.
            row_bytes: The layer's share of a size, for one row.
            token_bytes: Bytes of one token in the layer.
            block_size: Tokens per block.
        """
        if isinstance(self.amount, float):
            return math.ceil(self.amount * seen)
        if isinstance(self.amount, int):
            return self.amount
        # Whole blocks, and room for the token that comes before the next eviction.
        return int(row_bytes // (token_bytes * block_size)) * block_size - 1


def recent_tokens(recent: Recent, allowed: int) -> int:
    """Tokens at the end that always stay, where so many may be held."""
    return recent if isinstance(recent, int) else int(recent * allowed)


def least_tokens(sinks: int, recent: Recent, block_size: int) -> int:
    """The smallest budget that leaves a choice: an eviction goes one block below it, and sinks and recent stay."""
    others = sinks + block_size
    return others + recent if isinstance(recent, int) else math.ceil(others / (1 - recent))
