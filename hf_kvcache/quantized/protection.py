"""When the keys of a layer keep more bits than were asked for."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from ..codecs import Codec, Fit


class Protection(NamedTuple):
    """What guards a layer whose attention is so sharp that its codec would blur it.

    The softmax turns an error of a score into a factor on a weight, so what counts is the error in nats, not relative
    to the keys. On SmolLM2-135M the codecs that "auto" chooses are off by 0.1 to 0.2 nats at 4 bits, up to 0.45 at 3
    and 0.75 at 2, in every layer.
    """

    codec: Codec
    """Stores the keys instead."""
    most_nats: float
    """The largest root mean square error of scores that is accepted."""


def score_error(
    codec: Codec,
    fit: Fit,
    keys: Float[Tensor, "heads tokens width"],
    query_squares: Float[Tensor, "heads width"],
) -> float:
    """The root mean square error, in nats, of the scores of a block stored by `codec`, in the head where it is largest.

    Scores are taken to be products over the square root of the width, and the queries' channels to be uncorrelated.
    """
    parts = [part.flatten(1, 2) for part in codec.encode(keys[:, None], fit)]
    errors = (codec.decode(parts, fit, keys.dtype) - keys).square().mean(1)
    return math.sqrt(float((errors * query_squares).mean(-1).max()))
