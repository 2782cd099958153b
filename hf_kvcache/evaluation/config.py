"""Options of a command from a YAML file; what is given on the command line wins."""

import difflib
from pathlib import Path
from typing import Any

import typer
import yaml


def read_config(context: Any, path: Path | None) -> Path | None:
    """Take the options in the YAML file `path` as defaults of the command. Called before other options are read.

    The file is a mapping of option names (with `-` or `_`, without the leading dashes) to values; an option that may be
    repeated takes a list or a single value.

    Args:
        context: Of the command line library that typer carries; its defaults are set.
        path: Of the file; None changes nothing.

    Raises:
        typer.BadParameter: There is no such file, it does not parse, or names an option that does not exist.
    """
    if path is None:
        return None
    options = {of.name: of for of in context.command.params if of.name not in (None, "config", "help")}
    defaults: dict[str, Any] = {}
    for name, value in _parse(path).items():
        key = str(name).replace("-", "_")
        if key not in options:
            near = difflib.get_close_matches(key, [of for of in options if of], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(of for of in options if of))}"
            raise typer.BadParameter(f"{path} names an option {name!r} that does not exist; {hint}")
        repeated = bool(getattr(options[key], "multiple", False))
        defaults[key] = value if isinstance(value, list) or not repeated else [value]
    context.default_map = defaults
    return path


def _parse(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"expected a YAML file at {path}, but: {error}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter(
            f"expected options such as 'model: smollm2-135m' in {path}, but it holds a {type(values).__name__}"
        )
    return values
