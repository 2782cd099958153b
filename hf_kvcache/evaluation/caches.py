"""A cache by name: ours, those of transformers, or anything a user can import.

| text | cache |
|---|---|
| `none` | no cache at all: every token is recomputed (`use_cache=False`) |
| `dynamic`, `static`, `offloaded` | transformers' own; `offloaded:` with options is ours |
| `quantized:backend=quanto,nbits=4` | transformers' own; `backend=` is what tells it from ours |
| `module:function` | whatever `function(config)` returns |
| the name of one of ours, with options | `hf_kvcache.build_cache(config, text)` |
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from transformers import DynamicCache, PreTrainedConfig, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

from hf_kvcache.errors import ConfigError, SpecError
from hf_kvcache.spec import NOT_BY_NAME, STRATEGIES, build_cache

Build: TypeAlias = Callable[[PreTrainedConfig], Cache | None]
"""Makes a fresh, empty cache for one sequence; None means the model runs without a cache."""

REFERENCE = "dynamic"

_NAMES = ("none", "dynamic", "static", "offloaded", "quantized:backend=...", *STRATEGIES)
_IMPORTABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def resolve_cache(spec: str, capacity_tokens: int) -> Build:
    """Return the factory that `spec` names.

    Args:
        spec: See the table at the top of this file.
        capacity_tokens: The most tokens one sequence will hold; caches of a fixed size are made this long.

    Raises:
        SpecError: `spec` does not parse, names nothing known, or has an option the cache does not take.
    """
    text = spec.strip()
    name, _, rest = text.partition(":")
    if name == "quantized" and "backend=" in rest:
        return _transformers_cache(text, QuantizedCache, _options(text, rest, QuantizedCache))
    if name == "none":
        _options(text, rest, None)
        return lambda _: None
    if name == "dynamic" or text == "offloaded":
        _options(text, rest, None)
        return _transformers_cache(text, DynamicCache, {"offloading": True} if name == "offloaded" else {})
    if name == "static":
        options = {"max_cache_len": capacity_tokens} | _options(text, rest, StaticCache)
        return _transformers_cache(text, StaticCache, options)
    if name.partition("+")[0] in (*STRATEGIES, *NOT_BY_NAME):
        return lambda config: build_cache(config, text)
    if _IMPORTABLE.fullmatch(text):
        return _imported(text)
    raise SpecError(f"no cache is called {name!r}. {_known(name)}")


def _transformers_cache(spec: str, kind: Callable[..., Cache], options: dict[str, Any]) -> Build:
    def build(config: PreTrainedConfig) -> Cache:
        try:
            return kind(config=config, **options)
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"transformers cannot build the cache {spec!r} here: {error}") from error

    return build


def _imported(spec: str) -> Build:
    module_name, _, function_name = spec.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"{spec!r} reads as module:function, and it cannot be imported: {error}. {_known(module_name)}"
        ) from error

    def build(config: PreTrainedConfig) -> Cache:
        cache = function(config)
        if not isinstance(cache, Cache):
            raise ConfigError(f"{spec} must return a transformers Cache, it returned {type(cache).__name__}")
        return cache

    return build


def _options(spec: str, text: str, kind: type[Cache] | None) -> dict[str, Any]:
    """Parse `key=value,key=value`; keys are the constructor's own arguments (none where `kind` is None)."""
    hidden = {"config", "kwargs", "offloading", "offload_only_non_sliding"}
    known = [] if kind is None else [name for name in inspect.signature(kind).parameters if name not in hidden]
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise SpecError(f"{spec!r}: expected key=value after the colon, got {part!r}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known) or 'none'}"
            raise SpecError(f"{spec!r}: no option {key!r}; {hint}")
        options[key] = _value(value)
    return options


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _known(name: str) -> str:
    near = difflib.get_close_matches(name, _NAMES, n=3, cutoff=0.5)
    head = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{head}Known here: {', '.join(_NAMES)} and module:function."
