"""States that tell what they belong to: each token holds a checksum of its root and of all tokens so far."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from hf_kvcache.prefix.extent import States
from hf_kvcache.prefix.identity import Root, block_tokens
from hf_kvcache.prefix.index import Index, Match
from hf_kvcache.prefix.store import PrefixStore

SIZE = 2
BLOCK_BYTES = 2 * SIZE * 8  # one layer, one head, width 1, float64; keys and values


def states_of(root: Root, text: Sequence[int]) -> Callable[[slice], list[States]]:
    sums = [zlib.crc32(repr((root, list(text[: token + 1]))).encode()) for token in range(len(text))]

    def states(part: slice) -> list[States]:
        keys = torch.tensor(sums[part], dtype=torch.float64)[None, :, None]
        return [(keys, -keys)]

    return states


def put(store: PrefixStore, root: Root, text: Sequence[int]) -> int:
    return store.put(root, torch.tensor(text), states_of(root, text))


def match(index: Index, root: Root, text: Sequence[int]) -> Match:
    return index.match(root, block_tokens(torch.tensor(text), SIZE))


def check_content(found: Match, root: Root, text: Sequence[int]) -> None:
    """What was found is what was put under this root for this very text."""
    expected = states_of(root, text)(slice(None))[0][0]
    for number, block in enumerate(found.path):
        keys, values = block.extent.span(block.position, block.position + 1, SIZE)[0]
        assert torch.equal(keys, expected[:, number * SIZE : (number + 1) * SIZE])
        assert torch.equal(values, -keys)
