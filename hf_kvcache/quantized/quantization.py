"""What a user chooses about encoding, and the layer it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from ..codecs import make_codecs
from ..errors import ConfigError
from .layer import QuantizedLayer
from .protection import Protection


@dataclass(frozen=True)
class Quantization:
    """How the full-attention layers of a cache are encoded.

    Raises:
        ConfigError: Bits, codec, sizes or layers that do not exist.
    """

    term: ClassVar[str] = "quantized"
    """Its name in a specification."""

    key_bits: int
    """Nominal bits per number of the keys."""
    value_bits: int
    """Nominal bits per number of the values."""
    codec: str = "auto"
    """A name in `hf_kvcache.codecs.CODECS`, or "auto", the best measured at these bits. With "auto" the keys of a layer
    whose scores would be off by far more than is usual at these bits keep 8 bits."""
    sinks: int = 4
    """Tokens at the beginning that stay exact."""
    recent: int = 128
    """Tokens at the end that stay exact, at least."""
    layers: str = ""
    """What differs in some layers: ``0:key_bits=8&value_bits=8;3-5:recent=256``."""

    def __post_init__(self) -> None:
        for index in (-1, *self._differing()):
            self.layer(index, 64)

    def check_layers(self, count: int) -> None:
        """Raise ConfigError if `layers` names one that a model of so many layers does not have."""
        beyond = [index for index in self._differing() if index >= count]
        if beyond:
            raise ConfigError(f"layers={self.layers!r} names layer {beyond[0]}, but the model has {count}")

    def layer(self, index: int, block_size: int) -> QuantizedLayer:
        """The empty history of layer `index`."""
        own = replace(self, layers="", **self._differing().get(index, {})) if self.layers else self
        codecs = make_codecs(own.codec, own.key_bits, own.value_bits)
        protection = None
        if own.codec.partition("/")[0] == "auto" and own.key_bits < _PROTECTED_BITS:
            stronger, _ = make_codecs("auto", _PROTECTED_BITS, _PROTECTED_BITS)
            protection = Protection(stronger, _MOST_NATS / 2**own.key_bits)
        return QuantizedLayer(codecs, block_size, own.sinks, own.recent, protection)

    def options(self) -> dict[str, Any]:
        """What it was built with, as the options of a specification."""
        return {**asdict(self), "layers": self.layers or None}

    def _differing(self) -> dict[int, dict[str, Any]]:
        """The fields that differ, by layer."""
        return parse_layers(self.layers, {field.name: field.type for field in fields(self) if field.name != "layers"})


# Scores may be off by about three times what is usual: half a nat at 4 bits, one at 3, two at 2.
_MOST_NATS = 8.0
_PROTECTED_BITS = 8


def parse_layers(text: str, known: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What differs, by layer, from ``0:key_bits=8&value_bits=8;3-5:recent=256``.

    Args:
        text: One entry for some layers, or several separated by ";".
        known: The type of each field there is, by name.

    Raises:
        ConfigError: It does not parse, or names a field that does not exist.
    """
    chosen: dict[int, dict[str, Any]] = {}
    for entry in filter(None, text.split(";")):
        span, _, assignments = entry.partition(":")
        first, _, last = span.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or not assignments:
            raise ConfigError(f"layers={text!r}: expected layers:name=value, as in 3-5:key_bits=8, got {entry!r}")
        values: dict[str, Any] = {}
        for assignment in assignments.split("&"):
            name, _, value = assignment.partition("=")
            if name not in known:
                raise ConfigError(f"layers={text!r}: {name!r} cannot differ by layer; known: {', '.join(known)}")
            if known[name] == "int" and not value.isdigit():
                raise ConfigError(f"layers={text!r}: {name} is a whole number, got {value!r}")
            values[name] = int(value) if known[name] == "int" else value
        for index in range(int(first), int(last or first) + 1):
            if index in chosen:
                raise ConfigError(f"layers={text!r}: layer {index} is named twice")
            chosen[index] = values
    return chosen
