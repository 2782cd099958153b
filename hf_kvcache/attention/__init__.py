"""Reading a history: attention over the segments of a block table, and the copy for everything else."""

from .reading import attend, attend_states, materialize, pieces, read_states

__all__ = ["attend", "attend_states", "materialize", "pieces", "read_states"]
