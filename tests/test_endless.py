"""The recipe for endless texts, on a tiny model and a short text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from architectures import tiny_model
from modes import prompt

RECIPE = Path(__file__).parents[1] / "recipes" / "endless.py"


@pytest.fixture(scope="module")
def endless() -> ModuleType:
    spec = importlib.util.spec_from_file_location("endless", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_end_is_the_beginning_again(endless: ModuleType) -> None:
    ids = torch.arange(100)
    text = endless.repeated(ids, 80, 30)
    assert text.tolist() == [*range(50), *range(30)]


def test_a_text_is_read_in_constant_memory(endless: ModuleType, tmp_path: Path) -> None:
    model, ids = tiny_model("llama", torch.float32), prompt(tokens=400)[0]
    runs = {
        spec: endless.read(model, spec, ids, 20) for spec in ("window:window=40,rerotate=true,block_size=4", "dynamic")
    }
    window, dynamic = runs.values()
    assert [step["end"] for step in window] == [*range(20, 400, 20), 399]
    held = [step["bytes"] for step in window[5:-1]]
    assert max(held) <= max(held[:4])
    assert dynamic[-1]["bytes"] > 5 * window[-1]["bytes"]
    assert endless.perplexity(window, 0, 40) == pytest.approx(endless.perplexity(dynamic, 0, 40), rel=1e-4)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:])
    assert endless.perplexity(dynamic, 0, 399) == pytest.approx(loss.exp().item(), rel=1e-4)
    endless.draw(runs, 100, tmp_path / "endless.png")
    assert (tmp_path / "endless.png").stat().st_size > 10_000
