"""Retrieval problems: what one is, the text around what must be found, and how it is made as long as asked for."""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeAlias

from transformers import PreTrainedTokenizerBase

from hf_kvcache.errors import InputError

PASSED = ("cold", "narrow", "old", "quiet", "green", "heavy", "late", "plain", "round", "steep")
THINGS = ("bridge", "garden", "harbour", "kitchen", "lantern", "meadow", "orchard", "station", "valley", "workshop")
ACTIONS = ("faces", "follows", "shelters", "crosses", "borders", "outlasts", "resembles", "precedes")


class Problem(NamedTuple):
    """Something to be found in a text.

    Attributes:
        context: The text, with what must be found in it.
        question: What is asked after it, up to where the answer begins.
        answers: All that must be found, in the order in which it is asked for.
    """

    context: str
    question: str
    answers: tuple[str, ...]


Make: TypeAlias = Callable[[int, float, Random], Problem]
"""Makes a problem from a number of pieces of filler, the depth of the answer (0: first, 1: last; where it has one),
and a source of random choices."""


def sentence(random: Random) -> str:
    """A sentence that answers nothing."""
    first, second = random.sample(THINGS, 2)
    return f"The {random.choice(PASSED)} {first} {random.choice(ACTIONS)} the {random.choice(PASSED)} {second}."


def word(random: Random, syllables: int = 3) -> str:
    """A word that can be pronounced and means nothing; there are as many as any length needs."""
    return "".join(random.choice("bdfgklmnprstv") + random.choice("aeiou") for _ in range(syllables))


def words(random: Random, count: int, syllables: int = 3) -> list[str]:
    """Different words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[word(random, syllables)] = None
    return list(found)


def number(random: Random) -> str:
    """Seven digits, the first not zero."""
    return str(random.randrange(10**6, 10**7))


def place(filler: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Put each needle between pieces of filler: depth 0 is before the first, 1 after the last."""
    places = sorted(zip((round(depth * len(filler)) for depth in depths), range(len(needles)), strict=True))
    pieces: list[str] = []
    start = 0
    for stop, which in places:
        pieces += [*filler[start:stop], needles[which]]
        start = stop
    return " ".join([*pieces, *filler[start:]])


def fit(make: Make, tokens: int, depth: float, seed: str, tokenizer: PreTrainedTokenizerBase) -> Problem:
    """The longest problem whose context and question have at most `tokens` tokens.

    The same `seed` makes the same choices.

    Raises:
        InputError: Not even the problem without filler fits.
    """

    def made(pieces: int) -> Problem:
        return make(pieces, depth, Random(seed))  # noqa: S311 - no secret

    def fits(pieces: int) -> bool:
        problem = made(pieces)
        return len(tokenizer(problem.context + problem.question, verbose=False)["input_ids"]) <= tokens

    if not fits(0):
        raise InputError(f"{tokens} tokens are too few for a retrieval problem; use longer texts")
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return made(low)
