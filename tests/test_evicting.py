"""What is special about evicted histories: who stays, what is read, whose bytes are given back, what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architectures import tiny_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from modes import MODES, NEEDS_CROP, PROMPT_TOKENS, generate, padded_rows, prompt
from strategies import CACHE_ARGUMENT, decoder_config
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvcache import ConfigError, EvictingCache, KVCache, SpecError, StateError, build_cache
from hf_kvcache.attention import attend_summing, summing
from hf_kvcache.codecs import make_codecs
from hf_kvcache.retention import POLICIES, DemotingLayer, DemotingTable, EvictedTable, EvictingLayer, Held, received
from hf_kvcache.retention.allowance import Allowance
from hf_kvcache.retention.budget import Amount, Budget
from hf_kvcache.retention.lagkv import LagKV
from hf_kvcache.retention.policies import make_policy
from hf_kvcache.retention.received import ReceivedAttention
from hf_kvcache.units import parse_bytes

HEADS, GROUPS, WIDTH, BLOCK, SINKS, RECENT = 2, 3, 8, 4, 2, 5
LEAST = SINKS + RECENT + BLOCK


def layer(policy: str = "knorm", budget: Amount = 20, per_head: bool = False, recent: float = RECENT) -> EvictingLayer:
    return EvictingLayer(make_policy(policy), Budget(budget), 1, BLOCK, SINKS, recent, per_head)


def demoting(
    policy: str = "knorm", budget: Amount = 20, recent: float = RECENT, bits: int | None = None
) -> DemotingLayer:
    codecs = make_codecs("exact" if bits is None else "auto", bits or 4, bits or 4)
    return DemotingLayer(make_policy(policy), Budget(budget), 1, BLOCK, SINKS, recent, codecs=codecs)


def states(tokens: int, rows: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, HEADS, tokens, WIDTH)] * 2 + [(rows, HEADS * GROUPS, tokens, WIDTH)]
    keys, values, queries = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return keys, values, queries


def feed(target: EvictingLayer, tokens: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
    """One forward pass of an attention layer."""
    keys, values = target.update(tokens[0], tokens[1])
    queries = tokens[2]
    if mask is None and queries.shape[2] > 1:
        mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - queries.shape[2])
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


def split(tokens: tuple[Tensor, ...], *sizes: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(sizes, dim=2) for part in tokens), strict=True))


def table_of(target: EvictingLayer) -> EvictedTable:
    assert isinstance(target.table, EvictedTable)
    return target.table


# Any operations, against a model in plain Python


class PlainRow:
    """One row as lists: everything it was given, and which tokens each head still holds."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # [heads, width] each
        self.values: list[Tensor] = []
        self.padding: list[bool] = []
        self.held: list[list[int]] = [[] for _ in range(HEADS)]
        self.demotes = False

    def append(self, keys: Tensor, values: Tensor, padding: bool) -> None:
        for head in self.held:
            head.append(len(self.keys))
        self.keys.append(keys)
        self.values.append(values)
        self.padding.append(padding)

    def evict(self, target: int, tail_begin: int, per_head: bool) -> None:
        first = self.padding.index(False) if False in self.padding else 0

        def worth(place: tuple[int, int]) -> float:
            head, token = place
            if self.padding[token]:
                return -math.inf
            if token < first + SINKS:
                return math.inf
            return -self.keys[token][head].norm().item()

        places = [[(index, token) for token in head if token < tail_begin] for index, head in enumerate(self.held)]
        recent = [[token for token in head if token >= tail_begin] for head in self.held]
        count = target - len(recent[0])
        if self.demotes:
            count = len(places[0]) - (len(places[0]) - count) // BLOCK * BLOCK
        own = max(int(0.2 * count), 1) if per_head else count
        best = [place for head in places for place in sorted(head, key=worth, reverse=True)[:own]]
        others = [place for head in places for place in head if place not in best]
        best += sorted(others, key=worth, reverse=True)[: HEADS * (count - own)]
        self.held = [sorted(token for head, token in best if head == index) + recent[index] for index in range(HEADS)]

    def attend(self, query: Tensor) -> Tensor:
        """Of the newest token, ``[heads * groups, width]``."""
        outputs = []
        for number in range(HEADS * GROUPS):
            head = number // GROUPS
            held = range(len(self.keys)) if self.demotes else self.held[head]
            seen = [token for token in held if not self.padding[token]]
            keys = torch.stack([self.keys[token][head] for token in seen])
            values = torch.stack([self.values[token][head] for token in seen])
            outputs.append(torch.softmax(keys @ query[number] / math.sqrt(WIDTH), 0) @ values)
        return torch.stack(outputs)

    def truncate(self, tokens: int) -> None:
        del self.keys[tokens:], self.values[tokens:], self.padding[tokens:]
        self.held = [[token for token in head if token < tokens] for head in self.held]


