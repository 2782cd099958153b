"""Images, sound and video in a prompt: which histories they belong to, and what the model still needs of them.

Their features take the place of placeholder tokens, so two prompts may have equal ids and different histories. The
chain of such a prompt begins with a SHA-256 over these inputs and over its ids up to the last placeholder. The ids
belong to it because the tokens of one image may attend to each other in both directions: the states of a placeholder
then depend on those after it. A model counts placeholders and features, so a history is found only if it holds all of
them; and since every text of such a chain begins with the same ids, the block of the last placeholder ends with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..errors import InputError
from ..fingerprint import tensor_bytes
from .extent import States, cut
from .identity import digest

_QWEN_INPUTS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids")

# What a kind of model takes besides text. Of others it is not known which tokens depend on it: a model that attends in
# both directions, or puts features where no placeholder is, would be given wrong histories. tests/prefix/test_media.py
# runs a model of each.
_INPUTS: dict[str, tuple[str, ...]] = {
    "gemma3": ("pixel_values", "token_type_ids"),
    "llava": ("pixel_values",),
    "llava_next": ("pixel_values", "image_sizes"),
    "qwen2_5_vl": (*_QWEN_INPUTS, "second_per_grid_ts"),
    "qwen2_vl": _QWEN_INPUTS,
    "qwen3_vl": _QWEN_INPUTS,
    "voxtral": ("input_features",),
}

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
# 0 where a token is text.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Arguments of a model's `forward` that say nothing about its text.
_HARMLESS = ("logits_to_keep",)


# No token has this id.
NO_TOKEN = -1


class Media(NamedTuple):
    """What a prompt holds besides text."""

    digest: str
    """SHA-256 (hex) over it, and over the ids up to the last token that stands for it."""
    tokens: int
    """How many ids that are."""

    def aligned(
        self, token_ids: Int[Tensor, " tokens"], block_size: int, fill: int = NO_TOKEN
    ) -> Int[Tensor, " aligned"]:
        """A text with as much `fill` behind the last placeholder as fills its block, so that the next begins there."""
        head, rest = token_ids[: self.tokens], token_ids[self.tokens :]
        filler = self._filler(block_size) if len(head) == self.tokens else 0
        return torch.cat([head, head.new_full((filler,), fill), rest])

    def real_tokens(self, aligned_tokens: int, block_size: int) -> int:
        """How many of the first `aligned_tokens` numbers of an aligned text are tokens."""
        return min(aligned_tokens, max(self.tokens, aligned_tokens - self._filler(block_size)))

    def without_fill(self, pieces: Sequence[States], block_size: int) -> list[States]:
        """The states of the tokens alone, from those of the beginning of an aligned text, as views."""
        kept: list[States] = []
        begin = 0
        for keys, values in pieces:
            head, rest = self.tokens - begin, self.tokens - begin + self._filler(block_size)
            for part in (slice(0, max(head, 0)), slice(max(rest, 0), None)) if head != rest else (slice(None),):
                kept += cut([(keys, values)], part)
            begin += keys.shape[1]
        return [pair for pair in kept if pair[0].shape[1]]

    def _filler(self, block_size: int) -> int:
        return -self.tokens % block_size


def split_options(model: PreTrainedModel, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `model.generate` that are inputs of the model, and the others."""
    settings = {*vars(GenerationConfig()), *_HARMLESS}
    arguments = {*inspect.signature(model.forward).parameters, "cache", "past_key_values", "mm_encoder_outputs"}
    inputs = {
        name: option
        for name, option in options.items()
        if isinstance(option, Tensor) or (name in arguments and name not in settings)
    }
    return inputs, {name: option for name, option in options.items() if name not in inputs}


