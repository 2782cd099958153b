"""Obtain text to evaluate on: a local file, the prose of the Python standard library, or a hub data set."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import InputError

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Iterable[Row]

ALIASES = {"wikitext-2": "Salesforce/wikitext:wikitext-2-raw-v1:test"}
_OFFLINE = "Without the hub, pass file:PATH (.txt, .jsonl or .parquet), or stdlib, which needs no file at all."


@dataclass(frozen=True)
class Documents:
    """The documents (strings, none blank) of one source, read lazily and anew by every iteration."""

    name: str
    read: Callable[[], Iterator[str]]

    def __iter__(self) -> Iterator[str]:
        """Start reading from the first document."""
        return (document for document in self.read() if document.strip())


def load_text(spec: str, column: str = "text") -> Documents:
    """Open a source of text. It reads no further than the first document that is not blank.

    `spec` is one of
    - `file:PATH`: `.jsonl` (an object per line) and `.parquet` have one document in `column` of each row;
      any other file is UTF-8 text, one document, or one per article where it has WikiText headings;
    - `stdlib`: the language reference that ships with Python (`pydoc_data.topics`), one document per topic;
    - `wikitext-2`, or a hub data set `ID[:CONFIG[:SPLIT]]`, streamed (default split: `test`).

    Raises:
        InputError: no such file or data set, no such column, or no text in it.
    """
    documents = Documents(spec, _reader(ALIASES.get(spec, spec), column))
    if next(iter(documents), None) is None:
        message = f"expected text in {spec!r}, but it has none: every document is blank. Pass another source."
        raise InputError(message)
    return documents


def split_articles(lines: Iterable[str]) -> Iterator[str]:
    """Join lines into documents: a new one at every WikiText article heading, ` = Title = `."""
    document: list[str] = []
    for line in lines:
        if document and _opens_article(line):
            yield "".join(document)
            document = []
        document.append(line)
    yield "".join(document)


def _opens_article(line: str) -> bool:
    """Tell ` = Title = ` from a section, ` = = Title = = `, and from a line of text."""
    line = line.rstrip("\n")
    if not (line.startswith(" = ") and line.endswith(" = ") and len(line) > 6) or line.startswith(" = = "):
        return False
    # A title begins with a capital: " = 1 henry and capacitance C = " is a piece of a formula.
    first_letter = next(filter(str.isalpha, line), "")
    return not first_letter.islower()


def _reader(spec: str, column: str) -> Callable[[], Iterator[str]]:
    if spec == "stdlib":
        return _read_stdlib
    if not spec.startswith("file:"):
        return partial(_read_hub, _open_hub(spec), spec, column)
    path = Path(spec.removeprefix("file:")).expanduser()
    if not path.is_file():
        message = f"expected a file at {path}, but there is none. Give its path after 'file:', or pass stdlib."
        raise InputError(message)
    if path.suffix == ".jsonl":
        return partial(_read_jsonl, path, column)
    if path.suffix == ".parquet":
        return partial(_read_parquet, path, column)
    return partial(_read_plain, path)


def _read_stdlib() -> Iterator[str]:
    from pydoc_data.topics import topics

    for title in sorted(topics):
        yield topics[title]


def _read_plain(path: Path) -> Iterator[str]:
    return split_articles(_lines(path))


def _read_jsonl(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            message = f"expected one JSON object per line, but {where} does not parse: {error}. Correct the line."
            raise InputError(message) from error
        if not isinstance(row, dict):
            message = f"expected one JSON object per line, but {where} is a {type(row).__name__}. Correct the line."
            raise InputError(message)
        yield _text(row, column, where)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError as error:
        message = f"expected UTF-8 text in {path}, but: {error}. Save it as UTF-8, or pass .parquet."
        raise InputError(message) from error


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pa.ArrowInvalid as error:
        message = f"expected a Parquet file at {path}, but: {error} Write it again, or pass .txt or .jsonl."
        raise InputError(message) from error
    with file:
        # Reading only the wanted column; when it is missing, whole rows name those that exist.
        wanted = [column] if column in file.schema_arrow.names else None
        for batch in file.iter_batches(columns=wanted):
            for row in batch.to_pylist():
                yield _text(row, column, str(path))


def _open_hub(spec: str) -> Rows:
    import datasets

    parts = spec.split(":")
    if len(parts) > 3 or not all(parts):
        message = f"expected a data set as ID, ID:CONFIG or ID:CONFIG:SPLIT, but got {spec!r}. {_OFFLINE}"
        raise InputError(message)
    name, config, split = [*parts, None, None][:3]
    try:
        rows: Rows = datasets.load_dataset(name, config, split=split or "test", streaming=True)
    except (OSError, ValueError) as error:
        message = f"expected {spec!r} to be a data set on the hub, but: {error}. {_OFFLINE}"
        raise InputError(message) from error
    return rows


def _read_hub(rows: Rows, spec: str, column: str) -> Iterator[str]:
    texts = (_text(row, column, spec) for row in rows)
    # On the hub a row of WikiText is a line.
    is_wikitext = spec.partition(":")[0].endswith("wikitext")
    return split_articles(texts) if is_wikitext else texts


def _text(row: Row, column: str, where: str) -> str:
    if column not in row:
        message = f"expected a column {column!r} in {where}, but it has {sorted(row)}. Name one of these."
        raise InputError(message)
    text = row[column]
    if not isinstance(text, str):
        message = f"expected text in column {column!r} of {where}, but it holds a {type(text).__name__}."
        raise InputError(message)
    return text
