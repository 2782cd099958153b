"""Sinks and a sliding window on layers whose model attends to everything.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..errors import ConfigError
from ..layer import BlockLayer
from .rotation import find_rotation
from .window_layer import WindowLayer


@dataclass(frozen=True)
class Window:
    """Sinks and a window: what later queries of full-attention layers see.

    Raises:
        ConfigError: A window that is not longer than the sinks.
    """

    term: ClassVar[str] = "window"
    """Its name in a specification."""

    window: int
    """Tokens that a query sees at the end of the history, its own included."""
    sinks: int = 4
    """Tokens that it sees at the beginning."""
    rerotate: bool = False
    """Whether it sees them right in front of the window, wherever that is, instead of ever further back."""

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"sinks is a number of tokens, at least 0, got {self.sinks}")
        if self.window <= self.sinks:
            raise ConfigError(
                f"a window must be longer than the sinks, got {self.window} tokens and {self.sinks} sinks"
            )

    def layer(self, config: PreTrainedConfig, index: int, history: BlockLayer) -> WindowLayer:  # noqa: ARG002
        """The empty layer number `index`, made of the one that would keep everything.

        Raises:
            ConfigError: The sinks shall move along, and cannot in this model; or the layer below reads no handles.
        """
        return WindowLayer(history, self.window, self.sinks, find_rotation(config) if self.rerotate else None)

    def options(self) -> dict[str, Any]:
        """What it was built with, as the options of a specification."""
        return asdict(self)
