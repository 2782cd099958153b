"""Toy caches with known faults, a tiny model and a tokenizer of bytes."""

# ruff: noqa: ARG002 - the signatures are those of transformers

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.cache_utils import Cache

from hf_kvcache.evaluation import LoadedModel, needles, retrieval
from hf_kvcache.evaluation.generation import PAD_TOKENS


class Claim(NamedTuple):
    kind: str
    reason: str


class ToyCache(DynamicCache):
    """A `DynamicCache` that hands the model a changed history, and keeps the true one."""

    exactness: Any = Claim("rounding", "a toy")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        new = key_states.shape[-2]
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.changed(keys, new), self.changed(values, new)

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        """The history with the fault; `new` tokens were added in this step."""
        return states


class OffByOne(ToyCache):
    """Each place of the history holds the token before it; the newest old token is lost."""

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        places = torch.arange(states.shape[-2])
        places[: len(places) - new] -= 1
        return states[..., places.clamp(min=0), :]


class ShuffledBlock(ToyCache):
    """The values of tokens 8 to 15 come back in another order (the keys as well, but attention has no order)."""

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        order = torch.arange(states.shape[-2])
        if len(order) - new >= 16 and self.turn():
            order[8:16] = order[8:16].flip(0)
        return states[..., order, :]

    def turn(self) -> bool:
        """Every second call: values only."""
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls % 2 == 0


class Truncated(ToyCache):
    """The first 4 tokens are forgotten (read as zeros)."""

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        states = states.clone()
        if states.shape[-2] > new:
            states[..., :4, :] = 0
        return states


class Renumbered(ToyCache):
    """The old keys are turned by one position more than they stand at."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        old, new = keys.split([keys.shape[2] - key_states.shape[2], key_states.shape[2]], dim=2)
        half = keys.shape[3] // 2
        angles = (1e4 ** (-torch.arange(half, dtype=keys.dtype) / half)).repeat(2)
        turned = old * angles.cos() + torch.cat([-old[..., half:], old[..., :half]], dim=-1) * angles.sin()
        return torch.cat([turned, new], dim=2), values


class RightPadded(ToyCache):
    """Rows of a batch are moved to the left by the padding that the first one of the proof has, as if it were right."""

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        if states.shape[0] == 1 or states.shape[2] == new:
            return states
        old = states[:, :, :-new]
        moved = torch.cat([old[:1].roll(-PAD_TOKENS, dims=2), old[1:]])
        return torch.cat([moved, states[:, :, -new:]], dim=2)


class LeavesTraces(ToyCache):
    """Forgets to take the values back when it is cropped: those of the tokens before lie there twice."""

    def crop(self, tokens_to_remove: int) -> None:
        values = [layer.values[:, :, tokens_to_remove:] for layer in self.layers]
        super().crop(tokens_to_remove)
        for layer, wrong in zip(self.layers, values, strict=True):
            layer.values[:, :, -wrong.shape[2] :] = wrong


class SharedCopy(ToyCache):
    """A copy that goes on in the memory of the original."""

    room = 400

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        seen = self.get_seq_length(layer_idx)
        self.buffers = getattr(self, "buffers", {})
        if layer_idx not in self.buffers:
            self.buffers[layer_idx] = key_states.new_zeros(*key_states.shape[:2], self.room, key_states.shape[3])
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.buffers[layer_idx][:, :, seen : keys.shape[2]] = key_states
        return self.buffers[layer_idx][:, :, : keys.shape[2]], values

    def __deepcopy__(self, memo: dict[int, Any]):
        memo[id(self.buffers)] = dict(self.buffers)
        made = DynamicCache.__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = {name: copy.deepcopy(of, memo) for name, of in vars(self).items()}
        return made


class Jittering(ToyCache):
    """The last bit of the first 8 tokens is another after every step: far below what a proof can see."""

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        if states.shape[2] == new or states.shape[2] % 2:
            return states
        states = states.clone()
        states[:, :, :8] = torch.nextafter(states[:, :, :8], states.new_tensor(torch.inf))
        return states


class Rounded(ToyCache):
    """An honest approximation: the history is read back in 8 bits of mantissa."""

    exactness = Claim("approximate", "8 bits")

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        return states.to(torch.bfloat16).to(states.dtype)


class RandomEviction(ToyCache):
    """The negative control: half of the old tokens, drawn at random, read as nothing."""

    exactness = Claim("approximate", "keeps half of the tokens, at random")

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        old = states.shape[-2] - new
        kept = torch.rand(old, generator=torch.Generator().manual_seed(old)) < 0.5
        kept = torch.cat([kept, torch.ones(new, dtype=torch.bool)])
        return states * kept[:, None].to(states)


class BoastingEviction(RandomEviction):
    """The negative control, calling itself exact."""

    exactness = Claim("rounding", "a lie")


class Bits(ToyCache):
    """The history is read back in few bits a number, with a scale for each token and head."""

    exactness = Claim("approximate", "few bits")
    bits = 0

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        scale = states.abs().amax(dim=-1, keepdim=True) / (2 ** (self.bits - 1) - 1)
        return (states / scale).round() * scale


class PlantedError(ToyCache):
    """The old keys and values of one layer are off by 1e-3 of themselves."""

    exactness = Claim("approximate", "an error of 1e-3 in layer 1")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.now = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        if self.now != 1 or states.shape[-2] == new:
            return states
        states = states.clone()
        states[..., :-new, :] *= 1 + 1e-3
        return states


class Idle(ToyCache):
    """Calls itself approximate and changes nothing."""

    exactness = Claim("approximate", "would compress, if it did anything")


class Boaster(Rounded):
    """An approximation that calls itself bitwise exact."""

    exactness = Claim("bitwise", "a lie")


class NotANumber(ToyCache):
    """Reads back NaN."""

    exactness = Claim("approximate", "broken")

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        return states * float("nan") if states.shape[-2] > new else states


class Shortened(ToyCache):
    """Gives back the newest 10 tokens only."""

    def changed(self, states: torch.Tensor, new: int) -> torch.Tensor:
        return states[..., -10:, :]


class Unable(DynamicCache):
    """Needs something this machine does not have."""

    def update(self, *args: Any, **kwargs: Any):
        raise OSError("no device")


class Uncopyable(DynamicCache):
    """Holds something that cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]):
        raise TypeError("no copies")


