"""What a user chooses about eviction, and the layers it makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from ..errors import ConfigError
from ..layer import BlockLayer
from .budget import Amount, Budget
from .evicting_layer import EvictingLayer
from .policies import make_policy


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
    recent: int = 64
    """Tokens at the end that always stay."""

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
        return EvictingLayer(make_policy(self.policy), Budget(self.budget), layers, block_size, self.sinks, self.recent)

    def options(self) -> dict[str, Any]:
        """The same as options of a specification."""
        return asdict(self)
