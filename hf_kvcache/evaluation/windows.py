"""Cut documents into windows of token ids, lazily: no more than one piece of text and one window are held."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.protocols import Protocol

PIECE_CHARACTERS = 100_000
SEPARATOR = "\n\n"


class Window(NamedTuple):
    """Token ids, and for each of them the number of the document it is from (counted from 0, as they were read)."""

    ids: Int[Tensor, " tokens"]
    documents: Int[Tensor, " tokens"]


def windows(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, protocol: Protocol, max_tokens: int
) -> Iterator[Window]:
    """Yield the text as consecutive, disjoint windows, until there are `max_tokens` tokens to score.

    Documents are joined by an empty line. Where the tokenizer begins a text with its BOS token, every window
    begins with it, as the model was trained to see it. All windows are full, but for the last one, which
    `max_tokens` or the end of the text may cut; a rest with nothing to score is left out.

    Raises:
        InputError: The text is shorter than one window, or `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise InputError(f"max_tokens must be at least 1, got {max_tokens}")
    bos = _leading_tokens(tokenizer)
    overhead = protocol.window_tokens - protocol.scored_tokens
    remaining, held, owners, full = max_tokens, list(bos), [0] * len(bos), False
    for number, ids in _token_pieces(documents, tokenizer):
        held.extend(ids)
        owners.extend([number] * len(ids))
        while len(held) >= protocol.window_tokens:
            take = min(protocol.window_tokens, remaining + overhead)
            yield Window(torch.tensor(held[:take]), torch.tensor(owners[:take]))
            remaining -= take - overhead
            if remaining == 0:
                return
            held, full = bos + held[protocol.window_tokens :], True
            owners = [number] * len(bos) + owners[protocol.window_tokens :]
    if not full:
        raise InputError(
            f"the text has {len(held)} tokens and one window takes {protocol.window_tokens}: "
            "use a smaller window (and prefill), or a longer text"
        )
    rest = held[: remaining + overhead]
    if len(rest) > overhead:
        yield Window(torch.tensor(rest), torch.tensor(owners[: len(rest)]))


def count_units(
    window: Int[Tensor, " tokens"], tokenizer: PreTrainedTokenizerBase, protocol: Protocol
) -> tuple[int, int]:
    """Words and UTF-8 bytes of the scored tokens of a window, as they decode.

    A word ends at a run of whitespace, so runs are counted, as the usual harness does when it splits a document at
    them; a run that began before the scored tokens is not counted again.
    """
    before, text = (
        str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        for ids in (
            window[protocol.prefill_tokens : protocol.prefill_tokens + 1],
            window[protocol.prefill_tokens + 1 :],
        )
    )
    runs = len(re.findall(r"\s+", text))
    goes_on = before[-1:].isspace() and text[:1].isspace()
    return runs - goes_on, len(text.encode("utf-8"))


def _leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS token if the tokenizer puts one before a text, else nothing."""
    bos = getattr(tokenizer, "bos_token_id", None)
    first = list(tokenizer("a")["input_ids"])[:1]
    return first if bos is not None and first == [bos] else []


def _token_pieces(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, list[int]]]:
    for number, document in enumerate(documents):
        for piece in _pieces(document if number == 0 else SEPARATOR + document):
            yield number, list(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text before a blank, where tokenizers cut as well."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        blank = text.rfind(" ", start + 1, start + PIECE_CHARACTERS)
        stop = blank if blank > start else start + PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]
