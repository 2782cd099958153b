"""What transformers' own caches get wrong today, one test each, with the right result for every cache of ours."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, WINDOW, tiny_model
from modes import MODES, NEW_TOKENS, PROMPT_TOKENS, assistant_of, generate, prompt
from strategies import (
    CACHE_ARGUMENT,
    STRATEGIES,
    Strategy,
    decoder_config,
    dynamic_cache,
    needs_positions,
    whole_cache,
)
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvcache import InputError, KVCache, KVCacheError, StateError, build_cache

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)

# One of each kind: full attention, learned positions, windows, shared layers, chunks, sinks, recurrent states, latents.
DECODERS = ["llama", "gpt2", "mistral", "gemma3n", "llama4", "gpt_oss", "qwen3_next", "deepseek_v3"]
CROPPABLE = [name for name in DECODERS if ARCHITECTURES[name].croppable]
WINDOWED = [name for name in DECODERS if ARCHITECTURES[name].windowed]
# Llama 4 does not tell its attention layers, and so the cache, where the tokens are.
POSITIONED = [name for name in DECODERS if name != "llama4"]


def build(strategy: Strategy, architecture: str) -> tuple[PreTrainedModel, KVCache]:
    """The model in float32, where the bitwise strategies hold too, and an empty cache."""
    model = tiny_model(architecture, torch.float32)
    return model, strategy.build(decoder_config(model))


def feed(model: PreTrainedModel, cache: KVCache, ids: Tensor, **options: object) -> Tensor:
    """One forward pass, as a user who prefills a prefix writes it."""
    with torch.no_grad():
        return model(ids, **{CACHE_ARGUMENT: cache}, **options).logits


def filled(strategy: Strategy, architecture: str, ids: Tensor) -> tuple[PreTrainedModel, KVCache]:
    """A cache that holds exactly `ids`."""
    model, cache = build(strategy, architecture)
    cache.align(ids)
    feed(model, cache, ids)
    return model, cache


def check_as_without_cache(model: PreTrainedModel, cache: KVCache, ids: Tensor, **options: object) -> None:
    expected = generate(model, None, ids, **options)
    generation = generate(model, cache, ids, **options)
    torch.testing.assert_close(generation.tokens, expected.tokens, rtol=0, atol=0)
    cache.check_integrity()
    assert cache.get_seq_length() == expected.tokens_seen


def check_kept(architecture: str, kept: int, common: int) -> None:
    """All that is common, or nothing where the model cannot step back so far."""
    traits = ARCHITECTURES[architecture]
    assert kept in ((0, common) if traits.windowed else (common if traits.croppable else 0,))


def snapshot(cache: KVCache) -> list[Tensor]:
    """All keys and values held, copied."""
    return [
        states.clone() for layer in cache.block_layers for states in (layer.keys, layer.values) if states is not None
    ]


def check_nothing_stored(cache: KVCache, before: list[Tensor], seen: int) -> None:
    cache.check_integrity()
    assert cache.get_seq_length() == seen
    after = snapshot(cache)
    assert len(after) == len(before)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# A cache that holds the whole prompt already


@pytest.mark.parametrize("architecture", DECODERS)
def test_whole_prompt_cached(strategy: Strategy, architecture: str) -> None:
    """Aligned, the prompt's last token is computed again (or everything, where the model cannot step back)."""
    ids = prompt(rows=2)
    model, cache = filled(strategy, architecture, ids)
    check_kept(architecture, cache.align(ids), PROMPT_TOKENS - 1)
    check_as_without_cache(model, cache, ids)


@needs_positions
@pytest.mark.parametrize("architecture", POSITIONED)
def test_whole_prompt_cached_and_fed_again(strategy: Strategy, architecture: str) -> None:
    ids = prompt()
    model, cache = filled(strategy, architecture, ids)
    before = snapshot(cache)
    with pytest.raises(InputError, match="align"):
        generate(model, cache, ids)
    check_nothing_stored(cache, before, PROMPT_TOKENS)


@needs_positions
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_short_prompt_fed_again(strategy: Strategy, tokens: int) -> None:
    """With so few tokens the positions say less."""
    ids = prompt(tokens=tokens)
    model, cache = filled(strategy, "llama", ids)
    before = snapshot(cache)
    with pytest.raises(InputError, match="align"):
        generate(model, cache, ids)
    check_nothing_stored(cache, before, tokens)