class Hollow(DynamicCache):
    """Stores nothing."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        return key_states, value_states


def off_by_one(config: PreTrainedConfig) -> Cache:
    return OffByOne(config=config)


def shuffled_block(config: PreTrainedConfig) -> Cache:
    return ShuffledBlock(config=config)


def truncated(config: PreTrainedConfig) -> Cache:
    return Truncated(config=config)


def renumbered(config: PreTrainedConfig) -> Cache:
    return Renumbered(config=config)


def right_padded(config: PreTrainedConfig) -> Cache:
    return RightPadded(config=config)


def leaves_traces(config: PreTrainedConfig) -> Cache:
    return LeavesTraces(config=config)


def shared_copy(config: PreTrainedConfig) -> Cache:
    return SharedCopy(config=config)


def jittering(config: PreTrainedConfig) -> Cache:
    return Jittering(config=config)


def rounded(config: PreTrainedConfig) -> Cache:
    return Rounded(config=config)


def random_eviction(config: PreTrainedConfig) -> Cache:
    return RandomEviction(config=config)


def boasting_eviction(config: PreTrainedConfig) -> Cache:
    return BoastingEviction(config=config)


def _few_bits(bits: int) -> Callable[[PreTrainedConfig], Cache]:
    def build(config: PreTrainedConfig) -> Cache:
        cache = Bits(config=config)
        cache.bits = bits
        return cache

    return build


bits3, bits4, bits5, bits6, bits7 = map(_few_bits, (3, 4, 5, 6, 7))


def planted_error(config: PreTrainedConfig) -> Cache:
    return PlantedError(config=config)


def idle(config: PreTrainedConfig) -> Cache:
    return Idle(config=config)


def boaster(config: PreTrainedConfig) -> Cache:
    return Boaster(config=config)


def not_a_number(config: PreTrainedConfig) -> Cache:
    return NotANumber(config=config)


def shortened(config: PreTrainedConfig) -> Cache:
    return Shortened(config=config)


def unable(config: PreTrainedConfig) -> Cache:
    return Unable(config=config)


def uncopyable(config: PreTrainedConfig) -> Cache:
    return Uncopyable(config=config)


def hollow(config: PreTrainedConfig) -> Cache:
    return Hollow(config=config)


def not_a_cache(config: PreTrainedConfig) -> list[int]:
    return []


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    """A random Llama over 256 bytes, with attention sharp enough that a wrong history shows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def byte_tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    """One token for each byte of UTF-8 text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, **changes)


def loaded(**changes: Any) -> LoadedModel:
    return LoadedModel(tiny_model(**changes), byte_tokenizer(), "tiny")


@contextmanager
def few_problems() -> Iterator[None]:
    """Retrieval with two short kinds of problems only, which fit into 250 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "WITH_DEPTH", {"pass key": needles.passkey})
        patch.setattr(retrieval, "WITHOUT_DEPTH", {"one needle": needles.single})
        yield


TEXT = " ".join(f"The {number}th sentence tells of {number * 7} things." for number in range(200))
