"""Whatever makes a history another one, through every public entry point.

The same value must be found, another must not, and no value must never meet a value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architectures import tiny_model
from strategies import CACHE_ARGUMENT
from transformers import PreTrainedModel
from victim import SIZE, TEXT

from hf_kvcache import PrefixSharedCache, PrefixStore


class Variant(NamedTuple):
    """One value of a dimension: how the store is made, and for whom a request is."""

    model: PreTrainedModel
    block_size: int = SIZE
    of_store: str | None = None
    of_request: str | None = None


def by_generate(store: PrefixStore, variant: Variant) -> None:
    store.generate(variant.model, input_ids=TEXT, namespace=variant.of_request, max_new_tokens=1)


def by_batch(store: PrefixStore, variant: Variant) -> None:
    store.generate(variant.model, input_ids=TEXT.repeat(2, 1), namespace=variant.of_request, max_new_tokens=1)


def by_prepare(store: PrefixStore, variant: Variant) -> None:
    prepared = store.prepare({"input_ids": TEXT}, namespace=variant.of_request)
    with prepared[CACHE_ARGUMENT] as cache:
        cache.commit(variant.model.generate(**prepared, max_new_tokens=1))


def by_cache(store: PrefixStore, variant: Variant) -> None:
    model = variant.model
    with PrefixSharedCache(model.config, store, TEXT, namespace=variant.of_request, model=model) as cache:
        cache.commit(model.generate(TEXT, **{CACHE_ARGUMENT: cache}, max_new_tokens=1))


def by_fork(store: PrefixStore, variant: Variant) -> None:
    model = variant.model
    with PrefixSharedCache(model.config, store, TEXT, namespace=variant.of_request, model=model).fork() as cache:
        cache.commit(model.generate(TEXT, **{CACHE_ARGUMENT: cache}, max_new_tokens=1))


ENTRIES = [by_generate, by_batch, by_prepare, by_cache, by_fork]
AT_EVERY_ENTRY = ["nothing special", "empty namespace", "namespace", "namespace of both", "weights", "adapter"]


def with_lora(seed: int, scale: float = 1.0) -> PreTrainedModel:
    """Adapted as PEFT adapts it, by parameters of the same names and shapes."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=2 * scale, target_modules=["k_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(copy.deepcopy(tiny_model("llama")), config).base_model.model


def variants() -> dict[str, Variant]:
    """One of each kind, and two where a value could be mistaken for another."""
    plain = tiny_model("llama")
    adapted = {}
    if find_spec("peft"):
        adapted = {"adapter": with_lora(0), "another adapter": with_lora(1), "its scale": with_lora(0, scale=2.0)}
    return {
        "nothing special": Variant(plain),
        "empty namespace": Variant(plain, of_request=""),
        "namespace": Variant(plain, of_request="a"),
        "namespace with an end": Variant(plain, of_request="a\x00"),
        "namespace like nothing": Variant(plain, of_request="None"),
        "namespace of the store": Variant(plain, of_store="b"),
        "namespace of both": Variant(plain, of_store="b", of_request="c"),
        "weights": Variant(tiny_model("llama", seed=1)),
        "dtype": Variant(tiny_model("llama", torch.float32)),
        "kernel": Variant(tiny_model("llama", attention="eager")),
        "block size": Variant(plain, block_size=2 * SIZE),
        **{name: Variant(model) for name, model in adapted.items()},
    }


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("entry", ENTRIES)
def test_only_the_same_is_found(entry: Callable[[PrefixStore, Variant], None], tmp_path: Path) -> None:
    """Every request comes from a process of its own: what it finds was read from the files of the others."""

    def is_hit(variant: Variant) -> bool:
        options = {"block_size": variant.block_size, "namespace": variant.of_store}
        store = PrefixStore.open(f"file://{tmp_path / 'blocks'}", variant.model, **options)
        entry(store, variant)
        assert not store.stats().file_problems
        assert store.stats().loaded_tokens == store.stats().hit_tokens
        return store.stats().hits == 1

    # Every entry asks the same function who it is; one of them goes through all there is.
    requests = {name: each for name, each in variants().items() if entry is by_generate or name in AT_EVERY_ENTRY}
    for name, variant in requests.items():
        assert not is_hit(variant), f"{name} found what is another's"
    for name, variant in requests.items():
        assert is_hit(variant), f"{name} did not find its own"
