"""Random sequences of cache operations against a plain model made of `torch.cat`, bit by bit; and bad input."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from architectures import tiny_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config

from hf_kvcache import ConfigError, InputError, KVCache, PagedCache, SpecError, StateError, build_cache
from hf_kvcache.evaluation.protocols import cache_argument

LAYER_TYPES = ["full_attention", "sliding_attention", "full_attention"]
MOST_TOKENS = 300


def config(window: int) -> Qwen3Config:
    return Qwen3Config(
        num_hidden_layers=len(LAYER_TYPES),
        layer_types=LAYER_TYPES,
        use_sliding_window=True,
        sliding_window=window,
        hidden_size=32,
        num_attention_heads=4,
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Zeros of both signs are different, a NaN is equal to itself."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.shape == other.shape and torch.equal(one.clone().view(bits), other.clone().view(bits))


@dataclass
class PlainLayer:
    """What a layer has been given: all of it, and where the window of the next query begins."""

    window: int | None
    keys: Tensor
    values: Tensor

    @property
    def seen(self) -> int:
        return self.keys.shape[2]

    def first_visible(self, seen: int) -> int:
        return 0 if self.window is None else max(0, seen - self.window + 1)

    def append(self, keys: Tensor, values: Tensor) -> None:
        rows = keys.shape[0]
        self.keys = torch.cat([self.keys.expand(rows, -1, -1, -1), keys], dim=2)
        self.values = torch.cat([self.values.expand(rows, -1, -1, -1), values], dim=2)

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def crop(self, tokens: int) -> None:
        self.keys, self.values = self.keys[:, :, : self.seen - tokens], self.values[:, :, : self.seen - tokens]


def check_equal(cache: KVCache, plain: list[PlainLayer]) -> None:
    """The cache is consistent, has seen what the plain layers hold, and still has every token a query can see."""
    cache.check_integrity()
    for layer, expected in zip(cache.layers, plain, strict=True):
        assert layer.get_seq_length() == expected.seen
        if expected.seen == 0:
            assert layer.keys is None or layer.keys.shape[2] == 0
            continue
        held = layer.keys.shape[2]
        assert expected.seen - expected.first_visible(expected.seen) <= held <= expected.seen
        assert held == expected.seen or expected.window is not None
        first = expected.seen - held
        assert same_bits(layer.keys, expected.keys[:, :, first:])
        assert same_bits(layer.values, expected.values[:, :, first:])


class CacheOperations(RuleBasedStateMachine):
    """All operations in any order."""

    @initialize(
        rows=st.integers(1, 4),
        block_size=st.sampled_from([1, 3, 4, 16]),
        window=st.sampled_from([1, 2, 5, 24]),
        fused=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        recording=st.booleans(),
        seed=st.integers(0, 3),
    )
    def begin(
        self, rows: int, block_size: int, window: int, fused: bool, dtype: torch.dtype, recording: bool, seed: int
    ) -> None:
        self.cache = self.build(config(window), block_size, fused)
        self.rows, self.dtype, self.block_size = rows, dtype, block_size
        self.generator = torch.Generator().manual_seed(seed)
        self.windows = [window if kind == "sliding_attention" else None for kind in LAYER_TYPES]
        self.left_behind: list[tuple[KVCache, list[PlainLayer]]] = []
        self.forget()
        if recording:
            self.cache.activate_past_recording()

    def build(self, config: Qwen3Config, block_size: int, fused: bool) -> KVCache:
        return PagedCache(config, block_size=block_size, fused=fused)

    def forget(self) -> None:
        keys = torch.empty(self.rows, 2, 0, 4, dtype=self.dtype)
        values = torch.empty(self.rows, 1, 0, 6, dtype=self.dtype)
        self.plain = [PlainLayer(window, keys, values) for window in self.windows]

    @property
    def seen(self) -> int:
        return self.plain[0].seen

    def states(self, heads: int, tokens: int, width: int, content: str) -> Tensor:
        states = torch.randn(self.rows, heads, tokens, width, generator=self.generator).to(self.dtype)
        if content == "equal rows":
            states = states[:1].expand(self.rows, -1, -1, -1)
        elif content == "pairs of equal rows":
            states = states[torch.arange(self.rows) // 2]
        elif content == "zeros of both signs":
            states = torch.where(states < 0, -0.0, 0.0).to(self.dtype)
        elif content == "not a number":
            states = torch.where(states < -1, float("nan"), states).to(self.dtype)
        return states

    @precondition(lambda self: self.seen < MOST_TOKENS)
    @rule(
        tokens=st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 70)),
        content=st.sampled_from(
            ["random", "equal rows", "equal rows", "pairs of equal rows", "zeros of both signs", "not a number"]
        ),
        strided=st.booleans(),
    )
    def update(self, tokens: int, content: str, strided: bool) -> None:
        for index, plain in enumerate(self.plain):
            keys, values = self.states(2, tokens, 4, content), self.states(1, tokens, 6, content)
            if strided:  # as a model hands them over
                keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
            length, offset = self.cache.get_mask_sizes(tokens, index)
            first = plain.first_visible(plain.seen)
            plain.append(keys, values)
            assert (length, offset) == (plain.seen - first, first)
            seen_keys, seen_values = self.cache.update(keys, values, index)
            assert seen_keys.shape == (self.rows, 2, length, 4)
            assert same_bits(seen_keys, plain.keys[:, :, first:])
            assert same_bits(seen_values, plain.values[:, :, first:])

    @precondition(lambda self: self.seen > 0)  # an empty layer ignores it, as transformers' own do
    @rule(tokens=st.one_of(st.integers(0, 6), st.integers(0, 80)))
    def crop(self, tokens: int) -> None:
        if tokens > self.seen:
            with pytest.raises(InputError):
                self.cache.crop(-tokens)
            return
        layers = zip(self.cache.layers, self.plain, strict=True)
        first_held = [plain.seen - layer.keys.shape[2] for layer, plain in layers]
        needed = [plain.first_visible(plain.seen - tokens) for plain in self.plain]
        if tokens and any(held > need for held, need in zip(first_held, needed, strict=True)):
            with pytest.raises(StateError):
                self.cache.crop(-tokens)
            return
        self.cache.crop(-tokens)
        for plain in self.plain:
            plain.crop(tokens)

    @rule()
    def activate_past_recording(self) -> None:
        self.cache.activate_past_recording()

    def select(self, rows: Tensor) -> None:
        for plain in self.plain:
            plain.select(rows)
        self.rows = len(rows)

    @precondition(lambda self: self.seen > 0)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = torch.tensor(data.draw(st.lists(st.integers(0, self.rows - 1), min_size=self.rows, max_size=self.rows)))
        self.cache.reorder_cache(rows)
        self.select(rows)

    @precondition(lambda self: self.seen > 0)
    @rule(data=st.data())
    def select_indices(self, data: st.DataObject) -> None:
        rows = torch.tensor(data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=4)))
        self.cache.batch_select_indices(rows)
        self.select(rows)

    @precondition(lambda self: self.seen > 0 and self.rows < 4)
    @rule(repeats=st.integers(1, 3))
    def repeat_interleave(self, repeats: int) -> None:
        self.cache.batch_repeat_interleave(repeats)
        self.select(torch.arange(self.rows).repeat_interleave(repeats))

    @precondition(lambda self: self.rows == 1 and self.seen)
    @rule(rows=st.integers(2, 3))
    def more_rows(self, rows: int) -> None:
        """One row becomes the common past of several at the next update."""
        self.rows = rows
        self.update(tokens=1, content="random", strided=False)

    @rule(rows=st.integers(1, 4))
    def reset(self, rows: int) -> None:
        self.cache.reset()
        self.rows = rows
        self.forget()

    @precondition(lambda self: len(self.left_behind) < 2)
    @rule()
    def go_on_with_a_copy(self) -> None:
        self.left_behind.append((self.cache, [copy.copy(plain) for plain in self.plain]))
        self.cache = copy.deepcopy(self.cache)

    @invariant()
    def same_as_plain(self) -> None:
        if hasattr(self, "plain"):
            check_equal(self.cache, self.plain)
            memory = self.cache.memory()
            assert memory.tokens_seen == self.seen
            assert min(memory.payload_bytes, memory.unused_bytes, memory.table_bytes) >= 0
            assert (memory.payload_bytes > 0) == (self.seen > 0)

    def teardown(self) -> None:
        for cache, plain in getattr(self, "left_behind", []):
            check_equal(cache, plain)


TestCacheOperations = CacheOperations.TestCase
TestCacheOperations.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# Bad input: each has its error, and nothing is stored in any layer.


def states(rows: int = 2, heads: int = 2, tokens: int = 3, width: int = 4, **options: object) -> Tensor:
    return torch.ones(rows, heads, tokens, width, **options)


def filled() -> tuple[KVCache, list[PlainLayer]]:
    cache = PagedCache(config(24), block_size=4)
    keys, values = torch.randn(2, 2, 10, 4), torch.randn(2, 1, 10, 6)
    for index in range(len(LAYER_TYPES)):
        cache.update(keys, values, index)
    return cache, [PlainLayer(24 if kind == "sliding_attention" else None, keys, values) for kind in LAYER_TYPES]


BAD_STATES = {
    "dtype of keys": (states(dtype=torch.float16), states(heads=1, width=6)),
    "dtype of values": (states(), states(heads=1, width=6, dtype=torch.float64)),
    "device": (states(device="meta"), states(heads=1, width=6, device="meta")),
    "heads of keys": (states(heads=4), states(heads=1, width=6)),
    "heads of values": (states(), states(heads=2, width=6)),
    "width of keys": (states(width=8), states(heads=1, width=6)),
    "width of values": (states(), states(heads=1, width=4)),
    "fewer rows": (states(rows=1), states(rows=1, heads=1, width=6)),
    "more rows": (states(rows=3), states(rows=3, heads=1, width=6)),
    "rows of keys and values": (states(rows=2), states(rows=1, heads=1, width=6)),
    "tokens of keys and values": (states(tokens=3), states(heads=1, tokens=2, width=6)),
}


@pytest.mark.parametrize("layer", range(len(LAYER_TYPES)))
@pytest.mark.parametrize("bad", BAD_STATES)
def test_states_that_do_not_fit(bad: str, layer: int) -> None:
    cache, plain = filled()
    # In tests the executed shape annotations may be faster.
    with pytest.raises((InputError, jaxtyping.TypeCheckError)):
        cache.update(*BAD_STATES[bad], layer)
    check_equal(cache, plain)


def test_layer_that_does_not_exist() -> None:
    cache, plain = filled()
    with pytest.raises(InputError, match="layer 3"):
        cache.update(states(), states(heads=1, width=6), 3)
    check_equal(cache, plain)


def test_forward_that_stopped_half_way() -> None:
    cache, _ = filled()
    cache.update(states(), states(heads=1, width=6), 0)
    with pytest.raises(StateError, match="reset"):
        cache.update(states(), states(heads=1, width=6), 0)


@pytest.mark.parametrize("rows", [[2], [0, -1], [0, 7]])
def test_rows_that_do_not_exist(rows: list[int]) -> None:
    cache, plain = filled()
    with pytest.raises(InputError, match="rows"):
        cache.batch_select_indices(torch.tensor(rows))
    with pytest.raises(InputError, match="rows"):
        cache.reorder_cache(torch.tensor(rows))
    check_equal(cache, plain)


def test_no_rows() -> None:
    cache, plain = filled()
    with pytest.raises(InputError, match="rows"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    with pytest.raises(InputError, match="repeated"):
        cache.batch_repeat_interleave(0)
    check_equal(cache, plain)


def test_rows_selected_by_a_mask() -> None:
    cache, plain = filled()
    cache.batch_select_indices(torch.tensor([False, True]))
    for layer in plain:
        layer.select(torch.tensor([1]))
    check_equal(cache, plain)


@pytest.mark.parametrize("tokens", [1, -11])
def test_impossible_crop(tokens: int) -> None:
    cache, plain = filled()
    with pytest.raises(InputError):
        cache.crop(tokens)
    check_equal(cache, plain)


def test_old_keys_and_values_are_not_shown_as_new() -> None:
    cache, _ = filled()
    for index in range(len(LAYER_TYPES)):
        old_keys, _old_values = cache.update(states(), states(heads=1, width=6), index)
    cache.crop(-1)
    with pytest.raises(StateError, match="earlier update"):
        old_keys.sum()


@pytest.mark.parametrize("block_size", [0, -1])
def test_impossible_block_size(block_size: int) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        PagedCache(LlamaConfig(num_hidden_layers=1), block_size=block_size)
    with pytest.raises(ConfigError, match="block_size"):
        build_cache(LlamaConfig(num_hidden_layers=1), f"paged:block_size={block_size}")


def test_unknown_layer_type() -> None:
    unknown = MistralConfig(num_hidden_layers=2)
    unknown.layer_types = ["full_attention", "telepathic_attention"]
    with pytest.raises(ConfigError, match=r"layer 1.*telepathic_attention"):
        PagedCache(unknown)


@pytest.mark.parametrize(
    ("spec", "column"),
    [
        ("", 0),
        ("pagde", 0),
        ("paged:", 6),
        ("paged:block_size", 6),
        ("paged:block_size=", 6),
        ("paged:=4", 6),
        ("paged:fused=true,blocksize=4", 17),
        ("paged:block_size=4,block_size=8", 19),
        ("paged+", 6),
        ("paged+paged", 6),
        ("paged:block_size=4+nothing", 19),
        ("paged:block_size=4;fused=true", 17),
        ("paged:block_size=four", 17),
        ("paged:fused=perhaps", 12),
        ("paged:block_size=4.5", 17),
    ],
)
def test_spec_that_does_not_parse(spec: str, column: int) -> None:
    """The message shows the specification and points at the place."""
    with pytest.raises(SpecError) as raised:
        build_cache(LlamaConfig(num_hidden_layers=1), spec)
    *_, shown, pointer = str(raised.value).splitlines()
    assert shown.strip() == spec
    assert pointer.index("^") - 2 == column


@pytest.mark.parametrize("begins", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("goes_on", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_modes_may_change_on_the_way(begins: type, goes_on: type) -> None:
    """A history may begin in one gradient mode and go on in another; it never holds on to a graph."""

    def forward(model: PreTrainedModel, input_ids: Tensor, cache: PagedCache) -> Tensor:
        return model(input_ids, **{cache_argument(model): cache}).logits

    model = tiny_model("llama", torch.float64)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    cache = PagedCache(model.config, block_size=4)
    with begins():
        forward(model, ids[:, :9], cache)
    with goes_on():
        for token in range(9, 20):
            logits = forward(model, ids[:, token : token + 1], cache)
    assert torch.allclose(logits[:, -1], expected, rtol=0, atol=1e-9)
    assert not any(layer.table.pool.keys.requires_grad for layer in cache.block_layers)
