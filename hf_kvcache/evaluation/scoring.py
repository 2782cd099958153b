"""Score one text through several caches side by side, window by window: some 50 bytes a scored token are kept."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_kvcache.evaluation.caches import Build
from hf_kvcache.evaluation.divergence import Reference
from hf_kvcache.evaluation.journal import Journal, pack, unpack
from hf_kvcache.evaluation.memory import measured_bytes
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.processes import Team
from hf_kvcache.evaluation.protocols import Protocol, Scored, stream
from hf_kvcache.evaluation.reference import StoredReference
from hf_kvcache.evaluation.samples import Positions, Samples
from hf_kvcache.evaluation.windows import Window, count_units
from hf_kvcache.evaluation.workers import Workers

POSITIONS = 16
"""Positions compared at once: few enough for their logits to stay in the processor's cache."""


@dataclass(frozen=True)
class ScoredText:
    """What was measured on a text.

    Attributes:
        window: The first window.
        positions: What all caches share.
        samples: Of each cache, in the order asked for; the first is the reference.
        bytes_held: Of each cache, at the end of the first window.
        tokens_held: Fed to each by then; 0 where there is no cache.
        comparable: Whether the reference's logits are, bit for bit, those that its cache computes here; a stored one's
            may not be.
    """

    window: Int[Tensor, " tokens"]
    positions: Positions
    samples: tuple[Samples, ...]
    bytes_held: tuple[int, ...]
    tokens_held: tuple[int, ...]
    comparable: bool


def score_text(
    loaded: LoadedModel,
    builds: Sequence[Build],
    texts: Iterable[Window],
    protocol: Protocol,
    journal: Journal,
    team: Team,
    advance: Callable[[int], object],
    reference: StoredReference | None = None,
) -> ScoredText:
    """Score all windows through all caches. Processes take turns at windows, and all of them get the whole result.

    Args:
        loaded: The model and its tokenizer.
        builds: A factory for each cache; the first is the reference.
        texts: The windows, at least one.
        protocol: Prefill and chunk.
        journal: Where finished windows are kept, and found after an interruption.
        team: The processes that share the work.
        advance: Called with the number of tokens that were scored, by whichever process.
        reference: Takes the place of the first cache, or keeps what it computes; None does neither.
    """
    pieces: dict[int, dict[str, np.ndarray]] = {}
    first = torch.empty(0, dtype=torch.long)
    with Workers(loaded.model, len(builds)) as workers:
        for number, window in enumerate(texts):
            first = first if number else window.ids
            if not team.owns(number):
                advance(len(window.ids) - 1 - protocol.prefill_tokens)
                continue
            kept = journal.load(f"window-{number}")
            arrays = unpack(kept) if kept else {}
            if np.array_equal(arrays.get("shared.targets", ()), window.ids[protocol.prefill_tokens + 1 :]):
                advance(len(arrays["shared.targets"]))
            else:  # not there, or of another text
                stored = None if reference is None else partial(reference.stream, number=number)
                arrays = _score(loaded, builds, window, protocol, workers, stored=stored, advance=advance)
                arrays["comparable"] = np.array(reference is None or reference.same)
                journal.save(f"window-{number}", pack(arrays))
            pieces[number] = arrays
    return _joined(first, team.share(pieces), len(builds))


def _score(
    loaded: LoadedModel,
    builds: Sequence[Build],
    window: Window,
    protocol: Protocol,
    workers: Workers,
    *,
    stored: Callable[[Cache | None, Tensor], Iterator[Scored]] | None,
    advance: Callable[[int], object],
) -> dict[str, np.ndarray]:
    """Score one window through all caches: everything that is known about it, by name."""
    columns: defaultdict[str, list[Tensor]] = defaultdict(list)
    made = [build(loaded.model.config) for build in builds]
    streams = [stream(workers.twin(), cache, window.ids, protocol) for cache in made]
    if stored is not None:
        streams[0] = stored(made[0], window.ids)
    for chunks in workers.together(streams):
        places = torch.arange(len(chunks[0].targets)) + chunks[0].first_position
        columns["shared.targets"].append(chunks[0].targets)
        columns["shared.distances"].append(places)
        columns["shared.documents"].append(window.documents[places])
        _compare(chunks, columns)
        advance(len(places))
    scored = len(window.ids) - 1 - protocol.prefill_tokens
    return {
        "counts": np.array([scored, *count_units(window.ids, loaded.tokenizer, protocol)]),
        "held": np.array([[measured_bytes(of), 0 if of is None else len(window.ids) - 1] for of in made]),
        **{name: torch.cat(of).cpu().numpy() for name, of in columns.items()},
    }


def _compare(chunks: tuple[Scored, ...], columns: defaultdict[str, list[Tensor]]) -> None:
    """Compare what each cache predicted for one chunk with the first one's predictions."""
    targets = chunks[0].targets
    for start in range(0, len(targets), POSITIONS):
        some = slice(start, start + POSITIONS)
        reference = Reference(chunks[0].logits[some], targets[some])
        columns["shared.confidence"].append(reference.confidence)
        for place, chunk in enumerate(chunks):
            for name, values in reference.compare(chunk.logits[some]).items():
                columns[f"{place}.{name}"].append(values)


def _joined(first: Int[Tensor, " tokens"], windows: list[dict[str, np.ndarray]], caches: int) -> ScoredText:
    def columns(who: str) -> dict[str, np.ndarray]:
        names = [name for name in windows[0] if name.startswith(f"{who}.")]
        return {name.partition(".")[2]: np.concatenate([of[name] for of in windows]) for name in names}

    lengths, words, bytes_ = np.stack([of["counts"] for of in windows]).T
    held, tokens = windows[0]["held"].T.tolist()
    return ScoredText(
        window=first,
        positions=Positions(**columns("shared"), lengths=lengths, words=words, bytes=bytes_),
        samples=tuple(Samples(**columns(str(place))) for place in range(caches)),
        bytes_held=tuple(held),
        tokens_held=tuple(tokens),
        comparable=bool(windows[0]["comparable"]),
    )
