"""Retrieval problems that need the whole text: a chain of variables, the words that are most common.

The kinds are those of RULER (arXiv 2404.06654); the texts are our own.
"""

from itertools import pairwise
from random import Random

from hf_kvcache.evaluation.haystack import Problem, number, place, sentence, words

HOPS = 3
COMMON_WORDS = 5
COMMON_REPEATS = 8
FREQUENT_WORDS = 3


def variable_tracking(pieces: int, _: float, random: Random) -> Problem:
    """A variable with a value, and variables set to the one before; all with that value are asked for."""
    names = [name.upper() for name in words(random, 2 * (HOPS + 1), syllables=2)]
    value, other = number(random), number(random)
    chains = [names[: HOPS + 1], names[HOPS + 1 :]]
    lines = [
        [f"Let {chain[0]} = {of}.", *(f"Let {new} = {old}." for old, new in pairwise(chain))]
        for chain, of in zip(chains, (value, other), strict=True)
    ]
    depths = [sorted(random.random() for _ in chain) for chain in lines]
    filler = [sentence(random) for _ in range(pieces)]
    context = place(filler, [line for chain in lines for line in chain], [depth for of in depths for depth in of])
    question = (
        f"\n\nQuestion: Which variables have the value {value}?\nAnswer: The variables with the value {value} are"
    )
    return Problem(context, question, tuple(chains[0]))


def common_words(pieces: int, _: float, random: Random) -> Problem:
    """A list in which a few words come often and all others once; the common ones are asked for."""
    drawn = words(random, COMMON_WORDS + pieces)
    common = drawn[:COMMON_WORDS]
    listed = common * COMMON_REPEATS + drawn[COMMON_WORDS:]
    random.shuffle(listed)
    context = " ".join(f"{place}. {of}" for place, of in enumerate(listed, start=1))
    question = f"\n\nQuestion: Which {COMMON_WORDS} words are the most common in this list?\nAnswer: The words are"
    return Problem(context, question, tuple(dict.fromkeys(of for of in listed if of in common)))


def frequent_words(pieces: int, _: float, random: Random) -> Problem:
    """A text of coded words whose frequency falls with the square of their rank; the most frequent are asked for."""
    coded = words(random, 20)
    count = pieces + 20
    weights = [1 / rank**2 for rank in range(1, 21)]
    text = random.choices(coded, weights, k=count) + coded[:FREQUENT_WORDS] * FREQUENT_WORDS
    random.shuffle(text)
    ranked = sorted(coded, key=text.count, reverse=True)[:FREQUENT_WORDS]
    question = (
        f"\n\nQuestion: Which {FREQUENT_WORDS} words are the most frequent in this coded text?\nAnswer: The words are"
    )
    return Problem(" ".join(text), question, tuple(ranked))
