"""Every codec, its bits, and states to store with it."""

from typing import NamedTuple

import pytest
import torch

from hf_kvcache.codecs import CODECS, Codec, Fit

WIDTHS = [8, 16, 64, 80, 96, 128, 192, 256]
KINDS = ["keys", "values"]
TOKENS = 64
BITS = {
    "exact": [4],
    "mixed": [2, 3, 4],
    "grid": [2, 3, 4, 5, 6, 7, 8],
    "lloyd": [2, 3, 4],
    "tile": [2, 3, 4],
    "affine": [2, 3, 4, 5, 6, 7, 8],
    "channel": [2, 3, 4, 5, 6, 7, 8],
    "int8": [8],
    "fp8": [8],
    "nf4": [4],
    "fp4": [4],
    "bnb8": [8],
}
OF_BITSANDBYTES = {"nf4", "fp4", "bnb8"}
ALL = [(name, bits) for name, some in BITS.items() for bits in some]
# What keys are centred by the codec for, so that means far larger than deviations cost nothing.
CENTRED = {"mixed", "grid", "lloyd", "tile", "channel"}


class Encoded(NamedTuple):
    codec: Codec
    states: torch.Tensor
    fit: Fit
    parts: list[torch.Tensor]

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codec.decode(self.parts, self.fit, dtype)

    def error(self) -> float:
        """Root mean square of what decoding is off by; states have unit deviation."""
        return (self.decode(self.states.dtype) - self.states).square().mean().sqrt().item()


def make(name: str, bits: int, kind: str) -> Codec:
    if name in OF_BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    return getattr(CODECS[name], kind)(bits)


def states(name: str, kind: str, width: int, blocks: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers of unit deviation ``[heads, blocks, tokens, width]``, keys around a mean per channel."""
    source = torch.Generator().manual_seed(width + 1000 * (kind == "keys"))
    normal = torch.randn(2, blocks, TOKENS, width, generator=source, dtype=torch.float64)
    means = 3 * torch.randn(2, 1, 1, width, generator=source, dtype=torch.float64)
    return (normal + means if kind == "keys" and name in CENTRED else normal).to(dtype)


def encode(codec: Codec, blocks: torch.Tensor) -> Encoded:
    flat = blocks.flatten(1, 2)
    fit = codec.fit(flat, None)
    return Encoded(codec, flat, fit, [part.flatten(1, 2) for part in codec.encode(blocks, fit)])
