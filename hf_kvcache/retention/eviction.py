"""What a user chooses about eviction, and the layers it makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from ..errors import ConfigError
from ..layer import BlockLayer
from .budget import Amount, Budget, Recent
from .evicting_layer import EvictingLayer
from .policies import POLICIES, make_policy


@dataclass(frozen=True)
class Eviction:
    """Which tokens the full-attention layers of a cache drop, and how many they keep.

    Raises:
        ConfigError: No such policy, or sizes that leave no choice.
    """

    policy: str
    """A name in `hf_kvcache.retention.policies.POLICIES`."""
    budget: Amount
    """See `Budget`."""
    sinks: int = 4
    """Tokens at the beginning of each row, padding aside, that always stay."""
    recent: Recent = 0.5
    """Tokens at the end that always stay, or their share of the budget."""
    per_head: bool = False
    """Let the heads of a layer share what they keep, so that one that looks around keeps more; see `RaggedTable`."""

    def __post_init__(self) -> None:
        policy = make_policy(self.policy)
        if self.per_head and not policy.compares_heads:
            able = ", ".join(name for name, kind in POLICIES.items() if kind.compares_heads)
            raise ConfigError(
                f"scores of {self.policy!r} do not compare tokens of different heads: per_head goes with {able}"
            )

    @property
    def term(self) -> str:
        """See `Retention.term`."""
        return "evicting"

    def layer(self, config: PreTrainedConfig, index: int, history: BlockLayer) -> EvictingLayer:
        """See `Retention.layer`.

        Raises:
            ConfigError: The layer would be encoded, whose tokens cannot be chosen one by one.
        """
        if type(history) is not BlockLayer:
            raise ConfigError(
                f"layer {index}: tokens of a {type(history).__name__} cannot be evicted one by one; evict or encode"
            )
        layer_types, _ = get_layer_types_and_kwargs(config)
        return self._layer(layer_types.count("full_attention"), history.block_size)

    def _layer(self, layers: int, block_size: int) -> EvictingLayer:
        policy, budget = make_policy(self.policy), Budget(self.budget)
        return EvictingLayer(policy, budget, layers, block_size, self.sinks, self.recent, self.per_head)

    def options(self) -> dict[str, Any]:
        """The same as options of a specification."""
        return asdict(self)
