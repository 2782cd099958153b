"""Encoded histories: the layer a quantized cache is made of, its table and its pool."""

from .layer import QuantizedLayer
from .quantization import Quantization
from .table import QuantizedTable

__all__ = ["Quantization", "QuantizedLayer", "QuantizedTable"]
