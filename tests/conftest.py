"""What all tests share: executed shape annotations, a fixed thread count, the real model and real text."""

import os
from pathlib import Path
from typing import NamedTuple

import jaxtyping
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Before the package is imported: from here on beartype checks every annotation in it, shapes included.
jaxtyping.install_import_hook("hf_kvcache", "beartype.beartype")

from hf_kvcache.errors import InputError  # noqa: E402 - after the hook
from hf_kvcache.evaluation.datasets import load_text  # noqa: E402
from hf_kvcache.evaluation.models import load_model  # noqa: E402

pytest_plugins = ["pairs"]

# Two cores in all: pytest-xdist's workers share them.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


class RealModel(NamedTuple):
    """SmolLM2-135M-Instruct in float32. Shared by all tests: copy it before changing it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def smollm2() -> RealModel:
    try:
        loaded = load_model("smollm2-135m")
    except InputError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"the built-in model cannot be fetched: {error}")
    return RealModel(loaded.model, loaded.tokenizer)


@pytest.fixture(scope="session")
def wikitext_file() -> Path:
    """Where WikiText-2's test split lies on machines that have it beside the checkout."""
    return Path(__file__).parents[1] / "../shared/data/wikitext-2/wiki.test.raw"


@pytest.fixture(scope="session")
def wikitext(wikitext_file: Path) -> str:
    """WikiText-2's test split where there is one, else the standard library's prose."""
    return "".join(load_text(f"file:{wikitext_file}" if wikitext_file.is_file() else "stdlib"))
