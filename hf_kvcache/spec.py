"""Caches from a string, for command lines and recipes: ``paged`` or ``paged:block_size=16,fused=false``.

A specification is one term or several joined by ``+``; a term is a name and, after a colon, its ``key=value``
options separated by commas. Each term makes one choice, as in ``quantized:bits=4+window:window=1024``; two terms that
make the same choice do not combine.
"""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any, NamedTuple, get_args, get_type_hints

from transformers import PreTrainedConfig

from .cache import KVCache
from .caches import EvictingCache, OffloadedCache, PagedCache, QuantizedCache, QuestCache, SlidingWindowCache
from .errors import SpecError

# The "+disk:" of a residency such as host:4GiB+disk:FOLDER is not the beginning of a term.
_TERMS = re.compile(r"\+(?!disk:)")

STRATEGIES: dict[str, type[Any]] = {
    "paged": PagedCache,
    "offloaded": OffloadedCache,
    "quantized": QuantizedCache,
    "window": SlidingWindowCache,
    "evicting": EvictingCache,
    "quest": QuestCache,
}
"""Every cache a specification can name."""

FREEDOMS = {
    "quantization": "how blocks are kept",
    "retention": "which tokens are kept or read",
    "residency": "where blocks lie",
}
"""What there is to choose: arguments of `KVCache`, in words. A cache without any of these choices keeps blocks as they
are."""

# Options that several terms have and that a cache has once.
_SHARED = {"block_size", "fused"}

NOT_BY_NAME = {"prefix": "it belongs to a store and a prompt; see `PrefixStore`"}
"""Caches that take more than a config, and why."""


class Term(NamedTuple):
    """One term of a specification."""

    name: str
    options: dict[str, Any]
    position: int
    """Where it begins in the string."""


def build_cache(config: PreTrainedConfig, spec: str) -> KVCache:
    """The cache that `spec` describes, for models of this config.

    Raises:
        SpecError: It does not parse, or names a strategy or an option that does not exist; the message shows where.
        ConfigError: The values are impossible.

    Example:
        >>> from transformers import LlamaConfig
        >>> from hf_kvcache import build_cache
        >>> build_cache(LlamaConfig(num_hidden_layers=2), "paged:block_size=16").block_size
        16
    """
    terms = parse_spec(spec)
    caches = [_one_term(config, spec, term) for term in terms]
    return caches[0] if len(caches) == 1 else _combined(config, spec, terms, caches)


def _one_term(config: PreTrainedConfig, spec: str, term: Term) -> KVCache:
    name, options, position = term
    if name in NOT_BY_NAME:
        raise _error(spec, position, f"a cache of kind {name!r} cannot be built from a string: {NOT_BY_NAME[name]}")
    if name not in STRATEGIES:
        raise _error(spec, position, f"no cache is called {name!r}{_nearest(name, list(STRATEGIES))}")
    signature = inspect.signature(STRATEGIES[name])
    kinds = get_type_hints(STRATEGIES[name].__init__)
    known = [parameter for parameter in signature.parameters if parameter != "config"]
    for option, value in options.items():
        at = spec.index(option, position + len(name) + 1)
        if option not in known:
            raise _error(spec, at, f"{name!r} has no option {option!r}{_nearest(option, known)}")
        if type(value) not in (get_args(kinds[option]) or (kinds[option],)):
            expected = getattr(kinds[option], "__name__", kinds[option])
            raise _error(spec, at + len(option) + 1, f"{option!r} is of type {expected}, which this is not")
    for option in known:
        if option not in options and signature.parameters[option].default is inspect.Parameter.empty:
            raise _error(spec, position, f"{name!r} needs {option}=...")
    cache: KVCache = STRATEGIES[name](config, **options)
    return cache


def _combined(config: PreTrainedConfig, spec: str, terms: list[Term], caches: list[KVCache]) -> KVCache:
    """The cache that makes the choices of all these."""
    choices: dict[str, Any] = {}
    named: dict[str, str] = {}
    shared: dict[str, Any] = {}
    for (name, options, position), cache in zip(terms, caches, strict=True):
        made = [freedom for freedom in FREEDOMS if getattr(cache, freedom) is not None] or list(FREEDOMS)[:1]
        for freedom in made:
            if freedom in named:
                raise _error(spec, position, f"{named[freedom]!r} and {name!r} both say {FREEDOMS[freedom]}; name one")
            named[freedom], choices[freedom] = name, getattr(cache, freedom)
        for option in _SHARED & options.keys():
            if shared.setdefault(option, options[option]) != options[option]:
                raise _error(
                    spec, position, f"{option} is {shared[option]} in one term and {options[option]} in another"
                )
    return KVCache(config, **shared, **choices)


def cache_spec(cache: KVCache) -> str:
    """The specification that `build_cache` makes such a cache of."""
    choices = [choice for freedom in FREEDOMS if (choice := getattr(cache, freedom)) is not None]
    terms = [(choice.term, choice.options()) for choice in choices] or [("paged", {"fused": cache.fused})]
    return "+".join(
        f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items() if value is not None)
        for name, options in ((name, {**options, "block_size": cache.block_size}) for name, options in terms)
    )


def parse_spec(spec: str) -> list[Term]:
    """Split a specification into its terms, values converted to bool, int or float where they look like one.

    Raises:
        SpecError: It does not parse; the message shows where.
    """
    terms, position = [], 0
    for text in _TERMS.split(spec):
        name, colon, rest = text.partition(":")
        if not name.strip().isidentifier():
            raise _error(spec, position, "expected the name of a cache here")
        options: dict[str, Any] = {}
        at = position + len(name) + 1
        for item in rest.split(",") if colon else []:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not key.isidentifier() or not equals or not value:
                raise _error(spec, at, "expected key=value here")
            if key in options:
                raise _error(spec, at, f"option {key!r} is given twice")
            options[key] = _value(value)
            at += len(item) + 1
        terms.append(Term(name.strip(), options, position))
        position += len(text) + 1
    return terms


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(known)}"


def _error(spec: str, position: int, message: str) -> SpecError:
    return SpecError(f"{message}\n  {spec}\n  {' ' * position}^")
