"""What the tasks found that do more than score a text: retrieval, generation and cost."""

from dataclasses import dataclass
from typing import NamedTuple


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
        nll_first_half: Mean -log p of its first half for the model with transformers' cache, which reads it as text,
            nats per token.
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
        drift: Mean of the second half's -log p minus the first half's, nats per token, for the model with transformers'
            cache, which reads it as text: a text that leaves what the model would write rises.
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
        allocator_peak_bytes: The same as the device's allocator counts it; None where it does not (on CPUs).
        process_peak_bytes: The largest resident size of the whole process meanwhile, weights and libraries included;
            None where the system does not tell.
        dropped_tokens: Tokens of the prompt that no layer holds any more; None if the cache does not tell.
    """

    prompt_tokens: int
    first_token_ms: float
    prompt_tokens_per_second: float
    tokens: tuple[TokenCost, ...]
    peak_bytes: int
    allocator_peak_bytes: int | None
    process_peak_bytes: int | None
    dropped_tokens: int | None
