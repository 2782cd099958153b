"""What a cache can know of the text it holds: the token ids it was told."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from .errors import InputError


class TokenRecord:
    """Token ids of the beginning of every row, on the CPU."""

    def __init__(self) -> None:
        self._ids: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows known; 0 if nothing is."""
        return 0 if self._ids is None else self._ids.shape[0]

    def known(self, tokens: int) -> Tensor | None:
        """The ids known of a history of `tokens` tokens, ``[rows or 1, known tokens]``."""
        return None if self._ids is None else self._ids[:, :tokens]

    def reset(self) -> None:
        """Know nothing."""
        self._ids = None

    def remember(self, token_ids: Int[Tensor, "rows tokens"], rows: int, tokens: int) -> None:
        """Note the text of a history of `rows` rows and `tokens` tokens."""
        if token_ids.shape[0] != rows:
            raise InputError(f"the cache holds {max(rows, 0)} rows, but token ids of {token_ids.shape[0]} came")
        self._ids = token_ids[:, :tokens].cpu()

    def expect(self, token_ids: Int[Tensor, "rows tokens"]) -> None:
        """Note the text that is about to be stored."""
        self._ids = token_ids.cpu()

    def truncate(self, tokens: int) -> None:
        """Forget what follows the first `tokens` tokens."""
        if self._ids is not None:
            self._ids = self._ids[:, :tokens]

    def select(self, rows: Tensor) -> None:
        """Make row i a copy of old row ``rows[i]``."""
        if self._ids is not None:
            self._ids = self._ids[rows] if self._ids.shape[0] > 1 else self._ids.expand(len(rows), -1)

    def common_prefix(self, token_ids: Int[Tensor, "rows tokens"]) -> int:
        """Tokens at the beginning in which every row agrees with what is known (one known row stands for all)."""
        if self._ids is None:
            return 0
        length = min(self._ids.shape[1], token_ids.shape[1])
        equal = self._ids[:, :length] == token_ids[:, :length].cpu()
        return int(equal.all(dim=0).long().cumprod(0).sum())
