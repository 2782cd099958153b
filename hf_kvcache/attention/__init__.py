"""Reading a history: attention over the segments of a block table, and the copy for everything else."""

from .reading import attend, attend_states, materialize, pieces, read_states
from .summing import attend_summing

__all__ = ["attend", "attend_states", "attend_summing", "materialize", "pieces", "read_states"]
