"""What every attack begins with: a store in files, filled by a process that has gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from architectures import tiny_model
from torch import Tensor

from hf_kvcache import PrefixStore

SIZE = 4
TEXT = torch.randint(3, 97, (1, 22), generator=torch.Generator().manual_seed(0))
BLOCKS = 6  # of prompt and answer
ALL = 5 * SIZE  # can be found of the prompt, whose last token is always computed


class Victim(NamedTuple):
    """A directory of blocks, and the right answer."""

    folder: Path
    answer: Tensor
    files: list[Path]
    """Of the blocks, in the order of the text, as they were before anything happened to them."""

    @property
    def whole_files(self) -> list[Path]:
        """The files of blocks that are there now."""
        return sorted(self.folder.glob("*/*.safetensors"))

    def open(self, **options: object) -> PrefixStore:
        """As a second process would."""
        return PrefixStore.open(f"file://{self.folder}", tiny_model("llama"), block_size=SIZE, **options)

    def check(self, store: PrefixStore, hit_tokens: int | None = None) -> None:
        """The answer is right, and as much was found as expected."""
        before = store.stats().hit_tokens
        output = store.generate(store.model, input_ids=TEXT, max_new_tokens=6, do_sample=False)
        assert torch.equal(output, self.answer)
        if hit_tokens is not None:
            assert store.stats().hit_tokens - before == hit_tokens
        store.check_integrity()


def in_order(folder: Path) -> list[Path]:
    """The files of one text, each behind the one it follows."""
    following = {}
    for path in folder.glob("*/*.safetensors"):
        data = path.read_bytes()
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        following[metadata["parent"]] = (metadata["key"], path)
        root = metadata["root"]
    paths = []
    while root in following:
        root, path = following[root]
        paths.append(path)
    return paths
