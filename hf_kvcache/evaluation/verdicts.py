"""What was found about a cache in a few words, and which caches nothing beats."""

import math
from collections.abc import Iterator, Sequence

from hf_kvcache.evaluation.results import CacheResult
from hf_kvcache.evaluation.samples import Fidelity

GRADES = {"close": (0.01, 0.1, 0.99), "visible": (0.1, 1.0, 0.95)}
"""Largest mean and 99th percentile of KL in nats, and smallest agreement on the top token, of each grade; beyond them a
cache is `damaged`. The bounds are those in use for quantized caches."""


def verdict(cache: CacheResult) -> str:
    """The class in a few words, with a mark where the claim and the measurement part."""
    if cache.failures:
        return f"FAILED (declares {cache.declared})"
    refused = len(cache.proof.refusals) if cache.proof else 0
    words = {
        "bitwise": "exact, bitwise",
        "rounding": "exact up to rounding",
        "approximate": "approximate" + (f", {grade(cache.scores)}" if cache.scores else ""),
        "unproven": "not proven",
        "uncached": "no cache",
    }
    return words[cache.measured] + (f" ({refused} modes refused)" if refused else "")


def rewrites(cache: CacheResult) -> str:
    """How often a token's stored state changes while others are appended, and what is not held any more."""
    found = cache.audit
    if found is None:
        return "-"
    words = {0: "never", 1: "once", None: "some"}
    times = words.get(found.rewrites_most, f"up to {found.rewrites_most} times")
    return times + (f" ({found.missing:.0%} dropped)" if found.missing else "")


def grade(found: Fidelity) -> str:
    """How far an approximation is from the reference: `close`, `visible` or `damaged`."""
    for name, (mean, p99, agreement) in GRADES.items():
        if found.kl_mean.value <= mean and found.kl_p99 <= p99 and found.top1_agreement.value >= agreement:
            return name
    return "damaged"


def verdict_line(cache: CacheResult, reference: CacheResult) -> str:
    """Everything that decides about a cache, in one line."""
    return f"{cache.spec}: " + "; ".join((verdict(cache), *_parts(cache, reference)))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of the points that no other beats: less of one, and no more of the other. From left to right."""
    order = sorted((at for at in range(len(points)) if all(map(math.isfinite, points[at]))), key=points.__getitem__)
    found: list[int] = []
    for at in order:
        if not found or points[at][1] < points[found[-1]][1]:
            found.append(at)
    return found


def _parts(cache: CacheResult, reference: CacheResult) -> Iterator[str]:
    if cache.scores:
        kl, perplexity = cache.scores.kl_mean, cache.scores.perplexity_difference
        ends = "" if kl.low is None or kl.high is None else f" [{kl.low:.1e}, {kl.high:.1e}]"
        yield f"KL {kl.value:.1e}{ends}"
        yield f"perplexity {perplexity.value:+.2g}"
        if reference.bytes_held:
            yield f"{cache.bytes_held / reference.bytes_held:.2f}x the bytes after {reference.tokens_held:,} tokens"
    if cache.cost and reference.cost:
        for of in cache.cost.tokens[-1:]:
            speed = "" if of.speedup is None else f" ({of.speedup:.2f}x the speed)"
            yield f"{of.milliseconds:.1f} ms a token after {of.context_tokens:,}{speed}"
        yield f"{cache.cost.peak_bytes / reference.cost.peak_bytes:.2f}x the peak"
    if cache.retrieval:
        ours, theirs = (
            [sum(getattr(one, name) for one in of.retrieval) / len(of.retrieval) for name in ("recall", "probability")]
            for of in (cache, reference)
        )
        yield f"recall {ours[0]:.0%} (reference {theirs[0]:.0%}), gold p {ours[1]:.3f} ({theirs[1]:.3f})"
    if cache.generation:
        yield f"{cache.generation.same_text:.0%} of texts the same"
