"""Find and hash the files of another tool's dataset, and read them row by row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cache.disk import hash_file
from kd.errors import DataError
from kd.text.reading.contents import name_rows, read_json_rows
from kd.text.rows import Row, require_object
from kd.text.text_files import SAVED_SPLIT, SAVED_SPLITS, list_all_files

#: Rows of a file of Parquet or Arrow in memory at once.
BATCH_ROWS = 16
#: Suffix of the files that ``save_to_disk`` of ``datasets`` writes, and the beginning of their
#: names; ``datasets`` keeps others beside them that it can make again.
ARROW, ARROW_NAME = ".arrow", "data-"
#: The beginning of the names of files with held-out sequences, here and in ``datasets``.
HELD_OUT = "validation"


def find_foreign_files(
    paths: Sequence[Path], suffixes: tuple[str, ...]
) -> tuple[list[Path], list[Path]]:
    """Return the training files and the held-out files at ``paths``.

    Folders are searched. Held-out files are named ``validation*``; of a data set that
    ``save_to_disk`` wrote, their folder is, which is named after its split. Raises ``DataError``
    for a path that does not exist and for a folder without files of ``suffixes``.
    """
    files: list[Path] = []
    for path in paths:
        found = [path]
        if not path.is_file():
            found = [each for each in list_all_files(path) if _is_wanted(each, suffixes)]
        if not found:
            what = "holds no file" if path.is_dir() else "does not exist, so it is not a file"
            detail = f"{path} {what} that ends in {' or '.join(suffixes)}."
            raise DataError(detail, "Check the path and the format.")
        files += found
    splits = {file: file.parent.name if file.suffix == ARROW else file.name for file in files}
    held_out = [file for file in files if splits[file].startswith(HELD_OUT)]
    return [file for file in files if file not in held_out], held_out


def _is_wanted(path: Path, suffixes: tuple[str, ...]) -> bool:
    if path.name in (*SAVED_SPLIT, SAVED_SPLITS):
        return False
    if path.suffix == ARROW and not path.name.startswith(ARROW_NAME):
        return False
    return path.is_file() and path.name.removesuffix(".gz").endswith(suffixes)


def hash_content(files: Sequence[Path]) -> str:
    """Hash the contents of ``files``, in order; their names do not matter."""
    return hashlib.sha256("".join(hash_file(file) for file in files).encode()).hexdigest()


def read_named_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the place and the content of each row of a file of JSON, which may be compressed."""
    rows = name_rows(read_json_rows(path), str(path), "Write one JSON object per line, as UTF-8.")
    for number, row in enumerate(rows, 1):
        place = f"{path}: row {number}"
        yield place, require_object(row, place)


def read_table_batches(
    path: Path, needed: Sequence[str] = (), optional: Sequence[str] = ()
) -> Iterator[tuple[int, Any]]:
    """Yield the number of the first row and a ``pyarrow.RecordBatch``, for a few rows at a time.

    ``path`` is a file of Parquet or Arrow. Reads only the named columns, or all if none is named.
    Raises ``DataError`` for a file that cannot be read, and for one that lacks a needed column.
    """
    import pyarrow

    open_file = _open_arrow if path.suffix == ARROW else _open_parquet
    try:
        known, read = open_file(path)
        if missing := [name for name in needed if name not in known]:
            detail = f"{path} has no column {', '.join(missing)}; its columns: {', '.join(known)}."
            raise DataError(detail, "Check the format.")
        first = 1
        for batch in read([name for name in (*needed, *optional) if name in known] or known):
            yield first, batch
            first += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise _make_table_error(path, error) from error


#: The names of a file's columns, and what reads some of them.
_Opened = tuple[list[str], Callable[[list[str]], Iterator[Any]]]


def _open_parquet(path: Path) -> _Opened:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    return file.schema_arrow.names, lambda columns: file.iter_batches(BATCH_ROWS, columns=columns)


def _open_arrow(path: Path) -> _Opened:
    import pyarrow

    reader = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
    return reader.schema.names, lambda columns: (
        batch.slice(first, BATCH_ROWS).select(columns)
        for batch in reader
        for first in range(0, len(batch), BATCH_ROWS)
    )


def read_parquet_metadata(path: Path) -> tuple[dict[bytes, bytes], list[str]]:
    """Return the keys and values of a Parquet file's metadata, and the names of its columns.

    Raises ``DataError`` for a file that is not Parquet.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _make_table_error(path, error) from error
    return dict(found.metadata or {}), found.schema.to_arrow_schema().names


def _make_table_error(path: Path, error: Exception) -> DataError:
    detail = f"{path} cannot be read: {type(error).__name__}: {error}"
    return DataError(detail, "Check that it is a complete file of Parquet, or of Arrow.")


def read_dict_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file of JSON Lines, Parquet or Arrow as Python values.

    For formats with deeply nested lists.
    """
    if not path.name.endswith((".parquet", ARROW)):
        yield from read_named_rows(path)
        return
    for first, batch in read_table_batches(path):
        for number, row in enumerate(batch.to_pylist(), first):
            yield f"{path}: row {number}", row
