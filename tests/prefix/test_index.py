"""The index against a plain model of it; collisions; pins, leases, lifetimes; what the order of eviction is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from architectures import tiny_model
from stand_ins import BLOCK_BYTES, SIZE, check_content, match, put

from hf_kvcache import InputError, PrefixStore
from hf_kvcache.prefix import identity, index
from hf_kvcache.prefix.identity import Root
from hf_kvcache.prefix.index import Index, Lease

ROOTS = [Root("model", None), Root("model", ""), Root("model", "one"), Root("other", None)]


def small_store(blocks: int, lifetime_seconds: float | None = None) -> PrefixStore:
    return PrefixStore.for_model(tiny_model("llama"), blocks * BLOCK_BYTES, SIZE, None, lifetime_seconds)


def random_text(chance: random.Random) -> list[int]:
    """Of three tokens, so that most texts begin like others."""
    return [chance.choice([3, 4, 5]) for _ in range(chance.randint(1, 9))]


@dataclass
class PlainIndex:
    """Texts in whole blocks, each with the time of its last use; a sorted list where the index has trees."""

    most_blocks: int
    used: dict[tuple[Root, tuple[int, ...]], int] = field(default_factory=dict)
    pinned: dict[tuple[Root, tuple[int, ...]], int] = field(default_factory=dict)
    now: int = 0

    def match(self, root: Root, text: list[int]) -> int:
        self.now += 1
        found = 0
        for end in range(SIZE, len(text) + 1, SIZE):
            if (root, tuple(text[:end])) not in self.used:
                break
            found = end
        for end in range(SIZE, found + 1, SIZE):
            self.used[root, tuple(text[:end])] = self.now
        return found

    def put(self, root: Root, text: list[int]) -> None:
        found = self.match(root, text)
        whole = len(text) // SIZE * SIZE
        path = {(root, tuple(text[:end])) for end in range(SIZE, found + 1, SIZE)}
        protected = {name for name in self.used if self.pinned.get(name)} | path
        whole = min(whole, found + max(0, self.most_blocks - len(protected)) * SIZE)
        new = [(root, tuple(text[:end])) for end in range(found + SIZE, whole + 1, SIZE)]
        excess = len(self.used) + len(new) - self.most_blocks
        oldest = sorted((self.used[name], -len(name[1]), name) for name in self.used if name not in protected)
        for _, _, name in oldest[: max(excess, 0)]:
            del self.used[name]
        for name in [*path, *new]:
            self.used[name] = self.now

    def pin(self, root: Root, text: list[int], by: int) -> None:
        for end in range(SIZE, self.match(root, text) + 1, SIZE):
            name = (root, tuple(text[:end]))
            self.pinned[name] = max(0, self.pinned.get(name, 0) + by)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_against_a_plain_model(seed: int) -> None:
    chance = random.Random(seed)
    store, plain = small_store(12), PlainIndex(12)
    for _ in range(600):
        root, text = chance.choice(ROOTS), random_text(chance)
        operation = chance.choice(["put", "put", "match", "pin", "unpin"])
        if operation == "put":
            put(store, root, text)
            plain.put(root, text)
        elif operation == "match":
            found = match(store._index, root, text)
            check_content(found, root, text)
            assert len(found.path) * SIZE == plain.match(root, text)
        else:
            path = match(store._index, root, text).path
            (store._index.pin if operation == "pin" else store._index.unpin)(path)
            plain.pin(root, text, 1 if operation == "pin" else -1)
        store.check_integrity()
        assert len(store._index) == len(plain.used)
        assert store._index.held_bytes == len(plain.used) * BLOCK_BYTES


def check_random_leases(operations: int, seed: int) -> None:
    """Any mix of requests, forks, forgotten and closed caches: nothing in use is lost or changes, all is freed."""
    chance = random.Random(seed)
    store = small_store(20)
    held: list[tuple[Lease, torch.Tensor, torch.Tensor]] = []
    for _ in range(operations):
        root, text = chance.choice(ROOTS), random_text(chance)
        operation = chance.random()
        if operation < 0.5:
            put(store, root, text)
        elif operation < 0.75 and len(held) < 6:
            found = match(store._index, root, text)
            check_content(found, root, text)
            for block in found.path:
                view = block.extent.span(block.position, block.position + 1, SIZE)[0][0]
                held.append((store._index.lease(found.path), view, view.clone()))
        elif operation < 0.95 and held:
            lease, view, was = held.pop(chance.randrange(len(held)))
            assert torch.equal(view, was)
            lease.release()
            lease.release()
        elif operation < 0.97:
            store._index.evict(match(store._index, root, text).path)
        elif operation < 0.98:
            store.clear(chance.choice(["", "one", None]))
        store.check_integrity()
    for lease, view, was in held:
        assert torch.equal(view, was)
        lease.release()
    assert store._index.blocks_in_use == 0
    store.check_integrity()
    store.clear()
    assert len(store._index) == store._index.held_bytes == 0


def test_random_leases() -> None:
    check_random_leases(operations=1500, seed=0)


def test_equal_hashes_of_different_texts_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash of 4 bits every other text collides: what is found is still what was put."""
    monkeypatch.setattr(identity, "digest", lambda _domain, *fields: bytes([sum(map(sum, fields)) % 16]))
    chance = random.Random(1)
    store = small_store(64)
    found = 0
    for _ in range(500):
        root, text = chance.choice(ROOTS), random_text(chance)
        put(store, root, text)
        result = match(store._index, root, text)
        check_content(result, root, text)
        found += len(result.path)
        store.check_integrity()
    assert found > 50


