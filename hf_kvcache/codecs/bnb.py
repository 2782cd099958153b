"""bitsandbytes' own formats through its own kernels, as baselines: NF4, FP4 and 8-bit dynamic floats.

NF4 and FP4 are the 4-bit types of QLoRA (arXiv 2305.14314); the 8-bit type is that of 8-bit optimizers (arXiv
2110.02861). Each has one scale per 64 consecutive numbers: of one token, or of several where a head is narrower. The
kernels return it in 32 bits; it is stored in 16. They compute in float32, for float64 too.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ConfigError
from .codec import Codec, Fit, Part, check_bits
from .midpoints import to_half

_TOGETHER = 64


class BitsAndBytes(Codec):
    """States in 4 or 8 bits per number, and 16 bits for 64 of them.

    Args:
        name: "nf4", "fp4" or "bnb8".
        bits: 4, and 8 for "bnb8".

    Raises:
        ConfigError: bitsandbytes is not installed.
    """

    def __init__(self, name: str, bits: int) -> None:
        self.name = name
        check_bits(name, bits, [8 if name == "bnb8" else 4])
        self.bits = bits
        try:
            self._functional: Any = import_module("bitsandbytes.functional")
        except ImportError as error:
            message = f"codec {name!r} needs bitsandbytes: pip install 'hf-kvcache[bnb]'"
            raise ConfigError(message) from error

    def __repr__(self) -> str:
        return f"bitsandbytes {self.name}"

    def parts(self, width: int, block_size: int, dtype: torch.dtype) -> list[Part]:
        if width % 2 or width * block_size % _TOGETHER:
            raise ConfigError(
                f"codec {self.name!r} needs an even width, and {_TOGETHER} numbers or a multiple in a block, "
                f"got a width of {width} in blocks of {block_size} tokens"
            )
        return [
            Part(block_size, width * self.bits // 8, torch.uint8),
            Part(1, width * block_size // _TOGETHER, torch.float16, is_scale=True),
        ]

    def encode(self, states: Float[Tensor, "heads blocks tokens width"], fit: Fit) -> list[Tensor]:
        numbers = states.to(torch.float32).contiguous()
        if self.bits == 8:
            codes, state = self._functional.quantize_blockwise(numbers, blocksize=_TOGETHER)
        else:
            codes, state = self._functional.quantize_4bit(numbers, blocksize=_TOGETHER, quant_type=self.name)
        blocks = states.shape[:2]
        return [codes.view(*blocks, states.shape[2], -1), to_half(state.absmax).view(*blocks, 1, -1)]

    def decode(self, parts: Sequence[Tensor], fit: Fit, dtype: torch.dtype) -> Float[Tensor, "heads tokens width"]:
        codes, scales = parts
        state = self._functional.QuantState(
            absmax=scales.to(torch.float32).flatten(),
            # A row for each scale: rows of another length that is no multiple are read wrongly by the CPU's kernel.
            shape=(scales.numel(), _TOGETHER),
            code=self._functional.create_dynamic_map().to(codes.device) if self.bits == 8 else None,
            blocksize=_TOGETHER,
            quant_type=None if self.bits == 8 else self.name,
            dtype=torch.float32 if dtype == torch.float64 else dtype,
        )
        read = self._functional.dequantize_blockwise if self.bits == 8 else self._functional.dequantize_4bit
        states: Tensor = read(codes.contiguous(), state)
        return states.view(*codes.shape[:2], -1).to(dtype)
