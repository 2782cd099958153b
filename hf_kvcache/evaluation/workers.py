"""Several caches at work at once on a CPU, each with cores of its own, instead of all cores on one operation at a time.

Most operations of a forward pass over a chunk of text are too short to be divided well: on two cores, two passes side
by side took three quarters of the time of one after the other (SmolLM2-135M in float32, chunks of 128).
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

T = TypeVar("T")
R = TypeVar("R")
_END: Any = object()


class Workers:
    """Threads that run a model; a context. The caller does it all where the model is not on a CPU, or cannot be copied.

    While it is entered, operations of the caller run on as many cores as those of one worker do: all of them round
    alike.

    Args:
        model: What they run.
        tasks: The most that there is to do at once.
    """

    def __init__(self, model: PreTrainedModel, tasks: int) -> None:
        self._model = model
        self._threads = torch.get_num_threads()
        on_cpu = all(of.device.type == "cpu" for of in model.parameters())
        self._count = max(1, min(tasks, self._threads)) if on_cpu else 1
        self._own = threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Workers":  # noqa: PYI034  (beartype knows no Self in classes it does not decorate)
        if self._count > 1 and _can_be_copied(self._model):
            share = self._threads // self._count
            torch.set_num_threads(share)
            self._pool = ThreadPoolExecutor(self._count, initializer=torch.set_num_threads, initargs=(share,))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            torch.set_num_threads(self._threads)

    def twin(self) -> PreTrainedModel:
        """A model of the same weights for one stream; the model itself where nothing runs at once."""
        return self._model if self._pool is None else twin(self._model)

    def map(self, work: Callable[[PreTrainedModel, T], R], items: Iterable[T]) -> Iterator[R]:
        """What `work` gives for a model and each item, in the order of the items. Workers begin at once."""
        if self._pool is None:
            return map(partial(work, self._model), items)
        return self._pool.map(partial(self._with_own_model, work), items)

    def together(self, streams: Sequence[Iterator[T]]) -> Iterator[tuple[T, ...]]:
        """The next item of every stream, and so on, as `zip` does; streams are one item ahead meanwhile.

        Raises:
            ValueError: Streams of different lengths.
        """
        if self._pool is None:
            yield from zip(*streams, strict=True)
            return
        coming: list[Future[T]] = [self._pool.submit(next, of, _END) for of in streams]
        while True:
            row = []
            for place, stream in enumerate(streams):
                row.append(coming[place].result())
                coming[place] = self._pool.submit(next, stream, _END)
            ended = sum(item is _END for item in row)
            if ended not in (0, len(row)):
                raise ValueError("streams of different lengths")
            if ended:
                return
            yield tuple(row)

    def _with_own_model(self, work: Callable[[PreTrainedModel, T], R], item: T) -> R:
        if not hasattr(self._own, "model"):
            self._own.model = twin(self._model)
        return work(self._own.model, item)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second model with the same tensors as weights.

    What a forward pass notes in a module, such as the frequencies of rotary embeddings that depend on the length, stays
    apart.
    """
    # Of quantized modules, a state dict may hold the parts of a weight instead of the weight.
    weights = [*model.parameters(), *cast("Any", model).state_dict(keep_vars=True).values()]
    return copy.deepcopy(model, {id(of): of for of in weights})


def _can_be_copied(model: PreTrainedModel) -> bool:
    try:
        twin(model)
    except Exception:  # noqa: BLE001 - a foreign module may raise anything
        return False
    return True
