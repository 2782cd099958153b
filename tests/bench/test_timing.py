import pytest
import torch

from hf_kvcache.bench.timing import WARM_UP_ROUNDS, quartiles, take_turns, timing

CPU = torch.device("cpu")


def test_turns_alternate_and_all_get_the_number_of_the_round():
    calls, rounds = [], []
    steps = [lambda number: calls.append(("a", number)), lambda number: calls.append(("b", number))]
    times = take_turns(steps, 3, CPU, warm_up=1, advance=lambda: rounds.append(len(calls)))
    order = [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2), ("b", 3), ("a", 3)]
    assert calls == order
    assert rounds == [2, 4, 6, 8]
    assert [len(of) for of in times] == [3, 3]


def test_rounds_to_warm_up_do_not_count():
    seen = []
    [times] = take_turns([seen.append], 2, CPU)
    assert seen == list(range(WARM_UP_ROUNDS + 2))
    assert len(times) == 2


def test_the_ratio_is_taken_round_by_round():
    # The machine was 10 times slower in the second round: medians of each alone would hide nothing of it.
    found = timing([1.0, 10.0, 1.0], [2.0, 20.0, 2.0])
    assert (found.speedup.low, found.speedup.median, found.speedup.high) == (2.0, 2.0, 2.0)
    assert found.milliseconds.median == 1.0
    assert timing([1.0], None).speedup is None


def test_quartiles():
    found = quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]).high == pytest.approx(7.0)