def test_whole_prompt_cached_and_last_token_removed(strategy: Strategy) -> None:
    ids = prompt()
    model, cache = filled(strategy, "llama", ids)
    cache.crop(-1)
    check_as_without_cache(model, cache, ids)


# A cached text that is not the beginning of the prompt


@pytest.mark.parametrize("architecture", DECODERS)
def test_cached_text_longer_than_the_prompt(strategy: Strategy, architecture: str) -> None:
    model, cache = filled(strategy, architecture, prompt(rows=2))
    ids = prompt(rows=2)[:, :9]
    check_kept(architecture, cache.align(ids), 8)
    check_as_without_cache(model, cache, ids)


def test_cached_text_longer_than_the_prompt_unaligned(strategy: Strategy) -> None:
    model, cache = filled(strategy, "llama", prompt())
    before = snapshot(cache)
    with pytest.raises(InputError, match="align"):
        generate(model, cache, prompt()[:, :9])
    check_nothing_stored(cache, before, PROMPT_TOKENS)


@pytest.mark.pairs
@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("common", [0, 1, 4, 10])
def test_cached_text_leaves_the_prompt(strategy: Strategy, architecture: str, common: int) -> None:
    """What both begin with is used, the rest is computed; `common` tokens, at and between block boundaries."""
    model, cache = filled(strategy, architecture, prompt()[:, :13])
    ids = torch.cat([prompt()[:, :common], prompt(tokens=9, seed=5)], dim=1)
    assert ids[0, common] != prompt()[0, common]
    check_kept(architecture, cache.align(ids), common)
    check_as_without_cache(model, cache, ids)


def test_rows_leave_the_cached_text_at_different_places(strategy: Strategy) -> None:
    ids = prompt(rows=2)
    model, cache = filled(strategy, "llama", ids)
    changed = ids.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 90 + 3
    changed[1, 7] = (changed[1, 7] + 1) % 90 + 3
    assert cache.align(changed) == 7
    check_as_without_cache(model, cache, changed)


def test_unknown_text_is_not_trusted(strategy: Strategy) -> None:
    """A cache that was never told its token ids keeps nothing."""
    model, cache = build(strategy, "llama")
    feed(model, cache, prompt()[:, :13])
    assert cache.align(prompt()) == 0
    check_as_without_cache(model, cache, prompt())


def test_remembered_text_is_used(strategy: Strategy) -> None:
    model, cache = build(strategy, "llama")
    first = generate(model, cache, prompt())
    sequences = torch.cat([prompt(), first.tokens], dim=1)
    cache.remember(sequences)
    ids = torch.cat([sequences, prompt(tokens=4, seed=1)], dim=1)
    # The last generated token was never fed.
    assert cache.align(ids) == sequences.shape[1] - 1
    check_as_without_cache(model, cache, ids)


def test_remembering_another_batch(strategy: Strategy) -> None:
    _, cache = filled(strategy, "llama", prompt())
    with pytest.raises(InputError, match="rows"):
        cache.remember(prompt(rows=3))


def test_aligning_another_batch(strategy: Strategy) -> None:
    _, cache = filled(strategy, "llama", prompt(rows=2))
    with pytest.raises(InputError, match="rows"):
        cache.align(prompt(rows=3))


# Only the new ids


@pytest.mark.pairs
# More new tokens than are cached cannot be told from the whole text. GPT-2 itself stumbles over no tokens at all.
@pytest.mark.parametrize("new_tokens", [1, 5, pytest.param(PROMPT_TOKENS, marks=needs_positions)])
@pytest.mark.parametrize("architecture", [name for name in POSITIONED if name != "gpt2"])
def test_only_new_ids_without_a_mask(strategy: Strategy, architecture: str, new_tokens: int) -> None:
    """`generate` takes them for the whole text: the error says what to pass."""
    model, cache = filled(strategy, architecture, prompt())
    before = snapshot(cache)
    new_ids = prompt(tokens=new_tokens, seed=1)
    with pytest.raises(InputError, match="continuation"):
        model.generate(new_ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=NEW_TOKENS, do_sample=False)
    check_nothing_stored(cache, before, PROMPT_TOKENS)


