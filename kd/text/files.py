"""Files of text: which there are, in which format, and their rows."""

from __future__ import annotations

import glob
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from kd.buckets.inputs import download_files, is_stored_name, list_stored
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.rows import drop_absent_fields

#: Files of one split that ``save_to_disk`` of ``datasets`` wrote, and the one above several splits.
SAVED_SPLIT = ("state.json", "dataset_info.json")
SAVED_SPLITS = "dataset_dict.json"
#: The formats that format auto knows, by the suffix of a file.
SUFFIXES = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
#: The suffixes of compressed files; each stands after that of the format.
PACKED = (".gz", ".zst")
#: What a file raises that is not gzip or zstd, cut short, or not readable.
_BROKEN = (OSError, EOFError, zlib.error)
#: Rows that are read at once from a Parquet file.
_PARQUET_BATCH = 1000
#: Characters that are read at once from a text file.
_CHUNK = 2**18


def _ignore(count: int) -> None:
    """Drop the count: nobody shows the progress."""


@dataclass(frozen=True)
class TextFile:
    """A text file. It is one document, and read in parts, because it may be large.

    ``note`` is called with the number of bytes of the file that were read since the last call.
    """

    path: Path
    note: Callable[[int], None] = _ignore

    def read_chunks(self) -> Iterator[str]:
        """Yield the text in order. Raises ``DataError`` where it cannot be read as UTF-8."""
        try:
            with self.path.open("rb") as raw, _decode(self.path, raw) as file:
                noted = 0
                while chunk := file.read(_CHUNK):
                    yield chunk
                    self.note(raw.tell() - noted)
                    noted = raw.tell()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not UTF-8 text: {error}.", "Convert it, or set data.format."
            ) from None
        except _BROKEN as error:
            raise DataError(
                f"{self.path} cannot be read: {error}.",
                "Check that the file is whole, and compressed as its suffix says.",
            ) from None


def find_files(source: str, root: Path = Path()) -> list[Path]:
    """List the files that a path, a folder or a glob names, sorted; empty if there are none.

    A saved dataset has none: its files cannot be read one by one. Those of a bucket are downloaded.
    """
    if is_stored_name(source):
        names = list_stored_texts(source)
        folder = download_files(source, names)
        return [folder / name for name in names]
    path = root / source
    if is_saved_dataset(path):
        return []
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(
            file for file in path.rglob("*") if find_suffix(file) in SUFFIXES and file.is_file()
        )
    # Path.glob takes no absolute pattern.
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207
    return sorted(Path(name) for name in names if Path(name).is_file())


def list_stored_texts(url: str) -> list[str]:
    """List the files of text at the URL of a bucket: that object, or those below it, sorted."""
    found = list_stored(url).objects
    if len(found) == 1 and (name := next(iter(found))) == url.rstrip("/").rpartition("/")[2]:
        return [name]
    return sorted(name for name in found if find_suffix(Path(name)) in SUFFIXES)


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote ``folder``: one split, or several."""
    one = [folder / name for name in SAVED_SPLIT]
    return (folder / SAVED_SPLITS).is_file() or all(map(Path.is_file, one))


def find_suffix(path: Path) -> str:
    """Return the suffix that shows a file's format, without that of its compression after it."""
    return Path(path.stem if path.suffix in PACKED else path.name).suffix


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


def open_rows(path: Path, config: DataConfig) -> Iterable[dict[str, Any]]:
    """Open the rows of a file that is not plain text."""
    kinds = (choose_format(path, config), find_suffix(path)[1:])
    if "parquet" in kinds:
        return map(drop_absent_fields, _read_parquet_rows(path))
    return _read_json_rows(path)


def _read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that has one JSON object per line, or a JSON array of them."""
    with path.open("rb") as raw, _decode(path, raw) as file:
        # A compressed file cannot be read from its beginning again.
        first = file.read(1)
        while first.isspace():
            first = file.read(1)
        if first == "[":
            yield from json.loads(first + file.read())
            return
        lines = itertools.chain([first + file.readline()], file)
        yield from (json.loads(line) for line in lines if line.strip())


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


def _decode(path: Path, raw: BinaryIO) -> TextIO:
    """Return the text of ``raw``, the open file ``path``, which may be compressed."""
    # utf-8-sig removes a byte order mark, which is not text.
    return io.TextIOWrapper(unpack(path, raw), encoding="utf-8-sig")


def unpack(path: Path, raw: BinaryIO) -> Any:
    """Return the bytes of ``raw``, the open file ``path``, as a file that decompresses them."""
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".zst":
        return _open_zstd(path, raw)
    return raw


def _open_zstd(path: Path, raw: BinaryIO) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{path} is compressed with zstd, which needs pyarrow.",
            "Install it: pip install 'potstill[worker]'.",
        ) from None
    return pyarrow.CompressedInputStream(raw, "zstd")
