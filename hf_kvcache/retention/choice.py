"""What a cache needs of a choice of the tokens that are kept or read."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedConfig

from ..layer import BlockLayer


@runtime_checkable
class Retention(Protocol):
    """How full-attention layers drop tokens, or leave them unread."""

    @property
    def term(self) -> str:
        """Its name in a specification."""

    def layer(self, config: PreTrainedConfig, index: int, history: BlockLayer) -> BlockLayer:
        """The empty layer number `index`, made of the one that would keep everything."""

    def options(self) -> dict[str, Any]:
        """What it was built with, as the options of a specification."""
