"""Strategy x way to generate x architecture: the same tokens and the same logits as without a cache."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, WINDOW, tiny_model
from modes import (
    DECODER_ONLY,
    MODES,
    NEEDS_CROP,
    NEW_TOKENS,
    PROMPT_TOKENS,
    Generation,
    generate,
    greedy,
    padded_batch,
    padded_rows,
    prompt,
    reference,
)
from strategies import RENAMED, STRATEGIES, Strategy, decoder_config, whole_cache

from hf_kvcache import KVCache, PagedCache
from hf_kvcache.layer import BlockLayer

# Above this a model's own rounding, token by token against one pass, would hide errors: the reference is DynamicCache.
LARGEST_FLOOR = 1e-5


def supported(architecture: str, mode: str) -> bool:
    traits = ARCHITECTURES[architecture]
    return (traits.croppable or mode not in NEEDS_CROP) and not (traits.encoder_decoder and mode in DECODER_ONLY)


CASES = [(architecture, mode) for architecture in ARCHITECTURES for mode in MODES if supported(architecture, mode)]
FLEX = [name for name, traits in ARCHITECTURES.items() if "flex_attention" in traits.attention]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)


def check_cache(cache: KVCache, strategy: Strategy, generation: Generation) -> None:
    assert cache.exactness.kind == strategy.claim(cache)
    assert cache.get_seq_length() == generation.tokens_seen
    cache.check_integrity()
    memory = cache.memory()
    assert memory.tokens_seen == generation.tokens_seen
    kinds = ("payload", "scale", "unused", "table", "other", "buffer")
    parts = [getattr(memory, f"{kind}_bytes") for kind in kinds]
    assert memory.total_bytes == sum(parts)
    assert all(part >= 0 for part in parts)
    assert memory.payload_bytes > 0


def usual_dtype(architecture: str, attention: str | None) -> torch.dtype:
    """float64, except with eager attention: its float32 softmax turns the float64 mask of a padded row into NaN."""
    eager = (attention or ARCHITECTURES[architecture].attention[0]) == "eager"
    return torch.float32 if eager else torch.float64


def check_same(
    strategy: Strategy,
    architecture: str,
    mode: str,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
) -> None:
    """Bitwise what DynamicCache gives, or within rounding what no cache gives, as the strategy declares."""
    dtype = dtype or usual_dtype(architecture, attention)
    model = tiny_model(architecture, dtype, attention)
    cache = strategy.build(decoder_config(model))
    generation = MODES[mode](model, whole_cache(model, cache))
    bitwise = strategy.exactness == "bitwise"
    floor = ARCHITECTURES[architecture].floor
    if dtype == torch.float32 or mode in NEEDS_CROP:  # where `generate` hands the logits out in float32
        floor = max(floor, 1e-5)
    expected = reference(architecture, mode, dtype, attention, cached=bitwise or floor > LARGEST_FLOOR)
    torch.testing.assert_close(generation.tokens, expected.tokens, rtol=0, atol=0)
    scale = expected.logits.abs().max().item()
    allowed = 0.0 if bitwise else min(floor, LARGEST_FLOOR) * scale
    expected_logits = expected.logits.to(generation.logits.dtype)
    torch.testing.assert_close(generation.logits, expected_logits, rtol=0, atol=allowed)
    check_cache(cache, strategy, generation)


@pytest.mark.pairs
@every_strategy
@pytest.mark.parametrize(("architecture", "mode"), CASES)
def test_same_result(strategy: Strategy, architecture: str, mode: str) -> None:
    dtype = torch.float32 if strategy.exactness == "bitwise" else None
    check_same(strategy, architecture, mode, dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s.exactness == "bitwise"], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["greedy", "beams"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bitwise_in_half_precision(strategy: Strategy, architecture: str, mode: str, dtype: torch.dtype) -> None:
    check_same(strategy, architecture, mode, dtype)


@pytest.mark.pairs
@every_strategy
@pytest.mark.parametrize("mode", ["greedy", "beams_return_sequences", "padded_batch"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_eager(strategy: Strategy, architecture: str, mode: str) -> None:
    check_same(strategy, architecture, mode, attention="eager")


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@every_strategy
@pytest.mark.parametrize("mode", ["greedy", "beams", "padded_batch"])
@pytest.mark.parametrize("architecture", FLEX)
def test_flex_attention(strategy: Strategy, architecture: str, mode: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # compiling takes longer than everything else here
        check_same(strategy, architecture, mode, attention="flex_attention")


@every_strategy
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_row_equals_its_single_run(strategy: Strategy, architecture: str) -> None:
    model = tiny_model(architecture, usual_dtype(architecture, None))
    cache = strategy.build(decoder_config(model))
    generation = padded_batch(model, whole_cache(model, cache))
    floor = max(ARCHITECTURES[architecture].floor, 1e-5)
    for index, row in enumerate(padded_rows()):
        single = generate(model, None, row)
        torch.testing.assert_close(generation.tokens[index], single.tokens[0], rtol=0, atol=0)
        torch.testing.assert_close(
            generation.logits[:, index], single.logits[:, 0], rtol=0, atol=floor * single.logits.abs().max().item()
        )


@every_strategy
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_both_argument_names(strategy: Strategy, argument: str) -> None:
    if argument == "cache" and not RENAMED:
        pytest.skip(f"transformers {transformers.__version__} has only past_key_values")
    model = tiny_model("llama")
    cache = strategy.build(decoder_config(model))
    deprecated = argument == "past_key_values" and RENAMED
    expected = pytest.warns(FutureWarning, match="past_key_values") if deprecated else contextlib.nullcontext()
    with expected:
        sequences = model.generate(prompt(), do_sample=False, max_new_tokens=NEW_TOKENS, **{argument: cache})
    torch.testing.assert_close(sequences[:, PROMPT_TOKENS:], greedy(model, None).tokens, rtol=0, atol=0)
    assert cache.get_seq_length() == PROMPT_TOKENS + NEW_TOKENS - 1


@every_strategy
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_both_argument_names_of_the_model(strategy: Strategy, argument: str) -> None:
    if argument == "cache" and not RENAMED:
        pytest.skip(f"transformers {transformers.__version__} has only past_key_values")
    model = tiny_model("llama")
    cache = strategy.build(decoder_config(model))
    deprecated = argument == "past_key_values" and RENAMED
    for chunk in prompt().split([9, 1, 11], dim=1):
        with pytest.warns(FutureWarning, match="past_key_values") if deprecated else contextlib.nullcontext():
            logits = model(chunk, **{argument: cache}).logits
    expected = model(prompt(), use_cache=False).logits[:, -11:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9 * expected.abs().max().item())


@every_strategy
def test_state_that_cannot_be_rolled_back_is_not_drafted_on(strategy: Strategy) -> None:
    model = tiny_model("qwen3_next")
    cache = strategy.build(decoder_config(model))
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"(?i)crop|roll|assist"):
        MODES["prompt_lookup"](model, cache)


# DeepSeek-V3 caches latents, which the model itself expands.
READ_IN_PLACE = [n for n, traits in ARCHITECTURES.items() if traits.attention[0] == "sdpa" and n != "deepseek_v3"]


@pytest.mark.parametrize("architecture", READ_IN_PLACE)
def test_fused_reads_copy_nothing(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("the history was copied together")

    monkeypatch.setattr(BlockLayer, "materialize", refuse)
    model = tiny_model(architecture)
    MODES["beams"](model, whole_cache(model, PagedCache(decoder_config(model), block_size=4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_held_follow_the_formula(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    config = decoder_config(model)
    cache = PagedCache(config, block_size=16)
    generation = greedy(model, cache)
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    assert cache.memory().payload_bytes == token_bytes * generation.tokens_seen


def test_beams_hold_their_prompt_once() -> None:
    model = tiny_model("llama")
    one, four = PagedCache(decoder_config(model), block_size=4), PagedCache(decoder_config(model), block_size=4)
    MODES["greedy"](model, one)
    MODES["beams"](model, four)
    token_bytes = one.memory().payload_bytes / one.memory().tokens_seen
    # The prompt's five sealed blocks are shared by all; at worst each beam has everything after them for itself.
    at_most = token_bytes * (20 + 4 * (four.memory().tokens_seen - 20))
    assert one.memory().payload_bytes < four.memory().payload_bytes <= at_most


def test_windows_bound_what_is_held() -> None:
    model = tiny_model("mistral")
    cache = PagedCache(decoder_config(model), block_size=4)
    greedy(model, cache)
    assert cache.memory().tokens_seen == PROMPT_TOKENS + NEW_TOKENS - 1
    assert cache.memory().tokens_held < WINDOW + 4  # the window, and what its oldest block still carries
