"""The recipes about memory, in small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is one of Linux")


def run(recipe: str, folder: Path, *arguments: str) -> str:
    given_back = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # see out_of_memory.py
    environment = {**os.environ, **given_back, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPES.parent)}
    command = [sys.executable, RECIPES / recipe, "--folder", folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def test_history_longer_than_memory(tmp_path: Path) -> None:
    """96 MiB of history where 72 can be had."""
    arguments = ("--tokens", "16384", "--layers", "8", "--limit", "72MiB", "--budget", "8MiB")
    output = run("longer_than_memory.py", tmp_path, *arguments)
    assert "OffloadedCache: 4 tokens" in output
    assert "PagedCache: [enforce fail" in output


def test_memory_runs_out(tmp_path: Path) -> None:
    output = run("out_of_memory.py", tmp_path, "--tokens", "16384", "--more", "5MiB")
    assert "memory ran out after 1" in output
    assert "the same 32 tokens" in output


def test_what_offloading_costs(tmp_path: Path) -> None:
    """Its figures need a machine of their own; here, that they are there and that what must be read was read."""
    output = run("offload_speed.py", tmp_path, "--tokens", "1024", "--rounds", "1", "--link", "1GB")
    assert "history 22.5 MiB, budget 5.6" in output
    read = re.findall(r"([0-9.]+) MB read", output)
    assert len(read) == 2
    assert float(read[0]) > 3 * float(read[1]) > 0
    assert "of that is the speed of offloaded" in output
