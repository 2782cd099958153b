"""The classes of exactness, and what the float64 proof and the audit found."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["bitwise", "rounding", "approximate", "undeclared", "unproven", "uncached"]
"""The classes of exactness; a claim may be `undeclared`, a measurement `unproven`, and no cache is
`uncached`."""


class Difference(NamedTuple):
    """The largest logit difference of one way to feed the text against no cache, in float64.

    Attributes:
        mode: Such as `token by token`.
        positions: Compared; 0 if it was refused.
        logit_difference: The largest; not a number if it was refused.
        error: What the cache raised when it was to be cropped or copied; empty if it ran.
    """

    mode: str
    positions: int
    logit_difference: float
    error: str = ""


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
        """The largest of all feeding modes that ran."""
        return max(of.logit_difference for of in self.differences if not of.error)

    @property
    def complaints(self) -> tuple[str, ...]:
        """What came out different, one sentence each; empty if proven."""
        logits = tuple(
            f"{of.mode}: logits differ by {of.logit_difference:.3g}, tolerance {self.tolerance:.3g}"
            for of in self.differences
            if not of.error and not of.logit_difference <= self.tolerance
        )
        return logits + tuple(of.complaint for of in self.generation if not of.equal and not of.error)

    @property
    def generation_refusals(self) -> tuple[str, ...]:
        """Generation modes that raised with this cache, one sentence each: not wrong, but not possible."""
        return tuple(of.complaint for of in self.generation if of.error)

    @property
    def refusals(self) -> tuple[str, ...]:
        """All modes that raised, those among them that no cache has to offer: being cropped, being copied."""
        return tuple(f"{of.mode}: {of.error}" for of in self.differences if of.error) + self.generation_refusals


class Rewrite(NamedTuple):
    """Where a cache first gave the model another state of a token than before.

    Attributes:
        layer: Number of the layer.
        token: Position of the token; None where it is not known, because tokens were dropped.
        history_tokens: Tokens seen when it was noticed, the newest included.
    """

    layer: int
    token: int | None
    history_tokens: int

    def __str__(self) -> str:
        token = "a token" if self.token is None else f"token {self.token}"
        return f"{token} of layer {self.layer}, when {self.history_tokens} were there"


class Audit(NamedTuple):
    """Whether a cache changes what it has stored while tokens are appended, in the working dtype.

    Keys and values of every token are read after every append and compared, bit for bit, with what was read of that
    token before: at first, with what the model stored.

    Attributes:
        tokens: Tokens fed.
        appends: In so many pieces.
        rewrites_most: The most changes of one token in one layer; None where tokens were dropped and others changed.
        rewrites_mean: Changes of a token, the mean over tokens and layers.
        missing: Share of the tokens that the model is not given any more at the end, 0 to 1, the mean over layers.
        first: The first change in the lowest layer that has any; None if nothing changed.
    """

    tokens: int
    appends: int
    rewrites_most: int | None
    rewrites_mean: float
    missing: float
    first: Rewrite | None

    @property
    def complaint(self) -> str:
        """What changed, in words; empty if nothing did."""
        if self.first is None:
            return ""
        most = "" if self.rewrites_most is None else f"up to {self.rewrites_most} times, "
        return f"what it gives the model of a token changes while others are appended: {most}first {self.first}"
