"""A history of which a decoded token reads few blocks: which ones, and that nothing is lost."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from architectures import tiny_model
from modes import MODES, generate, prompt
from strategies import CACHE_ARGUMENT, decoder_config
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvcache import ConfigError, KVCache, QuestCache, build_cache
from hf_kvcache.retention import QuestLayer, QuestTable

HEADS, GROUPS, WIDTH, BLOCK = 2, 3, 8, 4


def states(tokens: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, HEADS, tokens, WIDTH)] * 2 + [(rows, HEADS * GROUPS, tokens, WIDTH)]
    keys, values, queries = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return keys, values, queries


def table_of(layer: QuestLayer) -> QuestTable:
    assert isinstance(layer.table, QuestTable)
    return layer.table


def read_by_hand(keys: Tensor, queries: Tensor, seen: Tensor, budget: float) -> list[int]:
    """The tokens that one key head of one row reads: keys ``[tokens, width]``, queries ``[groups, width]``."""
    tokens = keys.shape[0]
    full = tokens // BLOCK
    shares = torch.zeros(full, dtype=torch.float64)
    for query in queries:
        scores = torch.full((full,), -math.inf, dtype=torch.float64)
        for block in range(full):
            inside = slice(block * BLOCK, (block + 1) * BLOCK)
            if seen[inside].any():
                low, high = keys[inside].amin(0), keys[inside].amax(0)
                bound = torch.maximum(query * low, query * high).sum()
                middle = (query * (low + high) / 2).sum()
                scores[block] = (middle + 0.35 * (bound - middle)) / math.sqrt(WIDTH)
        shares += torch.softmax(scores, 0)
    best = sorted(range(full - 1), key=lambda block: shares[block].item(), reverse=True)
    chosen = sorted([*best[: math.ceil(budget * full) - 1], full - 1])
    read = [token for block in chosen for token in range(block * BLOCK, (block + 1) * BLOCK)]
    return [token for token in [*read, *range(full * BLOCK, tokens)] if seen[token]]


@pytest.mark.parametrize("tokens", [40, 43])
@pytest.mark.parametrize("budget", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("padding", [0, 9])
def test_a_token_reads_the_blocks_with_the_largest_scores(tokens: int, budget: float, padding: int) -> None:
    keys, values, queries = states(tokens, rows=2)
    layer = QuestLayer(budget, BLOCK)
    layer.update(keys[:, :, :-1], values[:, :, :-1])
    handles = layer.update(keys[:, :, -1:], values[:, :, -1:])
    seen = torch.ones(2, tokens, dtype=torch.bool)
    seen[1, :padding] = False
    query = queries[:, :, -1:]
    mask = seen[:, None, None] if padding else None
    found = scaled_dot_product_attention(query, *handles, attn_mask=mask, enable_gqa=True)
    for row in range(2):
        for head in range(HEADS):
            group = query[row, head * GROUPS : (head + 1) * GROUPS, 0]
            read = read_by_hand(keys[row, head], group, seen[row], budget)
            weights = torch.softmax(group @ keys[row, head, read].T / math.sqrt(WIDTH), -1)
            expected = weights @ values[row, head, read]
            torch.testing.assert_close(found[row, head * GROUPS : (head + 1) * GROUPS, 0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    """Chunks, tokens, steps back and rows rearranged: all states as they came, and within the bounds of their block."""
    choose = random.Random(seed)
    layer, rows = QuestLayer(0.3, BLOCK), 2
    keys, values, _ = states(30, rows, seed)
    layer.update(keys, values)
    for step in range(30):
        kind = choose.choice(["chunk", "token", "token", "crop", "select"])
        if kind in ("chunk", "token"):
            new = states(choose.randint(2, 9) if kind == "chunk" else 1, rows, 100 * seed + step)
            layer.update(new[0], new[1])
            keys, values = torch.cat([keys, new[0]], dim=2), torch.cat([values, new[1]], dim=2)
        elif kind == "crop":
            left = choose.randint(max(keys.shape[2] - 7, 1), keys.shape[2])
            layer.crop(left - keys.shape[2])
            keys, values = keys[:, :, :left], values[:, :, :left]
        else:
            chosen = [choose.randrange(rows) for _ in range(choose.randint(1, 3))]
            layer.batch_select_indices(torch.tensor(chosen))
            keys, values, rows = keys[chosen], values[chosen], len(chosen)
        layer.check_integrity()
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_generates(mode: str) -> None:
    model = tiny_model("llama", torch.float32)
    cache = QuestCache(decoder_config(model), budget=0.3, block_size=4)
    generation = MODES[mode](model, cache)
    cache.check_integrity()
    assert cache.get_seq_length() == generation.tokens_seen == cache.memory().tokens_held
    assert cache.exactness.kind == "approximate"


def test_another_attention_reads_everything() -> None:
    model = tiny_model("llama", torch.float32, "eager")
    cache = QuestCache(decoder_config(model), budget=0.1, block_size=4)
    found, expected = generate(model, cache, prompt()), generate(model, None, prompt())
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)


def test_bounds_are_counted_planned_and_saved(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    cache, planned = (QuestCache(decoder_config(model), budget=0.3, block_size=4) for _ in range(2))
    with torch.no_grad():
        model(prompt(rows=2, tokens=41), **{CACHE_ARGUMENT: cache})
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    for layer in planned.block_layers:
        layer.update(*[torch.empty(2, heads, 41, width, device="meta")] * 2)
    # A pair of bounds for each of ten full blocks.
    assert cache.memory().scale_bytes == len(cache.block_layers) * 2 * heads * 10 * 2 * width * 4
    assert planned.memory()[:3] == cache.memory()[:3]
    cache.save(tmp_path / "cache", model)
    loaded = KVCache.load(tmp_path / "cache", model)
    one, two = (
        generate(model, each, **each.continuation(prompt(rows=2, tokens=6, seed=1))) for each in (cache, loaded)
    )
    assert torch.equal(one.logits, two.logits)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("quest:budget=0.0", "above 0"),
        ("quest:budget=1.5", "above 0"),
        ("quest+quantized:bits=4", "cannot be read one by one"),
        ("quest+window:window=64", "both say"),
    ],
)
def test_impossible_choices(spec: str, message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        build_cache(decoder_config(tiny_model("llama")), spec)


def test_blocks_that_are_chosen_do_not_go_down(tmp_path: Path) -> None:
    config = decoder_config(tiny_model("llama"))
    with pytest.raises(ConfigError, match="leave out one of the two"):
        build_cache(config, f"quest+offloaded:device_budget=1MiB,residency=disk:{tmp_path}")
    cache = QuestCache(config)
    with pytest.raises(ConfigError, match="leave out one of the two"):
        cache.keep_within("1MiB", f"disk:{tmp_path}")
    assert cache.residency is None
