"""Keep the keys with small norms."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from .policy import Held, Policy


class KeyNorm(Policy):
    """``score = -|k|``: a key of small L2 norm tends to receive much attention.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430).
    """

    name: ClassVar[str] = "knorm"

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        precise = held.keys.to(torch.promote_types(held.keys.dtype, torch.float32))
        return -precise.square().sum(-1).sqrt()
