"""Sinks and a sliding window: the same as attention under such a mask, in every mode, and bounded memory."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from modes import DECODER_ONLY, MODES, NEEDS_CROP, generate, padded_batch, padded_rows, prompt
from strategies import CACHE_ARGUMENT, RENAMED, decoder_config, whole_cache
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from windowed import SEEN, SINKS, allowed

from hf_kvcache import (
    ConfigError,
    InputError,
    KVCache,
    PagedCache,
    SlidingWindowCache,
    SpecError,
    StateError,
    build_cache,
)
from hf_kvcache.layer import BlockLayer
from hf_kvcache.retention import Window, WindowLayer
from hf_kvcache.retention import window_layer as window_module
from hf_kvcache.retention.rotation import FAMILIES, find_rotation
from hf_kvcache.spec import cache_spec

# Without their own attention interface (T5 before 5.24), eager only, or with latent keys that the model expands itself.
UNREADABLE = {"gemma2", "gpt_oss", "deepseek_v3"} | (set() if RENAMED else {"t5"})
NATIVE = {"mistral"}
WINDOWED = sorted(set(ARCHITECTURES) - UNREADABLE - NATIVE)


def cases() -> list[tuple[str, str]]:
    return [
        (architecture, mode)
        for architecture in WINDOWED
        for mode in MODES
        if (ARCHITECTURES[architecture].croppable or mode not in NEEDS_CROP)
        and not (ARCHITECTURES[architecture].encoder_decoder and mode in DECODER_ONLY)
    ]


def windowed_cache(model: torch.nn.Module, block_size: int = 4) -> SlidingWindowCache:
    return SlidingWindowCache(decoder_config(model), window=SEEN, sinks=SINKS, block_size=block_size)


@pytest.mark.parametrize(("architecture", "mode"), cases())
def test_every_mode_is_attention_under_the_mask(architecture: str, mode: str) -> None:
    model, masked = tiny_model(architecture), tiny_model(architecture, attention="windowed")
    cache = windowed_cache(model)
    found = MODES[mode](model, whole_cache(model, cache))
    expected = MODES[mode](masked, None)
    torch.testing.assert_close(found.tokens, expected.tokens, rtol=0, atol=0)
    floor = max(ARCHITECTURES[architecture].floor, 1e-5 if mode in NEEDS_CROP else 1e-12)
    scale = expected.logits.abs().max().item()
    torch.testing.assert_close(found.logits, expected.logits.to(found.logits.dtype), rtol=0, atol=floor * scale)
    cache.check_integrity()
    assert cache.exactness.kind == "approximate"
    assert cache.get_seq_length() == found.tokens_seen


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3", "gpt2"])
def test_padded_rows_equal_their_single_runs(architecture: str) -> None:
    """Each row's sinks are its own first tokens, wherever the padding ends."""
    model = tiny_model(architecture)
    together = padded_batch(model, windowed_cache(model))
    for index, row in enumerate(padded_rows()):
        alone = generate(model, windowed_cache(model), row)
        torch.testing.assert_close(together.tokens[index], alone.tokens[0], rtol=0, atol=0)
        allowed = max(ARCHITECTURES[architecture].floor * 1e-3, 1e-12) * alone.logits.abs().max().item()
        torch.testing.assert_close(together.logits[:, index], alone.logits[:, 0], rtol=0, atol=allowed)


