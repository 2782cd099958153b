"""Does a cache change what it gave the model before? Read after every append, each token's state by its bits."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.evaluation.caches import Build
from hf_kvcache.evaluation.proofs import Audit, Rewrite
from hf_kvcache.evaluation.protocols import forward

AUDIT_TOKENS = 640
CHUNK_TOKENS = 48
SINGLE_TOKENS = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def audit(model: PreTrainedModel, build: Build, window: Int[Tensor, " tokens"]) -> Audit | str:
    """Feed at most `AUDIT_TOKENS` of a window: a quarter at once, then chunks, at last single tokens.

    Args:
        model: In the dtype and with the attention that are measured.
        build: Makes the cache.
        window: Token ids.

    Returns:
        What changed in the cache; text where it cannot be read, saying why.
    """
    cache = build(model.config)
    if cache is None:
        return "there is no cache to audit"
    watched = WatchedCache(cache)
    ids = window[None, :AUDIT_TOKENS].to(model.device)
    sizes = _sizes(ids.shape[1])
    try:
        for piece in ids.split(sizes, dim=1):
            forward(model, piece, watched, keep=1)
    except Exception as error:  # noqa: BLE001 - a foreign cache may raise anything: that is a finding
        return f"reading what it holds raised {type(error).__name__}: {error}"
    layers = list(watched.histories.values())
    counted = [of.most for of in layers]
    return Audit(
        tokens=ids.shape[1],
        appends=len(sizes),
        rewrites_most=None if None in counted else max(of for of in counted if of is not None),
        rewrites_mean=sum(of.mean for of in layers) / len(layers),
        missing=sum(of.missing for of in layers) / len(layers),
        first=next((of.first for of in layers if of.first), None),
    )


class WatchedCache(Cache):
    """Another cache, read after every update of a layer; the model gets what it returns.

    Args:
        cache: Empty; changed.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__(layers=cache.layers)
        self.cache = cache
        self.histories: dict[int, _History] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the states in the cache, and compare all it holds of this layer with what it held before."""
        columns, first = self.cache.get_mask_sizes(key_states.shape[2], layer_idx)
        returned: tuple[Tensor, Tensor] = self.cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.histories:
            self.histories[layer_idx] = _History(layer_idx, key_states, value_states)
        history = self.histories[layer_idx]
        history.append(key_states, value_states)
        try:
            keys, values = (of.clone() for of in returned)
        except Exception:  # noqa: BLE001 - tokens were dropped: then the layer says what is left
            layer: Any = self.cache.layers[layer_idx]
            history.read_held(layer.keys, layer.values)
        else:
            history.read(keys[:, :, :columns], values[:, :, :columns], first)
        return returned

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """That of the cache."""
        return int(self.cache.get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """That of the cache."""
        sizes: tuple[int, int] = self.cache.get_mask_sizes(query_length, layer_idx)
        return sizes


class _History:
    """One layer: a hash of the state of every token, as the model last got it, for each row and head."""

    def __init__(self, layer: int, keys: Tensor, values: Tensor) -> None:
        generator = torch.Generator().manual_seed(0)
        self._layer = layer
        # Odd factors: 64 bits of a sum that no two states share but by chance.
        self._factors = [
            (torch.randint(2**62, (of.shape[-1],), generator=generator) * 2 + 1).to(of.device) for of in (keys, values)
        ]
        lanes = keys.shape[0] * (keys.shape[1] + values.shape[1])
        self._lane = torch.randint(2**62, (lanes, 1), generator=generator).to(keys.device)
        self._known = self._lane[:, :0]
        self._strangers = self._lane[:, :1]  # zeros, in place of what heads hold less than others, are no state
        self._unplaced = 0.0
        self._changes = torch.zeros(0, dtype=torch.long, device=keys.device)
        self.missing = 0.0
        self.first: Rewrite | None = None

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Tokens that the model stores, ``[rows, heads, tokens, width]``."""
        new = self._hashes(keys, values)
        self._known = torch.cat([self._known, new], dim=1)
        self._changes = torch.cat([self._changes, self._changes.new_zeros(new.shape[1])])

    def read(self, keys: Tensor, values: Tensor, first: int) -> None:
        """What the cache gives the model: tokens from position `first` on; what lies beyond those seen is not read."""
        tokens = min(keys.shape[2], self._known.shape[1] - first)
        found = self._hashes(keys[:, :, :tokens], values[:, :, :tokens])
        places = slice(first, first + tokens)
        changed = (found != self._known[:, places]).any(dim=0)
        self._note(changed.nonzero()[:, 0] + first)
        self._changes[places] += changed
        self._known[:, places] = found
        self.missing = 1 - tokens / self._known.shape[1]

    def read_held(self, keys: Tensor, values: Tensor) -> None:
        """What is left, where tokens were dropped: states that no token had before have been changed."""
        found = self._hashes(keys, values)
        seen = torch.isin(found, torch.cat([self._known, self._strangers], dim=1))
        self._unplaced += float((~seen).sum()) / len(found)
        self._note(self._changes[:0] if bool(seen.all()) else None)
        strangers = found[~seen].view(1, -1).expand(len(found), -1)
        self._strangers = torch.cat([self._strangers, strangers], dim=1)
        held = (found != self._lane).sum(dim=1).double().mean()
        self.missing = 1 - float(held) / self._known.shape[1]

    @property
    def most(self) -> int | None:
        """The most changes of one token; None where it is not known which token changed."""
        return None if self._unplaced else int(self._changes.max())

    @property
    def mean(self) -> float:
        """Changes of a token, the mean."""
        return (float(self._changes.sum()) + self._unplaced) / len(self._changes)

    def _note(self, changed: Tensor | None) -> None:
        if self.first is None and (changed is None or len(changed)):
            token = None if changed is None else int(changed[0])
            self.first = Rewrite(self._layer, token, self._known.shape[1])

    def _hashes(self, keys: Tensor, values: Tensor) -> Int[Tensor, "lanes tokens"]:
        """A sum of the bits of each state, times odd factors, modulo 2**64; equal states in two lanes differ."""
        found = []
        for states, factors in zip((keys, values), self._factors, strict=True):
            bits = states.contiguous().view(_BITS[states.element_size()]).long()
            found.append((bits * factors).sum(dim=-1))
        return torch.cat(found, dim=1).flatten(0, 1) + self._lane


def _sizes(tokens: int) -> list[int]:
    """Pieces of a text: a quarter, chunks that fill blocks at odd places, single tokens."""
    prefill = max(1, tokens // 4)
    single = min(SINGLE_TOKENS, (tokens - prefill) // 2)
    whole, rest = divmod(tokens - prefill - single, CHUNK_TOKENS)
    return [prefill, *[CHUNK_TOKENS] * whole, *([rest] if rest else []), *[1] * single]
