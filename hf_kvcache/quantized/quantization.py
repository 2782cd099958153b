"""What a user chooses about encoding, and the layer it makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..codecs import make_codecs
from .layer import QuantizedLayer


@dataclass(frozen=True)
class Quantization:
    """How the full-attention layers of a cache are encoded.

    Raises:
        ConfigError: Bits, codec or sizes that do not exist.
    """

    term: ClassVar[str] = "quantized"
    """Its name in a specification."""

    key_bits: int
    """Nominal bits per number of the keys."""
    value_bits: int
    """Nominal bits per number of the values."""
    codec: str = "auto"
    """A name in `hf_kvcache.codecs.CODECS`, or "auto", the best measured at these bits."""
    sinks: int = 4
    """Tokens at the beginning that stay exact."""
    recent: int = 128
    """Tokens at the end that stay exact, at least."""

    def __post_init__(self) -> None:
        self.layer(0, 64)

    def layer(self, index: int, block_size: int) -> QuantizedLayer:  # noqa: ARG002
        """The empty history of layer `index`."""
        codecs = make_codecs(self.codec, self.key_bits, self.value_bits)
        return QuantizedLayer(codecs, block_size, self.sinks, self.recent)

    def options(self) -> dict[str, Any]:
        """What it was built with, as the options of a specification."""
        return asdict(self)
