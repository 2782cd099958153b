"""Catches text that is fed at the wrong place.

Feeding a cached prompt again, or a left-padded prompt whose beginning is cached without the padding, is silent and
wrong: the keys land behind history they do not follow. The positions that come with the keys give it away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


class PositionGuard:
    """Remembers the last position of each row and checks that new ones continue from it."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        """Last position of each row, ``[rows or 1]``; None where unknown."""

    def reset(self) -> None:
        """Forget the rows."""
        self.last = None

    def crop(self, tokens: int) -> None:
        """Take `tokens` steps back."""
        if self.last is not None:
            self.last = self.last - tokens

    def select(self, rows: Tensor) -> None:
        """Make row i a copy of old row ``rows[i]``."""
        if self.last is not None and self.last.shape[0] > 1:
            self.last = self.last[rows.to(self.last.device)]

    def check(self, positions: Tensor | None, tokens: int, seen: int) -> None:
        """Check the positions ``[rows or 1, tokens]`` of new tokens against a history of `seen` tokens.

        On a GPU single tokens are only taken note of, since looking at them would make it wait at every step.
        Positions of any other shape (multimodal ones) and none at all are not checked.

        Raises:
            InputError: The positions of a row do not follow its last one.
        """
        if positions is None or positions.ndim != 2 or positions.shape[1] != tokens:
            self.last = None
            return
        if self.last is not None and seen and (tokens > 1 or positions.device.type == "cpu"):
            self._compare(positions, seen)
        self.last = self._after(positions, seen)

    def _after(self, positions: Tensor, seen: int) -> Tensor | None:
        """The last position of each row; a row of a chunk that is padding alone stays where it was."""
        padding = _is_padding(positions)
        if positions.shape[1] == 1 or not bool(padding.any()):
            return positions[:, -1]
        if self.last is None:
            return None if seen else positions[:, -1].masked_fill(padding, -1)
        if self.last.shape[0] not in (1, positions.shape[0]):
            return None
        return torch.where(padding, self.last.to(positions.device), positions[:, -1])

    def _compare(self, positions: Tensor, seen: int) -> None:
        last = self.last
        if last is None or (last.shape[0] != positions.shape[0] and 1 not in (last.shape[0], positions.shape[0])):
            return
        new = positions.cpu()
        # Padding before the new text has a constant position; the text is the rising run at the end of the row.
        steps = new[:, 1:] - new[:, :-1]
        run = (steps == 1).flip(1).long().cumprod(1).sum(1)
        first = new[:, -1] - run
        expected = last.cpu() + 1
        # The last pad (position 0 or 1) may look like the start of the run, and a first token like one more pad.
        fits = (first == expected) | ((first + 1 == expected) & (first <= 1) & (run > 0)) | _is_padding(new)
        fits |= (expected == 0) & (first == 1)
        if not bool(fits.all()):
            row = int(torch.where(~fits)[0][0])
            raise InputError(
                f"row {row}: the cache holds {seen} tokens up to position {int(expected.expand_as(first)[row]) - 1}, "
                f"but the new text starts at position {int(first[row])}. A prompt that is (partly) cached must begin "
                "with exactly what is cached: call `cache.align(input_ids)` before `generate`, pass only the new ids "
                "through `cache.continuation(new_ids)`, or start again with `cache.reset()`"
            )


def _is_padding(positions: Tensor) -> Tensor:
    """Which rows stand still: in a batch that is fed in chunks, a chunk of a short row may be padding alone."""
    return (positions == positions[:, :1]).all(dim=1) & (positions.shape[1] > 1)
