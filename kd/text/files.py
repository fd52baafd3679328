"""Files of text: which there are, in which format, and their rows."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from kd.config.data import DataConfig
from kd.errors import DataError

#: The formats that format auto knows, by the suffix of a file.
SUFFIXES = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
#: What a file raises that is not UTF-8, not gzip, cut short, or not readable.
_UNREADABLE = (UnicodeDecodeError, OSError, EOFError, zlib.error)
#: Rows that are read at once from a Parquet file.
_PARQUET_BATCH = 1000


def find_files(source: str, root: Path = Path()) -> list[Path]:
    """List the files that a path, a folder or a glob names, sorted; empty if there are none."""
    path = root / source
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(
            file for file in path.rglob("*") if find_suffix(file) in SUFFIXES and file.is_file()
        )
    # Path.glob takes no absolute pattern.
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207
    return sorted(Path(name) for name in names if Path(name).is_file())


def find_suffix(path: Path) -> str:
    """Return the suffix that shows a file's format, without a .gz after it."""
    return Path(path.name.removesuffix(".gz")).suffix


def choose_format(path: Path, config: DataConfig) -> str:
    """Return the format in which to read ``path``: the configured one, or by its suffix."""
    if config.format != "auto":
        return config.format
    try:
        return SUFFIXES[find_suffix(path)]
    except KeyError:
        raise DataError(
            f"{path}: cannot tell the format from the suffix {find_suffix(path)!r}.",
            f"Use one of {', '.join(SUFFIXES)}, or set data.format.",
        ) from None


def open_file(path: Path, config: DataConfig) -> Iterable[dict[str, Any]]:
    """Open the rows of a file; a text file is one row."""
    kind = choose_format(path, config)
    if kind == "text":  # the whole file is one document
        return [{config.text_column: _read_text(path)}]
    return (
        _read_parquet_rows(path)
        if "parquet" in (kind, find_suffix(path)[1:])
        else _read_json_rows(path)
    )


def _read_text(path: Path) -> str:
    try:
        with _open_text(path) as file:
            return file.read()
    except _UNREADABLE as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error}.", "Convert it, or set data.format."
        ) from None


def _read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that has one JSON object per line, or a JSON array of them."""
    with _open_text(path) as file:
        is_array = file.read(1) == "["
        file.seek(0)
        yield from (
            json.load(file) if is_array else (json.loads(line) for line in file if line.strip())
        )


def _read_parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    # Without a batch size the reader uses that of the first row group, and fails if it is 0.
    rows = iter(
        load_dataset(
            "parquet",
            data_files=str(path),
            split="train",
            streaming=True,
            batch_size=_PARQUET_BATCH,
        )
    )
    try:
        yield next(rows)
    except StopIteration:
        raise DataError(
            f"{path} holds no rows.", "Remove it, or check how it was written."
        ) from None
    yield from rows


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    # utf-8-sig removes a byte order mark, which is not text.
    return path.open(encoding="utf-8-sig")
