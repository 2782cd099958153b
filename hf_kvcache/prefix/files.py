"""Blocks as files, in a directory or an object store, for processes that come later or run beside this one.

A file is whole or not there: in a directory it is written under a temporary name and renamed, and an object store shows
an object when it is whole. Files are not forced to the disk; after a power failure a checksum tells which are whole.
Whatever goes wrong here is a miss and is counted, never an error of the request: the text is computed again.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import os
import socket
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import StorageError
from .extent import States
from .file_format import FileBlock, decode, encode

_SUFFIX, _BAD_SUFFIX = ".safetensors", ".bad"
_DAY_SECONDS = 86_400
_HOST = socket.gethostname().replace(".", "-")

# Other processes write here too: after this share of the quota has been written, look again how much there is.
_SHARE_BEFORE_LOOKING = 1 / 16

# What file systems call the time of the last change.
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "created")


class BlockFiles:
    """Files of blocks under one address, in a folder per root. Any number of threads and processes may use it.

    Args:
        url: A directory (``file:///path``) or any address fsspec knows (``s3://bucket/prefix``).
        capacity_bytes: Bytes of files to keep at most; those used least recently go first.
        lifetime_seconds: How long a file is kept after it was last used, or in an object store written.
        options: What the file system of the address takes, for example its endpoint.

    Raises:
        StorageError: There is no such place, or a directory that other users can write to.
    """

    def __init__(
        self,
        url: str,
        capacity_bytes: int,
        lifetime_seconds: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.lifetime_seconds = lifetime_seconds
        self.held_bytes = 0
        """Bytes of the files that are known to be there."""
        self.problems: Counter[str] = Counter()
        """What went wrong: "bad_file" (set aside), "newer_format", "not_read", "not_written"."""
        self._lock = Lock()
        self._seen: set[str] = set()
        self._written_bytes = 0
        try:
            self._files, self._home = fsspec.url_to_fs(url, **(options or {}))
            self._is_local = isinstance(self._files, LocalFileSystem)
            if self._is_local:
                _open_directory(Path(self._home))
            self._look()
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"cannot keep blocks at {url}: {error}") from error

    # ------------------------------------------------------------------------------------------------- reading

    def read(self, blocks: Sequence[FileBlock]) -> list[list[States]]:
        """The states of blocks that follow each other, up to the first that is not there. They count as used."""
        read: list[list[States]] = []
        for block in blocks:
            layers = self._read(block)
            if layers is None:
                break
            read.append(layers)
        self._mark_used(blocks[: len(read)])
        return read

    def _read(self, block: FileBlock) -> list[States] | None:
        path = self._path(block)
        try:
            data = None if self._is_over(path) else self._files.cat_file(path)
        except FileNotFoundError:
            data = None
        except Exception:  # noqa: BLE001 - every file system has errors of its own
            self._count("not_read")
            return None
        if data is None:
            self._seen.discard(path)
            return None
        self._seen.add(path)
        try:
            layers = decode(data, block)
        except StorageError:
            self._count("bad_file")
            self._set_aside(path)
            return None
        if layers is None:
            self._count("newer_format")
        return layers

    def _is_over(self, path: str) -> bool:
        """Whether the lifetime of a file is over; it is then removed."""
        if self.lifetime_seconds is None:
            return False
        over: bool = self._files.modified(path).timestamp() < time.time() - self.lifetime_seconds
        if over:
            self._discard(path)
        return over

    def _set_aside(self, path: str) -> None:
        """Rename a bad file, for whoever wants to know what happened to it. It still counts against the quota."""
        if not self._attempt(self._files.mv, path, f"{path.removesuffix(_SUFFIX)}{_BAD_SUFFIX}"):
            self._attempt(self._discard, path)
        self._seen.discard(path)

    # ------------------------------------------------------------------------------------------------- writing

    def write(self, blocks: Sequence[FileBlock], states: Callable[[int], list[States]]) -> None:
        """Keep the blocks of a text, from its first one on. Those that are there already count as used.

        Args:
            blocks: What they are, in order.
            states: Gives the states of the block with this number; asked for those that are not there.
        """
        paths = [self._path(block) for block in blocks]
        missing = [number for number, path in enumerate(paths) if not self._is_there(path)]
        room = 0
        for number in missing:
            data = encode(blocks[number], states(number))
            if number == missing[0]:
                room = self._make_room(len(data) * len(missing), paths)
            if len(data) > room or not self._attempt(self._write, paths[number], data):
                break
            room -= len(data)
        self._mark_used(blocks)

    def _write(self, path: str, data: bytes) -> None:
        if self._is_local:
            _write_and_rename(Path(path), data)
        else:
            self._files.pipe_file(path, data)
        with self._lock:
            self._seen.add(path)
            self.held_bytes += len(data)
            self._written_bytes += len(data)

    def _is_there(self, path: str) -> bool:
        """Whether there is such a file; in an object store, whether there was when it was last seen."""
        return Path(path).exists() if self._is_local else path in self._seen

    def _mark_used(self, blocks: Sequence[FileBlock]) -> None:
        """Note in the files' times that they were used: each a microsecond older than the one it follows."""
        now = time.time_ns()
        for depth, block in enumerate(blocks if self._is_local else ()):
            with contextlib.suppress(OSError):  # not written, removed meanwhile, or in a place that is read-only
                os.utime(self._path(block), ns=(now - 1000 * depth, now - 1000 * depth))

    def _make_room(self, needed_bytes: int, kept: Collection[str]) -> int:
        """Remove what was used least recently, but none of the files `kept`. Returns the bytes that may be written."""
        with self._lock:
            far = self._written_bytes + needed_bytes > self.capacity_bytes * _SHARE_BEFORE_LOOKING
            if not far and self.held_bytes + needed_bytes <= self.capacity_bytes:
                return needed_bytes
        for path, size, _ in sorted(self._listed(), key=lambda file: file[2]):
            if self.held_bytes + needed_bytes <= self.capacity_bytes:
                break
            if path not in kept:
                self._remove(path, size)
        return self.capacity_bytes - self.held_bytes

    # ------------------------------------------------------------------------------------------------- removing

    def remove(self, blocks: Sequence[FileBlock]) -> None:
        """Forget blocks."""
        paths = {self._path(block) for block in blocks}
        for path, size, _ in self._listed():
            if path in paths:
                self._remove(path, size)

    def clear(self, root: bytes | None) -> None:
        """Forget all blocks, or those of one root."""
        for path, size, _ in self._listed():
            if root is None or f"/{root.hex()}/" in path:
                self._remove(path, size)

    def _remove(self, path: str, size: int) -> None:
        if self._attempt(self._discard, path):
            with self._lock:
                self.held_bytes -= size

    def _discard(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            self._files.rm_file(path)
        self._seen.discard(path)

    # ------------------------------------------------------------------------------------------------- looking

    def _path(self, block: FileBlock) -> str:
        return f"{self._home}/{block.root.hex()}/{block.key.hex()}{_SUFFIX}"

    def _look(self) -> list[tuple[str, int, float]]:
        """(path, bytes, time of the last use or, in an object store, of writing) of each file; counts them anew.

        Files whose lifetime is over are removed.
        """
        now = time.time()
        oldest = -math.inf if self.lifetime_seconds is None else now - self.lifetime_seconds
        self._files.invalidate_cache()
        listed = []
        for path, info in self._files.find(self._home, detail=True).items():
            if path.endswith((_SUFFIX, _BAD_SUFFIX)):
                changed = _changed(info, now)
                if changed < oldest:
                    self._attempt(self._discard, path)
                else:
                    listed.append((path, int(info["size"]), changed))
        with self._lock:
            self.held_bytes = sum(size for _, size, _ in listed)
            self._seen = {path for path, _, _ in listed}
            self._written_bytes = 0
        return listed

    def _listed(self) -> list[tuple[str, int, float]]:
        try:
            return self._look()
        except Exception:  # noqa: BLE001 - every file system has errors of its own
            self._count("not_read")
            return []

    def _attempt(self, act: Callable[..., None], *arguments: Any) -> bool:
        try:
            act(*arguments)
        except Exception:  # noqa: BLE001 - every file system has errors of its own
            self._count("not_written")
            return False
        return True

    def _count(self, problem: str) -> None:
        with self._lock:
            self.problems[problem] += 1


def _open_directory(home: Path) -> None:
    """Make a directory that is the user's own, and sweep what dead writers left in it."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            f"others can write to {home}, so what is found there cannot be trusted: take a directory of your own "
            "(mode 0700)"
        )
    for temporary in home.glob("*/*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if _is_left_over(temporary):
                temporary.unlink()


def _is_left_over(temporary: Path) -> bool:
    """Whether the process that writes this file is gone; of another machine's, whether the file is a day old."""
    _, host, process, _, _ = temporary.name.rsplit(".", 4)
    if host == _HOST:
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it lives, and is another user's
    return time.time() - temporary.stat().st_mtime > _DAY_SECONDS


def _write_and_rename(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # The name tells who writes, so that what a dead process left behind can be swept.
    temporary = path.with_name(f"{path.stem}.{_HOST}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _changed(info: dict[str, Any], default: float) -> float:
    """When a listed file was changed, in seconds; object stores give a date."""
    changed = next((info[name] for name in _CHANGED if info.get(name)), default)
    return changed.timestamp() if isinstance(changed, dt.datetime) else float(changed)
