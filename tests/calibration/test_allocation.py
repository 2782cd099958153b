"""Spending a budget: against every way there is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcache.calibration import Choice, allocate

PART = st.lists(
    st.builds(Choice, st.integers(2, 8), st.integers(1, 9).map(float), st.floats(0, 10, allow_nan=False)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=200)
@given(st.lists(PART, min_size=1, max_size=4), st.integers(1, 40).map(float))
def test_within_the_budget_and_at_most_one_step_off_the_best(lists: list[list[Choice]], budget: float) -> None:
    parts = {(index, "keys"): choices for index, choices in enumerate(lists)}
    least = sum(min(choice.size for choice in choices) for choices in lists)
    if least > budget:
        with pytest.raises(ValueError, match="the smallest choices take"):
            allocate(parts, budget)
        return
    found = allocate(parts, budget)
    assert found.keys() == parts.keys()
    assert all(found[part] in choices for part, choices in parts.items())
    assert sum(choice.size for choice in found.values()) <= budget
    affordable = (of for of in itertools.product(*lists) if sum(choice.size for choice in of) <= budget)
    best = min(sum(choice.loss for choice in of) for of in affordable)
    step = max(max(of.loss for of in choices) - min(of.loss for of in choices) for choices in lists)
    assert sum(choice.loss for choice in found.values()) <= best + step + 1e-9


def test_bytes_go_where_they_pay() -> None:
    cheap = [Choice(2, 2.0, 0.2), Choice(4, 4.0, 0.1)]
    fragile = [Choice(2, 2.0, 9.0), Choice(4, 4.0, 1.0), Choice(6, 6.0, 0.0)]
    found = allocate({(0, "keys"): cheap, (1, "keys"): fragile}, 8.0)
    assert (found[0, "keys"].bits, found[1, "keys"].bits) == (2, 6)