@pytest.mark.pairs
@pytest.mark.parametrize("new_tokens", [1, 5, PROMPT_TOKENS, 30])
@pytest.mark.parametrize("architecture", DECODERS)
def test_only_new_ids(strategy: Strategy, architecture: str, new_tokens: int) -> None:
    model, cache = filled(strategy, architecture, prompt(rows=2))
    new_ids = prompt(rows=2, tokens=new_tokens, seed=1)
    expected = generate(model, None, torch.cat([prompt(rows=2), new_ids], dim=1))
    inputs = cache.continuation(new_ids)
    generation = generate(model, cache, **inputs)
    torch.testing.assert_close(generation.tokens, expected.tokens, rtol=0, atol=0)
    assert cache.get_seq_length() == expected.tokens_seen


@pytest.mark.parametrize("architecture", DECODERS)
def test_only_new_ids_after_a_padded_prompt(strategy: Strategy, architecture: str) -> None:
    model, cache = build(strategy, architecture)
    mask = torch.ones(2, PROMPT_TOKENS, dtype=torch.long)
    mask[1, :6] = 0
    ids = prompt(rows=2) * mask
    generate(model, cache, ids, attention_mask=mask, max_new_tokens=1)
    new_ids = prompt(rows=2, tokens=5, seed=1)
    inputs = cache.continuation(new_ids, mask)
    generation = generate(model, cache, **inputs)
    whole_ids, whole_mask = torch.cat([ids, new_ids], dim=1), torch.cat([mask, torch.ones_like(new_ids)], dim=1)
    expected = generate(model, None, whole_ids, attention_mask=whole_mask)
    torch.testing.assert_close(generation.tokens, expected.tokens, rtol=0, atol=0)


def test_continuation_with_a_mask_of_the_wrong_length(strategy: Strategy) -> None:
    _, cache = filled(strategy, "llama", prompt())
    with pytest.raises(InputError, match="mask"):
        cache.continuation(prompt(tokens=5), torch.ones(1, 5, dtype=torch.long))


# One cached prefix, several rows


PREFIX = 13


@pytest.mark.pairs
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 3}],
    ids=["beams", "beams_return_sequences", "sampling_return_sequences"],
)
@pytest.mark.parametrize("architecture", CROPPABLE)
def test_prefix_of_one_row_is_shared(strategy: Strategy, architecture: str, options: dict[str, object]) -> None:
    model, cache = filled(strategy, architecture, prompt()[:, :PREFIX])
    assert cache.align(prompt()) == PREFIX
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = generate(model, None, prompt(), **options)
        torch.manual_seed(3)
        generation = generate(model, cache, prompt(), **options)
    torch.testing.assert_close(generation.tokens, expected.tokens, rtol=0, atol=0)
    cache.check_integrity()


@pytest.mark.parametrize("architecture", CROPPABLE)
def test_prefix_of_one_row_serves_a_batch(strategy: Strategy, architecture: str) -> None:
    model, cache = filled(strategy, architecture, prompt()[:, :PREFIX])
    ids = torch.cat([prompt()[:, :PREFIX].expand(3, -1), prompt(rows=3, tokens=8, seed=2)], dim=1)
    assert cache.align(ids) == PREFIX
    check_as_without_cache(model, cache, ids)


def test_shared_prefix_is_held_once(strategy: Strategy) -> None:
    model, cache = filled(strategy, "llama", prompt(tokens=64))
    one_row, config = cache.memory().payload_bytes, model.config
    feed(model, cache, prompt(rows=3, tokens=1, seed=2))
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert cache.memory().payload_bytes == one_row + 3 * per_token


