"""What a model answers to a question it has read, and how likely the right answer was, in as few passes as tell it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_kvcache.evaluation import metrics
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.reader import Reader

SPARE_TOKENS = 8
"""Tokens written beyond those of the right answer, at most."""


class Answer(NamedTuple):
    """What was written after a question, greedily.

    Attributes:
        recall: Share of the right answers that occur in it, ignoring case (RULER's rule).
        probability: Of the right answer, the geometric mean over its tokens.
        text: Up to the end of the text, or to where it holds all that was asked for.
    """

    recall: float
    probability: float
    text: str


def answer(
    loaded: LoadedModel,
    read: Callable[[], tuple[Reader, Float[Tensor, "one kept vocabulary"]]],
    answers: Sequence[str],
    gold: Int[Tensor, "one gold"],
) -> Answer:
    """Read a question and answer it.

    The tokens of the right answer are read in one pass, which tells their probabilities, and how many of them are what
    the model would write. From the first one that is not, the model writes token by token.

    Args:
        loaded: The model and its tokenizer.
        read: Gives a reader that has read the question, and the logits of its last token. Called again if the model
            errs and the reader cannot be copied.
        answers: What must occur in the answer.
        gold: The right answer.
    """
    reader, logits = read()
    spare = reader.fork()
    gold = gold.to(logits.device)
    tokens = gold.shape[1]
    predicted = logits[0, -1:]
    if tokens > 1:
        predicted = torch.cat([predicted, reader.feed(gold[:, :-1], keep=tokens - 1)[0]])
    nll = metrics.negative_log_likelihood(metrics.log_probabilities(predicted), gold[0])
    best = predicted.argmax(dim=-1)
    right = int((best == gold[0]).cumprod(0).sum())
    written: list[int] = gold[0, :right].tolist()
    if right < tokens:
        written.append(int(best[right]))
        ends = _end_tokens(loaded)
        rest = (spare or read()[0]).write(torch.tensor([written]))
        while written[-1] not in ends and _recall(loaded, written, answers) < 1:
            if len(written) == tokens + SPARE_TOKENS:
                break
            written.append(int(next(rest)))
        written = [token for token in written if token not in ends]
    text = str(loaded.tokenizer.decode(written))
    return Answer(_recall(loaded, written, answers), float((-nll.mean()).exp()), text)


def _end_tokens(loaded: LoadedModel) -> set[int]:
    """The tokens that end a text: the model's and the tokenizer's."""
    config = cast("Any", loaded.model).generation_config
    of_model = None if config is None else config.eos_token_id
    ends = [loaded.tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    return {token for token in ends if token is not None}


def _recall(loaded: LoadedModel, written: list[int], answers: Sequence[str]) -> float:
    text = str(loaded.tokenizer.decode(written)).lower()
    return sum(of.lower() in text for of in answers) / len(answers)
