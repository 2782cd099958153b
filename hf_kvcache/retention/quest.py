"""What a user chooses about reading few blocks, and the layers it makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..errors import ConfigError
from ..layer import BlockLayer
from .quest_layer import QuestLayer


@dataclass(frozen=True)
class Quest:
    """Keep every token, read few: see `QuestLayer`.

    Raises:
        ConfigError: No share of the blocks.
    """

    term: ClassVar[str] = "quest"
    """Its name in a specification."""

    budget: float = 0.2
    """The share of the full blocks that a decoded token reads."""

    def __post_init__(self) -> None:
        if not 0.0 < self.budget <= 1.0:
            raise ConfigError(f"a share of the blocks lies above 0 and goes up to 1.0, got {self.budget}")

    def layer(self, config: PreTrainedConfig, index: int, history: BlockLayer) -> BlockLayer:
        """See `Retention.layer`.

        Raises:
            ConfigError: The layer would be encoded.
        """
        del config
        if type(history) is not BlockLayer:
            raise ConfigError(f"layer {index}: blocks of a {type(history).__name__} cannot be read one by one")
        return QuestLayer(self.budget, history.block_size)

    def options(self) -> dict[str, Any]:
        """The same as options of a specification."""
        return asdict(self)
