"""Where numbers were made: versions, hardware and the state of the source."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel


def environment(model: PreTrainedModel) -> dict[str, Any]:
    """Versions, hardware and git state, as plain values for the record."""
    device = model.device
    return {
        "hf_kvcache": _version("hf-kvcache"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "attention": str(model.config._attn_implementation),  # noqa: SLF001 - transformers offers no getter
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": None if (status := _git("status", "--porcelain")) is None else len(status.splitlines()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Ask git about the folder of this package; None where it is not in a git checkout, or git is missing."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(  # noqa: S603 - fixed arguments
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - the user's own git
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
