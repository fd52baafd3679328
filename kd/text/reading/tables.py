"""Read the rows of a Parquet file: of plain text only the column that holds it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kd.addresses import find_packing
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.rows import COLUMNS, Row, drop_absent_fields

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import ParquetFile

#: Rows that are read at once.
_BATCH = 1000


def read_parquet_rows(path: Path, config: DataConfig) -> Generator[Row, None, None]:
    """Yield the rows of ``path``; raises ``DataError`` if it holds none."""
    with _open(path) as file:
        if file.metadata.num_rows == 0:
            raise DataError(f"{path} holds no rows.", "Remove it, or check how it was written.")
        columns = _choose_columns(path, file.schema_arrow.names, config)
        decode = _make_decoder(file.schema_arrow)
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from (drop_absent_fields(decode(row)) for row in batch.to_pylist())


def count_null_texts(path: Path, config: DataConfig) -> tuple[int, int]:
    """Count the rows of ``path`` without a text, as its own statistics tell, and all its rows."""
    with _open(path) as file:
        about = file.metadata
        nulls = 0
        for group in map(about.row_group, range(about.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                counts = column.statistics
                if column.path_in_schema == config.text_column and counts is not None:
                    nulls += counts.null_count or 0
        return nulls, about.num_rows


@contextmanager
def _open(path: Path) -> Iterator[ParquetFile]:
    from pyarrow.parquet import ParquetFile

    if packing := find_packing(path):
        detail = f"{path} is named as a Parquet file in {packing}, which is not read."
        raise DataError(detail, "Decompress it: Parquet compresses what it holds itself.")
    # An open file, because a name would be read as a pattern or a URL.
    with path.open("rb") as raw, ParquetFile(raw) as file:
        yield file


def _choose_columns(path: Path, names: list[str], config: DataConfig) -> list[str] | None:
    """Choose the columns to decode; None = all: a chat has several, and an error names them."""
    needed = COLUMNS.get(config.format, (config.text_column,))
    for name in needed:
        if names.count(name) > 1:
            detail = f"{path} has {names.count(name)} columns of the name {name!r}."
            raise DataError(detail, "Rename all but the one that is to be read.")
    return [config.text_column] if needed == (config.text_column,) and needed[0] in names else None


def _make_decoder(schema: Schema) -> Callable[[Row], Row]:
    """Return what decodes the cells that ``datasets`` stores as JSON."""
    stored = [each for each in schema if "arrow.json" in str(each.type)]
    if not stored:
        return lambda row: row
    import pyarrow
    from datasets import Features

    features = Features.from_arrow_schema(pyarrow.schema(stored))

    def decode(row: Row) -> Row:
        found = {name: row[name] for name in features if name in row}
        decoded: Row = features.decode_example(found)
        return row | decoded

    return decode
