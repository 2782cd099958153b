"""What an evaluation found: plain immutable records, with the unit of every number."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hf_kvcache.errors import EvaluationError, InputError
from hf_kvcache.evaluation.metrics import Interval
from hf_kvcache.evaluation.protocols import Protocol
from hf_kvcache.evaluation.tasks import Task

SCHEMA = "hf-kvcache-evaluation/1"

Kind = Literal["bitwise", "rounding", "approximate", "undeclared", "unproven", "uncached"]
"""The classes of exactness; a claim may be `undeclared`, a measurement `unproven`, and no cache is
`uncached`."""


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


class Trial(NamedTuple):
    """One problem, read through one cache.

    Attributes:
        task: Kind of problem.
        length_tokens: Length asked for; the prompt is as long as it can be within it.
        prompt_tokens: Its tokens.
        depth: Of the answer; None where it stands all over the text.
        sample: Number of the problem at this length and depth.
        recall: Share of the answers that occur in what the model wrote, ignoring case (RULER's rule).
        probability: Of the right answer, the geometric mean over its tokens: it shows a difference long before, and on
            models that are too weak for, any change of recall.
        answer: What the model wrote.
    """

    task: str
    length_tokens: int
    prompt_tokens: int
    depth: float | None
    sample: int
    recall: float
    probability: float
    answer: str


class Output(NamedTuple):
    """One continuation, against the reference's.

    Attributes:
        first_difference: New tokens before the first one that differs; None if all are the same.
        margin: The reference's lead of its best logit over its second best there: near zero it was a tie. None if
            all are the same.
        repetition: Share of runs of 4 tokens that stood in the continuation before, 0 to 1.
        nll_first_half: Mean -log p of its first half for the model without a cache, nats per token.
        nll_second_half: The same of the second half.
    """

    first_difference: int | None
    margin: float | None
    repetition: float
    nll_first_half: float
    nll_second_half: float


@dataclass(frozen=True)
class Agreement:
    """Greedy continuations with one cache, against the reference's.

    Attributes:
        new_tokens: Tokens written after each prompt.
        same_text: Share of prompts with the same tokens throughout, 0 to 1.
        agreement_tokens: Mean tokens before the first difference (all, where there is none).
        repetition: Mean over the outputs.
        drift: Mean of the second half's -log p minus the first half's, nats per token, for the model without a cache:
            a text that leaves what the model would write rises.
        outputs: Each prompt.
    """

    new_tokens: int
    same_text: float
    agreement_tokens: float
    repetition: float
    drift: float
    outputs: tuple[Output, ...]


class TokenCost(NamedTuple):
    """One token more after a history.

    Attributes:
        context_tokens: Tokens of the history.
        milliseconds: Median.
        low: Lower quartile.
        high: Upper quartile.
        speedup: The reference's time divided by this cache's, median over rounds; above 1 is faster. None where the
            reference was not timed in the same rounds.
        bytes_held: Bytes of all tensor storages reachable from the cache at the end.
    """

    context_tokens: int
    milliseconds: float
    low: float
    high: float
    speedup: float | None
    bytes_held: int


@dataclass(frozen=True)
class Cost:
    """Time and bytes.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        first_token_ms: Median time of the prompt, until its logits are there.
        prompt_tokens_per_second: Throughput of the prompt.
        tokens: One token more, at several lengths of the history.
        peak_bytes: The most bytes of tensors that live at once, beside the weights, while one token is read after the
            prompt: what the cache holds, and what it and the model need meanwhile.
    """

    prompt_tokens: int
    first_token_ms: float
    prompt_tokens_per_second: float
    tokens: tuple[TokenCost, ...]
    peak_bytes: int


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
        scores: Against the reference cache in the working dtype; None if no text was scored. Called `fidelity` in the
            record.
        proof: In float64; None if not run (`proof_note` says why).
        proof_note: Why there is no proof, or empty.
        bytes_held: Bytes of all tensor storages the cache held at the end of the first window; 0 if no text was scored.
        tokens_held: Tokens fed to it by then.
        samples: Position by position, for plots and further statistics; None if no text was scored.
        retrieval: Every problem of the retrieval task; empty if it was not asked for.
        generation: Continuations against the reference's; None if not asked for.
        cost: Time and bytes; None if not asked for.
    """

    spec: str
    declared: Kind
    declared_reason: str
    measured: Kind
    failures: tuple[str, ...]
    scores: Fidelity | None = field(metadata={"name": "fidelity"})
    proof: Proof | None
    proof_note: str
    bytes_held: int
    tokens_held: int
    samples: Samples | None = field(repr=False, compare=False, metadata={"name": None})
    retrieval: tuple[Trial, ...] = ()
    generation: Agreement | None = None
    cost: Cost | None = None

    @property
    def fidelity(self) -> Fidelity:
        """The `scores`.

        Raises:
            InputError: No text was scored.
        """
        if self.scores is None:
            raise InputError("no text was scored: ask for the task perplexity, fidelity or exactness")
        return self.scores


@dataclass(frozen=True)
class Results:
    """One evaluation.

    Attributes:
        model: Name of the model.
        dtype: Working dtype.
        dataset: Name of the text.
        tasks: What was asked for.
        protocol: Window, prefill and chunk, in tokens.
        windows: Windows scored.
        scored_tokens: Tokens scored, the same ones for every cache.
        seed: Of bootstrap draws and of sampled generation.
        reference: The cache all others are compared with; its own row compares it with itself.
        noise_floor: No cache at all against the reference, in the working dtype: what rounding alone does.
        caches: The caches asked for, in that order.
        environment: Versions, hardware and git state.
        seconds: Wall time.
        positions: The scored positions, for further statistics; None if no text was scored.
    """

    model: str
    dtype: str
    dataset: str
    tasks: tuple[Task, ...]
    protocol: Protocol
    windows: int
    scored_tokens: int
    seed: int
    reference: CacheResult
    noise_floor: CacheResult
    caches: tuple[CacheResult, ...]
    environment: dict[str, Any]
    seconds: float
    positions: Positions | None = field(repr=False, compare=False, metadata={"name": None})

    @property
    def failures(self) -> tuple[str, ...]:
        """Every contradiction, with the cache it belongs to."""
        return tuple(f"{of.spec}: {failure}" for of in (self.reference, *self.caches) for failure in of.failures)


class ContradictionError(EvaluationError):
    """A measurement contradicts what a cache declares. `results` holds everything that was measured."""

    def __init__(self, results: Results) -> None:
        super().__init__("\n".join(results.failures))
        self.results = results
