"""Finished pieces of a run on disk, so that an interrupted one goes on where it stopped."""

import hashlib
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hf_kvcache.whole_file import whole_file

FOLDER = "unfinished"


class Journal:
    """Keeps pieces by name, for one request only.

    Args:
        folder: Where results are written; pieces lie in a folder of their own below it. None keeps nothing.
        request: Everything that decides about the pieces, as plain values: another request finds none of them.
    """

    def __init__(self, folder: Path | None, request: dict[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.folder = None if folder is None else folder / FOLDER / key

    def load(self, name: str) -> bytes | None:
        """A piece that was saved; None if there is none."""
        path = None if self.folder is None else self.folder / name
        return path.read_bytes() if path is not None and path.is_file() else None

    def save(self, name: str, piece: bytes) -> None:
        """Save a piece, completely or not at all. Where that fails (a full disk), warn and keep nothing more."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.folder / name) as scratch:
                scratch.write_bytes(piece)
        except OSError as error:
            message = (
                f"finished pieces are not kept any more: {error}. The run goes on; interrupted, it starts anew here"
            )
            warnings.warn(message, stacklevel=2)
            self.folder = None

    def close(self) -> None:
        """The run is complete: forget its pieces."""
        if self.folder is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent.is_dir() and not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()


def pack(arrays: dict[str, np.ndarray]) -> bytes:
    """Arrays as bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def unpack(piece: bytes) -> dict[str, np.ndarray]:
    """What `pack` made bytes of."""
    with np.load(io.BytesIO(piece), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}
