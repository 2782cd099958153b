"""One evaluation by several processes, started by `accelerate launch` or `torchrun`: each does a part of the work."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The processes that share an evaluation. All of them run the same program on the same text.

    Attributes:
        rank: The number of this process, from 0.
        count: Processes.
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that shows progress and writes files."""
        return self.rank == 0

    def owns(self, number: int) -> bool:
        """Whether the piece of work with this number is this process's: they take turns."""
        return number % self.count == self.rank

    def share(self, pieces: Mapping[int, T]) -> list[T]:
        """Everyone's pieces, in the order of their numbers; every process waits for all, and gets all."""
        if self.count == 1:
            return [piece for _, piece in sorted(pieces.items(), key=lambda item: item[0])]
        from accelerate.utils import gather_object

        gathered: list[tuple[int, T]] = gather_object(list(pieces.items()))
        return [piece for _, piece in sorted(gathered, key=lambda item: item[0])]

    def by_first(self, work: Callable[[], T]) -> T:
        """What `work` gives, done by the first process alone; the others wait and get the same."""
        if self.count == 1:
            return work()
        from accelerate.utils import broadcast_object_list

        found: list[T] = broadcast_object_list([work() if self.first else None])
        return found[0]


def team(device: torch.device) -> Team:
    """The processes this one was launched with; it alone, where it was started as usual.

    Args:
        device: Of the model. Processes talk through it: by gloo on CPUs, by NCCL on GPUs.
    """
    if "LOCAL_RANK" not in os.environ:
        return Team()
    from accelerate import PartialState

    state = PartialState(cpu=device.type == "cpu")
    return Team(state.process_index, state.num_processes)


def own_device(name: str) -> str:
    """The device of this process: one GPU for each, where `name` is `cuda` and several were launched."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if name == "cuda" and rank is not None else name
