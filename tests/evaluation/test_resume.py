import errno
from pathlib import Path

import pytest
import toys

from hf_kvcache.evaluation import ContradictionError, Grid, Protocol, evaluate, report, retrieval, scoring
from hf_kvcache.evaluation.journal import Journal

MODEL = toys.loaded()


@pytest.fixture(autouse=True)
def few_problems():
    with toys.few_problems():
        yield


def measure(folder=None, text=toys.TEXT, **changes):
    options = {"tasks": ["fidelity"], "max_tokens": 150, "seed": 0} | changes
    sizes, grid = Protocol(60, 12, 8), Grid((250,), (0.0, 0.5, 1.0))
    caches = ["toys:rounded"]
    return evaluate(MODEL, [text], caches, protocol=sizes, grid=grid, progress=False, folder=folder, **options)


def interrupt(monkeypatch, module, name, after):
    """Let a function work `after` times, then interrupt as a user does; gives the list of calls."""
    real, calls = getattr(module, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if after is not None and len(calls) > after:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapped)
    return calls


def interrupted(monkeypatch, folder, module, name, after, **changes):
    """A run that is interrupted."""
    with monkeypatch.context() as patch:
        interrupt(patch, module, name, after)
        with pytest.raises(KeyboardInterrupt):
            measure(folder, **changes)


def test_an_interrupted_run_goes_on_and_gives_the_same(tmp_path, monkeypatch):
    both = {"tasks": ["fidelity", "retrieval"]}
    whole = measure(**both)
    interrupted(monkeypatch, tmp_path, scoring, "_score", 2, **both)
    with monkeypatch.context() as patch:
        scored = interrupt(patch, scoring, "_score", None)
        interrupted(monkeypatch, tmp_path, retrieval, "_try", 5, **both)
    assert len(scored) == whole.windows - 2
    scored, tried = interrupt(monkeypatch, scoring, "_score", None), interrupt(monkeypatch, retrieval, "_try", None)
    again = measure(tmp_path, **both)
    assert scored == []
    assert len(tried) == 2 * (4 - 2)  # two problems of four were finished with both caches
    assert again.caches == whole.caches
    assert again.reference == whole.reference
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"text": toys.TEXT[5:]}, {"seed": 1}, {"max_tokens": 140}])
def test_another_request_takes_nothing_over(tmp_path, monkeypatch, changes):
    interrupted(monkeypatch, tmp_path, scoring, "_score", 1)
    calls = interrupt(monkeypatch, scoring, "_score", None)
    found = measure(tmp_path, **changes)
    assert len(calls) == found.windows
    assert found.caches == measure(**changes).caches


def test_a_run_that_ends_with_a_contradiction_is_complete(tmp_path):
    sizes = Protocol(60, 12, 8)
    with pytest.raises(ContradictionError):
        evaluate(
            MODEL,
            [toys.TEXT],
            ["toys:idle"],
            tasks=["fidelity"],
            protocol=sizes,
            max_tokens=47,
            folder=tmp_path,
            progress=False,
        )
    assert list(tmp_path.iterdir()) == []


def test_pieces_are_saved_whole_or_not_at_all(tmp_path):
    journal = Journal(tmp_path, {"a": 1})
    assert journal.load("x") is None
    journal.save("x", b"piece")
    assert Journal(tmp_path, {"a": 1}).load("x") == b"piece"
    assert Journal(tmp_path, {"a": 2}).load("x") is None
    assert [of.name for of in journal.folder.iterdir()] == ["x"]
    journal.close()
    assert list(tmp_path.iterdir()) == []
    Journal(None, {}).save("x", b"piece")
    Journal(None, {}).close()


def full_disk(monkeypatch, after):
    """Let so many files be written; of the next ones half, as on a full disk."""
    real, calls = Path.write_bytes, []

    def write(self, content):
        calls.append(self)
        if len(calls) <= after:
            return real(self, content)
        real(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)


def test_a_disk_that_is_full_while_pieces_are_kept_stops_nothing(tmp_path, monkeypatch):
    whole = measure()
    full_disk(monkeypatch, after=1)
    with pytest.warns(UserWarning, match="not kept any more: .* No space left"):
        found = measure(tmp_path)
    assert found.caches == whole.caches


def test_a_disk_that_is_full_at_the_end_leaves_the_last_results(tmp_path, monkeypatch):
    report.write_report(measure(), tmp_path)
    before = (tmp_path / "results.json").read_text()
    results = measure(seed=1)
    with monkeypatch.context() as patch:
        full_disk(patch, after=0)
        with pytest.raises(OSError, match="No space left"):
            report.write_report(results, tmp_path)
    assert (tmp_path / "results.json").read_text() == before
    assert not [of for of in tmp_path.iterdir() if of.name.startswith(".")]
