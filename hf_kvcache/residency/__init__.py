"""Where the history lies: on the device, in host memory, on disk."""

from .placement import Placement, Traffic
from .residency import Residency

__all__ = ["Placement", "Residency", "Traffic"]
