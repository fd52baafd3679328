"""Open a file of text, which may be compressed: as one text, or row by row."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from kd.addresses import PACKED, find_packing, find_suffix
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.files import LFS_REMEDY, is_lfs_pointer
from kd.text.reading.tables import read_parquet_rows
from kd.text.rows import Row
from kd.text.text_files import choose_format, refuse_unreadable

#: What a file raises that is not UTF-8, not gzip or zstd, cut short, or not readable.
BROKEN = (UnicodeDecodeError, OSError, EOFError, zlib.error)
#: Characters that are read at once from a text file.
_CHUNK = 2**18
_SPACE = re.compile(r"[ \t\n\r]*")
#: Characters of the longest name of a value in JSON, and of an escape.
_LONGEST_LITERAL = 16
#: A text holds fewer zero bytes than one in so many characters.
_NUL_SHARE = 100
#: How files of other kinds begin, and what each is called.
_KINDS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"PK\x03\x04": "a zip archive",
    b"%PDF": "PDF",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def ignore_count(count: int) -> None:
    """Drop the count: nobody shows the progress."""


@dataclass(frozen=True)
class TextFile:
    """A text file. It is read in parts, because it may be large.

    ``note`` is called with the number of bytes of the file that were read since the last call.
    """

    path: Path
    note: Callable[[int], None] = ignore_count

    def read_chunks(self) -> Iterator[str]:
        """Yield the text in order. Raises ``DataError`` if it cannot be read as UTF-8."""
        require_content(self.path)
        try:
            with self.path.open("rb") as raw, _decode(self.path, raw) as file:
                noted = 0
                while chunk := file.read(_CHUNK):
                    if chunk.count("\0") * _NUL_SHARE > len(chunk):
                        detail = f"{self.path} is not UTF-8 text: it holds many zero bytes."
                        raise DataError(detail, "Convert it, or remove it.")
                    yield chunk
                    self.note(raw.tell() - noted)
                    noted = raw.tell()
        except BROKEN as error:
            raise explain_broken(self.path, str(self.path), error) from None


def require_content(path: Path) -> None:
    """Raise ``DataError`` if ``path`` holds not its content, but a pointer of Git LFS to it."""
    if is_lfs_pointer(path):
        raise DataError(f"{path} is a pointer of Git LFS, and not the file itself.", LFS_REMEDY)


def explain_broken(path: Path, place: str, error: Exception) -> DataError:
    """Return the error for a file that is not UTF-8, or cannot be decompressed, at ``place``."""
    if isinstance(error, PermissionError):
        return refuse_unreadable(error)
    promised = PACKED.get(find_packing(path))
    begin = b""
    if path.is_file():
        with path.open("rb") as file:
            begin = file.read(max(map(len, _KINDS)))
    kind = next((name for mark, name in _KINDS.items() if begin.startswith(mark)), "")
    why = ""
    remedy = "Check that the file is whole."
    if promised and kind != promised:
        why = f"it is not {promised}, although its name ends in {path.suffix}: "
        remedy = f"Name it after what it is{kind and f', {kind}'}, or compress it."
    elif isinstance(error, EOFError) or "runcated" in str(error):
        why = "it is cut short: "
        remedy = "Copy or download it again: its end is missing."
    elif "too much memory" in str(error):
        why = "its zstd window is larger than 128 MiB: "
        remedy = "Compress it again with a smaller one: zstd --long=27, or without --long."
    elif isinstance(error, UnicodeDecodeError):
        why = "it is not UTF-8 text: "
        remedy = "Convert it, for example with iconv -f latin1 -t utf-8, or set data.format."
        if kind:
            remedy = f"It begins as {kind} does: convert it, or give it the suffix of what it is."
    return DataError(f"{place} cannot be read: {why}{error}.", remedy)


def name_rows(rows: Iterable[Row], where: str, remedy: str) -> Iterator[Row]:
    """Pass ``rows`` on; raise ``DataError`` that names the first which cannot be read."""
    iterator = iter(rows)
    for number in itertools.count(1):
        try:
            row = next(iterator)
        except StopIteration:
            return
        except DataError:
            raise
        except BROKEN as error:
            raise explain_broken(Path(where), f"{where}: row {number}", error) from error
        except Exception as error:  # json and pyarrow raise classes of their own
            detail = f"{where}: row {number} cannot be read: {type(error).__name__}: {error}"
            raise DataError(detail, remedy) from error
        yield row


def open_rows(path: Path, config: DataConfig) -> Generator[Row, None, None]:
    """Open the rows of a file that is not plain text. Closing the generator closes the file."""
    require_content(path)
    if "parquet" in (choose_format(path, config), find_suffix(path)[1:]):
        return read_parquet_rows(path, config)
    return read_json_rows(path)


def read_json_rows(path: Path) -> Generator[Row, None, None]:
    """Yield the rows of a file that has one JSON object per line, or a JSON array of them."""
    with path.open("rb") as raw, _decode(path, raw) as file:
        # A compressed file cannot be read from its beginning again.
        first = file.read(1)
        while first.isspace():
            first = file.read(1)
        if first == "[":
            yield from _read_array(file)
            return
        lines = itertools.chain([first + file.readline()], file)
        yield from (json.loads(line) for line in lines if line.strip())


def _read_array(file: TextIO) -> Iterator[Any]:
    """Yield the items of the JSON array in ``file``, whose [ has been read; few are in memory."""
    decode = json.JSONDecoder().raw_decode
    held = ""
    begun = False
    while True:
        part = file.read(max(_CHUNK, len(held)))  # a long item is tried a few times only
        held += part
        place = 0
        while True:
            begin = _skip_space(held, place)
            if held.startswith("]", begin):
                rest = held[begin + 1 :] or file.read(_CHUNK)
                while rest.isspace():
                    rest = file.read(_CHUNK)
                if rest:
                    raise json.JSONDecodeError("Extra data after the array", rest, 0)
                return
            if begun and held.startswith(",", begin):
                begin = _skip_space(held, begin + 1)
            elif begun and begin < len(held):
                raise json.JSONDecodeError("Expecting ',' between two rows", held, begin)
            try:
                row, place = decode(held, begin)
            except json.JSONDecodeError as error:
                if not part or not _may_be_cut(error, held):
                    raise
                held = held[place:]
                break
            begun = True
            yield row


def _skip_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _may_be_cut(error: json.JSONDecodeError, held: str) -> bool:
    """Return whether an item is no JSON only because the text ``held`` ends within it."""
    return error.msg.startswith("Unterminated") or error.pos > len(held) - _LONGEST_LITERAL


def _decode(path: Path, raw: BinaryIO) -> TextIO:
    """Return the text of ``raw``, the open file ``path``, which may be compressed."""
    # utf-8-sig removes a byte order mark, which is not text.
    return io.TextIOWrapper(unpack(path, raw), encoding="utf-8-sig")


def unpack(path: Path, raw: BinaryIO) -> Any:
    """Return the bytes of ``raw``, the open file ``path``, as a file that decompresses them."""
    packing = find_packing(path)
    if packing == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if packing == ".zst":
        try:
            import pyarrow
        except ImportError:
            detail = f"{path} is compressed with zstd, which needs pyarrow."
            raise DataError(detail, "Install it: pip install 'potstill[worker]'.") from None
        return pyarrow.CompressedInputStream(raw, "zstd")
    return raw
