"""Reading a history: attention over the segments of a block table, and the copy for everything else."""

from .reading import attend, materialize

__all__ = ["attend", "materialize"]
