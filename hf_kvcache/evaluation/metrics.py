"""Distances between two predictions of the same tokens, as pure functions. Everything is in nats.

Log-probabilities are float64 throughout. In float32 a log-softmax over 50,000 entries is off by about 1e-6,
which is more than two faithful caches differ by. Where every position of a text is compared, `divergence` computes
the same figures in fewer and cheaper passes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

RESAMPLES = 2000
TOP = 10
"""How many of the most likely tokens are compared as a set."""
PERCENTILES = (0, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


class Interval(NamedTuple):
    """An estimate and its 95 % bootstrap interval over windows (None where one window gives no spread)."""

    value: float
    low: float | None
    high: float | None


def log_probabilities(logits: Float[Tensor, "positions vocabulary"]) -> Float[Tensor, "positions vocabulary"]:
    """Log-softmax in float64."""
    return torch.log_softmax(logits.to(torch.float64), dim=-1)


def negative_log_likelihood(
    log_probs: Float[Tensor, "positions vocabulary"], targets: Int[Tensor, " positions"]
) -> Float[Tensor, " positions"]:
    """-log p(target) at each position."""
    return -log_probs.gather(1, targets[:, None]).squeeze(1)


def kl_divergence(
    reference: Float[Tensor, "positions vocabulary"], candidate: Float[Tensor, "positions vocabulary"]
) -> Float[Tensor, " positions"]:
    """KL(reference || candidate) at each position, from log-probabilities.

    A token that is impossible in the reference adds nothing (0 log 0 = 0); one that is impossible in the
    candidate only makes the divergence infinite. Rounding below zero is cut to zero.
    """
    probabilities, difference = reference.exp(), reference - candidate
    # One pass over the vocabulary. Where that meets a token that is impossible somewhere it gives no number, and the
    # definition is followed term by term, which takes five times as long.
    found = torch.einsum("pv,pv->p", probabilities, difference)
    if bool(found.isnan().any()):
        found = torch.where(probabilities > 0, probabilities * difference, 0.0).sum(dim=-1)
    return found.clamp(min=0.0)


def overlap(
    reference: Int[Tensor, "positions top"], candidate: Int[Tensor, "positions top"]
) -> Float[Tensor, " positions"]:
    """Share of the reference's top tokens that are among the candidate's, at each position, 0 to 1; in any order."""
    return (reference[:, :, None] == candidate[:, None, :]).any(dim=-1).double().mean(dim=-1)


def window_mean(values: Float[np.ndarray, " positions"], lengths: Int[np.ndarray, " windows"], seed: int) -> Interval:
    """The mean of `values`, one number per scored position, window after window.

    The interval draws whole windows again, because positions within one are not independent.

    Args:
        values: At each scored position.
        lengths: Scored positions of each window.
        seed: Of the draws. One seed draws the same windows whatever the values, so comparisons stay paired.
    """
    sums = _window_sums(values, lengths)
    return _interval(float(sums.sum() / lengths.sum()), _resampled(sums, lengths, seed), len(lengths))


def root_mean_square(
    values: Float[np.ndarray, " positions"], lengths: Int[np.ndarray, " windows"], seed: int
) -> Interval:
    """The square root of the mean of the squares; arguments as in `window_mean`."""
    return _mapped(np.sqrt, window_mean(values**2, lengths, seed))


def rate(
    values: Float[np.ndarray, " positions"],
    lengths: Int[np.ndarray, " windows"],
    units: Int[np.ndarray, " windows"],
    seed: int,
) -> Interval:
    """The sum of `values` for each unit of text, such as nats per byte.

    Args:
        values: At each scored position.
        lengths: Scored positions of each window.
        units: Of each window, such as the bytes of its scored text. All zero: the rate is not a number.
        seed: As in `window_mean`.
    """
    if not units.sum():
        return Interval(float("nan"), None, None)
    sums = _window_sums(values, lengths)
    return _interval(float(sums.sum() / units.sum()), _resampled(sums, units, seed), len(lengths))


def exponential(interval: Interval) -> Interval:
    """Exp of an estimate and of the ends of its interval."""
    return _mapped(np.exp, interval)


def percentiles(values: Float[np.ndarray, " positions"]) -> dict[str, float]:
    """The smallest value, the percentiles of the usual tables, and the largest, by name."""
    found = np.quantile(values, [of / 100 for of in PERCENTILES])
    names = [f"{of:g}" for of in PERCENTILES]
    return dict(zip(["minimum", *names[1:-1], "maximum"], map(float, found), strict=True))


def perplexity(nll: Float[np.ndarray, " positions"], lengths: Int[np.ndarray, " windows"], seed: int) -> Interval:
    """Exp of the mean negative log-likelihood per scored token; arguments as in `window_mean`."""
    return exponential(window_mean(nll, lengths, seed))


def perplexity_difference(
    candidate: Float[np.ndarray, " positions"],
    reference: Float[np.ndarray, " positions"],
    lengths: Int[np.ndarray, " windows"],
    seed: int,
) -> Interval:
    """Perplexity of the candidate minus the reference's, paired: each draw takes the same windows of both."""
    sums = [_window_sums(nll, lengths) for nll in (candidate, reference)]
    values = [float(np.exp(of.sum() / lengths.sum())) for of in sums]
    draws = [np.exp(_resampled(of, lengths, seed)) for of in sums]
    return _interval(values[0] - values[1], draws[0] - draws[1], len(lengths))


def _window_sums(
    values: Float[np.ndarray, " positions"], lengths: Int[np.ndarray, " windows"]
) -> Float[np.ndarray, " windows"]:
    sums: np.ndarray = np.add.reduceat(values, np.cumsum(lengths) - lengths)
    return sums


def _resampled(
    sums: Float[np.ndarray, " windows"], lengths: Int[np.ndarray, " windows"], seed: int
) -> Float[np.ndarray, " draws"]:
    """Means over `RESAMPLES` draws of as many windows as there are, with replacement; NaN where none has a length."""
    count = len(sums)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    weights = draws @ lengths
    means: np.ndarray = np.divide(draws @ sums, weights, out=np.full(RESAMPLES, np.nan), where=weights > 0)
    return means


def _mapped(function: Callable[[float], float], interval: Interval) -> Interval:
    """A function that keeps the order, so that quantiles stay quantiles, applied to estimate and ends."""
    value, low, high = interval
    ends = None if low is None else float(function(low)), None if high is None else float(function(high))
    return Interval(float(function(value)), *ends)


def _interval(value: float, draws: Float[np.ndarray, " draws"], windows: int) -> Interval:
    if windows < 2:
        return Interval(value, None, None)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(value, float(low), float(high))
