import re
import warnings

import pytest
import torch
import toys
from transformers import DynamicCache

from hf_kvcache.errors import EvaluationError, InputError
from hf_kvcache.evaluation.protocols import Protocol, cache_argument, forward, stream
from hf_kvcache.evaluation.windows import count_units, windows

WINDOW = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1))


def logits_of(model, cache, protocol):
    chunks = list(stream(model, cache, WINDOW, protocol))
    assert torch.equal(torch.cat([of.targets for of in chunks]), WINDOW[protocol.prefill_tokens + 1 :])
    assert [of.first_position for of in chunks] == [
        protocol.prefill_tokens + 1 + start for start in range(0, protocol.scored_tokens, protocol.chunk_tokens)
    ]
    return torch.cat([of.logits for of in chunks])


@pytest.mark.parametrize(
    ("window", "prefill", "chunk"), [(10, 0, 1), (10, -1, 1), (10, 9, 1), (10, 20, 1), (10, 4, 0), (2, 1, 1)]
)
def test_sizes_that_would_not_read_the_cache_are_refused(window, prefill, chunk):
    with pytest.raises(InputError):
        Protocol(window, prefill, chunk)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_the_chunk_changes_nothing_but_rounding(chunk):
    model = toys.tiny_model().double()
    expected = logits_of(model, None, Protocol(60, 10, 1))
    found = logits_of(model, DynamicCache(config=model.config), Protocol(60, 10, chunk))
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-5  # norms and rotary embeddings compute in float32


def test_every_scored_logit_was_computed_after_the_cache_was_read():
    """A cache that reads back garbage changes every scored position, and a prefill alone changes none."""
    model = toys.tiny_model()
    true = logits_of(model, DynamicCache(config=model.config), Protocol(60, 10, 7))
    false = logits_of(model, toys.Truncated(config=model.config), Protocol(60, 10, 7))
    assert bool((true != false).any(dim=-1).all())
    prefill = [forward(model, WINDOW[None], of(config=model.config)) for of in (DynamicCache, toys.Truncated)]
    assert torch.equal(*prefill)


def test_the_cache_argument_is_the_one_that_raises_no_deprecation_warning():
    model = toys.tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(model, WINDOW[None], DynamicCache(config=model.config))
    assert cache_argument(model) in ("cache", "past_key_values")


def test_a_cache_that_stores_nothing_is_refused():
    model = toys.tiny_model()
    with pytest.raises(EvaluationError, match="holds no tensor"):
        list(stream(model, toys.Hollow(config=model.config), WINDOW, Protocol(60, 10, 7)))


def test_windows_are_consecutive_and_score_exactly_what_was_asked_for():
    protocol, tokenizer = Protocol(50, 10, 1), toys.byte_tokenizer()
    found = list(windows([toys.TEXT[:300], toys.TEXT[300:]], tokenizer, protocol, max_tokens=100))
    cut = [of.ids for of in found]
    ids = tokenizer(toys.TEXT[:300] + "\n\n" + toys.TEXT[300:])["input_ids"]
    assert [len(of) for of in cut] == [50, 50, 33]
    assert torch.cat(cut).tolist() == ids[:133]
    assert sum(len(of) - 11 for of in cut) == 100


def test_every_token_knows_its_document():
    texts = ["one ", "second", "the third"]
    cut = list(windows(texts, toys.byte_tokenizer(), Protocol(5, 2, 1), 100))
    documents = torch.cat([of.documents for of in cut]).tolist()
    assert documents == ([0] * 4 + [1] * 8 + [2] * 11)[: len(documents)]
    assert len(documents) >= 20


def test_words_and_bytes_of_a_text_cut_anywhere_are_those_of_the_whole():
    text = "Grüße,  two\n\n words and  more " * 9
    protocol = Protocol(7, 1, 1)
    ids = torch.tensor(toys.byte_tokenizer()(text)["input_ids"])
    pieces = [ids[start : start + 20] for start in range(0, len(ids) - 2, 18)]  # each scores the next 18 tokens
    counts = [count_units(piece, toys.byte_tokenizer(), protocol) for piece in pieces]
    scored = bytes(text.encode()[2:])
    assert sum(words for words, _ in counts) == len(re.findall(rb"\s+", scored))
    plain = text.replace("ü", "u").replace("ß", "s")
    ids = torch.tensor(toys.byte_tokenizer()(plain)["input_ids"])
    pieces = [ids[start : start + 20] for start in range(0, len(ids) - 2, 18)]
    assert sum(count_units(of, toys.byte_tokenizer(), protocol)[1] for of in pieces) == len(plain) - 2


def test_the_last_window_may_be_short_and_a_rest_without_scores_is_dropped():
    protocol, tokenizer = Protocol(50, 10, 1), toys.byte_tokenizer()
    assert [len(of.ids) for of in windows([toys.TEXT[:80]], tokenizer, protocol, 1000)] == [50, 30]
    assert [len(of.ids) for of in windows([toys.TEXT[:61]], tokenizer, protocol, 1000)] == [50]


def test_every_window_begins_with_bos_where_the_tokenizer_puts_one():
    from tokenizers.processors import TemplateProcessing

    tokenizer = toys.byte_tokenizer(bos_token="!")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", bos)])
    cut = [of.ids for of in windows([toys.TEXT], tokenizer, Protocol(50, 10, 1), 100)]
    assert [int(of[0]) for of in cut] == [bos] * 3
    plain = toys.byte_tokenizer()(toys.TEXT)["input_ids"]
    assert torch.cat([of[1:] for of in cut]).tolist() == plain[: 49 + 49 + 32]


def test_long_text_is_read_in_pieces_without_changing_it():
    text = toys.TEXT * 30
    assert len(text) > 200_000
    cut = [of.ids for of in windows([text], toys.byte_tokenizer(), Protocol(500, 10, 1), 10**9)]
    assert bytes(torch.cat(cut).tolist()) != b""
    assert torch.cat(cut).tolist() == toys.byte_tokenizer()(text)["input_ids"][: sum(map(len, cut))]


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(InputError, match="31 tokens and one window takes 50"):
        list(windows([toys.TEXT[:31]], toys.byte_tokenizer(), Protocol(50, 10, 1), 100))
