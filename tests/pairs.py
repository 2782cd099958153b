"""Of a test's product of parameters a part in which every two values of different parameters meet.

The errors of a combination are nearly always those of some pair in it (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004). A test marked `pairs` runs on such a part,
another one with every release of transformers; ``pytest --whole`` runs the product.
"""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import combinations

import pytest
import transformers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run every case of tests marked `pairs`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairs: runs on cases in which every two values of its parameters meet")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs"):
            functions[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for name, cases in functions.items() for item in set(cases) - covering(name, cases)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def covering(name: str, cases: list[pytest.Item]) -> set[pytest.Item]:
    """Cases that hold every pair of values that `cases` hold; which ones depends on `name` and the release."""
    order = sorted(cases, key=lambda case: case.nodeid)
    random.Random(f"{name} {transformers.__version__}").shuffle(order)
    seen: set[object] = set()
    chosen = set()
    for case in order:
        values = sorted((axis, str(value)) for axis, value in case.callspec.params.items())
        pairs = set(combinations(values, 2))
        if not pairs <= seen:
            chosen.add(case)
            seen |= pairs
    return chosen
