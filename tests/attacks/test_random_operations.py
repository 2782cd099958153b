"""Two processes' stores over one directory, any mix of operations, some of them damage: nothing wrong is ever shown."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from stand_ins import BLOCK_BYTES, SIZE, check_content, put
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcache import PrefixStore
from hf_kvcache.prefix.identity import Root, block_tokens

FILE_BYTES = 900  # about what a file of these blocks takes


def damage(chance: random.Random, folder: Path) -> None:
    """Cut, alter, swap or remove a file."""
    paths = sorted(folder.glob("*/*.safetensors"))
    if not paths:
        return
    path = chance.choice(paths)
    data = bytearray(path.read_bytes())
    match chance.randrange(4):
        case 0:
            path.write_bytes(data[: chance.randrange(len(data))])
        case 1:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        case 2:
            path.write_bytes(chance.choice(paths).read_bytes())
        case 3:
            path.unlink()


def check_random_operations(folder: Path, operations: int, seed: int, *, harm: bool) -> None:
    """With harm: damage, evictions and too little room. Without: whatever was put is found, all of it."""
    chance = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    )

    def opened() -> PrefixStore:
        blocks, files = (10, 40) if harm else (10_000, 10_000)
        return PrefixStore.open(f"file://{folder}", model, blocks * BLOCK_BYTES, SIZE, file_capacity=files * FILE_BYTES)

    stores = [opened(), opened()]
    namespaces = [None, "", "one"]
    roots = [stores[0].root(model, namespace) for namespace in namespaces] + [Root("other", None)]
    texts: dict[Root, set[tuple[int, ...]]] = {root: set() for root in roots}
    for _ in range(operations):
        store, which = chance.choice(stores), chance.randrange(len(roots))
        root, text = roots[which], [chance.choice([3, 4, 5]) for _ in range(chance.randint(1, 9))]
        operation = chance.random()
        if operation < 0.4:
            put(store, root, text)
            texts[root] |= {tuple(text[:end]) for end in range(SIZE, len(text) + 1, SIZE)}
        elif operation < 0.9:
            blocks = block_tokens(torch.tensor(text), SIZE)
            store._load(model, root, blocks)
            found = store._index.match(root, blocks)
            check_content(found, root, text)
            if not harm:
                expected = max((end for end in range(len(text) + 1) if tuple(text[:end]) in texts[root]), default=0)
                assert len(found.path) * SIZE == expected
        elif operation < 0.92:
            stores[stores.index(store)] = opened()
        elif harm and operation < 0.97:
            damage(chance, folder)
        elif harm and which < len(namespaces):
            namespace = namespaces[which]
            store.evict(torch.tensor(text), namespace) if chance.random() < 0.9 else store.clear(namespace)
        store.check_integrity()
        assert set(store.stats().file_problems) <= ({"bad_file", "newer_format"} if harm else set())


@pytest.mark.parametrize("harm", [False, True])
def test_random_operations(tmp_path: Path, harm: bool) -> None:
    check_random_operations(tmp_path / "blocks", operations=250, seed=0, harm=harm)