def test_a_constant_hash_never_mixes_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "digest", lambda *_: b"the same")
    store = small_store(8)
    for root in ROOTS:
        put(store, root, [3, 4])
    assert [len(match(store._index, root, [3, 4]).path) for root in ROOTS] == [1, 0, 0, 0]


def test_the_deepest_of_the_least_recently_used_goes_first() -> None:
    store, root = small_store(4), ROOTS[0]
    put(store, root, [3, 3, 4, 4])
    put(store, root, [5, 5, 6, 6])
    match(store._index, root, [3, 3, 4, 4])
    put(store, root, [7, 7])
    assert len(match(store._index, root, [5, 5, 6, 6]).path) == 1
    assert len(match(store._index, root, [3, 3, 4, 4]).path) == 2
    assert match(store._index, root, [6, 6]).missing == "nothing_shared"
    put(store, root, [8, 8])
    assert match(store._index, root, [7, 7]).missing == "evicted"
    assert store.stats().evicted_blocks == 2


def test_memory_of_evicted_blocks_is_given_back() -> None:
    store, root = small_store(4), ROOTS[0]
    put(store, root, [3, 3, 4, 4, 5, 5, 6, 6])
    first = match(store._index, root, [3, 3]).path[0]
    put(store, root, [7, 7])
    assert first.extent.nbytes == 3 * BLOCK_BYTES
    store.check_integrity()


def test_pinned_blocks_stay_and_nothing_else_is_stored_in_their_place() -> None:
    store, root = small_store(2), ROOTS[0]
    put(store, root, [3, 3, 4, 4])
    path = match(store._index, root, [3, 3, 4, 4]).path
    store._index.pin(path)
    assert put(store, root, [5, 5]) == 0
    store._index.unpin(path)
    assert put(store, root, [5, 5]) == SIZE


def test_as_many_first_blocks_as_there_is_room_for_are_stored() -> None:
    store, root = small_store(3), ROOTS[0]
    assert put(store, root, list(range(10))) == 3 * SIZE
    check_content(match(store._index, root, list(range(10))), root, list(range(10)))


def test_lifetime() -> None:
    now = [0.0]
    short = Index(SIZE, 100 * BLOCK_BYTES, 10.0, clock=lambda: now[0])
    store, root = small_store(100), ROOTS[0]
    store._index = short
    put(store, root, [3, 3, 4, 4])
    now[0] = 9.0
    assert len(match(short, root, [3, 3]).path) == 1
    now[0] = 12.0
    assert len(match(short, root, [3, 3, 4, 4]).path) == 1, "the second block was not used since"
    lease = short.lease(match(short, root, [3, 3]).path)
    now[0] = 30.0
    assert len(match(short, root, [3, 3]).path) == 1, "it is in use"
    lease.release()
    now[0] = 60.0
    assert match(short, root, [3, 3]).missing == "expired"
    assert short.held_bytes == 0
    short.check_integrity()


def test_reasons_of_misses() -> None:
    store = small_store(10)
    put(store, ROOTS[0], [3, 3])
    reasons = {
        "shorter_than_a_block": (ROOTS[0], [3]),
        "nothing_shared": (ROOTS[0], [4, 4]),
        "other_namespace": (ROOTS[2], [3, 3]),
        "other_model": (ROOTS[3], [3, 3]),
    }
    for reason, (root, text) in reasons.items():
        assert match(store._index, root, text).missing == reason
    assert match(store._index, ROOTS[0], [3, 3, 9, 9]).missing is None


def test_a_growing_text_is_read_in_few_pieces() -> None:
    store, root = small_store(200), ROOTS[0]
    text: list[int] = []
    for turn in range(64):
        text += [turn % 7, turn % 5]
        put(store, root, text)
    found = match(store._index, root, text)
    assert len(found.path) == 64
    assert len({id(block.extent) for block in found.path}) <= 7
    check_content(found, root, text)
    store.check_integrity()


def test_what_is_read_is_not_joined() -> None:
    store, root = small_store(20), ROOTS[0]
    put(store, root, [3, 3])
    path = match(store._index, root, [3, 3]).path
    lease, extent = store._index.lease(path), path[0].extent
    put(store, root, [3, 3, 4, 4])
    assert path[0].extent is extent
    lease.release()
    store.check_integrity()


def test_forgotten_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_MOST_EVICTED_KEYS", 3)
    store = small_store(1)
    for token in range(10):
        put(store, ROOTS[0], [token, token])
    assert len(store._index._gone) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"capacity": 0},
        {"capacity": "many"},
        {"block_size": 0},
        {"lifetime_seconds": 0.0},
        {"lifetime_seconds": -1.0},
    ],
)
def test_impossible_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(InputError):
        PrefixStore.for_model(tiny_model("llama"), **arguments)