class Evictions(RuleBasedStateMachine):
    """Chunks, single tokens, rows rearranged and steps back, in any order."""

    @initialize(
        rows=st.integers(1, 3),
        budget=st.sampled_from([LEAST, 20, 0.3, 0.8]),
        seed=st.integers(0, 3),
        padding=st.integers(0, 9),
        recording=st.booleans(),
        kind=st.sampled_from(["each head", "per_head", "demoting"]),
        recent=st.sampled_from([RECENT, 0.3]),
    )
    def begin(
        self, rows: int, budget: float, seed: int, padding: int, recording: bool, kind: str, recent: float
    ) -> None:
        self.per_head, self.recent = kind == "per_head", recent
        demotes = kind == "demoting"
        self.layer = demoting("knorm", budget, recent) if demotes else layer("knorm", budget, self.per_head, recent)
        self.budget = budget
        self.generator = torch.Generator().manual_seed(seed)
        self.plain = [PlainRow() for _ in range(rows)]
        for row in self.plain:
            row.demotes = demotes
        self.tail_begin = 0
        self.recording = recording
        if recording:
            self.layer.activate_past_recording()
        # The first row is padded on the left, if there are others.
        self.left = padding if rows > 1 else 0
        self.update(tokens=padding + 4)

    @property
    def seen(self) -> int:
        return len(self.plain[0].keys)

    def evict(self) -> None:
        limit = math.ceil(self.budget * self.seen) if isinstance(self.budget, float) else self.budget
        least = LEAST if self.recent == RECENT else math.ceil((SINKS + BLOCK) / (1 - self.recent))
        limit = max(limit, least)
        if sum(map(len, self.plain[0].held)) <= limit * HEADS:
            return
        recent = RECENT if self.recent == RECENT else int(self.recent * limit)
        self.tail_begin = max(self.tail_begin, self.seen - recent)
        for row in self.plain:
            row.evict(limit - BLOCK, self.tail_begin, self.per_head)

    @precondition(lambda self: self.seen < 150)
    @rule(tokens=st.one_of(st.just(1), st.integers(1, 40)))
    def update(self, tokens: int) -> None:
        first = self.seen == 0
        if not first and not self.recording:
            self.evict()
        given = [
            torch.randn(len(self.plain), heads, tokens, WIDTH, generator=self.generator, dtype=torch.float64)
            for heads in (HEADS, HEADS, HEADS * GROUPS)
        ]
        for index, row in enumerate(self.plain):
            for token in range(tokens):
                padding = first and index == 0 and token < self.left
                row.append(given[0][index, :, token], given[1][index, :, token], padding)
        mask = torch.ones(tokens, self.seen, dtype=torch.bool).tril(self.seen - tokens)
        mask = mask & ~torch.tensor([row.padding for row in self.plain])[:, None, None]
        found = feed(self.layer, tuple(given), mask)
        expected = torch.stack([row.attend(query[:, -1]) for row, query in zip(self.plain, given[2], strict=True)])
        torch.testing.assert_close(found[:, :, -1], expected, rtol=0, atol=1e-12)
        if first and not self.recording:
            self.evict()

    @rule(back=st.integers(0, 12))
    def crop(self, back: int) -> None:
        if self.seen - back < max(self.tail_begin, self.left + 1):
            if self.seen - back < self.tail_begin:
                with pytest.raises((StateError, ValueError)):
                    self.layer.crop(-back)
            return
        self.layer.crop(-back)
        left = self.seen - back
        for row in self.plain:
            row.truncate(left)
        self.evict()

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.plain) - 1), min_size=1, max_size=4))
        self.layer.batch_select_indices(torch.tensor(rows))
        self.plain = [copy.deepcopy(self.plain[row]) for row in rows]

    @rule()
    def go_on_with_a_copy(self) -> None:
        self.layer = copy.deepcopy(self.layer)

    @invariant()
    def same_as_plain(self) -> None:
        if not hasattr(self, "plain"):
            return
        self.layer.check_integrity()
        assert self.layer.get_seq_length() == self.seen
        table = table_of(self.layer)
        assert table.exact_tokens * HEADS == sum(map(len, self.plain[0].held))
        keys, values, absent = table.states()
        for number, row in enumerate(self.plain):
            for head, held in enumerate(row.held):
                real = slice(None) if absent is None else ~absent[number, head]
                assert table.slot_positions()[number, head][real].tolist() == held
                for found, given in ((keys, row.keys), (values, row.values)):
                    expected = torch.stack([given[token][head] for token in held])
                    assert torch.equal(found[number, head][real], expected)
            if row.demotes:
                assert torch.equal(self.layer.keys[number], torch.stack(row.keys, dim=1))
                assert torch.equal(self.layer.values[number], torch.stack(row.values, dim=1))


