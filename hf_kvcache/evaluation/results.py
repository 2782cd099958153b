"""What an evaluation found: plain immutable records, with the unit of every number."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hf_kvcache.errors import EvaluationError
from hf_kvcache.evaluation.metrics import Interval
from hf_kvcache.evaluation.protocols import Protocol

SCHEMA = "hf-kvcache-evaluation/1"

Kind = Literal["bitwise", "rounding", "approximate", "undeclared", "unproven", "uncached"]
"""The classes of exactness; a claim may be `undeclared`, a measurement `unproven`, and no cache is
`uncached`."""


@dataclass(frozen=True)
class Samples:
    """What was measured at every scored position, window after window. Not part of results.json.

    Attributes:
        nll: Negative log-likelihood of the true token, nats.
        kl: KL(reference || this cache), nats.
        agrees: Whether the most likely token is the reference's.
        lengths: Scored positions of each window.
    """

    nll: Float[np.ndarray, " positions"]
    kl: Float[np.ndarray, " positions"]
    agrees: Bool[np.ndarray, " positions"]
    lengths: Int[np.ndarray, " windows"]


@dataclass(frozen=True)
class Fidelity:
    """How far predictions are from the reference's, on identical positions, in the working dtype.

    Attributes:
        perplexity: Per token, of this cache.
        perplexity_difference: This cache minus the reference, paired.
        nll_difference: Mean difference of the negative log-likelihood, nats per token, paired.
        kl_mean: Mean KL(reference || this cache), nats.
        kl_p99: Its 99th percentile over positions, nats.
        kl_max: Its maximum, nats.
        top1_agreement: Share of positions with the same most likely token, 0 to 1.
        logit_difference_max: Largest absolute difference of any logit.
        identical: Whether every logit at every scored position is bitwise the reference's.
    """

    perplexity: Interval
    perplexity_difference: Interval
    nll_difference: Interval
    kl_mean: Interval
    kl_p99: float
    kl_max: float
    top1_agreement: Interval
    logit_difference_max: float
    identical: bool


class Difference(NamedTuple):
    """The largest logit difference of one way to feed the text against no cache, in float64."""

    mode: str
    positions: int
    logit_difference: float


class GenerationCheck(NamedTuple):
    """One generation mode against the reference cache, in float64.

    Attributes:
        mode: Such as `greedy` or `4 beams`.
        equal: Whether all token ids are the same.
        first_difference: Tokens after the prompt where the first row splits off; None if equal.
        margin: The reference's lead of its best score over its second best there: near zero it was a tie.
            None if equal,
            or where the score of a step belongs to no single row (beams).
        score_difference: Largest difference of any score up to the split.
        error: What `generate` raised with this cache; empty if it ran.
    """

    mode: str
    equal: bool
    first_difference: int | None
    margin: float | None
    score_difference: float
    error: str = ""

    @property
    def complaint(self) -> str:
        """Why it is not equal, in words."""
        if self.error:
            return f"{self.mode}: generate raised {self.error}"
        margin = "" if self.margin is None else f" (the reference's margin there: {self.margin:.3g})"
        return f"{self.mode}: other tokens from new token {self.first_difference} on{margin}"


@dataclass(frozen=True)
class Proof:
    """The float64 proof: the same real numbers as without a cache?

    Attributes:
        attention: Attention implementation it was run with.
        context_tokens: Tokens in the cache at the end: what a cache does only in longer contexts is not covered.
        logit_scale: Largest absolute logit without a cache.
        tolerance: Largest logit difference that passes.
        differences: One for each way to feed the text.
        generation: One for each generation mode.
    """

    attention: str
    context_tokens: int
    logit_scale: float
    tolerance: float
    differences: tuple[Difference, ...]
    generation: tuple[GenerationCheck, ...]

    @property
    def logit_difference(self) -> float:
        """The largest of all feeding modes."""
        return max(of.logit_difference for of in self.differences)

    @property
    def complaints(self) -> tuple[str, ...]:
        """What came out different, one sentence each; empty if proven."""
        logits = tuple(
            f"{of.mode}: logits differ by {of.logit_difference:.3g}, tolerance {self.tolerance:.3g}"
            for of in self.differences
            if not of.logit_difference <= self.tolerance
        )
        return logits + tuple(of.complaint for of in self.generation if not of.equal and not of.error)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Generation modes that raised with this cache, one sentence each: not wrong, but not possible."""
        return tuple(of.complaint for of in self.generation if of.error)


@dataclass(frozen=True)
class CacheResult:
    """All that was found about one cache.

    Attributes:
        spec: The text that named it.
        declared: The class the cache claims for itself.
        declared_reason: In its own words.
        measured: The class the measurements support.
        failures: Where a measurement contradicts the claim; empty if none.
        fidelity: Against the reference cache in the working dtype.
        proof: In float64; None if not run (`proof_note` says why).
        proof_note: Why there is no proof, or empty.
        bytes_held: Bytes of all tensor storages the cache held at the end of the first window.
        tokens_held: Tokens fed to it by then.
        samples: Position by position, for plots and further statistics.
    """

    spec: str
    declared: Kind
    declared_reason: str
    measured: Kind
    failures: tuple[str, ...]
    fidelity: Fidelity
    proof: Proof | None
    proof_note: str
    bytes_held: int
    tokens_held: int
    samples: Samples = field(repr=False, compare=False)


@dataclass(frozen=True)
class Results:
    """One evaluation.

    Attributes:
        model: Name of the model.
        dtype: Working dtype.
        dataset: Name of the text.
        protocol: Window, prefill and chunk, in tokens.
        windows: Windows scored.
        scored_tokens: Tokens scored, the same ones for every cache.
        seed: Of bootstrap draws and of sampled generation.
        reference: The cache all others are compared with; its own row compares it with itself.
        noise_floor: No cache at all against the reference, in the working dtype: what rounding alone does.
        caches: The caches asked for, in that order.
        environment: Versions, hardware and git state.
        seconds: Wall time.
    """

    model: str
    dtype: str
    dataset: str
    protocol: Protocol
    windows: int
    scored_tokens: int
    seed: int
    reference: CacheResult
    noise_floor: CacheResult
    caches: tuple[CacheResult, ...]
    environment: dict[str, Any]
    seconds: float

    @property
    def failures(self) -> tuple[str, ...]:
        """Every contradiction, with the cache it belongs to."""
        return tuple(f"{of.spec}: {failure}" for of in (self.reference, *self.caches) for failure in of.failures)


class ContradictionError(EvaluationError):
    """A measurement contradicts what a cache declares. `results` holds everything that was measured."""

    def __init__(self, results: Results) -> None:
        super().__init__("\n".join(results.failures))
        self.results = results
