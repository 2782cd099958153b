"""The exceptions of this library, one small tree.

Every message names what was expected, what came, and what to do about it. Each class also derives from the
built-in exception a caller would catch without knowing this library.
"""


class KVCacheError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A cache cannot be built this way: impossible block size, unknown layer type, parts that do not combine."""


class SpecError(ConfigError):
    """A cache specification string does not parse, or names something that does not exist."""


class InputError(KVCacheError, ValueError):
    """What was passed in does not fit: shapes, dtype, device, batch size, positions, token ids, data."""


class StateError(KVCacheError, RuntimeError):
    """The operation is impossible in the present state, for example a crop past what is still held."""


class StorageError(KVCacheError, OSError):
    """A file cannot be trusted or used: truncated, altered, from another model, from a newer version."""


class EvaluationError(KVCacheError, RuntimeError):
    """A measurement contradicts what the cache declares about itself."""
