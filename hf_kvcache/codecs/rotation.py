"""Orthonormal rotations that spread every channel's energy evenly over all of them.

Hadamard matrices of the orders head sizes are made of: powers of two by Sylvester's doubling, times 12 or 20 by
Paley's construction from the squares modulo 11 and 19. A product with the matrix beats the butterflies of a fast
transform at these orders (64 to 256), because it is one call.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

_PALEY_PRIMES = {12: 11, 20: 19}


@lru_cache(maxsize=64)
def rotation(order: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "order order"]:
    """An orthonormal matrix R, for ``states @ R``; ``rotated @ R.T`` takes it back.

    All entries have the same magnitude where `order` is 1, 12 or 20 times a power of two (all common head sizes and
    their quarters). For any other order it is the cosine transform, which spreads nearly as well.
    """
    core = order
    while core % 2 == 0 and core not in _PALEY_PRIMES:
        core //= 2
    if core == 1:
        matrix = torch.ones(1, 1, dtype=torch.float64)
    elif core in _PALEY_PRIMES:
        matrix = _paley(_PALEY_PRIMES[core])
    else:
        return _cosine(order).to(device, dtype)
    while matrix.shape[0] < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(order)).to(device, dtype)


def _paley(prime: int) -> Tensor:
    """The Hadamard matrix of order ``prime + 1`` for a prime that is 3 modulo 4."""
    squares = {(number * number) % prime for number in range(1, prime)}
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    for row in range(prime):
        for column in range(prime):
            difference = (column - row) % prime
            matrix[row + 1, column + 1] = 1.0 if difference == 0 or difference in squares else -1.0
        matrix[row + 1, 0] = -1.0
    return matrix


def _cosine(order: int) -> Tensor:
    index = torch.arange(order, dtype=torch.float64)
    matrix = torch.cos(math.pi / order * (index[:, None] + 0.5) * index[None]) * math.sqrt(2 / order)
    matrix[:, 0] /= math.sqrt(2)
    return matrix
