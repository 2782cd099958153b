"""The history of an evicting layer whose heads share their budget: each keeps a number of tokens of its own.

A head that looks around needs many tokens, one that looks at its neighbours few. The best tokens of all heads of a row
are kept together, as many as if each head kept the same: AdaKV (Feng et al., arXiv 2407.11550). What is kept is packed,
so that a head that keeps less takes less memory; the tokens behind it, which all heads hold, are in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import materialize, pieces
from ..attention.streaming import Piece, attend_streaming
from ..blocks import BlockPool, BlockTable, Usage
from ..errors import StateError
from .evicted_table import EvictedTable
from .policy import Held
from .ragged import RaggedTokens

# Of what each head would keep if all kept the same, the share that it keeps in any case (the paper's safeguard).
_OWN_SHARE = 0.2


class RaggedTable(EvictedTable):
    """The histories of some rows of one layer; see `EvictedTable`. `blocks` holds the tokens from `tail_begin` on."""

    kept: RaggedTokens | None = None
    """The tokens before `tail_begin` that are held; None as long as nothing was dropped."""
    _kept_tokens = 0

    @property
    def exact_tokens(self) -> int:
        """Tokens of each row that are held, the mean over its heads."""
        return self._kept_tokens + self.blocks.tokens

    def usage(self) -> Usage:
        """See `EvictedTable.usage`."""
        usage = super().usage()
        if self.kept is None:
            return usage
        return usage._replace(
            payload_bytes=usage.payload_bytes + self.kept.nbytes,
            scale_bytes=usage.scale_bytes + self.kept.positions.nbytes,
        )

    def kept_positions(self) -> Int[Tensor, "rows heads kept"]:
        """See `EvictedTable.kept_positions`; 0 where nothing is held."""
        return self.positions if self.kept is None else self.kept.padded(self.kept.positions)

    def states(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `EvictedTable.states`."""
        keys, values = materialize(self.blocks, 0)
        if self.kept is None:
            return keys, values, None
        kept = (self.kept.padded(self.kept.keys), self.kept.padded(self.kept.values), self.kept.absent())
        absent = torch.cat([kept[2], kept[2].new_zeros(*keys.shape[:3])], dim=2)
        return torch.cat([kept[0], keys], dim=2), torch.cat([kept[1], values], dim=2), absent

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """See `EvictedTable.attend`."""
        kept = self.kept
        if kept is None:
            return super().attend(query, mask, scale)
        tail = [
            piece._replace(begin=piece.begin + kept.columns, end=piece.end + kept.columns)
            for piece in pieces(self.blocks, 0)
        ]
        heads = (len(kept.counts[0]), kept.values.shape[1])
        whole = [*tail, Piece(None, 0, kept.columns, kept)]
        return attend_streaming(whole, heads, query, self.columns_of(mask, query.shape[1]), scale)

    def _keep(
        self, held: Held, scores: Float[Tensor, "rows heads candidates"], count: int
    ) -> Callable[[Float[Tensor, "rows heads held"]], Float[Tensor, "rows heads held_after"]]:
        """See `EvictedTable._keep`: as many in all, but shared by the heads of a row."""
        candidates = scores.shape[2]
        absent = torch.zeros_like(scores, dtype=torch.bool)
        if self.kept is not None:
            absent[..., : self.kept.columns] = self.kept.absent()
        chosen = _best_of_all(scores, absent, count)
        rows, heads, _ = scores.shape
        # States without values are asked for their bytes alone, which do not depend on the choice.
        counts = [[count] * heads] * rows if scores.is_meta else chosen.sum(-1).tolist()

        def pack(numbers: Tensor) -> Tensor:
            if numbers.is_meta:
                return numbers.new_empty(rows * heads * count, *numbers.shape[3:])
            return numbers[:, :, :candidates][chosen]

        kept = RaggedTokens(pack(held.keys), pack(held.values), pack(held.positions), counts, max(map(max, counts)))
        self.kept, self._kept_tokens = kept, count
        self.blocks = BlockTable(BlockPool(held.keys, held.values, self.block_size), self.rows, tight=True)
        self.blocks.append(held.keys[:, :, candidates:], held.values[:, :, candidates:])
        return lambda numbers: torch.cat([kept.padded(pack(numbers)), numbers[..., candidates:]], dim=2)

    def select(self, indices: Sequence[int]) -> None:
        """See `EvictedTable.select`."""
        super().select(indices)
        if self.kept is not None:
            self.kept.select(indices)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """See `EvictedTable.tensors`."""
        return super().tensors | ({} if self.kept is None else self.kept.tensors)

    def resume(self, tokens: int, tail_begin: int, scale: float, tensors: Mapping[str, Tensor]) -> None:
        """See `EvictedTable.resume`."""
        super().resume(tokens, tail_begin, scale, tensors)
        if "kept.keys" in tensors:
            self.kept = RaggedTokens.recall(tensors)
            self._kept_tokens = self.kept.tokens

    def check_integrity(self) -> None:
        """See `EvictedTable.check_integrity`."""
        self.blocks.check_integrity()
        if self.blocks.tokens != self.tokens - self.tail_begin:
            raise StateError(f"{self.blocks.tokens} tokens in blocks, {self.tokens - self.tail_begin} behind the kept")
        if self.kept is None:
            return
        self.kept.check_integrity(self.tail_begin)
        if len(self.kept.row_of) != self.rows or self.kept.tokens != self._kept_tokens:
            raise StateError(
                f"{len(self.kept.row_of)} rows of {self.kept.tokens} tokens are packed for {self.rows} rows of "
                f"{self._kept_tokens}"
            )


def _best_of_all(
    scores: Float[Tensor, "rows heads candidates"], absent: Bool[Tensor, "rows heads candidates"], count: int
) -> Bool[Tensor, "rows heads candidates"]:
    """The best candidates of each row, `count` times as many as it has heads; of each head at least its safeguard."""
    rows, heads, candidates = scores.shape
    own = max(int(count * _OWN_SHARE), 1)
    # Padding goes before anything else, but it is there, which absent tokens are not.
    scores = scores.clamp_min(torch.finfo(scores.dtype).min).masked_fill(absent, -torch.inf)
    first = torch.argsort(scores, dim=2, descending=True, stable=True)[..., :own]
    chosen = torch.zeros_like(absent).scatter_(2, first, True)
    others = scores.masked_fill(chosen, -torch.inf).flatten(1)
    rest = torch.argsort(others, dim=1, descending=True, stable=True)[:, : heads * (count - own)]
    return chosen.flatten(1).scatter_(1, rest, True).view(rows, heads, candidates)
