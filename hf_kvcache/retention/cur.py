"""Keep the tokens that span the keys and the values."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .policy import Held, Policy

# Added to the squared singular values, as a share of their mean: few tokens span fewer directions than there are.
_RIDGE = 1e-6


class Cur(Policy):
    """``score = l(K) * l(V)``, where ``l(X)_i = x_i (X'X)^-1 x_i'`` is the leverage of token i.

    Leverage is the squared norm of a row of the left singular vectors: how much of the matrix is lost without it. The
    product chooses the columns and rows of a CUR decomposition of the attention output. Sengupta et al.,
    "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition" (arXiv 2509.15038), which estimates
    leverages by a random projection; here they are exact, from one system of equations of the width of a head.
    """

    name: ClassVar[str] = "cur"

    def scores(self, held: Held) -> Float[Tensor, "rows heads tokens"]:
        """See `Policy.scores`."""
        return _leverage(held.keys, held.hidden) * _leverage(held.values, held.hidden)


def _leverage(
    states: Float[Tensor, "rows heads tokens width"], hidden: Bool[Tensor, "rows heads tokens"] | None
) -> Float[Tensor, "rows heads tokens"]:
    # Keys lie close to few directions: in float32 such a system can be solved by no factorization.
    precise = states.double()
    if hidden is not None:
        precise = precise.masked_fill(hidden[..., None], 0.0)
    gram = precise.transpose(2, 3) @ precise
    ridge = gram.diagonal(dim1=2, dim2=3).mean(-1).mul(_RIDGE).clamp_min(torch.finfo(precise.dtype).tiny)
    gram.diagonal(dim1=2, dim2=3).add_(ridge[..., None])
    factor = torch.linalg.cholesky(gram)
    # |F^-1 x|^2 = x' (FF')^-1 x.
    whitened: Tensor = torch.linalg.solve_triangular(factor, precise.transpose(2, 3), upper=False)
    return whitened.square().sum(2).to(torch.promote_types(states.dtype, torch.float32))
