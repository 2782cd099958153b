"""What an evaluation can be asked for."""

import difflib
from collections.abc import Iterable
from typing import Literal, TypeAlias, cast, get_args

from hf_kvcache.errors import InputError

Task: TypeAlias = Literal["perplexity", "fidelity", "exactness", "retrieval", "generation", "cost"]
"""Perplexity and fidelity come from one pass over the text; exactness adds the proof in float64."""

TASKS: tuple[Task, ...] = get_args(Task)
DEFAULT_TASKS: tuple[Task, ...] = ("perplexity", "fidelity", "exactness")
SCORED: frozenset[Task] = frozenset(("perplexity", "fidelity", "exactness"))
"""Tasks that need the text scored through every cache."""


def parse_tasks(names: Iterable[str]) -> tuple[Task, ...]:
    """The tasks of `names`, each once and in the order of `TASKS`; `all` stands for every one, commas separate.

    Raises:
        InputError: A name is unknown, or there is none at all.
    """
    asked = [part.strip() for name in names for part in name.split(",")]
    for name in asked:
        if name != "all" and name not in TASKS:
            near = difflib.get_close_matches(name, (*TASKS, "all"), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "choose from these"
            raise InputError(f"no task is called {name!r}; {hint} Known: {', '.join(TASKS)}, all")
    if not asked:
        raise InputError(f"give at least one task: {', '.join(TASKS)}, or all")
    return tuple(task for task in TASKS if task in asked or "all" in asked)


def needs_scoring(tasks: Iterable[str]) -> bool:
    """Whether any of the tasks needs the text scored through every cache."""
    return not SCORED.isdisjoint(cast("Iterable[Task]", tasks))
