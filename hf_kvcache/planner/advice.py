"""Which caches fit, the most exact first, and how to check each."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from tqdm import tqdm

from ..errors import ConfigError
from ..spec import STRATEGIES, build_cache
from .capacity import USABLE_SHARE, Need, Planned
from .presets import loadable_name
from .shapes import ModelShape

_RANK = {"bitwise": 0, "rounding": 1, "approximate": 2}


class Choice(NamedTuple):
    """One cache."""

    spec: str
    exactness: str
    """What it declares: bitwise, rounding or approximate."""
    need: Need
    fits: bool | None
    """In the usable memory; None without a GPU."""
    command: str
    """Evaluates it on this model."""


def candidates() -> list[str]:
    """Transformers' default, and each of our caches with its defaults and, where it has one, unfused."""
    specs = ["dynamic"]
    for name, strategy in STRATEGIES.items():
        options = inspect.signature(strategy).parameters
        if any(option.default is option.empty for option in options.values() if option.name != "config"):
            continue  # it has no defaults: only the user can say what it shall be
        specs.append(name)
        if "fused" in options:
            specs.append(f"{name}:fused=false")
    return specs


def advise(
    shape: ModelShape,
    model: str,
    tokens: int,
    rows: int = 1,
    memory_bytes: int | None = None,
    weights_dtype: str = "bfloat16",
    ranks: int = 1,
) -> list[Choice]:
    """Every cache that can be planned for this model: those that fit first, and of those the most exact."""
    choices = []
    for spec in tqdm(candidates(), desc="which caches fit", leave=False, disable=None):
        try:
            need = Planned(shape, spec, weights_dtype, ranks).need(tokens, rows)
            kind = "bitwise" if spec == "dynamic" else build_cache(shape.decoder, spec).exactness.kind
        except ConfigError:
            continue  # this cache does not serve this model, or cannot be planned
        fits = None if memory_bytes is None else need.peak_bytes <= USABLE_SHARE * memory_bytes
        choices.append(Choice(spec, kind, need, fits, f"hf-kvcache eval --model {loadable_name(model)} --cache {spec}"))
    return sorted(choices, key=lambda choice: (choice.fits is False, _RANK[choice.exactness], choice.need.peak_bytes))
