"""From what was measured at every position to figures: means, percentiles, and where in the text they come from."""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from hf_kvcache.evaluation import metrics
from hf_kvcache.evaluation.samples import Fidelity, Group, Positions, Samples

CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Between which the reference's highest probability is grouped."""


def fidelity(samples: Samples, reference: Samples, floor: Samples, positions: Positions, seed: int) -> Fidelity:
    """Summarize the positions of one cache against those of the reference.

    Args:
        samples: Of the cache.
        reference: Of the reference cache.
        floor: Of the model without a cache: no divergence up to its largest counts as an effect of the cache.
        positions: What all caches share.
        seed: Of bootstrap draws.
    """
    lengths = positions.lengths
    difference = samples.nll - reference.nll

    def mean(values: Float[np.ndarray, " positions"]) -> metrics.Interval:
        return metrics.window_mean(values, lengths, seed)

    by_document = _run_lengths(positions.documents)
    bits = metrics.rate(samples.nll / np.log(2), lengths, positions.bytes, seed)
    return Fidelity(
        perplexity=metrics.perplexity(samples.nll, lengths, seed),
        perplexity_difference=metrics.perplexity_difference(samples.nll, reference.nll, lengths, seed),
        nll_difference=mean(difference),
        word_perplexity=metrics.exponential(metrics.rate(samples.nll, lengths, positions.words, seed)),
        byte_perplexity=metrics.exponential(metrics.rate(samples.nll, lengths, positions.bytes, seed)),
        bits_per_byte=bits,
        kl_mean=mean(samples.kl),
        kl_p99=float(np.quantile(samples.kl, 0.99)),
        kl_max=float(samples.kl.max()),
        kl_percentiles=metrics.percentiles(samples.kl),
        reverse_kl_mean=mean(samples.reverse_kl),
        top1_agreement=mean(samples.agrees.astype(np.float64)),
        top10_overlap=mean(samples.top10),
        delta_p_mean=mean(samples.delta_p),
        delta_p_rms=metrics.root_mean_square(samples.delta_p, lengths, seed),
        delta_p_percentiles=metrics.percentiles(samples.delta_p),
        kl_over_documents=metrics.window_mean(samples.kl, by_document, seed),
        nll_difference_over_documents=metrics.window_mean(difference, by_document, seed),
        by_confidence=_by_edges(samples, positions.confidence, CONFIDENCE_EDGES, _confidence_name),
        by_distance=_by_edges(samples, positions.distances, _doubling(positions.distances), _distance_name),
        by_document=tuple(_by_document(samples, positions.documents)),
        tail_and_body=_tail_and_body(samples, float(floor.kl.max()), lengths),
        logit_difference_max=float(samples.logit_difference.max()),
        identical=bool(samples.identical.all()),
    )


def _run_lengths(documents: Int[np.ndarray, " positions"]) -> Int[np.ndarray, " documents"]:
    """Scored positions of each document; a document's positions follow each other."""
    lengths: np.ndarray = np.unique(documents, return_counts=True)[1]
    return lengths


def _group(name: str, samples: Samples, chosen: Bool[np.ndarray, " positions"]) -> Group:
    return Group(name, int(chosen.sum()), float(samples.kl[chosen].mean()), float(samples.agrees[chosen].mean()))


def _by_edges(
    samples: Samples,
    values: Float[np.ndarray, " positions"] | Int[np.ndarray, " positions"],
    edges: tuple[float, ...],
    name: Callable[[float, float], str],
) -> tuple[Group, ...]:
    """One group for each pair of neighbouring edges that any value lies between; the last edge belongs to it."""
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return tuple(
        _group(name(edges[place], edges[place + 1]), samples, places == place) for place in map(int, np.unique(places))
    )


def _by_document(samples: Samples, documents: Int[np.ndarray, " positions"]) -> Iterator[Group]:
    for number in map(int, np.unique(documents)):
        yield _group(f"document {number}", samples, documents == number)


def _tail_and_body(samples: Samples, floor: float, lengths: Int[np.ndarray, " windows"]) -> tuple[Group, ...]:
    """Split every window at its first position whose divergence is above `floor`.

    Before it, the cache had not changed anything yet (an exact tail that holds all); from there on, it had.
    """
    above = ~(samples.kl <= floor)  # so that NaN is above
    body = np.concatenate([np.logical_or.accumulate(of) for of in np.split(above, np.cumsum(lengths)[:-1])])
    return tuple(_group(name, samples, of) for name, of in (("tail", ~body), ("body", body)) if of.any())


def _doubling(distances: Int[np.ndarray, " positions"]) -> tuple[float, ...]:
    """Powers of two around all distances."""
    first, last = int(distances.min()), int(distances.max())
    low, high = first.bit_length() - 1, last.bit_length()
    return tuple(float(2**power) for power in range(low, high + 1))


def _confidence_name(low: float, high: float) -> str:
    return f"reference's best token {low:g} to {high:g}"


def _distance_name(low: float, high: float) -> str:
    return f"{low:,.0f} to {high - 1:,.0f} tokens from the start"
