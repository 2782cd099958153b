"""The history of an evicting layer: the tokens that were kept, in blocks without holes, and where they came from.

Each head of each row keeps tokens of its own choice, all heads equally many. So token j of a block is another token of
the text in every head, and a table of blocks stores, shares, reads and moves them like any other history: dropping a
token gives its bytes back. `positions` says which token it is. Keys are cached after their rotary embedding, which
therefore stays right, and a mask over the whole history is read at these positions.

Everything from `tail_begin` on is held without a gap. A step back as far as there needs nothing that was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import attend, attend_summing, materialize
from ..blocks import BlockPool, BlockTable, Usage
from ..errors import StateError
from .allowance import Allowance
from .policy import Held, Policy
from .queries import RecentQueries
from .received import ReceivedAttention

POSITION_DTYPE = torch.int32


class EvictedTable:
    """The histories of some rows of one layer.

    Args:
        keys: A sample ``[rows, heads, any, key_width]`` that gives rows, heads, widths, dtype and device.
        values: The same for the values.
        policy: What decides who stays.
        allowance: How many tokens of each row may be held, and how many always stay.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        policy: Policy,
        allowance: Allowance,
    ) -> None:
        self.policy = policy
        self.allowance = allowance
        self.block_size = allowance.block_size
        self.tokens = 0
        """Tokens seen."""
        self.blocks = BlockTable(BlockPool(keys, values, self.block_size), keys.shape[0], tight=True)
        """The tokens held, in order of their positions."""
        self.positions: Int[Tensor, "rows heads kept"] = keys.new_empty(*keys.shape[:2], 0, dtype=POSITION_DTYPE)
        """Places in the history of the first tokens held. Those behind follow without a gap, from `tail_begin` on."""
        self.tail_begin = 0
        self.visible: Bool[Tensor, "any_rows seen"] | None = None
        """Which tokens are no padding, as the last mask said, for one or all rows; None if there was none."""
        self.queries = RecentQueries(policy.queries)
        self.received = ReceivedAttention() if policy.wants_attention else None
        self.scale = 1.0

    # ------------------------------------------------------------------------------------------------- telling

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.blocks.rows

    @property
    def first_token(self) -> int:
        """Position of the oldest token held, which is a sink where there are any: 0."""
        return 0

    @property
    def exact_tokens(self) -> int:
        """Tokens of each head and row that are held as they came."""
        return self.blocks.tokens

    @property
    def tokens_held(self) -> int:
        """Tokens of each head and row that are held."""
        return self.exact_tokens

    @property
    def raw_pool(self) -> BlockPool:
        """Where the tokens are."""
        return self.blocks.pool

    @property
    def is_due(self) -> bool:
        """Whether more is held as it came than may be."""
        return self.exact_tokens > self.allowance.tokens(self.tokens)

    def usage(self) -> Usage:
        """Bytes held now. Positions, queries and padding count as scales: what reading and choosing need besides."""
        besides = self.positions.nbytes + self.queries.nbytes + (0 if self.visible is None else self.visible.nbytes)
        besides += 0 if self.received is None else self.received.nbytes
        return self.blocks.usage()._replace(scale_bytes=besides)

    def kept_positions(self) -> Int[Tensor, "rows heads kept"]:
        """Places in the history of the columns before those from `tail_begin` on."""
        return self.positions

    def read_positions(self) -> Int[Tensor, "rows heads read"]:
        """The same for all columns that attention reads, if it reads more."""
        return self.kept_positions()

    def slot_positions(self) -> Int[Tensor, "rows heads columns"]:
        """The place in the history of every column."""
        kept = self.kept_positions()
        tail = torch.arange(self.tail_begin, self.tokens, dtype=POSITION_DTYPE, device=kept.device)
        return torch.cat([kept, tail.expand(*kept.shape[:2], -1)], dim=2)

    # ------------------------------------------------------------------------------------------------- writing

    def resume(self, tokens: int, tail_begin: int, scale: float, tensors: Mapping[str, Tensor]) -> None:
        """Go on with a history whose blocks have been put into `blocks`; see `tensors`."""
        self.tokens, self.tail_begin, self.scale = tokens, tail_begin, scale
        self.positions = tensors["positions"]
        self.visible = tensors.get("visible")
        if "queries" in tensors:
            self.queries.recall(tensors["queries"], tokens)
        if self.received is not None:
            self.received.recall(tensors, tokens)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is held besides the blocks, for `resume`."""
        found = {"positions": self.positions, "visible": self.visible, "queries": self.queries.last()}
        if self.received is not None:
            found |= self.received.tensors
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def append(
        self,
        keys: Float[Tensor, "rows key_heads tokens key_width"],
        values: Float[Tensor, "rows value_heads tokens value_width"],
    ) -> None:
        """Write the states of new tokens."""
        self.blocks.append(keys, values)
        self.tokens += keys.shape[2]

    def observe(
        self,
        query: Float[Tensor, "rows query_heads queries width"],
        visible: Bool[Tensor, "any_rows seen"] | None,
        scale: float,
        forget: bool,
    ) -> None:
        """Take note of the queries of the newest tokens, before they attend.

        Args:
            query: The queries.
            visible: Which tokens of the history the last of them may look at; None for all.
            scale: Factor on the products of queries and keys.
            forget: Whether no step back is to come.
        """
        self.visible = visible
        self.scale = scale
        self.queries.add(query, self.tokens, forget)
        if self.received is not None:
            self.received.add(query, self.tokens)
            if forget and self.received.is_full_with(query.shape[2]):
                self.received.settle(self._held(None))

    @property
    def knows_queries(self) -> bool:
        """Whether the policy has seen the queries it looks at, up to those of the newest token."""
        seen = self.queries if self.received is None else self.received
        return not self.policy.needs_queries or seen.end == self.tokens

    def drop_before(self, token: int) -> None:  # noqa: ARG002 - every token may still be seen
        """Called when nothing that was dropped can be asked for again: evict what the budget does not allow."""
        if self.is_due and self.knows_queries:
            self.evict()

    def evict(self) -> None:
        """Drop the tokens with the lowest scores, down to one block below the limit.

        Raises:
            StateError: Keys and values have different numbers of heads, so that they cannot be chosen head by head.
        """
        target = self.allowance.tokens(self.tokens) - self.block_size
        begin = max(self.tokens - self.allowance.recent_tokens(self.tokens), self.tail_begin)
        recent = self.tokens - begin
        candidates = self.exact_tokens - recent
        count = self._kept_of(candidates, target - recent)
        if count >= candidates:
            return
        held = self._held(self.queries.last())
        if held.keys.shape[1] != held.values.shape[1]:
            raise StateError(
                f"{held.keys.shape[1]} heads of keys and {held.values.shape[1]} heads of values cannot be evicted head "
                "by head: use another cache for this model"
            )
        scores = self._scores(held)[..., : held.positions.shape[2] - recent]
        arranged = self._keep(held, scores, count)
        if self.received is not None:
            self.received.rearrange(arranged)
        self.tail_begin = begin

    def _kept_of(self, candidates: int, count: int) -> int:  # noqa: ARG002 - for those that cannot drop any number
        """How many of the candidates are kept, where the limit asks for `count`."""
        return count

    def _keep(
        self, held: Held, scores: Float[Tensor, "rows heads candidates"], count: int
    ) -> Callable[[Float[Tensor, "rows heads held"]], Float[Tensor, "rows heads held_after"]]:
        """Store anew the `count` best candidates of each head, and all tokens behind the candidates.

        Returns:
            What brings numbers of the tokens held to the places where these are now.
        """
        candidates = scores.shape[2]
        order = torch.argsort(scores, dim=-1, descending=True, stable=True)
        kept = order[..., :count].sort(dim=-1).values
        self._let_go(held, order[..., count:])
        self.positions = held.positions.gather(2, kept)
        self.blocks = BlockTable(BlockPool(held.keys, held.values, self.block_size), self.rows, tight=True)
        self.blocks.append(_chosen(held.keys, kept, candidates), _chosen(held.values, kept, candidates))
        return lambda numbers: torch.cat([numbers.gather(2, kept), numbers[..., candidates:]], dim=2)

    def _let_go(self, held: Held, going: Int[Tensor, "rows heads going"]) -> None:
        """Called with the columns of `held` that are not kept, the best first, before the others are stored anew."""

    def _scores(self, held: Held) -> Float[Tensor, "rows heads held"]:
        """The policy's scores; sinks above all others, padding below."""
        if self.received is not None:
            held = held._replace(attention=self.received.settle(held))
        visible = self._visible()
        first = 0 if visible is None else visible.int().argmax(1)[:, None, None]
        scores = self.policy.scores(held).masked_fill(held.positions < first + self.allowance.sinks, torch.inf)
        return scores if held.hidden is None else scores.masked_fill(held.hidden, -torch.inf)

    def _held(self, queries: Tensor | None) -> Held:
        """What is held, and what is known of it."""
        keys, values, hidden = self.states()
        positions, visible, query_hidden = self.slot_positions(), self._visible(), None
        if visible is not None:
            padding = ~visible[:, None].expand(-1, positions.shape[1], -1).gather(2, positions.long())
            hidden = padding if hidden is None else hidden | padding
            query_hidden = None if queries is None else ~visible[:, -queries.shape[2] :]
        return Held(keys, values, positions, hidden, queries, query_hidden, self.scale, None)

    def _visible(self) -> Bool[Tensor, "rows seen"] | None:
        """Which tokens seen are no padding; None where none is."""
        if self.visible is None or bool(self.visible.all()):
            return None
        unseen = self.visible.new_ones(self.visible.shape[0], self.tokens - self.visible.shape[1])
        return torch.cat([self.visible, unseen], dim=1).expand(self.rows, -1)

    # ------------------------------------------------------------------------------------------------- reading

    def states(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copies of keys and values ``[rows, heads, columns, width]``; which columns hold nothing, or None for none."""
        return *materialize(self.blocks, 0), None

    def materialize(self, first_token: int) -> tuple[Tensor, Tensor]:
        """Contiguous copies of the keys and values from position `first_token` on, where all tokens are held."""
        return materialize(self.blocks, first_token)

    def attend(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> Float[Tensor, "rows query_heads queries value_width"]:
        """Attention of `query` over what is held; a mask is over all tokens seen. See `hf_kvcache.attention.attend`."""
        return attend(self.blocks, 0, query, self.columns_of(mask, query.shape[1]), scale)

    def attend_receiving(
        self,
        query: Float[Tensor, "rows query_heads queries key_width"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
        scale: float,
    ) -> Float[Tensor, "rows query_heads queries value_width"] | None:
        """The same for many queries, of which the policy wants to know what tokens receive; None for others."""
        if self.received is None or not self.received.awaits(query.shape[2]):
            return None
        keys, values, absent = self.states()
        visible, columns = self._visible(), self.columns_of(mask, query.shape[1])
        if columns is not None:
            columns = columns.view(*([1] * (4 - columns.ndim)), *columns.shape)
        padding = None if visible is None else ~visible[:, -query.shape[2] :]
        output, sums = attend_summing(query, keys, values, columns, scale, absent, padding)
        self.received.take(sums)
        return output

    def columns_of(self, mask: Tensor | None, query_heads: int) -> Tensor | None:
        """The columns of a mask ``[..., queries, seen]`` that belong to what is held, ``[..., queries, columns]``."""
        positions = self.read_positions()
        kept = positions.shape[2]
        if mask is None or mask.shape[-1] == 1 or not kept:
            return mask
        mask = mask.view(*([1] * (4 - mask.ndim)), *mask.shape)
        tail, past = mask[..., self.tail_begin :], mask[..., : self.tail_begin]
        if mask.dtype == torch.bool and mask.shape[-2] > 1 and bool(past.all()):
            # Without padding: reading the mask once is much cheaper than choosing from it for every query.
            return torch.cat([tail.new_ones(*tail.shape[:-1], kept), tail], dim=-1)
        chosen = positions.long().repeat_interleave(query_heads // positions.shape[1], dim=1)
        past = past.expand(self.rows, query_heads, -1, -1)
        columns = past.gather(3, chosen[:, :, None].expand(-1, -1, past.shape[2], -1))
        return torch.cat([columns, tail.expand(*columns.shape[:3], -1)], dim=-1)

    # ------------------------------------------------------------------------------------------------- changing

    def select(self, indices: Sequence[int]) -> None:
        """Make row i a copy of old row ``indices[i]``; blocks are shared."""
        self.blocks.select(indices)
        rows = list(indices)
        self.positions = self.positions[rows]
        if self.visible is not None and self.visible.shape[0] > 1:
            self.visible = self.visible[rows]
        self.queries.select(rows)
        if self.received is not None:
            self.received.select(rows)

    def truncate(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens, of which none behind `tail_begin` was dropped."""
        if not self.tail_begin <= tokens <= self.tokens:
            raise StateError(f"cannot truncate to {tokens} tokens: {self.tail_begin} to {self.tokens} are held")
        self.blocks.truncate(self.blocks.tokens - (self.tokens - tokens))
        self.queries.truncate(tokens)
        if self.received is not None:
            self.received.truncate(tokens)
        if self.visible is not None:
            self.visible = self.visible[:, :tokens]
        self.tokens = tokens

    def skip(self, blocks: int) -> None:
        """Nothing: every token of a full-attention layer is seen by later queries."""
        if blocks:
            raise StateError("an evicted history cannot begin behind its first token")

    def check_integrity(self) -> None:
        """Raise StateError unless blocks, positions and lengths agree."""
        self.blocks.check_integrity()
        rows, heads, kept = self.positions.shape
        if (rows, heads) != (self.rows, self.raw_pool.keys.shape[0]):
            raise StateError(f"positions of {rows} rows and {heads} heads in a table of {self.rows} rows")
        if kept + self.tokens - self.tail_begin != self.exact_tokens:
            tail = self.tokens - self.tail_begin
            raise StateError(f"{self.exact_tokens} tokens are held, but {kept} kept ones and {tail} behind them")
        if kept and not self.positions.is_meta:
            rising = bool((self.positions.diff(dim=2) > 0).all())
            if not rising or int(self.positions.min()) < 0 or int(self.positions.max()) >= self.tail_begin:
                raise StateError(f"kept positions are not in order or reach behind {self.tail_begin}")


def _chosen(states: Tensor, kept: Tensor, candidates: int) -> Tensor:
    """Of the first `candidates` tokens those that were kept, and all others."""
    chosen = states.gather(2, kept[..., None].expand(-1, -1, -1, states.shape[3]))
    return torch.cat([chosen, states[:, :, candidates:]], dim=2)
