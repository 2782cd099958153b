"""What a calibration found, as a JSON file and as options of a `QuantizedCache`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import StorageError

_FORMAT = "hf_kvcache quantization plan"
_VERSION = 1


class LayerBits(NamedTuple):
    """Nominal bits of one layer."""

    layer: int
    key_bits: int
    value_bits: int


@dataclass(frozen=True)
class QuantizationPlan:
    """Bits by layer, and what they were measured to cost on text that was not calibrated on."""

    bits: int
    """The uniform bits whose bytes the plan keeps within."""
    layers: tuple[LayerBits, ...]
    """The layers that are encoded."""
    sinks: int
    """Tokens at the beginning that stay exact."""
    recent: int
    """Tokens at the end that stay exact, at least."""
    average_bits: float
    """Bits per number, all in, exact tokens aside."""
    kl: float
    """Mean divergence through the cache with this plan, nats per token."""
    uniform_kl: float
    """The same with `bits` everywhere."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `QuantizedCache`."""
        grouped = groupby(self.layers, key=lambda of: (of.key_bits, of.value_bits))
        entries = []
        for (key_bits, value_bits), group in grouped:
            numbers = [of.layer for of in group]
            entries += [f"{span}:key_bits={key_bits}&value_bits={value_bits}" for span in _spans(numbers)]
        return {"bits": self.bits, "sinks": self.sinks, "recent": self.recent, "layers": ";".join(entries)}

    @property
    def spec(self) -> str:
        """The specification of such a cache, for `build_cache` and command lines."""
        return "quantized:" + ",".join(f"{name}={value}" for name, value in self.options().items())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            StorageError: The file cannot be written.
        """
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        content["layers"] = [of._asdict() for of in self.layers]
        try:
            Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write the plan to {os.fspath(path)}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizationPlan:
        """Read what `save` wrote.

        Raises:
            StorageError: The file is missing, damaged, no plan, or of a newer format.
        """
        name = os.fspath(path)
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read a plan from {name}: {error}") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise StorageError(f"{name} holds no plan of this library")
        version = content.pop("version", None)
        if version != _VERSION:
            raise StorageError(f"{name} has format version {version}; this release reads {_VERSION}")
        try:
            layers = tuple(LayerBits(**of) for of in content.pop("layers"))
            return cls(layers=layers, **content)
        except (TypeError, KeyError) as error:
            raise StorageError(f"{name} does not describe a plan: {error}") from error


def _spans(numbers: list[int]) -> list[str]:
    """Ranges of consecutive numbers: ``0-3``, ``7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
