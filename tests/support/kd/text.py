"""Text in each format that can be read."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kd.config.data import DataConfig, DatasetSpec
from kd.errors import DataError
from kd.text.chat_tokens import EncodedChat, encode_chats
from kd.text.packing import Document
from kd.text.reading.contents import TextFile
from kd.text.reading.notes import TextNotes
from kd.text.sources import FoundDocument, read_documents
from kd.text.tokens import DocumentEncoder

TEXTS = [
    "It was a dark night.",
    "“Straße” — naïve?\n\nYes.\u2028So.",
    "Third document, the last.\n",
]
ROWS = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]


def config(**changes) -> DataConfig:
    """Return a data section with sequences of 8 tokens."""
    return DataConfig(**{"train": "unused", "sequence_length": 8} | changes)


def documents(source: str | Path | DatasetSpec, **changes) -> list:
    """Read ``source``; return the contents of its documents."""
    source = str(source) if isinstance(source, Path) else source
    return [
        "".join(content.read_chunks()) if isinstance(content, TextFile) else content
        for _, content in read_documents((source,), "train", config(**changes))
    ]


def write(folder: Path, name: str, rows=ROWS) -> Path:
    """Write ``rows`` in the format that the suffix of ``name`` names; return the path."""
    path = folder / name
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith(".zst"):
        path.write_bytes(pa.compress(lines.encode(), codec="zstd", asbytes=True))
    else:
        path.write_text(json.dumps(rows) if name.endswith(".json") else lines, encoding="utf-8")
    return path


def rows(contents: list) -> list[FoundDocument]:
    """Pair contents with their places, as a reader returns them for a file ``a``."""
    return [
        FoundDocument(f"a: row {number}", content) for number, content in enumerate(contents, 1)
    ]


def encode_documents(
    documents: Iterable[FoundDocument],
    tokenizer: Any,
    config: DataConfig,
    *options: Any,
    **more: Any,
) -> Iterator[Document]:
    """Tokenize ``documents``; ``options`` are those of a ``DocumentEncoder``."""
    given = {name: value for name, value in more.items() if value is not None}
    return DocumentEncoder(tokenizer, config, *options, **given).encode(documents)


def encode_chat(chat: Any, where: str, tokenizer: Any, assistant_only: bool) -> list[EncodedChat]:
    """Return the texts of one chat."""
    return encode_chats([FoundDocument(where, chat)], tokenizer, assistant_only, TextNotes())[0]


def cut(ids: list, offset: int, length: int) -> list[list]:
    """Place ``ids`` from ``offset`` on and cut them at the end of each sequence.

    A reference: obvious rather than fast.
    """
    found: list[list] = []
    for place, token in enumerate(ids, offset):
        if place == offset or place % length == 0:
            found.append([])
        found[-1].append(token)
    return found


def refusal(path: Path | str, **changes) -> str:
    """Check that ``path`` cannot be read; return the message."""
    with pytest.raises(DataError) as caught:
        documents(path, **changes)
    assert caught.value.remedy
    return str(caught.value)
