"""Cache strategies for Hugging Face Transformers: one history, kept, shared, moved, encoded or dropped."""

from .cache import KVCache, Memory
from .caches import EvictingCache, OffloadedCache, PagedCache, QuantizedCache, QuestCache, SlidingWindowCache
from .calibration import QuantizationPlan, calibrate
from .errors import (
    ConfigError,
    EvaluationError,
    InputError,
    KVCacheError,
    SpecError,
    StateError,
    StorageError,
)
from .exactness import Exactness
from .prefix import PrefixSharedCache, PrefixStore
from .spec import build_cache

__all__ = [
    "ConfigError",
    "EvaluationError",
    "EvictingCache",
    "Exactness",
    "InputError",
    "KVCache",
    "KVCacheError",
    "Memory",
    "OffloadedCache",
    "PagedCache",
    "PrefixSharedCache",
    "PrefixStore",
    "QuantizationPlan",
    "QuantizedCache",
    "QuestCache",
    "SlidingWindowCache",
    "SpecError",
    "StateError",
    "StorageError",
    "build_cache",
    "calibrate",
]
