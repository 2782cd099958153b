"""What was measured at every scored position, and the figures that sum it up."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hf_kvcache.evaluation.metrics import Interval


@dataclass(frozen=True)
class Positions:
    """What all caches share at the scored positions, window after window. Not part of results.json.

    Attributes:
        targets: Id of the token that was to be predicted.
        distances: Its place in the window, in tokens from the start.
        documents: Number of the document it is from.
        confidence: The reference's highest probability, 0 to 1.
        lengths: Scored positions of each window.
        words: Words of the scored text of each window.
        bytes: UTF-8 bytes of the scored text of each window.
    """

    targets: Int[np.ndarray, " positions"]
    distances: Int[np.ndarray, " positions"]
    documents: Int[np.ndarray, " positions"]
    confidence: Float[np.ndarray, " positions"]
    lengths: Int[np.ndarray, " windows"]
    words: Int[np.ndarray, " windows"]
    bytes: Int[np.ndarray, " windows"]


@dataclass(frozen=True)
class Samples:
    """What was measured with one cache at every scored position. Not part of results.json.

    Attributes:
        nll: Negative log-likelihood of the true token, nats.
        kl: KL(reference || this cache), nats.
        reverse_kl: KL(this cache || reference), nats.
        delta_p: Probability of the true token, minus the reference's.
        top10: Share of the reference's 10 most likely tokens that are among this cache's 10.
        agrees: Whether the most likely token is the reference's.
        logit_difference: Largest absolute difference of any logit.
        identical: Whether every logit is bitwise the reference's.
    """

    nll: Float[np.ndarray, " positions"]
    kl: Float[np.ndarray, " positions"]
    reverse_kl: Float[np.ndarray, " positions"]
    delta_p: Float[np.ndarray, " positions"]
    top10: Float[np.ndarray, " positions"]
    agrees: Bool[np.ndarray, " positions"]
    logit_difference: Float[np.ndarray, " positions"]
    identical: Bool[np.ndarray, " positions"]


class Group(NamedTuple):
    """Some of the scored positions, and how far the cache is from the reference there."""

    name: str
    positions: int
    kl_mean: float
    top1_agreement: float


@dataclass(frozen=True)
class Fidelity:
    """How far predictions are from the reference's, on identical positions, in the working dtype.

    Attributes:
        perplexity: Per token, of this cache.
        perplexity_difference: This cache minus the reference, paired.
        nll_difference: Mean difference of the negative log-likelihood, nats per token, paired. This is the logarithm
            of the ratio of the perplexities.
        word_perplexity: Exp of nats per word of the scored text.
        byte_perplexity: Exp of nats per UTF-8 byte of the scored text.
        bits_per_byte: The same in bits.
        kl_mean: Mean KL(reference || this cache), nats.
        kl_p99: Its 99th percentile over positions, nats.
        kl_max: Its maximum, nats.
        kl_percentiles: All its usual percentiles, nats, by name.
        reverse_kl_mean: Mean KL(this cache || reference), nats: large where this cache believes what the reference
            does not.
        top1_agreement: Share of positions with the same most likely token, 0 to 1.
        top10_overlap: Share of the reference's 10 most likely tokens that are among this cache's, 0 to 1.
        delta_p_mean: Mean change of the true token's probability, paired.
        delta_p_rms: Root of the mean square of that change.
        delta_p_percentiles: Its percentiles, by name.
        kl_over_documents: As `kl_mean`, its interval from drawing whole documents instead of windows.
        nll_difference_over_documents: As `nll_difference`, the same way.
        by_confidence: By the reference's highest probability.
        by_distance: By the distance from the start of the window.
        by_document: By document.
        tail_and_body: Windows cut in two: `tail` is what comes before the first divergence above the noise floor's
            largest (nothing was approximated yet), `body` the rest. A part without positions is left out.
        logit_difference_max: Largest absolute difference of any logit.
        identical: Whether every logit at every scored position is bitwise the reference's.
    """

    perplexity: Interval
    perplexity_difference: Interval
    nll_difference: Interval
    word_perplexity: Interval
    byte_perplexity: Interval
    bits_per_byte: Interval
    kl_mean: Interval
    kl_p99: float
    kl_max: float
    kl_percentiles: dict[str, float]
    reverse_kl_mean: Interval
    top1_agreement: Interval
    top10_overlap: Interval
    delta_p_mean: Interval
    delta_p_rms: Interval
    delta_p_percentiles: dict[str, float]
    kl_over_documents: Interval
    nll_difference_over_documents: Interval
    by_confidence: tuple[Group, ...]
    by_distance: tuple[Group, ...]
    by_document: tuple[Group, ...]
    tail_and_body: tuple[Group, ...]
    logit_difference_max: float
    identical: bool
