"""A model's config from what a user can name: preset, hub id, folder, ``config.json`` or GGUF file. No code is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ..errors import InputError
from .presets import PRESETS

_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def load_plan_config(name: str) -> PreTrainedConfig:
    """The config that `name` leads to.

    Args:
        name: A preset (see `presets.PRESETS`), a hub id, a folder with a ``config.json``, that file, or a GGUF file.

    Raises:
        InputError: It leads to no config, the config lacks the sizes of the model, its architecture is unknown to this
            transformers, or it comes with code of its own, which is never run.

    Example:
        >>> load_plan_config("qwen3-8b").head_dim
        128
    """
    if name.lower() in PRESETS:
        return config_from_fields(dict(PRESETS[name.lower()]))
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path)
    if path.is_file():
        return config_from_fields(_read(path), str(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"expected a model folder, but {path} holds no config.json")
        return config_from_fields(_read(path / "config.json"), str(path))
    if name.startswith(("/", "./", "../", "~")) or path.suffix == ".json":
        raise InputError(f"expected a config.json, a model folder or a GGUF file, but {path} does not exist")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name!r} is no preset ({', '.join(PRESETS)}) and no hub model that can be reached: {error}"
        ) from error
    return config_from_fields(fields, name)


def config_from_fields(fields: dict[str, Any], name: str = "the config") -> PreTrainedConfig:
    """The config of these ``config.json`` fields; see `load_plan_config` for what is refused."""
    fields = dict(fields)
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise InputError(f"{name} has no field 'model_type', which says what architecture it is")
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in fields:
            raise InputError(
                f"{name} is of type {model_type!r} and brings its own code (auto_map). Planning never runs code from a "
                "model repository; plan with the config of a built-in architecture of the same sizes"
            )
        raise InputError(f"{name} is of type {model_type!r}, which this transformers does not know")
    known = {**CONFIG_MAPPING[model_type].attribute_map}
    nested = any(isinstance(value, dict) and "hidden_size" in value for value in fields.values())
    missing = [field for field in _NEEDED if field not in fields and known.get(field, field) not in fields]
    # A decoder inside a multimodal config may leave out what equals its family's defaults.
    if missing and not nested and "text_config" not in fields:
        raise InputError(f"{name} ({model_type}) lacks {', '.join(missing)}: its sizes cannot be known")
    try:
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"transformers cannot read {name} as {model_type!r}: {error}") from error
    for field in _NEEDED:
        size = getattr(config.get_text_config(decoder=True), field)
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{name}: expected {field} of at least 1, got {size!r}")
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} must hold a JSON object, it holds a {type(fields).__name__}")
    return fields


def _from_gguf(path: Path) -> PreTrainedConfig:
    if not path.is_file():
        raise InputError(f"expected a GGUF file, but {path} does not exist")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"transformers cannot read the config in {path}: {error}") from error
    # transformers takes hidden size / heads for some architectures, whatever the file says (Mistral Nemo, a "llama").
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    width = fields.get(f"{fields['general.architecture'].contents()}.attention.key_length")
    if width is not None and getattr(config, "head_dim", None) and not getattr(config, "kv_lora_rank", None):
        config.head_dim = width.contents()
    return config
