"""Say, with evidence, whether a cache is exact, and how far it is if not. For any transformers `Cache`."""

from hf_kvcache.evaluation.agreement import Prompts
from hf_kvcache.evaluation.attribution import Part, attribute
from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.datasets import load_text
from hf_kvcache.evaluation.memory import measured_bytes
from hf_kvcache.evaluation.models import LoadedModel, load_model
from hf_kvcache.evaluation.proofs import Proof
from hf_kvcache.evaluation.protocols import Protocol
from hf_kvcache.evaluation.report import write_report
from hf_kvcache.evaluation.results import CacheResult, ContradictionError, Results
from hf_kvcache.evaluation.retrieval import Grid
from hf_kvcache.evaluation.run import evaluate
from hf_kvcache.evaluation.samples import Fidelity

__all__ = [
    "CacheResult",
    "ContradictionError",
    "Fidelity",
    "Grid",
    "LoadedModel",
    "Part",
    "Prompts",
    "Proof",
    "Protocol",
    "Results",
    "attribute",
    "evaluate",
    "load_model",
    "load_text",
    "measured_bytes",
    "resolve_cache",
    "write_report",
]
