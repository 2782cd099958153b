"""Sinks that move along with the window, where positions are rotations of keys and queries (RoPE).

A model that was trained to a length has never seen a query look further back. In an endless text the sinks would
drift beyond that. Rotated forward by d positions, keys sit d positions later, exactly: rotations by angles ``p * f``
compose, ``R(d) R(p) = R(p + d)``. A query's score with a key rotated forward is its score, rotated back, with the key
as it is; so the queries are rotated instead, each by its own distance, and the sinks are held as they came.

Xiao et al., arXiv 2309.17453, number positions inside the cache to the same end. RoPE: Su et al., arXiv 2104.09864.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..attention.streaming import Source
from ..errors import ConfigError

# Families whose full-attention layers all turn the first half of a key's channels with the second. Tests feed a model
# of each and compare; a family that is not here may turn neighbouring channels, or nothing in some layers.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma3_text", "olmo2", "granite", "starcoder2")

# Their frequencies are the same at every length of text.
_FIXED = ("default", "linear", "llama3", "yarn")


class Rotation(NamedTuple):
    """How the keys of a layer turn with their position."""

    frequencies: Float[Tensor, " pairs"]
    """Radians a position, float64: channel i turns with channel ``i + pairs``; channels behind them do not turn."""

    def turn(
        self, states: Float[Tensor, "heads states width"], steps: Int[Tensor, " states"]
    ) -> Float[Tensor, "heads states width"]:
        """Move each state by its `steps` positions, forward or back."""
        angles = steps[:, None].double() * self.frequencies.to(states.device)
        cosine, sine = (part.to(states.dtype) for part in (angles.cos(), angles.sin()))
        pairs = angles.shape[1]
        one, other, rest = states.split([pairs, pairs, states.shape[2] - 2 * pairs], dim=-1)
        return torch.cat([one * cosine - other * sine, other * cosine + one * sine, rest], dim=-1)


def find_rotation(config: PreTrainedConfig) -> Rotation:
    """The rotation of the keys of a model's full-attention layers.

    Raises:
        ConfigError: The model has none, one whose frequencies change with the length of the text, or one not known
            here.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"rerotate=True needs to know how a model turns its keys, and knows it of {', '.join(FAMILIES)}; this is "
            f"{kind!r}. Use rerotate=False"
        )
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = "full_attention" in parameters
    if nested:
        parameters = parameters["full_attention"]
    form = parameters.get("rope_type", "default")
    if form not in _FIXED:
        raise ConfigError(
            f"rerotate=True needs positions whose frequencies are the same at every length of text; those of {form!r} "
            "change with it, so keys cannot be moved. Use rerotate=False"
        )
    if form != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[form](
            config, torch.device("cpu"), layer_type="full_attention" if nested else None
        )
        return Rotation(frequencies.double())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turning = int(
        width * parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    )
    exponents = torch.arange(0, turning, 2, dtype=torch.int64).float() / turning
    # In float32, as models do.
    return Rotation((1.0 / parameters["rope_theta"] ** exponents).double())


class Turned(NamedTuple):
    """A source whose keys are read as if each query's own number of `steps` positions further on."""

    source: Source
    rotation: Rotation
    steps: Int[Tensor, " queries"]
    """For each query, in the order in which they are stacked."""

    def scores(self, query: Float[Tensor, "heads queries width"]) -> Float[Tensor, "heads queries tokens"]:
        """See `attention.streaming.Source`."""
        return self.source.scores(self.rotation.turn(query, -self.steps))

    def weighted_sum(
        self, weights: Float[Tensor, "heads queries tokens"], dtype: torch.dtype
    ) -> Float[Tensor, "heads queries width"]:
        """See `attention.streaming.Source`."""
        return self.source.weighted_sum(weights, dtype)
