"""The recipe that measures what sharing saves runs to its end; what it finds is not judged here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from architectures import tiny_model

from hf_kvcache import PrefixStore

RECIPE = Path(__file__).parents[2] / "recipes" / "prefix_figures.py"
SMALL = {"ROWS": 3, "DOCUMENT_TOKENS": 128, "QUESTION_TOKENS": 4, "FORK_TOKENS": 128, "STORED_BLOCKS": 8}


def test_the_figures_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("prefix_figures", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    vars(recipe).update(SMALL, TOKEN_IDS=(3, 90))
    model = tiny_model("llama", torch.float32)
    recipe.filled(model, PrefixStore.open(f"file://{tmp_path}", model))
    recipe.from_files(model, str(tmp_path))
    assert json.loads(capsys.readouterr().out) > 0
    for measure in (recipe.batch, recipe.fork, recipe.look_up):
        measure(model)
    printed = capsys.readouterr().out
    assert "3 questions on it" in printed
    assert "fork of 128 tokens" in printed
    assert "among 8 blocks" in printed