def test_prefix_with_ragged_suffixes(strategy: Strategy) -> None:
    """A prefix, then prompts of two lengths padded between prefix and suffix: each row as alone."""
    model, cache = filled(strategy, "llama", prompt()[:, :PREFIX])
    suffixes = [prompt(tokens=8, seed=2), prompt(tokens=3, seed=3)]
    ids = torch.zeros(2, PREFIX + 8, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, suffix in enumerate(suffixes):
        ids[row, :PREFIX] = prompt()[0, :PREFIX]
        ids[row, PREFIX + 8 - suffix.shape[1] :] = suffix
        mask[row] = ids[row] != 0
    generation = generate(model, cache, ids, attention_mask=mask)
    for row, suffix in enumerate(suffixes):
        alone = generate(model, None, torch.cat([prompt()[:, :PREFIX], suffix], dim=1))
        torch.testing.assert_close(generation.tokens[row], alone.tokens[0], rtol=0, atol=0)


@needs_positions
def test_prefix_with_tokenizer_padding(strategy: Strategy) -> None:
    """Padded on the left, as a tokenizer does, the short prompt does not begin with the cached prefix."""
    model, cache = filled(strategy, "llama", prompt()[:, :PREFIX])
    suffixes = [prompt(tokens=8, seed=2), prompt(tokens=3, seed=3)]
    ids = torch.zeros(2, PREFIX + 8, dtype=torch.long)
    for row, suffix in enumerate(suffixes):
        ids[row, 8 - suffix.shape[1] :] = torch.cat([prompt()[:, :PREFIX], suffix], dim=1)
    mask = (ids != 0).long()
    before = snapshot(cache)
    with pytest.raises(InputError, match="align"):
        generate(model, cache, ids, attention_mask=mask)
    check_nothing_stored(cache, before, PREFIX)
    assert cache.align(ids) == 0
    check_as_without_cache(model, cache, ids, attention_mask=mask)


@pytest.mark.parametrize(("held", "rows"), [(2, 1), (2, 3), (3, 2), (2, 4)])
def test_other_changes_of_batch_size(strategy: Strategy, held: int, rows: int) -> None:
    model, cache = filled(strategy, "llama", prompt(rows=held))
    before = snapshot(cache)
    with pytest.raises(InputError, match="rows"):
        feed(model, cache, prompt(rows=rows, tokens=5))
    check_nothing_stored(cache, before, PROMPT_TOKENS)


# Rows of the batch


@pytest.mark.parametrize("architecture", CROPPABLE)
def test_rows_repeat_and_are_selected(strategy: Strategy, architecture: str) -> None:
    model, cache = filled(strategy, architecture, prompt(rows=2)[:, :PREFIX])
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([5, 0, 1]))
    rows = prompt(rows=2)[[1, 0, 0]]
    ids = torch.cat([rows[:, :PREFIX], prompt(rows=3, tokens=8, seed=2)], dim=1)
    check_as_without_cache(model, cache, ids)


def test_repeated_and_cropped(strategy: Strategy) -> None:
    model, cache = filled(strategy, "llama", prompt(rows=2))
    cache.batch_repeat_interleave(2)
    cache.crop(-9)
    check_as_without_cache(model, cache, prompt(rows=2).repeat_interleave(2, dim=0))


# Stepping back


@pytest.mark.pairs
@pytest.mark.parametrize("late", [False, True], ids=["unrecorded", "recorded_too_late"])
@pytest.mark.parametrize("architecture", WINDOWED)
def test_crop_past_what_is_held(strategy: Strategy, architecture: str, late: bool) -> None:
    """Refused, and nothing of it happens: not in the full layers before the first window, not in a late recording."""
    ids = prompt(tokens=40)
    model, cache = filled(strategy, architecture, ids)
    if late:
        cache.activate_past_recording()
    before = snapshot(cache)
    with pytest.raises(StateError, match="window"):
        cache.crop(-20)
    check_nothing_stored(cache, before, 40)
    check_as_without_cache(model, cache, torch.cat([ids, prompt(tokens=2, seed=1)], dim=1))


@pytest.mark.pairs
@pytest.mark.parametrize("removed", [1, 3, 9])
@pytest.mark.parametrize("architecture", WINDOWED)
def test_unrecorded_crop_is_right_or_refused(strategy: Strategy, architecture: str, removed: int) -> None:
    """Blocks hold a few tokens more than the window, which may be enough."""
    model, cache = filled(strategy, architecture, prompt(tokens=40))
    try:
        cache.crop(-removed)
    except StateError:
        assert cache.get_seq_length() == 40
    else:
        check_as_without_cache(model, cache, prompt(tokens=40))


@pytest.mark.pairs
@pytest.mark.parametrize("removed", [1, 3, 12])
@pytest.mark.parametrize("architecture", WINDOWED)
def test_recorded_crop(strategy: Strategy, architecture: str, removed: int) -> None:
    model, cache = build(strategy, architecture)
    cache.activate_past_recording()
    feed(model, cache, prompt())
    cache.crop(-removed)
    check_as_without_cache(model, cache, prompt())


@pytest.mark.parametrize("architecture", WINDOWED)
def test_crop_within_the_window(strategy: Strategy, architecture: str) -> None:
    ids = prompt()[:, : WINDOW - 1]
    model, cache = filled(strategy, architecture, ids)
    cache.crop(-3)
    check_as_without_cache(model, cache, prompt())


