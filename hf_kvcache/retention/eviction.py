"""What a user chooses about eviction, and the layers it makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from ..errors import ConfigError
from ..layer import BlockLayer
from ..quantized import Quantization, QuantizedLayer
from .budget import Amount, Budget, Recent
from .demoting_layer import DemotingLayer
from .evicting_layer import EvictingLayer
from .policies import POLICIES, make_policy


@dataclass(frozen=True)
class Eviction:
    """Which tokens the full-attention layers of a cache drop, or encode where it is quantized, and how many they keep.

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
    pyramid: bool = False
    """Let lower layers keep more than upper ones, as many in all; see `Allowance`."""

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
        """See `Retention.layer`. One that would be encoded encodes what is not kept, instead of dropping it.

        Raises:
            ConfigError: What the two say does not combine.
        """
        evicting = [kind == "full_attention" for kind in get_layer_types_and_kwargs(config)[0]]
        choice: dict[str, Any] = {
            "policy": make_policy(self.policy),
            "budget": Budget(self.budget),
            "layers": sum(evicting),
            "block_size": history.block_size,
            "sinks": self.sinks,
            "recent": self.recent,
            "number": sum(evicting[:index]) if self.pyramid else None,
        }
        if not isinstance(history, QuantizedLayer):
            return EvictingLayer(**choice, per_head=self.per_head)
        if self.per_head:
            raise ConfigError(f"layer {index}: where tokens are encoded, all heads keep equally many: no per_head")
        if (history.sinks, history.recent) != (Quantization.sinks, Quantization.recent):
            raise ConfigError(
                f"layer {index}: {self.term} says which tokens stay exact; leave sinks and recent of "
                f"{Quantization.term} out"
            )
        return DemotingLayer(**choice, codecs=history.codecs)

    def options(self) -> dict[str, Any]:
        """The same as options of a specification."""
        return asdict(self)
