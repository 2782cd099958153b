"""Which part of an approximate cache costs how much: keys, values, one layer at a time, and what it keeps exact."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from hf_kvcache.cache import KVCache
from hf_kvcache.errors import InputError
from hf_kvcache.evaluation import metrics
from hf_kvcache.evaluation.caches import Build, resolve_cache
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.protocols import Protocol, stream
from hf_kvcache.evaluation.windows import windows
from hf_kvcache.spec import build_cache, cache_spec


class Part(NamedTuple):
    """What the cache does to one part alone, everything else being exact.

    Attributes:
        name: `everything`, `keys`, `values`, `layer 3`, or `no sinks`, `no recent`: everything, without what the cache
            keeps exact.
        kl_mean: Mean KL(reference || cache), nats.
    """

    name: str
    kl_mean: float


class SplicedCache(DynamicCache):
    """Exact, but for some parts of what the model reads back: those come from another cache.

    Args:
        config: Of the model.
        other: Empty; sees everything the model stores.
        layers: Layers that read from `other`; None for all.
        keys: Whether they read its keys.
        values: Whether they read its values.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        other: Cache,
        *,
        layers: frozenset[int] | None = None,
        keys: bool = True,
        values: bool = True,
    ) -> None:
        super().__init__(config=config)
        self.other = other
        self.chosen_layers, self.chosen = layers, (keys, values)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store in both caches; give each part from the one it is to come from.

        Raises:
            InputError: The other cache gives something else than tensors of the whole history.
        """
        exact = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        theirs = self.other.update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.chosen_layers is not None and layer_idx not in self.chosen_layers:
            return exact
        if any(not isinstance(of, Tensor) or of.shape != own.shape for of, own in zip(theirs, exact, strict=True)):
            raise InputError(
                f"{type(self.other).__name__} does not give back tensors of the whole history, so its parts cannot be "
                "mixed with exact ones"
            )
        key, value = (of if wanted else own for of, own, wanted in zip(theirs, exact, self.chosen, strict=True))
        return key, value


def attribute(
    loaded: LoadedModel,
    documents: Iterable[str],
    spec: str,
    *,
    protocol: Protocol | None = None,
    max_tokens: int = 512,
    progress: bool = True,
) -> list[Part]:
    """Measure what each part of a cache costs: the whole, keys, values, then layer by layer.

    Where the cache is one of ours that keeps sinks or recent tokens exact, also what the whole costs without them.
    Parts do not add up: errors of one layer meet those of the next. One cache is held at a time.

    Args:
        loaded: The model and its tokenizer.
        documents: The text.
        spec: The cache, see `caches.py`.
        protocol: Window, prefill and chunk; the defaults of `Protocol` if None.
        max_tokens: Tokens to score at most.
        progress: Whether to show a progress bar.

    Raises:
        InputError: The cache does not give back tensors of the whole history.
    """
    protocol = protocol or Protocol()
    build = resolve_cache(spec, protocol.window_tokens)
    makers = _makers(loaded.model.config, build)
    sums = dict.fromkeys(makers, 0.0)
    scored = 0
    with tqdm(total=max_tokens * len(makers), unit=" tokens", desc=f"taking apart {spec}", disable=not progress) as bar:
        for window in windows(documents, loaded.tokenizer, protocol, max_tokens):
            exact = stream(loaded.model, DynamicCache(config=loaded.model.config), window.ids, protocol)
            reference = [metrics.log_probabilities(chunk.logits) for chunk in exact]
            scored += sum(map(len, reference))
            for name, make in makers.items():
                chunks = stream(loaded.model, make(), window.ids, protocol)
                for log_probs, chunk in zip(reference, chunks, strict=True):
                    divergence = metrics.kl_divergence(log_probs, metrics.log_probabilities(chunk.logits))
                    sums[name] += float(divergence.sum())
                    bar.update(len(log_probs))
    return [Part(name, total / scored) for name, total in sums.items()]


def _makers(config: PreTrainedConfig, build: Build) -> dict[str, Callable[[], Cache]]:
    def make(**chosen: Any) -> Callable[[], Cache]:
        def made() -> Cache:
            other = build(config)
            if other is None:
                raise InputError("there is no cache to take apart")
            return SplicedCache(config, other, **chosen)

        return made

    layers = config.get_text_config(decoder=True).num_hidden_layers
    return {
        "everything": make(),
        "keys": make(values=False),
        "values": make(keys=False),
        **_without(config, build),
        **{f"layer {layer}": make(layers=frozenset([layer])) for layer in range(layers)},
    }


def _without(config: PreTrainedConfig, build: Build) -> dict[str, Callable[[], Cache]]:
    """The cache without its sinks, and without its recent tokens, if it is one of ours that keeps some and can."""
    cache = build(config)
    if not isinstance(cache, KVCache):
        return {}
    found: dict[str, Callable[[], Cache]] = {}
    for option in ("sinks", "recent"):
        spec = re.sub(rf"\b{option}=\d+", f"{option}=0", cache_spec(cache))
        if spec != cache_spec(cache):
            found[f"no {option}"] = partial(build_cache, config, spec)
    return found