def read_media(
    config: PreTrainedConfig,
    input_ids: Int[Tensor, "rows tokens"],
    attention_mask: Tensor | None,
    inputs: Mapping[str, Any],
) -> Media | None:
    """What `inputs` say about a prompt; None if they say that it is text.

    Args:
        config: Of the model.
        input_ids: The prompt, with placeholders.
        attention_mask: 1 where it is not padding.
        inputs: What a processor makes besides ids and mask.

    Raises:
        InputError: Inputs that this model, or the store, does not know; several rows, or padding; placeholders without
            anything to put there, or the reverse.
    """
    known = _INPUTS.get(config.model_type, ())
    unknown = sorted(set(inputs) - set(known))
    if unknown:
        raise InputError(
            f"the store brings its own cache and knows a text of {config.model_type} by its input_ids"
            f"{''.join(f', {name}' for name in known)}; leave {', '.join(unknown)} out"
        )
    types = [inputs[name] for name in _TOKEN_TYPES if inputs.get(name) is not None]
    if any(of.shape != input_ids.shape for of in types):
        raise InputError(f"token types need the shape of input_ids, {list(input_ids.shape)}: one entry a token")
    placeholders = [getattr(config, name, None) for name in _PLACEHOLDERS]
    stands_for_media = torch.isin(input_ids, input_ids.new_tensor([each for each in placeholders if each is not None]))
    has_placeholders = bool(stands_for_media.any())
    given = {name: value for name, value in inputs.items() if value is not None and name not in _TOKEN_TYPES}
    if has_placeholders and not given:
        raise InputError("input_ids hold placeholders, but the store was not given the images or sound they stand for")
    if not given and not any(bool(of.any()) for of in types):
        return None
    padded = attention_mask is not None and not bool(attention_mask.all())
    if input_ids.shape[0] != 1 or padded:
        raise InputError(
            f"images, sound and video are shared between prompts of one row without padding, got {len(input_ids)} "
            f"{'padded ' if padded else ''}rows: ask one by one"
        )
    if not has_placeholders:
        raise InputError(f"there are {', '.join(inputs)}, but no token of input_ids stands for them")
    for of in types:
        stands_for_media |= of.bool()
    tokens = int(stands_for_media.nonzero()[-1, 1]) + 1
    given |= {name: inputs[name][:, :tokens] for name in _TOKEN_TYPES if inputs.get(name) is not None}
    fields = [field for name in sorted(given) for field in (name.encode(), _encoded(name, given[name]))]
    return Media(digest("media", _encoded("input_ids", input_ids[:, :tokens].long()), *fields).hex(), tokens)


def position_ids(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "rows tokens"],
    attention_mask: Int[Tensor, "rows tokens"],
    inputs: Mapping[str, Any],
) -> dict[str, Tensor]:
    """The argument of that name for models whose positions have a time, a height and a width; empty for others.

    Such a model notes how far the positions of a prompt are from counting its tokens, and with a cache that is not
    empty takes the note of whichever prompt came last. Positions that are given do not depend on other prompts.
    """
    rope_index = getattr(model.base_model, "get_rope_index", None)
    if rope_index is None:
        return {}
    counted = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 0)
    has_grid = any(inputs.get(name) is not None for name in ("image_grid_thw", "video_grid_thw"))
    if has_grid and inputs.get("mm_token_type_ids") is not None:
        in_space, _ = rope_index(input_ids, attention_mask=attention_mask, **inputs)
    else:
        in_space = counted.expand(3, -1, -1)
    return {"position_ids": torch.cat([counted[None], in_space])}


def _encoded(name: str, value: object) -> bytes:
    """The digest of one input."""
    if isinstance(value, Tensor):
        return digest("tensor", str(value.dtype).encode(), str(list(value.shape)).encode(), tensor_bytes(value))
    if isinstance(value, list | tuple):
        return digest("list", *(_encoded(name, each) for each in value))
    if isinstance(value, bool | int | float | str):
        return digest("value", repr(value).encode())
    raise InputError(f"{name} must be made of tensors and numbers, got {type(value).__name__}")
