"""Sizes as people write them. 1 KiB = 1,024 bytes; 1 GB = 1,000,000,000 bytes; GiB is not GB."""

from __future__ import annotations

import re
from typing import TypeAlias

from .errors import InputError

Number: TypeAlias = int | float

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9

_BYTES_OF = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": GB}
_BYTES_OF["tb"] = 10**12


def parse_bytes(text: str) -> int:
    """Read a size such as ``80GiB``, ``24 GB`` or ``1000000``.

    Raises:
        InputError: It is not a positive number with a unit of bytes.

    Example:
        >>> parse_bytes("80GiB"), parse_bytes("80 GB")
        (85899345920, 80000000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _BYTES_OF:
        units = ", ".join(unit for unit in _BYTES_OF if unit)
        raise InputError(f"expected a size such as 80GiB or 24GB, got {text!r}; units: {units}, or bytes without one")
    return positive(int(float(match[1]) * _BYTES_OF[match[2].lower()]), "a size in bytes")


def format_bytes(size_bytes: Number) -> str:
    """A size in binary units, three digits or more.

    Example:
        >>> format_bytes(147456), format_bytes(16060522496)
        ('144.00 KiB', '14.96 GiB')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:,.2f} {unit}"
    return f"{size_bytes:,.0f} bytes"


def format_flops(flops: Number) -> str:
    """Operations in decimal units: 1 TFLOP = 10^12.

    Example:
        >>> format_flops(8.29e12)
        '8.29 TFLOP'
    """
    for unit, scale in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if abs(flops) >= scale:
            return f"{flops / scale:,.2f} {unit}"
    return f"{flops:,.0f} FLOP"


def positive(number: int, what: str) -> int:
    """Return `number`.

    Raises:
        InputError: It is zero or negative.
    """
    if number < 1:
        raise InputError(f"expected {what} of at least 1, got {number}")
    return number