def forward(model: PreTrainedModel, cache: KVCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits


@pytest.mark.parametrize("sizes", [[1] * 60, [60], [7, 1, 1, 30, 2, 19], [3, 57], [31, 29], [20, 1, 39]], ids=str)
def test_results_do_not_depend_on_the_chunks(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "_SLICE_QUERIES", 9)
    monkeypatch.setattr(window_module, "_IN_PLACE_QUERIES", 8)
    model, masked = tiny_model("llama"), tiny_model("llama", attention="windowed")
    ids = prompt(rows=3, tokens=60)
    mask = torch.ones_like(ids)
    mask[1, :11], mask[2, :33] = 0, 0
    with torch.no_grad():
        expected = masked(ids, attention_mask=mask, use_cache=False).logits
    cache, seen, found = windowed_cache(model), 0, []
    for size in sizes:
        positions = slice(seen, seen + size)
        seen += size
        found.append(forward(model, cache, ids[:, positions], mask[:, :seen]))
        cache.check_integrity()
    difference = (torch.cat(found, 1) - expected)[mask.bool()].abs().max()
    assert difference < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefill", [1, 5, 300])
def test_memory_is_bounded(block_size: int, prefill: int) -> None:
    model = tiny_model("llama", torch.float32)
    config = decoder_config(model)
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    cache = SlidingWindowCache(config, window=20, sinks=3, block_size=block_size)
    forward(model, cache, prompt(tokens=prefill))
    held = []
    for step in range(80):
        forward(model, cache, prompt(tokens=1, seed=step))
        held.append(cache.memory())
        assert held[-1].payload_bytes <= token_bytes * (3 + 20 + block_size)
        assert held[-1].tokens_held <= 3 + 20 + block_size
        assert held[-1].tokens_seen == prefill + step + 1
    # Nothing grows, unused room included.
    assert max(memory.total_bytes for memory in held[40:]) <= max(memory.total_bytes for memory in held[:40])


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "llama4"])
def test_native_windows_are_left_alone_and_their_storage_stops_growing(architecture: str) -> None:
    """Real storage is counted, the arenas' free blocks included."""
    model = tiny_model(architecture, torch.float32)
    cache = SlidingWindowCache(decoder_config(model), window=12, sinks=2, block_size=4)
    native = [layer for layer in cache.block_layers if layer.window is not None]
    assert native
    assert {type(layer) for layer in native} == {BlockLayer}
    bytes_held = []
    for step in range(90):
        forward(model, cache, prompt(tokens=1, seed=step))
        bytes_held.append(sum(arena.nbytes for layer in native for arena in layer.table.raw_pool.arenas))
    assert max(bytes_held[45:]) <= max(bytes_held[:45])
    assert cache.exactness.kind == ("rounding" if architecture == "mistral" else "approximate")


def test_every_operation_in_any_order() -> None:
    """Random sequences, batches padded on the left among them, against attention under the mask over plain tensors."""
    generator = random.Random(0)
    for _ in range(60):
        rows, block_size = generator.randint(1, 3), generator.choice([1, 3, 4])
        layer = WindowLayer(BlockLayer(block_size), SEEN, SINKS)
        recording = generator.random() < 0.3
        if recording:
            layer.activate_past_recording()
        keys = values = torch.empty(rows, 2, 0, 4, dtype=torch.float64)
        padding = torch.tensor([generator.choice([0, 0, 3, 11]) for _ in range(rows)])
        for _ in range(25):
            operation = generator.choice(["update"] * 4 + ["select", "repeat", "crop", "copy"])
            tokens = keys.shape[2]
            if operation == "update":
                new = generator.choice([1, 1, 2, 5, 17, 30])
                states = [torch.randn(len(padding), 2, new, 4, dtype=torch.float64) for _ in range(2)]
                keys, values = torch.cat([keys, states[0]], 2), torch.cat([values, states[1]], 2)
                at = torch.arange(keys.shape[2])
                mask = ((at <= at[-new:, None]) & (at >= padding[:, None, None]))[:, None]
                query = torch.randn(len(padding), 6, new, 4, dtype=torch.float64)
                handles = layer.update(*states)
                found = scaled_dot_product_attention(query, *handles, attn_mask=mask, enable_gqa=True)
                whole = ((at <= at[:, None]) & (at >= padding[:, None, None]))[:, None]
                seen = allowed(whole, keys.shape[2])[:, :, -new:]
                expected = scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
                real = (at[-new:] >= padding[:, None])[:, None, :, None]
                assert torch.where(real, found - expected, 0.0).abs().max() < 1e-12
            elif tokens and operation in ("select", "repeat"):
                repeats = operation == "repeat"
                index = [generator.randrange(len(padding)) for _ in range(generator.randint(1, 3))]
                if repeats:
                    index = sorted(list(range(len(padding))) * 2) if len(padding) < 3 else list(range(len(padding)))
                    layer.batch_repeat_interleave(2 if len(padding) < 3 else 1)
                else:
                    layer.batch_select_indices(torch.tensor(index))
                keys, values, padding = keys[index], values[index], padding[index]
            elif tokens and operation == "crop":
                remove = generator.randint(0, min(tokens, 9))
                if max(0, tokens - remove - SEEN + 1) < layer.table.first_token:
                    with pytest.raises(StateError, match="window"):
                        layer.crop(-remove)
                    continue
                layer.crop(-remove)
                keys, values = keys[:, :, : tokens - remove], values[:, :, : tokens - remove]
                # All that a crop leaves of the padding may be followed by anything: here by more of it.
            elif operation == "copy":
                layer = copy.deepcopy(layer)
            layer.check_integrity()
            assert layer.get_seq_length() == keys.shape[2]


