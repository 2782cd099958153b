"""Distances between two predictions of the same tokens, as pure functions. Everything is in nats.

Log-probabilities are float64 throughout. In float32 a log-softmax over 50,000 entries is off by about 1e-6,
which is more than two faithful caches differ by; float64 costs a few per cent of a forward pass.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RESAMPLES = 2000


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
    probabilities = reference.exp()
    terms = torch.where(probabilities > 0, probabilities * (reference - candidate), 0.0)
    return terms.sum(dim=-1).clamp(min=0.0)


def top1_agreement(
    reference: Float[Tensor, "positions vocabulary"], candidate: Float[Tensor, "positions vocabulary"]
) -> Bool[Tensor, " positions"]:
    """Whether both give the same most likely token, at each position."""
    return reference.argmax(dim=-1) == candidate.argmax(dim=-1)


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


def perplexity(nll: Float[np.ndarray, " positions"], lengths: Int[np.ndarray, " windows"], seed: int) -> Interval:
    """Exp of the mean negative log-likelihood per scored token; arguments as in `window_mean`."""
    sums = _window_sums(nll, lengths)
    value = float(np.exp(sums.sum() / lengths.sum()))
    return _interval(value, np.exp(_resampled(sums, lengths, seed)), len(lengths))


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
    """Means over `RESAMPLES` draws of as many windows as there are, with replacement."""
    count = len(sums)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    means: np.ndarray = (draws @ sums) / (draws @ lengths)
    return means


def _interval(value: float, draws: Float[np.ndarray, " draws"], windows: int) -> Interval:
    if windows < 2:
        return Interval(value, None, None)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(value, float(low), float(high))
