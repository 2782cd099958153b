"""The tables below the main one, as text: each is built once and written to every report."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hf_kvcache.evaluation.metrics import Interval
from hf_kvcache.evaluation.outcomes import Cost
from hf_kvcache.evaluation.results import CacheResult, Results
from hf_kvcache.evaluation.retrieval import mean
from hf_kvcache.evaluation.samples import Fidelity, Group

NOISE_FLOOR = "no cache (noise floor)"
MOST_GROUPS = 20
"""Documents listed at most; the rest are in results.json."""


class Table(NamedTuple):
    """A table of text cells, its heading, and what must be known to read it."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(results: Results) -> list[Table]:
    """Every table there are results for."""
    fidelity = [*_statistics(results), *_groups(results)] if "fidelity" in results.tasks else []
    return [*fidelity, *_strided(results), *_retrieval(results), *_generation(results), *_cost(results)]


def markdown(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    return [
        f"## {table.title}",
        "",
        "| " + " | ".join(table.columns) + " |",
        "|" + "---|" * len(table.columns),
        *("| " + " | ".join(row) + " |" for row in table.rows),
        "",
        *([table.note, ""] if table.note else []),
    ]


def label(cache: CacheResult) -> str:
    """What a cache is called in tables and plots."""
    return NOISE_FLOOR if cache.declared == "uncached" else cache.spec


def scored(results: Results) -> list[tuple[str, Fidelity]]:
    """What is set beside the reference: the noise floor, then the caches asked for; nothing if no text was scored."""
    return [(label(of), of.scores) for of in (results.noise_floor, *results.caches) if of.scores]


def spread(interval: Interval) -> str:
    """The ends of an interval, or nothing."""
    return "" if interval.low is None or interval.high is None else f" [{interval.low:.2g}, {interval.high:.2g}]"


def _statistics(results: Results) -> Iterator[Table]:
    """Every statistic a row, every cache a column."""
    lines: dict[str, Callable[[Fidelity], str]] = {
        "ln(PPL / reference's)": lambda of: f"{of.nll_difference.value:+.2e}{spread(of.nll_difference)}",
        "the same, over documents": lambda of: (
            f"{of.nll_difference_over_documents.value:+.2e}{spread(of.nll_difference_over_documents)}"
        ),
        "word perplexity": lambda of: f"{of.word_perplexity.value:,.6g}",
        "byte perplexity": lambda of: f"{of.byte_perplexity.value:.5f}",
        "bits per byte": lambda of: f"{of.bits_per_byte.value:.5f}",
        "KL mean": lambda of: f"{of.kl_mean.value:.2e}{spread(of.kl_mean)}",
        "the same, over all documents": lambda of: f"{of.kl_over_documents.value:.2e}{spread(of.kl_over_documents)}",
        "reverse KL mean": lambda of: f"{of.reverse_kl_mean.value:.2e}{spread(of.reverse_kl_mean)}",
        **_percentile_lines("KL", lambda of: of.kl_percentiles, ("50", "90", "95", "99", "99.9", "maximum")),
        "same top token": lambda of: f"{of.top1_agreement.value:.3%}",
        "overlap of top 10": lambda of: f"{of.top10_overlap.value:.3%}",
        "delta p mean": lambda of: f"{of.delta_p_mean.value:+.2e}{spread(of.delta_p_mean)}",
        "delta p RMS": lambda of: f"{of.delta_p_rms.value:.2e}{spread(of.delta_p_rms)}",
        **_percentile_lines(
            "delta p", lambda of: of.delta_p_percentiles, ("minimum", "1", "5", "25", "50", "75", "95", "99", "maximum")
        ),
        "largest logit difference": lambda of: f"{of.logit_difference_max:.2e}",
    }
    caches = scored(results)
    yield Table(
        "Every statistic",
        "Delta p is the change of the true token's probability. KL in nats; intervals drawn over windows, or over "
        "documents where it says so.",
        ("statistic", *(name for name, _ in caches)),
        tuple((name, *(write(of) for _, of in caches)) for name, write in lines.items()),
    )


def _percentile_lines(
    name: str, read: Callable[[Fidelity], dict[str, float]], chosen: Sequence[str]
) -> dict[str, Callable[[Fidelity], str]]:
    def line(which: str) -> Callable[[Fidelity], str]:
        return lambda of: f"{read(of)[which]:.2e}"

    titles = {which: which if which.isalpha() else f"{which} %" for which in chosen}
    return {f"{name} {titles[which]}": line(which) for which in chosen}


def _groups(results: Results) -> Iterator[Table]:
    """Mean divergence by where in the text it is."""
    kinds: dict[str, tuple[str, Callable[[Fidelity], tuple[Group, ...]]]] = {
        "Tail and body": (
            "A window's tail ends at its first KL above the noise floor's largest: nothing was changed before.",
            lambda of: of.tail_and_body,
        ),
        "By confidence of the reference": ("", lambda of: of.by_confidence),
        "By distance from the start": ("", lambda of: of.by_distance),
        "By document": ("", lambda of: of.by_document),
    }
    caches = scored(results)
    for title, (note, read) in kinds.items():
        names = tuple(dict.fromkeys(group.name for _, of in caches for group in read(of)))
        found = [{group.name: group for group in read(of)} for _, of in caches]
        rows = tuple((name, *(_group_cell(of.get(name)) for of in found)) for name in names[:MOST_GROUPS])
        left_out = f"{len(names) - MOST_GROUPS} more in results.json." if len(names) > MOST_GROUPS else ""
        yield Table(
            title,
            " ".join(filter(None, ("Mean KL (positions).", note, left_out))),
            ("positions", *(name for name, _ in caches)),
            rows,
        )


def _group_cell(group: Group | None) -> str:
    return "-" if group is None else f"{group.kl_mean:.2e} ({group.positions:,})"


def measured(results: Results) -> list[CacheResult]:
    """The reference, then the caches asked for."""
    return [results.reference, *results.caches]


def _strided(results: Results) -> Iterator[Table]:
    """One row a cache."""
    rows = [(label(of), of.strided) for of in measured(results) if of.strided]
    if not rows:
        return
    sizes = rows[0][1]
    yield Table(
        "Whole documents",
        f"{sizes.tokens:,} tokens of {sizes.documents} documents, each token scored once; windows of "
        f"{sizes.window_tokens:,} tokens that move on by {sizes.stride_tokens:,}.",
        ("cache", "perplexity", "word perplexity", "byte perplexity", "bits per byte"),
        tuple(
            (
                name,
                f"{of.perplexity:.4f}",
                f"{of.word_perplexity:,.6g}",
                f"{of.byte_perplexity:.5f}",
                f"{of.bits_per_byte:.5f}",
            )
            for name, of in rows
        ),
    )


def _retrieval(results: Results) -> Iterator[Table]:
    """One row for each kind of problem and length."""
    caches = [of for of in measured(results) if of.retrieval]
    if not caches:
        return
    kinds = dict.fromkeys((of.task, of.length_tokens) for of in results.reference.retrieval)
    rows = [
        (f"{task}, {length:,} tokens", *(_retrieval_cell(cache, task, length) for cache in caches))
        for task, length in kinds
    ]
    yield Table(
        "Retrieval",
        "Share of the answers found in what the model wrote; in brackets the probability of the right answer, the "
        "geometric mean over its tokens. Means over depths and samples.",
        ("problem", *map(label, caches)),
        tuple(rows),
    )


def _retrieval_cell(cache: CacheResult, task: str, length: int) -> str:
    trials = [of for of in cache.retrieval if (of.task, of.length_tokens) == (task, length)]
    return f"{mean(trials, lambda of: of.recall):.0%} ({mean(trials, lambda of: of.probability):.4f})"


def _generation(results: Results) -> Iterator[Table]:
    """One row a cache."""
    rows = [(of, of.generation) for of in measured(results) if of.generation]
    if not rows:
        return
    new_tokens = rows[0][1].new_tokens
    yield Table(
        "Generation",
        f"Greedy, {new_tokens:,} tokens after each of {len(rows[0][1].outputs)} prompts. Margins: the reference's "
        "lead of best over second best logit at each first difference; near zero it was a tie. Repetition: share of "
        "runs of 4 tokens that came before. Drift: -log p of the second half minus that of the first, without a cache.",
        ("cache", "same text", "tokens before a difference", "margins there", "repetition", "drift, nats"),
        tuple(
            (
                label(cache),
                f"{of.same_text:.0%}",
                f"{of.agreement_tokens:.1f}",
                ", ".join(f"{one.margin:.2g}" for one in of.outputs if one.margin is not None) or "-",
                f"{of.repetition:.1%}",
                f"{of.drift:+.3f}",
            )
            for cache, of in rows
        ),
    )


def _cost(results: Results) -> Iterator[Table]:
    """One row a cache; time and bytes of one token more at each length."""
    rows = [(of, of.cost) for of in measured(results) if of.cost]
    if not rows:
        return
    contexts = [of.context_tokens for of in rows[0][1].tokens]
    prompt = rows[0][1].prompt_tokens
    last: dict[str, Callable[[Cost], int | None]] = {
        "MiB peak, allocator": lambda of: of.allocator_peak_bytes,
        "MiB peak, whole process": lambda of: of.process_peak_bytes,
        "tokens dropped": lambda of: of.dropped_tokens,
    }
    told = {name: read for name, read in last.items() if any(read(of) for _, of in rows)}
    yield Table(
        "Cost",
        "Medians; in brackets how many times faster than the reference, round by round. Peak: most bytes of tensors "
        f"alive at once, beside the weights, while one token is read after the prompt of {prompt:,}; of the whole "
        "process: resident, with weights, libraries and what was freed and not given back.",
        (
            "cache",
            f"first token of {prompt:,}, ms",
            "prompt tokens/s",
            *(f"ms/token after {of:,}" for of in contexts),
            *(f"MiB held after {of:,}" for of in contexts),
            "MiB peak",
            *told,
        ),
        tuple(
            (
                label(cache),
                *_cost_cells(of, contexts),
                *(_told_cell(read(of), mib="MiB" in name) for name, read in told.items()),
            )
            for cache, of in rows
        ),
    )


def _told_cell(value: int | None, mib: bool) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.2f}" if mib else f"{value:,}"


def _cost_cells(cost: Cost, contexts: Sequence[int]) -> Iterator[str]:
    found = {of.context_tokens: of for of in cost.tokens}  # without a cache, long contexts are not timed
    yield f"{cost.first_token_ms:,.0f}"
    yield f"{cost.prompt_tokens_per_second:,.0f}"
    for context in contexts:
        of = found.get(context)
        speed = "" if of is None or of.speedup is None else f" ({of.speedup:.2f}x)"
        yield "-" if of is None else f"{of.milliseconds:.1f}{speed}"
    for context in contexts:
        yield f"{found[context].bytes_held / 2**20:.2f}" if context in found else "-"
    yield f"{cost.peak_bytes / 2**20:.2f}"
