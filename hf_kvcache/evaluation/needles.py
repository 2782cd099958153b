"""Retrieval problems: one or several facts in a long text, a pass key, a value by its key.

The kinds are those of RULER (arXiv 2404.06654), of the pass key test (arXiv 2305.16300) and of "Lost in the Middle"
(arXiv 2307.03172); the texts are our own.
"""

from random import Random

from hf_kvcache.evaluation.haystack import Problem, number, place, sentence, words

KEYS = 4
"""Keys, values or questions of a problem that has several."""
HEX_DIGITS = 8


def single(pieces: int, depth: float, random: Random) -> Problem:
    """One fact among sentences that answer nothing."""
    key, value = words(random, 1)[0], number(random)
    context = place([sentence(random) for _ in range(pieces)], [_fact(key, value)], [depth])
    return Problem(context, _question(key), (value,))


def multi_key(pieces: int, depth: float, random: Random) -> Problem:
    """The fact asked for at `depth`, and facts about other keys at random places."""
    keys, values = words(random, KEYS), [number(random) for _ in range(KEYS)]
    depths = [depth, *(random.random() for _ in range(KEYS - 1))]
    filler = [sentence(random) for _ in range(pieces)]
    return Problem(place(filler, list(map(_fact, keys, values)), depths), _question(keys[0]), (values[0],))


def multi_value(pieces: int, _: float, random: Random) -> Problem:
    """Several facts about one key; all are asked for, in the order of the text."""
    key, values = words(random, 1)[0], [number(random) for _ in range(KEYS)]
    filler = [sentence(random) for _ in range(pieces)]
    context = place(filler, [_fact(key, value) for value in values], _rising(random))
    question = f"\n\nQuestion: Which are all the secret numbers of {key}?\nAnswer: The secret numbers of {key} are"
    return Problem(context, question, tuple(values))


def multi_query(pieces: int, _: float, random: Random) -> Problem:
    """Facts about several keys; all are asked for."""
    keys, values = words(random, KEYS), [number(random) for _ in range(KEYS)]
    filler = [sentence(random) for _ in range(pieces)]
    context = place(filler, list(map(_fact, keys, values)), _rising(random))
    asked = ", ".join(keys)
    question = f"\n\nQuestion: Which are the secret numbers of {asked}?\nAnswer: The secret numbers of {asked} are"
    return Problem(context, question, tuple(values))


def passkey(pieces: int, depth: float, random: Random) -> Problem:
    """A pass key among one sentence, repeated."""
    key = str(random.randrange(10**4, 10**5))
    filler = ["Nothing of importance is written in this line."] * pieces
    context = place(filler, [f"Remember this: the pass key is {key}. {key} is the pass key."], [depth])
    return Problem(context, "\n\nQuestion: Which is the pass key?\nAnswer: The pass key is", (key,))


def key_value(pieces: int, depth: float, random: Random) -> Problem:
    """A list of random keys and values; the pair asked for is at `depth`."""
    pairs = [(_hexadecimal(random), _hexadecimal(random)) for _ in range(pieces + 1)]
    key, value = pairs[0]
    others = [f"{name}: {of}\n" for name, of in pairs[1:]]
    at = round(depth * len(others))
    listed = "".join([*others[:at], f"{key}: {value}\n", *others[at:]])
    return Problem(listed, f"\nThe value that stands after the key {key}:\n{key}:", (value,))


def _fact(key: str, value: str) -> str:
    return f"The secret number of {key} is {value}."


def _question(key: str) -> str:
    return f"\n\nQuestion: Which is the secret number of {key}?\nAnswer: The secret number of {key} is"


def _rising(random: Random) -> list[float]:
    return sorted(random.random() for _ in range(KEYS))


def _hexadecimal(random: Random) -> str:
    return f"{random.getrandbits(4 * HEX_DIGITS):0{HEX_DIGITS}x}"
