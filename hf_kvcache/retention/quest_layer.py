"""The history of one attention layer, of which a decoded token reads the blocks that may matter most."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import attend, attend_states, materialize, matmul, read_states
from ..errors import StateError
from ..exactness import Exactness
from ..layer import BlockLayer
from .band import visible
from .quest_table import QuestTable

# How far from the middle of a block's keys to the bound of their products its best key is taken to be. On SmolLM2-135M
# 0.25 to 0.5 choose equally well among blocks of 4 tokens; the bound itself, 1, worse (docs/eviction.md).
_TO_BOUND = 0.35


class QuestLayer(BlockLayer):
    """Keys and values of one full-attention layer; all are held, few are read.

    With the least and largest number of each channel of a block's keys, their middle m and half their difference h, the
    product of a query with any key of the block is at most ``sum over channels of q * m + |q| * h`` (Tang et al.,
    "Quest", arXiv 2406.10774). A key that attained it would be extreme in all channels at once, so blocks are ranked by
    ``q * m + 0.35 |q| * h``. Each key head reads the blocks with the largest softmax of these scores, the mean over its
    query heads, the newest full block and the open one. Several tokens at once, a prompt or a draft, read everything.

    Args:
        budget: The share of the full blocks that a decoded token reads, above 0 and up to 1.0.
        block_size: Tokens per block.
    """

    def __init__(self, budget: float, block_size: int) -> None:
        super().__init__(block_size)
        self.budget = budget

    @property
    def exactness(self) -> Exactness:
        """Its own claim: see `BlockLayer.exactness`."""
        if self.budget == 1.0:
            return super().exactness
        return Exactness("approximate", f"decoded tokens do not read every block: {self.storage()}")

    def new_table(self, key_states: Tensor, value_states: Tensor) -> QuestTable:
        """An empty history for states like these samples ``[rows, heads, any, width]``."""
        return QuestTable(key_states, value_states, self.block_size)

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
        first_token: int,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention of `query` over the blocks chosen; see `hf_kvcache.attention.attend`."""
        table = self._quest_table()
        count = math.ceil(self.budget * table.full_blocks)
        if query.shape[2] > 1 or count >= table.full_blocks:
            return attend(table.blocks, first_token, query, mask, scale)
        if mask is not None:
            mask = mask.view(*([1] * (4 - mask.ndim)), *mask.shape).expand(table.rows, -1, -1, table.tokens)
        heads = table.raw_pool.keys.shape[0]
        chosen = self._choose(query.unflatten(1, (heads, -1))[:, :, :, 0], mask, scale, count)
        keys, values = self._gather(chosen)
        if mask is not None:
            mask = self._columns(mask.expand(-1, query.shape[1], -1, -1), chosen)
        return attend_states(query, keys, values, mask, scale)

    def _choose(
        self,
        query: Float[Tensor, "rows heads groups width"],
        mask: Bool[Tensor, "rows any_heads 1 tokens"] | Float[Tensor, "rows any_heads 1 tokens"] | None,
        scale: float,
        count: int,
    ) -> Int[Tensor, "rows heads chosen"]:
        """Columns of the table that each head reads, in order."""
        table = self._quest_table()
        full = table.full_blocks
        query = query.to(matmul.product_dtype(query.dtype, query.device))
        spread = query.abs() * _TO_BOUND
        # The scores: q m + a |q| h = low (q - a |q|) / 2 + high (q + a |q|) / 2.
        ends = zip((query - spread, query + spread), read_states(table.bounds, 0), strict=True)
        low, high = (torch.stack(list(map(matmul.scores, end, bounds))) for end, bounds in ends)
        scores = (low + high).float().mul_(scale / 2)
        if mask is not None:
            seen = visible(mask[..., : full * self.block_size]).unflatten(3, (full, -1)).any(-1)
            by_head = seen.unflatten(1, (query.shape[1], -1)) if seen.shape[1] > 1 else seen[:, None]
            scores.masked_fill_(~by_head[:, :, :, 0], -torch.inf)
        shares = torch.softmax(scores, dim=-1).nan_to_num_(nan=0.0).mean(2)
        shares[..., -1] = torch.inf
        chosen = shares.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
        if table.tokens % self.block_size:
            chosen = torch.cat([chosen, chosen.new_full((*chosen.shape[:2], 1), full)], dim=2)
        return chosen

    def _gather(self, chosen: Int[Tensor, "rows heads chosen"]) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of these columns, ``[rows, heads, tokens, width]``."""
        table = self._quest_table()
        rows, heads, columns = chosen.shape
        blocks = table.block_numbers()[:, None].expand(-1, heads, -1).gather(2, chosen)
        tokens = columns * self.block_size - -table.tokens % self.block_size
        copies = []
        for arena in table.raw_pool.arenas:
            # Whole blocks as rows of one matrix: twice as fast as an index of heads and blocks.
            paged = arena.view(-1, self.block_size * arena.shape[2])
            first = torch.arange(0, paged.shape[0], paged.shape[0] // heads, device=chosen.device)[:, None]
            copy = paged.index_select(0, (blocks + first).flatten())
            copies.append(copy.view(rows, heads, -1, arena.shape[2])[:, :, :tokens])
        return copies[0], copies[1]

    def _columns(self, mask: Tensor, chosen: Int[Tensor, "rows heads chosen"]) -> Tensor:
        """The columns of a mask ``[rows, query_heads, 1, tokens]`` of the tokens in these blocks."""
        table = self._quest_table()
        inside = torch.arange(self.block_size, device=chosen.device)
        tokens = (chosen[..., None] * self.block_size + inside).flatten(2)
        tokens = tokens[..., : tokens.shape[2] - -table.tokens % self.block_size]
        return mask.gather(3, tokens.repeat_interleave(mask.shape[1] // chosen.shape[1], dim=1)[:, :, None])

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of all keys and values from position `first_token` on."""
        return materialize(self._quest_table().blocks, first_token)

    def _quest_table(self) -> QuestTable:
        table = self._table()
        if not isinstance(table, QuestTable):
            raise StateError(f"a layer that chooses blocks cannot read a {type(table).__name__}")
        return table

    def storage(self) -> str:
        """How its tokens are kept, in words."""
        return f"all kept, {self.budget:.0%} of the blocks of {self.block_size} tokens read by a decoded token"
