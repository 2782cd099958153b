"""Tokens of which each head of each row holds a number of its own, packed without gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import matmul
from ..errors import StateError


class RaggedTokens:
    """Keys, values and positions, head after head and row after row; never changed, only replaced.

    Seen from outside, heads are equally long: ``[rows, heads, columns]``, each head's tokens at the end, and *absent*
    ones before them. It is a `Source` of `hf_kvcache.attention.streaming`: absent tokens score minus infinity.

    Args:
        keys: ``[held, width]``, what all heads of all rows hold.
        values: The same for the values.
        positions: Places in the history.
        counts: How many of them each head holds, by row.
        columns: At least the most of them.
    """

    def __init__(
        self,
        keys: Float[Tensor, "held key_width"],
        values: Float[Tensor, "held value_width"],
        positions: Int[Tensor, " held"],
        counts: list[list[int]],
        columns: int,
    ) -> None:
        self.keys = keys
        self.values = values
        self.positions = positions
        self.counts = counts
        self.columns = columns
        self.row_of = list(range(len(counts)))
        """Which stored row each row of the batch reads: rows that were repeated or reordered share."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def tokens(self) -> int:
        """Tokens of each row, the mean over its heads, which is a whole number and the same for all rows."""
        return sum(self.counts[0]) // len(self.counts[0])

    def padded(self, packed: Tensor) -> Tensor:
        """What is stored for each token, ``[held, ...]``, as ``[rows, heads, columns, ...]``; zeros for absent ones."""
        absent = self.absent()
        whole = packed.new_zeros(*absent.shape, *packed.shape[1:])
        for row, stored in enumerate(self.row_of):
            for head, span in enumerate(self._spans(stored)):
                whole[row, head, self.columns - (span.stop - span.start) :] = packed[span]
        return whole

    def absent(self) -> Bool[Tensor, "rows heads columns"]:
        """Which columns of each head hold nothing."""
        counts = torch.tensor([self.counts[row] for row in self.row_of], device=self.keys.device)
        return torch.arange(self.columns, device=self.keys.device) < self.columns - counts[..., None]

    def select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of old row ``rows[i]``; what no row reads any more is given back."""
        self.row_of = [self.row_of[row] for row in rows]
        read = sorted(set(self.row_of))
        if len(read) == len(self.counts):
            return
        spans = [slice(self._spans(row)[0].start, self._spans(row)[-1].stop) for row in read]
        self.keys, self.values, self.positions = (
            torch.cat([packed[span] for span in spans]) for packed in (self.keys, self.values, self.positions)
        )
        self.counts = [self.counts[row] for row in read]
        self.row_of = [read.index(row) for row in self.row_of]

    # --------------------------------------------------------------------------------------------------- attention

    def scores(self, query: Float[Tensor, "heads queries width"]) -> Float[Tensor, "heads queries tokens"]:
        """Unscaled products with the queries of all rows, row by row."""
        scores = query.new_full((*query.shape[:2], self.columns), -torch.inf)
        for head, span, queries in self._reads(query.shape[1]):
            if span.stop > span.start:
                begin = self.columns - (span.stop - span.start)
                scores[head, queries, begin:] = matmul.scores(query[head, queries][None], self.keys[span][None])[0]
        return scores

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        """Sums of the values, weighted by each query's row; products are computed in `dtype`."""
        sums = weights.new_zeros(*weights.shape[:2], self.values.shape[1], dtype=dtype)
        for head, span, queries in self._reads(weights.shape[1]):
            if span.stop > span.start:
                part = weights[head, queries, self.columns - (span.stop - span.start) :].to(dtype)
                sums[head, queries] = matmul.weighted_sum(part[None], self.values[span][None])[0]
        return sums

    def _reads(self, queries: int) -> list[tuple[int, slice, slice]]:
        """(head, tokens it holds, its queries) for each head of each row."""
        each = queries // len(self.row_of)
        return [
            (head, span, slice(row * each, (row + 1) * each))
            for row, stored in enumerate(self.row_of)
            for head, span in enumerate(self._spans(stored))
        ]

    def _spans(self, stored: int) -> list[slice]:
        """Where the tokens of each head of a stored row are."""
        begin = sum(sum(counts) for counts in self.counts[:stored])
        ends = list(accumulate(self.counts[stored], initial=begin))
        return [slice(first, end) for first, end in pairwise(ends)]

    # --------------------------------------------------------------------------------------------------- storing

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is held, for `recall`."""
        return {
            "kept.keys": self.keys,
            "kept.values": self.values,
            "kept.positions": self.positions,
            "kept.counts": torch.tensor(self.counts),
            "kept.rows": torch.tensor([*self.row_of, self.columns]),
        }

    @classmethod
    def recall(cls, tensors: Mapping[str, Tensor]) -> RaggedTokens:
        """What another one held."""
        *row_of, columns = tensors["kept.rows"].tolist()
        keys, values, positions = (tensors[f"kept.{name}"] for name in ("keys", "values", "positions"))
        tokens = cls(keys, values, positions, tensors["kept.counts"].tolist(), columns)
        tokens.row_of = row_of
        return tokens

    def check_integrity(self, end: int) -> None:
        """Raise StateError unless counts, states and positions, which lie before `end`, agree."""
        held = sum(map(sum, self.counts))
        if {len(packed) for packed in (self.keys, self.values, self.positions)} != {held}:
            raise StateError(f"{len(self.keys)} tokens are packed, but {held} were counted")
        if len({sum(counts) for counts in self.counts}) != 1 or sum(self.counts[0]) % len(self.counts[0]):
            raise StateError(f"rows hold different numbers of tokens: {self.counts}")
        if sorted(set(self.row_of)) != list(range(len(self.counts))):
            raise StateError(f"rows {self.row_of} read {len(self.counts)} stored ones")
        for stored in range(len(self.counts)):
            for span in self._spans(stored):
                positions = self.positions[span]
                if len(positions) > self.columns or bool((positions.diff() <= 0).any()):
                    raise StateError("kept positions are not in order, or more than there are columns")
                if len(positions) and not 0 <= int(positions[0]) <= int(positions[-1]) < end:
                    raise StateError(f"kept positions reach behind {end}")
