"""What is special about encoded histories: what is read, what is never encoded twice, what stays exact."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import tiny_model
from modes import MODES, generate, prompt
from strategies import CACHE_ARGUMENT, decoder_config
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvcache import ConfigError, InputError, KVCache, QuantizedCache, build_cache
from hf_kvcache.attention import streaming
from hf_kvcache.codecs import make_codecs
from hf_kvcache.codecs.mixed import MixedKeys
from hf_kvcache.quantized import QuantizedLayer, QuantizedTable
from hf_kvcache.quantized import plan as plan_module

HEADS, GROUPS, WIDTH, BLOCK, SINKS, RECENT = 2, 3, 16, 8, 3, 10


def layer(bits: int = 4) -> QuantizedLayer:
    return QuantizedLayer(make_codecs("auto", bits, bits), BLOCK, SINKS, RECENT)


def states(tokens: int, rows: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Keys, values and queries; some key channels are far from zero, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, HEADS, tokens, WIDTH)] * 2 + [(rows, HEADS * GROUPS, tokens, WIDTH)]
    keys, values, queries = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    keys[..., :3] += torch.tensor([20.0, -9.0, 4.0])
    return keys.to(dtype), values.to(dtype), queries.to(dtype)


def feed(target: QuantizedLayer, tokens: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
    """One forward pass of an attention layer."""
    keys, values = target.update(tokens[0], tokens[1])
    queries = tokens[2]
    if mask is None and queries.shape[2] > 1:
        mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - queries.shape[2])
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


def table_of(target: QuantizedLayer) -> QuantizedTable:
    assert isinstance(target.table, QuantizedTable)
    return target.table


def split(tokens: tuple[Tensor, ...], *sizes: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(sizes, dim=2) for part in tokens), strict=True))


# What is read


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("at_once", [True, False])
def test_attention_is_that_over_the_decoded_history(
    rows: int, queries: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(streaming, "MOST_SCORES", 0)
        monkeypatch.setattr(streaming, "_MOST_QUERIES", 7)
        monkeypatch.setattr(plan_module, "_CHUNK_ELEMENTS", 2 * HEADS * WIDTH * BLOCK)
    target = layer()
    begin, end = split(states(100 + queries, rows), 100, queries)
    feed(target, begin)
    mask = torch.ones(queries, 100 + queries, dtype=torch.bool).tril(100)[None, None].repeat(rows, 1, 1, 1)
    mask[0, :, :, :20] = False  # as left padding does
    mask[0, 0, 0] = False  # a query that may look nowhere
    found = feed(target, end, mask)
    keys, values = target.materialize(0)
    expected = scaled_dot_product_attention(end[2], keys, values, attn_mask=mask, enable_gqa=True)
    expected[0, :, 0] = 0.0
    assert (found - expected).abs().max() < 1e-10
    assert table_of(target).encoded.columns > 5


def test_sinks_and_recent_tokens_are_exact_and_the_rest_is_not() -> None:
    target = layer()
    tokens = states(100)
    begin, end = split(tokens, 99, 1)
    feed(target, begin)
    feed(target, end)
    for held, given in zip(target.materialize(0), tokens[:2], strict=True):
        same = (held == given).all(-1).all(1)[0]
        assert same[:SINKS].all()
        assert same[-RECENT:].all()
        assert not same[SINKS : 99 - RECENT - BLOCK].any()
        error = (held - given).square().mean() / (given - given.mean(2, keepdim=True)).square().mean()
        assert 0 < error < 0.02


def test_large_key_biases_do_no_harm() -> None:
    """Channels far from zero, as biased projections make them, ruin a plain grid and leave the default as it is."""
    errors = {}
    for codec in ("affine", "auto"):
        for bias in (0.0, 300.0):
            target = QuantizedLayer(make_codecs(codec, 4, 4), 16, SINKS, RECENT)
            tokens = states(400)
            tokens[0][..., [2, 5]] += torch.tensor([bias, -bias], dtype=torch.float64)
            begin, end = split(tokens, 399, 1)
            feed(target, begin)
            found = feed(target, end)
            expected = scaled_dot_product_attention(end[2], tokens[0], tokens[1], enable_gqa=True)
            errors[codec, bias] = ((found - expected).norm() / expected.norm()).item()
    assert errors["auto", 300.0] < 1.5 * errors["auto", 0.0] < 0.3
    assert errors["affine", 300.0] > 5 * errors["auto", 300.0]


def test_a_batch_reads_as_its_rows_do_alone() -> None:
    tokens = states(120, rows=3)
    together = layer()
    outputs = [feed(together, part) for part in split(tokens, 80, 1, 30, 9)]
    for row in range(3):
        alone = layer()
        for output, part in zip(outputs, split(tuple(t[row : row + 1] for t in tokens), 80, 1, 30, 9), strict=True):
            torch.testing.assert_close(output[row : row + 1], feed(alone, part), rtol=0, atol=1e-10)


def test_rows_of_one_prompt_share_encoded_blocks() -> None:
    one, many = layer(), layer()
    tokens = states(90)
    feed(one, tokens)
    feed(many, tuple(part.expand(4, -1, -1, -1) for part in tokens))
    assert table_of(many).encoded.pool.used_blocks == table_of(one).encoded.pool.used_blocks > 5
    assert len(table_of(many).fits) == 1


def test_decoding_works_in_pieces_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the history, no more than so many elements are decoded at once."""
    sizes = []
    scores = MixedKeys.scores

    def spy(self: MixedKeys, prepared: tuple[Tensor, ...], parts: list[Tensor], fit: dict[str, Tensor]) -> Tensor:
        found = scores(self, prepared, parts, fit)
        sizes.append(HEADS * found.shape[-1] * WIDTH)
        return found

    monkeypatch.setattr(MixedKeys, "scores", spy)
    monkeypatch.setattr(plan_module, "_CHUNK_ELEMENTS", 4 * HEADS * WIDTH * BLOCK)
    for tokens in (100, 400):
        target = layer()
        begin, end = split(states(tokens + 1), tokens, 1)
        feed(target, begin)
        sizes.clear()
        feed(target, end)
        assert max(sizes) == 4 * HEADS * WIDTH * BLOCK
        assert len(sizes) == -(-table_of(target).encoded.columns // 4)


# What is encoded, and when


def test_a_block_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again when rows are reordered, the history is cut, or more is decoded."""
    encoded = []
    encode = MixedKeys.encode

    def spy(self: MixedKeys, blocks: Tensor, fit: dict[str, Tensor]) -> list[Tensor]:
        encoded.append(blocks.shape[1])
        return encode(self, blocks, fit)

    monkeypatch.setattr(MixedKeys, "encode", spy)
    target = layer()
    feed(target, states(100))
    assert sum(encoded) == (100 - SINKS - RECENT) // BLOCK
    encoded.clear()
    target.batch_repeat_interleave(3)
    target.batch_select_indices(torch.tensor([2, 0]))
    target.reorder_cache(torch.tensor([1, 0]))
    target.crop(-5)
    target.crop(-60)
    assert not encoded
    # 35 tokens are left, all but the sinks in encoded blocks: new ones begin behind them.
    feed(target, states(RECENT + BLOCK - 1, rows=2, seed=1))
    feed(target, states(1, rows=2, seed=2))
    assert not encoded
    feed(target, states(1, rows=2, seed=3))
    assert sum(encoded) == 2  # one block of each row
    target.check_integrity()


@pytest.mark.parametrize("length", [SINKS + RECENT + BLOCK - 1, SINKS + RECENT + BLOCK, 60, 77])
@pytest.mark.parametrize("steps", [1, 4, RECENT])
@pytest.mark.parametrize("at_once", [True, False], ids=["chunk", "tokens"])
@pytest.mark.parametrize("prefilled", [True, False], ids=["prefilled", "decoded"])
def test_rolled_back_inside_the_recent_window_is_never_having_gone_on(
    length: int, steps: int, at_once: bool, prefilled: bool
) -> None:
    """Bit for bit, whatever comes afterwards."""
    went, stayed = layer(), layer()
    history = states(length)
    for target in (went, stayed):
        for part in [history] if prefilled else split(history, *[1] * length):
            feed(target, part)
    draft = states(steps, seed=1)
    for part in [draft] if at_once else split(draft, *[1] * steps):
        feed(went, part)
    went.crop(-steps)
    went.check_integrity()
    for part in split(states(50, seed=2), *[1] * 20, 7, *[1] * 23):
        assert torch.equal(feed(went, part), feed(stayed, part))
    assert all(torch.equal(one, two) for one, two in zip(went.materialize(0), stayed.materialize(0), strict=True))


@pytest.mark.parametrize("removed", [20, 37, 64, 90, 98, 100])
def test_cut_far_back(removed: int) -> None:
    """What is left is what it was, in codes or exact; nothing is lost and new tokens follow it."""
    target = layer()
    begin, last = split(states(100), 99, 1)
    feed(target, begin)
    feed(target, last)
    before = copy.deepcopy(target.materialize(0))
    exact_before = table_of(target)._exact_from
    target.crop(-removed)
    target.check_integrity()
    left = 100 - removed
    assert target.get_seq_length() == left
    for held, was in zip(target.materialize(0), before, strict=True):
        common = min(left, exact_before)
        # Blocks whose raw tokens are still held are read exactly again.
        same = (held[:, :, :common] == was[:, :, :common]).all(-1).all(1)[0]
        assert same[: max(left - 2 * RECENT - BLOCK, 0)].all()
    feed(target, states(30, seed=5))
    feed(target, states(1, seed=6))
    target.check_integrity()
    held, given = target.materialize(0)[0], states(30, seed=5)[0]
    torch.testing.assert_close(held[:, :, left + 31 - RECENT : left + 30], given[:, :, 31 - RECENT :], rtol=0, atol=0)


def test_sealing_waits_for_the_reader() -> None:
    """The tokens of a chunk attend to each other exactly: they are encoded at the next update."""
    target = layer()
    begin, chunk = split(states(90), 20, 70)
    feed(target, begin)
    keys, values = target.update(chunk[0], chunk[1])
    assert torch.equal(keys[:, :, 20:], chunk[0])
    assert torch.equal(values[:, :, 20:], chunk[1])


# What does not work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits"),
        ({"bits": 9}, "bits"),
        ({"key_bits": 0}, "bits"),
        ({"codec": "zip"}, "known: auto"),
        ({"codec": "mixed/zip"}, "known: auto"),
        ({"sinks": -1}, "sinks"),
        ({"recent": -1}, "recent"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_impossible_choices(options: dict[str, int | str], message: str) -> None:
    config = decoder_config(tiny_model("llama"))
    with pytest.raises(ConfigError, match=message):
        QuantizedCache(config, **options)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [0, 1])
def test_numbers_that_are_not_finite(number: float, kind: int) -> None:
    cache = QuantizedCache(decoder_config(tiny_model("llama")))
    heads, width = 2, 8
    good, bad = (torch.zeros(2, heads, 30, width) for _ in range(2))
    for index in range(len(cache.layers)):
        cache.update(good, good, index)
    bad[1, 0, 7, 3] = number
    given = (bad, good) if kind == 0 else (good, bad)
    with pytest.raises(InputError, match=r"layer 0: the (keys|values) of token 37, row 1"):
        cache.update(*given, 0)
    assert cache.layers[0].get_seq_length() == 30
    cache.layers[0].check_integrity()


# In generate


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_generates(bits: int, mode: str) -> None:
    """Lossy codecs change the numbers, not how a cache is used: the same tokens as with decoded states."""
    model = tiny_model("llama", torch.float32)
    cache = build_cache(decoder_config(model), f"quantized:bits={bits},sinks=2,recent=4,block_size=4")
    generation = MODES[mode](model, cache)
    cache.check_integrity()
    assert cache.get_seq_length() == generation.tokens_seen
    assert cache.exactness.kind == "approximate"
    assert cache.memory().scale_bytes > 0


@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_can_be_planned(bits: int) -> None:
    """States without values take what real ones take."""
    model = tiny_model("llama", torch.float32)
    spec = f"quantized:bits={bits},sinks=2,recent=4,block_size=4"
    real, planned = (build_cache(decoder_config(model), spec) for _ in range(2))
    with torch.no_grad():
        model(prompt(rows=2, tokens=60), **{CACHE_ARGUMENT: real})
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    for planned_layer in planned.block_layers:
        planned_layer.update(*[torch.empty(2, heads, 60, width, device="meta")] * 2)
    assert planned.memory()[:5] == real.memory()[:5]


def test_keys_and_values_by_different_codecs() -> None:
    config = decoder_config(tiny_model("llama"))
    cache = build_cache(config, "quantized:key_bits=3,value_bits=8,codec=mixed/int8")
    assert [codec.name for codec in cache.block_layers[0].codecs] == ["mixed", "int8"]


def test_only_full_attention_is_encoded() -> None:
    model = tiny_model("gemma3")
    cache = QuantizedCache(decoder_config(model))
    kinds = {type(block_layer).__name__ for block_layer in cache.block_layers if block_layer.window is not None}
    assert kinds == {"BlockLayer"}
    assert any(isinstance(block_layer, QuantizedLayer) for block_layer in cache.block_layers)
    assert "mixed 6/5/4/3" in cache.describe()
    assert "attention window" in cache.describe()


def test_saved_and_loaded_goes_on_bit_for_bit(tmp_path: object) -> None:
    model = tiny_model("llama", torch.float32)
    cache = build_cache(decoder_config(model), "quantized:bits=3,sinks=2,recent=4,block_size=4")
    for tokens in (17, 5, 1):
        with torch.no_grad():
            model(prompt(rows=2, tokens=tokens, seed=tokens), **{CACHE_ARGUMENT: cache})
    cache.save(f"{tmp_path}/cache", model)
    loaded = KVCache.load(f"{tmp_path}/cache", model)
    loaded.check_integrity()
    assert loaded.memory().payload_bytes == cache.memory().payload_bytes
    ids = prompt(rows=2, tokens=30, seed=9)
    one, two = (generate(model, each, torch.cat([prompt(rows=2, tokens=23), ids], 1)) for each in (cache, loaded))
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.logits, two.logits)
