"""What an evaluation found: plain immutable records, with the unit of every number."""

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvcache.errors import EvaluationError, InputError
from hf_kvcache.evaluation.outcomes import Agreement, Cost, Trial
from hf_kvcache.evaluation.proofs import Audit, Kind, Proof
from hf_kvcache.evaluation.protocols import Protocol
from hf_kvcache.evaluation.samples import Fidelity, Positions, Samples
from hf_kvcache.evaluation.strided import Strided
from hf_kvcache.evaluation.tasks import Task

SCHEMA = "hf-kvcache-evaluation/1"


@dataclass(frozen=True)
class CacheResult:
    """All that was found about one cache.

    Attributes:
        spec: The text that named it.
        declared: The class the cache claims for itself.
        declared_reason: In its own words.
        measured: The class the measurements support.
        failures: Where a measurement contradicts the claim; empty if none.
        scores: Against the reference cache in the working dtype; None if no text was scored. Called `fidelity` in the
            record.
        proof: In float64; None if not run (`proof_note` says why).
        proof_note: Why there is no proof, or empty.
        audit: Whether stored states change while tokens are appended; None if not run (`audit_note` says why).
        audit_note: Why there is no audit, or empty.
        bytes_held: Bytes of all tensor storages the cache held at the end of the first window; 0 if no text was scored.
        tokens_held: Tokens fed to it by then.
        samples: Position by position, for plots and further statistics; None if no text was scored.
        strided: Perplexities of whole documents; None if no stride was asked for.
        retrieval: Every problem of the retrieval task; empty if it was not asked for.
        generation: Continuations against the reference's; None if not asked for.
        cost: Time and bytes; None if not asked for.
    """

    spec: str
    declared: Kind
    declared_reason: str
    measured: Kind
    failures: tuple[str, ...]
    scores: Fidelity | None = field(metadata={"name": "fidelity"})
    proof: Proof | None
    proof_note: str
    audit: Audit | None
    audit_note: str
    bytes_held: int
    tokens_held: int
    samples: Samples | None = field(repr=False, compare=False, metadata={"name": None})
    strided: Strided | None = None
    retrieval: tuple[Trial, ...] = ()
    generation: Agreement | None = None
    cost: Cost | None = None

    @property
    def fidelity(self) -> Fidelity:
        """The `scores`.

        Raises:
            InputError: No text was scored.
        """
        if self.scores is None:
            raise InputError("no text was scored: ask for the task perplexity, fidelity or exactness")
        return self.scores


@dataclass(frozen=True)
class Results:
    """One evaluation.

    Attributes:
        model: Name of the model.
        dtype: Working dtype.
        dataset: Name of the text.
        tasks: What was asked for.
        protocol: Window, prefill and chunk, in tokens.
        windows: Windows scored.
        scored_tokens: Tokens scored, the same ones for every cache.
        seed: Of bootstrap draws and of sampled generation.
        reference: The cache all others are compared with; its own row compares it with itself.
        noise_floor: No cache at all against the reference, in the working dtype: what rounding alone does.
        caches: The caches asked for, in that order.
        environment: Versions, hardware and git state.
        seconds: Wall time.
        positions: The scored positions, for further statistics; None if no text was scored.
    """

    model: str
    dtype: str
    dataset: str
    tasks: tuple[Task, ...]
    protocol: Protocol
    windows: int
    scored_tokens: int
    seed: int
    reference: CacheResult
    noise_floor: CacheResult
    caches: tuple[CacheResult, ...]
    environment: dict[str, Any]
    seconds: float
    positions: Positions | None = field(repr=False, compare=False, metadata={"name": None})

    @property
    def bits_per_mib(self) -> float:
        """Bits that each number of keys and values gets from a MiB, after the first window."""
        dtype_bytes: int = getattr(torch, self.dtype).itemsize
        return 8 * dtype_bytes * 2**20 / self.reference.bytes_held

    @property
    def failures(self) -> tuple[str, ...]:
        """Every contradiction, with the cache it belongs to."""
        return tuple(f"{of.spec}: {failure}" for of in (self.reference, *self.caches) for failure in of.failures)


class ContradictionError(EvaluationError):
    """A measurement contradicts what a cache declares. `results` holds everything that was measured."""

    def __init__(self, results: Results) -> None:
        super().__init__("\n".join(results.failures))
        self.results = results