def test_one_row_becomes_the_past_of_several() -> None:
    model = tiny_model("llama")
    one, many = windowed_cache(model), windowed_cache(model)
    for ids in (prompt(tokens=19), prompt(tokens=3, seed=1)):
        forward(model, one, ids)
    forward(model, many, prompt(tokens=19))
    found = forward(model, many, prompt(tokens=3, seed=1).expand(3, -1))
    found = forward(model, many, prompt(tokens=4, seed=2).expand(3, -1))
    expected = forward(model, one, prompt(tokens=4, seed=2)).expand(3, -1, -1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("tokens", [5, 26])
def test_saved_and_loaded_goes_on(tmp_path: Path, tokens: int, padded: bool) -> None:
    model = tiny_model("llama", torch.float32)
    cache = windowed_cache(model)
    mask = torch.ones(2, tokens + 12, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
    forward(model, cache, prompt(rows=2, tokens=tokens), mask[:, :tokens])
    cache.save(tmp_path / "cache", model)
    loaded = SlidingWindowCache.load(tmp_path / "cache", model)
    assert loaded.retention == Window(SEEN, SINKS)
    assert loaded.memory().payload_bytes == cache.memory().payload_bytes
    for seen in range(tokens, tokens + 12):
        ids = prompt(rows=2, tokens=1, seed=seen)
        one, two = (forward(model, each, ids, mask[:, : seen + 1]) for each in (cache, loaded))
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5 * one.abs().max().item())


def test_bytes_can_be_planned() -> None:
    """States without values take what real ones take."""
    model = tiny_model("llama", torch.float32)
    real, planned = windowed_cache(model), windowed_cache(model)
    for tokens in (50, 1, 1, 9):
        forward(model, real, prompt(rows=2, tokens=tokens))
        for layer in planned.block_layers:
            layer.update(*[torch.empty(2, 2, tokens, decoder_config(model).head_dim, device="meta")] * 2)
    assert planned.memory()[:5] == real.memory()[:5]


# What does not work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4}, "longer than the sinks"),
        ({"window": 9, "sinks": -1}, "sinks"),
        ({"window": 2, "sinks": 7}, "2 tokens"),
    ],
)
def test_impossible_choices(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlidingWindowCache(decoder_config(tiny_model("llama")), **options)


@pytest.mark.parametrize("fed", [0, 9])
def test_padding_on_the_right(fed: int) -> None:
    """Refused before it does harm: the text can go on with the right padding."""
    model = tiny_model("llama")
    cache = windowed_cache(model)
    ids, mask = prompt(rows=2, tokens=fed + 12), torch.ones(2, fed + 12, dtype=torch.long)
    if fed:
        forward(model, cache, ids[:, :fed], mask[:, :fed])
    mask[1, -3:] = 0
    with pytest.raises(InputError, match="row 1 is padded on the right"):
        forward(model, cache, ids[:, fed:], mask)
    assert cache.get_seq_length() == fed
    if not fed:
        found, expected = forward(model, cache, ids), forward(model, windowed_cache(model), ids)
        assert torch.equal(found, expected)


def test_crop_past_what_was_dropped() -> None:
    model = tiny_model("llama")
    cache = windowed_cache(model)
    forward(model, cache, prompt(tokens=30))
    before = cache.memory()
    with pytest.raises(StateError, match="activate_past_recording"):
        cache.crop(-9)
    assert cache.memory() == before
    cache.activate_past_recording()
    forward(model, cache, prompt(tokens=20, seed=1))
    cache.crop(-20)
    found = forward(model, cache, prompt(tokens=2, seed=2))
    never = windowed_cache(model)
    forward(model, never, prompt(tokens=30))
    expected = forward(model, never, prompt(tokens=2, seed=2))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_attention_that_cannot_leave_tokens_out_is_refused(architecture: str) -> None:
    """Nothing wrong is computed: as long as the window holds all it works, then it raises."""
    model = tiny_model(architecture)
    cache = windowed_cache(model)
    forward(model, cache, prompt(tokens=SINKS + SEEN))
    with pytest.raises(StateError, match="attn_implementation='sdpa'"):
        forward(model, cache, prompt(tokens=1))
    with pytest.raises(StateError, match="attn_implementation='sdpa'"):
        forward(model, windowed_cache(model), prompt(tokens=SINKS + SEEN + 1))


def test_unfused_is_refused() -> None:
    with pytest.raises(ConfigError, match="fused"):
        KVCache(decoder_config(tiny_model("llama")), fused=False, retention=Window(SEEN, SINKS))


def test_described() -> None:
    cache = windowed_cache(tiny_model("gemma3"))
    assert "2 sinks and a window of 6 tokens" in cache.describe()
    assert "attention window of 8" in cache.describe()
    assert cache_spec(cache) == "window:window=6,sinks=2,rerotate=False,block_size=4"
    assert build_cache(decoder_config(tiny_model("llama")), cache_spec(cache)).retention == Window(SEEN, SINKS)
    with pytest.raises(SpecError, match="needs window="):
        build_cache(decoder_config(tiny_model("llama")), "window")


# Together with other choices

COMBINED = "quantized:bits=4,sinks=2,recent=4,block_size=4+window:window=12,sinks=2"


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("codec", ["exact", "auto"])
def test_window_over_encoded_blocks(mode: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a codec that loses nothing it is the window's own result; with any other it works all the same."""
    monkeypatch.setattr("windowed.SEEN", 12)
    model, masked = tiny_model("llama"), tiny_model("llama", attention="windowed")
    cache = build_cache(decoder_config(model), COMBINED.replace("bits=4", f"bits=4,codec={codec}"))
    found = MODES[mode](model, cache)
    cache.check_integrity()
    assert cache.exactness.kind == "approximate"
    assert cache.get_seq_length() == found.tokens_seen
    assert cache.memory().tokens_held <= 2 + 2 + 12 + 4 + 8  # sinks of both, window, a block, a draft
    if codec == "exact":
        expected = MODES[mode](masked, None)
        torch.testing.assert_close(found.tokens, expected.tokens, rtol=0, atol=0)
        allowed = (1e-5 if mode in NEEDS_CROP else 1e-12) * expected.logits.abs().max().item()
        torch.testing.assert_close(found.logits, expected.logits.to(found.logits.dtype), rtol=0, atol=allowed)


def test_encoded_blocks_that_leave_the_window_are_dropped() -> None:
    model = tiny_model("llama", torch.float32)
    cache = build_cache(decoder_config(model), COMBINED)
    forward(model, cache, prompt(rows=2, tokens=60))
    held = []
    for step in range(60):
        forward(model, cache, prompt(rows=2, tokens=1, seed=step))
        cache.check_integrity()
        held.append(cache.memory())
    assert max(memory.total_bytes for memory in held[20:]) <= max(memory.total_bytes for memory in held[:20])
    assert all(memory.scale_bytes > 0 for memory in held)
    (layer,) = {type(layer) for layer in cache.block_layers}
    assert layer is WindowLayer
    assert all(layer.table.recent.encoded.columns <= 4 for layer in cache.block_layers)
    kinds = cache.describe()
    assert "mixed" in kinds
    assert "window of 12" in kinds


@pytest.mark.parametrize("removed", [1, 5, 11])
def test_combined_steps_back_and_stays_consistent(removed: int) -> None:
    """A cut inside what is held; the result is that of never having gone on where the tokens were still exact."""
    model = tiny_model("llama")
    went, stayed = (build_cache(decoder_config(model), COMBINED) for _ in range(2))
    for cache in (went, stayed):
        forward(model, cache, prompt(tokens=40))
    forward(model, went, prompt(tokens=removed, seed=1))
    went.crop(-removed)
    went.check_integrity()
    one, two = (forward(model, cache, prompt(tokens=3, seed=2)) for cache in (went, stayed))
    went.check_integrity()
    if removed <= 4:
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12 * two.abs().max().item())
    assert torch.isfinite(one).all()


def test_more_exact_sinks_than_the_window_is_long() -> None:
    """Those of the codec stay, and are read only as far as the window sees them."""
    model, config = tiny_model("llama"), decoder_config(tiny_model("llama"))
    window = f"window:window={SEEN},sinks={SINKS}"
    one, two = (build_cache(config, spec) for spec in (window, f"quantized:codec=exact,sinks=25,recent=3+{window}"))
    for tokens in (12, 1, 5, 30, 1):
        ids = prompt(rows=2, tokens=tokens, seed=tokens)
        found, expected = forward(model, two, ids), forward(model, one, ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())
    two.check_integrity()


def test_combined_is_saved_planned_and_named(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    config = decoder_config(model)
    cache, planned = build_cache(config, COMBINED), build_cache(config, COMBINED)
    for tokens in (33, 1, 1, 7):
        forward(model, cache, prompt(rows=2, tokens=tokens))
        for layer in planned.block_layers:
            layer.update(*[torch.empty(2, 2, tokens, config.head_dim, device="meta")] * 2)
    assert planned.memory()[:5] == cache.memory()[:5]
    cache.save(tmp_path / "cache", model)
    loaded = KVCache.load(tmp_path / "cache", model)
    assert cache_spec(loaded) == cache_spec(cache)
    for step in range(9):
        ids = prompt(rows=2, tokens=1, seed=step)
        one, two = forward(model, cache, ids), forward(model, loaded, ids)
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5 * one.abs().max().item())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("quantized:bits=4+quantized:bits=2", "both say how blocks are kept"),
        ("paged+quantized", "both say how blocks are kept"),
        ("window:window=9+window:window=8", "both say which tokens are kept"),
        ("paged:block_size=16+window:window=9,block_size=8", "block_size is 16 in one term and 8"),
        ("paged:fused=false+window:window=9", "fused"),
    ],
)
def test_terms_that_do_not_combine(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_cache(decoder_config(tiny_model("llama")), spec)


def test_terms_combine_in_any_order() -> None:
    config = decoder_config(tiny_model("llama"))
    one, two = (
        build_cache(config, spec)
        for spec in ("window:window=9+paged:block_size=16", "paged:block_size=16+window:window=9")
    )
    assert cache_spec(one) == cache_spec(two) == "window:window=9,sinks=4,rerotate=False,block_size=16"


# Sinks that move along

ROTATING = {
    "llama": {},
    "llama3 scaling": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
}


@pytest.mark.parametrize("family", [*FAMILIES, *ROTATING])
def test_keys_moved_are_keys_computed_there(family: str) -> None:
    """The model's own keys at two positions, for every family and every kind of fixed frequencies."""
    kind = family if family in FAMILIES else "llama"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 50,
        "pad_token_id": 0,
        "layer_types": ["full_attention"],
    }
    config = AutoConfig.for_model(kind, **sizes, **ROTATING.get(family, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    keys = []
    for positions in ([3, 4, 5], [503, 504, 505]):
        cache = PagedCache(config)
        with torch.no_grad():
            model(prompt(tokens=3) % 50, position_ids=torch.tensor([positions]), **{CACHE_ARGUMENT: cache})
        keys.append(cache.layers[0].keys[0])
    moved = find_rotation(config).turn(keys[0], torch.tensor([500] * 3))
    assert (keys[1] - keys[0]).abs().max() > 1e-3 * keys[1].abs().max()
    assert (moved - keys[1]).abs().max() < 1e-4 * keys[1].abs().max()


@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_moved_sinks_are_those_of_keys_computed_in_front_of_the_window(chunk: int, padded: bool) -> None:
    """Against plain attention over keys that are rotated anew, from nothing, for every query: 1e-5 in float32."""
    rotation = find_rotation(LlamaConfig(hidden_size=64, num_attention_heads=4))
    layer = WindowLayer(BlockLayer(4), SEEN, SINKS, rotation)
    tokens, generator = 120, torch.Generator().manual_seed(0)
    padding = torch.tensor([0, 9 if padded else 0])
    query, keys, values = (torch.randn(2, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))

    def turned(states: Tensor, at: Tensor) -> Tensor:
        return rotation.turn(states.double().flatten(0, 1), at).unflatten(0, states.shape[:2])

    at = torch.arange(tokens)
    mask = ((at <= at[:, None]) & (at >= padding[:, None, None]))[:, None]
    found = []
    for begin in range(0, tokens, chunk):
        span = slice(begin, begin + chunk)
        states = turned(keys[:, :, span], at[span]).float(), values[:, :, span]
        handles = layer.update(*states)
        given = mask[:, :, span, : begin + chunk]
        part = turned(query[:, :, span], at[span]).float()
        found.append(scaled_dot_product_attention(part, *handles, attn_mask=given, enable_gqa=True))
    seen = allowed(mask, tokens)
    for position in range(30, tokens, 13):
        for row, first in enumerate(padding.tolist()):
            places = torch.where(at < first + SINKS, at + max(0, position - SEEN + 1 - SINKS - first), at)
            expected = scaled_dot_product_attention(
                turned(query[row : row + 1, :, position : position + 1], at[position : position + 1]),
                turned(keys[row : row + 1], places),
                values[row : row + 1].double(),
                attn_mask=seen[row : row + 1, :, position : position + 1],
                enable_gqa=True,
            )
            assert (torch.cat(found, 2)[row, :, position] - expected[0, :, 0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "'gpt2'"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (CohereConfig(num_hidden_layers=1), "'cohere'"),
    ],
    ids=["no rotation", "frequencies by length", "not known"],
)
def test_keys_that_cannot_be_moved(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlidingWindowCache(config, window=64, rerotate=True)


def test_moved_sinks_in_every_storage() -> None:
    """Encoded without loss or not at all, chunked or not: the same numbers."""
    model = tiny_model("llama")
    config = decoder_config(model)
    ids = prompt(rows=2, tokens=70)
    window = f"window:window={SEEN},sinks={SINKS},rerotate=true"
    results = []
    for spec, sizes in (
        (f"{window},block_size=4", [70]),
        (f"{window},block_size=4", [9, 30, 1, 1, 29]),
        (f"quantized:codec=exact,sinks=1,recent=3,block_size=4+{window}", [40, 30]),
        (f"quantized:codec=exact,sinks=1,recent=3,block_size=4+{window}", [9, 1, 1, 30, 29]),
    ):
        cache = build_cache(config, spec)
        assert build_cache(config, cache_spec(cache)).retention == cache.retention
        results.append(torch.cat([forward(model, cache, part) for part in ids.split(sizes, dim=1)], 1))
    scale = results[0].abs().max()
    assert all((result - results[0]).abs().max() < 1e-12 * scale for result in results)
    still = forward(model, SlidingWindowCache(config, SEEN, SINKS), ids)
    assert (still - results[0]).abs().max() > 1e-3 * scale
