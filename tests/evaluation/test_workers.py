import threading
import time

import pytest
import torch
import toys

from hf_kvcache.evaluation import Grid, Prompts, Protocol, evaluate
from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.generation import MODES, generate
from hf_kvcache.evaluation.protocols import forward
from hf_kvcache.evaluation.workers import Workers, twin

CACHES = ["paged", "quantized:bits=4", "window:window=40"]


@pytest.fixture
def two_threads(one_thread):
    torch.set_num_threads(2)


@pytest.mark.usefixtures("two_threads")
def test_what_is_worked_out_at_once_comes_in_order_and_the_threads_come_back():
    threads = set()

    def work(model, number):
        threads.add((threading.get_ident(), id(model)))
        time.sleep(0.01 * (number % 3))
        assert torch.get_num_threads() == 1
        return 2 * number

    with Workers(toys.tiny_model(), 9) as workers:
        assert torch.get_num_threads() == 1
        assert list(workers.map(work, range(9))) == list(range(0, 18, 2))
        assert list(workers.together([iter("abc"), iter([1, 2, 3])])) == [("a", 1), ("b", 2), ("c", 3)]
    assert len(threads) == 2  # a model for each
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_streams_really_go_on_at_once():
    barrier = threading.Barrier(2, timeout=60)

    def meeting():
        for number in range(3):
            barrier.wait()
            yield number

    with Workers(toys.tiny_model(), 2) as workers:
        assert list(workers.together([meeting(), meeting()])) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.usefixtures("two_threads")
def test_an_error_reaches_the_caller_and_the_threads_come_back():
    def failing():
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"), Workers(toys.tiny_model(), 2) as workers:
        list(workers.together([iter([1, 2]), failing()]))
    with pytest.raises(ZeroDivisionError), Workers(toys.tiny_model(), 2) as workers:
        list(workers.map(lambda _, number: 1 // number, [1, 0, 1]))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_streams_of_different_lengths_are_refused(threads):
    torch.set_num_threads(threads)
    with pytest.raises(ValueError, match=r"zip|lengths"), Workers(toys.tiny_model(), 2) as workers:
        list(workers.together([iter([1, 2]), iter([1])]))


@pytest.mark.parametrize(("threads", "tasks"), [(1, 4), (2, 1)])
def test_where_nothing_runs_at_once_the_caller_does_it_with_the_model_itself(threads, tasks):
    torch.set_num_threads(threads)
    model = toys.tiny_model()
    with Workers(model, tasks) as workers:
        assert workers.twin() is model
        assert torch.get_num_threads() == threads
        assert list(workers.map(lambda own, _: (own is model, threading.current_thread()), [0])) == [
            (True, threading.main_thread())
        ]


def test_a_twin_has_the_weights_and_notes_of_its_own():
    model = toys.tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    other = twin(model)
    assert all(own is its for own, its in zip(model.parameters(), other.parameters(), strict=True))
    frequencies = model.model.rotary_emb.inv_freq.clone()
    long = torch.randint(0, 256, (1, 600), generator=torch.Generator().manual_seed(0))
    expected = forward(model, long[:, :40], None)
    forward(other, long, None)
    assert not torch.equal(other.model.rotary_emb.inv_freq, frequencies)  # they depend on the length it has seen
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(forward(model, long[:, :40], None), expected)


@pytest.mark.usefixtures("two_threads")
def test_models_that_cannot_be_copied_or_are_elsewhere_are_run_by_the_caller():
    whole, away = toys.tiny_model(), toys.tiny_model().to("meta")
    whole.lock = threading.Lock()
    for model in (whole, away):
        with Workers(model, 2) as workers:
            assert workers.twin() is model
            assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_generation_at_once_writes_what_it_writes_alone():
    """Sampling draws from the random state of the process, which no other mode may touch meanwhile."""
    model, prompt = toys.tiny_model(), torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2))

    def write(own, of):
        mode, seed = of
        return generate(own, resolve_cache("dynamic", 64)(own.config), prompt, mode, seed).sequences.tolist()

    asked = [(mode, seed) for seed in range(3) for mode in sorted(MODES, key=lambda mode: (len(mode) * seed) % 5)]
    expected = [write(model, of) for of in asked]
    state = torch.get_rng_state()
    with Workers(model, len(asked)) as workers:
        assert list(workers.map(write, asked)) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_side_by_side_everything_is_what_it_is_in_turn():
    """One thread works for a cache either way, so the figures are the same to the last bit."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with toys.few_problems():
            results = evaluate(
                toys.loaded(),
                [toys.TEXT],
                CACHES,
                tasks=["fidelity", "exactness", "retrieval", "generation"],
                protocol=Protocol(200, 90, 20),
                grid=Grid((250,), (0.0, 1.0)),
                prompts=Prompts(2, 30, 10),
                max_tokens=300,
                progress=False,
            )
        found.append(results)
    alone, together = (
        [(of.scores, of.proof, of.audit, of.retrieval, of.generation, of.bytes_held) for of in results.caches]
        for results in found
    )
    assert together == alone
    assert [of.measured == "approximate" for of in found[1].caches] == [False, True, True]
    assert found[1].noise_floor.scores == found[0].noise_floor.scores
