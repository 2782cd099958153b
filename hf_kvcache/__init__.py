"""Cache strategies for Hugging Face Transformers: one history, kept, shared, moved, encoded or dropped."""

from .errors import ConfigError, EvaluationError, InputError, KVCacheError, SpecError, StateError, StorageError

__all__ = [
    "ConfigError",
    "EvaluationError",
    "InputError",
    "KVCacheError",
    "SpecError",
    "StateError",
    "StorageError",
]
