"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A scratch file beside `path`, to be written: it takes that name if all goes well, and is removed if not.

    A file that is already there is replaced at once, or stays as it is.

    Raises:
        OSError: It cannot take the name; nothing of it is left.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hf_kvcache.whole_file import whole_file
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name) / "numbers.txt"
        >>> with whole_file(path) as scratch:
        ...     _ = scratch.write_text("1 2 3")
        >>> path.read_text()
        '1 2 3'
        >>> folder.cleanup()
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
