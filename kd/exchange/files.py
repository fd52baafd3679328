"""The files of a foreign dataset: found, hashed, and read row by row."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cache.disk import file_sha256
from kd.errors import DataError

#: Rows of a Parquet file that are held at once.
BATCH_ROWS = 16
#: What the files of held-out sequences are called, here and in ``datasets``.
HELD_OUT = "validation"


def find(paths: Sequence[Path], suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """The files that ``paths`` name, folders searched: those to train on, and those called ``validation*``.

    Raises ``DataError`` for a path that is not there or a folder without such files.
    """
    files: list[Path] = []
    for path in paths:
        found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if _is_wanted(each, suffixes))
        if not found:
            what = "holds no file" if path.is_dir() else "does not exist, so it is no file"
            raise DataError(f"{path} {what} that ends in {' or '.join(suffixes)}.", "Check the path and the format.")
        files += found
    held_out = [file for file in files if file.name.startswith(HELD_OUT)]
    return [file for file in files if file not in held_out], held_out


def _is_wanted(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.is_file() and path.name.removesuffix(".gz").endswith(suffixes)


def content_sha256(files: Sequence[Path]) -> str:
    """One hash over the content of ``files``, in order; their names do not count."""
    return hashlib.sha256("".join(file_sha256(file) for file in files).encode()).hexdigest()


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row stands, and the row, of a file with one JSON object a line; .gz is looked through."""
    number = 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig") as file
        ):
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}: row {number}", _object(json.loads(line), path, number)
    except (ValueError, OSError, EOFError) as error:  # JSON, UTF-8, gzip
        detail = f"{path}: row {number} cannot be read: {type(error).__name__}: {error}"
        raise DataError(detail, "Give one JSON object a line, as UTF-8.") from error


def _object(value: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{path}: row {number} is not a JSON object: {str(value)[:40]}.", "Give one object a line.")
    return value


def parquet_batches(path: Path, needed: Sequence[str] = (), optional: Sequence[str] = ()) -> Iterator[tuple[int, Any]]:
    """The number of the first row, and a ``pyarrow.RecordBatch`` of a few rows, with the named columns (none = all).

    Raises ``DataError`` for a file that is not Parquet or lacks a needed column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        known = file.schema_arrow.names
        if missing := [name for name in needed if name not in known]:
            detail = f"{path} has no column {', '.join(missing)}; its columns: {', '.join(known)}."
            raise DataError(detail, "Check the format that is named.")
        first = 1
        columns = [name for name in (*needed, *optional) if name in known] or None
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            yield first, batch
            first += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {type(error).__name__}: {error}", "Is it a whole Parquet file?"
        ) from error


def dict_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSON Lines or Parquet file as plain Python values; for formats that nest too deep for arrays."""
    if not path.name.endswith(".parquet"):
        yield from json_rows(path)
        return
    for first, batch in parquet_batches(path):
        for number, row in enumerate(batch.to_pylist(), first):
            yield f"{path}: row {number}", row
