"""What of the history is kept: one file a policy."""

from .choice import Retention
from .sinks import SinkTable
from .window import Window
from .window_layer import WindowLayer

__all__ = ["Retention", "SinkTable", "Window", "WindowLayer"]
