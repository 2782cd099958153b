"""Bits by layer, for a model and its texts: `calibrate` prices every layer and spends the bytes where they pay."""

from .allocation import Choice, allocate
from .calibrate import calibrate
from .plan import LayerBits, QuantizationPlan
from .sensitivity import Sensitivity, sensitivities
from .texts import Texts, cut

__all__ = [
    "Choice",
    "LayerBits",
    "QuantizationPlan",
    "Sensitivity",
    "Texts",
    "allocate",
    "calibrate",
    "cut",
    "sensitivities",
]
