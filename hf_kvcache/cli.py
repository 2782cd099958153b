"""The command `hf-kvcache`: one line a command here, and each command in a module of its own.

A command's module is imported when the command is run, so that help and mistakes answer quickly.
"""

import sys
from importlib import import_module
from typing import Annotated, NoReturn

from .errors import KVCacheError

MISSING_EXTRA = (
    "hf-kvcache needs {module}, which is not installed. Its commands need: pip install 'hf-kvcache[{extra}]'"
)

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(MISSING_EXTRA.format(module=missing.name, extra="eval")) from None

EXTRAS = dict.fromkeys(("accelerate", "datasets", "gguf", "matplotlib", "psutil", "rich", "tqdm"), "eval") | {
    "lm_eval": "lm-eval"
}
"""Top-level modules that a command may import, and the extra that has each."""

app = typer.Typer(
    name="hf-kvcache",
    help="Caches for Hugging Face Transformers: plan one, see it at work, prove it, measure it.",
    no_args_is_help=True,
    add_completion=False,
)


def add(name: str, function: str, summary: str, *, foreign: bool = False) -> None:
    """Add a command.

    Args:
        name: What the user types.
        function: Where the command is, `module:function`; imported when it is run. Its signature is the options.
        summary: Its line in the help.
        foreign: Whether the options are those of another program: the function gets them as a list, unread.
    """

    def call(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        run(function, name, arguments or [], foreign=foreign)

    # The command itself parses its options, also --help.
    app.command(name, help=summary, add_help_option=False, context_settings={"ignore_unknown_options": True})(call)


def run(function: str, name: str, arguments: list[str], *, foreign: bool = False) -> None:
    """Import `module:function` and run it as the command `name`; errors that are the user's to mend end it."""
    module, _, attribute = function.partition(":")
    try:
        found = getattr(import_module(module), attribute)
        if foreign:
            code = found(arguments)
        else:
            single = typer.Typer(add_completion=False)
            single.command()(found)
            command = typer.main.get_command(single)
            code = command.main(arguments, prog_name=f"hf-kvcache {name}", standalone_mode=False)
    except KVCacheError as error:
        _stop(f"{type(error).__name__}: {error}")
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _stop(MISSING_EXTRA.format(module=error.name, extra=extra))
    else:
        if code:
            raise typer.Exit(code)


def _stop(message: str) -> NoReturn:
    """End with one message and exit code 1."""
    typer.echo(message, err=True)
    raise typer.Exit(1)


add("demo", "hf_kvcache.demo:demo_command", "Show PagedCache at work on a real model: exact, lean and fast.")
add(
    "eval",
    "hf_kvcache.evaluation.command:evaluate_command",
    "Say whether caches are exact, and how far they are if not.",
)
add(
    "attribute",
    "hf_kvcache.evaluation.attribution_command:attribute_command",
    "Say which part of an approximate cache costs how much.",
)
add("bench", "hf_kvcache.bench.command:bench_command", "Time caches on your model, and measure the bytes they hold.")
add(
    "plan",
    "hf_kvcache.planner.command:plan_command",
    "Say what a model and its cache need, and what fits, before it is loaded.",
)
add(
    "lm-eval",
    "hf_kvcache.evaluation.harness:harness_command",
    "Run tasks of the LM Evaluation Harness through a cache.",
    foreign=True,
)

if __name__ == "__main__":
    sys.exit(app())