@needs_positions
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_drafts_on_a_growing_conversation(strategy: Strategy, architecture: str) -> None:
    """transformers feeds the whole text again when it drafts on a filled cache, and is silently wrong."""
    model, cache = build(strategy, architecture)
    first = generate(model, cache, prompt(), assistant_model=assistant_of(model))
    ids = torch.cat([prompt(), first.tokens, prompt(tokens=3, seed=1)], dim=1)
    before, seen = snapshot(cache), cache.get_seq_length()
    with pytest.raises(InputError, match="reset"):
        generate(model, cache, ids, assistant_model=assistant_of(model))
    check_nothing_stored(cache, before, seen)
    cache.reset()
    expected = generate(model, None, ids)
    second = generate(model, cache, ids, assistant_model=assistant_of(model))
    torch.testing.assert_close(second.tokens, expected.tokens, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(6))
def test_prompt_lookup_at_any_length(strategy: Strategy, seed: int) -> None:
    """A static cache of the default size runs over its end here for most seeds."""
    model, cache = build(strategy, "llama")
    ids = prompt(tokens=7, seed=seed).repeat(1, 3)
    expected = generate(model, None, ids)
    generation = generate(model, cache, ids, prompt_lookup_num_tokens=10)
    torch.testing.assert_close(generation.tokens, expected.tokens, rtol=0, atol=0)


# Building


def test_layers_follow_the_config(strategy: Strategy) -> None:
    """A cache without its config fails in the middle of a hybrid model; ours cannot be built without one."""
    model, cache = build(strategy, "qwen3_next")
    assert len(cache.layers) == model.config.num_hidden_layers
    assert len(cache.block_layers) == 2
    with pytest.raises(TypeError):
        KVCache()  # type: ignore[call-arg]


def test_cache_of_a_smaller_model(strategy: Strategy) -> None:
    model = tiny_model("qwen3_next")
    cache = strategy.build(decoder_config(tiny_model("llama")))
    with pytest.raises(ValueError, match="layer"):  # transformers' own, or ours, which is one too
        feed(model, cache, prompt())


def test_encoder_decoder_needs_both_halves(strategy: Strategy) -> None:
    """Given alone it would take the cross-attention's states for its own; transformers' cache does so silently."""
    model, cache = build(strategy, "t5")
    with pytest.raises(KVCacheError, match="EncoderDecoderCache"):
        generate(model, cache, prompt())


def test_encoder_decoder_crops(strategy: Strategy) -> None:
    model, cache = build(strategy, "t5")
    pair = whole_cache(model, cache)
    generate(model, pair, prompt(rows=2))
    pair.batch_repeat_interleave(2)
    pair.batch_select_indices(torch.tensor([3, 1]))
    pair.crop(-4)
    assert cache.get_seq_length() == NEW_TOKENS - 4
    assert cache.batch_size == 2
    cache.check_integrity()


# The noise floor


def test_differences_stay_below_the_noise_floor(strategy: Strategy) -> None:
    """bfloat16 differs from float64 with any cache: with ours no more than with transformers' own."""
    model = tiny_model("llama", torch.bfloat16)
    ids = prompt(tokens=64)
    truth = feed(tiny_model("llama", torch.float64), dynamic_cache(tiny_model("llama", torch.float64)), ids).double()

    def error(cache: object) -> float:
        chunks = [feed(model, cache, ids[:, :32]), *(feed(model, cache, ids[:, i : i + 1]) for i in range(32, 64))]
        return (torch.cat(chunks, dim=1).double() - truth).square().mean().sqrt().item()

    assert error(strategy.build(decoder_config(model))) <= 1.25 * error(dynamic_cache(model))


def test_conversation_ends_where_it_began(strategy: Strategy) -> None:
    """A cache that was reset is as good as new, for any batch."""
    model, cache = filled(strategy, "llama", prompt(rows=3))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.memory().payload_bytes == 0
    check_as_without_cache(model, cache, prompt(rows=2))


@pytest.mark.parametrize("mode", ["greedy", "beams", "padded_batch"])
def test_specification_builds_the_same(strategy: Strategy, mode: str) -> None:
    model = tiny_model("llama")
    cache = build_cache(decoder_config(model), strategy.spec)
    generation = MODES[mode](model, cache)
    expected = MODES[mode](model, strategy.build(decoder_config(model)))
    assert torch.equal(generation.logits, expected.logits)
    assert cache.exactness.kind == strategy.claim(cache)
