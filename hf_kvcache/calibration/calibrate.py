"""Prices, a plan, and its proof."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..caches import QuantizedCache
from ..errors import ConfigError
from ..quantized import QuantizedLayer
from .allocation import Choice, allocate
from .plan import LayerBits, QuantizationPlan
from .sensitivity import passes, sensitivities
from .texts import Texts, cut

_LEVELS = (2, 3, 4, 5, 6, 8)


def calibrate(
    model: PreTrainedModel,
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    bits: int = 4,
    *,
    sinks: int = 4,
    recent: int = 128,
    max_tokens: int = 4096,
    progress: bool = True,
) -> QuantizationPlan:
    """Find bits by layer that take no more bytes than `bits` everywhere and cost less.

    Measures on half of the text what `bits` cost in the keys, and in the values, of every layer (see `sensitivity`),
    spends the bytes of `bits` everywhere where they take most off the divergence, and measures the plan and the uniform
    bits through the cache on the other half. Where the plan turns out no better it is the uniform bits.

    The model runs twice for every layer: minutes for a small model on two cores. Keep the plan (`save`).

    Args:
        model: A causal language model.
        texts: Texts like those the cache is going to hold; at least 2,048 tokens in all.
        tokenizer: Of the model.
        bits: Nominal bits whose bytes the plan keeps within, 2 to 8.
        sinks: Tokens at the beginning that stay exact.
        recent: Tokens at the end that stay exact, at least.
        max_tokens: Tokens of the texts to use at most.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: Bits that do not exist, or a model without a full-attention layer.
        InputError: Too little text.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import QuantizedCache, calibrate
        >>> from hf_kvcache.evaluation import load_model, load_text
        >>> tokenizer = load_model("smollm2-135m").tokenizer
        >>> model = LlamaForCausalLM(LlamaConfig(  # your own
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=49152))
        >>> plan = calibrate(model, load_text("stdlib"), tokenizer, bits=3, max_tokens=2048, progress=False)
        >>> plan.kl <= plan.uniform_kl
        True
        >>> cache = QuantizedCache(model.config, **plan.options())
    """
    uniform = QuantizedCache(model.config, bits=bits, sinks=sinks, recent=recent)
    layers = [index for index, layer in enumerate(uniform.layers) if isinstance(layer, QuantizedLayer)]
    if not layers:
        raise ConfigError("this model has no full-attention layer: there is nothing to encode")
    windows = cut(texts, tokenizer, max_tokens)
    half = len(windows) // 2
    levels = sorted({*_LEVELS, bits})
    total = half * (1 + passes(len(layers), len(levels))) + 3 * (len(windows) - half)
    with tqdm(total=total, unit=" windows", desc="calibrating", disable=not progress) as bar:
        priced = sensitivities(Texts(model, windows[:half], bar.update), layers, bits, levels, sinks, recent)
        parts: dict[tuple[int, str], list[Choice]] = {}
        for of in priced:
            parts.setdefault((of.layer, of.kind), []).append(Choice(of.bits, of.token_bits, of.kl))
        numbers = sum(of.numbers for of in priced if of.bits == bits)
        same = {part: next(of for of in choices if of.bits == bits) for part, choices in parts.items()}
        chosen = allocate(parts, sum(of.size for of in same.values()))
        plans = [_plan(picked, layers, numbers, bits, sinks, recent) for picked in (chosen, same)]
        others = Texts(model, windows[half:], bar.update)
        kl, uniform_kl = (others.divergence(partial(QuantizedCache, model.config, **of.options())) for of in plans)
    best = plans[0] if kl < uniform_kl else plans[1]
    return replace(best, kl=min(kl, uniform_kl), uniform_kl=uniform_kl)


def _plan(
    picked: Mapping[tuple[int, str], Choice], layers: Sequence[int], numbers: int, bits: int, sinks: int, recent: int
) -> QuantizationPlan:
    by_layer = [LayerBits(of, picked[of, "keys"].bits, picked[of, "values"].bits) for of in layers]
    average = sum(choice.size for choice in picked.values()) / numbers
    return QuantizationPlan(bits, tuple(by_layer), sinks, recent, average, math.nan, math.nan)