TestEvictions = Evictions.TestCase
TestEvictions.settings = settings(
    max_examples=20,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# How many stay

BUDGETS: list[Amount] = [0.1, 0.5, 0.9, 100, 700, "50KiB"]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("recent", [RECENT, 0.5])
@pytest.mark.parametrize("layers", [1, 2, 7, 30])
def test_a_pyramid_follows_the_formula(budget: Amount, recent: float, layers: int) -> None:
    """As many tokens in all as without it, ever fewer from layer to layer, sinks and recent ones in each."""

    def limit(seen: int) -> int:
        return Budget(budget).tokens(seen, 51200.0, 100, BLOCK)

    even = Allowance(limit, BLOCK, SINKS, recent)
    for seen in [*range(1, 120, 7), *range(120, 1500, 61)]:
        placed = [Allowance(limit, BLOCK, SINKS, recent, (number, layers)) for number in range(layers)]
        found = [each.tokens(seen) for each in placed]
        assert sum(found) == layers * even.tokens(seen)
        assert found == sorted(found, reverse=True)
        assert {each.recent_tokens(seen) for each in placed} == {even.recent_tokens(seen)}
        always = SINKS + even.recent_tokens(seen) + BLOCK
        assert found[-1] >= always
        chosen = even.tokens(seen) - always
        first, last = 2 * chosen - chosen / 20, chosen / 20
        if first > seen - always:
            first, last = max(seen - always, chosen), min(2 * chosen - seen + always, chosen)
        for number, tokens in enumerate(found):
            share = number / (layers - 1) if layers > 1 else 0.5
            assert abs(tokens - always - (first + share * (last - first))) < BLOCK


# The policies, each against its formula


class Row(NamedTuple):
    """Keys and values ``[heads, tokens, width]``, queries of the last tokens and their weights on every token."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    weights: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


def plain_row(keys: Tensor, values: Tensor, queries: Tensor) -> Row:
    """Weights by brute force, query by query."""
    tokens, count = keys.shape[1], queries.shape[1]
    weights = torch.zeros(HEADS, GROUPS, count, tokens, dtype=torch.float64)
    for number in range(HEADS * GROUPS):
        head, group = divmod(number, GROUPS)
        for place in range(count):
            seen = tokens - count + place + 1
            products = keys[head, :seen] @ queries[number, place] / math.sqrt(WIDTH)
            weights[head, group, place, :seen] = torch.softmax(products, 0)
    return Row(keys, values, queries, weights)


def knorm(row: Row, head: int) -> list[float]:
    return [-key.norm().item() for key in row.keys[head]]


def keydiff(row: Row, head: int) -> list[float]:
    anchor = torch.stack([key / key.norm() for key in row.keys[head]]).mean(0)
    return [-torch.cosine_similarity(key, anchor, dim=0).item() for key in row.keys[head]]


def cur(row: Row, head: int) -> list[float]:
    lefts = [torch.linalg.svd(states_of[head], full_matrices=False)[0] for states_of in (row.keys, row.values)]
    return [(key.square().sum() * value.square().sum()).item() for key, value in zip(*lefts, strict=True)]


def snapkv(row: Row, head: int) -> list[float]:
    received = row.weights[head].mean((0, 1)).tolist()
    windows = [received[max(token - 3, 0) : token + 4] for token in range(row.tokens)]
    return [sum(window) / len(window) for window in windows]


def tova(row: Row, _: int) -> list[float]:
    return row.weights[:, :, -1].mean((0, 1)).tolist()


def h2o(row: Row, head: int) -> list[float]:
    return row.weights[head].sum((0, 1)).tolist()


def expected_attention(row: Row, head: int) -> list[float]:
    total = torch.zeros(row.tokens, dtype=torch.float64)
    for group in range(GROUPS):
        seen = row.queries[head * GROUPS + group] / math.sqrt(WIDTH)
        mean, covariance = seen.mean(0), torch.cov(seen.T, correction=0)
        expected = torch.stack([(mean @ key + key @ covariance @ key / 2).exp() for key in row.keys[head]])
        total += expected / expected.sum() / GROUPS
    return (total * row.values[head].norm(dim=1)).tolist()


FORMULAS: dict[str, Callable[[Row, int], list[float]]] = {
    formula.__name__: formula for formula in (knorm, keydiff, cur, snapkv, tova, h2o, expected_attention)
}


def seen_by(name: str, tokens: int) -> slice:
    """The queries that a policy looks at: the last ones, or all of them."""
    policy = make_policy(name)
    return slice(None) if policy.wants_attention else slice(max(tokens - max(policy.queries, 1), 0), None)


def scored(name: str, keys: Tensor, values: Tensor, queries: Tensor, padding: int = 0) -> Tensor:
    """Scores of a history whose first tokens are padding, from the queries of all its tokens."""
    rows, heads, tokens, _ = keys.shape
    policy, hidden, last = make_policy(name), torch.arange(tokens) < padding, seen_by(name, tokens)
    held = Held(
        keys,
        values,
        torch.arange(tokens, dtype=torch.int32).expand(rows, heads, -1),
        hidden.expand(rows, heads, -1) if padding else None,
        queries[:, :, last],
        hidden[last].expand(rows, -1) if padding else None,
        1 / math.sqrt(WIDTH),
        None,
    )
    if policy.wants_attention:
        received = ReceivedAttention()
        received.add(queries, tokens)
        held = held._replace(attention=received.settle(held))
    return policy.scores(held)


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_follow_the_formula(name: str) -> None:
    keys, values, queries = states(30, rows=2)
    found = scored(name, keys, values, queries)
    for row in range(2):
        plain = plain_row(keys[row], values[row], queries[row, :, seen_by(name, 30)])
        expected = [FORMULAS[name](plain, head) for head in range(HEADS)]
        # The leverages have a ridge of 1e-6.
        torch.testing.assert_close(found[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9)


def test_leverages_of_keys_that_nearly_share_a_direction() -> None:
    """As keys of real models do: the products of their channels are singular in float32."""
    keys, values = (
        1000 * far + torch.randn(2, 1, HEADS, 100, 64, generator=torch.Generator().manual_seed(0))[far]
        for far in (1, 0)
    )
    found, expected = (
        make_policy("cur").scores(
            Held(*states_of, torch.zeros(1, HEADS, 100, dtype=torch.int32), None, None, None, 1.0, None)
        )
        for states_of in ((keys, values), (keys.double(), values.double()))
    )
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-9)


def test_every_policy_has_its_formula_tested() -> None:
    assert {*FORMULAS, "lagkv"} == {*POLICIES}


def test_lagkv_follows_the_formula() -> None:
    """Three whole partitions of 10 and a partial one, counted from the end."""
    keys, values, _ = states(34)
    positions = torch.arange(34, dtype=torch.int32).expand(1, HEADS, -1)
    ranks = LagKV(lag_tokens=10).scores(Held(keys, values, positions, None, None, None, 1.0, None)) * 10
    for head in range(HEADS):
        for begin in (4, 14):
            information = torch.zeros(10, dtype=torch.float64)
            for states_of in (keys[0, head], values[0, head]):
                following = states_of[begin + 10 : begin + 20]
                low, high = following.min(0).values, following.max(0).values
                scaled = (states_of[begin : begin + 10] - low) / (high - low)
                information += torch.softmax(scaled.std(1), 0)
            assert ranks[0, head, begin : begin + 10].argsort().tolist() == information.argsort().tolist()
            assert sorted(ranks[0, head, begin : begin + 10].tolist()) == list(range(1, 11))


@pytest.mark.parametrize("name", POLICIES)
def test_padding_changes_no_score(name: str) -> None:
    """A padded row is scored as it is alone, whatever the states of the padding."""
    keys, values, queries = states(50)
    alone = scored(name, keys, values, queries)
    strange = states(20, seed=1)
    padded = [torch.cat([100 * pads, real], dim=2) for pads, real in zip(strange, (keys, values, queries), strict=True)]
    found = scored(name, *padded, padding=20)[:, :, 20:]
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_in_half_precision_are_those_of_the_same_numbers(name: str) -> None:
    narrow = [part.to(torch.bfloat16) for part in states(40)]
    found = scored(name, *narrow)
    assert found.dtype == torch.float32
    expected = scored(name, *(part.double() for part in narrow))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


# In a layer


@pytest.mark.parametrize("name", POLICIES)
def test_those_with_the_lowest_scores_go(name: str) -> None:
    """After a prompt, head by head: sinks, the best, and the recent tokens."""
    target = layer(name, budget=20)
    prompt_states = states(60, rows=2)
    feed(target, prompt_states)
    table = table_of(target)
    assert table.tokens_held == 20 - BLOCK
    scores = scored(name, *prompt_states).clone()
    scores[..., :SINKS] = math.inf
    for row in range(2):
        for head in range(HEADS):
            best = scores[row, head, : 60 - RECENT].topk(20 - BLOCK - RECENT).indices.sort().values
            assert table.slot_positions()[row, head].tolist() == [*best.tolist(), *range(60 - RECENT, 60)]


@pytest.mark.parametrize(
    "chunks", [(90,), (60, *[1] * 30), (3, 50, *[1] * 12, 20, 5)], ids=["prompt", "tokens", "chunks"]
)
def test_received_attention_is_that_of_every_query(chunks: tuple[int, ...]) -> None:
    """Against brute force, prompt and decoded tokens alike; padding gives none and receives none."""
    given = states(90, rows=2)
    target = layer("h2o", 200)
    seen = 0
    mask = torch.ones(2, 1, 90, 90, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False
    for part, tokens in zip(split(given, *chunks), chunks, strict=True):
        feed(target, part, mask[:, :, seen : seen + tokens, : seen + tokens])
        seen += tokens
    table = table_of(target)
    scores = table._scores(table._held(table.queries.last()))
    for row, padding in ((0, 0), (1, 2)):
        plain = plain_row(*(part[row, :, padding:] for part in given))
        expected = plain.weights.sum((1, 2))[:, SINKS:]
        torch.testing.assert_close(scores[row, :, padding + SINKS :], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("masked", ["no", "bool", "bias", "bias of each head"])
@pytest.mark.parametrize("at_once", [1, 7, 30])
def test_attention_tells_what_tokens_receive(masked: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's kernel and the weights of brute force, whatever number of queries is taken at once."""
    monkeypatch.setattr(summing, "_MOST_SCORES", 1)
    monkeypatch.setattr(summing, "_LEAST_QUERIES", at_once)
    (keys, values, _), (_, _, queries) = states(70, rows=2), states(30, rows=2, seed=1)
    causal = torch.ones(30, 70, dtype=torch.bool).tril(40).expand(2, 1, -1, -1).clone()
    causal[1, :, :, :45] = False  # the first five queries of the second row may look nowhere
    heads = HEADS * GROUPS if masked == "bias of each head" else 1
    bias = (
        torch.zeros(2, heads, 30, 70, dtype=torch.float64)
        if masked == "bool"
        else torch.randn(2, heads, 30, 70).double()
    )
    whole = bias.masked_fill(~causal, -torch.inf)
    mask, hidden = {"no": None, "bool": causal}.get(masked, whole), torch.zeros(2, HEADS, 70, dtype=torch.bool)
    hidden[:, 1, :7] = True
    if masked == "no":
        whole = torch.zeros(30, 70, dtype=torch.float64).masked_fill(
            ~torch.ones(30, 70, dtype=torch.bool).tril(40), -torch.inf
        )
    padding = torch.zeros(2, 30, dtype=torch.bool)
    padding[1, :5] = True
    output, sums = attend_summing(queries, keys, values, mask, 0.3, hidden, padding)
    repeated = [part.repeat_interleave(GROUPS, dim=1) for part in (keys, values, hidden)]
    scores = queries @ repeated[0].transpose(2, 3) * 0.3 + whole
    weights = torch.softmax(scores.masked_fill(repeated[2][:, :, None], -torch.inf), -1).nan_to_num(0.0)
    weights = weights.masked_fill(padding[:, None, :, None], 0.0)
    torch.testing.assert_close(output, weights @ repeated[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(sums, weights.unflatten(1, (HEADS, GROUPS)).sum((2, 3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["each head", "per_head", "demoting"])
def test_one_pass_adds_up_what_two_passes_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt, long chunks after evictions, and tokens between them, in a padded batch: the same tokens stay."""
    sizes = [90, 1, 1, 1, 80, 70, 1, 66]
    mask = torch.ones(2, 1, sum(sizes), sum(sizes), dtype=torch.bool).tril()
    mask[1, :, :, :7] = False

    def go_through() -> tuple[list[Tensor], EvictedTable]:
        target = demoting("h2o", 50) if kind == "demoting" else layer("h2o", 50, kind == "per_head")
        outputs, seen = [], 0
        for part, tokens in zip(split(states(sum(sizes), rows=2), *sizes), sizes, strict=True):
            found = feed(target, part, mask[:, :, seen : seen + tokens, : seen + tokens])
            target.check_integrity()
            seen += tokens
            outputs.append(found[:, :, 7:] if seen == 90 else found)
        return outputs, table_of(target)

    one, table = go_through()
    monkeypatch.setattr(received, "_MOST_WAITING", 1000)
    two, other = go_through()
    torch.testing.assert_close(one, two, rtol=0, atol=1e-11)
    assert torch.equal(table.slot_positions(), other.slot_positions())
    torch.testing.assert_close(*(each.received.settle(each._held(None)) for each in (table, other)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("budget", [20, 0.4], ids=str)
def test_budget_holds_after_a_prompt_chunks_and_tokens(name: str, budget: float) -> None:
    target = layer(name, budget)
    sizes = [70, 9, 30, 1, 1, *[1] * 30]
    seen = 0
    for part, size in zip(split(states(sum(sizes)), *sizes), sizes, strict=True):
        feed(target, part)
        seen += size
        target.check_integrity()
        most = max(budget if isinstance(budget, int) else math.ceil(budget * seen), LEAST)
        # The prompt is reduced at once, what came after it when more comes.
        assert table_of(target).tokens_held <= (most if seen == 70 else most + size)
        raw = table_of(target).blocks.pool
        assert raw.capacity_blocks * BLOCK <= table_of(target).tokens_held + BLOCK
    assert target.get_seq_length() == seen


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_is_evicted_as_it_is_alone(name: str) -> None:
    """Left padding included: it is neither a sink nor kept, and no score depends on it."""
    prompt_states, more = states(60, rows=3), split(states(30, rows=3, seed=1), *[1] * 30)
    mask = torch.ones(3, 1, 60, 60, dtype=torch.bool).tril()
    padding = [0, 7, 25]
    for row, pads in enumerate(padding):
        mask[row, :, :, :pads] = False
    together = layer(name)
    feed(together, prompt_states, mask)
    for step, part in enumerate(more):
        row_mask = torch.ones(3, 1, 1, 61 + step, dtype=torch.bool)
        for row, pads in enumerate(padding):
            row_mask[row, ..., :pads] = False
        outputs = feed(together, part, row_mask)
    for row, pads in enumerate(padding):
        alone = layer(name)
        feed(alone, tuple(part[row : row + 1, :, pads:] for part in prompt_states))
        for part in more:
            output = feed(alone, tuple(each[row : row + 1] for each in part))
        positions = table_of(alone).slot_positions()[0] + pads
        assert torch.equal(table_of(together).slot_positions()[row], positions)
        torch.testing.assert_close(outputs[row], output[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("at_once", [True, False], ids=["chunk", "tokens"])
def test_rolled_back_while_recording_is_never_having_gone_on(name: str, steps: int, at_once: bool) -> None:
    """Bit for bit, whatever comes afterwards: as assisted decoding and prompt lookup step back."""
    went, stayed = layer(name), layer(name)
    draft = states(steps, seed=1)
    for target in (went, stayed):
        feed(target, states(60))
        for part in split(states(9, seed=3), *[1] * 9):
            feed(target, part)
    went.activate_past_recording()
    for part in [draft] if at_once else split(draft, *[1] * steps):
        feed(went, part)
    went.crop(-steps)
    went.record_past = False
    went.check_integrity()
    for part in split(states(40, seed=2), *[1] * 20, 7, *[1] * 13):
        assert torch.equal(feed(went, part), feed(stayed, part))
    assert torch.equal(went.keys, stayed.keys)


def test_a_step_back_behind_what_was_dropped_is_refused() -> None:
    target = layer()
    feed(target, states(60))
    before = target.keys.clone()
    with pytest.raises(StateError, match="token 55"):
        target.crop(-6)
    assert target.get_seq_length() == 60
    assert torch.equal(target.keys, before)
    target.crop(-5)
    assert torch.equal(target.keys, before[:, :, :-5])
    feed(target, states(8, seed=1))
    target.check_integrity()


@pytest.mark.parametrize("bits", [2, 4])
def test_what_is_not_kept_is_encoded_once_and_read(bits: int) -> None:
    """In padded and reordered rows: attention is that over the decoded history, which stays as it is."""
    target, given = demoting("h2o", 0.3, recent=0.5, bits=bits), states(400, rows=3)
    padding, order, seen, before = torch.tensor([0, 7, 30]), [0, 1, 2], 0, None
    for step, tokens in enumerate([300, *[1] * 20, 40, *[1] * 40]):
        if step == 30:
            order = [2, 0, 2]
            target.batch_select_indices(torch.tensor(order))
            before = None if before is None else before[order]
        part = tuple(each[order, :, seen : seen + tokens] for each in given)
        seen += tokens
        mask = torch.ones(tokens, seen, dtype=torch.bool).tril(seen - tokens)
        mask = mask & (torch.arange(seen) >= padding[order][:, None, None, None])
        found = feed(target, part, mask)
        target.check_integrity()
        keys, values, table = target.keys, target.values, target.table
        assert isinstance(table, DemotingTable)
        if step:
            expected = scaled_dot_product_attention(part[2], keys, values, mask, enable_gqa=True)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        encoded = keys.gather(2, table.demoted.positions[..., None].long().expand(-1, -1, -1, WIDTH))
        assert encoded.shape[2] >= 0.7 * seen - tokens - BLOCK
        if before is not None:
            assert torch.equal(encoded[:, :, : before.shape[2]], before)
        before = encoded
    assert torch.equal(keys[0], keys[2])
    for found, true in ((keys, given[0][order]), (values, given[1][order])):
        error = (found - true).square().mean() / true.square().mean()
        assert 0 < error < (0.15 if bits == 2 else 0.02)


def test_a_bias_in_the_mask_goes_with_its_token() -> None:
    """Masks may hold a number for every token and head."""
    target = layer()
    first, last = split(states(61, rows=2), 60, 1)
    feed(target, first)
    bias = torch.randn(2, HEADS * GROUPS, 1, 61, dtype=torch.float64)
    found = feed(target, last, bias)
    positions = table_of(target).slot_positions().long().repeat_interleave(GROUPS, dim=1)
    keys, values = (part.repeat_interleave(GROUPS, dim=1) for part in (target.keys, target.values))
    chosen = bias.gather(3, positions[:, :, None])
    expected = scaled_dot_product_attention(last[2], keys, values, attn_mask=chosen)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# In generate

# Each way of storing and of seeing queries once.
KINDS = ["keydiff", "snapkv", "h2o", "h2o,per_head=true"]
ENCODED = ["h2o+quantized:bits=4,block_size=4", "keydiff+quantized:codec=tile,block_size=4"]


def evicting(policy: str = "keydiff", budget: object = 12) -> str:
    policy, plus, other = policy.partition("+")
    return f"evicting:policy={policy},budget={budget},sinks=2,recent=4,block_size=4{plus}{other}"


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        *((policy, mode) for policy in ("keydiff", "snapkv,per_head=true") for mode in sorted(MODES)),
        *((policy, "greedy") for policy in POLICIES if policy != "keydiff"),
    ],
)
def test_every_mode_generates(policy: str, mode: str) -> None:
    model = tiny_model("llama", torch.float32)
    cache = build_cache(decoder_config(model), evicting(policy))
    generation = MODES[mode](model, cache)
    cache.check_integrity()
    assert cache.get_seq_length() == generation.tokens_seen
    assert cache.exactness.kind == "approximate"
    assert 12 - 4 <= cache.memory().tokens_held <= 12 + 10  # and the last chunk or draft
    if mode == "greedy":
        again = build_cache(decoder_config(model), evicting(policy))
        assert torch.equal(MODES[mode](model, again).logits, generation.logits)


@pytest.mark.parametrize("policy", ["knorm", "snapkv"])
def test_drafted_text_is_that_of_one_token_at_a_time(policy: str) -> None:
    """What a cache drops may depend on where the chunks end; with a budget for everything it does not."""
    model = tiny_model("llama", torch.float32)
    for mode in sorted(NEEDS_CROP):
        generation = MODES[mode](model, build_cache(decoder_config(model), evicting(policy, 1.0)))
        assert torch.equal(generation.tokens, MODES[mode](model, None).tokens)


def test_padded_rows_generate_as_alone() -> None:
    model = tiny_model("llama", torch.float64)
    rows = [row for row in padded_rows() if row.shape[1] > 10]
    ids, mask = torch.zeros(len(rows), PROMPT_TOKENS, dtype=torch.long), torch.zeros(len(rows), PROMPT_TOKENS)
    for index, row in enumerate(rows):
        ids[index, -row.shape[1] :], mask[index, -row.shape[1] :] = row[0], 1
    for policy in KINDS:
        together = generate(
            model, build_cache(decoder_config(model), evicting(policy)), ids, attention_mask=mask.long()
        )
        for index, row in enumerate(rows):
            alone = generate(model, build_cache(decoder_config(model), evicting(policy)), row)
            assert torch.equal(together.tokens[index], alone.tokens[0])
            torch.testing.assert_close(together.logits[:, index], alone.logits[:, 0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("policy", ["h2o", "snapkv,per_head=true", "keydiff+quantized:bits=4,block_size=4"])
@pytest.mark.parametrize("budget", [24, 0.4])
def test_in_a_pyramid_lower_layers_hold_more(policy: str, budget: float, tmp_path: Path) -> None:
    """The bytes are those of equally many tokens; saved and loaded it goes on bit for bit."""
    model = tiny_model("llama", torch.float32)
    name, plus, other = policy.partition("+")
    specs = [evicting(f"{name},pyramid={pyramid}{plus}{other}", budget) for pyramid in ("true", "false")]
    pyramid, even = (build_cache(decoder_config(model), spec) for spec in specs)
    for cache in (pyramid, even):
        generate(model, cache, prompt(rows=2, tokens=60))
        cache.check_integrity()
    held = [[table_of(each).exact_tokens for each in cache.block_layers] for cache in (pyramid, even)]
    assert held[0][0] >= held[0][1] + 8
    assert held[0][1] >= held[0][2] + 8
    assert abs(sum(held[0]) - sum(held[1])) <= 3 * BLOCK  # each is up to a block below its limit
    sizes = [cache.memory().payload_bytes + cache.memory().unused_bytes for cache in (pyramid, even)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    assert "layer 2 of a pyramid of 3" in pyramid.describe()
    pyramid.save(tmp_path / "cache", model)
    loaded = KVCache.load(tmp_path / "cache", model)
    one, two = (
        generate(model, cache, **cache.continuation(prompt(rows=2, tokens=6, seed=1))) for cache in (pyramid, loaded)
    )
    assert torch.equal(one.logits, two.logits)


@pytest.mark.parametrize("budget", ["24KiB", "40KiB"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", ["", ",pyramid=true"])
def test_a_budget_in_bytes_bounds_the_whole_cache(budget: str, rows: int, shape: str) -> None:
    model = tiny_model("llama", torch.float32)
    spec = f"evicting:policy=knorm,budget={budget},sinks=2,recent=4,block_size=4{shape}"
    cache = build_cache(decoder_config(model), spec)
    generate(model, cache, prompt(rows=rows, tokens=200))
    memory = cache.memory()
    held = memory.payload_bytes + memory.unused_bytes
    held += sum(table_of(each).positions.nbytes for each in cache.block_layers)
    assert 0.5 * parse_bytes(budget) < held <= parse_bytes(budget)


@pytest.mark.parametrize("policy", [*KINDS, *ENCODED])
def test_bytes_can_be_planned(policy: str) -> None:
    """States without values take what real ones take."""
    model = tiny_model("llama", torch.float32)
    real, planned = (build_cache(decoder_config(model), evicting(policy, 0.5)) for _ in range(2))
    with torch.no_grad():
        model(prompt(rows=2, tokens=60), **{CACHE_ARGUMENT: real})
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    for planned_layer in planned.block_layers:
        planned_layer.update(*[torch.empty(2, heads, 60, width, device="meta")] * 2)
    assert planned.memory().payload_bytes == real.memory().payload_bytes
    assert planned.memory().unused_bytes == real.memory().unused_bytes


@pytest.mark.parametrize("policy", [*KINDS, *ENCODED])
def test_saved_and_loaded_goes_on_bit_for_bit(policy: str, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    cache = build_cache(decoder_config(model), evicting(policy))
    mask = torch.ones(2, 41, dtype=torch.long)
    mask[1, :9] = 0
    generate(model, cache, prompt(rows=2, tokens=41) * mask, attention_mask=mask)
    cache.save(tmp_path / "cache", model)
    loaded = KVCache.load(tmp_path / "cache", model)
    loaded.check_integrity()
    assert loaded.memory().payload_bytes == cache.memory().payload_bytes
    seen = cache.get_seq_length()
    mask = torch.cat([mask, torch.ones(2, seen - 41, dtype=torch.long)], dim=1)
    one, two = (
        generate(model, each, **each.continuation(prompt(rows=2, tokens=6, seed=1), mask)) for each in (cache, loaded)
    )
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.logits, two.logits)


# What does not work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "snapvk"}, "did you mean 'snapkv'"),
        ({"policy": "oracle"}, "known: knorm"),
        ({"policy": "knorm", "per_head": True}, "per_head goes with snapkv, h2o, expected_attention"),
        ({"budget": 0.0}, "share"),
        ({"budget": 1.5}, "share"),
        ({"budget": "a lot"}, "64MiB"),
        ({"budget": 0}, "leaves no choice"),
        ({"budget": 135}, "takes 136"),
        ({"sinks": -1}, "sinks"),
        ({"recent": -1}, "recent"),
        ({"recent": 1.0}, "below 1.0"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_impossible_choices(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvictingCache(decoder_config(tiny_model("llama")), **options)


def test_a_budget_in_bytes_that_is_too_small() -> None:
    """Known when the first tokens come; nothing is stored."""
    model = tiny_model("llama", torch.float32)
    cache = EvictingCache(decoder_config(model), budget="1KiB")
    with pytest.raises(ConfigError, match="leaves no choice"):
        generate(model, cache, prompt())
    assert cache.get_seq_length() == 0


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(SpecError, match="budget"):
        build_cache(decoder_config(tiny_model("llama")), "evicting:budge=0.5")


@pytest.mark.parametrize("policy", KINDS)
def test_attention_that_does_not_leave_tokens_out(policy: str) -> None:
    """Eager attention reads whole tensors: right as long as nothing has to go, refused then."""
    model = tiny_model("llama", torch.float32, "eager")
    short = generate(model, build_cache(decoder_config(model), evicting(policy, 200)), prompt())
    assert torch.equal(short.tokens, generate(model, None, prompt()).tokens)
    with pytest.raises(StateError, match='attn_implementation="sdpa"'):
        generate(model, build_cache(decoder_config(model), evicting(policy)), prompt())


@pytest.mark.parametrize("policy", ENCODED)
def test_encoded_tokens_are_there_for_any_attention(policy: str) -> None:
    """Attention that reads whole tensors reads decoded ones, if the policy needs no queries."""
    model = tiny_model("llama", torch.float32, "eager")
    cache = build_cache(decoder_config(model), evicting(policy))
    if not policy.startswith("keydiff"):
        with pytest.raises(StateError, match="looks at queries"):
            generate(model, cache, prompt())
        return
    generate(model, cache, prompt())
    sdpa = tiny_model("llama", torch.float32)
    other = build_cache(decoder_config(sdpa), evicting(policy))
    generate(sdpa, other, prompt())
    torch.testing.assert_close(cache.layers[0].keys, other.layers[0].keys)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("evicting:per_head=true+quantized:bits=4", "no per_head"),
        ("evicting:budget=0.5+quantized:bits=4,recent=64", "leave sinks and recent"),
    ],
)
def test_choices_that_do_not_combine(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_cache(decoder_config(tiny_model("llama")), spec)


def test_only_full_attention_is_evicted() -> None:
    cache = EvictingCache(decoder_config(tiny_model("gemma3")))
    assert [type(each).__name__ for each in cache.block_layers].count("EvictingLayer") == 1
    assert "evicted by h2o" in cache.describe()
    assert "attention window" in cache.describe()
