"""How blocks of keys and values are encoded: one file a codec. A new codec joins by one line in `CODECS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..errors import ConfigError
from .affine import Affine
from .bnb import BitsAndBytes
from .bytewise import Fp8, Int8
from .centred import CentredKeys
from .channel import ChannelKeys, ChannelValues
from .codec import Codec, Fit, Part
from .exact import Exact
from .grid import Grid
from .lloyd import LloydKeys, LloydValues
from .mixed import MixedKeys
from .nibble import Nibble
from .tile import Tile

__all__ = ["CODECS", "Codec", "Fit", "Part", "make_codecs"]


class CodecPair(NamedTuple):
    """How a named codec stores keys, and how it stores values, given the bits."""

    keys: Callable[[int], Codec]
    values: Callable[[int], Codec]


CODECS: dict[str, CodecPair] = {
    "exact": CodecPair(Exact, Exact),
    "mixed": CodecPair(MixedKeys, lambda bits: Nibble(bits) if bits == 4 else LloydValues(bits)),
    "grid": CodecPair(lambda bits: CentredKeys(Grid(bits)), Grid),
    "lloyd": CodecPair(LloydKeys, LloydValues),
    "tile": CodecPair(lambda bits: CentredKeys(Tile(bits)), Tile),
    "affine": CodecPair(Affine, Affine),
    "channel": CodecPair(ChannelKeys, ChannelValues),
    "int8": CodecPair(Int8, Int8),
    "fp8": CodecPair(Fp8, Fp8),
    **{name: CodecPair(partial(BitsAndBytes, name), partial(BitsAndBytes, name)) for name in ("nf4", "fp4", "bnb8")},
}
"""Every codec a cache can name."""


def make_codecs(codec: str, key_bits: int, value_bits: int) -> tuple[Codec, Codec]:
    """The codec of the keys and the codec of the values.

    Args:
        codec: A name in `CODECS`, or "auto", the best measured at the bits; two of them, as "keys/values", to differ.
        key_bits: Nominal bits per number of the keys.
        value_bits: Nominal bits per number of the values.

    Raises:
        ConfigError: No codec has this name, or it does not know these bits.
    """
    of_keys, _, of_values = codec.partition("/")
    keys, values = _pair(of_keys, key_bits), _pair(of_values or of_keys, value_bits)
    return keys.keys(key_bits), values.values(value_bits)


def _pair(name: str, bits: int) -> CodecPair:
    if name == "auto":
        name = "mixed" if bits <= 4 else "grid"
    if name not in CODECS:
        raise ConfigError(f"no codec is called {name!r}; known: auto, {', '.join(CODECS)}")
    return CODECS[name]
